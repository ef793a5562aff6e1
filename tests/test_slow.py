"""Whoever sends a byte a second, or takes nothing, is cut in every state: cores in virtual time, sockets for real."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from swarm import link as link_module
from swarm.addresses import Address
from swarm.errors import HandshakeError
from swarm.flow import DATA, DEFAULT_LIMITS, Priority
from swarm.identity import Identity
from swarm.messages import Step, encode
from swarm.packing import pack
from swarm.tensors import RawTensor
from swarm.transport import Transport
from swarm.wire import Closed, Connection, StreamReset
from tests.wire_pair import ALICE, BOB, Pair, connected

LIMITS = DEFAULT_LIMITS
FOR_EVER_S = 1000


def record(pair: Pair, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    sealed = pair.a._sender.encrypt(struct.pack(">BBI", kind, flags, stream) + payload)
    return struct.pack(">H", len(sealed)) + sealed


def trickle(data: bytes) -> Iterator[bytes]:
    """A byte a second, and then nothing more."""
    yield from (data[at : at + 1] for at in range(len(data)))


def parts(pair: Pair, size: int, total: int = 60_000) -> Iterator[bytes]:
    """A message of `total` bytes in parts of `size`, a part a second."""
    yield record(pair, DATA, Priority.PREFILL << 1, 1, step_head(total))
    for _ in range(0, total, size):
        yield record(pair, DATA, Priority.PREFILL << 1, 1, bytes(size))


def step(size: int, position: int = 0) -> Step:
    return Step({"hidden": RawTensor("uint8", (size,), bytes(size))}, epoch=1, position=position)


def step_head(size: int) -> bytes:
    """Of a message with so many bytes of tensors, which don't come with it."""
    return bytes(pack(*encode(step(size)))[0])


def until_closed(
    b: Connection, bytes_a_second: Iterator[bytes], honest: Connection | None = None, within_s: int = FOR_EVER_S
) -> tuple[float, list[object]]:
    """Seconds until b closes or resets a stream, and its events. honest: whose pings and pongs go on meanwhile."""
    seen: list[object] = []
    for now in range(within_s):
        while b.deadline is not None and b.deadline <= now:
            b.tick(b.deadline)
        if honest is not None:
            honest.receive_data(b.data_to_send(), now)
            b.receive_data(honest.data_to_send(), now)
        b.receive_data(next(bytes_a_second, b""), now)
        seen += b.events()
        if any(isinstance(event, Closed | StreamReset) for event in seen):
            return now, seen
    raise AssertionError(f"nothing was cut in {within_s} s")


def test_a_stranger_that_says_nothing_is_cut() -> None:
    after_s, (closed,) = until_closed(Connection("responder", BOB, "main"), iter(()))
    assert after_s <= LIMITS.handshake_s
    assert isinstance(closed, Closed) and isinstance(closed.error, HandshakeError)


@pytest.mark.parametrize("sent_at_once", [0, 5, 40, 66])
def test_a_handshake_that_trickles_is_cut(sent_at_once: int) -> None:
    """In its preamble, and within its first message."""
    first = Connection("initiator", ALICE, "main").data_to_send()
    assert len(first) > 66
    b = Connection("responder", BOB, "main")
    b.receive_data(first[:sent_at_once], 0.0)
    after_s, events = until_closed(b, trickle(first[sent_at_once:]))
    assert after_s <= LIMITS.handshake_s and isinstance(events[-1], Closed)


def test_a_handshake_whose_last_message_trickles_is_cut() -> None:
    a, b = Connection("initiator", ALICE, "main"), Connection("responder", BOB, "main")
    b.receive_data(a.data_to_send(), 0.0)
    a.receive_data(b.data_to_send(), 0.0)
    after_s, events = until_closed(b, trickle(a.data_to_send()))
    assert after_s <= LIMITS.handshake_s and isinstance(events[-1], Closed) and b.peer is None


def test_a_dialler_isnt_kept_by_an_answer_that_trickles() -> None:
    a, b = Connection("initiator", ALICE, "main"), Connection("responder", BOB, "main")
    b.receive_data(a.data_to_send(), 0.0)
    after_s, events = until_closed(a, trickle(b.data_to_send()))
    assert after_s <= LIMITS.handshake_s and isinstance(events[-1], Closed) and a.peer is None


def test_a_handshake_of_more_than_two_kibibytes_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """By construction none of its parts can be that long; the sum is counted all the same."""
    tight = replace(LIMITS, handshake_bytes=50)
    b = Connection("responder", BOB, "main", limits=tight)
    first = Connection("initiator", ALICE, "main").data_to_send()
    b.receive_data(first[:50], 0.0)
    assert b.events() == []
    b.receive_data(first[50:51], 0.0)
    (closed,) = b.events()
    assert isinstance(closed, Closed) and "over 50 bytes" in closed.reason
    assert LIMITS.handshake_bytes == 2048


