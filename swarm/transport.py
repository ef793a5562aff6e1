"""The shell around `wire.Connection`, and the only file that opens sockets.

A `Transport` listens, dials and owns everything it started: close() leaves no task, timer or socket behind.
A `Link` is one connection to a peer that has proved its identity; a `Stream` is one ordered conversation
on it. Bytes are handed to the core as they arrive and messages to a waiting reader in the same call;
no task is made per message. At most about one record waits in the socket (the core holds back the rest),
or priorities would mean nothing.

Two peers may dial each other at once. Then both connections live, new streams use the one that the lower
PeerId dialled (the newest of them), and the other is closed once it has had no stream for DUPLICATE_LINGER_S.

What fails how: `dial` raises Unreachable, IdentityError, VersionMismatch or HandshakeError; a stream raises
StreamClosed. A stream handler that raises a RemoteError resets its own stream; anything else it raises is
our bug: logged, shown to the event loop's exception handler, and the stream is reset with "internal error".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol, cast

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarm import wire
from swarm.addresses import DEFAULT_PORT, Address, parse_address
from swarm.errors import (
    HandshakeError,
    IdentityError,
    PeerFailed,
    PortTaken,
    RemoteError,
    SendQueueFull,
    StreamClosed,
    SwarmError,
    Unreachable,
    UsageError,
    VersionMismatch,
)
from swarm.identity import Identity, PeerId
from swarm.messages import Message, Unsupported
from swarm.noise import MAX_NETWORK_NAME
from swarm.wire import Admit, Connection, Limits, Priority

log = logging.getLogger("swarm.transport")

PORTS_TRIED = 200  # several peers on one host each take the next free one
DIAL_TIMEOUT_S = 5.0
NEXT_ADDRESS_S = 0.25  # a peer's next address is tried beside the last (RFC 8305's delay)
MAX_PENDING = 64  # handshakes of strangers at once
MAX_LINKS = 768  # under the usual 1,024 file descriptors of a process
WRITE_HIGH_WATER = 64 << 10  # one record
NOTSENT_LOWAT = 128 << 10  # in the kernel: enough to keep a fast link busy, too little to delay a decode step
RECORDS_PER_TURN = 16  # then the loop gets its turn: a bulk transfer can't hog it
# The same for what comes in. One read brings up to 256 KiB, and that much of the smallest records takes 150 ms:
# a slice is at most 170 of them, some milliseconds' work.
RECEIVE_SLICE = 4 << 10
RECEIVE_TURN_S = 0.003
MESSAGES_PER_TURN = 8  # a reader that always finds the next message waiting lets others in between; a few ms too
DUPLICATE_LINGER_S = 10.0
CLOSE_TIMEOUT_S = 1.0  # for a last word to leave

Handler = Callable[["Stream", Message], Awaitable[None]]


class KnownHosts(Protocol):
    """Trust on first use, for addresses that came without a PeerId."""

    def check(self, address_text: str, peer: PeerId) -> None:
        """Remember `peer` for a new address; raise IdentityError if another one was known there."""


# ---------------------------------------------------------------- streams


class Stream:
    """One ordered conversation. One reader at a time; senders may be many."""

    def __init__(self, link: Link, number: int) -> None:
        self.link, self.id = link, number
        self.closed_reason: str | None = None  # set: nothing can be sent, nothing more comes
        self._ended_reason: str | None = None  # set: nothing more comes
        self._inbox: deque[wire.MessageReceived] = deque()
        self._in_a_row = 0  # messages taken without having waited
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._max_message_bytes = link.connection.limits.max_message_bytes

    @property
    def max_message_bytes(self) -> int:
        return self._max_message_bytes

    @max_message_bytes.setter
    def max_message_bytes(self, value: int) -> None:
        self._max_message_bytes = value
        self.link.connection.configure(self.id, max_message_bytes=value)

    def admit(self, check: Admit) -> None:
        """check(values, specs) may raise MessageError once a message's map is here, before its tensors."""
        self.link.connection.configure(self.id, admit=check)

    @property
    def queued_bytes(self) -> int:
        """Waiting to be sent."""
        return self.link.connection.queued(self.id)

    async def send(self, message: Message, priority: Priority = Priority.CONTROL) -> None:
        """Queue a message once there is room. Raises StreamClosed. Cancelled: nothing was queued."""
        bound = self.link.connection.limits.send_queue_bytes
        while self.closed_reason is None and self.queued_bytes >= bound:
            await self._writable()
        self._queue(message, priority)

    def send_nowait(self, message: Message, priority: Priority = Priority.CONTROL) -> None:
        """Queue a message now. Raises StreamClosed, or SendQueueFull if too much waits already."""
        bound = self.link.connection.limits.send_queue_bytes
        if self.closed_reason is None and self.queued_bytes >= bound:
            raise SendQueueFull(self.queued_bytes, bound)
        self._queue(message, priority)

    async def receive(self) -> Message:
        """The next message. Raises StreamClosed behind the last one. Cancelled: no message is lost."""
        if self._in_a_row >= MESSAGES_PER_TURN:
            self._in_a_row = 0
            await asyncio.sleep(0)
        while not self._inbox:
            if self._ended_reason is not None:
                raise StreamClosed(self._ended_reason)
            assert self._reader is None, "one reader at a time"
            self._reader = self.link.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
                self._in_a_row = 0
        self._in_a_row += 1
        return self._take()

    async def end(self) -> None:
        """No more messages from this side; returns when all queued ones have left. Never raises."""
        self.link.connection.end(self.id)
        self.link.transmit()
        while self.closed_reason is None and not self.link.connection.flushed(self.id):
            await self._writable()

    def reset(self, reason: str) -> None:
        """Over at once; what was queued isn't sent, what was received isn't read."""
        self._inbox.clear()
        self.link.connection.reset(self.id, reason)
        self.link.forget(self, reason)
        self.link.transmit()

    def finish(self) -> None:
        """Nobody here reads or writes it any more: what is queued leaves, then it is over."""
        self._inbox.clear()
        self.link.connection.finish(self.id, "done")
        self.link.transmit()

    # ---- what the link tells it

    def deliver(self, received: wire.MessageReceived) -> None:
        self._inbox.append(received)
        self._wake_reader()

    def ended(self, reason: str) -> None:
        if self._ended_reason is None:
            self._ended_reason = reason
        self._wake_reader()

    def closed(self, reason: str) -> None:
        if self.closed_reason is None:
            self.closed_reason = reason
        self.ended(reason)
        self.writable()

    def writable(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            if not writer.done():
                writer.set_result(None)

    # ---- inside

    def _queue(self, message: Message, priority: Priority) -> None:
        if self.closed_reason is not None:
            raise StreamClosed(self.closed_reason)
        self.link.connection.send(self.id, message, priority)
        self.link.transmit()

    def _take(self) -> Message:
        received = self._inbox.popleft()
        if self.link.connection.consumed(received):
            self.link.transmit()
        return received.message

    async def _writable(self) -> None:
        writer = self.link.loop.create_future()
        self._writers.append(writer)
        self.link.connection.want_writable(self.id)
        try:
            await writer
        finally:
            if writer in self._writers:
                self._writers.remove(writer)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


# ---------------------------------------------------------------- links


class Link(asyncio.Protocol):
    """One connection. `peer` and the rest mean something once `ready` is done."""

    def __init__(self, transport: Transport, dialled: bool, connection: Connection) -> None:
        self.loop = transport.loop
        self.owner = transport
        self.dialled = dialled
        self.connection = connection
        self.peer = PeerId("")
        self.remote: tuple[str, int] = ("", 0)
        self.rtt_s: float | None = None  # the last one measured
        self.closed = asyncio.Event()
        self.closed_reason: str | None = None
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.gone = asyncio.Event()  # the socket is closed too
        self.idle_since: float | None = None  # of a duplicate
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._unread = memoryview(b"")  # has come, and the core doesn't have it yet
        self._transmitting = self._again = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._streams: dict[int, Stream] = {}
        self._pings: dict[int, asyncio.Future[float]] = {}

    def __repr__(self) -> str:
        host, port = self.remote
        return f"<Link {self.peer[:8] or 'unproved'} {'to' if self.dialled else 'from'} {host}:{port}>"

    @property
    def _proved(self) -> bool:
        return bool(self.peer)

    def open_stream(self) -> Stream:
        """A new stream, on the pair's preferred connection if there are two. Raises StreamClosed."""
        link = self.owner.links.get(self.peer, self)
        number = link.connection.open_stream()
        stream = link._streams[number] = Stream(link, number)
        return stream

    async def ping(self) -> float:
        """Seconds for a round trip now. Raises StreamClosed if the link is lost meanwhile."""
        if self.closed_reason is not None:
            raise StreamClosed(self.closed_reason)
        token = self.connection.ping(monotonic())
        answer: asyncio.Future[float] = self.loop.create_future()
        self._pings[token] = answer
        self.transmit()
        try:
            return await answer
        finally:
            self._pings.pop(token, None)

    def close(self, reason: str) -> None:
        """Say goodbye; streams end with StreamClosed. What was queued isn't sent."""
        self.connection.close(reason)
        self.transmit()

    def transmit(self) -> None:
        """Drain the core, send, re-arm the one timer. What happened is told before it returns."""
        self._again = True
        if self._transmitting:  # called by what we are just telling: the loop below goes round once more
            return
        self._transmitting = True
        try:
            while self._again:
                self._again = False
                self._drain()
        finally:
            self._transmitting = False
        self._rearm()

    def forget(self, stream: Stream, reason: str) -> None:
        self._streams.pop(stream.id, None)
        stream.closed(reason)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's isn't a subclass
        self._transport = transport
        peername = transport.get_extra_info("peername") or ("", 0)
        self.remote = (str(peername[0]), int(peername[1]))
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER, low=0)
        _tune(transport.get_extra_info("socket"))
        if not self.dialled and not self.owner.accept(self):
            transport.abort()
            return
        self.transmit()

    def data_received(self, data: bytes) -> None:
        # reading is paused while something is unread; what a loop delivers all the same comes behind it
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        self._read_on()

    def eof_received(self) -> bool:
        return False  # both directions end together

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        reason = _plain(exc) if isinstance(exc, OSError) else str(exc or "")
        self.connection.lost(reason or "the other side closed it")
        self.transmit()
        self.gone.set()
        self.owner.forget(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.transmit()

    # ---- inside

    def _read_on(self) -> None:
        """Hand over what has come, slice by slice; after RECEIVE_TURN_S the loop gets its turn first."""
        begun = now = monotonic()
        while self._unread and now - begun < RECEIVE_TURN_S and not self.connection.closed:
            size = max(RECEIVE_SLICE, self.connection.missing)  # a large record isn't cut: it is one frame
            part, self._unread = self._unread[:size], self._unread[size:]
            self.connection.receive_data(part, now)
            self.transmit()
            now = monotonic()
        if self._transport is None or self._transport.is_closing():
            self._unread = memoryview(b"")
        elif self._unread:
            self._transport.pause_reading()
            self.loop.call_soon(self._read_on)
        else:
            self._transport.resume_reading()

    def _drain(self) -> None:
        self._handle_events()
        for _ in range(RECORDS_PER_TURN):
            if self._paused or self._transport is None or self._transport.is_closing():
                break
            data = self.connection.data_to_send()
            if data:
                self._transport.write(data)
                self._handle_events()
            if len(data) < wire.COALESCE_BYTES:  # that was all
                break
        else:
            self.loop.call_soon(self.transmit)
        if self.connection.closed and self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.connection.data_to_send())
            self._transport.close()

    def _handle_events(self) -> None:
        while events := self.connection.events():
            for event in events:
                self._handle(event)

    def _handle(self, event: wire.Event) -> None:
        if isinstance(event, wire.MessageReceived):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.deliver(event)
        elif isinstance(event, wire.StreamOpened):
            stream = self._streams[event.stream] = Stream(self, event.stream)
            self.owner.serve(stream)
        elif isinstance(event, wire.Writable):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.writable()
        elif isinstance(event, wire.StreamEnded):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.ended("the other side ended it")
        elif isinstance(event, wire.StreamReset):
            stream = self._streams.get(event.stream)
            if stream is not None:
                self.forget(stream, event.reason)
        elif isinstance(event, wire.StreamOver):
            stream = self._streams.get(event.stream)
            if stream is not None:
                self.forget(stream, "both sides ended it")
        elif isinstance(event, wire.RoundTrip):
            self._measured(event)
        elif isinstance(event, wire.Secured):
            self._secured(event.peer)
        else:
            self._closed(event)

    def _secured(self, peer: PeerId) -> None:
        self.peer = peer
        self.owner.established(self)
        if not self.ready.done():
            self.ready.set_result(None)

    def _measured(self, event: wire.RoundTrip) -> None:
        self.rtt_s = event.seconds
        answer = self._pings.pop(event.token, None)
        if answer is not None and not answer.done():
            answer.set_result(event.seconds)
        self.owner.close_if_duplicate(self)

    def _closed(self, event: wire.Closed) -> None:
        self.closed_reason = event.reason
        # A stranger at the port isn't worth a line; another version of ourselves is.
        quiet = event.error is None or not (self._proved or self.dialled)
        quiet = quiet and not isinstance(event.error, VersionMismatch)
        log.log(logging.DEBUG if quiet else logging.INFO, "%r closed: %s", self, event.reason)
        error = event.error or StreamClosed(event.reason)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # an incoming one has nobody who waits for it
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(StreamClosed(event.reason))
                answer.exception()
        for stream in list(self._streams.values()):
            self.forget(stream, event.reason)
        self.closed.set()
        self.owner.lost(self)

    def _rearm(self) -> None:
        """A deadline that moved later needs no new timer: the old one looks again."""
        deadline = self.connection.deadline
        if self._timer is not None:
            if deadline is not None and self._timer_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            # The loop's own clock may tick in milliseconds (uvloop), too coarse for a round trip.
            self._timer_at = deadline
            self._timer = self.loop.call_later(max(deadline - monotonic(), 0.0), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.connection.tick(monotonic())
        self.transmit()

    def abort(self) -> None:
        """Drop the socket, or give up waiting for one."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self.gone.set()
            self.owner.forget(self)


def _tune(sock: Any) -> None:
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if lowat is not None:
            sock.setsockopt(socket.IPPROTO_TCP, lowat, NOTSENT_LOWAT)
    except OSError as error:  # a platform without them is slower, not broken
        log.debug("socket options: %s", error)


# ---------------------------------------------------------------- the transport


class Transport:
    """Everything that this participant has open. Make it inside a running event loop.

    on_link / on_link_lost: called with the peer's first Link, and with its last when it is gone.
    """

    def __init__(
        self,
        identity: Identity,
        network: str = "main",
        *,
        known_hosts: KnownHosts | None = None,
        limits: Limits = wire.DEFAULT_LIMITS,
    ) -> None:
        if not 0 < len(network.encode()) <= MAX_NETWORK_NAME:
            raise UsageError(f"a network's name takes 1 to {MAX_NETWORK_NAME} bytes, got {network[:120]!r}")
        self.identity, self.network = identity, network
        self.loop = asyncio.get_running_loop()
        self.on_link: list[Callable[[Link], None]] = []
        self.on_link_lost: list[Callable[[Link], None]] = []
        self.port: int | None = None
        self._known_hosts = known_hosts
        self._limits = limits
        self._static = X25519PrivateKey.generate()  # as old as the process, never on disk
        self._preferred: dict[PeerId, Link] = {}
        self._established: dict[PeerId, list[Link]] = {}
        self._pending: dict[Link, None] = {}  # incoming, in handshake, oldest first
        self._sockets: set[Link] = set()  # every link whose socket isn't gone
        self._handlers: dict[type[Message], Handler] = {}
        self._first_limits: dict[type[Message], int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialling: dict[PeerId, asyncio.Task[Link]] = {}
        self._servers: list[asyncio.Server] = []
        self._closing = False

    @property
    def links(self) -> Mapping[PeerId, Link]:
        """By peer, the connection that new streams use."""
        return self._preferred

    def handle(self, first: type[Message], handler: Handler, *, max_message_bytes: int | None = None) -> None:
        """Incoming streams that begin with a `first` go to `handler`, in a task of their own.

        When it returns, the stream is ended. It may raise a RemoteError, which resets the stream.
        max_message_bytes: of all messages behind the first; setting it in the handler may be too late
        for a message that follows at once.
        """
        assert first not in self._handlers, first
        self._handlers[first] = handler
        if max_message_bytes is not None:
            self._first_limits[first] = max_message_bytes

    # ---- listening

    async def listen(self, host: str | None, port: int | None) -> list[str]:
        """The bound addresses. host None: all interfaces. port None: the next free one, 0: any.

        Raises PortTaken, UsageError (nothing is bound then).
        """
        places = await self._places(host)
        ports = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED + 1)
        for candidate in ports:
            sockets = _bind(places, candidate)
            if sockets:
                break
        else:
            raise PortTaken(host or "any interface", port if port is not None else DEFAULT_PORT + PORTS_TRIED)
        self.port = int(sockets[0].getsockname()[1])
        for sock in sockets:
            self._servers.append(
                await self.loop.create_server(self._incoming, sock=sock, backlog=MAX_PENDING)
            )
        return [str(Address(None, sock.getsockname()[0], self.port)) for sock in sockets]

    async def _places(self, host: str | None) -> list[tuple[int, str]]:
        if host is None:
            return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
        try:
            found = await self.loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"can't listen on {host!r}: {_plain(error)}; give an address of this machine") from None
        return [(int(info[0]), str(info[4][0])) for info in found]

    def _incoming(self) -> Link:
        return self._new_link(dialled=False)

    # ---- dialling

    async def dial(self, address: Address, timeout_s: float = DIAL_TIMEOUT_S, *, fresh: bool = False) -> Link:
        """A link to whoever listens there; the one that exists if the peer is known and linked.

        fresh: a new connection in any case, to find out whether the address works. Raises Unreachable,
        IdentityError, VersionMismatch, HandshakeError.
        """
        if address.peer is not None and not fresh and address.peer in self._preferred:
            return self._preferred[address.peer]
        if self._closing:
            raise Unreachable(str(address), "not dialled", "this side is shutting down")
        link = self._new_link(dialled=True, address=address)
        try:
            async with asyncio.timeout(timeout_s):
                await self.loop.create_connection(lambda: link, address.host, address.port)
                await link.ready
        except BaseException as error:
            link.close("given up")
            link.abort()
            await link.gone.wait()  # a turn of the loop: the socket is closed when we raise
            if isinstance(error, TimeoutError):
                raise Unreachable(str(address), f"no answer in {timeout_s:g} s") from None
            if isinstance(error, OSError):
                raise Unreachable(str(address), _plain(error)) from None
            if isinstance(error, StreamClosed):
                raise HandshakeError(f"{address} hung up during the handshake: {error.reason}") from None
            raise
        return link

    async def link_to(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        """The link to `peer`, dialled at these addresses if there is none yet. Raises PeerFailed.

        Callers who want the same peer at the same time share one attempt.
        """
        if peer in self._preferred:
            return self._preferred[peer]
        task = self._dialling.get(peer)
        if task is None:
            task = self._dialling[peer] = self._own(self._reach(peer, addresses))
            task.add_done_callback(lambda done: self._dialled(peer, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the transport is closing
                raise PeerFailed(peer, "this transport was closed") from None
            raise

    def _dialled(self, peer: PeerId, task: asyncio.Task[Link]) -> None:
        self._dialling.pop(peer, None)
        if not task.cancelled():
            task.exception()  # looked at here, for when all who waited have been cancelled

    async def _reach(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        """Each address starts NEXT_ADDRESS_S after the one before, or when that has failed."""
        reasons: list[str] = []
        waiting = deque(addresses)
        attempts: set[asyncio.Task[Link]] = set()
        try:
            while waiting or attempts:
                if waiting:
                    attempts.add(asyncio.create_task(self._reach_at(peer, waiting.popleft())))
                done, attempts = await asyncio.wait(
                    attempts,
                    timeout=NEXT_ADDRESS_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for attempt in done:
                    error = attempt.exception()
                    if error is None:
                        return attempt.result()
                    if not isinstance(error, SwarmError):
                        raise error
                    reasons.append(str(error))
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        raise PeerFailed(peer, "; ".join(reasons) or "no address is known")

    async def _reach_at(self, peer: PeerId, text: str) -> Link:
        address = parse_address(text)
        return await self.dial(Address(peer, address.host, address.port))

    # ---- closing

    async def close(self) -> None:
        """Say goodbye to everybody, stop every task, wait until all sockets are gone."""
        self._closing = True
        await self._stop_accepting()
        for server in self._servers:
            server.close()
        # Links first, so that the other side hears this reason and not each handler's end.
        for link in list(self._sockets):
            link.close("shutting down")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = list(self._sockets)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for link in links:
                    await link.gone.wait()
        except TimeoutError:
            for link in links:
                link.abort()
        for link in links:
            await link.gone.wait()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def _stop_accepting(self) -> None:
        """asyncio fails with an assertion on a connection that it accepted in the very turn of `Server.close`."""
        with contextlib.suppress(NotImplementedError, RuntimeError):  # on Windows and uvloop
            for server in self._servers:
                for sock in server.sockets:
                    self.loop.remove_reader(sock.fileno())
        for _ in range(2):  # those that were accepted become links, which are refused
            await asyncio.sleep(0)

    # ---- what links tell it

    def accept(self, link: Link) -> bool:
        """A stranger connected. False: drop it."""
        if self._closing or len(self._sockets) >= MAX_LINKS:
            log.debug("%r refused: %d links are open", link, len(self._sockets))
            return False
        self._sockets.add(link)
        self._pending[link] = None
        if len(self._pending) > MAX_PENDING:
            # An honest handshake takes a round trip, so the oldest is the least likely to be one.
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.abort()
        return True

    def established(self, link: Link) -> None:
        self._pending.pop(link, None)
        links = self._established.setdefault(link.peer, [])
        links.append(link)
        self._prefer(link.peer)
        log.debug("%r is up", link)
        if len(links) == 1:
            for callback in self.on_link:
                callback(link)

    def lost(self, link: Link) -> None:
        self._pending.pop(link, None)
        links = self._established.get(link.peer, [])
        if link not in links:
            return
        links.remove(link)
        self._prefer(link.peer)
        if not links:
            del self._established[link.peer]
            for callback in self.on_link_lost:
                callback(link)

    def forget(self, link: Link) -> None:
        self._sockets.discard(link)
        self._pending.pop(link, None)

    def close_if_duplicate(self, link: Link) -> None:
        """Looked at with each ping: a connection that new streams don't use goes when it has been idle."""
        now = monotonic()
        if self._preferred.get(link.peer, link) is link or link.connection.streams:
            link.idle_since = None
        elif link.idle_since is None:
            link.idle_since = now
        elif now >= link.idle_since + DUPLICATE_LINGER_S:
            link.close("another connection to this peer is used")

    def serve(self, stream: Stream) -> None:
        """The other side opened a stream: its first message says who takes it."""
        self._own(self._serve(stream))

    # ---- inside

    def _new_link(self, dialled: bool, address: Address | None = None) -> Link:
        connection = Connection(
            "initiator" if dialled else "responder",
            self.identity,
            self.network,
            expected=address.peer if address else None,
            check=self._checker(address),
            static=self._static,
            limits=self._limits,
            first_limits=self._first_limits,
            now=monotonic(),
        )
        link = Link(self, dialled, connection)
        if dialled:
            self._sockets.add(link)
        return link

    def _checker(self, address: Address | None) -> Callable[[PeerId], None]:
        def check(peer: PeerId) -> None:
            if peer == self.identity.peer_id:
                raise IdentityError(
                    f"{address or 'the other side'} answers with our own identity: it is this very peer, or "
                    "one with a copy of its key; leave that address out"
                )
            if address is not None and address.peer is None and self._known_hosts is not None:
                self._known_hosts.check(str(address), peer)

        return check

    def _prefer(self, peer: PeerId) -> None:
        """New streams use the newest connection that the lower PeerId dialled; else the newest."""
        links = self._established.get(peer, [])
        if not links:
            self._preferred.pop(peer, None)
            return
        we_are_lower = self.identity.peer_id < peer
        best = [link for link in links if link.dialled == we_are_lower] or links
        self._preferred[peer] = best[-1]

    async def _serve(self, stream: Stream) -> None:
        try:
            first = await stream.receive()
            handler = self._handlers.get(type(first))
            if handler is None:
                await stream.send(Unsupported(first.kind))
            else:
                await handler(stream, first)
        except StreamClosed:
            pass
        except RemoteError as error:
            log.info("stream %d of %r reset: %s", stream.id, stream.link, error)
            stream.reset(str(error))
        except Exception as error:
            stream.reset("internal error")
            log.exception("a stream handler failed on %r", stream.link)
            self.loop.call_exception_handler(
                {"message": "a stream handler failed", "exception": error}  # no "task": 3.13 enters its context
            )
        finally:
            stream.finish()

    def _own(self, work: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _bind(places: Sequence[tuple[int, str]], port: int) -> list[socket.socket]:
    """One socket for each place, all on the same port; [] if the port is taken on any of them."""
    sockets: list[socket.socket] = []
    for family, host in places:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 on this machine
        try:
            if os.name == "posix":  # elsewhere it would let two peers share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((host, sockets[0].getsockname()[1] if sockets else port))
            # Linux lets two bind and only one listen; find out here, not in create_server.
            sock.listen(MAX_PENDING)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL and host == "::":
                continue
            for other in sockets:
                other.close()
            if error.errno == errno.EADDRINUSE:
                return []
            raise UsageError(f"can't listen on {host} port {port}: {_plain(error)}; check --host and --port") from None
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def _plain(error: OSError) -> str:
    """What went wrong, for people: without numbers and Python's repr."""
    if isinstance(error, socket.gaierror):
        return (error.strerror or str(error)).lower()
    # A name with several addresses gives one error whose text lists the others'.
    numbers = [error.errno] if error.errno else [int(n) for n in re.findall(r"\[Errno (\d+)\]", str(error))]
    return ", ".join(dict.fromkeys(os.strerror(n).lower() for n in numbers)) or str(error)
