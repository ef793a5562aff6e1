"""How many identities one place of the internet may have in a table, and who goes when there are too many.

An identity costs nothing and an address does. Every public address that a peer advertises counts in its
group (a /24, a /48, or a domain), and in none of these may it be one too many. Private, loopback,
link-local and carrier-grade ranges are exempt: a LAN is as large as it is.

What a peer says of its addresses is its own word, so somebody can fill the group of a stranger. Therefore
nobody who was seen where it says it is (a connection with that identity, to or from there: `proved`) is
crowded out by somebody who wasn't, and of those whom nobody here saw the newest goes first. Where a group
is full of such claims, `suspect` names one whom the circle dials when it dials somebody anyway; who isn't
there loses the place (`disproved`). What remains: a newcomer in a group that somebody has filled is known
to those who saw it, and to the others only as they find the claims empty, one a minute; and whoever has
many addresses may have many identities.

Pure. Invariant: at most MAX_PEERS in all and the group's limit in each group, all the time.
"""

from __future__ import annotations

import functools
import ipaddress
import random
from collections.abc import Collection

from swarm.compact import compacted
from swarm.identity import PeerId

MAX_PEERS = 16_384  # 10,000 and room
MAX_PER_GROUP = 64  # a flat has one public address, a laboratory or a rack a few dozen
MAX_PER_DOMAIN = 256  # names: strangers share the domain of a dynamic DNS service
MAX_PROVED = 4096  # peers that were seen here; the one seen longest ago is forgotten first
MAX_GROUPS_PROVED = 9  # of one peer: all that it may advertise, and where it came from
MAX_CONTESTED = 64  # groups in which somebody was turned away lately
CONTESTED_S = 1800.0  # "lately"
TURNED_AWAY_S = 300.0  # before somebody who wasn't where it claimed, or found no room, is looked at again
MAX_TURNED_AWAY = 16_384

Groups = tuple[str, ...]
_V4_BITS, _V6_BITS = 24, 48


@functools.lru_cache(1024)
def group_of(address: str) -> str | None:
    """The group of `host`, `host:port` or `[ipv6]:port`; None for what is exempt or local."""
    host = _host(address)
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _domain(host)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        ip = inner or ip  # these need one IPv4 address each, so that is what counts
    if not ip.is_global:
        return None
    return str(ipaddress.ip_network((ip, _V4_BITS if ip.version == 4 else _V6_BITS), strict=False))


def groups_of(addresses: Collection[str]) -> Groups:
    """The groups in which a peer with these addresses counts; () if it is exempt."""
    return tuple(sorted({group for group in map(group_of, addresses) if group is not None}))


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]


def _domain(host: str) -> str | None:
    """The last two labels; None for a name of one label, or of the LAN (RFC 6762)."""
    labels = host.lower().rstrip(".").split(".")
    return None if len(labels) < 2 or labels[-1] == "local" else "*." + ".".join(labels[-2:])


def _limit(group: str) -> int:
    return MAX_PER_DOMAIN if group.startswith("*") else MAX_PER_GROUP


