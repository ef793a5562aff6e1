"""Two sans-IO connections and the cable between them, with the bytes carried by hand."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgpack

from swarm.flow import DEFAULT_LIMITS, Limits
from swarm.identity import Identity
from swarm.messages import Message
from swarm.wire import Connection, Event, MessageReceived, Secured

ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(range(1, 33)))


class Pair:
    """Two connections and the cable between them."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        rng = random.Random(11).randbytes
        self.a = Connection("initiator", ALICE, "main", limits=limits, rng=rng)
        self.b = Connection("responder", BOB, "main", limits=limits, rng=rng)
        self.seen: dict[Connection, list[Event]] = {self.a: [], self.b: []}
        self.now = 0.0

    def carry(self, source: Connection, target: Connection) -> bool:
        """One transmission."""
        data = source.data_to_send()
        if data:
            target.receive_data(data, self.now)
        self.collect()
        return bool(data)

    def collect(self) -> None:
        for side in (self.a, self.b):
            self.seen[side] += side.events()

    def run(self) -> Pair:
        while self.carry(self.a, self.b) | self.carry(self.b, self.a):
            pass
        return self

    def messages(self, side: Connection, stream: int | None = None) -> list[Message]:
        return [
            event.message
            for event in self.seen[side]
            if isinstance(event, MessageReceived) and stream in (None, event.stream)
        ]

    def events(self, side: Connection, kind: type[Any]) -> list[Any]:
        return [event for event in self.seen[side] if isinstance(event, kind)]

    def take(self, side: Connection) -> None:
        """The application takes everything that has arrived."""
        for event in self.seen[side]:
            if isinstance(event, MessageReceived):
                side.consumed(event)
        self.seen[side] = [e for e in self.seen[side] if not isinstance(e, MessageReceived)]

    def forge(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """A frame that no honest sender makes, from a to b."""
        sealed = self.a._sender.encrypt(struct.pack(">BBI", kind, flags, stream) + payload)
        self.b.receive_data(struct.pack(">H", len(sealed)) + sealed, self.now)
        self.collect()


def connected(limits: Limits = DEFAULT_LIMITS) -> Pair:
    pair = Pair(limits).run()
    assert pair.events(pair.a, Secured) == [Secured(BOB.peer_id)]
    assert pair.events(pair.b, Secured) == [Secured(ALICE.peer_id)]
    return pair


def framed(value: object) -> bytes:
    """A whole message without tensors, of whatever map."""
    body = msgpack.packb(value)
    return struct.pack(">H", len(body)) + body
