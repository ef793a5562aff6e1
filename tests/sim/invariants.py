"""What must hold in a registry world at every moment, looked at with other eyes than the core's.

- Nobody holds a record that its owner didn't sign (the notary knows what was), nor one read wrongly.
- Nobody goes back to an older record of the same peer, by protocol.md's order read from the bytes.
- A lease is what remains of it: the world knows when each head was signed and how long each telling of it
  was on its way (which no age counts), and nobody holds it for longer than that.
- So after a lease nobody lists the dead; and once `expected` is set, nobody misses one of the living.
- Tables, and what is kept for each neighbour, stay within their bounds.

That no message is above its limit, and that nothing but MessageError comes out of a core that receives, the
network sees to: both raise there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm.asks import MAX_ASKED
from swarm.circle import KEPT_NEIGHBOURS, MAX_ADDRESSES, MAX_NEIGHBOURS
from swarm.heads import Held, PeerEntry
from swarm.heard import MAX_RECENT
from swarm.identity import PeerId, peer_id
from swarm.messages import Delta, Told
from swarm.neighbour import MAX_OBJECTIONS, MAX_OWED, MAX_SNAPSHOTS, Kind
from swarm.places import MAX_PEERS, MAX_PER_GROUP, MAX_TURNED_AWAY, groups_of
from swarm.table import MAX_GONE
from tests.sim.network import End
from tests.sim.records import Signed

if TYPE_CHECKING:
    from tests.sim.registry_world import Participant, RegistryWorld

ROUNDING_S = 1e-3  # ages are floats, clocks are apart by up to a million seconds


class Violation(AssertionError):
    """An invariant doesn't hold."""


@dataclass
class _Seen:
    """What a participant held last of one peer. expires: true time at which the lease must be over."""

    head: bytes
    standing: tuple[Any, ...]
    expires: float


@dataclass
class _Memory:
    """Of one participant. stretch: head -> seconds that its tellings were on their way to here. held_at: head ->
    when it was held here first (true time): nobody can make it younger than that."""

    seen: dict[PeerId, _Seen] = field(default_factory=dict)
    stretch: dict[bytes, float] = field(default_factory=dict)
    held_at: dict[bytes, float] = field(default_factory=dict)


