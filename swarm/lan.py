"""SHELL: peers find each other on the local network without an address: mDNS (RFC 6762), DNS-SD (RFC 6763).

A peer announces itself as an instance of `_layerswarm._tcp`, with its PeerId and the name of its network;
whoever has no address to start from looks for such instances, and a peer goes on looking for as long as it
lives, so that two that began alone become one swarm.

    <first 16 characters of the PeerId>._layerswarm._tcp.local.   SRV  port    A, AAAA  its addresses
                                                                  TXT  id=<PeerId>  net=<network>

Invariant: what is heard here is a hint and nothing more. Whoever is dialled must prove the PeerId that was
announced, and a neighbour found so has no other rights than one whose address was typed. Without multicast
(a container, a filtered network) everything works but finding.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.errors import IdentityError
from swarm.identity import PeerId, key_bytes
from swarm.records import MAX_ADDRESSES

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger("swarm.lan")

SERVICE = "_layerswarm._tcp.local."
ID, NETWORK = b"id", b"net"  # keys of the TXT record
INSTANCE_CHARS = 16  # of the PeerId; a label of DNS has 63 at most, and 80 bits don't meet by chance
RESOLVE_MS = 3000  # for an instance's addresses; RFC 6762 lets an answer wait for 120 ms, and one may be lost
RESOLVED_AT_ONCE = 16  # more instances than that wait, so that a flood on the LAN costs nothing but their time
MAX_WAITING = 1024  # instances that wait; beyond it they are not looked at until they speak again
CLOSE_S = 1.0  # for the goodbye; a record that stays ends by its own time to live


@dataclass(frozen=True)
class Announced:
    """What a peer tells its LAN. hosts: IP addresses at which it listens."""

    peer: PeerId
    port: int
    hosts: Sequence[str]


@dataclass(frozen=True)
class Found:
    """A peer of this network that speaks on the LAN. addresses: `host:port`, at least one."""

    peer: PeerId
    addresses: tuple[str, ...]


def lan_wanted() -> bool:
    """Whether `SWARM_LAN` leaves finding on the local network on; 0, off and no don't."""
    return os.environ.get("SWARM_LAN", "").strip().lower() not in ("0", "off", "no", "false")


class Lan:
    """One participant's ear, and a peer's voice, on the local network.

    announced: None for somebody who only listens. interfaces: the own IP addresses to speak from; all by default.
    """

    def __init__(
        self, network: str, announced: Announced | None = None, interfaces: Sequence[str] | None = None
    ) -> None:
        self._network, self._announced, self._interfaces = network, announced, interfaces
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(RESOLVED_AT_ONCE)

    async def start(self, found: Callable[[Found], None]) -> None:
        """Listen, and announce. `found` is called for each peer heard of, at any time until `close`, and again
        when it speaks again. Never raises for what the network is like: then nobody is found, and a log line
        says why."""
        from zeroconf import Error, InterfaceChoice
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._interfaces or InterfaceChoice.All)
        except (OSError, Error) as error:
            log.info("nobody is looked for on the local network: %s", error)
            return
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, [SERVICE], handlers=[self._listener(found)]
        )
        if self._announced is not None:
            self._own(self._announce(self._announced))

    async def close(self) -> None:
        """Say goodbye and fall silent. Harmless when repeated, or when `start` found no network."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._browser is not None:
                    await self._browser.async_cancel()
                await zeroconf.async_unregister_all_services()
                await zeroconf.async_close()
        except (TimeoutError, OSError) as error:
            log.debug("no goodbye on the local network: %s", error)
            zeroconf.zeroconf.close()

    # ------------------------------------------------------------ speaking

    async def _announce(self, announced: Announced) -> None:
        from zeroconf import Error

        assert self._zeroconf is not None
        try:
            sent = await self._zeroconf.async_register_service(
                _service(announced, self._network),
                cooperating_responders=True,  # a PeerId is unique: probing for the name takes 0.75 s for nothing
            )
            await sent
        except (OSError, Error) as error:  # also a name that is taken: another process with this identity
            log.info("not announced on the local network: %s", error or type(error).__name__)

    # ------------------------------------------------------------ listening

    def _listener(self, found: Callable[[Found], None]) -> Callable[..., None]:
        from zeroconf import ServiceStateChange

        def heard(
            zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
        ) -> None:
            if state_change is not ServiceStateChange.Removed and len(self._tasks) < MAX_WAITING:
                self._own(self._resolve(zeroconf, name, found))

        return heard

    async def _resolve(self, zeroconf: Zeroconf, name: str, found: Callable[[Found], None]) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        async with self._turn:
            info = AsyncServiceInfo(SERVICE, name)
            if not await info.async_request(zeroconf, RESOLVE_MS):
                return
        peer = _read(info, self._network)
        if peer is not None and (self._announced is None or peer.peer != self._announced.peer):
            found(peer)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("finding on the local network failed", exc_info=error)
            task.get_loop().call_exception_handler({"message": "a task of the LAN failed", "exception": error})


def _service(announced: Announced, network: str) -> AsyncServiceInfo:
    from zeroconf.asyncio import AsyncServiceInfo

    instance = announced.peer[:INSTANCE_CHARS]
    return AsyncServiceInfo(
        SERVICE,
        f"{instance}.{SERVICE}",
        port=announced.port,
        properties={ID: announced.peer, NETWORK: network},
        parsed_addresses=list(announced.hosts)[:MAX_ADDRESSES],
        server=f"layerswarm-{instance}.local.",
    )


def _read(info: AsyncServiceInfo, network: str) -> Found | None:
    """What an instance says, or None if it is of another network, or makes no sense."""
    try:
        peer = PeerId((info.properties.get(ID) or b"").decode("ascii"))
        key_bytes(peer)
        theirs = (info.properties.get(NETWORK) or b"").decode()
    except (UnicodeDecodeError, IdentityError):
        return None
    hosts = [ipaddress.ip_address(text.partition("%")[0]) for text in info.parsed_addresses()]
    usable = [host for host in hosts if not (host.is_link_local or host.is_multicast or host.is_unspecified)]
    if theirs != network or not info.port or not usable:
        return None
    places = (f"[{host}]:{info.port}" if host.version == 6 else f"{host}:{info.port}" for host in usable)
    return Found(peer, tuple(places)[:MAX_ADDRESSES])
