"""How many clients one peer tells everything: as many as its home connection doesn't notice.

A client hears of every heartbeat of its models, and asks each of its sources for a share of them. That is nothing
where ten peers beat, and 13 kB/s for one client where 10,000 do; and its snapshot is then 7 MB. So what clients cost
is counted before it is promised, and whoever is one too many gets a few records and goes on to another peer: there
are as many sources as peers. Who asks for more than that all the same waits, and asks another source meanwhile.

Invariant: in any span of t seconds clients are told at most RESERVE + BYTES_PER_S * t bytes of records.

Pure; `now` in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.buckets import Bucket
from swarm.circle import KEPT_SOURCES
from swarm.digests import Models
from swarm.messages import RECORD_ID_BYTES
from swarm.owner import heartbeat_interval_s
from swarm.table import Table

BYTES_PER_S = 64_000.0  # for all clients together: half a megabit, as much again as gossip takes among 10,000
ALWAYS = 4  # clients that are served whatever they cost, so that a swarm of few peers serves somebody
RESERVE = 16e6  # bytes: two snapshots at once where there are 10,000 peers, thousands where there are ten
HEAD_BYTES = 210  # of a heartbeat in a delta
RECORD_BYTES = 700  # of a descriptor and a heartbeat


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
    """Of one registry. pace: of the bytes of records that clients are told."""

    def __init__(self, table: Table, now: float) -> None:
        self._table = table
        self.pace = Bucket(BYTES_PER_S, RESERVE, now)

    def has_room(self, others: Sequence[Models | None], only: Models | None) -> bool:
        """For one more that wants these models. others: what those want who listen already."""
        if len(others) < ALWAYS:
            return True
        prices = {one: price(self._table, one) for one in {*others, only}}
        return sum(prices[one] for one in others) + prices[only] <= BYTES_PER_S

    def may_have_snapshot(self, only: Models | None, now: float) -> bool:
        """Whether one of these models can be told soon."""
        return self.pace.left(now) >= min(RESERVE, RECORD_BYTES * wanted(self._table, only))
