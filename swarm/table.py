"""The records that one participant holds: what outranks what, and what is still alive.

Theory of operation. Of each peer at most one *head* is held: its newest heartbeat, together with
the descriptor that this names, or its leave. Heads of one peer are totally ordered by `Rank`, and
a head is replaced by a higher one only, so the tables of all who hear the same heads are equal in
whatever order they hear them (a join semilattice). Since a heartbeat's `seq` is above its
descriptor's, a leave outranks everything that was signed before it.

    absent --accept--> held --lease over--> gone (tombstone: the rank only) --forgotten--> absent
                         ^--accept (higher rank only)--'

Invariants:
- nothing is held whose owner's signature wasn't checked;
- no peer's rank ever falls while it is held or gone, and it stays gone for longer than any lease,
  so nobody but the owner, with a higher `seq`, brings a peer back;
- a lease is what remains of it here: age told + time here. Nobody's wall clock takes part. The
  first telling of a head decides, so repeating it stretches nothing.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swarm.errors import MessageError
from swarm.identity import PeerId, key_bytes
from swarm.messages import RECORD_ID_BYTES, Told
from swarm.records import (
    MAX_LEASE_S,
    Descriptor,
    Heartbeat,
    Leave,
    Record,
    check_signature,
    read_record,
    record_hash,
)

MAX_PEERS = 16_384  # 10,000 peers and room; about 3 KiB each
MAX_GONE = 16_384  # tombstones; the oldest go first
MAX_SEEN = 65_536  # identifiers of heads that need no asking for any more, about 100 bytes each
GONE_S = 3600.0  # far above MAX_LEASE_S, so that a replayed heartbeat finds the tombstone
RECENT_S = 600.0  # a peer that lapsed since then counts as known ("4 of 5 known peers alive")
assert GONE_S > 2 * MAX_LEASE_S


class Rank(NamedTuple):
    """The order of one peer's heads. A leave stands where a descriptor of its seq would."""

    seq: int
    leave: bool
    hash: bytes
    heartbeat_seq: int
    heartbeat_hash: bytes


class Verdict(enum.Enum):
    STALE = "known, outranked or lapsed"
    INCOMPLETE = "its descriptor isn't held: ask for all of it"
    NO_ROOM = "the table is full"
    RENEWED = "the same, alive for longer"
    CHANGED = "something that others want to know at once"


@dataclass(frozen=True)
class PeerEntry:
    """One live peer. age_s: since its heartbeat was issued. lease_left_s: until it lapses."""

    descriptor: Descriptor
    heartbeat: Heartbeat
    descriptor_bytes: bytes
    age_s: float
    lease_left_s: float

    @property
    def peer(self) -> PeerId:
        return self.descriptor.peer


@dataclass(frozen=True, slots=True)
class Held:
    """A head and what belongs to it. issued_at: on the table's clock. descriptor: None after a leave."""

    rank: Rank
    head: Heartbeat | Leave
    head_bytes: bytes
    head_id: bytes
    descriptor: Descriptor | None
    descriptor_bytes: bytes | None
    fingerprint: bytes | None
    addresses: tuple[str, ...]
    issued_at: float
    lapses_at: float
    place: int  # of the peer among the buckets of a digest

    @property
    def peer(self) -> PeerId:
        return self.head.peer

    def matches(self, fingerprint: bytes | None) -> bool:
        return fingerprint is None or self.fingerprint == fingerprint


@dataclass(frozen=True, slots=True)
class Gone:
    """A tombstone. left: said goodbye, so nobody counts it as missing."""

    rank: Rank
    fingerprint: bytes | None
    addresses: tuple[str, ...]
    left: bool
    since: float


def head_id(head_bytes: bytes) -> bytes:
    """The short identifier under which a head is offered."""
    return hashlib.sha256(head_bytes).digest()[:RECORD_ID_BYTES]


