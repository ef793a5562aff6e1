"""records.py: what is signed, what it takes, and what is refused."""

from __future__ import annotations

import dataclasses
import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.spans import Span, Speed
from swarm.errors import MessageError, UsageError
from swarm.identity import Identity
from swarm.messages import MAX_RECORD_BYTES, Delta
from swarm.records import (
    COORDINATES,
    MAX_HEARTBEAT_BYTES,
    MAX_LEASE_S,
    SIGNATURE_BYTES,
    Leave,
    Record,
    brief,
    from_brief,
    open_descriptor,
    open_record,
    sign_record,
)
from tests.sim.scenario import through_the_wire
from tests.told import ALICE, a_descriptor, a_heartbeat, told


@pytest.mark.parametrize(
    "record",
    [
        a_descriptor(),
        a_heartbeat(b"x", 2, speed=Speed(0.5, 0.25, 0.125, 2.0, 4.0), sessions=3, queue_s=1.5),
        Leave(ALICE.peer_id, 7, 15.0),
    ],
)
def test_a_record_survives_signing_and_opening(record: Record) -> None:
    assert open_record(sign_record(ALICE, record)) == record


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    signed = sign_record(ALICE, a_descriptor())
    for at in range(0, 8 * len(signed), 7):
        broken = bytearray(signed)
        broken[at // 8] ^= 1 << at % 8
        with pytest.raises(MessageError):
            open_record(bytes(broken))


def test_nobody_signs_for_somebody_else() -> None:
    signed = sign_record(ALICE, a_descriptor())
    mallory = Identity.ephemeral()
    forged = mallory.sign(b"record", signed[SIGNATURE_BYTES:]) + signed[SIGNATURE_BYTES:]
    with pytest.raises(MessageError, match="didn't sign"):
        open_record(forged)


def test_a_signature_for_another_purpose_is_no_record() -> None:
    payload = sign_record(ALICE, a_descriptor())[SIGNATURE_BYTES:]
    with pytest.raises(MessageError, match="didn't sign"):
        open_record(ALICE.sign(b"handshake", payload) + payload)


def test_a_newer_release_may_add_keys() -> None:
    values = msgpack.unpackb(sign_record(ALICE, a_descriptor())[SIGNATURE_BYTES:])
    payload = msgpack.packb(values | {"zz": [1, 2]}, use_single_float=True)
    assert open_record(ALICE.sign(b"record", payload) + payload) == a_descriptor()


@pytest.mark.parametrize(
    "changes",
    [
        {"span": Span(0, 31)},
        {"name": "\x1b[2Jevil"},
        {"model": "two\nlines"},
        {"fingerprint": b"short"},
        {"addresses": ("a:1",) * 9},
        {"seq": -1},
        {"context": 1 << 40},
    ],
)
def test_what_others_would_refuse_is_not_signed(changes: dict[str, object]) -> None:
    with pytest.raises(MessageError):
        sign_record(ALICE, dataclasses.replace(a_descriptor(), **changes))  # type: ignore[arg-type]


def test_descriptor_and_heartbeat_stay_within_their_kibibyte() -> None:
    """The largest heartbeat there is, and a descriptor one byte larger than allowed."""
    largest = a_heartbeat(
        b"x", (1 << 62) - 1, issued_ms=(1 << 62) - 1, lease_s=MAX_LEASE_S, state="draining",
        sessions=1 << 20, free_kv_tokens=1 << 40, queue_s=1e6, speed=Speed(1e6, 1e6, 1e6, 1e6, 1e6),
        tokens_per_s=1e9,
    )  # fmt: skip
    heartbeat_bytes = len(sign_record(ALICE, largest))
    with pytest.raises(UsageError, match="fewer or shorter addresses"):
        sign_record(ALICE, a_descriptor(addresses=("x" * 80,) * 8))
    room = 80
    while True:
        try:
            descriptor_bytes = len(
                sign_record(ALICE, a_descriptor(addresses=("x" * 80,) * 4 + ("y" * room,)))
            )
            break
        except UsageError:
            room -= 1
    assert descriptor_bytes + heartbeat_bytes <= MAX_RECORD_BYTES


def test_a_usual_heartbeat_takes_about_180_bytes_and_has_room_for_coordinates() -> None:
    """Issue 5: about 180 bytes signed. Coordinates: 3 of them, a height and an error, 2 bytes each."""
    usual = a_heartbeat(
        b"x", 1_764_000_000_001, issued_ms=1_764_000_000_001, sessions=3, free_kv_tokens=100_000,
        queue_s=0.25, speed=Speed(0.002, 0.001, 0.001, 0.005, 0.0001), tokens_per_s=31.4,
    )  # fmt: skip
    signed = sign_record(ALICE, usual)
    assert 170 <= len(signed) <= 195
    values = msgpack.unpackb(signed[SIGNATURE_BYTES:])
    payload = msgpack.packb(values | {COORDINATES: brief((1.5, -2.5, 0.25, 0.01, 0.125))})
    later = ALICE.sign(b"record", payload) + payload
    assert len(later) <= MAX_HEARTBEAT_BYTES
    assert open_record(later) == open_record(signed)


@given(st.lists(st.floats(0.0, 1e6, width=32), max_size=5))
def test_brief_figures_are_wrong_by_less_than_half_a_percent(figures: list[float]) -> None:
    assert from_brief(brief(figures)) == pytest.approx(figures, rel=0.004, abs=1e-37)


def test_the_age_of_a_record_never_shrinks_on_the_way() -> None:
    for age_s in (0.0, 0.0004, 1.23456, 14.9999):
        arrived = through_the_wire(Delta((told(age_s=age_s),)))
        assert isinstance(arrived, Delta)
        assert age_s <= arrived.records[0].age_s < age_s + 0.001


def test_bytes_that_are_no_record_are_refused() -> None:
    rng = random.Random(1)
    for payload in (b"", b"\xc1", b"\x91" * 900, b"\x80", msgpack.packb({"": "q"}), msgpack.packb({"": ["d"]}),
                    rng.randbytes(200), b"\xdf\xff\xff\xff\xff", msgpack.packb({"": "d"})):  # fmt: skip
        with pytest.raises(MessageError):
            open_record(ALICE.sign(b"record", payload) + payload)


def test_a_heartbeat_is_no_descriptor() -> None:
    with pytest.raises(MessageError, match="expected a descriptor"):
        open_descriptor(told().head)


def test_a_record_that_is_too_large_is_refused_by_whoever_reads_it() -> None:
    """Signed all the same, with what a later release may have put in."""
    values = msgpack.unpackb(sign_record(ALICE, a_heartbeat(b"x", 1))[SIGNATURE_BYTES:])
    for size, good in ((20, True), (200, False)):
        payload = msgpack.packb(values | {"later": bytes(size)})
        signed = ALICE.sign(b"record", payload) + payload
        if good:
            assert open_record(signed)
        else:
            with pytest.raises(MessageError, match="above the limit of 256"):
                open_record(signed)
