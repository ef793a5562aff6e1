"""What is owed to one neighbour: bounded, and looked up only when there is room to send it.

Invariant: nothing is queued but identifiers, each once, so a slow neighbour costs no more than the
table is long, and gets the newest head of a peer instead of each that it missed. The shell pulls:
it asks for the next message when the last one is on its way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from swarm.errors import MessageError
from swarm.identity import PeerId
from swarm.messages import MAX_IDS, MAX_TOLD, Ask, Delta, Digest, Message, Offer, Told
from swarm.table import Held, Table

BATCH_S = 1.0  # renewals wait this long for company; changes don't wait
MAX_DELTA_BYTES = 15 * 1024  # of a message's 16 KiB; the rest is its frame
TOLD_OVERHEAD_BYTES = 48  # keys, lengths and the age around one record
MAX_OWED = 4 * MAX_IDS  # heads that a neighbour has asked for and not yet taken
DIGEST_BUCKETS = 64  # 512 bytes; at 10,000 peers a difference costs 160 identifiers


class Kind(enum.Enum):
    GOSSIP = "both are peers and tell each other"
    SUBSCRIBER = "a client that listens to this peer"
    SOURCE = "a peer that this client listens to"


@dataclass
class Neighbour:
    """One stream. key: the shell's name for it. greeted: the first message has been exchanged.
    visitor: may have a snapshot but no place."""

    key: int
    peer: PeerId
    kind: Kind
    opened_here: bool
    since: float
    greeting: Message | None = None
    greeted: bool = False
    visitor: bool = False
    fingerprint: bytes | None = None
    digest: Digest | None = None
    digest_heard_at: dict[bool, float] = field(default_factory=dict)
    offers_due: float | None = None
    _offers: dict[PeerId, bool] = field(default_factory=dict)  # -> it is more than a renewal
    _asks: dict[bytes, bool] = field(default_factory=dict)  # -> with the descriptor
    _answers: dict[bytes, bool] = field(default_factory=dict)  # -> with the descriptor
    _snapshot: list[PeerId] | None = None

    def offer(self, peer: PeerId, change: bool, now: float) -> None:
        self._offers[peer] = change or self._offers.get(peer, False)
        due = now if change else now + BATCH_S
        self.offers_due = due if self.offers_due is None else min(self.offers_due, due)

    def ask(self, identifier: bytes, full: bool) -> None:
        self._asks[identifier] = full

    def answer(self, identifier: bytes, full: bool) -> None:
        """Raises MessageError when the neighbour asks for more than it takes."""
        if len(self._answers) >= MAX_OWED and identifier not in self._answers:
            raise MessageError(f"asks for more than {MAX_OWED} records without taking them")
        self._answers[identifier] = full or self._answers.get(identifier, False)

    def tell_all(self, peers: list[PeerId]) -> None:
        self._snapshot = peers

    @property
    def telling_all(self) -> bool:
        return self._snapshot is not None

    def has_message(self, now: float) -> bool:
        """Whether `next_message` is worth a call."""
        offers = self.offers_due is not None and self.offers_due <= now
        owed = self.greeting or self._asks or self._answers or self.digest or self.telling_all
        return offers or bool(owed) or (self.visitor and self.greeted)

    def next_message(self, table: Table, now: float) -> Message | None:
        """What goes out next, or None. At most 16 KiB."""
        if self.greeting is not None:
            greeting, self.greeting = self.greeting, None
            return greeting
        if self._asks:
            return self._next_ask()
        return (
            self._next_answer(table, now)
            or self._next_offer(table, now)
            or self._next_digest()
            or self._next_of_all(table, now)
        )

    def _next_ask(self) -> Ask:
        taken = [(one, self._asks.pop(one)) for one in list(self._asks)[:MAX_IDS]]
        return Ask(
            heads=tuple(one for one, full in taken if not full),
            full=tuple(one for one, full in taken if full),
        )

    def _next_answer(self, table: Table, now: float) -> Delta | None:
        packed = _Packer()
        while self._answers and packed.room:
            identifier = next(iter(self._answers))
            full = self._answers.pop(identifier)
            held = table.by_id(identifier)
            if held is not None and held.lapses_at > now:  # else superseded: the newer one was offered
                packed.add(table.told(held, now, full))
        return Delta(tuple(packed.records)) if packed.records else None

    def _next_offer(self, table: Table, now: float) -> Offer | None:
        if self.offers_due is None or self.offers_due > now:
            return None
        taken = [(one, self._offers.pop(one)) for one in list(self._offers)[: MAX_IDS // 2]]
        self.offers_due = now if self._offers else None
        found = [(_alive(table, one, now), change) for one, change in taken]
        renewals = tuple(held.head_id for held, change in found if held is not None and not change)
        changes = tuple(held.head_id for held, change in found if held is not None and change)
        return Offer(renewals, changes) if renewals or changes else None

    def _next_digest(self) -> Digest | None:
        digest, self.digest = self.digest, None
        return digest

    def _next_of_all(self, table: Table, now: float) -> Delta | None:
        if self._snapshot is None:
            return None
        packed = _Packer()
        while self._snapshot and packed.room:
            held = _alive(table, self._snapshot.pop(), now)
            if held is not None:
                packed.add(table.told(held, now, full=True))
        complete = not self._snapshot
        if complete:
            self._snapshot = None
        return Delta(tuple(packed.records), complete)


class _Packer:
    """Fills one Delta."""

    def __init__(self) -> None:
        self.records: list[Told] = []
        self._bytes = 0

    def add(self, told: Told) -> None:
        self.records.append(told)
        self._bytes += _size(told)

    @property
    def room(self) -> bool:
        """For a record of the largest size."""
        return len(self.records) < MAX_TOLD and self._bytes + 1024 + TOLD_OVERHEAD_BYTES <= MAX_DELTA_BYTES


def _size(told: Told) -> int:
    return len(told.head) + len(told.descriptor or b"") + TOLD_OVERHEAD_BYTES


def _alive(table: Table, peer: PeerId, now: float) -> Held | None:
    held = table.get(peer)
    return held if held is not None and held.lapses_at > now else None