class Invariants:
    """expected: peer -> signed descriptor, of exactly those whom everybody must list from now on. sweep_s:
    between looks at everything; what just changed is looked at at once."""

    def __init__(self, world: RegistryWorld) -> None:
        self._world = world
        self._of: dict[Participant, _Memory] = {}
        self.expected: dict[PeerId, bytes] | None = None
        self.counts: Counter[str] = Counter()
        self.watching = True
        self.sweep_s = 1.0
        world.network.at(self.sweep_s, self._sweep_regularly)

    # ------------------------------------------------------------ when to look

    def heard(self, here: Participant, end: End, message: Delta) -> None:
        """`here` has just taken this in, or refused it."""
        if not self.watching:
            return
        memory = self._memory(here)
        sender = self._of.get(end.peer.shell)  # type: ignore[arg-type]
        for told in message.records:
            signed = self._world.notary.signed.get(told.head)
            if signed is None:
                self.counts["forged heads"] += 1
                continue
            peer = peer_id(signed.values["p"])
            seen = memory.seen.get(peer)
            self._stretch(memory, told, signed.at, sender, end.transit_s)
            if seen is not None and seen.head == told.head:  # another opinion on its age
                seen.expires = max(seen.expires, self._expires(memory, told.head, signed))
            self.look_at(here, peer)

    def _stretch(
        self, memory: _Memory, told: Told, signed_at: float, sender: _Memory | None, transit_s: float
    ) -> None:
        """How much longer than its lease this telling can make a head live: the longest counts."""
        before = sender.stretch.get(told.head) if sender is not None else None
        if before is None:  # a liar's word: what it says may be believed
            before, transit_s = max(0.0, self._world.now - told.age_s - signed_at), 0.0
            self.counts["liars' tellings"] += 1
        memory.stretch[told.head] = max(memory.stretch.get(told.head, 0.0), before + transit_s)

    def after_turn(self, here: Participant) -> None:
        if self.watching and here.published_at is not None:
            self.look_at(here, here.peer)

    def gone(self, dead: Participant) -> None:
        self._of.pop(dead, None)

    def sweep(self) -> None:
        """Look at everything."""
        for here in list(self._world.there.values()):
            if here.running:
                self._look_at_all(here)

    def _sweep_regularly(self) -> None:
        if self.watching:
            self.sweep()
        self._world.network.at(self._world.now + self.sweep_s, self._sweep_regularly)

    # ------------------------------------------------------------ what to look for

    def look_at(self, here: Participant, peer: PeerId) -> None:
        """At what `here` holds of `peer`."""
        held = here.registry.table.get(peer)
        if held is None or not self.watching:
            return
        memory = self._memory(here)
        seen = memory.seen.get(peer)
        if seen is not None and seen.head == held.head_bytes:
            self._check_lease(here, held, seen)
            return
        standing = self._standing(here, held)
        if seen is not None and standing <= seen.standing:
            raise Violation(f"{here.name} went back to an older record of {self._name(peer)}")
        signed = self._world.notary.signed[held.head_bytes]
        if signed.owner == here.peer and not here.client:
            memory.stretch.setdefault(held.head_bytes, 0.0)
        if held.head_bytes not in memory.stretch:
            raise Violation(f"{here.name} holds a record of {self._name(peer)} that nobody told it")
        memory.held_at.setdefault(held.head_bytes, self._world.now)
        made = _Seen(held.head_bytes, standing, self._expires(memory, held.head_bytes, signed))
        self._check_lease(here, held, made)
        memory.seen[peer] = made
        self.counts["records taken"] += 1

    @staticmethod
    def _expires(memory: _Memory, head: bytes, signed: Signed) -> float:
        by_age = signed.at + memory.stretch[head]
        return min(by_age, memory.held_at.get(head, by_age)) + signed.values["l"]

    def _standing(self, here: Participant, held: Held) -> tuple[Any, ...]:
        """Where a head stands among those of its owner. Raises Violation unless all of it is the owner's."""
        values = self._values(here, held, held.head_bytes, "a head")
        if peer_id(values["p"]) != held.peer or values["s"] != held.head.seq:
            raise Violation(f"{here.name} read a head of {self._name(held.peer)} wrongly")
        if values[""] == "b":
            if held.descriptor_bytes is not None:
                raise Violation(f"{here.name} holds a descriptor for {self._name(held.peer)}, who left")
            return (values["s"], True, hashlib.sha256(held.head_bytes).digest(), 0, b"")
        if held.descriptor_bytes is None or held.descriptor is None:
            raise Violation(f"{here.name} holds a heartbeat without its descriptor")
        about = self._values(here, held, held.descriptor_bytes, "a descriptor")
        digest = hashlib.sha256(held.descriptor_bytes).digest()
        if (
            not digest.startswith(values["d"])
            or about["p"] != values["p"]
            or about["s"] != held.descriptor.seq
        ):
            raise Violation(f"{here.name} holds a heartbeat with a descriptor it doesn't name")
        if values["s"] <= about["s"]:
            raise Violation(f"{here.name} holds a heartbeat that isn't newer than its descriptor")
        return (about["s"], False, digest, values["s"], hashlib.sha256(held.head_bytes).digest())

    def _values(self, here: Participant, held: Held, data: bytes, what: str) -> dict[str, Any]:
        signed = self._world.notary.signed.get(data)
        if signed is None or signed.owner != held.peer:
            raise Violation(f"{here.name} holds {what} of {self._name(held.peer)}, who didn't sign it")
        return signed.values

    def _check_lease(self, here: Participant, held: Held, seen: _Seen) -> None:
        left, most = held.lapses_at - here.now, seen.expires - self._world.now
        if left > most + ROUNDING_S:
            raise Violation(
                f"{here.name} gives {self._name(held.peer)} {left:.3f} s more, its lease has {most:.3f} s left"
            )

    def _look_at_all(self, here: Participant) -> None:
        memory = self._memory(here)
        for held in here.registry.table.held():
            self.look_at(here, held.peer)
        listed: dict[PeerId, bytes] = {}
        for entry in here.registry.live(here.now):
            listed[entry.peer] = entry.descriptor_bytes
            over = self._world.now - memory.seen[entry.peer].expires
            if over > ROUNDING_S:
                raise Violation(f"{here.name} lists {self._name(entry.peer)} {over:.3f} s after its lease")
        self._check_bounds(here)
        self._check_expected(here, listed)

    def _check_expected(self, here: Participant, listed: dict[PeerId, bytes]) -> None:
        if self.expected is None:
            return
        for peer in self.wanted(here) - listed.keys():
            raise Violation(f"{here.name} misses {self._name(peer)}, who is alive and connected")
        for peer, data in listed.items():
            if self.expected.get(peer, data) != data:
                raise Violation(f"{here.name} has an old descriptor of {self._name(peer)}")

    def wanted(self, here: Participant) -> set[PeerId]:
        """Whom of the expected ones `here` asked to hear of."""
        assert self.expected is not None
        if not here.client or here.fingerprint is None:
            return set(self.expected)
        signed = self._world.notary.signed
        return {peer for peer, data in self.expected.items() if signed[data].values["f"] == here.fingerprint}

    def _check_bounds(self, here: Participant) -> None:
        core, known = here.registry, here.registry.table
        bounds = {
            "peers": (len(known), MAX_PEERS),
            "tombstones": (len(known._gone), MAX_GONE + 1),
            "heads heard of": (len(known._recent), MAX_RECENT),
            "lapses": (len(known._lapses), 4 * len(known) + 65),
            "heads by id": (len(known._by_id), len(known)),
            "heads asked for": (len(core._asked), MAX_ASKED),
            "old addresses": (len(core._circle._addresses), MAX_ADDRESSES),
        }
        gossips = [one for one in core.neighbours if one.kind is Kind.GOSSIP and not one.visitor]
        bounds["neighbours"] = (len(gossips), MAX_NEIGHBOURS + KEPT_NEIGHBOURS + 1)
        bounds["turned away"] = (len(known.places._away), MAX_TURNED_AWAY)
        for one in core.neighbours:
            bounds["answers owed"] = (len(one._answers), MAX_OWED)
            bounds["asks owed"] = (len(one._asks), MAX_ASKED)
            bounds["offers owed"] = (len(one._changes) + len(one._renewals), MAX_PEERS + MAX_GONE)
            bounds["objections owed"] = (len(one._objections), MAX_OBJECTIONS)
            bounds["objections made"] = (len(one._objected), MAX_OBJECTIONS)
            bounds["snapshots owed"] = (len(one._snapshots), MAX_SNAPSHOTS)
        crowded = known.held() if len(known) > MAX_PER_GROUP else ()
        groups = Counter(group for held in crowded for group in groups_of(held.addresses))
        for group, found in groups.items():
            bounds[f"peers at {group}"] = (found, MAX_PER_GROUP)
        for what, (found, most) in bounds.items():
            if found > most:
                raise Violation(f"{here.name} keeps {found} {what}, {most} at most")

    # ------------------------------------------------------------ agreement

    def agreed(self, expected: dict[PeerId, bytes], among: Iterable[Participant], *, exactly: bool) -> bool:
        """Whether all of these list those, with these descriptors and a fresh heartbeat. exactly: and nobody
        else; before, the dead may be there until their leases are over (which is looked at anyway)."""
        before, self.expected = self.expected, expected
        try:
            return all(self._is_right(here, expected, exactly) for here in among)
        finally:
            self.expected = before

    def _is_right(self, here: Participant, expected: dict[PeerId, bytes], exactly: bool) -> bool:
        fresh = {
            entry.peer: entry.descriptor_bytes
            for entry in here.registry.live(here.now, here.fingerprint if here.client else None)
            if entry.peer not in self._world.hostile and entry.lease_left_s > entry.heartbeat.lease_s / 3
        }
        wanted = self.wanted(here)
        if exactly and fresh.keys() != wanted:
            return False
        return all(fresh.get(peer) == expected[peer] for peer in wanted)

    def check_equal(self, among: Iterable[Participant]) -> None:
        """Whoever lists a peer, a liar too, lists the same of it as the others.

        But a client may list what outranks that: it tells nobody anything, so what a liar told a client alone no peer
        ever hears of.
        """
        first: dict[PeerId, tuple[str, PeerEntry]] = {}
        for here in sorted(among, key=lambda one: one.client):
            for entry in here.registry.live(here.now):
                name, other = first.setdefault(entry.peer, (here.name, entry))
                if entry.descriptor_bytes == other.descriptor_bytes or (here.client and _outranks(entry, other)):
                    continue
                raise Violation(f"{here.name} and {name} hold other records of {self._name(entry.peer)}")

    def check_one_stream_a_pair(self, among: Iterable[Participant]) -> None:
        for here in among:
            kept = Counter(one.peer for one in here.registry.neighbours if one.kind is not Kind.SUBSCRIBER)
            for peer, streams in kept.items():
                if streams > 1:
                    raise Violation(f"{here.name} keeps {streams} streams with {self._name(peer)}")

    def _memory(self, here: Participant) -> _Memory:
        if here not in self._of:
            self._of[here] = _Memory()
        return self._of[here]

    def _name(self, peer: PeerId) -> str:
        return self._world.name_of(peer)


def _outranks(one: PeerEntry, other: PeerEntry) -> bool:
    """By protocol.md: the higher seq, and of equal ones the larger hash."""
    ranks = ((entry.descriptor.seq, hashlib.sha256(entry.descriptor_bytes).digest()) for entry in (one, other))
    return next(ranks) > next(ranks)
