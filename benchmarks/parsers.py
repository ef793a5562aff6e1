"""How long a single hostile input holds the event loop, and how much memory it takes: at most 10 ms and 64 MiB.

For each parser of the wire and of files the inputs of the fuzzer, and the dearest that could be thought of, made by
hand within the limits: the largest map full of nothing, records that open as many streams as they can, a header of as
many tensors as are accepted. One input is what the loop takes in one go: a slice of what arrived, a message, a part
of one. What is read in a thread holds the loop for as long as Python's lock is held: that is measured as the longest
gap in a loop that does nothing else meanwhile. The files of a model are read in a thread before a peer serves anybody,
and by nothing that a stranger could say (`test_nothing_that_answers_strangers_can_read_a_models_files`): for how long
they hold the loop is told, and has no target.

An input's time is the least of several runs, since the machine's own pauses aren't the parser's. Memory is what
Python allocates at its peak (`tracemalloc`), the input itself aside.

    python -m benchmarks.parsers [--only PARSER ...] [--inputs N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import costly
from benchmarks.machine import report
from swarm.errors import SwarmError
from tests.fuzz.targets import TARGETS, input_of

TARGET_S = 0.010
TARGET_BYTES = 64 << 20
AGAIN = 5  # runs of each of the slowest; 2 of those in a thread, which take a second or more
SLOWEST = 4  # inputs of a parser that are run again
WEIGHED = 60  # inputs of the fuzzer whose memory is measured, which makes them several times as slow
SEED = 1

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """make: everything that comes before the input is there, and what is then measured."""

    label: str
    make: Callable[[], Work]


@dataclass(frozen=True)
class Parser:
    """name: of the fuzzer's target too, if `fuzzed`. where: in the "loop", in a "thread", or at the "start" in one."""

    name: str
    by_hand: Callable[[], Iterator[tuple[str, Callable[[], Work]]]] = lambda: iter(())
    fuzzed: bool = True
    where: str = "loop"


@dataclass
class Measured:
    parser: Parser
    inputs: int = 0
    worst_s: float = 0.0
    worst: str = ""
    most_bytes: int = 0
    most: str = ""

    @property
    def quick(self) -> bool:
        return self.worst_s <= TARGET_S or self.parser.where == "start"

    @property
    def small(self) -> bool:
        return self.most_bytes <= TARGET_BYTES


PARSERS = (
    Parser("handshake: a listener", costly.handshakes),
    Parser("handshake: a dialler"),
    Parser("records, frames and streams", costly.slices),
    Parser("messages", costly.maps),
    Parser("tensor headers", costly.tensors),
    Parser("messages of a session", costly.sessions, fuzzed=False),
    Parser("signed records", costly.records),
    Parser("gossip", costly.gossip),
    Parser("a model's facts", costly.facts),
    Parser("addresses", costly.addresses),
    Parser("a tokenizer's files", costly.bundles, fuzzed=False, where="thread"),
    Parser("safetensors headers", costly.safetensors, where="start"),
    Parser("GGUF headers", costly.gguf, where="start"),
    Parser("model configurations", costly.configurations, where="start"),
)


def cases(parser: Parser, inputs: int) -> Iterator[Case]:
    for label, make in parser.by_hand():
        yield Case(label, make)
    if parser.fuzzed:
        target = next(one for one in TARGETS if one.name == parser.name)
        for number in range(min(inputs, target.inputs)):
            data = input_of(target, SEED, number)
            yield Case(f"fuzzed, number {number}", lambda data=data: partial(target.feed, data))  # type: ignore[misc]


def run(work: Work) -> None:
    with contextlib.suppress(SwarmError):
        work()


def seconds(case: Case) -> float:
    """Of this thread alone: what other processes take meanwhile isn't the parser's."""
    work = case.make()
    begun = time.thread_time()
    run(work)
    return time.thread_time() - begun


async def held_s(case: Case) -> float:
    """The longest gap in an idle loop while a thread works on it."""
    work, worst = case.make(), 0.0
    task = asyncio.create_task(asyncio.to_thread(run, work))
    last = time.perf_counter()
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    return worst


def weigh(case: Case) -> int:
    """Bytes."""
    work = case.make()
    gc.collect()
    tracemalloc.start()
    try:
        run(work)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(parser: Parser, inputs: int) -> Measured:
    found = Measured(parser)
    all_cases = list(cases(parser, inputs))
    found.inputs = len(all_cases)
    gc.collect()
    gc.freeze()  # what the cases themselves hold is nobody's garbage
    seconds(all_cases[0])  # imports
    timed = sorted(((seconds(case), place) for place, case in enumerate(all_cases)), reverse=True)
    for _, place in timed[:SLOWEST]:
        case = all_cases[place]
        in_loop = parser.where == "loop"
        took = min(seconds(case) if in_loop else asyncio.run(held_s(case)) for _ in range(AGAIN if in_loop else 2))
        if took > found.worst_s:
            found.worst_s, found.worst = took, case.label
    by_hand = [place for place, case in enumerate(all_cases) if not case.label.startswith("fuzzed")]
    others = [place for _, place in timed if place not in by_hand][:WEIGHED]
    for place in (*by_hand, *others):
        size = weigh(all_cases[place])
        if size > found.most_bytes:
            found.most_bytes, found.most = size, all_cases[place].label
    gc.unfreeze()
    return found


def line_of(one: Measured) -> str:
    missed = "" if one.quick and one.small else " MISSED"
    return (
        f"{one.parser.name:28} {one.parser.where:6} {one.inputs:6,}  {1e3 * one.worst_s:7.2f} ms  {one.worst:44.44} "
        f"{one.most_bytes / (1 << 20):7.2f} MiB  {one.most:40.40}{missed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in PARSERS]
    parser.add_argument("--inputs", type=int, default=500, help="of the fuzzer, for each parser at most")
    parser.add_argument("--only", help="this parser; may be given again", choices=names, action="append")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{'parser':28} {'in':6} {'inputs':>6}  {'holds the loop':>10}  {'with':44} {'memory':>11}  with")
    results: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for one in PARSERS:
        if one.name in (options.only or names):
            found = measure(one, options.inputs)
            print(line_of(found), flush=True)
            held_ms, mib = round(1e3 * found.worst_s, 3), round(found.most_bytes / (1 << 20), 3)
            results[one.name] = {"held_ms": held_ms, "held_by": found.worst, "mib": mib, "mib_by": found.most}
            if one.where != "start":
                wanted[f"{one.name}: ms"] = {"value": held_ms, "target": 1e3 * TARGET_S, "met": found.quick}
            wanted[f"{one.name}: MiB"] = {"value": mib, "target": TARGET_BYTES >> 20, "met": found.small}
    missed = [name for name, target in wanted.items() if not target["met"]]
    print(f"targets: 10 ms, 64 MiB; missed: {', '.join(missed) or 'none'}")
    report("parsers", results, wanted)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