class Table:
    """Pure: `now` is seconds on a clock that counts time asleep. check: verifies a record's signature."""

    def __init__(self, check: Callable[[Record, bytes], None] = check_signature) -> None:
        self._check = check
        self._held: dict[PeerId, Held] = {}
        self._gone: dict[PeerId, Gone] = {}
        self._by_id: dict[bytes, PeerId] = {}
        self._seen: dict[bytes, None] = {}
        self._lapses: list[tuple[float, PeerId]] = []  # a heap; outdated pairs are skipped
        self.version = 0  # grows with every change

    # ------------------------------------------------------------ questions

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, peer: PeerId) -> Held | None:
        return self._held.get(peer)

    def by_id(self, identifier: bytes) -> Held | None:
        peer = self._by_id.get(identifier)
        return self._held[peer] if peer is not None else None

    def knows(self, identifier: bytes) -> bool:
        """Whether asking for this head is needless."""
        return identifier in self._by_id or identifier in self._seen

    def held(self, fingerprint: bytes | None = None) -> Iterator[Held]:
        return (held for held in self._held.values() if held.matches(fingerprint))

    def live(self, now: float, fingerprint: bytes | None = None) -> tuple[PeerEntry, ...]:
        found = (_entry(held, now) for held in self.held(fingerprint))
        return tuple(entry for entry in found if entry is not None)

    def entry(self, peer: PeerId, now: float) -> PeerEntry | None:
        held = self._held.get(peer)
        return _entry(held, now) if held is not None else None

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """What the peer last said of where it listens, alive or not."""
        found = self._held.get(peer) or self._gone.get(peer)
        return found.addresses if found is not None else ()

    def lapsed(self) -> tuple[PeerId, ...]:
        """Peers whose lease ended without a leave, while the tombstone lasts."""
        return tuple(peer for peer, gone in self._gone.items() if not gone.left)

    def went_missing(self, peer: PeerId) -> bool:
        """Whether its lease ended without a leave, and it hasn't come back."""
        gone = self._gone.get(peer)
        return gone is not None and not gone.left

    def known(self, now: float, fingerprint: bytes | None = None) -> int:
        """Peers alive, and those that went missing lately."""
        missing = (
            gone
            for gone in self._gone.values()
            if not gone.left
            and now - gone.since < RECENT_S
            and (fingerprint is None or gone.fingerprint == fingerprint)
        )
        return len(self.live(now, fingerprint)) + sum(1 for _ in missing)

    def told(self, held: Held, now: float, full: bool) -> Told:
        """The head as it goes to somebody else, with the age that it has by now."""
        return Told(held.head_bytes, max(0.0, now - held.issued_at), held.descriptor_bytes if full else None)

    # ------------------------------------------------------------ reconciliation

    def digest(self, buckets: int, now: float, fingerprint: bytes | None = None) -> tuple[bytes, ...]:
        """Sums, one per bucket of peers, that differ where the sets of live descriptors or leaves do."""
        sums = [0] * buckets
        for held in self.held(fingerprint):
            if held.lapses_at > now:
                sums[held.place % buckets] += int.from_bytes(held.rank.hash[:8], "big")
        return tuple((total % (1 << 64)).to_bytes(8, "big") for total in sums)

    def in_buckets(
        self, chosen: set[int], buckets: int, now: float, fingerprint: bytes | None = None
    ) -> list[PeerId]:
        return [
            held.peer
            for held in self.held(fingerprint)
            if held.lapses_at > now and held.place % buckets in chosen
        ]

    # ------------------------------------------------------------ changes

    def accept(self, told: Told, now: float) -> Verdict:
        """Take in what somebody tells. Raises MessageError (table unchanged) if it is forged or malformed."""
        head = read_head(told.head)
        identifier = head_id(told.head)
        if self.knows(identifier) or told.age_s >= head.lease_s:
            return Verdict.STALE
        descriptor = self._descriptor_of(head, told)
        if isinstance(head, Heartbeat) and descriptor is None:
            return self._without_descriptor(head, told.head, identifier)
        rank = _rank(head, told.head, descriptor[0] if descriptor else None)
        if self._outranks(rank, head.peer):
            self._check(head, told.head)
            if descriptor is not None and not self._holds_descriptor(head.peer, descriptor[1]):
                self._check(*descriptor)
            return self._store(rank, head, told, identifier, descriptor, now)
        self._see(identifier)
        return Verdict.STALE

    def lapse(self, now: float) -> list[PeerId]:
        """Move what isn't alive any more to the tombstones, and forget the oldest of those."""
        over = []
        while self._lapses and self._lapses[0][0] <= now:
            _, peer = heapq.heappop(self._lapses)
            held = self._held.get(peer)
            if held is not None and held.lapses_at <= now:
                self._bury(held, now)
                over.append(peer)
        self._forget(now)
        return over

    @property
    def next_lapse(self) -> float | None:
        return self._lapses[0][0] if self._lapses else None

    # ------------------------------------------------------------ inside

    def _descriptor_of(self, head: Heartbeat | Leave, told: Told) -> tuple[Descriptor, bytes] | None:
        """The descriptor that a heartbeat names, from what was told or from what is held."""
        if isinstance(head, Leave):
            return None
        if told.descriptor is None:
            held = self._held.get(head.peer)
            if held is None or held.descriptor is None or held.descriptor_bytes is None:
                return None
            if held.rank.hash != head.descriptor_hash:
                return None
            found, data = held.descriptor, held.descriptor_bytes
        else:
            record = read_record(told.descriptor)
            if not isinstance(record, Descriptor) or record.peer != head.peer:
                raise MessageError(f"a heartbeat of {head.peer[:8]} came with something else's record")
            if record_hash(told.descriptor) != head.descriptor_hash:
                raise MessageError(f"a heartbeat of {head.peer[:8]} came with a descriptor it doesn't name")
            found, data = record, told.descriptor
        if head.seq <= found.seq:
            raise MessageError(f"a heartbeat of {head.peer[:8]} isn't newer than its descriptor")
        return found, data

    def _without_descriptor(self, head: Heartbeat, head_bytes: bytes, identifier: bytes) -> Verdict:
        """Such a heartbeat may still be plainly too old: its descriptor's seq is lower than its own."""
        past = self._held.get(head.peer) or self._gone.get(head.peer)
        if past is not None and head.seq <= past.rank.seq:
            self._see(identifier)
            return Verdict.STALE
        return Verdict.INCOMPLETE

    def _outranks(self, rank: Rank, peer: PeerId) -> bool:
        past = self._held.get(peer) or self._gone.get(peer)
        return past is None or rank > past.rank

    def _holds_descriptor(self, peer: PeerId, data: bytes) -> bool:
        held = self._held.get(peer)
        return held is not None and held.descriptor_bytes == data

    def _store(
        self,
        rank: Rank,
        head: Heartbeat | Leave,
        told: Told,
        identifier: bytes,
        descriptor: tuple[Descriptor, bytes] | None,
        now: float,
    ) -> Verdict:
        before = self._held.get(head.peer)
        if before is None and len(self._held) >= MAX_PEERS:
            return Verdict.NO_ROOM
        gone = self._gone.pop(head.peer, None)
        past = before or gone
        made, data = descriptor or (None, None)
        held = Held(
            rank=rank,
            head=head,
            head_bytes=told.head,
            head_id=identifier,
            descriptor=made,
            descriptor_bytes=data,
            fingerprint=made.fingerprint if made else (past.fingerprint if past else None),
            addresses=made.addresses if made else (past.addresses if past else ()),
            issued_at=now - told.age_s,
            lapses_at=now - told.age_s + head.lease_s,
            place=before.place if before is not None else int.from_bytes(key_bytes(head.peer)[:4], "big"),
        )
        if before is not None:
            self._by_id.pop(before.head_id, None)
        self._held[head.peer] = held
        self._by_id[identifier] = head.peer
        self._see(identifier)
        self._push_lapse(held)
        self.version += 1
        return Verdict.CHANGED if before is None or _differs(before, held) else Verdict.RENEWED

    def _push_lapse(self, held: Held) -> None:
        heapq.heappush(self._lapses, (held.lapses_at, held.peer))
        if len(self._lapses) > 4 * len(self._held) + 64:  # mostly outdated pairs: renewals leave one each
            self._lapses = [(one.lapses_at, one.peer) for one in self._held.values()]
            heapq.heapify(self._lapses)

    def _bury(self, held: Held, now: float) -> None:
        del self._held[held.peer]
        self._by_id.pop(held.head_id, None)
        self._gone.pop(held.peer, None)
        left = isinstance(held.head, Leave)
        self._gone[held.peer] = Gone(held.rank, held.fingerprint, held.addresses, left, now)
        self.version += 1

    def _forget(self, now: float) -> None:
        """The oldest tombstones come first in the dict, since each is put in when it begins."""
        while self._gone:
            peer = next(iter(self._gone))
            if len(self._gone) <= MAX_GONE and now - self._gone[peer].since < GONE_S:
                break
            del self._gone[peer]

    def _see(self, identifier: bytes) -> None:
        self._seen.pop(identifier, None)
        self._seen[identifier] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]


