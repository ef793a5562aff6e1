"""Who listens to one peer, and how many it tells everything: as many clients as its home connection doesn't notice.

A client hears of every heartbeat of its models, and asks each of its sources for a share of them. That is nothing
where ten peers beat, and 13 kB/s for one client where 10,000 do; and its snapshot is then 7 MB. So what clients cost
is counted before it is promised, and whoever is one too many gets a few records and goes on to another peer: there
are as many sources as peers. Who asks for more than that all the same waits, and asks another source meanwhile.

A client hears which models there are before it asks for records, and again when that changes.

Invariant: in any span of t seconds clients are told at most RESERVE + BYTES_PER_S * t bytes of records.

Pure; `now` in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from swarm.buckets import Bucket
from swarm.circle import KEPT_SOURCES
from swarm.digests import Models
from swarm.identity import PeerId
from swarm.listing import list_models
from swarm.messages import RECORD_ID_BYTES, ModelList, Subscribe
from swarm.neighbour import Kind, Neighbour
from swarm.owner import heartbeat_interval_s
from swarm.table import Table

BYTES_PER_S = 64_000.0  # for all clients together: half a megabit, as much again as gossip takes among 10,000
ALWAYS = 4  # clients that are served whatever they cost, so that a swarm of few peers serves somebody
RESERVE = 16e6  # bytes: two snapshots at once where there are 10,000 peers, thousands where there are ten
HEAD_BYTES = 210  # of a heartbeat in a delta
RECORD_BYTES = 700  # of a descriptor and a heartbeat
VISITOR_RECORDS = 16  # for a client that there is no place for, so that it can go elsewhere
MODELS_S = 1.0  # between two lists of the models


def wanted(table: Table, only: Models | None) -> int:
    """Peers of these models, or of all."""
    if only is None:
        return len(table)
    models = table.models()
    return sum(models[one].total() for one in only if one in models)


def price(table: Table, only: Models | None) -> float:
    """Bytes a second that a client of these models costs one of its sources."""
    heads_per_s = wanted(table, only) / heartbeat_interval_s(len(table))
    return heads_per_s * (RECORD_ID_BYTES + HEAD_BYTES / KEPT_SOURCES)


class Audience:
    """Of one registry, whose neighbours and table these are. own: its peer, None for a client (whom nobody listens
    to). pace: of the bytes of records that clients are told."""

    def __init__(
        self,
        table: Table,
        neighbours: Mapping[int, Neighbour],
        own: PeerId | None,
        rng: random.Random,
        now: float,
    ) -> None:
        self._table, self._neighbours, self._own, self._rng = table, neighbours, own, rng
        self.pace = Bucket(BYTES_PER_S, RESERVE, now)
        self._models_told = 0  # which version
        self._models_at = now  # when the next list may go out

    # ------------------------------------------------------------ who listens

    def subscribe(self, one: Neighbour, message: Subscribe, now: float) -> None:
        """One that wants more than before is told all of what is new to it, if that isn't too much for us.

        Raises MessageError when it asks for that too often.
        """
        before = one.only if one.greeted else Models()
        one.only = None if message.only is None else Models(message.only)
        one.named = message.named
        one.models = self._list_models(one.named)
        new = one.only if before is None or one.only is None else one.only - before
        listening = [other.only for other in self._listeners() if other is not one]
        if not self.has_room(listening, one.only):
            one.visitor = True
        if not message.snapshot:
            return
        if one.visitor or not self.may_have_snapshot(new, now):
            one.visitor = True
            there = [held.peer for held in self._table.held()]
            one.tell_all(self._rng.sample(there, min(VISITOR_RECORDS, len(there))))
        else:
            one.tell_all([held.peer for held in self._table.held(new)])

    def one_too_many(self) -> Neighbour | None:
        """The newest client, if they have become too many for what there is to tell."""
        listeners = self._listeners()
        wanted = [one.only for one in listeners]
        if not listeners or self.has_room(wanted[:-1], wanted[-1]):
            return None
        return listeners[-1]

    def _listeners(self) -> list[Neighbour]:
        """The clients that have a place here, in the order of coming."""
        return [one for one in self._clients() if one.greeted and not one.visitor]

    def _clients(self) -> list[Neighbour]:
        return [one for one in self._neighbours.values() if one.kind is Kind.SUBSCRIBER]

    # ------------------------------------------------------------ what they cost

    def has_room(self, others: Sequence[Models | None], only: Models | None) -> bool:
        """For one more that wants these models. others: what those want who listen already."""
        if len(others) < ALWAYS:
            return True
        prices = {one: price(self._table, one) for one in {*others, only}}
        return sum(prices[one] for one in others) + prices[only] <= BYTES_PER_S

    def may_have_snapshot(self, only: Models | None, now: float) -> bool:
        """Whether one of these models can be told soon."""
        return self.pace.left(now) >= min(RESERVE, RECORD_BYTES * wanted(self._table, only))

    # ------------------------------------------------------------ which models there are

    def tick(self, now: float) -> None:
        """Tell of new and gone models, but not more often than each MODELS_S."""
        if now < self._models_at or self._models_told == self._table.models_version:
            return
        self._models_told, self._models_at = self._table.models_version, now + MODELS_S
        lists: dict[str, ModelList] = {}
        for one in self._clients():
            if one.greeted:
                if one.named not in lists:
                    lists[one.named] = self._list_models(one.named)
                one.models = lists[one.named]

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._models_at if self._models_told != self._table.models_version else None

    def _list_models(self, named: str) -> ModelList:
        here = self._table.addresses(self._own) if self._own is not None else ()
        return list_models(self._table, named, here)
