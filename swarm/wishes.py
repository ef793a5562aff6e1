"""What a participant wants to hear of, and who tells it all of that at once.

A newcomer, and a client that turns to another model, has one neighbour tell everything in bulk: the teller. One that
doesn't go on within SNAPSHOT_STALL_S, or is gone, is replaced by another neighbour; who was attached meanwhile is
asked only for what differs.

Invariant: at most one neighbour is the teller at a time, and none once all is here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm.digests import Models
from swarm.messages import GossipHello, Subscribe
from swarm.neighbour import Kind, Neighbour

SNAPSHOT_STALL_S = 3.0  # without a part of the snapshot, before another neighbour is asked for it


class Wishes:
    """Of one registry, whose neighbours these are. only: models, or None for all. complete: whether all that is wanted
    has been told."""

    def __init__(self, neighbours: Mapping[int, Neighbour], only: Collection[bytes] | None, now: float) -> None:
        self.complete = False
        self.only = None if only is None else Models(only)
        self._neighbours = neighbours
        self._named = ""
        self._teller: int | None = None
        self._heard_at = now  # the teller

    @property
    def deadline(self) -> float | None:
        """When `stalled` may be true."""
        return self._heard_at + SNAPSHOT_STALL_S if self._teller is not None else None

    def want(self, only: Collection[bytes] | None) -> bool:
        """From now on these. Whether there are some among them that nobody told us of."""
        wanted = None if only is None else Models(only)
        if wanted == self.only:
            return False
        more = self.only is not None and (wanted is None or not wanted <= self.only)
        self.only = wanted
        for one in self._neighbours.values():
            one.only = wanted
            self.greet(one)
        if more:
            self.complete, self._teller = False, None
        return more

    def seek(self, name: str) -> None:
        """Have models of this name listed, however many others there are."""
        if name != self._named:
            self._named = name
            for one in self._neighbours.values():
                self.greet(one)

    def greet(self, one: Neighbour, *, snapshot: bool = False) -> None:
        """Say what we want now. A greeting that hasn't gone out is replaced, and so is the snapshot it asks for."""
        asked = one.greeting is not None and one.greeting.snapshot
        one.snapshots_owed += snapshot and not asked
        if snapshot or asked:
            one.snapshot_records, one.snapshot_only = 0, self.only
        if one.kind is Kind.SOURCE:
            only = None if self.only is None else tuple(sorted(self.only))
            one.greeting = Subscribe(only, snapshot or asked, self._named)
        else:
            one.greeting = GossipHello(snapshot or asked)

    # ------------------------------------------------------------ the teller

    def is_teller(self, key: int) -> bool:
        return key == self._teller

    def heard(self, key: int, now: float) -> None:
        """Records came from there."""
        if key == self._teller:
            self._heard_at = now

    def find_teller(self, now: float, *, empty: bool) -> None:
        """Let one neighbour tell all, unless somebody does or that has been done. empty: nobody is held."""
        if self._teller is None and (empty or not self.complete):
            self._choose(now, None)

    def lost(self, key: int, now: float, *, empty: bool) -> None:
        """That neighbour is gone."""
        if key == self._teller:
            self._teller = None
            self.find_teller(now, empty=empty)

    def tick(self, now: float, *, empty: bool) -> None:
        """A teller that stalls is replaced, if there is anybody else and all isn't here anyway."""
        if self._teller is None or now - self._heard_at < SNAPSHOT_STALL_S:
            return
        if self.complete and not empty:
            self._teller = None
        else:
            self._choose(now, self._teller)

    def told(self, one: Neighbour) -> bool:
        """`one` says that this was all. Whether that completes what is wanted now."""
        if not one.snapshots_owed:
            return False
        one.snapshots_owed -= 1
        if one.snapshots_owed or not _covers(one.snapshot_only, self.only):
            return False
        self._teller, self.complete = None, True
        return True

    def _choose(self, now: float, instead_of: int | None) -> None:
        self._heard_at = now
        able = [one for one in self._neighbours.values() if one.opened_here and one.key != instead_of]
        if able:
            one = min(able, key=lambda one: one.snapshots_owed)
            self.greet(one, snapshot=True)
            self._teller = one.key


def _covers(told: Models | None, wanted: Models | None) -> bool:
    """Whether a snapshot of the first models has all records of the second."""
    return told is None or (wanted is not None and wanted <= told)
