"""joining.py: which ways into a swarm are tried, and which aren't. Everything around it is played."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from swarm.errors import Unreachable
from swarm.identity import Identity, PeerId
from swarm.joining import LAN_AT_ONCE, Hands, Joining
from swarm.lan import Found

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 12)]


class Around:
    """What a node would do for it. gates: links that are still being made."""

    def __init__(self) -> None:
        self.listed: set[PeerId] = set()
        self.dialled: list[PeerId] = []
        self.remembered: dict[str, PeerId] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.gate = asyncio.Event()
        self.busy = asyncio.Event()  # as many as may be are dialled
        self.unreachable: set[PeerId] = set()
        hands: Any = Hands(
            dial=self._never,
            link_to=self._link_to,
            become_neighbours=self._become_neighbours,
            listed=lambda: self.listed,
            remember=self.remembered.__setitem__,
            own=self._own,
        )
        self.joining = Joining(hands, None, client=False)

    async def _never(self, address: Any) -> Any:
        raise AssertionError(f"nobody gave {address}")

    async def _link_to(self, peer: PeerId, addresses: Any, may_dial: Any) -> Any:
        self.dialled.append(peer)
        if len(self.dialled) == LAN_AT_ONCE:
            self.busy.set()
        await self.gate.wait()
        if peer in self.unreachable:
            raise Unreachable(peer, "nobody is there", "")
        return peer

    async def _become_neighbours(self, link: Any, place: str) -> None:
        self.listed.add(link)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    def hear(self, peer: PeerId) -> None:
        self.joining._heard_on_lan(Found(peer, (f"10.0.0.{PEERS.index(peer)}:7070",)))


async def test_whoever_is_listed_already_is_not_joined_again_from_the_lan() -> None:
    around = Around()
    around.listed.add(PEERS[0])
    around.hear(PEERS[0])
    assert around.tasks == [] and around.remembered == {}
    await around.joining.close()
    around.hear(PEERS[1])
    assert around.tasks == []


async def test_peers_of_a_large_lan_are_joined_a_few_at_a_time_and_those_heard_of_meanwhile_not_at_all() -> None:
    around = Around()
    for peer in PEERS:
        around.hear(peer)
    await around.busy.wait()
    around.listed.update(PEERS[:-1])  # the first one's snapshot
    around.gate.set()
    await asyncio.gather(*around.tasks)
    assert around.dialled == [*PEERS[:LAN_AT_ONCE], PEERS[-1]]


async def test_a_peer_of_the_lan_that_does_not_answer_now_is_remembered() -> None:
    around = Around()
    around.unreachable.add(PEERS[0])
    around.gate.set()
    around.hear(PEERS[0])
    await asyncio.gather(*around.tasks)
    assert around.remembered == {"10.0.0.0:7070": PEERS[0]}
    assert not around.joining._lan_joined.is_set()
    around.hear(PEERS[1])
    await asyncio.gather(*around.tasks)
    assert around.joining._lan_joined.is_set()
