"""Which waiting steps run together next, and how much of each. No torch, no clock.

Invariants: steps of one session run one at a time and in order; a turn packs only steps over the same
layers; every turn takes the group of the step that has waited longest, so nothing starves.

Within a turn decode steps come first (each is one token, and a person waits for it), then pieces of prompts.
Where nobody decodes, prompts share a budget of tokens, the one that has waited longest first. Where somebody does,
one prompt at a time gets the piece that `pace.py` allows it. What is left of a step goes to the end of the queue,
so prompts take turns. A piece never reaches over the end of a `chunk`, for windows are moved once a chunk.

A long pass of prompts alone lets others in between two of its layers (`urgent`): decode steps, and prompts so
short that they end at once. So nobody waits longer for a pass of many tokens than for one of few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from peer.kv import CHUNK, WHOLE_CHUNK
from peer.pace import DECODE_TOKENS, Pace, PaceConfig
from routing.spans import Span
from swarm.errors import CapacityError

MAX_WAITING = 4096  # far above sessions x steps in flight; a bug or a flood beyond that is refused


class Waiting(Protocol):
    """What the scheduler reads of a job. chunk: of its windows' `Reach`, None where it has no windows."""

    @property
    def key(self) -> Hashable: ...
    @property
    def span(self) -> Span: ...
    @property
    def tokens(self) -> int: ...
    @property
    def chunk(self) -> int | None: ...


J = TypeVar("J", bound=Waiting)


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """prefill_tokens: most prompt tokens of a turn; larger is faster for prompts. rows: most sessions in a turn.
    long_tokens: as prefill_tokens, of a turn that lets others in between its layers."""

    prefill_tokens: int = CHUNK
    rows: int = 64
    long_tokens: int = WHOLE_CHUNK
    pace: PaceConfig = field(default_factory=PaceConfig)


@dataclass(frozen=True, slots=True)
class Piece(Generic[J]):
    """Tokens [start, stop) of a job."""

    job: J
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.job.tokens


@dataclass(slots=True)
class _Entry(Generic[J]):
    """number: of arrival, or of its return to the queue. since: when that was. done: tokens that have run."""

    job: J
    number: int
    since: float
    done: int = 0

    @property
    def left(self) -> int:
        return self.job.tokens - self.done

    @property
    def decodes(self) -> bool:
        return self.job.tokens <= DECODE_TOKENS


