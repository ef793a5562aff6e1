"""`swarm demo`: its budgets on paper, and (long) the whole of it, watched, interrupted and killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from itertools import permutations
from pathlib import Path

import psutil
import pytest
import torch

from peer.capacity import parse_memory, plan_memory
from peer.checkpoint import no_progress
from peer.demo import KILL_AFTER_TOKENS, PEERS, _prepared
from peer.hop import HopConfig
from peer.source import resolve_model
from peer.weights import span_prices
from routing.placement import Capacity, Claim, choose_span
from routing.planner import coverage
from swarm.errors import ModelError
from swarm.state import StateDir
from tests.processes import ROOT, command, environment

ANY_FREE_BYTES = 1 << 40


def test_whatever_the_order_of_arrival_every_layer_has_two_peers(smollm2_file: Path) -> None:
    source = resolve_model("smollm2", cache=StateDir.open().cache)
    capacities = {}
    for name, memory in PEERS:
        plan = plan_memory(
            source,
            span_prices(source, torch.float32),
            device="cpu",
            dtype="float32",
            budget=parse_memory(memory, ANY_FREE_BYTES),
            sessions=8,
            context=None,
            chunk=HopConfig().prefill_chunk,
        )
        capacities[name] = Capacity(lru_cache(plan.fits), lru_cache(plan.prices))
    assert len({memory for _, memory in PEERS}) == 5
    for order in permutations(capacities):
        claims: list[Claim] = []
        for name in order:
            claims.append(Claim(name, choose_span(source.layers, claims, capacities[name])))
        counts = coverage(source.layers, [claim.span for claim in claims])
        assert min(counts) >= 2, f"{order}: {counts}"
        assert max(len(claim.span) for claim in claims) < source.layers


def test_ctrl_c_does_not_wait_for_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def download(*_: object) -> None:
        begun.set()
        over.wait()

    async def interrupted() -> None:
        waiting = asyncio.create_task(_prepared(tmp_path, no_progress))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    monkeypatch.setattr("peer.demo.prepare_smollm2", download)
    asyncio.run(interrupted())  # ends although the download hasn't
    over.set()


async def test_what_keeps_the_model_away_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ModelError("no network")

    monkeypatch.setattr("peer.demo.prepare_smollm2", fail)
    with pytest.raises(ModelError, match="no network"):
        await _prepared(tmp_path, no_progress)


@pytest.mark.long
def test_the_demo_ends_identical_and_says_so_in_json(tmp_path: Path) -> None:
    done = command("demo", "--json", home=tmp_path, cache=StateDir.open().cache, timeout_s=240)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary) == {
        "tokens", "text", "tokens_per_s", "ttft_s", "stall_s", "hops_before", "hops_after", "killed", "identical",
    }  # fmt: skip
    assert summary["identical"] is True and summary["tokens"] >= 64
    assert summary["killed"]["at_token"] >= KILL_AFTER_TOKENS
    dead = summary["killed"]["peer"]
    assert dead in {hop["peer"] for hop in summary["hops_before"]}
    assert dead not in {hop["peer"] for hop in summary["hops_after"]}
    assert not psutil.pid_exists(summary["killed"]["pid"])


@pytest.mark.long
def test_an_answer_that_ends_before_the_kill_exits_with_3(tmp_path: Path) -> None:
    prompt = "Answer with one word only: what is the capital of France?"
    done = command("demo", prompt, home=tmp_path, cache=StateDir.open().cache, timeout_s=240)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "before the kill" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=str)
def test_no_process_outlives_the_demo(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "cli", "demo"],
        cwd=ROOT,
        env=environment(tmp_path, StateDir.open().cache) | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "chose layers" in line:  # all five run
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5
    process.send_signal(how)
    process.stdout.close()
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        assert not list(tmp_path.glob("swarm-demo-*"))
