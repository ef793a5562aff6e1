"""A thousand sessions whose clients vanish, one way or another, leave a peer as it was."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from peer.admission import AdmissionConfig, OpenRate
from peer.cache import SessionCache
from peer.hop import HopConfig
from peer.outbound import Outbound
from peer.server import HopRun
from swarm.client import AsyncClient
from swarm.link import Link, Stream
from swarm.messages import Close, Credit, Open, Opened, RefusedMessage, Resume, Tokens, Working
from swarm.tensors import ids_tensor
from tests.stranger import Stranger, open_message, within
from tests.tiny_swarm import Background, TinySwarm, write_model

torch.set_num_threads(1)
SESSIONS, AT_ONCE, WARM = 1000, 20, 100
RESERVE = 512  # of which a part is written
PROMPT = [3 + n % 90 for n in range(40)]
# of the process: a thousand reservations would be 375 MiB. What stays is Python's and the allocator's own slack.
MORE_MEMORY = 40 << 20
WAYS = ("closes mid-step", "closes mid-prompt", "resets the stream", "drops the connection", "falls silent")


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinySwarm]:
    """Its leases are short, so that a test can see them end."""
    folder: Path = tmp_path_factory.mktemp("abandoned")
    background = Background()
    made = TinySwarm(background, folder / "home")
    config = HopConfig(lease_s=4.0, grace_after_s=2.0)
    ada = made.start("ada", write_model(folder / "model", seed=3), "0:6", config=config, max_sessions=5 * AT_ONCE)
    ada.server._opens = OpenRate(AdmissionConfig(opens_per_s=1e6, opens_burst=1e6))
    yield made
    made.close()
    background.close()


@dataclass(frozen=True)
class Held:
    """What the process holds. objects: of the peer's sessions."""

    memory: int
    descriptors: int
    tasks: int
    timers: int
    objects: dict[str, int]

    @staticmethod
    def by(peer: TinySwarm) -> Held:
        async def idle() -> None:
            await peer.peers["ada"].engine.call(lambda: None)

        peer.run(idle())  # a step that was running when its session went has ended
        gc.collect()
        tasks, timers = peer.call(lambda: (len(asyncio.all_tasks(peer.loop)), _timers(peer.loop)))
        kinds = (SessionCache, HopRun, Outbound)
        found = Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)
        return Held(_resident(), len(os.listdir("/proc/self/fd")), tasks, timers, dict(found))


def _timers(loop: asyncio.AbstractEventLoop) -> int:
    """Of sessions: a lease's or a step's."""
    scheduled: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return sum("HopRun" in repr(handle) for handle in scheduled if not handle.cancelled())


def _resident() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Vanishing:
    """One client, a connection of its own, and sessions on it that end in one way."""

    def __init__(self, peer: TinySwarm, number: int) -> None:
        self.peer, self.number = peer, number
        self.stranger = Stranger(peer)

    async def run(self, sessions: int, way: str) -> None:
        link = await self.stranger.link("ada")
        await asyncio.gather(*(self._session(link, index, way) for index in range(sessions)))
        if way == "drops the connection":
            link.abort()
        if way != "falls silent":
            await self.close()

    async def close(self) -> None:
        await self.stranger.close()

    async def _session(self, link: Link, index: int, way: str) -> None:
        session = self.number.to_bytes(8, "big") + index.to_bytes(8, "big")
        stream = await self._opened(link, open_message(self.peer, "ada", session, RESERVE))
        ids, most = ids_tensor(PROMPT), len(PROMPT) + 12
        await stream.send(Resume(1, 0, 0, len(PROMPT) - 1, 0, credit=most, limit=most, ids=ids))
        if way == "closes mid-prompt":
            await stream.send(Close(1))
            return
        while True:
            message = await within(stream.receive())
            if isinstance(message, Tokens):
                break
            assert isinstance(message, Working), message
        await stream.send(Credit(1, most, len(PROMPT) + 1))
        if way == "closes mid-step":
            await stream.send(Close(1))
        elif way == "resets the stream":
            stream.reset("gone")

    async def _opened(self, link: Link, message: Open) -> Stream:
        """With its reservation held; others' silence may have to end first."""
        stream = link.open_stream()
        await stream.send(message)
        while True:
            answer = await within(stream.receive())
            if isinstance(answer, Opened):
                return stream
            assert isinstance(answer, RefusedMessage), answer
            await asyncio.sleep(0.05)  # there is no event for another client's silence growing old
            await stream.send(message)


async def vanish(peer: TinySwarm, sessions: int, first: int) -> None:
    """In batches, the ways in turn."""
    clients = [Vanishing(peer, first + number) for number in range(sessions // AT_ONCE)]
    try:
        for number, client in enumerate(clients):
            await client.run(AT_ONCE, WAYS[number % len(WAYS)])
        await peer.emptied()  # by leases too: those who are silent are still connected
    finally:
        for client in clients:
            await client.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and descriptors are read from /proc")
async def test_a_thousand_abandoned_sessions_leave_nothing_behind(peer: TinySwarm) -> None:
    await vanish(peer, WARM, 0)
    before = Held.by(peer)
    await vanish(peer, SESSIONS, WARM)
    await peer.until(lambda: peer.peers["ada"].engine.stats.waiting == 0)
    after = Held.by(peer)
    print(before, after, sep="\n")
    assert replace(after, memory=0) == replace(before, memory=0)
    assert not after.objects and not after.timers
    assert after.memory - before.memory < MORE_MEMORY
    engine = peer.peers["ada"].engine
    assert len(engine._scheduler.pace) == 0 and peer.call(lambda: len(peer.peers["ada"].pool._caches)) == 0


async def test_answers_that_are_cancelled_leave_nothing_behind(peer: TinySwarm, tmp_path: Path) -> None:
    """The same through the client that people use: tasks cancelled in the middle of an answer."""

    async def some(client: AsyncClient, count: int) -> None:
        for _ in range(count):
            begun = asyncio.Event()
            task = asyncio.create_task(_read(client, begun))
            await within(begun.wait())
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async with AsyncClient(peer.address, home=tmp_path) as client:
        await some(client, 3)
        await peer.emptied()
        before = Held.by(peer)
        await some(client, 25)
        await peer.emptied()
        after = Held.by(peer)
    assert replace(after, memory=0) == replace(before, memory=0) and not after.objects


async def _read(client: AsyncClient, begun: asyncio.Event) -> None:
    async for _ in client.stream("Go on and on", max_tokens=200, temperature=0):
        begun.set()
