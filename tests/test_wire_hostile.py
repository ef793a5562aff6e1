"""Frames that no honest sender makes: what each costs whoever sent it. More of them: test_wire.py, test_quotas.py."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from swarm.errors import FramingError, MessageError
from swarm.flow import CLOSE, DATA, DEFAULT_LIMITS, END, RESET, WINDOW, Priority
from swarm.messages import Step, Where, encode
from swarm.packing import MAX_TENSOR_NAME, pack, unpack
from swarm.tensors import RawTensor
from swarm.wire import LAST, MAX_PINGS, MAX_REASON, Closed, StreamReset
from tests.wire_pair import Pair, connected, framed

BULK = Priority.BULK << 1


def head_of(size: int) -> bytes:
    """The map of a message with so many bytes of tensors."""
    return bytes(pack(*encode(Step({"hidden": RawTensor("uint8", (size,), bytes(size))}, epoch=1)))[0])


def reset_of(pair: Pair) -> StreamReset:
    (reset,) = pair.events(pair.b, StreamReset)
    assert not pair.b.closed and pair.b._held == 0
    return reset  # type: ignore[no-any-return]


def closed_for(pair: Pair) -> str:
    (closed,) = pair.events(pair.b, Closed)
    assert isinstance(closed.error, FramingError)
    return str(closed.reason)


def test_a_message_that_grows_beyond_what_its_map_says_is_cut_at_once() -> None:
    """Its parts are credited back as they come: what bounds the memory is the size that its map states."""
    pair = connected()
    pair.forge(DATA, BULK, 1, head_of(100))
    pair.forge(DATA, BULK, 1, bytes(60))
    assert pair.events(pair.b, StreamReset) == []
    pair.forge(DATA, BULK, 1, bytes(60))
    assert "longer than" in reset_of(pair).reason


def test_a_stream_that_ends_inside_a_message_is_over() -> None:
    pair = connected()
    pair.forge(DATA, BULK, 1, head_of(100))
    pair.forge(END, 0, 1, b"")
    assert "inside a message" in reset_of(pair).reason


def test_the_priority_of_a_message_stays_what_it_was() -> None:
    pair = connected()
    pair.forge(DATA, BULK, 1, head_of(100))
    pair.forge(DATA, Priority.DECODE << 1, 1, bytes(60))
    assert "priority changed" in closed_for(pair)


@pytest.mark.parametrize("size", range(6))
def test_a_frame_without_a_whole_header_costs_the_connection(size: int) -> None:
    pair = connected()
    sealed = pair.a._sender.encrypt(bytes(size))
    pair.b.receive_data(struct.pack(">H", len(sealed)) + sealed, 0.0)
    pair.collect()
    assert f"a frame of {size} bytes" in closed_for(pair)


@pytest.mark.parametrize("place", [0, 3, 9, -1])
def test_a_record_with_one_bit_changed_is_never_read(place: int) -> None:
    pair = connected()
    sealed = bytearray(pair.a._sender.encrypt(struct.pack(">BBI", CLOSE, 0, 0) + b"bye"))
    sealed[place] ^= 1
    pair.b.receive_data(struct.pack(">H", len(sealed)) + sealed, 0.0)
    pair.collect()
    assert closed_for(pair) == "a record was changed on its way"


def test_a_window_cant_be_opened_without_bound() -> None:
    pair = connected()
    pair.b.open_stream()
    for _ in range(250):
        pair.forge(WINDOW, 0, 2, b"\xff" * 4)
    assert pair.events(pair.b, Closed) == []
    for _ in range(10):  # 4 GiB each, 1 TiB in all
        pair.forge(WINDOW, 0, 2, b"\xff" * 4)
    assert "grew without bound" in closed_for(pair)


def test_whoever_sends_unknown_messages_and_reads_no_answer_loses_the_stream() -> None:
    pair = connected(replace(DEFAULT_LIMITS, send_queue_bytes=500))
    for number in range(200):
        pair.forge(DATA, LAST, 1, framed({"kind": f"unknown{number}"}))
    assert "too many unknown messages" in reset_of(pair).reason


def test_pings_that_nobody_answers_are_forgotten() -> None:
    pair = connected()
    for number in range(5 * MAX_PINGS):
        pair.a.ping(float(number))
    assert len(pair.a._pings) <= MAX_PINGS


def test_reasons_are_short_and_printable_whoever_wrote_them() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.forge(RESET, 0, 1, b"\x1b[31m" + b"x" * 60_000)
    (reset,) = pair.events(pair.b, StreamReset)
    assert len(reset.reason.encode()) <= MAX_REASON + 16 and reset.reason.isprintable()
    pair.forge(CLOSE, 0, 0, b"\x1b]0;title\x07" + b"y" * 60_000)
    (closed,) = pair.events(pair.b, Closed)
    assert len(closed.reason.encode()) <= MAX_REASON + 16 and closed.reason.isprintable()


@pytest.mark.parametrize(("length", "good"), [(MAX_TENSOR_NAME, True), (MAX_TENSOR_NAME + 1, False)])
def test_a_tensor_has_a_name_of_bounded_length(length: int, good: bool) -> None:
    data = framed({"kind": "files", "#": [["n" * length, "uint8", [0]]]})
    if good:
        assert len(unpack(data)[1]) == 1
    else:
        with pytest.raises(MessageError, match="bad name"):
            unpack(data)
