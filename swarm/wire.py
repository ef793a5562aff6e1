"""One connection after TCP: records, frames, streams, messages. Bytes in, bytes out, no socket.

    record    u16 length of what follows | AES-GCM ciphertext (swarm/noise.py)       one frame per record
    frame     u8 type | u8 flags | u32 stream | payload                              at most 65,519 bytes
    DATA   0  part of a message; flags: 1 = the last part, priority << 1
    WINDOW 1  u32 bytes of credit; flags: 1 = for control messages
    END    2  no more messages from this side
    RESET  3  reason in UTF-8; the stream is over in both directions
    PING   4  u64, answered by PONG with the same
    PONG   5
    CLOSE  6  reason in UTF-8; the connection is over
    message   in one or more DATA frames: swarm/packing.py

All integers are big-endian. Unknown frame types are ignored, so that a later minor version may add some.

Streams are opened by their first frame; ids are odd from the dialler and even from the listener. Messages
of one stream arrive in order, whatever their priorities; between streams the one whose next message has
the best priority goes first, a record at a time, and equals take turns.

Flow control: each stream has two windows in each direction, one for control messages and one for all
others, so that a full stream still answers. A window counts payload and FRAME_COST for each frame. The
parts of an unfinished message are credited back as they come (its size is bounded by the stream's
`max_message_bytes`, so it may exceed the window); a finished message is credited when the application has
taken it. So what one stream can hold is at most 2 windows and one message, and a session that reads slowly
stops its own sender and nobody else.

Faults: what breaks encryption, framing or a window costs the connection (`Closed` with the error). A bad
message costs its stream (`StreamReset`). An unknown kind of message costs nothing: it is answered with
`Unsupported`. Frames for a stream that is over are dropped without a word. What is allowed but too much of
it (`quotas.py`) costs the stream, and repeatedly the connection.

Invariants: nothing is allocated by a size that was only stated; every queue and table is bounded.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarm import codecs, messages
from swarm.errors import Flooded, FramingError, HandshakeError, MessageError, StreamClosed, SwarmError
from swarm.flow import (
    CLOSE,
    DATA,
    DEFAULT_LIMITS,
    END,
    FRAME_COST,
    HEADER,
    PING,
    PONG,
    RESET,
    WINDOW,
    Admit,
    Limits,
    Outgoing,
    Priority,
    StreamState,
)
from swarm.identity import Identity, PeerId
from swarm.messages import Message, UnknownKind, Unsupported
from swarm.noise import CipherState, Handshake, Role
from swarm.packing import Buffer, pack
from swarm.quotas import STREAM_BYTES, Account
from swarm.tensors import RawTensor

LAST = CONTROL_WINDOW = 1  # flags of DATA and of WINDOW

_LENGTH = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")

MAX_REASON = 512  # bytes; reasons are for people
COALESCE_BYTES = 16 << 10  # small records leave together up to here, in one system call
MAX_URGENT = 4096  # control frames waiting: only a peer that sends without ever reading gets there
MAX_PINGS = 16  # outstanding at once
# What is counted by its bytes, its window, or what it makes us compute; all else is a control message.
UNCOUNTED = (messages.Step, messages.Tokens, messages.Delta, messages.Files)
TOO_MANY = "too many control messages; what is over the limit isn't answered"
TOO_MUCH_HELD = "more is held for this network than its share; read or end some streams first"
OUR_LATENESS_S = 1.0  # if a deadline is looked at later than that, this process stood still, not the other side


NO_FIRST_LIMITS: Mapping[type[Message], int] = {}


# ---------------------------------------------------------------- events


class Secured(NamedTuple):
    """The handshake is done: `peer` has proved its identity."""

    peer: PeerId


class StreamOpened(NamedTuple):
    """By the other side."""

    stream: int


class MessageReceived(NamedTuple):
    """Give it back to `Connection.consumed` once the application has taken it."""

    stream: int
    message: Message
    cost: int
    control: bool


class StreamEnded(NamedTuple):
    """The other side sends no more; it still receives."""

    stream: int


class StreamReset(NamedTuple):
    """Over in both directions, by the other side or for a bad message of it."""

    stream: int
    reason: str


class StreamOver(NamedTuple):
    """Both sides have ended it, or this side has finished it. Nothing comes after it."""

    stream: int


class Writable(NamedTuple):
    """Asked for with `want_writable`: the send queue shrank below its bound, or is empty."""

    stream: int


class RoundTrip(NamedTuple):
    seconds: float
    token: int


class Closed(NamedTuple):
    """Nothing comes after it. error None: closed politely, or lost."""

    error: SwarmError | None
    reason: str


Event = (
    Secured
    | StreamOpened
    | MessageReceived
    | StreamEnded
    | StreamReset
    | StreamOver
    | Writable
    | RoundTrip
    | Closed
)


# ---------------------------------------------------------------- the connection


class Connection:
    """The core of one link. Drive it: `receive_data`, `events`, `data_to_send`, `tick` at `deadline`.

    first_limits: `max_message_bytes` of an incoming stream by its first message. The second may be here
    before anybody has looked at the first, so `configure` alone would come too late.
    account: where the costs of a proved peer are counted, made when it has proved itself; None: nowhere.
    After any call there may be new events and new data to send. `now` is seconds on the caller's clock.
    Nothing here raises for what the network did: that arrives as `Closed` or `StreamReset`.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        network: str,
        *,
        expected: PeerId | None = None,
        check: Callable[[PeerId], None] | None = None,
        static: X25519PrivateKey | None = None,
        limits: Limits = DEFAULT_LIMITS,
        first_limits: Mapping[type[Message], int] = NO_FIRST_LIMITS,
        account: Callable[[PeerId, float], Account] | None = None,
        now: float = 0.0,
        rng: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.limits = limits
        self._open_account = account
        self._account: Account | None = None  # once the other side is known
        self._now = now  # of what is being read
        self._first_limits = first_limits
        self.peer: PeerId | None = None
        self._handshake: Handshake | None = Handshake(
            role, identity, network, expected=expected, check=check, static=static, rng=rng
        )
        self._opened_at = self._looked_at = now
        self._shaken = 0  # bytes of the handshake so far
        self._begun_at: float | None = None  # since when a record is arriving
        self._buffer = bytearray()
        self._events: list[Event] = []
        self._urgent: deque[bytes] = deque()
        self._owed: dict[tuple[int, int], None] = {}  # (stream, window): a WINDOW frame is due
        self._ready: tuple[deque[StreamState], ...] = tuple(deque() for _ in Priority)
        self._streams: dict[int, StreamState] = {}
        self._next_id, self._remote_parity = (1, 0) if role == "initiator" else (2, 1)
        self._highest_remote = self._remote_parity - 2 if self._remote_parity else 0
        self._late: set[int] = set()  # ids below the highest whose first frame was overtaken
        self._held = 0
        self._pings: dict[int, float] = {}
        self._ping_count = 0
        self._pinged_at = now
        self._unanswered_since: float | None = None  # the first ping since the last byte heard
        self._closed = False

    # ---- what the application does

    def open_stream(self) -> int:
        """Its id. Raises StreamClosed if too many are open, or the connection is over."""
        if self._closed:
            raise StreamClosed("the connection is closed")
        if len(self._streams) >= 2 * self.limits.max_streams:
            raise StreamClosed(f"{len(self._streams)} streams are open on this connection; end some first")
        number = self._next_id
        self._next_id += 2
        self._streams[number] = StreamState(number, self.limits)
        return number

    def configure(
        self, stream: int, *, max_message_bytes: int | None = None, admit: Admit | None = None
    ) -> None:
        """admit(values, specs): may raise MessageError once a message's map is here, before its tensors. Raises that
        at once if one is here already."""
        state = self._streams.get(stream)
        if state is None:
            return
        if max_message_bytes is not None:
            state.max_message_bytes = max_message_bytes
        if admit is not None:
            state.admit = admit
            if state.head is not None:
                state.check_head()

    def send(self, stream: int, message: Message, priority: Priority = Priority.CONTROL) -> None:
        """Queue a message, whole. Raises StreamClosed (nothing queued) if the stream takes no more.

        Tensors are not copied: their bytes may not change before they are sent. A control message that
        is too large for one travels as PREFILL.
        """
        state = self._streams.get(stream)
        if state is None or state.we_ended:
            raise StreamClosed("this side ended it" if state else "the stream is over")
        outgoing = Outgoing(DATA, priority, pack(*messages.encode(message)))
        if priority is Priority.CONTROL and outgoing.left > self.limits.control_message_bytes:
            outgoing.priority = Priority.PREFILL
        self._enqueue(state, outgoing)

    def queued(self, stream: int) -> int:
        """Bytes that wait to be sent on this stream."""
        state = self._streams.get(stream)
        return 0 if state is None else state.queued

    def flushed(self, stream: int) -> bool:
        state = self._streams.get(stream)
        return state is None or not state.queue

    def want_writable(self, stream: int) -> None:
        """Ask for one `Writable`."""
        state = self._streams.get(stream)
        if state is not None:
            state.wants_writable = True

    def end(self, stream: int) -> None:
        """No more messages from this side, behind those that are queued."""
        state = self._streams.get(stream)
        if state is not None and not state.we_ended:
            state.we_ended = True
            self._enqueue(state, Outgoing(END, Priority.CONTROL, []))

    def finish(self, stream: int, reason: str) -> None:
        """End it, and reset it behind that unless the other side has ended: nobody reads it any more."""
        self.end(stream)
        state = self._streams.get(stream)
        if state is not None and not state.they_ended:
            self._enqueue(state, Outgoing(RESET, Priority.CONTROL, [_reason(reason)]))

    def reset(self, stream: int, reason: str) -> None:
        """Over at once, in both directions; what was queued is not sent."""
        state = self._streams.get(stream)
        if state is not None:
            self._remove(state)
            self._push(RESET, stream, _reason(reason))

    def consumed(self, received: MessageReceived) -> bool:
        """The application has taken a message. True: there is something to send now."""
        state = self._streams.get(received.stream)
        if state is None:
            return False
        self._hold(state, -received.cost)
        window = 0 if received.control else 1
        state.credits[window].unread -= received.cost
        return self._settle(state, window)

    def ping(self, now: float) -> int:
        """Measure the round trip: `RoundTrip` with this token follows."""
        self._ping_count += 1
        self._pinged_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        if len(self._pings) >= MAX_PINGS:
            del self._pings[next(iter(self._pings))]
        self._pings[self._ping_count] = now
        self._push(PING, 0, _U64.pack(self._ping_count))
        return self._ping_count

    def close(self, reason: str) -> None:
        """Say goodbye. What was queued on streams is not sent."""
        self._close(None, reason, tell=True)

    def lost(self, reason: str) -> None:
        """The socket is gone."""
        if self._handshake is not None:
            self._close(HandshakeError(f"the connection was lost during the handshake: {reason}"), reason)
        else:
            self._close(None, reason)

    # ---- what the shell does

    def events(self) -> list[Event]:
        happened, self._events = self._events, []
        return happened

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def streams(self) -> int:
        """How many are open, in either direction."""
        return len(self._streams)

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        if self._closed:
            return None
        if self._handshake is not None:
            return self._opened_at + self.limits.handshake_s
        times = [self._pinged_at, self._looked_at]
        due = [at + self.limits.ping_every_s for at in times]
        return min(due + [at for at in (self._dead_at(), self._record_due_at()) if at is not None])

    def tick(self, now: float) -> None:
        if self._closed:
            return
        if self._handshake is not None:
            if now >= self._opened_at + self.limits.handshake_s:
                text = f"no handshake within {self.limits.handshake_s:g} s; is that a LayerSwarm peer?"
                self._close(HandshakeError(text), text)
            return
        dead_at, due_at = self._dead_at(), self._record_due_at()
        if dead_at is not None and now >= dead_at:
            self._close(None, f"nothing heard for {self.limits.dead_after_s:g} s")
            return
        if due_at is not None and now >= due_at:
            if now < due_at + OUR_LATENESS_S:
                text = f"a record that began {self.limits.record_s:g} s ago isn't whole"
                self._close(FramingError(text), text, tell=True)
                return
            self._begun_at = now  # it was we who slept, and the rest may be waiting for us
        if now >= self._looked_at + self.limits.ping_every_s:
            self._look(now)
        if now >= self._pinged_at + self.limits.ping_every_s:
            self.ping(now)

    def _look(self, now: float) -> None:
        """Reset the streams whose messages stand still."""
        self._looked_at = now
        limits = self.limits
        least = int(limits.slowest_bytes_per_s * limits.ping_every_s)
        for state in list(self._streams.values()):
            state.look(least)
            if state.still_in * limits.ping_every_s >= limits.stalled_s:
                self._fail_stream(state, f"a message stood still for {limits.stalled_s:g} s")
            elif state.still_out * limits.ping_every_s >= limits.stalled_s:
                self._fail_stream(state, f"the other side took nothing for {limits.stalled_s:g} s")

    def receive_data(self, data: Buffer, now: float) -> None:
        if self._closed:
            return
        self._unanswered_since = None
        try:
            if self._handshake is not None:
                data = self._shake_hands(data, now)
            if data:
                self._read_records(data, now)
        except SwarmError as error:
            self._buffer = bytearray()
            self._close(error, str(error), tell=isinstance(error, FramingError | Flooded))

    @property
    def missing(self) -> int:
        """Bytes until the record that has begun to arrive is whole; 0 if none has."""
        begun = self._buffer
        return 2 + (begun[0] << 8 | begun[1]) - len(begun) if len(begun) >= 2 else 0

    def data_to_send(self) -> bytes:
        """About one record, of the best priority; b"" when nothing may leave."""
        if self._handshake is not None:
            return self._handshake.data_to_send()
        out: list[bytes] = []
        if self._hello:  # the last handshake message, in front of the first record
            out.append(self._hello)
            self._hello = b""
        size = 0
        while size < COALESCE_BYTES:
            frame = self._next_frame()
            if frame is None:
                break
            sealed = self._sender.encrypt(frame)
            out += (_LENGTH.pack(len(sealed)), sealed)
            size += len(sealed)
        return b"".join(out)

    # ---- receiving

    def _shake_hands(self, data: Buffer, now: float) -> bytes:
        """Returns what came behind the handshake."""
        handshake = self._handshake
        assert handshake is not None
        handshake.receive(data)
        if handshake.done is None:
            self._shaken += len(data)
            if self._shaken > self.limits.handshake_bytes:
                raise HandshakeError(f"a handshake of over {self.limits.handshake_bytes} bytes")
            return b""
        done = handshake.done
        self.peer, self._sender, self._receiver = done.peer, done.sender, done.receiver
        if self._open_account is not None:
            self._account = self._open_account(done.peer, now)
        self._hello = handshake.data_to_send()
        self._handshake = None
        self._events.append(Secured(done.peer))
        self.ping(now)
        return done.leftover

    def _read_records(self, data: Buffer, now: float) -> None:
        whole: Buffer = data
        if self._buffer:
            self._buffer += data
            whole = self._buffer
        view = memoryview(whole)
        at, end = 0, len(view)
        while end - at >= 2:
            stop = at + 2 + (view[at] << 8 | view[at + 1])
            if stop > end:
                break
            self._read_frame(self._unseal(view[at + 2 : stop]), now)
            at = stop
            if self._closed:
                return
        if at or whole is not self._buffer:
            self._buffer = bytearray(view[at:])
            self._begun_at = now if self._buffer else None

    def _unseal(self, record: memoryview) -> bytes:
        try:
            return self._receiver.decrypt(record)
        except InvalidTag:
            raise FramingError("a record was changed on its way") from None

    def _read_frame(self, frame: bytes, now: float) -> None:
        if len(frame) < HEADER.size:
            raise FramingError(f"a frame of {len(frame)} bytes, {HEADER.size} are the least")
        kind, flags, number = HEADER.unpack_from(frame)
        self._now = now
        if kind != DATA and not self._within_quota(number) and kind == PING:
            return
        if kind == DATA:
            self._on_data(number, flags, memoryview(frame)[HEADER.size :])
        elif kind == WINDOW:
            self._on_window(number, flags, frame[HEADER.size :])
        elif kind == END:
            self._on_end(number)
        elif kind == RESET:
            self._on_reset(number, frame[HEADER.size :])
        elif kind == PING:
            self._on_ping(frame[HEADER.size :])
        elif kind == PONG:
            self._on_pong(frame[HEADER.size :], now)
        elif kind == CLOSE:
            self._close(None, _text(frame[HEADER.size :]))

    def _stream_of(self, number: int) -> StreamState | None:
        """The stream that a frame is for, opened if this is its first; None if it is over."""
        state = self._streams.get(number)
        if state is not None:
            return state
        if number & 1 != self._remote_parity:
            if number >= self._next_id or number == 0:
                raise FramingError(f"a frame for stream {number}, which was never opened")
            return None
        return self._open_remote(number) if self._first_frame(number) else None

    def _first_frame(self, number: int) -> bool:
        """Ids start in order, but a later stream's first frame may overtake an earlier's."""
        if number in self._late:
            self._late.discard(number)
            return True
        if number <= self._highest_remote:
            return False
        skipped = range(self._highest_remote + 2, number, 2)
        if len(skipped) + len(self._late) > self.limits.max_streams:
            raise FramingError(f"stream {number} follows stream {self._highest_remote}")
        self._late.update(skipped)
        self._highest_remote = number
        return True

    def _open_remote(self, number: int) -> StreamState | None:
        if len(self._streams) >= 2 * self.limits.max_streams:
            self._within_quota(number)
            self._push(RESET, number, _reason(f"{len(self._streams)} streams are open already"))
            return None
        state = self._streams[number] = StreamState(number, self.limits)
        state.fresh = True
        if not self._hold(state, STREAM_BYTES):
            self._within_quota(number)
            self.reset(number, TOO_MUCH_HELD)
            return None
        self._events.append(StreamOpened(number))
        return state

    def _on_data(self, number: int, flags: int, part: memoryview) -> None:
        state = self._stream_of(number)
        if state is None:
            if self._account is not None and not self._account.wasted(self._now, len(part) + FRAME_COST):
                self._strike("too much is sent on streams that are over")
            return
        priority, last = flags >> 1 & 3, bool(flags & LAST)
        self._check_part(state, priority, last, len(part))
        window = 0 if priority == 0 else 1
        cost = len(part) + FRAME_COST
        if not state.credits[window].arrived(cost):
            raise FramingError(f"stream {number} overran its window")
        state.parts_priority = priority
        state.parts_cost += cost
        if not self._hold(state, cost):
            self._fail_stream(state, TOO_MUCH_HELD)
            return
        if self._held > self.limits.held_bytes:
            self._fail_stream(state, f"this connection already holds {self._held} bytes that nobody took")
            return
        if priority == 0 and not self._within_quota(number):
            self._fail_stream(state, TOO_MANY)
            return
        try:
            self._deliver(state, window, state.assemble(part, last))
        except MessageError as error:
            self._fail_stream(state, str(error))
            return
        self._settle(state, window)

    def _check_part(self, state: StreamState, priority: int, last: bool, size: int) -> None:
        if state.they_ended:
            raise FramingError(f"data on stream {state.number} behind its end")
        if size == 0:
            raise FramingError("an empty part of a message")
        if state.parts is not None and priority != state.parts_priority:
            raise FramingError("the priority changed inside a message")
        if priority == 0 and (not last or size > self.limits.control_message_bytes):
            raise FramingError(
                f"a control message of over {min(size, self.limits.control_message_bytes)} bytes"
            )

    def _deliver(
        self, state: StreamState, window: int, whole: tuple[dict[str, Any], dict[str, RawTensor]] | None
    ) -> None:
        if whole is None:
            return
        cost, state.parts_cost = state.parts_cost, 0
        try:
            message = messages.decode(*whole)
            if window and not isinstance(message, UNCOUNTED) and not self._within_quota(state.number):
                raise MessageError(TOO_MANY)  # a message costs what it costs, whatever priority it claims
        except UnknownKind:
            self._hold(state, -cost)
            self._answer_unsupported(state, str(whole[0].get("kind"))[:80])
            return
        if state.fresh:
            state.fresh = False
            state.max_message_bytes = self._first_limits.get(type(message), state.max_message_bytes)
        state.credits[window].unread += cost
        self._events.append(MessageReceived(state.number, message, cost, window == 0))

    def _answer_unsupported(self, state: StreamState, kind: str) -> None:
        if state.we_ended:
            return
        if state.queued > self.limits.send_queue_bytes:
            self._fail_stream(state, "too many unknown messages")
            return
        self.send(state.number, Unsupported(kind))

    def _on_window(self, number: int, flags: int, payload: bytes) -> None:
        if len(payload) != _U32.size:
            raise FramingError("a window frame of the wrong size")
        state = self._streams.get(number)
        if state is None:
            return
        window = 0 if flags & CONTROL_WINDOW else 1
        state.windows[window] += _U32.unpack(payload)[0]
        if state.windows[window] > 1 << 40:
            raise FramingError(f"the window of stream {number} grew without bound")
        self._schedule(state)

    def _on_end(self, number: int) -> None:
        state = self._stream_of(number)
        if state is None or state.they_ended:
            return
        if state.parts is not None:
            self._fail_stream(state, "the stream ended inside a message")
            return
        state.they_ended = True
        self._events.append(StreamEnded(number))
        self._remove_if_over(state)

    def _on_reset(self, number: int, payload: bytes) -> None:
        state = self._streams.get(number)
        if state is None:
            if number & 1 == self._remote_parity:
                self._first_frame(number)  # opened and gone: nobody needs to know
            return
        self._remove(state)
        self._events.append(StreamReset(number, _text(payload)))

    def _on_ping(self, payload: bytes) -> None:
        if len(payload) != _U64.size:
            raise FramingError("a ping of the wrong size")
        self._push(PONG, 0, payload)

    def _on_pong(self, payload: bytes, now: float) -> None:
        token = int.from_bytes(payload[:8], "big")
        sent_at = self._pings.pop(token, None)
        if sent_at is not None:
            self._events.append(RoundTrip(max(now - sent_at, 0.0), token))

    # ---- sending

    _sender: CipherState
    _receiver: CipherState
    _hello: bytes = b""

    def _enqueue(self, state: StreamState, outgoing: Outgoing) -> None:
        state.queue.append(outgoing)
        state.queued += outgoing.left
        self._schedule(state)

    def _schedule(self, state: StreamState) -> None:
        if not state.scheduled and state.next_size() is not None:
            state.scheduled = True
            self._ready[state.queue[0].priority].append(state)

    def _push(self, kind: int, stream: int, payload: bytes) -> None:
        """A frame that goes before all streams."""
        if len(self._urgent) >= MAX_URGENT and not self._closed:
            text = "the other side sends but doesn't read"
            self._close(FramingError(text), text, tell=True)
            return
        self._urgent.append(HEADER.pack(kind, 0, stream) + payload)

    def _next_frame(self) -> bytes | None:
        if self._urgent:
            return self._urgent.popleft()
        while self._owed:
            number, window = self._owed.popitem()[0]
            state = self._streams.get(number)
            due = 0 if state is None else state.credits[window].grant()
            if due:
                return HEADER.pack(WINDOW, CONTROL_WINDOW if window == 0 else 0, number) + _U32.pack(due)
        for ready in self._ready:
            while ready:
                state = ready.popleft()
                state.scheduled = False
                size = state.next_size()
                if size is not None and state.number in self._streams:
                    return self._cut_frame(state, size)
        return None

    def _cut_frame(self, state: StreamState, size: int) -> bytes:
        first = state.queue[0]
        parts = first.take(size)
        state.queued -= size
        state.moved_out += size
        flags = 0
        if first.kind == DATA:
            state.windows[first.priority > 0] -= size + FRAME_COST
            flags = first.priority << 1 | (LAST if not first.left else 0)
        if not first.left:
            state.queue.popleft()
        if first.kind == RESET or (first.kind == END and state.they_ended):
            self._complete(state)
        self._schedule(state)
        self._tell_writable(state)
        return b"".join((HEADER.pack(first.kind, flags, state.number), *parts))

    def _tell_writable(self, state: StreamState) -> None:
        if state.wants_writable and (not state.queue or state.queued < self.limits.send_queue_bytes):
            state.wants_writable = False
            self._events.append(Writable(state.number))

    # ---- keeping the books

    def worked(self, now: float, seconds: float) -> float:
        """So much time went into reading what came. Returns for how many seconds to read nothing more."""
        return 0.0 if self._account is None or self._closed else self._account.worked(now, seconds)

    def _within_quota(self, number: int) -> bool:
        """Count what is cheap to send, for stream `number` or none. Raises Flooded when it is too much too often."""
        answer = number != 0 and number & 1 != self._remote_parity
        if self._account is None or self._account.control(self._now, answer):
            return True
        self._strike(TOO_MANY)
        return False

    def _strike(self, what: str) -> None:
        assert self._account is not None
        if not self._account.strike(self._now):
            raise Flooded(f"{what}, again and again")

    def _settle(self, state: StreamState, window: int) -> bool:
        if state.they_ended or not state.credits[window].due():
            return False
        self._owed[state.number, window] = None
        return True

    def _hold(self, state: StreamState, change: int) -> bool:
        """False: those who hold much hold too much by now."""
        state.held += change
        self._held += change
        return self._account is None or self._account.hold(change)

    def _fail_stream(self, state: StreamState, reason: str) -> None:
        self.reset(state.number, reason)
        self._events.append(StreamReset(state.number, reason))

    def _remove_if_over(self, state: StreamState) -> None:
        if state.they_ended and state.we_ended and not state.queue:
            self._complete(state)

    def _complete(self, state: StreamState) -> None:
        self._remove(state)
        self._events.append(StreamOver(state.number))

    def _remove(self, state: StreamState) -> None:
        self._hold(state, -state.held)
        self._streams.pop(state.number, None)
        state.queue.clear()
        state.queued = 0
        if state.wants_writable:
            self._events.append(Writable(state.number))

    def _record_due_at(self) -> float | None:
        return None if self._begun_at is None else self._begun_at + self.limits.record_s

    def _dead_at(self) -> float | None:
        """Counted from a ping, so that our own sleep isn't taken for the other side's silence."""
        if self._unanswered_since is None:
            return None
        return self._unanswered_since + self.limits.dead_after_s - self.limits.ping_every_s

    def _close(self, error: SwarmError | None, reason: str, tell: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._urgent.clear()
        self._owed.clear()
        for ready in self._ready:
            ready.clear()
        self._streams.clear()
        self._held = 0
        if self._account is not None:
            self._account.close()
        if tell and self._handshake is None:
            self._push(CLOSE, 0, _reason(reason))
        self._events.append(Closed(error, reason))


def _reason(text: str) -> bytes:
    return text.encode()[:MAX_REASON]


def _text(payload: bytes) -> str:
    return codecs.printable(payload[:MAX_REASON].decode(errors="replace"))
