"""Who may open a session here: shares of what this peer has, and how often. No torch, no clock.

An only user may use all of it. Where another one wants room and there is none, whoever holds most gives some up:
first between address groups (identities cost nothing, networks do), then between the identities of one group. A
session is let go only if whoever held it still has at least as much as the newcomer then, so what is taken
never goes back and forth, everybody keeps a first session, and a flood of sessions costs the flooder's own.
The newest go first: least was computed for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.buckets import BucketTable
from swarm.identity import PeerId

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class AdmissionConfig:
    """opens_per_s, opens_burst: epochs that one client may begin, a new session or a repair; each costs a
    signature check and up to a millisecond. A client that opens 8 answers at once and loses a peer begins 16.
    An address group may begin group_shares times as many. retry_after_s: what a client over it is told."""

    opens_per_s: float = 20.0
    opens_burst: float = 100.0
    group_shares: int = 4
    retry_after_s: float = 2.0


class OpenRate:
    """Epochs begun, by client and by address group."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._own = BucketTable(config.opens_per_s, config.opens_burst)
        self._group = BucketTable(config.group_shares * config.opens_per_s, config.group_shares * config.opens_burst)

    def take(self, client: PeerId, group: str, now: float) -> bool:
        """False: that was one too many."""
        return self._own.take(client, now) and self._group.take(group, now)


@dataclass(frozen=True, slots=True)
class Holding(Generic[K]):
    """One session at this peer. amount: of what is lacking, in whatever unit."""

    key: K
    client: PeerId
    group: str
    amount: int


def sessions_to_let_go(
    held: Sequence[Holding[K]], client: PeerId, group: str, wanted: int, lacking: int
) -> list[K]:
    """Whose sessions make room for `wanted` more of `client`, where `lacking` of it isn't free.

    held: in the order in which they were opened. [] if the newcomer must wait: nobody has so much more.
    """
    by_group: Counter[str] = Counter()
    by_client: Counter[PeerId] = Counter()
    for one in held:
        by_group[one.group] += one.amount
        by_client[one.client] += one.amount
    left, chosen = list(held), list[K]()
    while lacking > 0:
        found = _next_to_go(left, by_group, by_client, client, group, wanted)
        if found is None:
            return []
        left.remove(found)
        by_group[found.group] -= found.amount
        by_client[found.client] -= found.amount
        lacking -= found.amount
        chosen.append(found.key)
    return chosen


def _next_to_go(
    left: Sequence[Holding[K]],
    by_group: Counter[str],
    by_client: Counter[PeerId],
    client: PeerId,
    group: str,
    wanted: int,
) -> Holding[K] | None:
    """The newest session of the largest holder that would still have as much as the newcomer."""

    def spare(one: Holding[K]) -> bool:
        if one.group != group:
            return by_group[one.group] - one.amount >= by_group[group] + wanted
        return one.client != client and by_client[one.client] - one.amount >= by_client[client] + wanted

    able = [(by_group[one.group], by_client[one.client], at) for at, one in enumerate(left) if spare(one)]
    return left[max(able)[2]] if able else None
