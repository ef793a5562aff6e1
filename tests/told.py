"""Signed records for tests, made and told by hand."""

from __future__ import annotations

from swarm.identity import Identity
from swarm.messages import Told
from swarm.records import Descriptor, Heartbeat, Leave, record_hash, sign_record
from tests.sim.records import descriptor

LEASE_S = 15.0  # protocol.md: three heartbeats of 5 s in a small swarm
ALICE = Identity.from_seed(b"a" * 32)


def a_descriptor(identity: Identity = ALICE, seq: int = 1, **changes: object) -> Descriptor:
    return descriptor(peer=identity.peer_id, seq=seq, **changes)


def a_heartbeat(of: bytes, seq: int, identity: Identity = ALICE, **changes: object) -> Heartbeat:
    values: dict[str, object] = {
        "peer": identity.peer_id,
        "seq": seq,
        "descriptor_hash": record_hash(of),
        "issued_ms": 5,
        "lease_s": LEASE_S,
        "state": "serving",
    }
    return Heartbeat(**(values | changes))  # type: ignore[arg-type]


def told(
    seq: int = 1, beat: int | None = None, age_s: float = 0.0, identity: Identity = ALICE, **changes: object
) -> Told:
    """A signed descriptor `seq` with a heartbeat on it."""
    data = sign_record(identity, a_descriptor(identity, seq, **changes))
    head = sign_record(identity, a_heartbeat(data, seq + 1 if beat is None else beat, identity))
    return Told(head, age_s, data)


def left(seq: int, age_s: float = 0.0) -> Told:
    return Told(sign_record(ALICE, Leave(ALICE.peer_id, seq, LEASE_S)), age_s)
