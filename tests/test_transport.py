"""Real sockets on loopback. Each test waits for events, never for time to pass."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from swarm import door as door_module
from swarm import transport as transport_module
from swarm.addresses import Address, parse_address
from swarm.errors import (
    HandshakeError,
    IdentityError,
    PeerFailed,
    PortTaken,
    RemoteError,
    SendQueueFull,
    StreamClosed,
    Unreachable,
    UsageError,
)
from swarm.flow import DEFAULT_LIMITS, Priority
from swarm.identity import Identity, PeerId
from swarm.link import Link, Stream
from swarm.messages import GetFiles, Message, Step, Unsupported, Where
from swarm.permits import anywhere
from swarm.tensors import RawTensor
from swarm.transport import Transport

IDENTITIES = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(1, 6)), key=lambda i: i.peer_id)
LOW, HIGH = IDENTITIES[0], IDENTITIES[1]
PEER = LOW.peer_id

Make = Callable[..., Awaitable[Transport]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """make(identity, listen=True, ...): a transport that is closed behind the test."""
    made: list[Transport] = []

    async def one(identity: Identity, listen: bool = True, **options: object) -> Transport:
        transport = Transport(identity, **options)  # type: ignore[arg-type]
        made.append(transport)
        if listen:
            await transport.listen("127.0.0.1", 0)
        return transport

    async with asyncio.timeout(60):
        yield one
        for transport in made:
            await transport.close()


def at(transport: Transport, peer: PeerId | None = None) -> Address:
    assert transport.port is not None
    return Address(peer, "127.0.0.1", transport.port)


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await event.wait()


async def echo(stream: Stream, first: Message) -> None:
    message: Message | None = first
    with contextlib.suppress(StreamClosed):
        while message is not None:
            await stream.send(message)
            message = await stream.receive()


def step(size: int, position: int = 0) -> Step:
    tensor = RawTensor("uint8", (size,), random.Random(position).randbytes(size))
    return Step({"hidden": tensor}, epoch=1, position=position)


# ---------------------------------------------------------------- what can never work


async def test_a_peer_that_advertises_a_host_no_resolver_takes_is_unreachable_and_no_bug_of_ours(make: Make) -> None:
    client = await make(Identity.ephemeral(), listen=False)
    with pytest.raises(PeerFailed, match="looked up"):
        await client.link_to(PEER, ["a" * 64 + ":7070"], anywhere)


async def test_a_network_whose_name_does_not_fit_the_handshake_is_refused() -> None:
    with pytest.raises(UsageError, match="1 to 64 bytes"):
        Transport(Identity.ephemeral(), "n" * 65)


# ---------------------------------------------------------------- links and streams


async def test_two_peers_talk_and_know_each_other(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    server.handle(Where, echo)
    link = await client.dial(at(server))
    assert link.peer == LOW.peer_id and link.dialled and link.remote == ("127.0.0.1", server.port)
    assert await link.ping() >= 0 and link.rtt_s is not None
    stream = link.open_stream()
    for number in range(5):
        await stream.send(Where(number))
    assert [await stream.receive() for _ in range(5)] == [Where(n) for n in range(5)]
    assert list(server.links) == [HIGH.peer_id] and not server.links[HIGH.peer_id].dialled


async def test_a_message_of_many_records_arrives_intact(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)

    async def handler(stream: Stream, first: Message) -> None:
        stream.max_message_bytes = 20 << 20
        await echo(stream, first)

    server.handle(Where, handler)
    stream = (await client.dial(at(server))).open_stream()
    stream.max_message_bytes = 20 << 20
    await stream.send(Where(1))
    assert await stream.receive() == Where(1)
    sent = step(5_000_000)
    await stream.send(sent, Priority.BULK)
    back = await stream.receive()
    assert isinstance(back, Step) and back.tensors["hidden"].data == sent.tensors["hidden"].data


async def test_a_large_message_right_behind_the_first_is_taken_before_the_handler_has_run(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    server.handle(Where, echo)
    server.handle(GetFiles, echo, max_message_bytes=4 << 20)
    link = await client.dial(at(server))
    for first, size in ((GetFiles(bytes(32)), 3 << 20), (Where(1), 900_000)):
        stream = link.open_stream()
        stream.max_message_bytes = 4 << 20
        stream.send_nowait(first)
        stream.send_nowait(step(size), Priority.PREFILL)
        assert await stream.receive() == first
        assert isinstance(await stream.receive(), Step)
    stream = link.open_stream()
    stream.send_nowait(Where(1))
    stream.send_nowait(step(3 << 20), Priority.PREFILL)
    with pytest.raises(StreamClosed, match="this stream takes 1048576"):
        while True:
            await stream.receive()


async def test_a_cancelled_receive_loses_nothing(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    server.handle(Where, echo)
    link = await client.dial(at(server))
    stream = link.open_stream()
    for number in range(20):
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        await stream.send(Where(number))
        await link.ping()  # the echo is here by now, or as good as
        waiting.cancel()
        try:
            got = await waiting
        except asyncio.CancelledError:
            got = await stream.receive()
        assert got == Where(number)


async def test_a_cancelled_send_has_queued_nothing_and_a_finished_one_everything(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    go = asyncio.Event()
    got: list[int] = []

    async def slow(stream: Stream, first: Message) -> None:
        await go.wait()
        with contextlib.suppress(StreamClosed):
            while True:
                message = await stream.receive()
                assert isinstance(message, Step)
                got.append(message.position)

    server.handle(Where, slow)
    stream = (await client.dial(at(server))).open_stream()
    await stream.send(Where(0))
    sent: list[int] = []
    cancelled = False
    while not cancelled:
        with contextlib.suppress(SendQueueFull):
            while True:
                stream.send_nowait(step(400_000, len(sent)), Priority.BULK)
                sent.append(len(sent))
        try:
            async with asyncio.timeout(0):
                await stream.send(step(400_000, len(sent)), Priority.BULK)
            sent.append(len(sent))
        except TimeoutError:
            cancelled = True
    assert 2 < len(sent) < 20  # the other side's windows and our queue, no more
    go.set()
    await stream.end()
    while stream.closed_reason is None:
        with contextlib.suppress(StreamClosed):
            await stream.receive()
        await stream.link.ping()
    assert got == sent


async def test_a_stream_nobody_reads_stops_its_own_sender_and_nobody_else(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    never = asyncio.Event()

    async def stuck(stream: Stream, first: Message) -> None:
        await never.wait()

    server.handle(Where, echo)
    server.handle(Step, stuck)
    link = await client.dial(at(server))
    slow, quick = link.open_stream(), link.open_stream()
    with contextlib.suppress(SendQueueFull):
        while True:
            slow.send_nowait(step(200_000), Priority.DECODE)
    for number in range(50):
        await quick.send(Where(number))
        assert await quick.receive() == Where(number)
    never.set()


async def test_a_handlers_remote_error_resets_its_stream_and_no_other(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)

    async def picky(stream: Stream, first: Message) -> None:
        raise RemoteError("that makes no sense here")

    server.handle(GetFiles, picky)
    server.handle(Where, echo)
    link = await client.dial(at(server))
    good, bad = link.open_stream(), link.open_stream()
    await bad.send(GetFiles(bytes(32)))
    with pytest.raises(StreamClosed, match="that makes no sense here"):
        await bad.receive()
    await good.send(Where(1))
    assert await good.receive() == Where(1)


async def test_our_own_bug_in_a_handler_is_shown_and_its_stream_reset(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    shown: list[object] = []
    server.loop.set_exception_handler(lambda _, context: shown.append(context["exception"]))

    async def buggy(stream: Stream, first: Message) -> None:
        raise KeyError("our bug")

    server.handle(Where, buggy)
    stream = (await client.dial(at(server))).open_stream()
    await stream.send(Where(1))
    with pytest.raises(StreamClosed, match="internal error"):
        await stream.receive()
    server.loop.set_exception_handler(None)
    assert [type(error) for error in shown] == [KeyError]
    assert "our bug" in caplog.text


async def test_a_first_message_that_nobody_handles_is_answered_unsupported(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    stream = (await client.dial(at(server))).open_stream()
    await stream.send(Where(1))
    assert await stream.receive() == Unsupported("where")
    with pytest.raises(StreamClosed):
        await stream.receive()


async def test_an_answer_reaches_its_reader_though_the_handler_has_returned(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)

    async def answer(stream: Stream, first: Message) -> None:
        await stream.send(step(500_000, 7), Priority.BULK)

    server.handle(Where, answer)
    link = await client.dial(at(server))
    for _ in range(5):
        stream = link.open_stream()
        await stream.send(Where(1))
        message = await stream.receive()
        assert isinstance(message, Step) and message.position == 7
        with pytest.raises(StreamClosed):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(Where(2))
    assert link.connection.streams == 0 and not link._streams


async def test_losing_a_link_wakes_readers_writers_and_pings_with_the_reason(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    held = asyncio.Event()

    async def hold(stream: Stream, first: Message) -> None:
        held.set()
        await asyncio.Event().wait()

    server.handle(Where, hold)
    lost: list[Link] = []
    client.on_link_lost.append(lost.append)
    link = await client.dial(at(server))
    stream = link.open_stream()
    await stream.send(Where(1))
    await until(held)

    async def fill() -> None:
        while True:
            await stream.send(step(500_000), Priority.BULK)

    reading, writing = asyncio.create_task(stream.receive()), asyncio.create_task(fill())
    await link.ping()
    await server.close()
    for task in (reading, writing):
        with pytest.raises(StreamClosed, match="shutting down"):
            await task
    await until(link.closed)
    assert link.closed_reason == "shutting down" and lost == [link] and not client.links
    for refused in (link.open_stream, lambda: stream.send_nowait(Where(1))):
        with pytest.raises(StreamClosed):
            refused()
    with pytest.raises(StreamClosed):
        await link.ping()


# ---------------------------------------------------------------- dialling and listening


async def test_nobody_at_an_address_is_said_plainly(make: Make) -> None:
    client = await make(HIGH, listen=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port} \(connection refused\)"):
        await client.dial(Address(None, "127.0.0.1", port))
    with pytest.raises(Unreachable, match=r"nobody answers at no-such-host\.invalid:7070"):
        await client.dial(Address(None, "no-such-host.invalid", 7070))
    assert not client._sockets


async def test_a_program_that_never_answers_is_given_up(make: Make) -> None:
    client = await make(HIGH, listen=False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Unreachable, match=r"no answer in 0\.05 s"):
            await client.dial(Address(None, "127.0.0.1", silent.getsockname()[1]), timeout_s=0.05)
    assert not client._sockets


async def test_a_program_that_is_no_peer_is_named_so(make: Make) -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    client = await make(HIGH, listen=False)
    server = await asyncio.start_server(web, "127.0.0.1", 0)
    with pytest.raises(HandshakeError, match="doesn't speak LayerSwarm"):
        await client.dial(Address(None, "127.0.0.1", server.sockets[0].getsockname()[1]))
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01\x00\x00", b"\0" * 5000]
)
async def test_a_strange_program_on_the_port_is_shrugged_off(
    make: Make, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level("INFO")
    server, client = await make(LOW), await make(HIGH, listen=False)
    server.handle(Where, echo)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    stream = (await client.dial(at(server))).open_stream()
    await stream.send(Where(1))
    assert await stream.receive() == Where(1)
    assert not [record for record in caplog.records if record.name.startswith("swarm")]


async def test_strangers_who_say_nothing_never_crowd_out_a_peer(make: Make) -> None:
    """Each is dropped as soon as others need its place, not only when its time is over."""
    limits = replace(DEFAULT_LIMITS, handshake_s=3600.0)
    server, client = await make(LOW, limits=limits), await make(HIGH, listen=False)
    strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
    await client.dial(at(server))
    assert server._door.pending <= door_module.MAX_PENDING
    for reader, _ in strangers[: 100 - door_module.MAX_PENDING]:  # the oldest made room
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    for _, writer in strangers:
        writer.close()


async def test_a_strangers_time_counts_from_when_it_knocked(make: Make) -> None:
    """However long it waited for its turn."""
    server = await make(LOW)
    server._door._turns.spend(monotonic(), 1000.0)  # nobody has a turn now
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(20):
        while not server._door.strangers():  # noqa: ASYNC110
            await asyncio.sleep(0)
    (waiting,) = server._door.strangers()
    assert waiting.link is None
    server._door._turns.spend(monotonic(), -1000.0)
    server._take_turns()
    assert waiting.link is not None
    assert waiting.link.connection.deadline == waiting.since + server._limits.handshake_s
    writer.close()


async def test_connections_are_accepted_a_few_at_a_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has a hundred; the loop gets its turn after each sixteen."""
    server, turn = await make(LOW), 0
    loop, accepted, all_here = asyncio.get_running_loop(), list[int](), asyncio.Event()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if not all_here.is_set():
            loop.call_soon(next_turn)

    def arrived(caller: Any) -> None:
        caller.drop()
        accepted.append(turn)
        if len(accepted) == len(sockets):
            all_here.set()

    monkeypatch.setattr(server, "_arrived", arrived)
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    next_turn()
    await until(all_here)
    for sock in sockets:
        sock.close()
    assert max(Counter(accepted).values()) <= transport_module.ACCEPTS_PER_TURN


