"""SHELL: whether others can reach us, as they see it: neighbours are asked to dial our addresses back.

A claim counts for routing only once somebody has connected to one of the addresses that it is advertised
with. That is looked at again whenever the addresses change, and from time to time, so that a peer whose router
forgot it, or whose machine moved, says so instead of failing those who choose it.

Invariants: we dial back only where the asker itself is, so nobody can make a peer scan others; one neighbour
that can't reach us isn't believed against an earlier one that could, before a second look.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping

from swarm.addresses import Address, address_group, is_loopback, parse_address
from swarm.buckets import MAX_BUCKETS, BucketTable
from swarm.errors import StreamClosed, SwarmError
from swarm.identity import PeerId
from swarm.link import Link, Stream
from swarm.messages import DialBack, DialledBack, Message
from swarm.permits import Permits
from swarm.transport import Transport

log = logging.getLogger("swarm.node")

DIAL_BACK_TIMEOUT_S = 3.0  # for one address; the asker waits a little longer
DIAL_BACKS_AT_ONCE = 4  # for others; more wait
# What one address group makes us dial: an honest peer asks three neighbours every 30 s, with up to 8 addresses.
DIALS_PER_S = 0.3
DIALS_BURST = 24.0
PORTS_PER_ASKER = 16  # a machine with a peer for each of its GPUs
FORGET_PORTS_S = 3600.0
CONFIRM_S = 30.0  # between tries while no address of ours was dialled back
CONFIRM_AGAIN_S = 600.0  # between looks once one was
ASKED = 3  # neighbours, each time
MISSES = 2  # looks in a row at which nobody reached us, before what was confirmed isn't any more


class Reachability:
    """Of this peer. neighbours: those whom we may ask, now. addresses: what we advertise, now.

    `reachable` says whether a claim may be advertised as serving: an address was dialled back, or there is
    nobody to ask. changed: called when that changes.
    """

    def __init__(
        self,
        transport: Transport,
        neighbours: Callable[[], Mapping[PeerId, Link]],
        addresses: Callable[[], tuple[str, ...]],
        rng: random.Random,
        changed: Callable[[], None],
    ) -> None:
        self.confirmed: set[str] = set()
        self.reachable = False
        self._transport, self._neighbours, self._addresses = transport, neighbours, addresses
        self._rng, self._changed = rng, changed
        self._look_now = asyncio.Event()
        self._asked_for: tuple[str, ...] = ()
        self._due_at = 0.0  # on the event loop's clock
        self._misses = 0
        self._told = False  # that nobody reaches us

    def begin(self) -> None:
        """Before the first claim: with nobody to ask, it may be advertised as it is."""
        self.reachable = self.reachable or not self._neighbours()

    def look(self) -> None:
        """Something changed: our addresses, or who could be asked."""
        self._look_now.set()

    async def watch(self) -> None:
        """For as long as this peer advertises anything."""
        loop = asyncio.get_running_loop()
        while True:
            self._look_now.clear()
            addresses, neighbours = self._addresses(), self._neighbours()
            self.confirmed &= set(addresses)
            if not neighbours:
                self._set(True)
            elif not self.confirmed or addresses != self._asked_for or loop.time() >= self._due_at:
                await self._ask(addresses, neighbours)
                certain = self.confirmed and not self._misses
                self._due_at = loop.time() + (CONFIRM_AGAIN_S if certain else CONFIRM_S)
            try:
                async with asyncio.timeout_at(max(self._due_at, loop.time() + CONFIRM_S)):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def _ask(self, addresses: tuple[str, ...], neighbours: Mapping[PeerId, Link]) -> None:
        if not self.confirmed and self._asked_for and addresses != self._asked_for:
            self._set(False)  # nobody has been at any of the new ones
        self._asked_for = addresses
        chosen = self._rng.sample(sorted(neighbours), min(ASKED, len(neighbours)))
        answers = await asyncio.gather(*(self._dialled_back(neighbours[peer], addresses) for peer in chosen))
        heard = [answer for answer in answers if answer is not None]
        reached = set().union(*heard)
        if reached:
            self.confirmed, self._misses = reached, 0
            self._set(True)
        elif heard:
            self._misses += 1
            if not self.confirmed or self._misses >= MISSES:
                self.confirmed = set()
                self._set(False)
                self._warn(addresses)

    def _set(self, reachable: bool) -> None:
        if reachable and self._told:
            self._told = False
            log.warning("others can connect to this peer again")
        if reachable != self.reachable:
            self.reachable = reachable
            self._changed()

    def _warn(self, addresses: tuple[str, ...]) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "no peer can connect to %s, so nobody will route through this one; open port %s "
                "towards it, or say where it is reached with --announce",
                ", ".join(addresses) or "this peer",
                self._transport.port,
            )

    async def _dialled_back(self, link: Link, addresses: tuple[str, ...]) -> set[str] | None:
        """Which of `addresses` reach us, as that neighbour says; None without an answer."""
        try:
            stream = link.open_stream()
        except StreamClosed:
            return None
        try:
            async with asyncio.timeout(2 * DIAL_BACK_TIMEOUT_S):
                await stream.send(DialBack(addresses))
                answer = await stream.receive()
        except (StreamClosed, TimeoutError):
            return None
        finally:
            stream.finish()
        return set(answer.reached) & set(addresses) if isinstance(answer, DialledBack) else None


class Ports:
    """How many dials, and which ports, an asker gets: an honest one has a port or a few, and asks every 30 s."""

    def __init__(self) -> None:
        self._rate = BucketTable(DIALS_PER_S, DIALS_BURST)
        self._ports: OrderedDict[str, dict[int, float]] = OrderedDict()  # by group: port -> first asked for

    def allow(self, host: str, text: str, now: float) -> bool:
        """Whether to dial this address for an asker at `host`. Whoever is on this machine needs no help to dial."""
        try:
            port = parse_address(text).port
        except SwarmError:
            return False
        if is_loopback(host):
            return True
        group = address_group(host)
        ports = {one: at for one, at in self._ports.pop(group, {}).items() if now < at + FORGET_PORTS_S}
        self._ports[group] = ports
        if len(self._ports) > MAX_BUCKETS:
            self._ports.popitem(last=False)
        if port not in ports and len(ports) >= PORTS_PER_ASKER:
            return False
        ports.setdefault(port, now)
        return self._rate.take(group, now)


class DialsBack:
    """The same service for others."""

    def __init__(self, transport: Transport, permits: Permits) -> None:
        self._transport, self._permits = transport, permits
        self._at_once = asyncio.Semaphore(DIAL_BACKS_AT_ONCE)
        self._ports = Ports()

    async def answer(self, stream: Stream, first: Message) -> None:
        """Handles a stream that begins with `DialBack`."""
        assert isinstance(first, DialBack)
        host, now = stream.link.remote[0], asyncio.get_running_loop().time()
        asked = [text for text in first.addresses if self._ports.allow(host, text, now)]
        async with self._at_once:
            tried = await asyncio.gather(*(self._dial_back(stream.link, text) for text in asked))
        reached = tuple(text for text, good in zip(asked, tried, strict=True) if good)
        await stream.send(DialledBack(reached))

    async def _dial_back(self, asker: Link, text: str) -> bool:
        """Whether a fresh connection to there reaches the asker; tried only where it can be itself."""
        try:
            address = parse_address(text)
            there = Address(asker.peer, address.host, address.port)
            place, *_ = await self._transport.allowed(there, self._permits.back(asker.remote[0]))
            await self._transport.dial(place, DIAL_BACK_TIMEOUT_S, fresh=True)
        except SwarmError as error:
            log.debug("dialling back %s at %s failed: %s", asker.peer[:8], text, error)
            return False
        return True
