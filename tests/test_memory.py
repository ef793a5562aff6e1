"""What a peer takes: no more than its span, its KV and its journal, at any moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.state import StateDir
from tests.processes import ROOT, environment

SLACK = 1.15
FIXED_BYTES = 64 << 20
SPAN, CONTEXT, CHUNK = (10, 20), 1024, 256

# Runs in a process of its own, whose anonymous memory is watched: a real peer from start to a full context.
SCRIPT = """
import asyncio, json, sys, threading, time
from pathlib import Path
import torch
from peer.engine import Job
from peer.service import PeerOptions, PeerService
from routing.spans import Span
from swarm.state import StateDir
import peer.source, peer.weights, peer.server, transformers.models.llama.modeling_llama

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.over = 0, threading.Event()
    def run(self):
        while not self.over.wait(0.002):
            self.bytes = max(self.bytes, anonymous())

async def main(start, stop, context, chunk, home):
    torch.set_num_threads(1)
    torch.nn.Linear(64, 64)(torch.zeros(chunk, 64))
    before, peak = anonymous(), Peak()
    peak.start()
    options = PeerOptions(
        "smollm2", host="127.0.0.1", port=0, device="cpu", threads=1, layers=f"{start}:{stop}", memory="2GB",
        max_sessions=1, context=context,
    )
    service = PeerService(options, state=StateDir.open(Path(home)))
    await service.start()
    cache = service.pool.reserve("session", context)
    journal = []
    for position in range(0, context, chunk):
        rows = torch.randn(chunk, service.plan.model.width)
        journal.append((await service.engine.submit(Job(cache, Span(start, stop), position, hidden=rows))).output)
    peak.over.set()
    peak.join()
    weights = sum(p.numel() * p.element_size() for p in service.engine.model.parameters())
    print(json.dumps({
        "taken": max(peak.bytes, anonymous()) - before, "weights": weights, "kv": cache.nbytes,
        "journal": sum(rows.nbytes for rows in journal),
    }))
    await service.close()

asyncio.run(main(*map(int, sys.argv[1:5]), sys.argv[5]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_a_middle_span_takes_little_more_than_its_weights_kv_and_journal(smollm2_file: Path, tmp_path: Path) -> None:
    arguments = [*map(str, (*SPAN, CONTEXT, CHUNK)), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env=environment(tmp_path, StateDir.open().cache),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    layers, width, kv_width = SPAN[1] - SPAN[0], 576, 3 * 64
    # by hand, from the config: q and o, k and v, three MLP matrices of 1,536, two norms; in float32
    by_hand = 4 * layers * (2 * width * width + 2 * width * kv_width + 3 * width * 1536 + 2 * width)
    assert figures["weights"] == by_hand
    assert figures["kv"] == 4 * layers * 2 * kv_width * CONTEXT
    assert figures["journal"] == 4 * width * CONTEXT
    allowed = SLACK * (by_hand + figures["kv"] + figures["journal"]) + FIXED_BYTES
    print(f"{figures['taken'] / 2**20:.0f} MiB taken, {allowed / 2**20:.0f} MiB allowed")
    assert figures["taken"] <= allowed
