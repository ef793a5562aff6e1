"""One connection and the conversations on it, between `wire.Connection` and the application.

A `Link` is one connection to a peer that has proved its identity; a `Stream` is one ordered conversation on it.
Bytes are handed to the core as they arrive and messages to a waiting reader in the same call; no task is made
per message. At most about one record waits in the socket (the core holds back the rest), or priorities would
mean nothing. Which links there are is `transport.py`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, cast

from swarm import wire
from swarm.errors import Flooded, SendQueueFull, StreamClosed, VersionMismatch
from swarm.flow import Admit, Priority
from swarm.identity import PeerId
from swarm.messages import Message
from swarm.wire import Connection

if TYPE_CHECKING:
    from swarm.transport import Transport

log = logging.getLogger("swarm.link")

WRITE_HIGH_WATER = 64 << 10  # one record
TAKES_NOTHING_S = 30.0  # for the 64 to 128 KiB in the socket: 4 KB a second is the slowest that anybody can use
LAST_WORD_S = 5.0  # for what is in the socket when a connection is closed
RECORDS_PER_TURN = 16  # then the loop gets its turn: a bulk transfer can't hog it
# The same for what comes in. One read brings up to 256 KiB, and that much of the smallest records takes 150 ms:
# a slice is at most 85 of them, a few milliseconds' work (benchmarks/parsers.py).
RECEIVE_SLICE = 2 << 10
RECEIVE_TURN_S = 0.003
MESSAGES_PER_TURN = 8  # a reader that always finds the next message waiting lets others in between; a few ms too


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
        """check(values, specs) may raise MessageError once a message's map is here, before its tensors. Raises that
        at once if one is here already."""
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
        self._paused = self._given_up = False
        self._stalled: asyncio.TimerHandle | None = None  # runs while the socket takes nothing, or won't close
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
        if self._given_up:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER, low=0)
        self.owner.tune(transport.get_extra_info("socket"))
        self.transmit()

    def data_received(self, data: bytes) -> None:
        # reading is paused while something is unread; what a loop delivers all the same comes behind it
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        self._read_on()

    def eof_received(self) -> bool:
        return False  # both directions end together

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._watch(None)
        reason = (exc.strerror or str(exc)).lower() if isinstance(exc, OSError) else str(exc or "")
        self.connection.lost(reason or "the other side closed it")
        self.transmit()
        self.gone.set()
        self.owner.forget(self)

    def pause_writing(self) -> None:
        self._paused = True
        self._watch(TAKES_NOTHING_S)

    def resume_writing(self) -> None:
        self._paused = False
        self._watch(None)
        self.transmit()

    def _watch(self, patience_s: float | None) -> None:
        """Give up the socket in `patience_s`, None: not at all."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if patience_s is not None:
            self._stalled = self.loop.call_later(patience_s, self._takes_nothing)

    def _takes_nothing(self) -> None:
        self.connection.lost(f"the other side took nothing for {TAKES_NOTHING_S:g} s")
        self.transmit()
        self.abort()

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
        wait_s = self.connection.worked(now, now - begun)
        if self._transport is None or self._transport.is_closing():
            self._unread = memoryview(b"")
        elif self._unread or wait_s:
            self._transport.pause_reading()
            self.loop.call_later(wait_s, self._read_on) if wait_s else self.loop.call_soon(self._read_on)
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
            self._watch(LAST_WORD_S)  # asyncio waits for ever for somebody to read it

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
        if isinstance(event.error, Flooded):
            self.owner.flooded(self)
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
        self._given_up = True
        if self._transport is not None:
            self._transport.abort()
        else:
            self.gone.set()
            self.owner.forget(self)