def read_head(data: bytes) -> Heartbeat | Leave:
    """Decode, without checking the signature. Raises MessageError."""
    record = read_record(data)
    if isinstance(record, Descriptor):
        raise MessageError("a descriptor can't stand where a heartbeat or a leave belongs")
    return record


def differing(ours: Iterable[bytes], theirs: Iterable[bytes]) -> set[int]:
    """The buckets whose sums aren't equal."""
    return {at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b}


def _rank(head: Heartbeat | Leave, head_bytes: bytes, descriptor: Descriptor | None) -> Rank:
    if isinstance(head, Leave):
        return Rank(head.seq, True, record_hash(head_bytes), 0, b"")
    assert descriptor is not None
    return Rank(descriptor.seq, False, head.descriptor_hash, head.seq, record_hash(head_bytes))


def _differs(before: Held, after: Held) -> bool:
    """Whether others should hear of it at once, and not with the next batch."""
    if isinstance(before.head, Leave) or isinstance(after.head, Leave):
        return True
    return before.rank.hash != after.rank.hash or before.head.state != after.head.state


def _entry(held: Held, now: float) -> PeerEntry | None:
    if held.lapses_at <= now or held.descriptor is None or held.descriptor_bytes is None:
        return None
    assert isinstance(held.head, Heartbeat)
    return PeerEntry(
        descriptor=held.descriptor,
        heartbeat=held.head,
        descriptor_bytes=held.descriptor_bytes,
        age_s=max(0.0, now - held.issued_at),
        lease_left_s=held.lapses_at - now,
    )
