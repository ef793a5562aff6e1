"""How long `swarm status` takes from Enter to prompt against ten peers on loopback: at most a second.

The ten are real registry nodes on real sockets that advertise spans of an imaginary model (no torch), so
that what is measured is the command: starting Python, connecting, the snapshot, ten pings, the plan, the table.

    python -m benchmarks.status [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import report
from routing.spans import Span, Speed
from swarm.identity import Identity
from swarm.node import Node
from swarm.records import Descriptor, Load
from swarm.transport import Transport

PEERS, LAYERS = 10, 30
TARGET_S = 1.0


async def start_peer(number: int, join: list[str]) -> tuple[Node, Transport]:
    transport = Transport(Identity.ephemeral())
    await transport.listen("127.0.0.1", 0)
    node = Node(transport, role="peer", rng=random.Random(number))
    await node.start(join)
    start = number % 3 * 10
    descriptor = Descriptor(
        peer=transport.identity.peer_id,
        seq=0,
        addresses=(f"127.0.0.1:{transport.port}",),
        fingerprint=bytes(32),
        model="imaginary",
        layers=LAYERS,
        width=576,
        vocab=49152,
        context=2048,
        span=Span(start, start + 10),
        numerics="cpu/float32",
        kv_tokens=8192,
        tokenizer_hash=bytes(32),
        name=f"peer{number}",
    )
    speed = Speed(0.002, 0.001, 0.001, 0.005, 0.0001)
    await node.publish(descriptor, Load("serving", free_kv_tokens=8192, speed=speed, tokens_per_s=50))
    return node, transport


async def command_s(address: str, home: str) -> float:
    """One run of the command, in seconds."""
    begun = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cli", "status", "--join", address),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "SWARM_HOME": home},
    )
    out, _ = await process.communicate()
    took = time.perf_counter() - begun
    if process.returncode != 0 or out.decode().count("serving") != PEERS:
        raise SystemExit(f"status should have shown {PEERS} serving peers:\n{out.decode()}")
    return took


async def measure(rounds: int) -> list[float]:
    first, first_transport = await start_peer(0, [])
    address = f"127.0.0.1:{first_transport.port}"
    others = [await start_peer(number, [address]) for number in range(1, PEERS)]
    while sum(entry.heartbeat.state == "serving" for entry in first.entries()) < PEERS:
        await first.changed()
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as home:
        times = [await command_s(address, str(Path(home))) for _ in range(rounds + 1)][1:]  # the first warms the disk
    for node, transport in [(first, first_transport), *others]:
        await node.close()
        await transport.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    times = asyncio.run(measure(options.rounds))
    median = statistics.median(times)
    print(f"swarm status against {PEERS} peers: median {median:.2f} s, worst {max(times):.2f} s of {len(times)}")
    results: dict[str, Any] = {"median_s": round(median, 3), "worst_s": round(max(times), 3), "peers": PEERS}
    report("status", results, {"median_s": {"value": median, "target": TARGET_S, "met": median <= TARGET_S}})


if __name__ == "__main__":
    main()
