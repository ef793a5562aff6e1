"""CORE: every participant's copy of the live records, kept nearly equal by gossip.

Theory of operation. `table.py` says what is true, `owner.py` says what we are, `neighbour.py` holds
what is owed to whom, `circle.py` picks the neighbours, `budget.py` bounds the work that others can make,
`audience.py` what clients may cost, `wishes.py` is what we want and who tells it; this ties them together.

    new head here --> Offer(id) to each neighbour that didn't offer it itself
                          changes at once, renewals in batches of a second
    Offer(id) ------> Ask(id) once, of whoever offered first; of the next one if no answer comes
    Ask(id) --------> Delta(record, age)
    now and then ---> Digest to one neighbour; where it differs, both sides offer what they have
    newcomer -------> GossipHello(snapshot) or Subscribe: all in bulk from one, and the others' digests

A client is a `Subscribe`r at up to three peers: it asks and takes, offers nothing, is told which models
there are and then of those that it wants (`want`), and a peer that hears gossip from a client ends the stream.

Invariants: those of `table.py`; a head crosses each stream at most once, but for repairs; what is
kept per neighbour and in all is bounded; whoever sends what can't be true loses the stream
(`receive` raises MessageError), and nobody else loses anything.

Pure: `now` is seconds on a clock that counts time asleep. The shell (`node.py`) calls `attach`,
`receive`, `detach` and `tick`, then sends what `next_message` gives, does what `actions` lists, and
wakes it at `deadline`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from swarm import circle
from swarm.asks import Asked, Asks
from swarm.audience import Audience
from swarm.budget import Budget
from swarm.circle import Circle, Drop, Reach, ReachAddress, Role
from swarm.clocks import ClockOff, Clocks
from swarm.digests import Models, check_buckets, differing
from swarm.errors import MessageError
from swarm.heads import Held, PeerEntry, head_id, read_head
from swarm.identity import Identity, PeerId
from swarm.listing import list_models
from swarm.messages import (
    Ask,
    Delta,
    Digest,
    GossipHello,
    Message,
    ModelList,
    ModelSeen,
    Offer,
    Subscribe,
    Told,
)
from swarm.neighbour import DIGEST_BUCKETS, DIGEST_BUCKETS_LARGE, LARGE, Kind, Neighbour
from swarm.owner import Owner, heartbeat_interval_s
from swarm.places import MAX_PEERS, group_of
from swarm.records import Descriptor, Heartbeat, Leave, Load, Record, check_signature
from swarm.sources import Sources
from swarm.table import Table, Verdict
from swarm.wishes import Wishes

__all__ = ["Action", "ClockOff", "Drop", "Kind", "PeerEntry", "Reach", "ReachAddress", "Registry"]
__all__ += ["SecondInstance", "SnapshotComplete", "heartbeat_interval_s", "in_parts"]

PART_RECORDS = 16  # of a Delta at a time: two signatures each, 0.2 ms to verify one
DIGEST_S = 10.0  # between reconciliations, with one neighbour each
DIGEST_MIN_S = 0.5  # a neighbour that sends digests faster isn't answered: each may cost a list of all
OFFERED_FOR_A_DIGEST = 3000  # peers; takes 4 ms
CLOCK_CHECK_S = 30.0  # between looks at the own wall clock


@dataclass(frozen=True)
class SnapshotComplete:
    """All that is wanted has arrived, so whoever waits for it on the stream `key` need not any more."""

    key: int


@dataclass(frozen=True)
class SecondInstance:
    """Another process speaks with this identity right now: a copied key, or started twice."""

    age_s: float


Action: TypeAlias = Reach | ReachAddress | Drop | SnapshotComplete | SecondInstance | ClockOff


def in_parts(message: Message) -> Iterator[Message]:
    """What to give `receive` one after the other instead of `message`: each part takes some milliseconds at most.

    A Delta may hold 109 records that all have to be verified; a shell lets others run in between.
    """
    if not isinstance(message, Delta) or len(message.records) <= PART_RECORDS:
        yield message
        return
    for start in range(0, len(message.records), PART_RECORDS):
        stop = start + PART_RECORDS
        yield Delta(message.records[start:stop], message.complete and stop >= len(message.records))


class Registry:
    """identity: None for a client. first_seq: max(persisted + 1, unix ms). unix_ms: the wall clock
    at `now`. only: the models that a client wants to hear of at first (by fingerprint), or None for all."""

    def __init__(
        self,
        identity: Identity | None,
        *,
        now: float,
        rng: random.Random,
        only: Collection[bytes] | None = None,
        first_seq: int = 1,
        unix_ms: int = 0,
        check: Callable[[Record, bytes], None] = check_signature,
    ) -> None:
        self.role: Role = "client" if identity is None else "peer"
        self.table = Table(check, identity.peer_id if identity is not None else None)
        self._check = check
        self._rng = rng
        self._owner = (
            Owner(identity, first_seq=first_seq, now=now, unix_ms=unix_ms) if identity is not None else None
        )
        self._circle = Circle(identity.peer_id if identity else None, self.role, rng, now)
        self._budget = Budget(now)
        self._clocks = Clocks()
        self._clock_check_at = now
        self._neighbours: dict[int, Neighbour] = {}
        self._wishes = Wishes(self._neighbours, only, now)
        self._audience = Audience(self.table, self._neighbours, identity.peer_id if identity else None, rng, now)
        self._gossips: frozenset[PeerId] = frozenset()  # the peers among them
        self._asked = Asks(self._neighbours, self.table)
        self._actions: list[Action] = []
        self._sources = Sources()
        self._digest_at = now + DIGEST_S * rng.uniform(0.2, 1.0)
        self._ticked_at = now
        self._lapsed_at: float | None = None

    # ------------------------------------------------------------ what is known

    def live(self, now: float, fingerprint: bytes | None = None) -> tuple[PeerEntry, ...]:
        """Everybody whose lease runs, the own entry included once it is published."""
        return self.table.live(now, fingerprint)

    def known(self, now: float, fingerprint: bytes | None = None) -> int:
        """Those alive and those that went missing within ten minutes."""
        return self.table.known(now, fingerprint)

    def models(self) -> tuple[ModelSeen, ...]:
        """Which models are alive: by the records held, or for a client by what its sources say."""
        return self._sources.models() if self.role == "client" else list_models(self.table).models

    @property
    def lists_version(self) -> int:
        """Grows with each change of what a client's `models` are."""
        return self._sources.version

    def places_of(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer says that it listens: in its record, or, to clients of other models, beside its list of them."""
        return self.table.addresses(peer) or self._sources.places_of(peer)

    @property
    def seq(self) -> int:
        """The highest number used, to be persisted. 0 for a client."""
        return self._owner.seq if self._owner is not None else 0

    @property
    def descriptor_bytes(self) -> bytes:
        """The own signed descriptor; b"" before `publish`."""
        return self._owner.descriptor_bytes if self._owner is not None else b""

    @property
    def complete(self) -> bool:
        """Whether all that is wanted has been told once, in bulk."""
        return self._wishes.complete

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        return tuple(self._neighbours.values())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Old ones, each tried from time to time."""
        return self._circle.addresses

    @property
    def alone(self) -> bool:
        """Whether nobody is there who could tell us anything."""
        return all(one.kind is Kind.SUBSCRIBER for one in self._neighbours.values())

    @property
    def clock_error_s(self) -> float:
        """How far our wall clock is ahead of the neighbours', if far enough for a warning; else 0."""
        return self._clocks.error_s

    # ------------------------------------------------------------ what we are

    def publish(self, descriptor: Descriptor, load: Load, now: float) -> Descriptor:
        """Sign and spread. `peer` and `seq` are filled in, addresses that don't fit left out.

        Raises UsageError or MessageError (nothing changed) when a field is impossible.
        """
        owner = self._publisher()
        before, owner.load = owner.load, load
        try:
            told = owner.publish(descriptor, now, len(self.table))
        except Exception:
            owner.load = before
            raise
        self._spread_own(told, now)
        assert owner.descriptor is not None
        return owner.descriptor

    def set_load(self, load: Load, now: float) -> None:
        """Goes out with the next heartbeat, or at once when the state changes."""
        owner = self._publisher()
        urgent = load.state != owner.load.state
        owner.load = load
        if urgent and owner.due is not None:
            owner.due = now
            self.tick(now)

    def leave(self, now: float) -> None:
        """Signed, and pushed to every neighbour unasked, since we may be gone when they ask."""
        owner = self._publisher()
        if owner.descriptor is None or owner.left:
            return
        told = owner.leave()
        self.table.accept(told, now)
        for one in self._neighbours.values():
            if one.kind is not Kind.SOURCE:
                one.answer(head_id(told.head), full=False)

    def want(self, only: Collection[bytes] | None, now: float) -> None:
        """From now on hear of these models, or of all. `complete` says when a snapshot of them is here."""
        assert self.role == "client", "a peer hears of everything"
        if self._wishes.want(only):
            self._wishes.find_teller(now, empty=self._empty)

    def seek(self, name: str) -> None:
        """A client: have models of this name listed, however many others there are."""
        self._wishes.seek(name)

    # ------------------------------------------------------------ streams

    def attach(
        self, key: int, peer: PeerId, kind: Kind, *, opened_here: bool, now: float, host: str = ""
    ) -> None:
        """A stream to or from `peer` is open; `key` is the shell's own name for it. host: where it is."""
        one = Neighbour(key, peer, kind, opened_here, now, self._budget.of_neighbour(now), greeted=opened_here)
        one.group = group_of(host) if host else None
        one.visitor = not opened_here and self._full(one)
        one.pace = self._audience.pace if kind is Kind.SUBSCRIBER else None
        self._neighbours[key] = one
        self._count_gossips()
        if opened_here:
            one.only = self._wishes.only
            self._wishes.greet(one)
            self._wishes.find_teller(now, empty=self._empty)
            if self.complete and not self._wishes.is_teller(key):
                one.digest = self._own_digest(one, now, answer=False)
                self._actions.append(SnapshotComplete(key))
        self._circle.reached(peer, peer)

    def detach(self, key: int, now: float) -> None:
        """The stream is gone. What it owed us is asked of others."""
        one = self._neighbours.pop(key, None)
        if one is None:
            return
        self._count_gossips()
        if self._sources.gone(key):
            self.table.version += 1
        self._wishes.lost(key, now, empty=self._empty)
        self._asked.lost(key, now)
        if one.kind is not Kind.SUBSCRIBER:
            self._circle.failed(one.peer, now, self.alone)
            self._circle.hurry(now)

    def receive(self, key: int, message: Message, now: float) -> None:
        """Raises MessageError when `message` has no place here or holds what its owner didn't sign:
        the stream must be reset then. Records before the bad one stay."""
        one = self._neighbours.get(key)
        if one is None:
            return
        if isinstance(message, GossipHello | Subscribe):
            self._on_greeting(one, message, now)
        elif isinstance(message, Ask) and one.kind is not Kind.SOURCE:
            self._on_ask(one, message)
        elif isinstance(message, Digest) and one.kind is not Kind.SOURCE:
            self._on_digest(one, message, now)
        elif isinstance(message, Offer) and one.kind is not Kind.SUBSCRIBER:
            self._on_offer(one, message, now)
        elif isinstance(message, Delta) and one.kind is not Kind.SUBSCRIBER:
            self._on_delta(one, message, now)
        elif isinstance(message, ModelList) and one.kind is Kind.SOURCE:
            self._sources.told(key, one.peer, message)
            self.table.version += 1  # somebody may wait for a model
        else:
            raise MessageError(f"{type(message).__name__} has no place on a stream where {one.kind.value}")

    def remember(self, address: str, peer: PeerId | None = None, *, given: bool = False) -> None:
        """An address to try from time to time, for ever. given: by the user."""
        self._circle.remember(address, peer, given=given)

    def reached(self, target: PeerId | str, peer: PeerId) -> None:
        """A `Reach` or `ReachAddress` found `peer`."""
        self._circle.reached(target, peer)

    def unreached(self, target: PeerId | str, now: float) -> None:
        """A `Reach` or `ReachAddress` failed; somebody else is tried."""
        self._circle.failed(target, now, self.alone)
        self._circle.hurry(now + (circle.RETRY_ALONE_S if self.alone else 0.0))
        if isinstance(target, str) and self.table.places.is_contested(PeerId(target)):
            self.table.evict(PeerId(target), now)  # it isn't where it says, and somebody else may be

    def proved(self, peer: PeerId, host: str) -> None:
        """A connection with `peer` stands, with its other end at `host`."""
        self.table.places.proved(peer, host)

    # ------------------------------------------------------------ time and output

    def tick(self, now: float, unix_ms: int | None = None) -> None:
        """Everything that is due by `now`. unix_ms: what the wall clock shows now, if somebody looked."""
        self._ticked_at = now
        owner = self._owner
        if owner is not None and unix_ms is not None:
            owner.set_wall(unix_ms, now)
            self._look_at_clock(unix_ms, now)
        if owner is not None and owner.due is not None and owner.due <= now:
            self._spread_own(owner.renew(now, len(self.table)), now)
        self._lapse(now)
        self._asked.tick(now)
        self._wishes.tick(now, empty=self._empty)
        self._audience.tick(now)
        if self._digest_at <= now:
            one_too_many = self._audience.one_too_many()
            if one_too_many is not None:
                self._actions.append(Drop(one_too_many.key, "too many clients for the size of this swarm"))
            self._reconcile(now)
        self._actions += self._circle.choose(self._neighbours.values(), self.table, now)

    @property
    def deadline(self) -> float:
        """When `tick` or `next_message` has something to do again, if nothing happens before."""
        times = [self._circle.deadline, self._digest_at, self.table.next_lapse]
        ticked_at = self._ticked_at
        for one in self._neighbours.values():
            at = one.due_at(ticked_at)
            if at is not None and at > ticked_at:  # else it waits for room
                times.append(at)
        if self._owner is not None:
            times.append(self._owner.due)
        times.append(self._asked.deadline)
        times += [self._wishes.deadline, self._audience.deadline]
        return min(at for at in times if at is not None)

    def sendable(self, now: float) -> list[int]:
        """The streams for which `next_message` has something, in an order of which nobody profits."""
        found = [key for key, one in self._neighbours.items() if one.has_message(now)]
        at = self._rng.randrange(len(found)) if len(found) > 1 else 0
        return found[at:] + found[:at]

    def next_message(self, key: int, now: float) -> Message | None:
        """What to send to `key` now, or None. At most 16 KiB."""
        one = self._neighbours.get(key)
        if one is None:
            return None
        message = one.next_message(self.table, now)
        if message is None and one.is_done:
            one.greeted = False  # so that it is said once
            self._actions.append(Drop(key, "no room for another neighbour"))
        return message

    def drain(self, now: float) -> list[tuple[int, Message]]:
        """All that can be sent now, for shells that don't mind how much it is."""
        out: list[tuple[int, Message]] = []
        for key in tuple(self._neighbours):
            while (message := self.next_message(key, now)) is not None:
                out.append((key, message))
        return out

    def actions(self) -> list[Action]:
        """What the shell should do or know; each once."""
        found, self._actions = self._actions, []
        return found

    # ------------------------------------------------------------ messages

    def _on_greeting(self, one: Neighbour, message: GossipHello | Subscribe, now: float) -> None:
        if isinstance(message, Subscribe) != (one.kind is Kind.SUBSCRIBER):
            raise MessageError(f"{type(message).__name__} on a stream where {one.kind.value}")
        if isinstance(message, Subscribe):
            self._audience.subscribe(one, message, now)
        elif one.opened_here or (one.greeted and not message.snapshot):
            raise MessageError("greeted twice")
        elif message.snapshot or one.visitor:
            one.tell_all([held.peer for held in self.table.held()])
        one.greeted = True

    def _on_ask(self, one: Neighbour, message: Ask) -> None:
        for identifier in message.heads:
            one.answer(identifier, full=False)
        for identifier in message.full:
            one.answer(identifier, full=True)

    def _on_offer(self, one: Neighbour, message: Offer, now: float) -> None:
        for identifiers, full in ((message.changes, True), (message.renewals, False)):
            for identifier in identifiers:
                self._hear_of(one, identifier, full, now)

    def _hear_of(self, one: Neighbour, identifier: bytes, full: bool, now: float) -> None:
        """Ask for it, unless it is here or on its way."""
        if not self.table.knows(identifier, now):
            self._asked.offered(one, identifier, full, now)
        elif (held := self.table.by_id(identifier)) is not None:
            one.unoffer(held.peer)
        elif self.table.has_ended(identifier):
            self._object(one, identifier, now)

    def _on_delta(self, one: Neighbour, message: Delta, now: float) -> None:
        self._wishes.heard(one.key, now)
        for told in message.records:
            self._hear(one, told, now)
        if message.complete and self._wishes.told(one):
            self._completed(one, now)

    def _hear(self, one: Neighbour, told: Told, now: float) -> None:
        identifier = head_id(told.head)
        asked = self._asked.told(one, identifier)
        if self.table.knows(identifier, now) or not self._is_paid(one, told, asked, now):
            return
        head = read_head(told.head)
        if self._owner is not None and head.peer == self._owner.peer:
            self._hear_of_us(head, told, now)
            return
        verdict = self.table.accept(told, now, head)
        others = asked.others if asked is not None else []
        if verdict is Verdict.INCOMPLETE and not (asked is not None and asked.full):
            self._asked.offered(one, identifier, True, now, others)
        elif verdict in (Verdict.CHANGED, Verdict.RENEWED):
            held = self.table.get(head.peer)
            assert held is not None
            if isinstance(head, Heartbeat) and head.peer in self._gossips:
                self._clocks.heard(head.peer, head.issued_ms, told.age_s, now)
            self._spread(held, verdict is Verdict.CHANGED, {one.key, *others}, now)
        elif verdict is Verdict.ENDED and told.age_s < head.lease_s:
            self._object(one, identifier, now)
        elif verdict is Verdict.NO_ROOM:
            one.share.was_useless(now)
        if asked is not None and others and self.table.doubts(identifier, now):
            self._asked.next(identifier, asked, now, again=False)

    def _is_paid(self, one: Neighbour, told: Told, asked: Asked | None, now: float) -> bool:
        """Whether reading this is within the work that may be made for us."""
        signatures = 1 if told.descriptor is None else 2
        if asked is not None:
            return asked.full or signatures == 1 or one.share.take(1, now)
        wanted = one.snapshots_owed > 0 and one.snapshot_records < MAX_PEERS
        one.snapshot_records += wanted
        return one.share.take(signatures, now, snapshot=wanted)

    def _hear_of_us(self, head: Heartbeat | Leave, told: Told, now: float) -> None:
        """Nobody else's word about us is stored; but what outranks us makes us speak up."""
        assert self._owner is not None
        self._check(head, told.head)
        if self._owner.outranked(head, told.head, now) and self._owner.is_second_instance(told.age_s, now):
            self._actions.append(SecondInstance(told.age_s))

    def _on_digest(self, one: Neighbour, message: Digest, now: float) -> None:
        buckets = len(message.sums)
        check_buckets(buckets)
        if now - one.digest_heard_at.get(message.answer, -DIGEST_S) < DIGEST_MIN_S:
            return
        one.digest_heard_at[message.answer] = now
        self._lapse(now)
        self.table.fade(now)
        ours = self.table.digests.sums(buckets, one.only)
        chosen = differing(ours, message.sums)
        if not chosen:
            return
        for peer in self.table.digests.within(self._some_of(chosen), buckets, one.only):
            one.offer(peer, True, now)
        if not message.answer and one.kind is Kind.GOSSIP:
            one.digest = Digest(ours, answer=True)

    def _some_of(self, chosen: set[int]) -> Collection[int]:
        """Of buckets that differ, drawn so that each has its turn, those that hold about OFFERED_FOR_A_DIGEST peers:
        who differs everywhere among ten thousand isn't answered in one go, but digest by digest."""
        share = OFFERED_FOR_A_DIGEST / max(1, len(self.table))
        return chosen if share >= 1 else self._rng.sample(sorted(chosen), max(1, int(len(chosen) * share)))

    # ------------------------------------------------------------ the snapshot

    def _completed(self, teller: Neighbour, now: float) -> None:
        """The others are asked only for what the teller didn't have; whoever waits need not any more."""
        self._circle.hurry(now)
        for one in self._neighbours.values():
            if one.kind is Kind.SUBSCRIBER:
                continue
            if one.opened_here:
                self._actions.append(SnapshotComplete(one.key))
            if one.kind is Kind.GOSSIP or one is not teller:
                one.digest = self._own_digest(one, now, answer=False)

    @property
    def _empty(self) -> bool:
        return len(self.table) <= (self.role == "peer")

    # ------------------------------------------------------------ spreading

    def _publisher(self) -> Owner:
        assert self._owner is not None, "a client advertises nothing"
        return self._owner

    def _count_gossips(self) -> None:
        self._gossips = frozenset(one.peer for one in self._neighbours.values() if one.kind is Kind.GOSSIP)

    def _full(self, one: Neighbour) -> bool:
        """Whether there are as many of its kind as there may be, in all or from its group of addresses."""
        clients = one.kind is Kind.SUBSCRIBER
        most = circle.MAX_SUBSCRIBERS if clients else circle.MAX_NEIGHBOURS
        from_there = circle.MAX_SUBSCRIBERS_OF_GROUP if clients else circle.MAX_NEIGHBOURS_OF_GROUP
        alike = [other for other in self._neighbours.values() if other.kind is one.kind]
        near = sum(other.group == one.group for other in alike) if one.group is not None else 0
        return len(alike) >= most or near >= from_there

    def _own_digest(self, one: Neighbour, now: float, answer: bool) -> Digest:
        self._lapse(now)
        self.table.fade(now)
        buckets = DIGEST_BUCKETS if len(self.table) < LARGE else DIGEST_BUCKETS_LARGE
        return Digest(self.table.digests.sums(buckets, one.only), answer)

    def _spread_own(self, told: Told, now: float) -> None:
        verdict = self.table.accept(told, now)
        assert verdict in (Verdict.CHANGED, Verdict.RENEWED), verdict
        held = self.table.get(self._publisher().peer)
        assert held is not None
        self._spread(held, verdict is Verdict.CHANGED, set(), now)

    def _spread(self, held: Held, change: bool, told_by: set[int], now: float) -> None:
        for one in self._neighbours.values():
            listens = one.kind is not Kind.SOURCE and (one.greeted or one.opened_here)
            wanted = held.concerns(one.only) if change else held.matches(one.only)
            if listens and wanted and one.key not in told_by:
                one.offer(held.peer, change, now)

    def _object(self, one: Neighbour, identifier: bytes, now: float) -> None:
        peer = self.table.owner_of(identifier)
        if peer is not None and one.kind is Kind.GOSSIP:
            one.object(peer, now)

    # ------------------------------------------------------------ what comes with time

    def _lapse(self, now: float) -> None:
        """Once at one instant: a tick may have more than one reason to, and a batch is a batch."""
        if now == self._lapsed_at:
            return
        self._lapsed_at = now
        for peer in self.table.lapse(now):
            self._keep_address(peer)
            self._circle.hurry(now)

    def _keep_address(self, peer: PeerId) -> None:
        """Of somebody who vanished: a cut network heals by being tried."""
        addresses = self.table.addresses(peer)
        if addresses and self.table.went_missing(peer):
            seen = self.table.places.is_proved(peer)
            self._circle.remember(f"{peer}@{addresses[0]}", peer, seen=seen)

    def _reconcile(self, now: float) -> None:
        self._digest_at = now + DIGEST_S * self._rng.uniform(0.8, 1.2)
        for one in self._neighbours.values():
            one.forget(now)
        able = [one for one in self._neighbours.values() if one.kind is not Kind.SUBSCRIBER and one.greeted]
        if able and self._wishes.only != Models():
            one = self._rng.choice(able)
            one.digest = self._own_digest(one, now, answer=False)

    def _look_at_clock(self, unix_ms: int, now: float) -> None:
        if now >= self._clock_check_at:
            self._clock_check_at = now + CLOCK_CHECK_S
            found = self._clocks.check(self._gossips, unix_ms, now)
            self._actions += [found] if found is not None else []
