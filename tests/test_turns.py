"""Whatever comes in, the event loop gets its turn between small pieces of the work. Turns are counted, not timed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from routing.spans import Span
from swarm import link as link_module
from swarm import registry as registry_module
from swarm.addresses import Address
from swarm.errors import StreamClosed
from swarm.flow import Priority
from swarm.identity import Identity
from swarm.link import MESSAGES_PER_TURN, RECEIVE_SLICE, RECORDS_PER_TURN, Link, Stream
from swarm.messages import Delta, Message, Step, Told, Where
from swarm.node import Node
from swarm.records import Descriptor, Heartbeat, record_hash, sign_record
from swarm.registry import Registry, in_parts
from swarm.tensors import RawTensor
from swarm.transport import Transport

MANY = 2000


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Transport, Transport]]:
    """(listening, dialling)"""
    listening, dialling = Transport(Identity.ephemeral()), Transport(Identity.ephemeral())
    async with asyncio.timeout(60):
        await listening.listen("127.0.0.1", 0)
        yield listening, dialling
        await dialling.close()
        await listening.close()


async def linked(pair: tuple[Transport, Transport]) -> tuple[Link, Link]:
    """Both ends of one connection, with nothing on its way between them."""
    listening, dialling = pair
    link = await dialling.dial(Address(None, "127.0.0.1", listening.port or 0))
    await link.ping()
    there = next(iter(listening.links.values()))
    await there.ping()
    return link, there


class Turns:
    """Counts the turns of the loop from the first `count` on."""

    def __init__(self) -> None:
        self.loop, self.seen = asyncio.get_running_loop(), 0

    def count(self) -> None:
        self.seen += 1
        self.loop.call_soon(self.count)


def whole(make: Callable[[], bytes]) -> bytes:
    return b"".join(iter(make, b""))


async def collected(stream: Stream, count: int) -> list[Message]:
    return [await stream.receive() for _ in range(count)]


async def test_a_read_full_of_small_records_is_worked_off_in_turns(
    pair: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RECEIVE_TURN_S", 1e-9)  # so that one slice is one turn
    listening, _ = pair
    got: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()

    async def handler(stream: Stream, first: Message) -> None:
        got.set_result([first, *await collected(stream, MANY - 1)])

    listening.handle(Where, handler)
    link, there = await linked(pair)
    number = link.connection.open_stream()
    for ask in range(MANY):
        link.connection.send(number, Where(1, ask))
    flood = whole(link.connection.data_to_send)
    turns = Turns()
    turns.count()
    there.data_received(flood)
    assert turns.seen == 1 and len(there._unread) == len(flood) - RECEIVE_SLICE
    assert [message.ask for message in await got if isinstance(message, Where)] == list(range(MANY))
    assert turns.seen >= len(flood) // RECEIVE_SLICE


async def test_a_large_record_is_not_cut_into_slices(pair: tuple[Transport, Transport]) -> None:
    link, there = await linked(pair)
    sizes: list[int] = []
    inner = there.connection.receive_data

    def spy(data: memoryview, now: float) -> None:
        sizes.append(len(data))
        inner(data, now)

    there.connection.receive_data = spy  # type: ignore[method-assign]
    sealed = link.connection._sender.encrypt(bytes([99]) + bytes(60_000))
    record = len(sealed).to_bytes(2, "big") + sealed
    there.data_received(record + record)
    assert sum(sizes) == 2 * len(record) and len(sizes) <= 5 and max(sizes) > 50_000


async def test_a_reader_who_finds_many_messages_waiting_lets_others_in_between(
    pair: tuple[Transport, Transport],
) -> None:
    listening, dialling = pair
    all_here, done = asyncio.Event(), asyncio.Event()
    turns = Turns()

    async def handler(stream: Stream, first: Message) -> None:
        await all_here.wait()
        assert len(stream._inbox) == MANY - 1
        turns.count()
        await collected(stream, MANY - 1)
        done.set()

    listening.handle(Where, handler)
    link = await dialling.dial(Address(None, "127.0.0.1", listening.port or 0))
    stream = link.open_stream()
    for _ in range(MANY):
        stream.send_nowait(Where(1))
    await link.ping()  # control is in order, and so all of it is there
    all_here.set()
    await done.wait()
    assert turns.seen >= (MANY - 1) // MESSAGES_PER_TURN


async def test_a_message_that_waits_while_others_have_their_turn_is_not_lost_to_a_reset(
    pair: tuple[Transport, Transport],
) -> None:
    listening, dialling = pair
    held: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    never = asyncio.Event()

    async def handler(stream: Stream, first: Message) -> None:
        held.set_result(stream)
        await never.wait()

    listening.handle(Where, handler)
    link = await dialling.dial(Address(None, "127.0.0.1", listening.port or 0))
    stream = link.open_stream()
    for _ in range(3 * MESSAGES_PER_TURN):
        stream.send_nowait(Where(1))
    await link.ping()
    there = await held
    there._in_a_row = MESSAGES_PER_TURN
    waiting = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    there.reset("over")
    with pytest.raises(StreamClosed, match="over"):
        await waiting
    never.set()


# ---------------------------------------------------------------- records


def a_told(seed: int) -> Told:
    identity = Identity.from_seed(seed.to_bytes(32, "big"))
    made = Descriptor(
        peer=identity.peer_id,
        seq=1,
        addresses=("192.0.2.1:7070",),
        fingerprint=bytes(32),
        model="some model",
        layers=30,
        width=576,
        vocab=49152,
        context=2048,
        span=Span(0, 12),
        numerics="cpu/float32/none/-",
        kv_tokens=4096,
        tokenizer_hash=bytes(32),
    )
    data = sign_record(identity, made)
    beat = Heartbeat(peer=made.peer, seq=2, descriptor_hash=record_hash(data), issued_ms=5, lease_s=15.0)
    return Told(sign_record(identity, beat), 0.0, data)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("complete", [False, True])
def test_a_delta_in_parts_says_the_same(count: int, complete: bool) -> None:
    records = tuple(Told(bytes(64), float(n)) for n in range(count))
    parts = list(in_parts(Delta(records, complete)))
    assert all(isinstance(part, Delta) and len(part.records) <= 16 for part in parts)
    assert tuple(one for part in parts if isinstance(part, Delta) for one in part.records) == records
    told_complete = [part.complete for part in parts if isinstance(part, Delta)]
    assert told_complete == [False] * (len(parts) - 1) + [complete]


async def test_a_node_verifies_a_few_records_at_a_time(
    pair: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    inner = Registry.receive

    def spy(self: Registry, key: int, message: Message, now: float) -> None:
        if self is client.registry and isinstance(message, Delta):  # other tests' swarms may live in this process
            sizes.append(len(message.records))
        inner(self, key, message, now)

    monkeypatch.setattr(Registry, "receive", spy)
    monkeypatch.setattr(registry_module, "PART_RECORDS", 4)
    peer = Node(pair[0], role="peer", rng=random.Random(0))
    client = Node(pair[1], role="client", rng=random.Random(0))
    await peer.start([])
    for seed in range(1, 11):
        peer.registry.table.accept(a_told(seed), peer.registry._ticked_at)
    await client.start([f"127.0.0.1:{pair[0].port}"])
    assert len(client.entries()) == 10 and sum(sizes) == 10 and max(sizes) == 4
    await client.close()
    await peer.close()


async def test_whoever_is_over_its_share_isnt_read_until_its_time_has_come(
    pair: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, there = await linked(pair)
    later, paused = list[Callable[[], None]](), asyncio.Event()
    call_later = there.loop.call_later

    def spy(delay: float, callback: Callable[[], None], *arguments: object) -> object:
        if delay != 5000.0:
            return call_later(delay, callback, *arguments)
        later.append(callback)
        paused.set()
        return None

    monkeypatch.setattr(there.loop, "call_later", spy)
    monkeypatch.setattr(there.connection, "worked", lambda now, seconds: 5000.0)
    await link.open_stream().send(Where(1))
    await paused.wait()
    assert not there._transport.is_reading()  # type: ignore[union-attr]
    monkeypatch.setattr(there.connection, "worked", lambda now, seconds: 0.0)
    later[0]()
    assert there._transport.is_reading()  # type: ignore[union-attr]
    await link.ping()


class _Endless:
    """A socket that takes everything at once."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False


async def test_a_fast_socket_doesnt_hold_the_loop_until_everything_has_left(pair: tuple[Transport, Transport]) -> None:
    link, _ = await linked(pair)
    real, link._transport = link._transport, _Endless()  # type: ignore[assignment]
    link._paused = True
    for number in range(4):
        tensor = RawTensor("uint8", (900_000,), bytes(900_000))
        link.open_stream().send_nowait(Step({"hidden": tensor}, epoch=1, position=number), Priority.BULK)
    link._paused = False
    link.transmit()
    assert link._transport.writes == RECORDS_PER_TURN  # type: ignore[union-attr]
    while link.connection.data_to_send():
        pass
    link._transport = real
    link.abort()
