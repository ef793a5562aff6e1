"""SHELL of one session: drives the `session.Session` core over the node's streams.

Two layers: `_HopChannel` is one stream to one hop, `SessionDriver` carries messages between channels and core and
keeps its one timer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from routing.spans import Hop
from swarm.effects import Ended, Failed, Grew, HopKey, Release, Repaired, RepairStarted, Send
from swarm.errors import PeerFailed, SwarmError
from swarm.link import Stream
from swarm.messages import Message
from swarm.node import Node
from swarm.race import race
from swarm.session import Session

log = logging.getLogger("swarm.driver")

FAREWELL_S = 1.0  # how long a cancelled generation waits for its `Close`s to be handed over


class _HopChannel:
    """One stream to one hop, opened on the first send, with its outbox and its reader."""

    def __init__(self, key: HopKey, driver: SessionDriver) -> None:
        self.key = key
        self._driver = driver
        self._outbox: deque[Message | None] = deque()  # None: end the stream; bounded by the core
        self._wake = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"hop {key.peer[:8]}/{key.start}")

    def send(self, message: Message | None) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def _run(self) -> None:
        node = self._driver.node
        try:
            stream = (await node.link(self.key.peer)).open_stream()
            try:
                await race(self._write(stream), self._read(stream))
            finally:
                stream.reset("left")  # nothing happens where it ended in order
        except SwarmError as error:
            gone = self.key.peer not in node.transport.links
            reason = error.reason if isinstance(error, PeerFailed) else str(error)
            self._driver.channel_lost(self, reason, gone)
        except Exception as error:
            self._driver.crashed(error)

    async def _write(self, stream: Stream) -> None:
        while True:
            while self._outbox:
                message = self._outbox.popleft()
                if message is None:
                    return await stream.end()
                await stream.send(message)
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, stream: Stream) -> None:
        while True:
            self._driver.received(self.key, await stream.receive())


class SessionDriver:
    """Carries messages between one `Session` core and its hop channels, and keeps its timer."""

    def __init__(self, session: Session, node: Node) -> None:
        self.node = node
        self.arrived: deque[Grew] = deque()  # bounded by the credit that the reader grants
        self.repairs: deque[RepairStarted | Repaired] = deque()
        self.error: SwarmError | None = None
        self.crash: BaseException | None = None
        self.ended = False
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._channels: dict[HopKey, _HopChannel] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._session.hops

    @property
    def now(self) -> float:
        return self._loop.time()

    def start(self) -> None:
        self._drive(self._session.start)

    def received(self, key: HopKey, message: Message) -> None:
        self._drive(self._session.receive, key, message)

    def channel_lost(self, channel: _HopChannel, reason: str, peer_gone: bool) -> None:
        if self._channels.get(channel.key) is channel:
            del self._channels[channel.key]
            self._drive(functools.partial(self._session.lost, peer_gone=peer_gone), channel.key, reason)

    def crashed(self, error: Exception) -> None:
        """A bug of ours: goes to the caller as it is, never retried, and frees the peers."""
        if self.crash is not None or self.ended:
            log.error("a hop's channel failed after the end", exc_info=error)
            return
        self.crash = error
        self.cancel()

    def read(self, upto: int) -> None:
        self._drive(self._session.read, upto)

    def rewind(self, position: int, new_ids: tuple[int, ...], limit: int) -> None:
        """What arrived and wasn't read is void. The caller has checked the numbers."""
        self.arrived.clear()
        self._drive(functools.partial(self._session.rewind, limit=limit), position, new_ids)

    def cancel(self) -> None:
        self._drive(self._session.cancel)

    async def news(self) -> None:
        """Wait until ids, a repair, an error or the end has arrived."""
        await self._news.wait()
        self._news.clear()

    async def farewell(self) -> None:
        """Let the last messages (`Close`) leave, then stop everything."""
        tasks = [channel.task for channel in self._channels.values()] + [
            task for task in self._parting if task is not asyncio.current_task()
        ]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=FAREWELL_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def abandon(self) -> None:
        """Cancel from wherever the garbage collector runs, without waiting."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_and_leave)

    def _cancel_and_leave(self) -> None:
        self.cancel()
        leaving = self._loop.create_task(self.farewell())
        self._parting.add(leaving)  # keeps a reference until it is done
        leaving.add_done_callback(self._parting.discard)

    def _tick(self) -> None:
        self._timer = None
        self._drive(self._session.tick)

    def _drive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Tell the core, do what it wants done, and re-arm the one timer."""
        if self.ended:
            return
        try:
            call(*arguments, self.now)
            for effect in self._session.drain():
                self._perform(effect)
        except Exception as error:
            if self.crash is None:
                self.crashed(error)
            else:  # even ending it failed
                self.ended = True
        self._rearm()
        if self.arrived or self.repairs or self.ended:
            self._news.set()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._session.deadline is not None and not self.ended:
            self._timer = self._loop.call_at(self._session.deadline, self._tick)

    def _perform(self, effect: object) -> None:
        match effect:
            case Send(key, message):
                channel = self._channels.get(key)
                if channel is None:
                    channel = self._channels[key] = _HopChannel(key, self)
                channel.send(message)
            case Release(key):
                self._release(key)
            case Grew():
                self.arrived.append(effect)
            case RepairStarted() | Repaired():
                self.repairs.append(effect)
            case Failed(error):
                self.error = error
                self.ended = True
            case Ended():
                self.ended = True
            case _:
                raise AssertionError(effect)

    def _release(self, key: HopKey) -> None:
        channel = self._channels.pop(key, None)
        if channel is not None:
            channel.send(None)
            self._parting.add(channel.task)
            channel.task.add_done_callback(self._parting.discard)
