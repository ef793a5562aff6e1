"""Somebody with an identity of its own who speaks to the peers of a tiny swarm by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import pytest

from routing.spans import Span
from swarm.addresses import parse_address
from swarm.errors import StreamClosed
from swarm.flow import DATA, Outgoing, Priority
from swarm.identity import Identity, PeerId
from swarm.link import Link, Stream
from swarm.messages import HopRef, Message, Open, Opened, Resume, Step, StepsLink, TokensLink
from swarm.packing import pack
from swarm.tensors import RawTensor, ids_tensor
from swarm.transport import Transport
from tests.tiny_swarm import WITHIN_S, TinySwarm

T = TypeVar("T")


async def within(work: Awaitable[T]) -> T:
    async with asyncio.timeout(WITHIN_S):
        return await work


def open_message(
    peers: TinySwarm, name: str, session: bytes, positions: int = 64, epoch: int = 1, **changes: Any
) -> Open:
    """A chain of this one peer."""
    me = ref(peers, name)
    values: dict[str, Any] = {
        "session": session, "epoch": epoch, "span": peers.peers[name].span, "previous": None, "next": None,
        "first": me, "last": me, "fingerprint": peers.peers[name].source.fingerprint, "reserve": positions,
    }  # fmt: skip
    return Open(**(values | changes))


def ref(peers: TinySwarm, name: str, start: int | None = None) -> HopRef:
    """This peer as another hop names it, with its signed descriptor."""
    peer = peers.peers[name]
    at = peer.span.start if start is None else start
    return HopRef(peer.transport.identity.peer_id, at, peer.node.descriptor_bytes)


def hidden(rows: int, width: int = 32, dtype: str = "float32", value: float = 0.0) -> dict[str, RawTensor]:
    import numpy as np

    data = np.full((rows, width), value, dtype="<f4").tobytes()
    return {"hidden": RawTensor(dtype, (rows, width), data)}


class Stranger:
    def __init__(self, peers: TinySwarm) -> None:
        self.peers = peers
        self.transport = Transport(Identity.ephemeral())

    @property
    def me(self) -> PeerId:
        return self.transport.identity.peer_id

    async def link(self, name: str) -> Link:
        peer = self.peers.peers[name].transport.identity.peer_id
        address = parse_address(f"{peer}@{self.peers.address_of(name)}")
        return await within(self.transport.dial(address))

    async def say(self, name: str, *messages: Message) -> Stream:
        stream = (await self.link(name)).open_stream()
        for message in messages:
            await stream.send(message)
        return stream

    async def answer(self, name: str, *messages: Message) -> Message:
        return await within((await self.say(name, *messages)).receive())

    async def end(self, name: str, *messages: Message) -> str:
        """Why the stream was ended."""
        return await self.why_ended(await self.say(name, *messages))

    async def end_of_raw(
        self, name: str, values: Mapping[str, Any], tensors: Mapping[str, RawTensor], priority: Priority
    ) -> str:
        """Why the stream was ended on which a message with these fields came, right or wrong."""
        link = await self.link(name)
        stream = link.open_stream()
        state = link.connection._streams[stream.id]
        link.connection._enqueue(state, Outgoing(DATA, priority, pack(values, tensors)))
        link.transmit()
        return await self.why_ended(stream)

    async def why_ended(self, stream: Stream) -> str:
        with pytest.raises(StreamClosed) as closed:
            while True:
                await within(stream.receive())
        return closed.value.reason

    async def chained(self, session: bytes, reserve: int = 64, resume_at: int = 0) -> Stream:
        """Opens b for a chain in which the stranger is the hop before it, so that its steps are read."""
        c, me = ref(self.peers, "c"), HopRef(self.me, 0, b"")
        fingerprint = self.peers.peers["b"].source.fingerprint
        message = Open(session, 1, Span(2, 4), me, c, me, c, fingerprint=fingerprint, reserve=reserve)
        stream = await self.say("b", message)
        assert isinstance(await within(stream.receive()), Opened)
        await stream.send(Resume(1, 0, 0, resume_at))
        return stream

    def steps(self, session: bytes, *steps: Step, epoch: int = 1) -> list[Message]:
        return [StepsLink(self.me, session, 2, epoch), *steps]

    async def last(self, session: bytes, reserve: int = 64) -> Stream:
        """Opens a for a chain in which the stranger is the last hop, so that its tokens are read."""
        a, b, me = ref(self.peers, "a"), ref(self.peers, "b"), HopRef(self.me, 4, b"")
        fingerprint = self.peers.peers["a"].source.fingerprint
        stream = await self.say(
            "a", Open(session, 1, Span(0, 2), None, b, a, me, fingerprint=fingerprint, reserve=reserve)
        )
        assert isinstance(await within(stream.receive()), Opened)
        await stream.send(Resume(1, 0, 0, 0, ids=ids_tensor([1])))
        return stream

    def tokens_link(self, session: bytes, epoch: int = 1) -> TokensLink:
        return TokensLink(self.me, session, 0, epoch)

    async def close(self) -> None:
        await self.transport.close()
