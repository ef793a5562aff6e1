"""CORE: something of a session is overdue; every hop is asked twice where it is, and the answers say who is to blame.

Source of the rules: protocol.md, "Deadlines and blame". A hop that doesn't answer has failed. While answers differ,
the ring moves and nobody is to blame. Two equal answers a second apart are a verdict: `verdict` is a pure function of
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm.effects import HopKey
from swarm.messages import WhereIs


class Blame(Enum):
    """PEER: it failed. ENGINE: the same, but it may be merely slow. STREAM: ours to that hop failed, its peer lives.
    LINK: what the hop sends doesn't reach the next one; both live."""

    PEER = "peer"
    ENGINE = "engine"
    STREAM = "stream"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Verdict:
    """at: the hop's number in the chain; of a LINK the sender's."""

    blame: Blame
    at: int
    reason: str


def verdict(where: Sequence[WhereIs], epoch: int, opening: bool) -> Verdict:
    """Whose fault it is that nothing moved for a second.

    where: what each hop says of itself, in the chain's order. opening: no `Resume` went out in this epoch yet. The
    first rule that matches counts; with none, the tokens must have been lost on their way to us.
    """
    for at, hop in enumerate(where):
        if hop.epoch != epoch:
            return Verdict(Blame.STREAM, at, "it never heard of this epoch")
    if not opening:
        for at, hop in enumerate(where):
            if hop.in_engine:
                return Verdict(Blame.ENGINE, at, "its engine is stuck")
    for at, hop in enumerate(where):
        last = at == len(where) - 1
        arrived = where[0].known if last else where[at + 1].length
        if hop.waiting or (hop.resumed and hop.sent > arrived):
            return Verdict(Blame.LINK, at, "nothing gets through")
    if not opening:
        for at, hop in enumerate(where):
            if not hop.resumed:
                return Verdict(Blame.STREAM, at, "it never heard Resume")
    for at, hop in enumerate(where):
        if hop.length > hop.finished:
            return Verdict(Blame.PEER, at, "it took a step and doesn't run it")
    return Verdict(Blame.STREAM, len(where) - 1, "its answers don't arrive")


@dataclass
class Inquiry:
    """keys: whom we ask, in the chain's order. ask: number of the first `Where`, the second has the next one.
    next_at: when to ask again, or to judge without what is missing."""

    keys: Sequence[HopKey]
    ask: int
    next_at: float
    again: bool = False  # the second `Where` is out
    _first: dict[HopKey, WhereIs] = field(default_factory=dict)
    _second: dict[HopKey, WhereIs] = field(default_factory=dict)

    def hear(self, key: HopKey, answer: WhereIs) -> bool:
        """Whether everybody has answered twice now."""
        if key in self.keys and answer.ask == self.ask:
            self._first[key] = answer
        elif key in self.keys and answer.ask == self.ask + 1:
            self._second[key] = answer
            return len(self._second) == len(self.keys)
        return False

    def silent(self) -> list[HopKey]:
        """Who answered nothing at all."""
        return [key for key in self.keys if key not in self._first and key not in self._second]

    def moved(self) -> bool:
        """Some answers aren't equal, or not both there: no verdict is possible yet."""
        return not all(self._stands(key) for key in self.keys)

    def _stands(self, key: HopKey) -> bool:
        first, second = self._first.get(key), self._second.get(key)
        return first is not None and second is not None and first == dataclasses.replace(second, ask=first.ask)

    def answers(self) -> list[WhereIs]:
        """The second ones, in the chain's order. Only when nothing moved."""
        return [self._second[key] for key in self.keys]
