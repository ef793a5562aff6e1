"""The shell around `wire.Connection`, and the only file that opens sockets.

A `Transport` listens, dials and owns everything it started: close() leaves no task, timer or socket behind.
What goes on within one connection is `link.py`'s.

Two peers may dial each other at once. Then both connections live, new streams use the one that the lower
PeerId dialled (the newest of them), and the other is closed once it has had no stream for DUPLICATE_LINGER_S.

Strangers: what comes in is a bare socket until `door.py` gives it a turn, so that a flood costs an `accept` and a
`close` each, and those only at a bounded pace. Where descriptors run out, an idle connection makes room.

What fails how: `dial` raises Unreachable, IdentityError, VersionMismatch or HandshakeError; a stream raises
StreamClosed. A stream handler that raises a RemoteError resets its own stream; anything else it raises is
our bug: logged, shown to the event loop's exception handler, and the stream is reset with "internal error".
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarm.addresses import DEFAULT_PORT, Address, address_group, parse_address, read_ip
from swarm.door import MAX_PENDING, Door
from swarm.errors import (
    HandshakeError,
    IdentityError,
    PeerFailed,
    PortTaken,
    RemoteError,
    StreamClosed,
    SwarmError,
    Unreachable,
    UsageError,
)
from swarm.flow import DEFAULT_LIMITS, Limits
from swarm.identity import Identity, PeerId
from swarm.link import Link, Stream
from swarm.messages import Message, Unsupported
from swarm.noise import MAX_NETWORK_NAME
from swarm.permits import MayDial
from swarm.quotas import DEFAULT_QUOTAS, Account, Accounts, Quotas
from swarm.wire import Connection

log = logging.getLogger("swarm.transport")

PORTS_TRIED = 200  # several peers on one host each take the next free one
DIAL_TIMEOUT_S = 5.0
MOST_OF_NAME = 2  # addresses tried of those that a name stands for: one of each kind, say
LOOKUPS_AT_ONCE = 2  # of names that strangers told: each may take a thread of the resolver's for half a minute
NEXT_ADDRESS_S = 0.25  # a peer's next address is tried beside the last (RFC 8305's delay)
MAX_LINKS = 768  # in both directions, under the usual 1,024 file descriptors of a process
LEAST_LINKS = 32  # however few descriptors there are
BACKLOG = 128  # connections that the kernel keeps for us meanwhile
# Sockets accepted in a row before the loop gets its turn, and how long that is: 1,600 a second, a tenth of its time.
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 0.01
NO_DESCRIPTOR_PAUSE_S = 0.2  # before the next try to accept where the system has nothing left
TELL_AGAIN_S = 60.0  # between warnings of that
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NOTSENT_LOWAT = 128 << 10  # in the kernel: enough to keep a fast link busy, too little to delay a decode step
DUPLICATE_LINGER_S = 10.0
CLOSE_TIMEOUT_S = 1.0  # for a last word to leave

Handler = Callable[["Stream", Message], Awaitable[None]]


class KnownHosts(Protocol):
    """Trust on first use, for addresses that came without a PeerId."""

    def check(self, address_text: str, peer: PeerId) -> None:
        """Remember `peer` for a new address; raise IdentityError if another one was known there."""


# ---------------------------------------------------------------- the transport


class Transport:
    """Everything that this participant has open. Make it inside a running event loop.

    on_link / on_link_lost: called with the peer's first Link, and with its last when it is gone.
    """

    def __init__(
        self,
        identity: Identity,
        network: str = "main",
        *,
        known_hosts: KnownHosts | None = None,
        limits: Limits = DEFAULT_LIMITS,
        quotas: Quotas = DEFAULT_QUOTAS,
    ) -> None:
        if not 0 < len(network.encode()) <= MAX_NETWORK_NAME:
            raise UsageError(f"a network's name takes 1 to {MAX_NETWORK_NAME} bytes, got {network[:120]!r}")
        self.identity, self.network = identity, network
        self.loop = asyncio.get_running_loop()
        self.on_link: list[Callable[[Link], None]] = []
        self.on_link_lost: list[Callable[[Link], None]] = []
        self.port: int | None = None
        self._known_hosts = known_hosts
        self._limits = limits
        self._accounts = Accounts(quotas)
        self._static = X25519PrivateKey.generate()  # as old as the process, never on disk
        self._preferred: dict[PeerId, Link] = {}
        self._established: dict[PeerId, list[Link]] = {}
        self._most_links = _most_links()
        self._door: Door[_Caller] = Door(_Caller.is_busy, self._most_links, monotonic())
        self._callers: dict[Link, _Caller] = {}  # of those that came in
        self._turn_timer: asyncio.TimerHandle | None = None
        self._warned_at: float | None = None  # that descriptors ran out
        self._sockets: set[Link] = set()  # every link whose socket isn't gone
        self._handlers: dict[type[Message], Handler] = {}
        self._first_limits: dict[type[Message], int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialling: dict[PeerId, asyncio.Task[Link]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._listening: list[socket.socket] = []
        self._closing = False

    @property
    def links(self) -> Mapping[PeerId, Link]:
        """By peer, the connection that new streams use."""
        return self._preferred

    def handle(self, first: type[Message], handler: Handler, *, max_message_bytes: int | None = None) -> None:
        """Incoming streams that begin with a `first` go to `handler`, in a task of their own.

        When it returns, the stream is ended. It may raise a RemoteError, which resets the stream.
        max_message_bytes: of all messages behind the first; setting it in the handler may be too late
        for a message that follows at once.
        """
        assert first not in self._handlers, first
        self._handlers[first] = handler
        if max_message_bytes is not None:
            self._first_limits[first] = max_message_bytes

    # ---- listening

    async def listen(self, host: str | None, port: int | None) -> list[str]:
        """The bound addresses. host None: all interfaces. port None: the next free one, 0: any.

        Raises PortTaken, UsageError (nothing is bound then).
        """
        places = await self._places(host)
        ports = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED + 1)
        for candidate in ports:
            sockets = _bind(places, candidate)
            if sockets:
                break
        else:
            raise PortTaken(host or "any interface", port if port is not None else DEFAULT_PORT + PORTS_TRIED)
        self.port = int(sockets[0].getsockname()[1])
        self._listening += sockets
        for sock in sockets:
            self._own(self._accept(sock))
        return [str(Address(None, sock.getsockname()[0], self.port)) for sock in sockets]

    async def _places(self, host: str | None) -> list[tuple[int, str]]:
        if host is None:
            return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
        try:
            found = await self.loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            why = _plain(error)
            raise UsageError(f"can't listen on {host!r}: {why}; give an address of this machine") from None
        return [(int(info[0]), str(info[4][0])) for info in found]

    async def _accept(self, listening: socket.socket) -> None:
        """Take in what connects, for as long as we listen. Never ends by itself."""
        in_a_row = 0
        while True:
            in_a_row += 1
            if in_a_row > ACCEPTS_PER_TURN:
                in_a_row = 1
                await asyncio.sleep(ACCEPT_PAUSE_S)
            try:
                sock, address = await self._next(listening)
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._out_of_descriptors(error)
                    await asyncio.sleep(NO_DESCRIPTOR_PAUSE_S)
                continue  # else it was gone before we took it
            self._arrived(_Caller(sock, str(address[0]), monotonic()))

    async def _next(self, listening: socket.socket) -> tuple[socket.socket, Any]:
        """Accept by ourselves once there is somebody: `sock_accept`, cancelled when it has just accepted one,
        leaves that socket open with nobody."""
        while True:
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                ready = self.loop.create_future()
                try:
                    self.loop.add_reader(listening, _set, ready)
                except NotImplementedError:  # Windows' own loop
                    return await self.loop.sock_accept(listening)
                try:
                    await ready
                finally:
                    self.loop.remove_reader(listening)
            else:
                sock.setblocking(False)
                return sock, address

    def _arrived(self, caller: _Caller) -> None:
        for dropped in self._door.knock(caller, caller.host, monotonic()):
            dropped.drop()
        self._take_turns()

    def _take_turns(self) -> None:
        """Begin the handshakes whose turn it is."""
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        for caller in self._door.turns(monotonic()):
            caller.link = link = self._new_link(dialled=False, since=caller.since)
            self._callers[link] = caller
            self._sockets.add(link)
            self._own(self._attach(caller, link))
        at = self._door.next_turn_at(monotonic())
        if at is not None and not self._closing:
            self._turn_timer = self.loop.call_later(max(0.0, at - monotonic()), self._take_turns)

    async def _attach(self, caller: _Caller, link: Link) -> None:
        caller.taken = True
        try:
            await self.loop.connect_accepted_socket(lambda: link, caller.sock)
        except OSError as error:  # gone meanwhile
            log.debug("%r couldn't begin: %s", link, error)
            caller.sock.close()
            link.abort()

    def _out_of_descriptors(self, error: OSError) -> None:
        idle = self._door.make_room()
        if idle is not None:
            idle.close("room is needed for another connection")
        now = monotonic()
        if self._warned_at is None or now >= self._warned_at + TELL_AGAIN_S:
            self._warned_at = now
            log.warning(
                "no more connections can be accepted now (%s; %d are open): raise the limit with `ulimit -n`",
                _plain(error),
                len(self._sockets),
            )

    # ---- dialling

    async def dial(self, address: Address, timeout_s: float = DIAL_TIMEOUT_S, *, fresh: bool = False) -> Link:
        """A link to whoever listens there; the one that exists if the peer is known and linked.

        fresh: a new connection in any case, to find out whether the address works. Raises Unreachable,
        IdentityError, VersionMismatch, HandshakeError.
        """
        if address.peer is not None and not fresh and address.peer in self._preferred:
            return self._preferred[address.peer]
        if self._closing:
            raise Unreachable(str(address), "not dialled", "this side is shutting down")
        self._make_room_to_dial(address)
        link = self._new_link(dialled=True, address=address)
        try:
            async with asyncio.timeout(timeout_s):
                await self.loop.create_connection(lambda: link, address.host, address.port)
                await link.ready
        except BaseException as error:
            link.close("given up")
            link.abort()
            await link.gone.wait()  # a turn of the loop: the socket is closed when we raise
            if isinstance(error, TimeoutError):
                raise Unreachable(str(address), f"no answer in {timeout_s:g} s") from None
            if isinstance(error, OSError):
                raise Unreachable(str(address), _plain(error)) from None
            if isinstance(error, StreamClosed):
                raise HandshakeError(f"{address} hung up during the handshake: {error.reason}") from None
            raise
        return link

    async def link_to(self, peer: PeerId, addresses: Sequence[str], may_dial: MayDial) -> Link:
        """The link to `peer`, dialled at these addresses if there is none yet. Raises PeerFailed.

        may_dial: asked of each IP address, that of a name once it was looked up. Callers who want the same
        peer at the same time share one attempt.
        """
        if peer in self._preferred:
            return self._preferred[peer]
        task = self._dialling.get(peer)
        if task is None:
            task = self._dialling[peer] = self._own(self._reach(peer, addresses, may_dial))
            task.add_done_callback(lambda done: self._dialled(peer, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the transport is closing
                raise PeerFailed(peer, "this transport was closed") from None
            raise

    def _dialled(self, peer: PeerId, task: asyncio.Task[Link]) -> None:
        self._dialling.pop(peer, None)
        if not task.cancelled():
            task.exception()  # looked at here, for when all who waited have been cancelled

    async def _reach(self, peer: PeerId, addresses: Sequence[str], may_dial: MayDial) -> Link:
        """Each address starts NEXT_ADDRESS_S after the one before, or when that has failed."""
        reasons: list[str] = []
        waiting = deque(addresses)
        attempts: set[asyncio.Task[Link]] = set()
        try:
            while waiting or attempts:
                if waiting:
                    attempts.add(asyncio.create_task(self._reach_at(peer, waiting.popleft(), may_dial)))
                done, attempts = await asyncio.wait(
                    attempts,
                    timeout=NEXT_ADDRESS_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for attempt in done:
                    error = attempt.exception()
                    if error is None:
                        return attempt.result()
                    if not isinstance(error, SwarmError):
                        raise error
                    reasons.append(str(error))
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        raise PeerFailed(peer, "; ".join(reasons) or "no address is known")

    async def _reach_at(self, peer: PeerId, text: str, may_dial: MayDial) -> Link:
        address = parse_address(text)
        for place in await self.allowed(Address(peer, address.host, address.port), may_dial):
            try:
                return await self.dial(place)
            except Unreachable as error:
                problem = error
        raise problem

    async def allowed(self, address: Address, may_dial: MayDial) -> list[Address]:
        """Where an address that a stranger told leads: IP addresses, each allowed, one at least, and not more than
        MOST_OF_NAME. What was judged is what is dialled: a name may stand for something else the next time.

        Raises Unreachable.
        """
        hosts = [host for host in await self._looked_up(address) if may_dial(host)]
        if not hosts:
            raise Unreachable(
                str(address), "it lies in a network that isn't this swarm's", "was it announced for another one?"
            )
        return [Address(address.peer, host, address.port) for host in hosts[:MOST_OF_NAME]]

    async def _looked_up(self, address: Address) -> list[str]:
        if read_ip(address.host) is not None:
            return [address.host]
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._lookups.acquire()
                found: list[str] | OSError = await asyncio.shield(self._own(self._look_up(address)))
        except TimeoutError:
            raise Unreachable(str(address), "its name isn't found in time") from None
        if isinstance(found, OSError):
            raise Unreachable(str(address), _plain(found))
        return found

    async def _look_up(self, address: Address) -> list[str] | OSError:
        """Keeps one of the few places until the answer is there: a lookup can't be cancelled, and its thread is one
        that others wait for."""
        try:
            found = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(info[4][0]) for info in found))
        except OSError as error:
            return error
        finally:
            self._lookups.release()

    # ---- closing

    async def close(self) -> None:
        """Say goodbye to everybody, stop every task, wait until all sockets are gone."""
        self._closing = True
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        callers = {*self._callers.values(), *self._door.strangers()}
        # Links first, so that the other side hears this reason and not each handler's end.
        for link in list(self._sockets):
            link.close("shutting down")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for caller in callers:
            if not caller.taken:
                caller.drop()
        links = list(self._sockets)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for link in links:
                    await link.gone.wait()
        except TimeoutError:
            for link in links:
                link.abort()
        for link in links:
            await link.gone.wait()
        for sock in self._listening:
            sock.close()
        self._listening.clear()

    # ---- what links tell it

    def tune(self, sock: Any) -> None:
        """Small things leave at once, and large ones wait with us, where priorities count."""
        lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if lowat is not None:
                sock.setsockopt(socket.IPPROTO_TCP, lowat, NOTSENT_LOWAT)
        except OSError as error:  # a platform without them is slower, not broken
            log.debug("socket options: %s", error)

    def established(self, link: Link) -> None:
        caller = self._callers.get(link)
        if caller is not None and not self._may_stay(caller):
            return
        links = self._established.setdefault(link.peer, [])
        links.append(link)
        self._prefer(link.peer)
        log.debug("%r is up", link)
        if len(links) == 1:
            for callback in self.on_link:
                callback(link)

    def _may_stay(self, newcomer: _Caller) -> bool:
        """Make room for one more that has proved itself. False: it was closed, others need the room more."""
        assert newcomer.link is not None
        self._door.most_links = self._most_links - (len(self._sockets) - len(self._callers))
        closed = self._door.proved(newcomer, newcomer.link.peer)
        for caller in closed:
            caller.close(f"{self._door.inside} connections are open here, and others need the room")
        return newcomer not in closed

    def lost(self, link: Link) -> None:
        self._leave_door(link)
        links = self._established.get(link.peer, [])
        if link not in links:
            return
        links.remove(link)
        self._prefer(link.peer)
        if not links:
            del self._established[link.peer]
            for callback in self.on_link_lost:
                callback(link)

    def forget(self, link: Link) -> None:
        self._sockets.discard(link)
        self._leave_door(link)
        self._callers.pop(link, None)

    def _leave_door(self, link: Link) -> None:
        caller = self._callers.get(link)
        if caller is not None:
            self._door.gone(caller)

    def flooded(self, link: Link) -> None:
        """It was closed for a flood: its network waits outside."""
        lasts_s = self._door.strike(link.remote[0], monotonic())
        log.info("%r flooded this peer; its network is refused for %g s", link, lasts_s)

    def close_if_duplicate(self, link: Link) -> None:
        """Looked at with each ping: a connection that new streams don't use goes when it has been idle."""
        now = monotonic()
        if self._preferred.get(link.peer, link) is link or link.connection.streams:
            link.idle_since = None
        elif link.idle_since is None:
            link.idle_since = now
        elif now >= link.idle_since + DUPLICATE_LINGER_S:
            link.close("another connection to this peer is used")

    def serve(self, stream: Stream) -> None:
        """The other side opened a stream: its first message says who takes it."""
        self._own(self._serve(stream))

    # ---- inside

    def _make_room_to_dial(self, address: Address) -> None:
        """Of those that we dialled, half of all may stay; the oldest idle one goes. Raises Unreachable."""
        dialled = [link for link in self._sockets if link.dialled]
        if len(dialled) < self._most_links // 2:
            return
        proved = (link for links in self._established.values() for link in links if link.dialled)
        idle = [link for link in proved if not link.connection.streams]
        if not idle:
            raise Unreachable(str(address), f"{len(dialled)} connections are open already", "end some first")
        idle[0].close("idle, and another connection is needed")

    def _new_link(self, dialled: bool, address: Address | None = None, since: float | None = None) -> Link:
        def account(peer: PeerId, now: float) -> Account:
            return Account(self._accounts, peer, address_group(link.remote[0]), now)

        connection = Connection(
            "initiator" if dialled else "responder",
            self.identity,
            self.network,
            expected=address.peer if address else None,
            check=self._checker(address),
            static=self._static,
            limits=self._limits,
            first_limits=self._first_limits,
            account=account,
            now=monotonic() if since is None else since,
        )
        link = Link(self, dialled, connection)
        if dialled:
            self._sockets.add(link)
        return link

    def _checker(self, address: Address | None) -> Callable[[PeerId], None]:
        def check(peer: PeerId) -> None:
            if peer == self.identity.peer_id:
                raise IdentityError(
                    f"{address or 'the other side'} answers with our own identity: it is this very peer, or "
                    "one with a copy of its key; leave that address out"
                )
            if address is not None and address.peer is None and self._known_hosts is not None:
                self._known_hosts.check(str(address), peer)

        return check

    def _prefer(self, peer: PeerId) -> None:
        """New streams use the newest connection that the lower PeerId dialled; else the newest."""
        links = self._established.get(peer, [])
        if not links:
            self._preferred.pop(peer, None)
            return
        we_are_lower = self.identity.peer_id < peer
        best = [link for link in links if link.dialled == we_are_lower] or links
        self._preferred[peer] = best[-1]

    async def _serve(self, stream: Stream) -> None:
        try:
            first = await stream.receive()
            handler = self._handlers.get(type(first))
            if handler is None:
                await stream.send(Unsupported(first.kind))
            else:
                await handler(stream, first)
        except StreamClosed:
            pass
        except RemoteError as error:
            log.info("stream %d of %r reset: %s", stream.id, stream.link, error)
            stream.reset(str(error))
        except Exception as error:
            stream.reset("internal error")
            log.exception("a stream handler failed on %r", stream.link)
            self.loop.call_exception_handler(
                {"message": "a stream handler failed", "exception": error}  # no "task": 3.13 enters its context
            )
        finally:
            stream.finish()

    def _own(self, work: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class _Caller:
    """A connection that came in: a bare socket until its handshake begins, a link from then on."""

    __slots__ = ("host", "link", "since", "sock", "taken")

    def __init__(self, sock: socket.socket, host: str, since: float) -> None:
        self.sock, self.host, self.since = sock, host, since
        self.link: Link | None = None
        self.taken = False  # the socket is the event loop's

    def is_busy(self) -> bool:
        return self.link is not None and self.link.connection.streams > 0

    def drop(self) -> None:
        """Without a word."""
        if self.link is not None:
            self.link.abort()
        if not self.taken:
            self.sock.close()

    def close(self, reason: str) -> None:
        if self.link is not None:
            self.link.close(reason)


def _most_links() -> int:
    """What the process's descriptors allow, with a quarter of them left for everything else."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MAX_LINKS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_LINKS
    return max(LEAST_LINKS, min(MAX_LINKS, soft * 3 // 4 - MAX_PENDING))


def _bind(places: Sequence[tuple[int, str]], port: int) -> list[socket.socket]:
    """One socket for each place, all on the same port; [] if the port is taken on any of them."""
    sockets: list[socket.socket] = []
    for family, host in places:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 on this machine
        try:
            if os.name == "posix":  # elsewhere it would let two peers share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((host, sockets[0].getsockname()[1] if sockets else port))
            # Linux lets two bind and only one listen
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL and host == "::":
                continue
            for other in sockets:
                other.close()
            if error.errno == errno.EADDRINUSE:
                return []
            why = _plain(error)
            raise UsageError(f"can't listen on {host} port {port}: {why}; check --host and --port") from None
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def _plain(error: OSError) -> str:
    """What went wrong, for people: without numbers and Python's repr."""
    if isinstance(error, socket.gaierror):
        return (error.strerror or str(error)).lower()
    # A name with several addresses gives one error whose text lists the others'.
    numbers = [error.errno] if error.errno else [int(n) for n in re.findall(r"\[Errno (\d+)\]", str(error))]
    return ", ".join(dict.fromkeys(os.strerror(n).lower() for n in numbers)) or str(error)
