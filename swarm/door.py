"""Who comes in: strangers that haven't proved an identity yet, and how many connections are held. Pure.

Theory of operation. A connection passes three stages:

    waiting    accepted, and nothing was computed for it      Door.knock
    shaking    its handshake goes on                          Door.turns, at most HANDSHAKES_PER_S
    inside     it has proved an identity                      Door.proved

The first two together are `pending`: 64 in all, 4 of one address group (`addresses.address_group`: a /24 or a
/48), each for `Limits.handshake_s` and `Limits.handshake_bytes` at most. Where one more comes than there is room
for, the oldest goes of the group that has the most: whoever fills the table pushes out itself. An honest handshake
takes a round trip, so the oldest is also the least likely to be one. Turns go to the group that has the fewest
first. So as long as an honest stranger isn't in the attacker's own /24, it waits behind nobody.

This machine itself (loopback) is exempt from the limit by group, not from those in all: a demo's peers start
at once, and whoever may run programs here needs no socket to take the machine's time. A private address is a
group of its own, so that one neighbour of a LAN can't shut out the others.

Inside, an identity may hold LINKS_PER_PEER connections; a further one closes its oldest. All together may hold
`most_links`. Above that the oldest idle one of the most crowded group goes, else the newest of a group that
would still have more than the newcomer's, else the newcomer.

Groups that were thrown out for a flood (`strike`) aren't let in for a time that grows (`buckets.Penalties`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.addresses import address_group, is_loopback
from swarm.buckets import Bucket, Penalties
from swarm.identity import PeerId

MAX_PENDING = 64  # an honest handshake takes a round trip: room for some hundred strangers a second
PENDING_PER_GROUP = 4
# One costs 0.8 ms of the loop's time (two key exchanges and a signature), so a flood of them gets a twelfth of it.
HANDSHAKES_PER_S = 100.0
HANDSHAKE_BURST = 32.0  # peers that come back together after a cut
LINKS_PER_PEER = 4  # two that dialled each other, one to see whether an address works, one that nobody closed

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Pending:
    group: str
    exempt: bool  # from the limit by group
    begun: bool = False


@dataclass(slots=True)
class _Inside:
    group: str
    peer: PeerId


class Door(Generic[K]):
    """is_busy: whether a connection inside has work on it. most_links: connections inside, see `transport.py`."""

    def __init__(self, is_busy: Callable[[K], bool], most_links: int, now: float) -> None:
        self._is_busy, self.most_links = is_busy, most_links
        self._pending: dict[K, _Pending] = {}  # oldest first
        self._inside: dict[K, _Inside] = {}  # oldest first
        self._turns = Bucket(HANDSHAKES_PER_S, HANDSHAKE_BURST, now)
        self._penalties = Penalties()

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def inside(self) -> int:
        return len(self._inside)

    # ------------------------------------------------------------ strangers

    def strangers(self) -> list[K]:
        return list(self._pending)

    def knock(self, key: K, host: str, now: float) -> list[K]:
        """A stranger connected. Returns who must be dropped for it, which may be itself."""
        group = address_group(host)
        if self._penalties.refused_until(group, now) is not None:
            return [key]
        self._pending[key] = _Pending(group, is_loopback(host))
        mine = [one for one, pending in self._pending.items() if pending.group == group]
        dropped: list[K] = []
        if len(mine) > PENDING_PER_GROUP and not is_loopback(host):
            dropped.append(mine[0])
        elif len(self._pending) > MAX_PENDING:
            dropped.append(self._oldest_of_the_most_crowded())
        for one in dropped:
            del self._pending[one]
        return dropped

    def turns(self, now: float) -> list[K]:
        """Whose handshake begins now."""
        chosen: list[K] = []
        while (waiting := self._next_waiting()) is not None and self._turns.take(now):
            self._pending[waiting].begun = True
            chosen.append(waiting)
        return chosen

    def next_turn_at(self, now: float) -> float | None:
        """When to call `turns` again; None while nobody waits."""
        return None if self._next_waiting() is None else self._turns.ready_at(now)

    def _next_waiting(self) -> K | None:
        """The oldest that waits, of the group with the fewest pending."""
        sizes = self._sizes()
        waiting = [(sizes[one.group], key) for key, one in self._pending.items() if not one.begun]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None

    def _oldest_of_the_most_crowded(self) -> K:
        sizes = self._sizes()
        most = max(sizes.values())
        return next(key for key, one in self._pending.items() if sizes[one.group] == most)

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for one in self._pending.values():
            sizes[one.group] = sizes.get(one.group, 0) + 1
        return sizes

    # ------------------------------------------------------------ those inside

    def proved(self, key: K, peer: PeerId) -> list[K]:
        """A stranger has proved an identity. Returns who must be closed for it, which may be itself."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return []
        self._inside[key] = _Inside(pending.group, peer)
        own = [one for one, inside in self._inside.items() if inside.peer == peer]
        closed = own[:1] if len(own) > LINKS_PER_PEER else []
        if not closed and len(self._inside) > self.most_links:
            closed = [self._least_needed(key)]
        for one in closed:
            del self._inside[one]
        return closed

    def make_room(self) -> K | None:
        """Somebody idle to close, where descriptors have run out; None if all are busy."""
        return self._oldest_idle(self._groups())

    def gone(self, key: K) -> None:
        self._pending.pop(key, None)
        self._inside.pop(key, None)

    def strike(self, host: str, now: float) -> float:
        """Thrown out for a flood. Returns for how many seconds its group isn't let in; this machine always is."""
        return 0.0 if is_loopback(host) else self._penalties.strike(address_group(host), now)

    def _groups(self) -> dict[str, list[K]]:
        """The connections inside by group, the most crowded first."""
        groups: dict[str, list[K]] = {}
        for key, one in self._inside.items():
            groups.setdefault(one.group, []).append(key)
        return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))

    def _least_needed(self, newcomer: K) -> K:
        groups = self._groups()
        idle = self._oldest_idle(groups, newcomer)
        if idle is not None:
            return idle
        crowded = next(iter(groups.values()))
        return crowded[-1] if len(crowded) > len(groups[self._inside[newcomer].group]) else newcomer

    def _oldest_idle(self, groups: dict[str, list[K]], besides: K | None = None) -> K | None:
        idle = (key for keys in groups.values() for key in keys if key != besides and not self._is_busy(key))
        return next(idle, None)
