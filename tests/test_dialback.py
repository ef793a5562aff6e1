"""dialback.py: what is concluded from what neighbours say, and whom we dial for them. tests/test_node.py has it with
sockets."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from swarm.addresses import Address
from swarm.dialback import DIAL_BACKS_AT_ONCE, MISSES, DialsBack, Reachability
from swarm.errors import Unreachable
from swarm.identity import Identity, PeerId
from swarm.link import Link
from swarm.messages import DialBack, DialledBack
from swarm.permits import Permits

ASKER, OTHER = (Identity.from_seed(seed * 32).peer_id for seed in (b"a", b"o"))


class Looking(Reachability):
    """answers: what each look hears of the one neighbour; None for silence."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.there: dict[PeerId, Any] = {OTHER: None}
        self.here = addresses
        self.answer: set[str] | None = set()
        self.seen = asyncio.Event()  # the verdict has changed
        transport: Any = type("Transport", (), {"port": 7070})()
        super().__init__(
            transport, lambda: self.there, lambda: self.here, random.Random(1), lambda: self.seen.set()
        )

    async def _dialled_back(self, link: Any, addresses: tuple[str, ...]) -> set[str] | None:
        return self.answer

    async def hear(self, answer: set[str] | None) -> bool:
        self.answer = answer
        self.confirmed &= set(self.here)
        await self._ask(self.here, self.there)
        return self.reachable


async def test_new_addresses_at_which_nobody_was_are_not_advertised_as_reachable() -> None:
    here = Looking(("45.1.1.1:1",))
    assert await here.hear({"45.1.1.1:1"})
    here.here = ("45.2.2.2:1",)
    assert not await here.hear(None)  # and nobody says anything
    assert await here.hear({"45.2.2.2:1"})
    assert await here.hear(None)  # silence is no verdict on what was confirmed


async def test_what_was_confirmed_is_given_up_after_some_misses_only() -> None:
    here = Looking(("45.1.1.1:1",))
    assert await here.hear({"45.1.1.1:1"})
    assert [await here.hear(set()) for _ in range(MISSES)] == [True] * (MISSES - 1) + [False]


async def test_a_peer_that_nobody_could_reach_may_serve_again_once_there_is_nobody_to_ask() -> None:
    here = Looking(("45.1.1.1:1",))
    await here.hear({"45.1.1.1:1"})
    for _ in range(MISSES):
        await here.hear(set())
    assert not here.reachable
    here.there, here.seen = {}, asyncio.Event()
    watching = asyncio.create_task(here.watch())
    await here.seen.wait()
    assert here.reachable
    watching.cancel()


async def test_each_time_that_nobody_reaches_us_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    here = Looking(("45.1.1.1:1",))
    with caplog.at_level(logging.WARNING):
        for answer in (set(), set(), {"45.1.1.1:1"}, set(), set(), set()):
            await here.hear(answer)
    said = ["open port 7070" in record.message for record in caplog.records]
    assert said == [True, False, True]  # between them: that others can connect again


async def test_only_the_asker_itself_counts_as_reached() -> None:
    """Somebody else may sit at the address by now, and must not be taken for it."""
    dialled: list[tuple[Address, bool]] = []

    class Wire:
        async def allowed(self, address: Address, may_dial: Callable[[str], bool]) -> list[Address]:
            if not may_dial(address.host):
                raise Unreachable(str(address), "it isn't the asker's", "")
            return [address]

        async def dial(self, address: Address, timeout_s: float, *, fresh: bool) -> None:
            dialled.append((address, fresh))
            if address.peer != OTHER:
                raise Unreachable(str(address), "it is somebody else", "")

    link: Any = type("Link", (), {"peer": ASKER, "remote": ("45.9.9.7", 4000)})()
    wire: Any = Wire()
    backs = DialsBack(wire, Permits(lambda peer: (), lambda: ()))
    assert not await backs._dial_back(link, "45.9.9.7:7070")
    assert dialled == [(Address(ASKER, "45.9.9.7", 7070), True)]
    link.peer = OTHER
    assert await backs._dial_back(link, "45.9.9.7:7070")
    assert not await backs._dial_back(link, "45.9.9.8:7070")
    assert len(dialled) == 2  # nobody is dialled elsewhere


async def test_an_answer_says_nothing_of_addresses_that_werent_asked_about() -> None:
    class Says:
        async def send(self, message: object) -> None:
            assert message == DialBack(("45.1.1.1:1",))

        async def receive(self) -> object:
            return DialledBack(("45.1.1.1:1", "45.6.6.6:6"))

        def finish(self) -> None:
            pass

    link: Any = type("Link", (), {"open_stream": staticmethod(Says)})()
    assert await Reachability._dialled_back(Looking(()), link, ("45.1.1.1:1",)) == {"45.1.1.1:1"}


async def test_only_so_many_are_dialled_back_at_once() -> None:
    """Whoever makes a hundred peers ask at one moment has four of them looked for, and then the next."""
    going, most, answers = 0, 0, []

    class Back(DialsBack):
        async def _dial_back(self, asker: Link, text: str) -> bool:
            nonlocal going, most
            going, most = going + 1, max(most, going + 1)
            for _ in range(3):
                await asyncio.sleep(0)
            going -= 1
            return True

    class Asks:
        link: Any = type("Link", (), {"peer": ASKER, "remote": ("127.0.0.1", 4000)})()

        async def send(self, message: object) -> None:
            answers.append(message)

    wire: Any = None
    backs, stream = Back(wire, Permits(lambda peer: (), lambda: ())), Asks()
    asked: list[Any] = [backs.answer(stream, DialBack(("127.0.0.1:1",))) for _ in range(100)]  # type: ignore[arg-type]
    await asyncio.gather(*asked)
    assert most == DIAL_BACKS_AT_ONCE and answers == [DialledBack(("127.0.0.1:1",))] * 100
