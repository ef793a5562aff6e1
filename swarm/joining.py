"""SHELL: how a node gets into its swarm when it starts: by a given address, a remembered one, the local network.

What is given comes first and alone; where nobody answers there, what is remembered from last time, since a swarm
outlives its first address. Without a given address, what is remembered and the local network (`lan.py`) are
tried side by side, and a peer goes on hearing the local network and joins whoever it doesn't know yet: two
swarms become one.

Invariant: the first way that works is enough, the others go on by themselves, and whoever can't be reached now
is tried again for ever (`circle.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.addresses import Address, is_loopback
from swarm.errors import IdentityError, SwarmError, Unreachable
from swarm.identity import PeerId
from swarm.lan import Found, Lan
from swarm.link import Link
from swarm.permits import MayDial, on_the_lan

log = logging.getLogger("swarm.node")

REMEMBERED_AT_ONCE = 8  # remembered addresses tried side by side at a start; the rest later
REMEMBERED_FIRST_S = 0.3  # a client asks the LAN only after that, which takes a second library and a question to all
LAN_PATIENCE_S = 1.5  # a first answer takes 0.2 s; two peers started at once hear each other a second later
NOBODY_ON_LAN = "no peer announces itself on this local network"
LAN_AT_ONCE = 4  # peers of the LAN dialled side by side; most often the first one's snapshot tells of the others


@dataclass(frozen=True)
class Hands:
    """What joining needs of its node. become_neighbours: returns once all that is wanted was told; raises
    Unreachable. listed: who is known already. own: runs a task for as long as the node lives."""

    dial: Callable[[Address], Awaitable[Link]]
    link_to: Callable[[PeerId, Sequence[str], MayDial], Awaitable[Link]]
    become_neighbours: Callable[[Link, str], Awaitable[None]]
    listed: Callable[[], Collection[PeerId]]
    remember: Callable[[str, PeerId], None]
    own: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Joining:
    """client: gives up where a peer would begin a swarm of its own."""

    def __init__(self, hands: Hands, lan: Lan | None, *, client: bool) -> None:
        self._hands, self._lan, self._client = hands, lan, client
        self._lan_turn = asyncio.Semaphore(LAN_AT_ONCE)
        self._lan_joined = asyncio.Event()
        self._closed = False

    async def join(self, given: Sequence[Address], remembered: Sequence[Address]) -> None:
        """Raises Unreachable, IdentityError, VersionMismatch or HandshakeError when nobody of `given` answers, nor
        any of `remembered` in their place; a client without a given address Unreachable when there is nobody."""
        if self._lan is not None and not self._client:
            await self._lan.start(self._heard_on_lan)
        if given:
            await self._join_given(given, remembered)
        else:
            await self._join_without_address(remembered[:REMEMBERED_AT_ONCE])

    async def close(self) -> None:
        self._closed = True
        if self._lan is not None:
            await self._lan.close()

    # ------------------------------------------------------------ ways

    async def _join_given(self, given: Sequence[Address], remembered: Sequence[Address]) -> None:
        try:
            await self._join_any(given, self._join)
        except Unreachable as error:
            places = {(address.host, address.port) for address in given}
            others = [one for one in remembered if (one.host, one.port) not in places][:REMEMBERED_AT_ONCE]
            if not others:
                raise
            try:
                await self._join_any(others, self._join_where_remembered)
            except SwarmError as worse:
                log.info("and of %d remembered peers: %s", len(others), worse)
                raise error from None
            log.warning("%s; joined through a peer remembered from last time", error)

    async def _join_without_address(self, remembered: Sequence[Address]) -> None:
        ways = []
        if remembered:
            ways.append(self._hands.own(self._join_any(remembered, self._join_where_remembered)))
        if self._lan is not None:
            after_s = REMEMBERED_FIRST_S if remembered and self._client else 0.0
            ways.append(self._hands.own(self._join_lan(self._lan, after_s)))
        errors = await _first_of(ways)
        if self._lan is not None and self._client:
            ways[-1].cancel()
            await self._lan.close()
        if ways and not errors:
            return
        nobody = self._nobody(remembered, errors)
        if self._client:
            raise nobody
        log.info("starting alone: %s", nobody)

    def _nobody(self, remembered: Sequence[Address], errors: Sequence[SwarmError]) -> Unreachable:
        """The error of a start without an address: what was tried, in one line."""
        reasons = [str(error) for error in errors if not _is_silence(error)]
        if not remembered:
            reasons = ["no address was given", "none is remembered"]
        if self._lan is not None:
            reasons.append(NOBODY_ON_LAN)
        target = f"the {len(remembered)} remembered addresses" if remembered else "any peer"
        return Unreachable(target, ", ".join(reasons), "give an address with --join host:port")

    # ------------------------------------------------------------ addresses

    async def _join_any(
        self, addresses: Sequence[Address], joining: Callable[[Address], Coroutine[Any, Any, None]]
    ) -> None:
        """Return with the first that works, while the others go on. Raises if all fail."""
        errors = await _first_of([self._hands.own(joining(address)) for address in addresses])
        if errors:
            raise _one_of(addresses, errors)

    async def _join(self, address: Address) -> None:
        """Dial, become neighbours, and wait until all that is wanted was told."""
        await self._hands.become_neighbours(await self._hands.dial(address), str(address))

    async def _join_where_remembered(self, address: Address) -> None:
        try:
            await self._join(address)
        except IdentityError:
            if not is_loopback(address.host):  # there peers change ports among each other
                raise
            await self._join(Address(None, address.host, address.port))

    # ------------------------------------------------------------ the local network

    async def _join_lan(self, lan: Lan, after_s: float) -> None:
        """Wait for a first neighbour from the LAN. Raises Unreachable."""
        await asyncio.sleep(after_s)
        if self._client:
            await lan.start(self._heard_on_lan)
        try:
            async with asyncio.timeout(LAN_PATIENCE_S):
                await self._lan_joined.wait()
        except TimeoutError:
            raise Unreachable("a peer", NOBODY_ON_LAN) from None

    def _heard_on_lan(self, found: Found) -> None:
        """Somebody who is listed already needs no joining: gossip reaches both of us."""
        if not self._closed and found.peer not in self._hands.listed():
            self._hands.own(self._join_found(found))

    async def _join_found(self, found: Found) -> None:
        async with self._lan_turn:
            if found.peer in self._hands.listed():
                return
            self._hands.remember(found.addresses[0], found.peer)  # for ever, if it doesn't answer now
            try:
                link = await self._hands.link_to(found.peer, found.addresses, on_the_lan)
                await self._hands.become_neighbours(link, found.addresses[0])
            except SwarmError as error:
                log.info("%s announces itself on the local network, but: %s", found.peer[:8], error)
                return
            self._lan_joined.set()


async def _first_of(waiting: Collection[asyncio.Task[None]]) -> list[SwarmError]:
    """Return with the first that works and no errors, while the others go on. If none does: all errors, in order."""
    all_of_them, errors = tuple(waiting), dict[asyncio.Task[None], SwarmError]()
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for attempt in done:
            error = attempt.exception()
            if error is None:
                return []
            if not isinstance(error, SwarmError):
                raise error
            errors[attempt] = error
    return [errors[attempt] for attempt in all_of_them]


def _is_silence(error: SwarmError) -> bool:
    return isinstance(error, Unreachable) and error.reason == NOBODY_ON_LAN


def _one_of(addresses: Sequence[Address], errors: Sequence[SwarmError]) -> SwarmError:
    """The error to raise when all addresses failed: the only one, or the one that says most."""
    telling = [error for error in errors if not isinstance(error, Unreachable)]
    if len(errors) == 1 or telling:
        return (telling or list(errors))[0]
    reasons = dict.fromkeys(error.reason for error in errors if isinstance(error, Unreachable))
    return Unreachable(", ".join(map(str, addresses)), "; ".join(reasons))
