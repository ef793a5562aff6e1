"""The sans-IO connection: two cores with their bytes carried by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import wire
from swarm.errors import (
    FramingError,
    HandshakeError,
    MessageError,
    StrangeProgram,
    StreamClosed,
    SwarmError,
    VersionMismatch,
)
from swarm.flow import DATA, END, MAX_PART, PING, WINDOW, Limits, Priority
from swarm.messages import Message, Step, Tokens, Unsupported, Where
from swarm.packing import Specs
from swarm.tensors import RawTensor, ids_tensor
from swarm.wire import (
    Closed,
    MessageReceived,
    RoundTrip,
    StreamEnded,
    StreamOpened,
    StreamOver,
    StreamReset,
    Writable,
)
from tests.wire_pair import Pair, connected, framed


def step(size: int, position: int = 0) -> Step:
    data = random.Random(position).randbytes(size)
    return Step({"hidden": RawTensor("uint8", (size,), data)}, epoch=1, position=position)


def positions(messages: list[Message]) -> list[int]:
    return [message.position for message in messages if isinstance(message, Step)]


# ---------------------------------------------------------------- the connection


def test_messages_arrive_with_their_tensors_in_both_directions() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(3))
    pair.a.send(stream, step(2304, 7), Priority.DECODE)
    pair.run()
    first, second = pair.messages(pair.b)
    assert first == Where(3)
    assert isinstance(second, Step)
    assert bytes(second.tensors["hidden"].data) == random.Random(7).randbytes(2304)
    assert StreamOpened(stream) in pair.seen[pair.b]
    pair.b.send(stream, Tokens(1, 5, None, ids_tensor([4, 5])))
    (answer,) = pair.run().messages(pair.a)
    assert isinstance(answer, Tokens) and answer.first_position == 5


def test_ids_are_odd_from_the_dialler_and_even_from_the_listener() -> None:
    pair = connected()
    assert [pair.a.open_stream() for _ in range(3)] == [1, 3, 5]
    assert [pair.b.open_stream() for _ in range(3)] == [2, 4, 6]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 200_000), min_size=1, max_size=5))
def test_any_chunking_of_the_bytes_gives_the_same_messages(seed: int, sizes: list[int]) -> None:
    rng = random.Random(seed)
    pair = connected()
    for number, size in enumerate(sizes):
        stream = pair.a.open_stream()
        pair.a.send(stream, Where(number))
        pair.a.send(stream, step(size, number), Priority.BULK)
    data = b""
    while more := pair.a.data_to_send():
        data += more
    while data:
        cut = rng.choice((1, 7, 1000, 100_000))
        pair.b.receive_data(data[:cut], 0.0)
        data = data[cut:]
    pair.collect()
    got = [bytes(m.tensors["hidden"].data) for m in pair.messages(pair.b) if isinstance(m, Step)]
    assert sorted(got) == sorted(random.Random(n).randbytes(size) for n, size in enumerate(sizes))


def test_a_decode_message_overtakes_a_bulk_transfer_by_all_but_one_record() -> None:
    pair = connected()
    bulk, decode = pair.a.open_stream(), pair.a.open_stream()
    pair.b.configure(bulk, max_message_bytes=1)  # not open there yet: nothing happens
    pair.a.send(bulk, step(10 << 20), Priority.BULK)
    pair.carry(pair.a, pair.b)
    pair.b.configure(bulk, max_message_bytes=20 << 20)
    pair.a.send(decode, step(2304, 5), Priority.DECODE)
    pair.carry(pair.a, pair.b)
    assert positions(pair.messages(pair.b, decode)) == [5]
    assert not pair.messages(pair.b, bulk)


def test_a_message_larger_than_the_window_flows() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.b.configure(stream, max_message_bytes=20 << 20)
    pair.a.send(stream, step(10 << 20, 3), Priority.BULK)
    assert positions(pair.run().messages(pair.b)) == [3]


def test_equal_streams_take_turns() -> None:
    pair = connected()
    streams = [pair.a.open_stream() for _ in range(3)]
    for stream in streams:
        pair.a.send(stream, step(600_000, stream), Priority.BULK)
    while not pair.messages(pair.b):
        pair.carry(pair.a, pair.b)
    left = [pair.a.queued(stream) for stream in streams]
    assert max(left) - min(left) <= 2 * MAX_PART


def test_messages_of_one_stream_keep_their_order_whatever_their_priorities() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    order = [Priority.BULK, Priority.CONTROL, Priority.DECODE, Priority.PREFILL, Priority.CONTROL]
    for position, priority in enumerate(order):
        pair.a.send(stream, step(20_000, position), priority)
    assert positions(pair.run().messages(pair.b)) == [0, 1, 2, 3, 4]


def test_a_reader_that_never_takes_anything_blocks_no_other_stream_and_holds_a_bounded_amount() -> None:
    pair = connected()
    slow, quick = pair.a.open_stream(), pair.a.open_stream()
    for position in range(100):
        pair.a.send(slow, step(300_000, position), Priority.DECODE)
    pair.run()
    limits = pair.a.limits
    held = sum(event.cost for event in pair.events(pair.b, MessageReceived))
    assert limits.window_bytes <= held <= 2 * limits.window_bytes + limits.max_message_bytes
    assert pair.a.queued(slow) > 0
    pair.a.send(quick, step(500, 1), Priority.BULK)
    pair.a.send(slow, Where(1))
    assert positions(pair.run().messages(pair.b, quick)) == [1]
    for _ in range(100):
        pair.take(pair.b)
        pair.run()
    assert pair.a.queued(slow) == 0


def test_control_flows_while_a_streams_window_is_used_up() -> None:
    pair = connected()
    stream = pair.b.open_stream()
    pair.b.send(stream, Where(0))
    pair.run()
    for position in range(10):
        pair.a.send(stream, step(900_000, position), Priority.DECODE)
    pair.run()
    assert pair.a.queued(stream) > 0
    pair.b.send(stream, Where(9))
    assert Where(9) in pair.run().messages(pair.a)


def test_control_messages_wait_at_the_sender_once_their_own_window_is_full() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    for _ in range(10_000):
        pair.a.send(stream, Where(1))
    pair.run()
    held = sum(event.cost for event in pair.events(pair.b, MessageReceived))
    assert 0 < held <= pair.a.limits.control_window_bytes
    total = 0
    while waiting := len(pair.messages(pair.b)):
        total += waiting
        pair.take(pair.b)
        pair.run()
    assert total == 10_000


def test_a_large_message_sent_as_control_still_arrives() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, step(100_000, 4), Priority.CONTROL)
    assert positions(pair.run().messages(pair.b)) == [4]


def test_a_sender_that_waits_is_told_when_there_is_room() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    for position in range(6):
        pair.a.send(stream, step(600_000, position), Priority.BULK)
    pair.a.want_writable(stream)
    pair.run()
    assert pair.events(pair.a, Writable) == []
    for _ in range(2):
        pair.take(pair.b)
        pair.run()
    assert pair.events(pair.a, Writable) == [Writable(stream)]
    assert pair.a.queued(stream) < pair.a.limits.send_queue_bytes


def test_both_sides_end_a_stream_and_it_is_over() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.a.end(stream)
    pair.run()
    assert pair.seen[pair.b][-1] == StreamEnded(stream)
    with pytest.raises(StreamClosed):
        pair.a.send(stream, Where(2))
    pair.b.send(stream, Where(3))
    pair.b.end(stream)
    pair.run()
    assert pair.messages(pair.a) == [Where(3)]
    assert pair.events(pair.a, StreamOver) == pair.events(pair.b, StreamOver) == [StreamOver(stream)]
    assert pair.a.streams == pair.b.streams == 0


def test_a_stream_that_nobody_reads_any_more_is_over_behind_its_last_message() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.b.send(stream, step(500_000, 2), Priority.BULK)
    pair.b.finish(stream, "done")
    pair.run()
    assert positions(pair.messages(pair.a)) == [2]
    assert pair.events(pair.a, StreamReset) == [StreamReset(stream, "done")]
    assert pair.a.streams == pair.b.streams == 0


def test_a_reset_tells_the_other_side_why_and_later_frames_are_dropped() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.b.reset(stream, "no room")
    pair.a.send(stream, step(10, 1), Priority.DECODE)
    pair.carry(pair.a, pair.b)
    pair.run()
    assert pair.events(pair.a, StreamReset) == [StreamReset(stream, "no room")]
    assert not pair.events(pair.b, Closed)
    assert pair.a.streams == pair.b.streams == 0


@pytest.mark.parametrize("priorities", [(3, 0), (0, 3)])
def test_a_later_streams_first_frame_may_overtake_an_earlier_ones(priorities: tuple[int, int]) -> None:
    pair = connected()
    streams = [pair.a.open_stream() for _ in range(2)]
    for stream, priority in zip(streams, priorities, strict=True):
        pair.a.send(stream, step(100, stream), Priority(priority))
    assert sorted(positions(pair.run().messages(pair.b))) == streams


def test_a_bad_message_costs_its_own_stream_only() -> None:
    pair = connected()
    bad, good = pair.a.open_stream(), pair.a.open_stream()
    pair.a.send(good, Where(1))
    pair.run()
    pair.forge(DATA, wire.LAST, bad, framed({"kind": "where", "epoch": -4}))
    (reset,) = pair.events(pair.b, StreamReset)
    assert reset.stream == bad and "Where.epoch" in reset.reason
    pair.run()
    assert [event.stream for event in pair.events(pair.a, StreamReset)] == [bad]
    pair.a.send(good, Where(2))
    assert pair.run().messages(pair.b, good) == [Where(1), Where(2)]


def test_an_unknown_kind_is_answered_and_its_stream_goes_on() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.forge(DATA, wire.LAST, stream, framed({"kind": "teleport"}))
    pair.a.send(stream, Where(2))
    pair.run()
    assert pair.messages(pair.a) == [Unsupported("teleport")]
    assert pair.messages(pair.b) == [Where(2)]


def test_a_message_over_the_streams_limit_is_refused_by_its_map_before_its_tensors_come() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, step(2 << 20), Priority.BULK)
    pair.carry(pair.a, pair.b)
    (reset,) = pair.events(pair.b, StreamReset)
    assert "this stream takes 1048576" in reset.reason
    assert pair.b._held == 0


def test_a_streams_own_check_refuses_tensors_before_they_come() -> None:
    def admit(values: Any, specs: Specs) -> None:
        for name, dtype, shape in specs:
            if shape[0] != 10:
                raise MessageError(f"{name} is {dtype}{list(shape)}, this model's width is 10")

    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.b.configure(stream, admit=admit)
    pair.a.send(stream, step(10, 1), Priority.DECODE)
    assert positions(pair.run().messages(pair.b)) == [1]
    pair.a.send(stream, step(900_000, 2), Priority.DECODE)
    pair.carry(pair.a, pair.b)
    (reset,) = pair.events(pair.b, StreamReset)
    assert "this model's width is 10" in reset.reason
    pair.run()
    late = pair.a.open_stream()
    pair.a.send(late, step(900_000, 3), Priority.DECODE)
    pair.carry(pair.a, pair.b)
    with pytest.raises(MessageError, match="this model's width is 10"):
        pair.b.configure(late, admit=admit)


def test_what_a_connection_may_hold_in_all_is_bounded() -> None:
    pair = connected(Limits(held_bytes=3 << 20))
    for number in range(20):
        pair.a.send(pair.a.open_stream(), step(900_000, number), Priority.BULK)
    pair.run()
    assert pair.b._held <= 3 << 20
    assert "nobody took" in pair.events(pair.b, StreamReset)[0].reason
    assert not pair.events(pair.b, Closed)


def test_streams_are_bounded_on_both_sides() -> None:
    limits = Limits(max_streams=2)
    pair = connected(limits)
    for _ in range(4):
        pair.a.send(pair.a.open_stream(), Where(1))
    with pytest.raises(StreamClosed, match="4 streams"):
        pair.a.open_stream()
    pair.run()
    for stream in (9, 11):
        pair.forge(DATA, wire.LAST, stream, framed({"kind": "where", "epoch": 1}))
    assert pair.b.streams == 4 and not pair.events(pair.b, Closed)


def window_overrun(pair: Pair) -> None:
    for _ in range(40):
        pair.forge(
            DATA,
            Priority.BULK << 1 | wire.LAST,
            1,
            framed({"kind": "where", "epoch": 1, "x": "y" * 9000}),
        )
        pair.forge(DATA, Priority.BULK << 1, 3, b"\x10\x00" + bytes(60_000))
    for _ in range(200):
        pair.forge(
            DATA,
            Priority.BULK << 1 | wire.LAST,
            1,
            framed({"kind": "where", "epoch": 1, "x": "y" * 9000}),
        )


@pytest.mark.parametrize(
    "attack",
    [
        lambda pair: pair.b.receive_data(b"\x00\x20" + bytes(32), 0.0),
        lambda pair: pair.b.receive_data(b"\x00\x00", 0.0),
        lambda pair: pair.forge(DATA, 0, 1, b"\x00\x05abc"),
        lambda pair: pair.forge(DATA, wire.LAST, 1, bytes(30_000)),
        lambda pair: pair.forge(DATA, wire.LAST, 1, b""),
        lambda pair: pair.forge(DATA, wire.LAST, 2, b"x"),
        lambda pair: pair.forge(DATA, wire.LAST, 1_000_001, b"x"),
        lambda pair: pair.forge(WINDOW, 0, 1, b"x"),
        lambda pair: pair.forge(PING, 0, 0, b"x"),
        lambda pair: [pair.forge(PING, 0, 0, bytes(8)) for _ in range(5000)],
        lambda pair: (pair.forge(END, 0, 1, b""), pair.forge(DATA, wire.LAST, 1, b"x")),
        window_overrun,
    ],
)
def test_what_breaks_framing_or_encryption_costs_the_connection(attack: Callable[[Pair], object]) -> None:
    pair = connected()
    attack(pair)
    pair.collect()
    (closed,) = pair.events(pair.b, Closed)
    assert isinstance(closed.error, FramingError)
    pair.run()
    (told,) = pair.events(pair.a, Closed)
    assert told == Closed(None, closed.reason)


def test_frames_of_a_later_minor_version_are_ignored() -> None:
    pair = connected()
    pair.forge(77, 0, 0, b"something new")
    pair.run()
    assert not pair.events(pair.b, Closed)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 40), st.binary(max_size=200))
def test_any_frame_of_a_proved_peer_gives_events_and_never_an_exception(
    kind: int, flags: int, stream: int, payload: bytes
) -> None:
    pair = connected()
    own = pair.b.open_stream()
    pair.b.send(own, Where(1))
    pair.run()
    for _ in range(2):
        pair.forge(kind, flags, stream, payload)
    for closed in pair.events(pair.b, Closed):
        assert closed.error is None or isinstance(closed.error, SwarmError)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=400), max_size=5), st.booleans())
def test_garbage_instead_of_a_handshake_gives_only_typed_errors(
    chunks: list[bytes], honest_start: bool
) -> None:
    pair = Pair()
    if honest_start:
        pair.b.receive_data(pair.a.data_to_send()[:90], 0.0)
    for chunk in chunks:
        pair.b.receive_data(chunk, 0.0)
    for event in pair.b.events():
        assert isinstance(event, Closed) and isinstance(event.error, SwarmError)


def test_a_strange_program_gets_no_byte_back() -> None:
    pair = Pair()
    pair.b.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0.0)
    (closed,) = pair.b.events()
    assert isinstance(closed, Closed) and isinstance(closed.error, StrangeProgram)
    assert pair.b.data_to_send() == b""


def test_another_major_version_learns_ours_before_the_connection_closes() -> None:
    pair = Pair()
    hello = bytearray(pair.a.data_to_send())
    hello[4] = 2
    pair.b.receive_data(bytes(hello), 0.0)
    pair.collect()
    pair.run()
    (theirs,) = pair.events(pair.b, Closed)
    assert isinstance(theirs.error, VersionMismatch) and theirs.error.theirs == 2


def test_a_handshake_that_stalls_is_given_up_at_its_deadline() -> None:
    pair = Pair()
    assert pair.b.deadline == 5.0
    pair.b.tick(4.9)
    assert pair.b.events() == []
    pair.b.tick(5.0)
    (closed,) = pair.b.events()
    assert isinstance(closed, Closed) and isinstance(closed.error, HandshakeError)
    assert pair.b.deadline is None


def test_the_round_trip_is_measured_at_once_and_at_every_ping() -> None:
    pair = Pair()
    pair.run()
    assert len(pair.events(pair.a, RoundTrip)) == 1
    pair.now = 5.0
    assert pair.a.deadline == 5.0
    pair.a.tick(5.0)
    data = pair.a.data_to_send()
    pair.b.receive_data(data, 5.0)
    pair.now = 5.25
    pair.carry(pair.b, pair.a)
    assert pair.events(pair.a, RoundTrip)[-1].seconds == 0.25


def test_a_silent_connection_is_closed_but_our_own_sleep_is_not_taken_for_silence() -> None:
    pair = connected()
    slept = 1000.0
    pair.a.tick(slept)  # woken up late: a ping, not a verdict
    pair.collect()
    assert not pair.events(pair.a, Closed)
    assert pair.a.deadline == slept + 5.0
    pair.a.tick(slept + 5.0)
    pair.a.tick(slept + 10.0)
    pair.collect()
    (closed,) = pair.events(pair.a, Closed)
    assert closed == Closed(None, "nothing heard for 15 s")


def test_goodbye_arrives_with_its_reason_and_ends_every_stream_call() -> None:
    pair = connected()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    pair.b.close("shutting down")
    pair.run()
    assert pair.events(pair.a, Closed) == [Closed(None, "shutting down")]
    for side in (pair.a, pair.b):
        with pytest.raises(StreamClosed):
            side.send(stream, Where(2))
        with pytest.raises(StreamClosed):
            side.open_stream()


def test_both_ends_rekey_in_step_during_a_long_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = connected()
    for cipher in (pair.a._sender, pair.a._receiver, pair.b._sender, pair.b._receiver):
        monkeypatch.setattr(cipher, "_rekey_bytes", 100_000)
    stream = pair.a.open_stream()
    for position in range(10):
        pair.a.send(stream, step(90_000, position), Priority.BULK)
    assert positions(pair.run().messages(pair.b)) == list(range(10))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_every_message_arrives_once_and_in_order_whatever_the_schedule(seed: int) -> None:
    """Both sides send at random on random streams, take at random, and bytes move at random."""
    rng = random.Random(seed)
    pair = connected(Limits(window_bytes=30_000, control_window_bytes=3000, max_message_bytes=200_000))
    sides = (pair.a, pair.b)
    sent: dict[tuple[int, int], list[int]] = {}
    streams = [pair.a.open_stream() for _ in range(3)]
    for stream in streams:
        pair.a.send(stream, step(1, 0))
        sent[0, stream] = [0]
    pair.run()
    for number in range(1, 60):
        who, stream = rng.randrange(2), rng.choice(streams)
        sides[who].send(stream, step(rng.choice((1, 900, 50_000)), number), Priority(rng.randrange(4)))
        sent.setdefault((who, stream), []).append(number)
        for _ in range(rng.randrange(3)):
            pair.carry(*rng.sample(sides, 2))
    got: dict[tuple[int, int], list[int]] = {}
    for _ in range(2000):
        pair.run()
        arrived = False
        for who, side in enumerate(sides):
            for event in pair.events(side, MessageReceived):
                got.setdefault((1 - who, event.stream), []).append(event.message.position)
                arrived = True
            pair.take(side)
        if not arrived:
            break
    assert got == sent