@pytest.mark.parametrize("sent_at_once", [0, 1, 2, 30])
def test_a_record_that_trickles_is_cut_in_its_header_and_in_its_body(sent_at_once: int) -> None:
    pair = connected()
    whole = record(pair, DATA, 1, 1, bytes(1000))
    pair.b.receive_data(whole[:sent_at_once], 0.0)
    after_s, events = until_closed(pair.b, trickle(whole[sent_at_once:]))
    assert after_s <= LIMITS.record_s
    assert isinstance(events[-1], Closed) and "isn't whole" in events[-1].reason


def test_a_large_record_over_a_slow_line_is_no_slow_sender() -> None:
    pair = connected()
    pair.b.open_stream()
    whole = record(pair, 77, 0, 0, bytes(65_000))
    for now in range(14):
        pair.b.receive_data(whole[now * 5000 : (now + 1) * 5000], now)
        while pair.b.deadline is not None and pair.b.deadline <= now:
            pair.b.tick(now)
    assert not pair.b.closed


def test_our_own_sleep_is_not_taken_for_a_record_that_trickles() -> None:
    pair = connected()
    whole = record(pair, 77, 0, 0, bytes(1000))
    pair.b.receive_data(whole[:500], 0.0)
    pair.b.receive_data(b"", 9.0)
    pair.b.tick(600.0)
    assert not pair.b.closed
    pair.b.receive_data(whole[500:], 600.5)
    assert not pair.b.closed


@pytest.mark.parametrize(
    "message",
    [
        lambda pair: iter([record(pair, DATA, Priority.PREFILL << 1, 1, step_head(60_000))]),  # its head, and silence
        lambda pair: parts(pair, 1),
        lambda pair: parts(pair, 500),
    ],
)
def test_half_a_message_costs_its_stream_and_not_the_connection(message: Callable[[Pair], Iterator[bytes]]) -> None:
    """The connection is alive all the time: pings are answered, and other streams go on."""
    pair = connected()
    sending = message(pair)
    after_s, events = until_closed(pair.b, sending, honest=pair.a)
    assert after_s <= LIMITS.stalled_s + 2 * LIMITS.ping_every_s
    resets = [event for event in events if isinstance(event, StreamReset)]
    assert [reset.stream for reset in resets] == [1] and "stood still" in resets[0].reason
    assert not pair.b.closed and pair.b._held == 0


def test_a_message_that_moves_is_never_cut() -> None:
    pair = connected()
    sending = parts(pair, 2_000, total=800_000)
    with pytest.raises(AssertionError, match="nothing was cut"):
        until_closed(pair.b, sending, honest=pair.a, within_s=390)


def test_a_reader_that_takes_nothing_loses_what_was_for_it() -> None:
    """It answers pings, but grants no room on this stream."""
    pair = connected()
    pair.run()
    stream = pair.b.open_stream()
    for position in range(20):
        pair.b.send(stream, step(100_000, position), Priority.PREFILL)
    pair.run()
    assert pair.b.queued(stream) > 500_000
    after_s, events = until_closed(pair.b, iter(()), honest=pair.a)
    assert LIMITS.stalled_s <= after_s <= LIMITS.stalled_s + 3 * LIMITS.ping_every_s
    assert [event.stream for event in events if isinstance(event, StreamReset)] == [stream]
    assert pair.b.queued(stream) == 0 and not pair.b.closed


async def test_a_socket_that_takes_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "TAKES_NOTHING_S", 0.1)
    server, client = Transport(Identity.ephemeral()), Transport(Identity.ephemeral())
    await server.listen("127.0.0.1", 0)
    async with asyncio.timeout(30):
        link = await client.dial(Address(None, "127.0.0.1", server.port or 0))
        await link.ping()
        there = server.links[client.identity.peer_id]
        link._transport.pause_reading()  # type: ignore[union-attr]
        for _ in range(16):  # a window each: more than sockets hold
            there.open_stream().send_nowait(step(900_000), Priority.BULK)
        await there.gone.wait()
    assert there.closed_reason == "the other side took nothing for 0.1 s"
    await client.close()
    await server.close()


async def test_a_closed_connection_doesnt_wait_for_ever_for_its_last_word_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "LAST_WORD_S", 0.1)
    monkeypatch.setattr(link_module, "TAKES_NOTHING_S", 3600.0)
    patient = replace(LIMITS, dead_after_s=3600.0)  # nothing else ends it
    server, client = Transport(Identity.ephemeral()), Transport(Identity.ephemeral(), limits=patient)
    await server.listen("127.0.0.1", 0)
    async with asyncio.timeout(30):
        link = await client.dial(Address(None, "127.0.0.1", server.port or 0))
        await link.ping()
        there = server.links[client.identity.peer_id]
        link._transport.pause_reading()  # type: ignore[union-attr]
        there._transport.write(bytes(64 << 20))  # type: ignore[union-attr]
        there.close("enough")
        await there.gone.wait()
    await client.close()
    await server.close()
