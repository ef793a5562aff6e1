"""Which waiting steps run together next. No torch, no clock.

Invariants: steps of one session run one at a time and in order; a turn packs only steps over the same
layers; every turn takes the group of the longest waiting step, so nothing starves.

Within a turn decode steps come first (each is one token, and a person waits for it), then prefill
chunks, oldest first, under a token budget. One prefill chunk always goes along, however large: its
length, not the queue, is what a decode step next to it waits for, and the first hop bounds that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from routing.spans import Span
from swarm.errors import CapacityError

DECODE_TOKENS = 8  # a step of at most so many tokens is a decode step: one, or a few speculated ones
MAX_WAITING = 4096  # far above sessions x steps in flight; a bug or a flood beyond that is refused


class Waiting(Protocol):
    """What the scheduler reads of a job."""

    @property
    def key(self) -> Hashable: ...
    @property
    def span(self) -> Span: ...
    @property
    def tokens(self) -> int: ...


J = TypeVar("J", bound=Waiting)


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """prefill_tokens: most prompt tokens beside the decode steps of a turn; larger is faster for
    prompts, smaller is smoother for those who decode. rows: most sessions in a turn."""

    prefill_tokens: int = 256
    rows: int = 64


class Scheduler(Generic[J]):
    def __init__(self, config: BatchConfig | None = None) -> None:
        self.config = config or BatchConfig()
        self._waiting: OrderedDict[int, J] = OrderedDict()  # arrival number -> job
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: J) -> None:
        """Raises CapacityError when absurdly many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise CapacityError(f"{MAX_WAITING} steps are waiting already")
        self._waiting[self._arrivals] = job
        self._arrivals += 1

    def drop(self, key: Hashable) -> list[J]:
        """Take back all waiting steps of a session."""
        return self._take([n for n, job in self._waiting.items() if job.key == key])

    def next(self, most_rows: int | None = None) -> list[J]:
        """The steps of the next turn, in the order of their rows; empty if nothing waits.

        most_rows: fewer sessions than configured (1 where positions depend on the whole batch).
        """
        rows = min(self.config.rows, most_rows or self.config.rows)
        ready = list(self._ready())
        if not ready:
            return []
        span = ready[0][1].span
        group = [(n, job) for n, job in ready if job.span == span]
        chosen = [n for n, job in group if job.tokens <= DECODE_TOKENS]
        spent = 0
        for n, job in group:
            if job.tokens > DECODE_TOKENS and (
                spent == 0 or spent + job.tokens <= self.config.prefill_tokens
            ):
                chosen.append(n)
                spent += job.tokens
        if ready[0][0] not in chosen[:rows]:  # the longest waiting one always runs
            chosen.insert(0, ready[0][0])
        return self._take(list(dict.fromkeys(chosen))[:rows])

    def _ready(self) -> Iterator[tuple[int, J]]:
        """The first step of each session, oldest first."""
        seen: set[Hashable] = set()
        for n, job in self._waiting.items():
            if job.key not in seen:
                seen.add(job.key)
                yield n, job

    def _take(self, numbers: list[int]) -> list[J]:
        return [self._waiting.pop(n) for n in numbers]