class Places:
    """Who has a place. The table asks `victims` before it takes somebody in, and calls `enter` and `leave`.
    own: whoever keeps this table, and is never in question."""

    def __init__(self, own: PeerId | None = None) -> None:
        self._own = own
        self._groups: dict[PeerId, Groups] = {}  # of those inside
        self._members: dict[str, dict[PeerId, None]] = {}  # in the order of coming
        self._unproved: tuple[dict[PeerId, None], dict[PeerId, None]] = ({}, {})  # exempt ones, others
        self._proved: dict[PeerId, set[str]] = {}  # -> groups in which it was seen; the last seen last
        self._contested: dict[str, float] = {}
        self._away: dict[PeerId, float] = {}  # -> until

    def __len__(self) -> int:
        return len(self._groups)

    def victims(self, peer: PeerId, groups: Groups, now: float) -> list[PeerId] | None:
        """Who must go so that `peer` can enter, or None if it can't. Nothing changes but what is contested."""
        if peer in self._groups and self._groups[peer] == groups:
            return []
        going: dict[PeerId, None] = {}
        for group in groups:
            members = self._members.get(group, {})
            if peer in members or len(members) - sum(one in members for one in going) < _limit(group):
                continue
            victim = self._newest_unproved_in(group) if self._seen_in(peer, group) else None
            if victim is None:
                self._contest(group, now)
                return None
            going[victim] = None
        if peer not in self._groups and len(self._groups) - len(going) >= MAX_PEERS:
            victim = self._newest_unproved(proved=self.is_proved(peer), exempt=not groups)
            if victim is None:
                return None
            going[victim] = None
        return list(going)

    def enter(self, peer: PeerId, groups: Groups) -> None:
        if self._groups.get(peer) == groups:
            return
        self.leave(peer)
        self._groups[peer] = groups
        for group in groups:
            self._members.setdefault(group, {})[peer] = None
        if not self.is_proved(peer):
            self._unproved[bool(groups)][peer] = None
        self._away.pop(peer, None)

    def leave(self, peer: PeerId) -> None:
        for group in self._groups.pop(peer, ()):
            del self._members[group][peer]
            if not self._members[group]:
                del self._members[group]
        for unproved in self._unproved:
            unproved.pop(peer, None)

    # ------------------------------------------------------------ what was seen

    def proved(self, peer: PeerId, host: str) -> None:
        """There is a connection with `peer`, whose other end is at `host`."""
        groups = self._proved.pop(peer, set())
        group = group_of(host)
        if group is not None and len(groups) < MAX_GROUPS_PROVED:
            groups.add(group)
        self._proved[peer] = groups
        for unproved in self._unproved:
            unproved.pop(peer, None)
        if len(self._proved) > MAX_PROVED:
            self._unprove(next(iter(self._proved)))

    def forget(self, peer: PeerId) -> None:
        """It isn't here, and nothing is remembered of it any more."""
        if peer not in self._groups:
            self._proved.pop(peer, None)

    def compact(self) -> None:
        """Let go of room that nobody needs any more."""
        self._groups, self._proved = compacted(self._groups), compacted(self._proved)
        self._members = {group: compacted(members) for group, members in self._members.items()}
        exempt, others = self._unproved
        self._unproved = compacted(exempt), compacted(others)

    def is_proved(self, peer: PeerId) -> bool:
        return peer in self._proved or peer == self._own

    def suspect(self, rng: random.Random, now: float) -> PeerId | None:
        """Somebody who was never seen, in a group where there was no room for another."""
        self._contested = {group: at for group, at in self._contested.items() if now - at < CONTESTED_S}
        found = [
            peer
            for group in self._contested
            for peer in self._members.get(group, ())
            if not self._seen_in(peer, group)
        ]
        return rng.choice(found) if found else None

    def is_contested(self, peer: PeerId) -> bool:
        """Whether somebody waits for a place that `peer` holds without having been seen there."""
        return any(
            group in self._contested and not self._seen_in(peer, group)
            for group in self._groups.get(peer, ())
        )

    def turn_away(self, peer: PeerId, now: float) -> None:
        """There is no place for it, so what is told of it isn't worth reading for a while."""
        self._away.pop(peer, None)
        self._away[peer] = now + TURNED_AWAY_S
        if len(self._away) > MAX_TURNED_AWAY:
            del self._away[next(iter(self._away))]

    def is_turned_away(self, peer: PeerId, now: float) -> bool:
        until = self._away.get(peer)
        return until is not None and until > now and not self.is_proved(peer)

    # ------------------------------------------------------------ inside

    def _seen_in(self, peer: PeerId, group: str) -> bool:
        return group in self._proved.get(peer, ()) or peer == self._own

    def _newest_unproved_in(self, group: str) -> PeerId | None:
        return next((one for one in reversed(self._members[group]) if not self._seen_in(one, group)), None)

    def _newest_unproved(self, *, proved: bool, exempt: bool) -> PeerId | None:
        """Whom a newcomer may push out of a full table: one that was seen anybody who wasn't, a public
        address one that says of itself only what nobody can check."""
        private, public = self._unproved
        if proved:
            return next(reversed(private or public), None)
        return None if exempt else next(reversed(private), None)

    def _contest(self, group: str, now: float) -> None:
        self._contested.pop(group, None)
        self._contested[group] = now
        if len(self._contested) > MAX_CONTESTED:
            del self._contested[next(iter(self._contested))]

    def _unprove(self, peer: PeerId) -> None:
        del self._proved[peer]
        if peer in self._groups:
            self._unproved[bool(self._groups[peer])][peer] = None
