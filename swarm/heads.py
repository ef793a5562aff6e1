"""A head: a peer's newest heartbeat with its descriptor, or its leave; and the order of one peer's heads.

`Held` is one that counts, `Gone` what is kept of one that doesn't any more, `PeerEntry` what everybody else
gets to see of somebody alive. Values only: `table.py` has the rules.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from swarm.digests import Models
from swarm.errors import MessageError
from swarm.identity import PeerId
from swarm.messages import RECORD_ID_BYTES
from swarm.owner import LEASE_INTERVALS
from swarm.records import STATES, Descriptor, Heartbeat, Leave, read_record, record_hash

DOUBT_SLACK_S = 2.0  # above an interval, for the way here


class Rank(NamedTuple):
    """The order of one peer's heads. A leave stands where a descriptor of its seq would."""

    seq: int
    leave: bool
    hash: bytes
    heartbeat_seq: int
    heartbeat_hash: bytes


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
    """A head and what belongs to it. descriptor: None after a leave. issued_at, lapses_at and heard_at (when it
    was first heard of here): on the table's clock. opinions: on its age, wanted yet. model_before: of another
    model that it served until lately, or None."""

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
    heard_at: float
    opinions: int
    model_before: bytes | None

    @property
    def peer(self) -> PeerId:
        return self.head.peer

    def matches(self, only: Models | None) -> bool:
        return only is None or self.fingerprint in only

    def concerns(self, only: Models | None) -> bool:
        """Whether who wants to hear of these models should hear that it serves one, or no longer does."""
        return only is None or self.fingerprint in only or self.model_before in only


@dataclass(frozen=True, slots=True)
class Gone:
    """A tombstone. Whatever isn't above `rank`, or has a seq up to `seq`, came before the end. head_bytes: the
    newest head, for objections. left: said goodbye, so nobody counts it as missing."""

    rank: Rank
    seq: int
    head_bytes: bytes
    head_id: bytes
    lease_s: float
    issued_at: float
    heard_at: float
    opinions: int
    fingerprint: bytes | None
    addresses: tuple[str, ...]
    left: bool
    since: float


def head_id(head_bytes: bytes) -> bytes:
    """The short identifier under which a head is offered."""
    return hashlib.sha256(head_bytes).digest()[:RECORD_ID_BYTES]


def read_head(data: bytes) -> Heartbeat | Leave:
    """Decode, without checking the signature. Raises MessageError."""
    record = read_record(data)
    if isinstance(record, Descriptor):
        raise MessageError("a descriptor can't stand where a heartbeat or a leave belongs")
    return record


def rank_of(
    head: Heartbeat | Leave, head_bytes: bytes, descriptor: Descriptor | None, descriptor_seq: int = 0
) -> Rank:
    """descriptor_seq: of a heartbeat's descriptor that isn't at hand."""
    if isinstance(head, Leave):
        return Rank(head.seq, True, record_hash(head_bytes), 0, b"")
    seq = descriptor.seq if descriptor is not None else descriptor_seq
    return Rank(seq, False, head.descriptor_hash, head.seq, record_hash(head_bytes))


def is_doubtful(age_s: float, head: Heartbeat | Leave) -> bool:
    """Older than an owner that is alive lets its newest head become, so another opinion is worth having."""
    return isinstance(head, Heartbeat) and age_s > head.lease_s / LEASE_INTERVALS + DOUBT_SLACK_S


def differs(before: Held, after: Held) -> bool:
    """Whether others should hear of it at once, and not with the next batch."""
    if isinstance(before.head, Leave) or isinstance(after.head, Leave):
        return True
    return before.rank.hash != after.rank.hash or before.head.state != after.head.state


def digest_value(held: Held) -> int:
    """What a head adds to a digest: the same for all that nobody needs to hear of at once (`differs`)."""
    state = STATES.index(held.head.state) if isinstance(held.head, Heartbeat) else 0
    return int.from_bytes(held.rank.hash[:8], "big") + state


def entry_of(held: Held, now: float) -> PeerEntry | None:
    """None for one that has left or lapsed."""
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
