"""Heads that are on their way here: each asked of one neighbour at a time, in turn of those who offered it.

Invariant: at most MAX_ASKED of them, each asked at most MAX_TRIES times; what is given up is offered again, or
found by a digest. An ask that waits because nobody may make us verify more (`budget.py`) uses up no try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.neighbour import Neighbour
from swarm.table import Table

ASK_TIMEOUT_S = 1.0  # then the next one who offered it is asked; a round trip around the world takes a third of it
MAX_TRIES = 12  # with 30% of all messages lost, an ask and its answer get through every other time
MAX_ASKED = 8192
MAX_OTHERS = 7  # who else offered the same, remembered


@dataclass
class Asked:
    """key: of the neighbour that is asked now. full: with the descriptor. others: who offered it too. tries: asks
    yet to come."""

    key: int
    until: float
    full: bool
    others: list[int]
    tries: int


class Asks:
    """Of one registry, whose neighbours and table these are."""

    def __init__(self, neighbours: Mapping[int, Neighbour], table: Table) -> None:
        self._neighbours, self._table = neighbours, table
        self._asked: dict[bytes, Asked] = {}  # in the order of `until`

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def deadline(self) -> float | None:
        return next(iter(self._asked.values())).until if self._asked else None

    def offered(
        self, one: Neighbour, identifier: bytes, full: bool, now: float, others: list[int] | None = None
    ) -> None:
        """Ask `one` for it, or keep in mind that it has it too. others: who are known to have it."""
        asked = self._asked.get(identifier)
        if asked is None:
            self._ask(one, identifier, Asked(one.key, 0.0, full, others or [], MAX_TRIES), now)
        elif one.key != asked.key and one.key not in asked.others and len(asked.others) < MAX_OTHERS:
            asked.others.append(one.key)

    def told(self, one: Neighbour, identifier: bytes) -> Asked | None:
        """`one` has told it, so it isn't on its way any more."""
        asked = self._asked.pop(identifier, None)
        if asked is not None and asked.key != one.key and asked.key in self._neighbours:
            self._neighbours[asked.key].unask(identifier)
        return asked

    def lost(self, key: int, now: float) -> None:
        """That neighbour is gone; what it owed us is asked of others."""
        for identifier in [i for i, asked in self._asked.items() if asked.key == key]:
            self.next(identifier, self._asked.pop(identifier), now)

    def tick(self, now: float) -> None:
        while self._asked and (first := next(iter(self._asked.items())))[1].until <= now:
            self.next(first[0], self._asked.pop(first[0]), now)

    def next(self, identifier: bytes, asked: Asked, now: float, *, again: bool = True) -> None:
        """Of whoever else offered it, and in the end of the same again unless that isn't wanted."""
        before = self._neighbours.get(asked.key)
        waited = before is not None and before.unask(identifier)  # there was no room to ask for it yet
        offered = (*asked.others, asked.key) if again else asked.others
        turn = [key for key in offered if key in self._neighbours]
        asked.tries -= not waited
        if turn and asked.tries > 0 and not self._table.knows(identifier, now):
            asked.others = turn[1:]
            self._ask(self._neighbours[turn[0]], identifier, asked, now)

    def _ask(self, one: Neighbour, identifier: bytes, asked: Asked, now: float) -> None:
        if len(self._asked) < MAX_ASKED:
            one.ask(identifier, asked.full)
            asked.key, asked.until = one.key, now + ASK_TIMEOUT_S
            self._asked[identifier] = asked
