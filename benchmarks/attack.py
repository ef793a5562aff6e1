"""What 10,000 bad handshakes cost an honest client: its time per token, left alone and under attack.

One peer serves the whole of a model; a client that is connected gets answer after answer. In every round it is left
alone for a while, and then attacked by 10,000 strangers as fast as they are let in (`benchmarks/attackers.py` says
what they do); both are measured in one run, in turns, and what is compared are medians over rounds. The strangers'
process has the last core to itself, as if it were another machine; peer and client share the others. All strangers
come from different addresses, so that no limit by network helps: what is measured is the dearest case. Meanwhile
somebody new connects again and again, and how long that takes is told too.

    python -m benchmarks.attack [--rounds N] [--strangers N] [--model MODEL] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

from benchmarks.machine import report
from peer.local import ROOT, LocalSwarm
from swarm import AsyncClient
from swarm.addresses import parse_address
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.state import StateDir
from swarm.transport import Transport

PROMPT = "Tell me the history of the bicycle, from the first wooden ones until today."
TARGET_RATIO = 2.0
QUIET_S = 4.0
NEWCOMER_EVERY_S = 0.25


@dataclass
class Round:
    """gaps: seconds between one token and the next. newcomers: seconds to connect; None: it failed."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    newcomers: list[float | None] = field(default_factory=list)
    attackers: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return statistics.fmean(self.attacked) / statistics.fmean(self.quiet)


class Attackers:
    """Their process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int, core: int | None) -> Attackers:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.attackers", str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        return cls(process)

    async def attack(self, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n".encode())
        said: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return said

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def tokens_until(client: AsyncClient, over: asyncio.Event) -> list[float]:
    """Ask again and again; the seconds between tokens, up to when it is over."""
    gaps: list[float] = []
    while not over.is_set():
        last: float | None = None
        async for piece in client.stream(PROMPT, max_tokens=256, temperature=0):
            now = time.perf_counter()
            if last is not None and piece.token_ids:
                gaps += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
            last = now
            if over.is_set():
                break
    return gaps


async def newcomers_until(address: str, over: asyncio.Event) -> list[float | None]:
    """Somebody new each time; how long until it is connected, the proof of identity included."""
    took: list[float | None] = []
    while not over.is_set():
        transport, begun = Transport(Identity.ephemeral()), time.perf_counter()
        try:
            await transport.dial(parse_address(address))
            took.append(time.perf_counter() - begun)
        except SwarmError:
            took.append(None)
        await transport.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), NEWCOMER_EVERY_S)
    return took


async def one_round(client: AsyncClient, attackers: Attackers, address: str, strangers: int) -> Round:
    done, over = Round(), asyncio.Event()
    asyncio.get_running_loop().call_later(QUIET_S, over.set)
    done.quiet = await tokens_until(client, over)
    over = asyncio.Event()
    honest = asyncio.create_task(tokens_until(client, over)), asyncio.create_task(newcomers_until(address, over))
    done.attackers = await attackers.attack(strangers)
    over.set()
    done.attacked, done.newcomers = await honest[0], await honest[1]
    return done


async def measure(rounds: int, strangers: int, model: str) -> list[Round]:
    core = _two_sides()
    cache, measured = StateDir.open(None).cache, []
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with LocalSwarm(model, Path(folder), cache) as swarm:
            client = AsyncClient(swarm.address, home=Path(folder) / "client")
            peer = await swarm.start("attacked")
            await swarm.connect(client)
            await swarm.serving(client, ["attacked"])
            await client.generate(PROMPT, max_tokens=16)  # warms up
            attackers = await Attackers.start(int(swarm.address.rpartition(":")[2]), core)
            for number in range(rounds):
                assert peer.address is not None
                measured.append(await one_round(client, attackers, peer.address, strangers))
                print(line_of(number, measured[-1]), flush=True)
            await attackers.stop()
            await client.aclose()
    return measured


def _two_sides() -> int | None:
    """This process, and what it starts, to all cores but the last, which is the attackers'; None: there is but one."""
    if not hasattr(os, "sched_getaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        return None
    os.sched_setaffinity(0, cores[:-1])
    return cores[-1]


def line_of(number: int, one: Round) -> str:
    quiet, attacked = statistics.fmean(one.quiet), statistics.fmean(one.attacked)
    return (
        f"round {number + 1}: {1e3 * quiet:.1f} ms a token alone, {1e3 * attacked:.1f} ms under attack "
        f"({one.ratio:.2f} times); {one.attackers['connections']} strangers in {one.attackers['took_s']} s, "
        f"newcomers: {newcomers_text(one.newcomers)}"
    )


def newcomers_text(newcomers: list[float | None]) -> str:
    came = sorted(one for one in newcomers if one is not None)
    if not came:
        return f"none of {len(newcomers)} came in"
    times = f"median {1e3 * statistics.median(came):.0f} ms, worst {came[-1]:.1f} s"
    return f"{len(came)} of {len(newcomers)} came in, {times}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strangers", type=int, default=10_000, help="bad handshakes in each round")
    parser.add_argument("--model", default="smollm2", help="as for `swarm peer`")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    measured = asyncio.run(measure(options.rounds, options.strangers, options.model))
    for end, count in sorted(sum_of_ends(measured).items()):
        print(f"{count:8} {end}")
    newcomers = [one for each in measured for one in each.newcomers]
    print(f"newcomers: {newcomers_text(newcomers)}")
    ratio = statistics.median(one.ratio for one in measured)
    came = [one for one in newcomers if one is not None]
    results = {
        "quiet_ms": round(1e3 * statistics.median(statistics.fmean(one.quiet) for one in measured), 2),
        "attacked_ms": round(1e3 * statistics.median(statistics.fmean(one.attacked) for one in measured), 2),
        "strangers_per_s": round(
            statistics.median(one.attackers["connections"] / one.attackers["took_s"] for one in measured)
        ),
        "newcomers": len(newcomers),
        "newcomers_in": len(came),
        "newcomer_median_s": round(statistics.median(came), 3) if came else None,
    }
    met = ratio < TARGET_RATIO
    print(f"time per token under attack: {ratio:.2f} times (target: under {TARGET_RATIO:g})")
    report("attack", results, {"ratio": {"value": round(ratio, 3), "target": TARGET_RATIO, "met": met}})
    return 0 if met else 1


def sum_of_ends(measured: list[Round]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in measured:
        for end, count in one.attackers["ends"].items():
            total[end] = total.get(end, 0) + count
    return total


if __name__ == "__main__":
    sys.exit(main())
