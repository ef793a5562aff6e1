"""CORE: every participant's copy of the live records, kept nearly equal by gossip.

Theory of operation. `table.py` says what is true, `owner.py` says what we are, `neighbour.py` holds
what is owed to whom, `circle.py` picks the neighbours; this ties them together.

    new head here --> Offer(id) to each neighbour that didn't offer it itself
                          changes at once, renewals in batches of a second
    Offer(id) ------> Ask(id) once, of whoever offered first; of the next one if no answer comes
    Ask(id) --------> Delta(record, age)
    now and then ---> Digest to one neighbour; where it differs, both sides offer what they have
    newcomer -------> GossipHello(snapshot) or Subscribe: all in bulk, and then as above

A client is a `Subscribe`r at up to three peers: it asks and takes, offers nothing, is told of one
model or of all, and a peer that hears gossip from a client ends the stream.

Invariants: those of `table.py`; a head crosses each stream at most once, but for repairs; what is
kept per neighbour and in all is bounded; whoever sends what can't be true loses the stream
(`receive` raises MessageError), and nobody else loses anything.

Pure: `now` is seconds on a clock that counts time asleep. The shell (`node.py`) calls `attach`,
`receive`, `detach` and `tick`, then sends what `next_message` gives, does what `actions` lists, and
wakes it at `deadline`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarm import circle
from swarm.circle import Circle, Drop, Reach, ReachAddress, Role
from swarm.errors import MessageError
from swarm.identity import Identity, PeerId
from swarm.messages import Ask, Delta, Digest, GossipHello, Message, Offer, Subscribe, Told
from swarm.neighbour import DIGEST_BUCKETS, Kind, Neighbour
from swarm.owner import Owner, heartbeat_interval_s
from swarm.records import Descriptor, Load, Record, check_signature
from swarm.table import Held, PeerEntry, Table, Verdict, differing, head_id, read_head

__all__ = ["Action", "Drop", "Kind", "PeerEntry", "Reach", "ReachAddress", "Registry"]
__all__ += ["SecondInstance", "SnapshotComplete", "heartbeat_interval_s", "in_parts"]

ASK_TIMEOUT_S = 2.0  # then the next one who offered it is asked
MAX_ASKED = 8192  # heads asked for and not yet here; what doesn't fit is healed by digest
MAX_OTHERS = 3  # who else offered the same, remembered
PART_RECORDS = 16  # of a Delta at a time: two signatures each, 0.2 ms to verify one
DIGEST_S = 10.0  # between reconciliations, with one neighbour each
DIGEST_MIN_S = 0.5  # a neighbour that sends digests faster isn't answered: each costs O(peers)


@dataclass(frozen=True)
class SnapshotComplete:
    """All that `key`'s peer had when it was asked has arrived."""

    key: int


@dataclass(frozen=True)
class SecondInstance:
    """Another process speaks with this identity right now: a copied key, or started twice."""

    age_s: float


Action: TypeAlias = Reach | ReachAddress | Drop | SnapshotComplete | SecondInstance


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


@dataclass
class _Asked:
    """A head on its way here. others: neighbours that offered it too."""

    key: int
    until: float
    full: bool
    others: list[int]


