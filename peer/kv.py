"""What a session's keys and values cost, and how far back a session can go. Arithmetic only, no torch.

A layer that attends to everything keeps every position. One that attends to a window keeps `window` + R of them,
where R (`Reach`) is what a session may be taken back by without having to be computed again. So a session of n
positions costs the sum over its layers of min(n, window + R) positions, and every figure in this program that turns
positions into bytes, or bytes into positions, comes from `KvSizes`: the plan of the peer's memory, the ledger
of reservations, and what is advertised.

Going back farther than R is possible only to the very beginning: whatever lies between was computed from inputs
that a window has let go. A hop that is asked for it is fed from position 0 again, as one that was lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from routing.spans import Span
from swarm.session_config import SessionConfig

CHUNK = SessionConfig.chunk  # of a prefill step; larger is faster on a GPU, smaller lets other sessions in sooner
WHOLE_CHUNK = 1024  # where one hop has all layers, so that no other hop waits for it: products over 256 rows are slower
CREDIT = SessionConfig.credit_window  # the swarm is so far ahead of a client that repairs, and is taken back by it
SPECULATION = 16  # drafted positions that turn out wrong; drafts pay off up to about a dozen


@dataclass(frozen=True, slots=True)
class Reach:
    """R, in positions. rewind: back from the start of the newest step. chunk: the longest step, which may have
    been written in vain: a repair drops what is in the engine."""

    rewind: int = CREDIT + SPECULATION
    chunk: int = CHUNK

    @property
    def positions(self) -> int:
        return self.rewind + self.chunk

    def pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """A step of `tokens` as [start, stop) of at most `chunk` each: what a window layer takes at once."""
        return ((at, min(at + self.chunk, tokens)) for at in range(0, tokens, self.chunk))


REACH = Reach()  # of sessions outside of any pool


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer stores per position: `heads` keys of `key_dim` and values of `value_dim` elements.

    window: a token attends to so many positions, itself included (None: to all before it). chunked: the text
    is cut into pieces of `window` positions instead, and a token attends to its piece's part before it.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` attends to."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)

    def stored(self, positions: int, reach: Reach) -> int:
        """How many of a session's `positions` are in memory at once."""
        return positions if self.window is None else min(positions, self.window + reach.positions)


@dataclass(frozen=True)
class KvSizes:
    """Bytes of sessions over any part of `layers`, of which the first is layer `start` of the model.

    context: positions of the longest session. row_bytes: what a position costs besides, where the journal of
    hidden states lives in the same memory. original: in a session of more positions than that all are encoded
    differently (longrope); None: the length of a session changes nothing.
    """

    layers: tuple[LayerKV, ...]
    item_bytes: int
    context: int
    start: int = 0
    row_bytes: int = 0
    reach: Reach = REACH
    original: int | None = None

    def over(self, span: Span) -> tuple[LayerKV, ...]:
        return self.layers[span.start - self.start : span.stop - self.start]

    def encode_alike(self, positions: int, others: int) -> bool:
        """Whether sessions of so many positions and of `others` have the same keys for the same text."""
        return self.original is None or (positions > self.original) == (others > self.original)

    def bytes(self, positions: int, span: Span) -> int:
        """Of one session of so many positions over `span`."""
        a, b = span.start - self.start, span.stop - self.start
        elements = sum(
            (counts[b] - counts[a]) * kv.elements * kv.stored(positions, self.reach) for kv, counts in self._kinds
        )
        return elements * self.item_bytes + positions * self.row_bytes

    def tokens(self, room_bytes: int, span: Span) -> int:
        """Positions that fit: in sessions of the whole context, and one more of what is left.

        So it is at least n exactly where a session of n positions fits, for every n up to the context.
        """
        whole, rest = divmod(room_bytes, self.bytes(self.context, span))
        shorter = bisect_right(range(self.context + 1), rest, key=lambda n: self.bytes(n, span)) - 1
        return whole * self.context + shorter

    def bytes_for(self, tokens: int, span: Span) -> int:
        """The reverse: the least bytes in which `tokens` fit that way."""
        whole, rest = divmod(tokens, self.context)
        return whole * self.bytes(self.context, span) + self.bytes(rest, span)

    @cached_property
    def _kinds(self) -> list[tuple[LayerKV, list[int]]]:
        """Each kind of layer, with how many of it lie before any layer: a sum takes as long as there are kinds."""
        made = []
        for kind in dict.fromkeys(self.layers):
            counts = [0]
            for kv in self.layers:
                counts.append(counts[-1] + (kv == kind))
            made.append((kind, counts))
        return made


class Rewinds:
    """How far back a session can be cut, by whoever hands out its steps. Conservative: never says too much.

    It counts steps when they are handed out, so that one which still runs, or is never run, is in it already.
    room: what the shortest of the session's windows keeps (None: nothing is ever let go).
    """

    def __init__(self, room: int | None, reach: Reach) -> None:
        self._room, self._reach = room, reach
        self._start = self._stop = 0  # of the farthest piece written since position 0

    @staticmethod
    def over(layers: tuple[LayerKV, ...], reach: Reach) -> Rewinds:
        windows = [kv.window for kv in layers if kv.window is not None]
        return Rewinds(min(windows) + reach.positions if windows else None, reach)

    def wrote(self, position: int, tokens: int) -> None:
        """A step over [position, position + tokens) is handed out. One at 0 begins anew."""
        if position == 0:
            self._start = self._stop = 0
        last = position + (tokens - 1) // self._reach.chunk * self._reach.chunk
        self._start = max(self._start, last)
        self._stop = max(self._stop, position + tokens)

    @property
    def oldest(self) -> int:
        """A step may start here or later, or at 0."""
        if self._room is None or self._stop <= self._room:
            return 0
        return max(0, self._start - self._reach.rewind)

    @property
    def lets_go(self) -> bool:
        """Whether anything is ever let go: then no step should be longer than `Reach.chunk`."""
        return self._room is not None

    def allows(self, position: int) -> bool:
        return position == 0 or position >= self.oldest
