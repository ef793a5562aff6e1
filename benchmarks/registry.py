"""What the registry costs, and how fast news spreads, among 10, 100, 1,000 and 10,000 peers.

    python -m benchmarks.registry [--only PART ...] [--seed N] [--jobs J] [--json]

Parts are 10, 100, 1000, 10000 and churn. 1000 took 170 s and 2 GB on a core that it shared, 10 a few seconds; churn
takes longest.

Everything is in virtual time, so nothing but the CPU shares depends on the machine.

Measured with full cores (`full_cores.py`), up to 1,000: the time until 99% know a change of somebody's state while
30% of all messages are lost for good (TCP would deliver them late), five changes, the slowest counts; bytes a second
and direction, with 76 bytes per message for frames, encryption, TCP and IP, on average over all peers (and of the peer
that sends most); the CPU time of three peers that do all their own work, the most of them; what one core holds; and at
10 and 100 the time from the end of a partition, in which both halves had forgotten each other, until all tables are
equal. CPU times leave out sockets, encryption and the event loop.

Modelled, at 10,000: the spread (`epidemic.py`, a number per peer; shown for 1,000 too, where the cores can be seen
beside it), ten changes, the slowest counts. Bytes, CPU and memory are those of one real core whose neighbours are
played by what the model says (`one_core.py`), for one minute, which is one heartbeat of each peer; 2% of heartbeats
carry a change. The same again with 256 clients knocking.

Churn, with 100 full cores: what a peer holds before and after all others were replaced ten times within a minute,
and once its tombstones are over; those last half a minute here instead of ten.

Prints each figure, with its target where there is one. The exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.epidemic import Epidemic, random_graph, share_s
from benchmarks.full_cores import heap_bytes, swarm_of
from benchmarks.machine import report
from benchmarks.one_core import OneCore

PARTS = ("1000", "10000", "churn", "100", "10")  # the long ones first
LARGE = 10_000
CHANGES, MODELLED_CHANGES = 5, 10
TRAFFIC_S = {10: 60.0, 100: 30.0, 1000: 3.0}  # 1,000 cores take seconds of CPU for a second of theirs
MINUTE_S = 60.0
REPLACED = 10
CLIENTS = 256  # circle.py: as many as one peer has streams for
KB = 1000.0


@dataclass(frozen=True)
class Figure:
    """most: the target, in the unit of the value."""

    name: str
    value: float
    unit: str
    what: str
    most: float | None = None

    @property
    def met(self) -> bool:
        return self.most is None or self.value <= self.most

    def __str__(self) -> str:
        said = f"  {self.what:<62} {self.value:>9.2f} {self.unit}"
        return said if self.most is None else f"{said}, target {self.most:g}: {'met' if self.met else 'MISSED'}"


def full(peers: int, seed: int) -> Iterator[Figure]:
    targets = {1000: {"spread": 10.0, "bytes": 16.0}}.get(peers, {})
    with swarm_of(peers, seed, timed=3) as swarm:
        held = heap_bytes(swarm.world[swarm.names[-1]])
        cost = swarm.traffic(TRAFFIC_S[peers])
        took = swarm.spread(min(CHANGES, peers))
        healed = None
        if peers < 1000:
            swarm.world.run(20.0)
            healed = swarm.heal()
    loss = "until 99% know a change, 30% loss"
    yield Figure(f"spread_{peers}_s", max(took), "s", loss, targets.get("spread"))
    yield Figure(f"modelled_spread_{peers}_s", modelled_spread(peers, seed), "s", f"{loss}, as modelled")
    yield Figure(
        f"bytes_{peers}_kb_s", cost["bytes_per_s"] / KB, "kB/s", "each way per peer, on average", targets.get("bytes")
    )
    yield Figure(f"most_bytes_{peers}_kb_s", cost["most_bytes_per_s"] / KB, "kB/s", "sent by the busiest peer")
    yield Figure(f"cpu_{peers}_percent", 100 * cost["cpu_share"], "%", "of a core per peer")
    yield Figure(f"memory_{peers}_kb", held / KB, "kB", f"held by a core ({cost['links']:.1f} neighbours each)")
    if healed is not None:
        yield Figure(f"heal_{peers}_s", healed, "s", "until a healed partition is equal", 60.0)


def modelled_spread(peers: int, seed: int) -> float:
    graph = random_graph(peers, random.Random(seed))
    rng = random.Random(seed + 1)
    return max(
        share_s(Epidemic(graph, rng, loss=0.3).spread(source))
        for source in rng.sample(range(peers), min(MODELLED_CHANGES, peers))
    )


def modelled(seed: int) -> Iterator[Figure]:
    what = "until 99% know a change, 30% loss, as modelled"
    yield Figure(f"spread_{LARGE}_s", modelled_spread(LARGE, seed), "s", what, 15.0)
    graph = random_graph(LARGE, random.Random(seed))
    one = OneCore(graph, seed)
    one.begin()
    cost = one.traffic(MINUTE_S)
    for way in ("received", "sent"):
        yield Figure(f"{way}_{LARGE}_kb_s", cost[f"{way}_per_s"] / KB, "kB/s", f"{way} by one core", 64.0)
    yield Figure(f"cpu_{LARGE}_percent", 100 * cost["cpu_share"], "%", "of a core", 10.0)
    yield Figure(f"memory_{LARGE}_kb", heap_bytes(one.core) / KB, "kB", f"held by it ({cost['links']:.0f} neighbours)")
    crowded = OneCore(graph, seed, clients=CLIENTS)
    crowded.begin()
    cost = crowded.traffic(MINUTE_S / 2)
    told = f"to the {cost['clients']:.0f} of {CLIENTS} clients that there is room for"
    yield Figure(f"to_clients_{LARGE}_kb_s", cost["to_clients_per_s"] / KB, "kB/s", told)
    yield Figure(f"cpu_with_clients_{LARGE}_percent", 100 * cost["cpu_share"], "%", "of a core, with them", 10.0)


def churned(seed: int) -> Iterator[Figure]:
    with swarm_of(100, seed) as swarm:
        held = swarm.churn(REPLACED)
    for name, what in (("before", "before"), ("at_the_end", "at the end of the churn, with its tombstones")):
        yield Figure(f"churn_{name}_kb", held[name] / KB, "kB", f"held {what}")
    grown = 100 * (held["after"] / held["before"] - 1)
    yield Figure("churn_growth_percent", grown, "%", f"more after all were replaced {REPLACED} times", 5.0)


def run_part(part: str, seed: int) -> tuple[str, list[Figure], float]:
    began = time.monotonic()
    figures = {"churn": churned, "10000": modelled}.get(part) or functools.partial(full, int(part))
    return part, list(figures(seed)), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="parts side by side")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    parts = [part for part in PARTS if part in options.only]
    figures: list[Figure] = []
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(parts)), maxtasksperchild=1) as pool:
        work = functools.partial(run_part, seed=options.seed)
        for part, found, took_s in pool.imap_unordered(work, parts):
            print(f"{part}{'' if part == 'churn' else ' peers'} ({took_s:.0f} s)", *found, sep="\n", flush=True)
            figures += found
    targets: dict[str, Any] = {
        one.name: {"value": one.value, "target": one.most, "met": one.met} for one in figures if one.most is not None
    }
    report("registry", {one.name: round(one.value, 3) for one in figures}, targets)
    return 0 if all(one.met for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
