"""Feed hostile inputs to every parser, as many as there is time for.

    python -m tests.fuzz --minutes 20            all parsers, in turns of equal time
    python -m tests.fuzz --inputs 100000         so many of each
    python -m tests.fuzz --only messages --seed 3 --start 1234 --inputs 1      one again
    python -m tests.fuzz --only messages --guided --minutes 5                  led by coverage, with atheris

Prints what was fed, how much of it was accepted, the slowest input and the memory at its highest. The exit code
is 1 if any input brought out something else than its parser's typed error. What is being fed stands in a file, so
that it is known even if the process dies of it; one that takes longer than HANGS_S ends the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import itertools
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS, Target, accepts, input_of

TURN_S = 1.0  # of one target before the next has its turn
HANGS_S = 300.0  # far above any; a process that was suspended for a minute meanwhile isn't taken for one that hangs


@dataclass
class Score:
    target: Target
    at: int
    fed: int = 0
    accepted: int = 0
    failures: int = 0
    slowest_s: float = 0.0
    slowest: int = -1

    def feed(self, seed: int, journal: int) -> None:
        """journal: the file (descriptor) that says what is being fed."""
        again = f'--only "{self.target.name}" --seed {seed} --start {self.at} --inputs 1'
        os.pwrite(journal, again.ljust(120).encode() + b"\n", 0)
        data = input_of(self.target, seed, self.at)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        begun = time.perf_counter()
        try:
            self.accepted += accepts(self.target, data)
        except Exception as error:  # what nobody expects is what is looked for
            self.failures += 1
            print(f"FAILED {type(error).__name__}: {str(error)[:200]}\n    {again}\n    {data[:200]!r}", flush=True)
        took = time.perf_counter() - begun
        if took > self.slowest_s:
            self.slowest_s, self.slowest = took, self.at
        self.fed += 1
        self.at += 1

    def line(self) -> str:
        return (
            f"{self.target.name:32} {self.fed:9,} fed {self.accepted:9,} accepted {self.failures:4} failed   "
            f"slowest {self.slowest_s * 1e3:7.1f} ms (number {self.slowest})"
        )


def run(targets: Sequence[Target], seed: int, start: int, inputs: int | None, seconds: float) -> list[Score]:
    """Turn by turn, until every target has had `inputs`, or `seconds` are over."""
    scores = [Score(target, start) for target in targets]
    journal, path = tempfile.mkstemp(prefix="layerswarm-fuzz-", suffix=".txt")
    print(f"seed {seed}; what is being fed stands in {path}", flush=True)
    for target in targets:  # imports and samples aren't what is timed
        accepts(target, target.corpus()[0])
    begun = time.monotonic()
    for score in itertools.cycle(scores):
        over = time.monotonic() - begun >= seconds
        if over or all(inputs is not None and one.fed >= inputs for one in scores):
            faulthandler.cancel_dump_traceback_later()
            os.close(journal)
            os.unlink(path)
            return scores
        turn = time.monotonic()
        while time.monotonic() - turn < TURN_S and (inputs is None or score.fed < inputs):
            score.feed(seed, journal)
    return scores


def guided(target: Target, seed: int, seconds: float) -> None:
    """libFuzzer through atheris, led by the coverage of what is imported from here on. Never returns."""
    import atheris  # type: ignore[import-not-found]

    atheris.instrument_all()

    def one(data: bytes) -> None:
        accepts(target, data)

    corpus = Path(f"{Path(sys.argv[0]).parent}") / ".corpus" / target.name.replace(" ", "-")
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(200):
        (corpus / f"{number}").write_bytes(input_of(target, seed, number))
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed}", "-max_len=65536", str(corpus)], one)
    atheris.Fuzz()


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="stop after this long")
    parser.add_argument("--inputs", type=int, help="so many of each parser")
    parser.add_argument("--seed", type=int, default=None, help="another one each time, unless given")
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", help="this parser alone; may be given again", choices=names, action="append")
    parser.add_argument("--but", help="not this parser; may be given again", choices=names, action="append", default=[])
    parser.add_argument("--guided", action="store_true", help="look for new paths with atheris (needs --only)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    seconds = 60 * options.minutes if options.minutes else (float("inf") if options.inputs else 60.0)
    logging.disable(logging.CRITICAL)
    wanted = [name for name in options.only or names if name not in options.but]
    targets = [target for target in TARGETS if target.name in wanted]
    if options.guided:
        if len(targets) != 1:
            parser.error("--guided leads one parser by its coverage: name it with --only")
        if importlib.util.find_spec("atheris") is None:
            parser.error("--guided needs atheris, which isn't among the requirements: pip install atheris")
        guided(targets[0], seed, seconds)
    scores = run(targets, seed, options.start, options.inputs, seconds)
    for score in scores:
        print(score.line())
    failures = sum(score.failures for score in scores)
    fed = sum(score.fed for score in scores)
    print(f"{fed:,} inputs, {failures} failures, memory at most {peak_bytes() >> 20} MiB")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