async def test_missing_descriptors_are_told_once_a_minute(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = await make(LOW)
    for _ in range(5):
        server._out_of_descriptors(OSError(errno.EMFILE, "too many open files"))
    assert len([record for record in caplog.records if "ulimit -n" in record.getMessage()]) == 1


async def test_an_identity_holds_few_connections_and_the_newest_stay(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    links = [await client.dial(at(server), fresh=True) for _ in range(door_module.LINKS_PER_PEER + 2)]
    await until(links[0].closed)
    await until(links[1].closed)
    assert links[0].closed_reason is not None and "others need the room" in links[0].closed_reason
    for link in links[2:]:
        await link.ping()


async def test_where_connections_run_out_an_idle_one_makes_room_and_a_busy_one_goes_on(make: Make) -> None:
    server = await make(LOW)
    server.handle(Where, echo)
    server._most_links = 3
    clients = [await make(identity, listen=False) for identity in (*IDENTITIES[1:], Identity.ephemeral())]
    links = [await client.dial(at(server)) for client in clients[:3]]
    stream = links[0].open_stream()
    await stream.send(Where(1))
    assert await stream.receive() == Where(1)
    for client, gone in zip(clients[3:], links[1:], strict=False):
        await (await client.dial(at(server))).ping()
        await until(gone.closed)
    await stream.send(Where(2))
    assert await stream.receive() == Where(2)


async def test_a_dialler_closes_an_idle_connection_before_it_has_too_many(make: Make) -> None:
    servers = [await make(identity) for identity in IDENTITIES[:3]]
    servers[1].handle(Where, echo)
    client = await make(IDENTITIES[3], listen=False)
    client._most_links = 4
    first, second = [await client.dial(at(server)) for server in servers[:2]]
    stream = second.open_stream()
    await stream.send(Where(1))
    assert await stream.receive() == Where(1)
    third = await client.dial(at(servers[2]))
    await until(first.closed)
    third.open_stream()
    with pytest.raises(Unreachable, match="2 connections are open already"):
        await client.dial(at(servers[0]))
    await stream.send(Where(2))
    assert await stream.receive() == Where(2)


async def test_without_descriptors_it_is_tried_again_after_a_pause_and_not_all_the_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, tried, again = await make(LOW), asyncio.Event(), asyncio.Event()

    async def none_left(listening: socket.socket) -> Any:
        if tried.is_set():
            again.set()
            await asyncio.Event().wait()  # for ever
        tried.set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(transport_module, "NO_DESCRIPTOR_PAUSE_S", 3600.0)
    monkeypatch.setattr(server, "_next", none_left)
    socket.create_connection(("127.0.0.1", server.port)).close()  # the one for which it waited
    socket.create_connection(("127.0.0.1", server.port)).close()
    await until(tried)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not again.is_set()


async def test_running_out_of_descriptors_is_one_quiet_line_and_passes(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    resource = pytest.importorskip("resource")
    server, client = await make(LOW), await make(HIGH, listen=False)
    idle = await client.dial(at(server))
    sockets = [socket.socket() for _ in range(3)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sockets[-1].fileno() + 1, before[1]))
    try:
        for sock in sockets:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        await until(idle.closed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert idle.closed_reason == "room is needed for another connection"
    (warning,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert "ulimit -n" in warning.getMessage()
    for sock in sockets:
        sock.close()
    await (await client.dial(at(server))).ping()


async def test_another_peer_than_the_named_one_is_refused_and_learns_nothing(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    seen: list[Link] = []
    server.on_link.append(seen.append)
    with pytest.raises(IdentityError, match=f"expected peer {IDENTITIES[3].peer_id}"):
        await client.dial(at(server, IDENTITIES[3].peer_id))
    link = await client.dial(at(server, LOW.peer_id))
    await link.ping()  # the other side is done with the handshake too
    assert link.peer == LOW.peer_id
    assert [link.peer for link in seen] == [HIGH.peer_id]


async def test_a_bare_address_is_trusted_on_first_use_and_then_held_to_it(make: Make) -> None:
    class Hosts:
        def __init__(self) -> None:
            self.known: dict[str, PeerId] = {}

        def check(self, address_text: str, peer: PeerId) -> None:
            if self.known.setdefault(address_text, peer) != peer:
                raise IdentityError(f"{address_text} was {self.known[address_text]}, now it is {peer}")

    hosts = Hosts()
    server, client = await make(LOW), await make(HIGH, listen=False, known_hosts=hosts)
    port = server.port
    await client.dial(at(server))
    assert hosts.known == {f"127.0.0.1:{port}": LOW.peer_id}
    await server.close()
    impostor = await make(IDENTITIES[2], listen=False)
    await impostor.listen("127.0.0.1", port)
    with pytest.raises(IdentityError, match=r"was .*, now it is"):
        await client.dial(at(impostor))
    assert not impostor.links


async def test_dialling_oneself_is_refused_clearly(make: Make) -> None:
    server = await make(LOW)
    with pytest.raises(IdentityError, match="our own identity"):
        await server.dial(at(server))
    assert not server.links


async def test_another_network_is_refused_by_name(make: Make) -> None:
    server, client = await make(LOW, network="lab"), await make(HIGH, listen=False)
    with pytest.raises(HandshakeError, match=r"'main'.*'lab'"):
        await client.dial(at(server))


async def test_a_taken_port_is_said_and_the_next_free_one_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await make(LOW)
    second, third = await make(HIGH, listen=False), await make(IDENTITIES[2], listen=False)
    assert first.port is not None
    with pytest.raises(PortTaken, match=f"port {first.port} on 127.0.0.1 is already taken"):
        await second.listen("127.0.0.1", first.port)
    monkeypatch.setattr(transport_module, "DEFAULT_PORT", first.port)
    await second.listen("127.0.0.1", None)
    await third.listen("127.0.0.1", None)
    assert second.port is not None and third.port is not None
    assert first.port < second.port < third.port <= first.port + transport_module.PORTS_TRIED
    with pytest.raises(UsageError, match="can't listen on"):
        await third.listen("192.0.2.1", 0)


async def test_all_interfaces_are_one_port_on_both_families(make: Make) -> None:
    server, client = await make(LOW, listen=False), await make(HIGH, listen=False)
    addresses = await server.listen(None, 0)
    assert addresses[0] == f"0.0.0.0:{server.port}"
    assert {parse_address(text).port for text in addresses} == {server.port}
    link = await client.dial(Address(None, "127.0.0.1", server.port or 0))
    if len(addresses) == 2:
        again = await client.dial(Address(None, "::1", server.port or 0), fresh=True)
        assert again.peer == link.peer


async def test_a_linked_peer_is_not_dialled_again_unless_asked(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    link = await client.dial(at(server, LOW.peer_id))
    assert await client.dial(at(server, LOW.peer_id)) is link
    assert await client.link_to(LOW.peer_id, (), anywhere) is link
    assert await client.dial(at(server, LOW.peer_id), fresh=True) is not link


async def test_a_peer_is_reached_at_whichever_address_works_and_by_one_dial_for_all_callers(
    make: Make,
) -> None:
    server, other, client = await make(LOW), await make(IDENTITIES[2]), await make(HIGH, listen=False)
    addresses = ["not an address", str(at(other)), str(at(server))]
    links = await asyncio.gather(*(client.link_to(LOW.peer_id, addresses, anywhere) for _ in range(5)))
    assert len(set(links)) == 1 and links[0].peer == LOW.peer_id
    assert len(client._sockets) == 1
    with pytest.raises(PeerFailed, match="expected peer"):
        await client.link_to(IDENTITIES[3].peer_id, [str(at(other))], anywhere)
    with pytest.raises(PeerFailed, match="no address is known"):
        await client.link_to(IDENTITIES[3].peer_id, [], anywhere)


async def test_a_name_is_judged_by_what_it_stands_for_and_that_is_what_is_dialled(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    looked_up: list[str] = []

    async def answers(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        looked_up.append(host)
        # first something harmless, the second time another address: what was judged must be what is dialled
        found = "127.0.0.1" if looked_up == ["evil.example.org"] else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(client.loop, "getaddrinfo", answers)
    judged: list[str] = []
    text = f"evil.example.org:{server.port}"
    with pytest.raises(PeerFailed, match="isn't this swarm's"):
        await client.link_to(LOW.peer_id, [text], lambda host: bool(judged.append(host)))
    assert judged == ["127.0.0.1"] and not client._sockets
    looked_up.clear()
    link = await client.link_to(LOW.peer_id, [text], lambda host: host == "127.0.0.1")
    assert link.remote[0] == "127.0.0.1" and "evil.example.org" in looked_up


async def test_a_name_of_very_many_addresses_is_tried_at_two(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await make(HIGH, listen=False)

    async def answers(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in range(1, 100)]

    monkeypatch.setattr(client.loop, "getaddrinfo", answers)
    places = await client.allowed(parse_address("evil.example.org:1"), lambda host: host != "127.0.0.1")
    assert [place.host for place in places] == ["127.0.0.2", "127.0.0.3"]


async def test_lookups_that_never_end_hold_two_threads_and_nobody_else(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make(HIGH, listen=False)
    looking, answer = [], client.loop.create_future()

    async def answers(host: str, port: int, **_: object) -> list[object]:
        looking.append(host)
        await answer
        return []

    monkeypatch.setattr(client.loop, "getaddrinfo", answers)
    monkeypatch.setattr(transport_module, "DIAL_TIMEOUT_S", 0.05)
    found = await asyncio.gather(
        *(client.allowed(parse_address(f"n{n}.example.org:1"), anywhere) for n in range(20)), return_exceptions=True
    )
    assert all(isinstance(one, Unreachable) and "in time" in str(one) for one in found)
    assert looking == ["n0.example.org", "n1.example.org"], "a thread is used until its answer comes"
    answer.set_result(None)
    with pytest.raises(Unreachable):
        await client.allowed(parse_address("n20.example.org:1"), anywhere)
    assert looking[2:] == ["n20.example.org"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_simultaneous_dials_agree_on_the_lower_peers_connection(
    make: Make, order: tuple[int, int]
) -> None:
    low, high = await make(LOW), await make(HIGH)
    for side in (low, high):
        side.handle(Where, echo)
    dials = [low.dial(at(high, HIGH.peer_id), fresh=True), high.dial(at(low, LOW.peer_id), fresh=True)]
    links = await asyncio.gather(*(dials[n] for n in order))
    by_low, by_high = (links[order.index(0)], links[order.index(1)])
    await by_low.ping()
    await by_high.ping()
    assert low.links[HIGH.peer_id] is by_low
    assert not high.links[LOW.peer_id].dialled
    # New streams take the agreed connection whichever Link they are asked of, and both directions work.
    for link in (by_high, by_low):
        stream = link.open_stream()
        assert stream.link.dialled is (stream.link.owner is low)
        await stream.send(Where(5))
        assert await stream.receive() == Where(5)


async def test_the_spare_connection_of_a_pair_is_closed_once_it_is_idle(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "DUPLICATE_LINGER_S", 0.0)
    low, high = await make(LOW), await make(HIGH)
    low.handle(Where, echo)
    lost: list[Link] = []
    high.on_link_lost.append(lost.append)
    spare = await high.dial(at(low, LOW.peer_id))
    stream = spare.open_stream()
    await stream.send(Where(1))
    assert await stream.receive() == Where(1)
    kept = await low.dial(at(high, HIGH.peer_id), fresh=True)
    await kept.ping()
    for _ in range(3):
        await spare.ping()
    await stream.send(Where(2))
    assert await stream.receive() == Where(2)  # its stream goes on
    stream.reset("done")
    with pytest.raises(StreamClosed, match="another connection"):
        while True:
            await spare.ping()
    assert low.links[HIGH.peer_id] is kept and LOW.peer_id in high.links and lost == []


async def test_two_hundred_connections_leave_nothing_behind(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    server.handle(Where, echo)
    server_links: list[Link] = []
    server.on_link.append(server_links.append)
    baseline = len(asyncio.all_tasks())
    for number in range(200):
        link = await client.dial(at(server))
        stream = link.open_stream()
        await stream.send(Where(number))
        assert await stream.receive() == Where(number)
        link.close("enough")
        await until(link.gone)
    await asyncio.gather(*(link.gone.wait() for link in server_links))
    gc.collect()
    for side in (server, client):
        assert not side.links and not side._sockets and not side._callers and not side._established
    assert len(asyncio.all_tasks()) == baseline
    assert len(server._tasks) == 1 and not client._tasks  # it still listens


async def test_closing_ends_everything_even_a_dial_and_a_handler_that_hang(make: Make) -> None:
    server, client = await make(LOW), await make(HIGH, listen=False)
    held = asyncio.Event()

    async def hang(stream: Stream, first: Message) -> None:
        held.set()
        await asyncio.Event().wait()

    server.handle(Where, hang)
    stream = (await client.dial(at(server))).open_stream()
    await stream.send(Where(1))
    await until(held)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        reaching = asyncio.create_task(
            client.link_to(IDENTITIES[2].peer_id, [f"127.0.0.1:{silent.getsockname()[1]}"], anywhere)
        )
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(PeerFailed):
            await reaching
    await server.close()
    assert not server._tasks and not client._tasks and not server._sockets and not client._sockets
    with pytest.raises(StreamClosed):
        await stream.receive()


async def test_a_peer_that_falls_silent_is_noticed(make: Make) -> None:
    quick = replace(DEFAULT_LIMITS, ping_every_s=0.02, dead_after_s=0.1)
    server, client = await make(LOW), await make(HIGH, listen=False, limits=quick)
    link = await client.dial(at(server))
    await link.ping()
    frozen = server.links[HIGH.peer_id]
    frozen._transport.pause_reading()  # type: ignore[union-attr]
    await until(link.closed)
    assert link.closed_reason is not None and "nothing heard" in link.closed_reason


async def test_it_runs_on_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def talk() -> None:
        server, client = Transport(LOW), Transport(HIGH)
        server.handle(Where, echo)
        await server.listen(None, 0)
        link = await client.dial(at(server))
        stream = link.open_stream()
        for number in range(20):
            await stream.send(Where(number))
            assert await stream.receive() == Where(number)
        assert await link.ping() > 0
        await client.close()
        await server.close()

    await asyncio.to_thread(lambda: uvloop.run(talk()))


@pytest.mark.parametrize("turns", range(6))
async def test_whoever_connects_as_a_transport_closes_is_taken_or_left_never_lost(turns: int) -> None:
    """A socket between the two would stay open with nobody, and its other side would wait for ever."""
    made = Transport(LOW)
    await made.listen("127.0.0.1", 0)
    (listening,) = made._listening
    for task in tuple(made._tasks):  # its own acceptor would be quicker
        task.cancel()
    await asyncio.gather(*made._tasks, return_exceptions=True)
    taking = asyncio.create_task(made._next(listening))
    await asyncio.sleep(0)
    with socket.create_connection(listening.getsockname()):
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        (taken,) = await asyncio.gather(taking, return_exceptions=True)
        if isinstance(taken, asyncio.CancelledError):
            taken = listening.accept()  # raises BlockingIOError if it is in nobody's hands
        taken[0].close()
    await made.close()