class Scheduler(Generic[J]):
    """`add` steps; when `begin_at` has come, take a turn with `next`, and say when it `ended`."""

    def __init__(self, config: BatchConfig | None = None) -> None:
        self.config = config or BatchConfig()
        self.pace = Pace(self.config.pace)
        self._queues: dict[Hashable, deque[_Entry[J]]] = {}  # by session; none is empty
        self._waiting = 0
        self._numbers = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, job: J, now: float) -> None:
        """Raises CapacityError when absurdly many wait."""
        if self._waiting >= MAX_WAITING:
            raise CapacityError(f"{MAX_WAITING} steps are waiting already")
        self._queues.setdefault(job.key, deque()).append(_Entry(job, self._number(), now))
        self._waiting += 1
        self.pace.arrived(job.key, job.span, job.tokens, now)

    def drop(self, key: Hashable) -> list[J]:
        """The session is over: take back all of its waiting steps."""
        self.pace.gone(key)
        dropped = [entry.job for entry in self._queues.pop(key, ())]
        self._waiting -= len(dropped)
        return dropped

    def clear(self) -> list[J]:
        """Take back everything."""
        return [job for key in list(self._queues) for job in self.drop(key)]

    def begin_at(self, now: float, most_rows: int | None = None) -> float | None:
        """When the next turn should begin (now, mostly); None where nothing waits."""
        ready = self._ready()
        if not ready:
            self.pace.awaited.clear()
            return None
        if most_rows == 1:
            return now  # nobody to wait for: turns are of one session
        span = ready[0].job.span
        group = [entry for entry in ready if entry.job.span == span]
        decoders = sum(entry.decodes for entry in group)
        if not decoders and any(entry.decodes for entry in ready):
            self.pace.awaited.clear()
            return now  # over other layers: they don't wait with prompts that stand aside
        return self.pace.begin_at(span, decoders, min(entry.since for entry in group), now)

    def next(self, now: float, most_rows: int | None = None, *, long: bool = False) -> list[Piece[J]]:
        """What the next turn runs, in the order of its rows; empty if nothing waits.

        most_rows: fewer sessions than configured (1 where positions depend on the whole batch). long: prompts that
        are alone may have `long_tokens`.
        """
        rows = min(self.config.rows, most_rows or self.config.rows)
        return self._choose(self._ready(), rows, self.config.long_tokens if long else self.config.prefill_tokens, now)

    def urgent(self, busy: Collection[Hashable], tokens: int, now: float) -> list[Piece[J]]:
        """What is let in between two layers of a pass of prompts alone, which these sessions have; mostly nothing.

        tokens: most of other prompts, so that they don't hold up that pass for long.
        """
        budget = min(tokens, self.config.prefill_tokens)
        ready = [e for e in self._ready() if e.job.key not in busy and (e.decodes or e.left <= budget)]
        return self._choose(ready, self.config.rows, budget, now)

    def _choose(self, ready: list[_Entry[J]], rows: int, budget: int, now: float) -> list[Piece[J]]:
        if not ready:
            return []
        decoders, pieces = self._turn(ready, ready[0], rows, budget, now)
        if not decoders and not pieces:  # the longest waiting prompt stands aside: whoever decodes goes first
            decoding = [entry for entry in ready if entry.decodes]
            decoders, pieces = self._turn(decoding, decoding[0], rows, budget, now)
        return [self._take(entry, entry.left) for entry in decoders] + [self._take(*piece) for piece in pieces]

    def _turn(
        self, ready: list[_Entry[J]], first: _Entry[J], rows: int, budget: int, now: float
    ) -> tuple[list[_Entry[J]], list[tuple[_Entry[J], int]]]:
        """Of those over the same layers as `first`: decode steps, and prompts with how much of each.

        Nothing where `first` is a prompt that stands aside.
        """
        group = [entry for entry in ready if entry.job.span == first.job.span]
        decoders = [entry for entry in group if entry.decodes][:rows]
        prompts = [entry for entry in group if not entry.decodes]
        if not first.decodes and len(decoders) == rows:
            decoders.pop()  # the longest waiting one has a place, or none of its kind would ever run
        pieces = self._pieces(prompts[: rows - len(decoders)], len(decoders), budget, now)
        return ([], []) if not first.decodes and not pieces else (decoders, pieces)

    def _pieces(
        self, prompts: list[_Entry[J]], decoders: int, budget: int, now: float
    ) -> list[tuple[_Entry[J], int]]:
        if not self.pace.has_company(now):
            return self._fill(prompts, budget)
        if not prompts:
            return []
        allowed = min(self.config.prefill_tokens, self.pace.piece(prompts[0].job.key, decoders))
        return [(prompts[0], self._most(prompts[0], allowed))] if allowed else []

    def _fill(self, prompts: list[_Entry[J]], budget: int) -> list[tuple[_Entry[J], int]]:
        """The whole budget, the longest waiting one first; of a long one each of them gets some."""
        pieces = list[tuple[_Entry[J], int]]()
        for others, entry in zip(reversed(range(len(prompts))), prompts, strict=True):
            share = max(self.config.prefill_tokens, budget // (others + 1))
            tokens = self._most(entry, min(budget, share))
            if tokens:
                pieces.append((entry, tokens))
                budget -= tokens
        return pieces

    def _most(self, entry: _Entry[J], budget: int) -> int:
        """Up to the end of its job, of the budget, and of the chunk that it is in."""
        chunk, most = entry.job.chunk, min(entry.left, budget)
        return most if chunk is None else min(most, chunk - entry.done % chunk)

    def _take(self, entry: _Entry[J], tokens: int) -> Piece[J]:
        queue = self._queues[entry.job.key]
        assert queue[0] is entry, "a session's steps run in order"
        queue.popleft()
        if not queue:
            del self._queues[entry.job.key]
        self._waiting -= 1
        return Piece(entry.job, entry.done, entry.done + tokens)

    def ended(self, turn: list[Piece[J]], started: float, now: float) -> None:
        """A turn that `next` gave has run."""
        decoders = [piece.job.key for piece in turn if piece.job.tokens <= DECODE_TOKENS]
        prompts = [(piece.job.key, piece.tokens) for piece in turn if piece.job.tokens > DECODE_TOKENS]
        self.pace.ran(decoders, prompts, started, now)

    def put_back(self, piece: Piece[J], now: float) -> None:
        """This piece has run, and its job isn't over: the rest waits behind all others, before its session's own."""
        entry = _Entry(piece.job, self._number(), now, piece.stop)
        self._queues.setdefault(piece.job.key, deque()).appendleft(entry)
        self._waiting += 1
        self.pace.arrived(piece.job.key, piece.job.span, piece.job.tokens, now)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ready(self) -> list[_Entry[J]]:
        """The first step of each session, the longest waiting first."""
        return sorted((queue[0] for queue in self._queues.values()), key=lambda entry: entry.number)
