"""One stream of a connection: what it holds in each direction, and how much more may come. Pure.

Each stream has two windows in each direction, one for control messages and one for all others, so that a full
stream still answers. A window counts payload and FRAME_COST for each frame. `wire.py` says how that travels.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from swarm.errors import MessageError
from swarm.packing import Buffer, Head, Specs, cut_tensors, read_head
from swarm.tensors import RawTensor

Admit = Callable[[Mapping[str, Any], Specs], None]

DATA, WINDOW, END, RESET, PING, PONG, CLOSE = range(7)
HEADER = struct.Struct(">BBI")
MAX_PLAINTEXT = 65_519  # + 16 bytes of tag = the largest u16
MAX_PART = MAX_PLAINTEXT - HEADER.size
FRAME_COST = 64  # what a frame costs beside its payload, in windows: many tiny messages aren't free


class Priority(IntEnum):
    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


@dataclass(frozen=True)
class Limits:
    """How much one connection may hold. Both ends must agree on the two windows."""

    max_message_bytes: int = 1 << 20  # per stream; raise it where more is expected
    window_bytes: int = 1 << 20  # 20 MB/s over a round trip of 50 ms
    control_window_bytes: int = 256 << 10  # some thousand small messages
    control_message_bytes: int = 24 << 10  # a full map and a few ids; larger ones travel as PREFILL
    send_queue_bytes: int = 1 << 20  # per stream; senders wait beyond
    max_streams: int = 4096  # a stream costs about 1 KiB; a busy peer has some hundred sessions
    held_bytes: int = 256 << 20  # received and not yet taken, over all streams: no peer may fill the memory
    handshake_s: float = 5.0  # three messages; slow links take under one second
    handshake_bytes: int = 2 << 10  # all of it takes 700
    ping_every_s: float = 5.0
    dead_after_s: float = 15.0  # without a byte, although pinged
    record_s: float = 15.0  # for one record to arrive once it has begun: 4 KB a second
    slowest_bytes_per_s: int = 1 << 10  # of a message that is on its way; slower counts as standing still
    stalled_s: float = 60.0  # standing still; a bulk message may wait that long for more urgent ones


DEFAULT_LIMITS = Limits()


class Credit:
    """The receiving end of one window. `due` is what may be granted now."""

    __slots__ = ("_granted", "_received", "_size", "unread")

    def __init__(self, size: int) -> None:
        self._size, self._granted, self._received = size, size, 0
        self.unread = 0  # of finished messages that the application hasn't taken

    def arrived(self, cost: int) -> bool:
        """False: the other side overran its window."""
        self._received += cost
        return self._received <= self._granted

    def due(self) -> int:
        """Worth a frame only in quarters; so with half a window unread, a quarter is always open."""
        due = self._received + max(self._size - self.unread, 0) - self._granted
        return due if due >= self._size >> 2 else 0

    def grant(self) -> int:
        due = self.due()
        self._granted += due
        return due


class Outgoing:
    """One entry of a stream's send queue: a message, or the END or RESET behind all messages."""

    __slots__ = ("buffers", "kind", "left", "priority")

    def __init__(self, kind: int, priority: int, buffers: list[Buffer]) -> None:
        self.kind, self.priority = kind, priority
        self.left = sum(map(len, buffers))
        self.buffers = deque(buffers)

    def take(self, size: int) -> list[Buffer]:
        """The next `size` bytes, as views."""
        self.left -= size
        taken: list[Buffer] = []
        while size:
            first = self.buffers[0]
            if len(first) <= size:
                taken.append(self.buffers.popleft())
                size -= len(first)
            else:
                view = memoryview(first)
                taken.append(view[:size])
                self.buffers[0] = view[size:]
                size = 0
        return taken


class StreamState:
    """Both directions of one stream. Index 0 of a pair is for control messages, 1 for all others."""

    def __init__(self, number: int, limits: Limits) -> None:
        self.number = number
        self.max_message_bytes = limits.max_message_bytes
        self.admit: Admit | None = None
        self.fresh = False  # opened by the other side, and its first message isn't here yet
        windows = (limits.control_window_bytes, limits.window_bytes)
        self.credits = (Credit(windows[0]), Credit(windows[1]))
        self.windows = list(windows)  # what we may still send
        self.queue: deque[Outgoing] = deque()
        self.queued = 0  # bytes in it
        self.scheduled = False  # in one of the connection's ready queues
        self.wants_writable = False
        self.we_ended = self.they_ended = False
        self.held = 0  # bytes received and not yet taken
        self.moved_in = self.moved_out = 0  # bytes of unfinished messages since the last look
        self.was_waiting = False  # something was to be sent at the last look
        self.still_in = self.still_out = 0  # looks in a row at which too little had moved
        self.parts: bytearray | None = None  # of the message that is arriving in parts
        self.parts_priority = 0
        self.parts_cost = 0
        self.head: Head | None = None

    def next_size(self) -> int | None:
        """Bytes of the queue's head that may leave now; None if there is nothing or no window."""
        if not self.queue:
            return None
        first = self.queue[0]
        if first.kind != DATA:
            return first.left
        room = self.windows[first.priority > 0] - FRAME_COST
        size = min(first.left, MAX_PART, room)
        # A control message never leaves in parts, and slivers at the end of a window aren't worth a record.
        least = first.left if first.priority == 0 else min(first.left, 1024)
        return size if size >= least else None

    def look(self, least: int) -> None:
        """Has a message that is on its way moved by `least` bytes since the last look? Called every few seconds.

        Its other side may be one that sends a byte a second to keep our memory, or that takes nothing.
        """
        self.still_in = self.still_in + 1 if self.parts is not None and self.moved_in < least else 0
        slow = bool(self.queue) and self.was_waiting and self.moved_out < least
        self.still_out = self.still_out + 1 if slow else 0
        self.was_waiting = bool(self.queue)
        self.moved_in = self.moved_out = 0

    def check_head(self) -> None:
        """Refuse the message as soon as its map is here, before its tensors are. Raises MessageError."""
        assert self.head is not None
        if self.head.total > self.max_message_bytes:
            raise MessageError(
                f"a message of {self.head.total} bytes, this stream takes {self.max_message_bytes}"
            )
        if self.admit is not None:
            self.admit(self.head.values, self.head.specs)

    def assemble(self, part: memoryview, last: bool) -> tuple[dict[str, Any], dict[str, RawTensor]] | None:
        """Add a part; the message's map and tensors if it was the last. Raises MessageError."""
        data: bytearray | memoryview = part
        self.moved_in += len(part)
        if self.parts is not None:
            self.parts += part
            data = self.parts
        elif not last:
            data = self.parts = bytearray(part)
        if self.head is None:
            self.head = read_head(data)
            if self.head is not None:
                self.check_head()
            elif last:
                raise MessageError("the message ends inside its map")
        if self.head is not None and len(data) > self.head.total:
            raise MessageError(f"the message is longer than the {self.head.total} bytes that its map says")
        if not last:
            return None
        head, self.head, self.parts = self.head, None, None
        assert head is not None
        return head.values, cut_tensors(head, data)
