"""A session's way to the next hop, and whether it may be taken.

Used by `server.py`'s runs: one `Outbound` an epoch, made when the core asks for a link and closed with the epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from swarm.errors import LinkFailed, MessageError, PeerFailed, SendQueueFull, StreamClosed, SwarmError
from swarm.flow import Priority
from swarm.identity import PeerId
from swarm.link import Stream
from swarm.messages import HopRef, Message, Open, Prepare, Step, StepsLink, Tokens, TokensLink
from swarm.race import race
from swarm.records import open_descriptor

if TYPE_CHECKING:
    from peer.server import HopRun, Server, Serving

log = logging.getLogger("swarm.server")


def check_target(message: Open | Prepare, me: PeerId, serving: Serving) -> None:
    """Only a descriptor signed by the hop that it names may make us dial, and only one that serves what we would
    send it. Raises MessageError: else a client could make us send its neighbours what they can't take."""
    target = message.next or message.first
    if target.peer == me:
        return
    found = open_descriptor(target.descriptor)
    if found.peer != target.peer:
        raise MessageError(f"the descriptor of hop {target.peer[:8]} isn't signed by that peer")
    if found.fingerprint != serving.fingerprint or target.start not in found.span:
        raise MessageError(f"hop {target.peer[:8]} doesn't serve layer {target.start} of this model")
    if found.dtype and found.dtype != serving.dtype:
        raise MessageError(f"hop {target.peer[:8]} takes hidden states as {found.dtype}, here they are {serving.dtype}")


class Outbound:
    """One epoch's way to the next hop (from the last hop: to the first), which may be on this very peer.

    Messages leave in order. `link_up` once the way stands, `link_down` when it can't be made or breaks.
    """

    def __init__(self, server: Server, run: HopRun, epoch: int, to: HopRef) -> None:
        self._server, self._run, self._epoch, self._to = server, run, epoch, to
        self._queue: deque[tuple[Message, Priority]] = deque()  # bounded by the reservation: at most a whole replay
        self._wake = asyncio.Event()
        self._stream: Stream | None = None
        self._task = asyncio.create_task(self._carry(), name=f"outbound to {to.peer[:8]}")

    def send(self, message: Message, priority: Priority) -> None:
        if self._stream is not None and not self._queue:
            try:
                self._stream.send_nowait(message, priority)  # the usual case: no other task has to wake
                return
            except SendQueueFull:
                pass
            except SwarmError:
                return  # `_carry` is about to say so
        self._queue.append((message, priority))
        self._wake.set()

    def close(self) -> None:
        self._task.cancel()

    async def _carry(self) -> None:
        try:
            if self._to.peer == self._server.me:
                await self._carry_here()
            else:
                await self._carry_there()
        except PeerFailed as error:  # who is or isn't there is none of the client's business, or we scan for it
            log.info("no way to the next hop: %s", error)
            self._run.link_down(self._epoch, "it can't be reached where it says it is")
        except SwarmError as error:
            self._run.link_down(self._epoch, error.reason if isinstance(error, LinkFailed) else str(error))

    async def _carry_there(self) -> None:
        link = await self._server.reach(self._to, self._run.client_link)
        self._run.link_up(self._epoch)
        try:
            await race(self._wake.wait(), link.closed.wait())  # the other hop may not know the session yet
            stream = link.open_stream()
            try:
                await race(self._write(stream), self._read(stream))
            finally:
                self._stream = None
                stream.reset("this epoch is over")
        except StreamClosed as error:
            raise LinkFailed(self._server.me, self._to.peer, error.reason) from None

    async def _write(self, stream: Stream) -> None:
        await stream.send(self._greeting(), Priority.CONTROL)
        self._stream = stream
        while True:
            while self._queue:
                await stream.send(*self._queue[0])
                self._queue.popleft()
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, stream: Stream) -> None:
        """Nothing ever comes back but the end. Raises StreamClosed."""
        while True:
            await stream.receive()

    def _greeting(self) -> Message:
        key = self._run.key
        kind = TokensLink if self._to.start == 0 else StepsLink  # only the last hop's way leads to layer 0
        return kind(key.client, key.session, self._to.start, self._epoch)

    async def _carry_here(self) -> None:
        key = self._run.key
        self._run.link_up(self._epoch)
        await self._wake.wait()
        target = self._server.run_at(key.client, key.session, self._to.start)
        if target is None:
            raise LinkFailed(self._server.me, self._to.peer, "no such session here")
        while True:
            while self._queue:
                if not await target.ready_for(self._epoch):
                    return
                message, _ = self._queue.popleft()
                if isinstance(message, Step):
                    target.receive_step(self._server.me, message, self._server.hidden(message))
                elif isinstance(message, Tokens):
                    target.receive_tokens(self._server.me, message)
            self._wake.clear()
            await self._wake.wait()
