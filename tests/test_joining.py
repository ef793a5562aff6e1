"""joining.py: which ways into a swarm are tried, and which aren't. Everything around it is played."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm import joining
from swarm.addresses import Address
from swarm.errors import IdentityError, Unreachable
from swarm.identity import Identity, PeerId
from swarm.joining import LAN_AT_ONCE, Hands, Joining
from swarm.lan import Found

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 12)]


class Ear:
    """In place of the local network, on which nobody speaks."""

    def __init__(self) -> None:
        self.open = False

    async def start(self, heard: Any) -> None:
        self.open = True

    async def close(self) -> None:
        self.open = False


class Around:
    """What a node would do for it. gates: links that are still being made. there: who is at which host."""

    def __init__(self, *, client: bool = False, lan: Any = None) -> None:
        self.there: dict[str, PeerId] = {}
        self.listed: set[PeerId] = set()
        self.dialled: list[PeerId] = []
        self.remembered: dict[str, PeerId] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.gate = asyncio.Event()
        self.busy = asyncio.Event()  # as many as may be are dialled
        self.unreachable: set[PeerId] = set()
        hands: Any = Hands(
            dial=self._dial,
            link_to=self._link_to,
            become_neighbours=self._become_neighbours,
            listed=lambda: self.listed,
            remember=self.remembered.__setitem__,
            own=self._own,
        )
        self.joining = Joining(hands, lan, client=client)

    async def _dial(self, address: Address) -> Any:
        found = self.there.get(address.host)
        if found is None:
            raise Unreachable(str(address), f"no route to {address.host}")
        if address.peer is not None and found != address.peer:
            raise IdentityError(f"at {address} is {found}")
        return found

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


# ---------------------------------------------------------------- addresses


GIVEN, OLD, OTHER = (Address(None, f"10.9.0.{n}", 7070) for n in (1, 2, 3))


async def test_where_remembered_peers_are_gone_too_the_error_is_that_of_what_was_given() -> None:
    around = Around()
    with pytest.raises(Unreachable, match=r"no route to 10\.9\.0\.1"):
        await around.joining.join([GIVEN], [OLD])
    around.there[OLD.host] = PEERS[0]
    await around.joining.join([GIVEN], [OLD])
    assert around.listed == {PEERS[0]}


async def test_what_is_given_and_remembered_is_not_dialled_twice() -> None:
    around = Around()
    with pytest.raises(Unreachable, match=r"no route to 10\.9\.0\.1"):
        await around.joining.join([GIVEN], [Address(PEERS[0], GIVEN.host, GIVEN.port)])
    assert len(around.tasks) == 1


@pytest.mark.parametrize(("host", "joined"), [("10.9.0.2", False), ("127.0.0.1", True)])
async def test_somebody_else_where_one_is_remembered_is_taken_on_this_machine_only(host: str, joined: bool) -> None:
    around = Around()
    around.there[host] = PEERS[1]
    await around.joining.join([], [Address(PEERS[0], host, 7070)])  # a peer starts alone if it must
    assert around.listed == ({PEERS[1]} if joined else set())


async def test_one_of_several_addresses_is_enough_and_of_errors_the_one_that_says_most_is_raised() -> None:
    around = Around()
    around.there[GIVEN.host] = PEERS[1]
    wrong = Address(PEERS[0], GIVEN.host, 7070)
    with pytest.raises(IdentityError):
        await around.joining.join([OTHER, wrong], [])
    with pytest.raises(Unreachable, match=r"no route to 10\.9\.0\.2; no route to 10\.9\.0\.3"):
        await around.joining.join([OLD, OTHER], [])
    around.there[OLD.host] = PEERS[2]
    await around.joining.join([OTHER, wrong, OLD], [])
    assert around.listed == {PEERS[2]}


async def test_an_error_of_our_own_is_nobodys_silence() -> None:
    around = Around()
    around.there[GIVEN.host] = PEERS[0]

    async def fail(link: Any, place: str) -> None:
        raise ZeroDivisionError

    around.joining._hands = dataclasses.replace(around.joining._hands, become_neighbours=fail)
    for given, remembered in (([GIVEN], []), ([], [GIVEN])):  # where nobody answered it would start alone
        with pytest.raises(ZeroDivisionError):
            await around.joining.join(given, remembered)


async def test_a_client_that_found_a_remembered_peer_listens_to_the_lan_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for asked_first in (False, True):
        monkeypatch.setattr(joining, "REMEMBERED_FIRST_S", 0.0 if asked_first else 60.0)
        ear = Ear()
        around = Around(client=True, lan=ear)
        around.there[OLD.host] = PEERS[0]
        await around.joining.join([], [OLD])
        assert around.listed == {PEERS[0]} and not ear.open
        await asyncio.wait(around.tasks)
        assert sum(task.cancelled() for task in around.tasks) == 1 and not ear.open


async def test_a_client_that_nobody_answers_is_told_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LAN_PATIENCE_S", 0.0)
    monkeypatch.setattr(joining, "REMEMBERED_FIRST_S", 0.0)
    with pytest.raises(Unreachable) as told:
        async with asyncio.timeout(10.0):
            await Around(client=True, lan=Ear()).joining.join([], [OLD])
    silence = "no peer announces itself on this local network"
    assert str(told.value).count(silence) == 1 and "no route to 10.9.0.2" in str(told.value)
    with pytest.raises(Unreachable, match=f"none is remembered, {silence}"):
        await Around(client=True, lan=Ear()).joining.join([], [])
