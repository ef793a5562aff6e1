"""What is owed to one neighbour: bounded, and looked up only when there is room to send it.

Invariant: nothing is queued but identifiers, each once, so a slow neighbour costs no more than the
table is long, and gets the newest head of a peer instead of each that it missed. The shell pulls:
it asks for the next message when the last one is on its way.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from swarm.buckets import Bucket
from swarm.budget import SLICE, Share
from swarm.digests import Models
from swarm.errors import MessageError
from swarm.heads import Held
from swarm.identity import PeerId
from swarm.messages import (
    MAX_IDS,
    MAX_TOLD,
    Ask,
    Delta,
    Digest,
    GossipHello,
    Message,
    ModelList,
    Offer,
    Subscribe,
    Told,
)
from swarm.table import Table

BATCH_S = 1.0  # renewals wait this long for company; changes don't wait
MAX_DELTA_BYTES = 15 * 1024  # of a message's 16 KiB; the rest is its frame
TOLD_OVERHEAD_BYTES = 16  # lengths and the age around one record
MAX_OWED = 4 * MAX_IDS  # heads that a neighbour has asked for and not yet taken
DIGEST_BUCKETS = 64  # 512 bytes
DIGEST_BUCKETS_LARGE = 256  # 2 kB; at 10,000 peers a difference costs 40 identifiers
LARGE = 2000  # peers
MAX_OBJECTIONS = 256  # owed to one neighbour, and remembered as said
OBJECT_AGAIN_S = 5.0  # to the same telling of the same neighbour: the first may have crossed it
MAX_SNAPSHOTS = 64  # that one neighbour asks for on one stream: one for each model that a client turns to


class Kind(enum.Enum):
    GOSSIP = "both are peers and tell each other"
    SUBSCRIBER = "a client that listens to this peer"
    SOURCE = "a peer that this client listens to"


@dataclass
class Neighbour:
    """One stream. key: the shell's name for it. share: of the work that we do for others. pace: of the bytes that a
    client is told. greeted: the first
    message has been exchanged. visitor: may have a snapshot but no place. only: models that it wants to hear
    of, or None; named: what it calls one of them. snapshots_owed: that we asked it for; snapshot_only: models
    of the last of them."""

    key: int
    peer: PeerId
    kind: Kind
    opened_here: bool
    since: float
    share: Share
    pace: Bucket | None = None
    group: str | None = None
    greeting: GossipHello | Subscribe | None = None
    greeted: bool = False
    visitor: bool = False
    only: Models | None = None
    named: str = ""
    models: ModelList | None = None
    digest: Digest | None = None
    snapshots_owed: int = 0
    snapshot_records: int = 0
    snapshot_only: Models | None = None
    digest_heard_at: dict[bool, float] = field(default_factory=dict)
    offers_due: float | None = None
    _changes: dict[PeerId, None] = field(default_factory=dict)  # to be offered at once
    _renewals: dict[PeerId, None] = field(default_factory=dict)  # to be offered when `offers_due`
    _asks: dict[bytes, bool] = field(default_factory=dict)  # -> with the descriptor
    _answers: dict[bytes, bool] = field(default_factory=dict)  # -> with the descriptor
    _objections: dict[PeerId, None] = field(default_factory=dict)
    _objected: dict[PeerId, float] = field(default_factory=dict)  # -> when
    _snapshots: deque[list[PeerId]] = field(default_factory=deque)
    _snapshots_told: int = 0

    def offer(self, peer: PeerId, change: bool, now: float) -> None:
        if change:
            self._renewals.pop(peer, None)
            self._changes[peer] = None
        elif peer not in self._changes:
            self._renewals[peer] = None
            if self.offers_due is None:
                self.offers_due = now + BATCH_S

    def unoffer(self, peer: PeerId) -> None:
        """It has just offered us the same."""
        self._changes.pop(peer, None)
        self._renewals.pop(peer, None)

    def ask(self, identifier: bytes, full: bool) -> None:
        self._asks[identifier] = full

    def unask(self, identifier: bytes) -> bool:
        """Take an ask back; False if it has gone out."""
        return self._asks.pop(identifier, None) is not None

    def answer(self, identifier: bytes, full: bool) -> None:
        """Raises MessageError when the neighbour asks for more than it takes."""
        if len(self._answers) >= MAX_OWED and identifier not in self._answers:
            raise MessageError(f"asks for more than {MAX_OWED} records without taking them")
        self._answers[identifier] = full or self._answers.get(identifier, False)

    def object(self, peer: PeerId, now: float) -> None:
        """It told of somebody who has ended. Said once in a while, and never queued without end."""
        if now - self._objected.get(peer, -OBJECT_AGAIN_S) >= OBJECT_AGAIN_S:
            self._objected.pop(peer, None)
            self._objected[peer] = now
            self._objections[peer] = None
            for full in (self._objected, self._objections):
                if len(full) > MAX_OBJECTIONS:
                    del full[next(iter(full))]

    def forget(self, now: float) -> None:
        """What was said long ago, and the room of what is empty now: a dict that was long stays as large, and each
        neighbour of a swarm that came and went once has several of them. Called now and then."""
        while self._objected and now - next(iter(self._objected.values())) >= OBJECT_AGAIN_S:
            del self._objected[next(iter(self._objected))]
        for owed in (self._changes, self._renewals, self._asks, self._answers, self._objections, self._objected):
            if not owed:
                owed.clear()

    def tell_all(self, peers: list[PeerId]) -> None:
        """Raises MessageError when the neighbour asks for that too often."""
        self._snapshots_told += 1
        if self._snapshots_told > MAX_SNAPSHOTS:
            raise MessageError(f"asks for more than {MAX_SNAPSHOTS} snapshots")
        self._snapshots.append(peers)

    def has_message(self, now: float) -> bool:
        """Whether `next_message` is worth a call."""
        if self._changes or (self.offers_due is not None and self.offers_due <= now):
            return True
        owed = self.digest or self.greeting or self._objections or self.models
        return bool(owed) or self._may_tell(now) or self._may_ask(now) or self.is_done

    def due_at(self, now: float) -> float | None:
        """When there will be something to say that has to wait until then."""
        times = [self.offers_due] if self.offers_due is not None else []
        if self._asks:
            times.append(self.share.ready_at(now))
        if self.pace is not None and (self._answers or self._snapshots):
            times.append(self.pace.ready_at(now))
        return min(times, default=None)

    def next_message(self, table: Table, now: float) -> Message | None:
        """What goes out next, or None. At most 16 KiB."""
        if self.greeting is not None:
            greeting, self.greeting = self.greeting, None
            return greeting
        return (
            self._next_ask(now)
            or self._next_objection(table, now)
            or self._next_answer(table, now)
            or self._next_offer(table, now)
            or self._next_models()
            or self._next_digest()
            or self._next_of_all(table, now)
        )

    def _may_tell(self, now: float) -> bool:
        """Whether records are owed, and may go out now."""
        return bool(self._answers or self._snapshots) and (self.pace is None or self.pace.left(now) >= 1.0)

    @property
    def is_done(self) -> bool:
        """A visitor that has had all that it gets."""
        return self.visitor and self.greeted and not self._answers and not self._snapshots

    def _may_ask(self, now: float) -> bool:
        """Whether there is something to ask for, and enough may be verified to make it worth a message."""
        return bool(self._asks) and self.share.room(now) >= min(SLICE, 2 * len(self._asks))

    def _next_ask(self, now: float) -> Ask | None:
        """As much as may be verified: the rest waits here."""
        if not self._may_ask(now):
            return None
        room = self.share.room(now)
        heads: list[bytes] = []
        full: list[bytes] = []
        while self._asks and len(heads) + len(full) < MAX_IDS:
            identifier = next(iter(self._asks))
            cost = 2 if self._asks[identifier] else 1
            if cost > room or not self.share.take(cost, now):
                break
            room -= cost
            (full if self._asks.pop(identifier) else heads).append(identifier)
        return Ask(tuple(heads), tuple(full)) if heads or full else None

    def _next_objection(self, table: Table, now: float) -> Delta | None:
        packed = _Packer()
        while self._objections and packed.room:
            peer = next(iter(self._objections))
            del self._objections[peer]
            told = table.objection(peer, now)
            if told is not None:
                packed.add(told)
        return Delta(tuple(packed.records)) if packed.records else None

    def _next_answer(self, table: Table, now: float) -> Delta | None:
        if not self._may_tell(now):
            return None
        packed = _Packer(self.pace, now)
        while self._answers and packed.room:
            identifier = next(iter(self._answers))
            full = self._answers.pop(identifier)
            held = table.by_id(identifier)
            if held is not None and held.lapses_at > now:  # else superseded: the newer one was offered
                packed.add(table.told(held, now, full))
        return Delta(tuple(packed.records)) if packed.records else None

    def _next_offer(self, table: Table, now: float) -> Offer | None:
        changes = _taken(self._changes, table, now)
        renewals: tuple[bytes, ...] = ()
        if self.offers_due is not None and self.offers_due <= now:
            renewals = _taken(self._renewals, table, now)
            self.offers_due = now if self._renewals else None
        return Offer(renewals, changes) if renewals or changes else None

    def _next_models(self) -> ModelList | None:
        models, self.models = self.models, None
        return models

    def _next_digest(self) -> Digest | None:
        digest, self.digest = self.digest, None
        return digest

    def _next_of_all(self, table: Table, now: float) -> Delta | None:
        if not self._snapshots or not self._may_tell(now):
            return None
        packed = _Packer(self.pace, now)
        peers = self._snapshots[0]
        while peers and packed.room:
            held = _alive(table, peers.pop(), now)
            if held is not None:
                packed.add(table.told(held, now, full=True))
        if not peers:
            self._snapshots.popleft()
        return Delta(tuple(packed.records), complete=not peers)


class _Packer:
    """Fills one Delta. pace: who pays for it."""

    def __init__(self, pace: Bucket | None = None, now: float = 0.0) -> None:
        self.records: list[Told] = []
        self._bytes = 0
        self._pace, self._now = pace, now

    def add(self, told: Told) -> None:
        self.records.append(told)
        self._bytes += _size(told)
        if self._pace is not None:
            self._pace.spend(self._now, _size(told))

    @property
    def room(self) -> bool:
        """For a record of the largest size."""
        return len(self.records) < MAX_TOLD and self._bytes + 1024 + TOLD_OVERHEAD_BYTES <= MAX_DELTA_BYTES


def _size(told: Told) -> int:
    return len(told.head) + len(told.descriptor or b"") + TOLD_OVERHEAD_BYTES


def _taken(peers: dict[PeerId, None], table: Table, now: float) -> tuple[bytes, ...]:
    """Take as many as one message holds, and say which heads of theirs are held now."""
    found: list[bytes] = []
    while peers and len(found) < MAX_IDS:
        peer = next(iter(peers))
        del peers[peer]
        held = _alive(table, peer, now)
        if held is not None:
            found.append(held.head_id)
    return tuple(found)


def _alive(table: Table, peer: PeerId, now: float) -> Held | None:
    held = table.get(peer)
    return held if held is not None and held.lapses_at > now else None