class Registry:
    """identity: None for a client. first_seq: max(persisted + 1, unix ms). unix_ms: the wall clock
    at `now`. fingerprint: the one model that a client wants to hear of, or None for all."""

    def __init__(
        self,
        identity: Identity | None,
        *,
        now: float,
        rng: random.Random,
        fingerprint: bytes | None = None,
        first_seq: int = 1,
        unix_ms: int = 0,
        check: Callable[[Record, bytes], None] = check_signature,
    ) -> None:
        self.role: Role = "client" if identity is None else "peer"
        self.table = Table(check)
        self.complete = False  # whether a snapshot has arrived
        self._check = check
        self._rng = rng
        self._fingerprint = fingerprint
        self._owner = (
            Owner(identity, first_seq=first_seq, now=now, unix_ms=unix_ms) if identity is not None else None
        )
        self._circle = Circle(identity.peer_id if identity else None, self.role, rng, now)
        self._neighbours: dict[int, Neighbour] = {}
        self._asked: dict[bytes, _Asked] = {}  # in the order of `until`
        self._actions: list[Action] = []
        self._digest_at = now + DIGEST_S * rng.uniform(0.2, 1.0)
        self._ticked_at = now

    # ------------------------------------------------------------ what is known

    def live(self, now: float, fingerprint: bytes | None = None) -> tuple[PeerEntry, ...]:
        """Everybody whose lease runs, the own entry included once it is published."""
        return self.table.live(now, fingerprint)

    def known(self, now: float, fingerprint: bytes | None = None) -> int:
        """Those alive and those that went missing within ten minutes."""
        return self.table.known(now, fingerprint)

    @property
    def seq(self) -> int:
        """The highest number used, to be persisted. 0 for a client."""
        return self._owner.seq if self._owner is not None else 0

    @property
    def descriptor_bytes(self) -> bytes:
        """The own signed descriptor; b"" before `publish`."""
        return self._owner.descriptor_bytes if self._owner is not None else b""

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        return tuple(self._neighbours.values())

    @property
    def alone(self) -> bool:
        """Whether nobody is there who could tell us anything."""
        return all(one.kind is Kind.SUBSCRIBER for one in self._neighbours.values())

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

    # ------------------------------------------------------------ streams

    def attach(self, key: int, peer: PeerId, kind: Kind, *, opened_here: bool, now: float) -> None:
        """A stream to or from `peer` is open; `key` is the shell's own name for it."""
        one = Neighbour(key, peer, kind, opened_here, since=now, greeted=opened_here)
        if opened_here:
            one.greeting = self._greeting(kind)
            one.fingerprint = self._fingerprint
            if kind is Kind.GOSSIP and self.complete and not self.alone:
                one.digest = self._own_digest(one, now, answer=False)
        one.visitor = not opened_here and self._full(kind)
        self._neighbours[key] = one
        self._circle.reached(peer, peer)

    def detach(self, key: int, now: float) -> None:
        """The stream is gone. What it owed us is asked of others."""
        one = self._neighbours.pop(key, None)
        if one is None:
            return
        for identifier in [i for i, asked in self._asked.items() if asked.key == key]:
            self._ask_next(identifier, self._asked.pop(identifier), now)
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
            self._on_greeting(one, message)
        elif isinstance(message, Ask) and one.kind is not Kind.SOURCE:
            self._on_ask(one, message)
        elif isinstance(message, Digest) and one.kind is not Kind.SOURCE:
            self._on_digest(one, message, now)
        elif isinstance(message, Offer) and one.kind is not Kind.SUBSCRIBER:
            self._on_offer(one, message, now)
        elif isinstance(message, Delta) and one.kind is not Kind.SUBSCRIBER:
            self._on_delta(one, message, now)
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

    # ------------------------------------------------------------ time and output

    def tick(self, now: float) -> None:
        """Everything that is due by `now`."""
        self._ticked_at = now
        owner = self._owner
        if owner is not None and owner.due is not None and owner.due <= now:
            self._spread_own(owner.renew(now, len(self.table)), now)
        for peer in self.table.lapse(now):
            self._keep_address(peer)
            self._circle.hurry(now)
        while self._asked and (first := next(iter(self._asked.items())))[1].until <= now:
            self._ask_next(first[0], self._asked.pop(first[0]), now)
        if self._digest_at <= now:
            self._reconcile(now)
        self._actions += self._circle.choose(self._neighbours.values(), self.table, now)

    @property
    def deadline(self) -> float:
        """When `tick` or `next_message` has something to do again, if nothing happens before."""
        times = [self._circle.deadline, self._digest_at, self.table.next_lapse]
        due = (one.offers_due for one in self._neighbours.values())
        times += [at for at in due if at is not None and at > self._ticked_at]  # else it waits for room
        if self._owner is not None:
            times.append(self._owner.due)
        if self._asked:
            times.append(next(iter(self._asked.values())).until)
        return min(at for at in times if at is not None)

    def sendable(self, now: float) -> list[int]:
        """The streams for which `next_message` has something."""
        return [key for key, one in self._neighbours.items() if one.has_message(now)]

    def next_message(self, key: int, now: float) -> Message | None:
        """What to send to `key` now, or None. At most 16 KiB."""
        one = self._neighbours.get(key)
        if one is None:
            return None
        message = one.next_message(self.table, now)
        if message is None and one.visitor and one.greeted:
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

    def _on_greeting(self, one: Neighbour, message: GossipHello | Subscribe) -> None:
        if one.greeted:
            raise MessageError("greeted twice")
        if isinstance(message, Subscribe) != (one.kind is Kind.SUBSCRIBER):
            raise MessageError(f"{type(message).__name__} on a stream where {one.kind.value}")
        one.greeted = True
        if isinstance(message, Subscribe):
            one.fingerprint = message.fingerprint
            if one.visitor:
                return
        if isinstance(message, Subscribe) or message.snapshot or one.visitor:
            one.tell_all([held.peer for held in self.table.held(one.fingerprint)])

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
        if self.table.knows(identifier):
            return
        asked = self._asked.get(identifier)
        if asked is None:
            self._ask(one, identifier, full, [], now)
        elif one.key != asked.key and one.key not in asked.others and len(asked.others) < MAX_OTHERS:
            asked.others.append(one.key)

    def _on_delta(self, one: Neighbour, message: Delta, now: float) -> None:
        for told in message.records:
            self._hear(one, told, now)
        if message.complete:
            self.complete = True
            self._actions.append(SnapshotComplete(one.key))
            self._circle.hurry(now)
            if one.kind is Kind.GOSSIP:
                one.digest = self._own_digest(one, now, answer=False)

    def _hear(self, one: Neighbour, told: Told, now: float) -> None:
        head = read_head(told.head)
        identifier = head_id(told.head)
        asked = self._asked.pop(identifier, None)
        if self._owner is not None and head.peer == self._owner.peer:
            self._hear_of_us(told, now)
            return
        verdict = self.table.accept(told, now)
        if verdict is Verdict.INCOMPLETE and not (asked is not None and asked.full):
            self._ask(one, identifier, True, asked.others if asked else [], now)
        elif verdict in (Verdict.CHANGED, Verdict.RENEWED):
            held = self.table.get(head.peer)
            assert held is not None
            self._spread(held, verdict is Verdict.CHANGED, {one.key, *(asked.others if asked else ())}, now)

    def _hear_of_us(self, told: Told, now: float) -> None:
        """Nobody else's word about us is stored; but what outranks us makes us speak up."""
        assert self._owner is not None
        head = read_head(told.head)
        self._check(head, told.head)
        if self._owner.outranked(head, told.head, now) and self._owner.is_second_instance(told.age_s, now):
            self._actions.append(SecondInstance(told.age_s))

    def _on_digest(self, one: Neighbour, message: Digest, now: float) -> None:
        if not message.sums or now - one.digest_heard_at.get(message.answer, -DIGEST_S) < DIGEST_MIN_S:
            return
        one.digest_heard_at[message.answer] = now
        buckets = len(message.sums)
        ours = self.table.digest(buckets, now, one.fingerprint)
        chosen = differing(ours, message.sums)
        if not chosen:
            return
        for peer in self.table.in_buckets(chosen, buckets, now, one.fingerprint):
            one.offer(peer, True, now)
        if not message.answer and one.kind is Kind.GOSSIP:
            one.digest = Digest(ours, answer=True)

    # ------------------------------------------------------------ inside

    def _publisher(self) -> Owner:
        assert self._owner is not None, "a client advertises nothing"
        return self._owner

    def _greeting(self, kind: Kind) -> Message:
        if kind is Kind.SOURCE:
            return Subscribe(self._fingerprint)
        return GossipHello(snapshot=not self.complete or self.alone)

    def _full(self, kind: Kind) -> bool:
        most = circle.MAX_SUBSCRIBERS if kind is Kind.SUBSCRIBER else circle.MAX_NEIGHBOURS
        return sum(1 for one in self._neighbours.values() if one.kind is kind) >= most

    def _own_digest(self, one: Neighbour, now: float, answer: bool) -> Digest:
        return Digest(self.table.digest(DIGEST_BUCKETS, now, one.fingerprint), answer)

    def _spread_own(self, told: Told, now: float) -> None:
        verdict = self.table.accept(told, now)
        assert verdict in (Verdict.CHANGED, Verdict.RENEWED, Verdict.NO_ROOM), verdict
        held = self.table.get(self._publisher().peer)
        if held is not None:
            self._spread(held, verdict is Verdict.CHANGED, set(), now)

    def _spread(self, held: Held, change: bool, told_by: set[int], now: float) -> None:
        for one in self._neighbours.values():
            listens = one.kind is not Kind.SOURCE and (one.greeted or one.opened_here)
            if listens and one.key not in told_by and held.matches(one.fingerprint):
                one.offer(held.peer, change, now)

    def _ask(self, one: Neighbour, identifier: bytes, full: bool, others: list[int], now: float) -> None:
        if len(self._asked) < MAX_ASKED:
            one.ask(identifier, full)
            self._asked[identifier] = _Asked(one.key, now + ASK_TIMEOUT_S, full, others)

    def _ask_next(self, identifier: bytes, asked: _Asked, now: float) -> None:
        """Of whoever else offered it; if there is nobody, the digest will heal it."""
        others: Sequence[int] = [key for key in asked.others if key in self._neighbours]
        if others and not self.table.knows(identifier):
            self._ask(self._neighbours[others[0]], identifier, asked.full, list(others[1:]), now)

    def _keep_address(self, peer: PeerId) -> None:
        """Of somebody who vanished: a cut network heals by being tried."""
        addresses = self.table.addresses(peer)
        if addresses and self.table.went_missing(peer):
            self._circle.remember(f"{peer}@{addresses[0]}", peer)

    def _reconcile(self, now: float) -> None:
        self._digest_at = now + DIGEST_S * self._rng.uniform(0.8, 1.2)
        able = [one for one in self._neighbours.values() if one.kind is not Kind.SUBSCRIBER and one.greeted]
        if able:
            one = self._rng.choice(able)
            one.digest = self._own_digest(one, now, answer=False)
