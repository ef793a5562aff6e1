"""Run registry trials by hand: `python -m tests.sim --seeds 1000 [--start S] [--jobs J]`, or one with `--seed N [-v]`.

With `--without RULE` one rule of the core is taken away (see mutations.py); then the first failure ends the run.

Prints one line for each failed seed, with the command that replays it, and a summary. The exit status is the
number of failures (at most 100).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

from tests.sim.mutations import RULES, without
from tests.sim.registry_trial import Outcome, Trial


def attempt(seed: int, rule: str | None = None) -> tuple[int, Outcome | None, str]:
    """A trial's outcome, or what went wrong."""
    try:
        with without(rule) if rule is not None else nullcontext():
            return seed, Trial(seed).run(), ""
    except Exception as error:
        return seed, None, f"{type(error).__name__}: {error}"


def replay_command(seed: int) -> str:
    return f"python -m tests.sim --seed {seed} -v"


def run_one(seed: int, verbose: bool) -> int:
    try:
        outcome = Trial(seed, log=print if verbose else None).run()
    except Exception:
        traceback.print_exc()
        print(f"seed {seed} failed; replay it with: {replay_command(seed)}")
        return 1
    print(f"seed {seed}: {outcome}")
    return 0


def run_many(seeds: Iterator[int], jobs: int, minutes: float | None, rule: str | None) -> int:
    began, failed, done = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    agreed: list[float] = []
    peers = events = 0
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else _Here() as pool:
        for seed, outcome, wrong in pool.imap_unordered(functools.partial(attempt, rule=rule), seeds):
            done += 1
            if outcome is None:
                failed += 1
                print(
                    f"seed {seed} failed: {wrong[:600]}\n  replay it with: {replay_command(seed)}", flush=True
                )
            else:
                counts += outcome.counts
                agreed.append(outcome.agreed_s)
                peers, events = peers + outcome.peers, events + outcome.events
            if failed and rule is not None:
                break
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
    took = time.monotonic() - began
    agreed.sort()
    print(f"{done} seeds, {failed} failed, {took:.0f} s; {events} events, {peers} peers at the start")
    if agreed:
        median, late = agreed[len(agreed) // 2], agreed[int(0.99 * len(agreed))]
        print(
            f"agreed again after the storm: median {median:.1f} s, 99% {late:.1f} s, worst {agreed[-1]:.1f} s"
        )
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    return min(failed, 100)


class _Here:
    """A pool of this process."""

    imap_unordered = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever --seeds says")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every event of --seed")
    parser.add_argument("--without", choices=sorted(RULES), metavar="RULE", help=", ".join(sorted(RULES)))
    options = parser.parse_args()
    if options.seed is not None:
        return run_one(options.seed, options.verbose)
    seeds = itertools.islice(itertools.count(options.start), options.seeds)
    return run_many(seeds, options.jobs, options.minutes, options.without)


if __name__ == "__main__":
    sys.exit(main())
