"""What a hop sent downstream in one session, kept so that a lost hop can be fed again.

Invariant: the journal holds every position from 0 to `length` exactly once, in order. The rows
are opaque: whatever has a length and can be sliced along its first axis (a torch tensor
[n, width] in a real peer, a list in the simulation). They are never copied here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol


class Rows(Protocol):
    """Hidden states of consecutive positions, first axis = positions."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Rows: ...


class Journal:
    """The last hop sends no rows on: its journal only counts (`rows` None)."""

    def __init__(self) -> None:
        self.length = 0
        self._starts: list[int] = []  # position of each piece's first row
        self._pieces: list[Rows] = []

    def append(self, count: int, rows: Rows | None) -> None:
        """Add the output of the `count` positions that follow."""
        if rows is not None:
            assert len(rows) == count, f"{len(rows)} rows of output for {count} positions"
            self._starts.append(self.length)
            self._pieces.append(rows)
        self.length += count

    def cut(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if length >= self.length:
            return
        self.length = length
        while self._starts and self._starts[-1] >= length:
            self._starts.pop()
            self._pieces.pop()
        if self._starts and self._starts[-1] + len(self._pieces[-1]) > length:
            self._pieces[-1] = self._pieces[-1][: length - self._starts[-1]]

    def read(self, start: int, stop: int, most: int) -> Iterator[tuple[int, list[Rows]]]:
        """The rows of `[start, stop)` as (position, pieces) groups of at most `most` rows each."""
        position, group, size = start, [], 0
        while position + size < stop:
            at = position + size
            index = bisect_right(self._starts, at) - 1
            offset = at - self._starts[index]
            rows = self._pieces[index][offset : offset + min(most - size, stop - at)]
            group.append(rows)
            size += len(rows)
            if size == most:
                yield position, group
                position, group, size = position + size, [], 0
        if group:
            yield position, group
