"""SHELL: one participant of a swarm: drives the registry core over the transport.

A peer's node gossips with neighbours and advertises; a client's node subscribes at up to three
peers and is dialled by nobody. Each neighbour is one stream with two tasks: what arrives goes into
the core, and the core's next message is pulled when the last one has room, so back-pressure reaches
the core and nothing queues up here. `_transmit` is the one place where the core's wishes are carried
out: tick, wake the writers, act, re-arm the single timer.

Invariants: `start` returns once a first snapshot is whole (or, for a peer that found nobody, when
it begins a swarm of its own: `joining.py`); a claim is advertised as serving only once somebody has dialled one of
our addresses back, or while there is nobody to ask (`dialback.py`); `close` leaves no task behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Literal

from swarm.addresses import Address, address_group, parse_address
from swarm.clocks import describe
from swarm.dialback import DialsBack, Reachability
from swarm.errors import PeerFailed, RemoteError, StreamClosed, SwarmError, Unreachable
from swarm.flow import Priority
from swarm.identity import PeerId
from swarm.joining import Hands, Joining
from swarm.lan import Lan
from swarm.link import Link, Stream
from swarm.messages import Delta, DialBack, GossipHello, Message, ModelSeen, Subscribe
from swarm.permits import MayDial, Permits, anywhere, on_the_lan
from swarm.records import Descriptor, Load
from swarm.registry import (
    ClockOff,
    Drop,
    Kind,
    PeerEntry,
    Reach,
    ReachAddress,
    Registry,
    SecondInstance,
    SnapshotComplete,
    in_parts,
)
from swarm.state import SEQ_BLOCK, PeerDir, StateDir
from swarm.transport import Transport

log = logging.getLogger("swarm.node")

SNAPSHOT_TIMEOUT_S = 10.0  # for the first one, after the connection stands
SEEK_TIMEOUT_S = 2.0  # for a list of the models with a name first
LEAVE_TIMEOUT_S = 1.0  # for the signed leave to get out
DROP_TIMEOUT_S = 1.0  # for what was queued when a neighbour is let go
MAX_REACHED = 1024  # addresses at which somebody was found, kept for dialling again
MAX_HEARD = 256  # addresses of the local network, tried from time to time
REMEMBER_S = 300.0  # between writes of the remembered peers
REMEMBER_FIRST_S = 5.0  # until the first; doubles up to REMEMBER_S, so that one killed early knows somebody too
MOST_MEASURED = 256  # connections at once, well under the usual 1,024 file descriptors of a process
MEASURE_TIMEOUT_S = 0.5  # one slow peer must not delay `swarm status`
SEQ_MARGIN = 1024  # numbers left in a block when the next one is reserved


def clock() -> float:
    """Monotonic seconds that count time asleep: a lease goes on running while the lid is closed."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # there CLOCK_MONOTONIC goes on during sleep; time.monotonic doesn't
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def wall_ms() -> int:
    """Unix time as this machine has it, which nothing but warnings depends on."""
    return int(time.time() * 1000)


class _Channel:
    """A neighbour's stream. snapshot: done when its first one is whole, StreamClosed if it never will be."""

    def __init__(self, key: int, stream: Stream, kind: Kind) -> None:
        self.key, self.stream, self.kind = key, stream, kind
        self.wake = asyncio.Event()
        self.dropped: str | None = None
        self.snapshot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.snapshot.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def peer(self) -> PeerId:
        return self.stream.link.peer


class Node:
    """state: where peers are remembered between runs, None for nowhere. peer_dir: a peer's own locked
    directory, whose seq is kept there. only: the models (fingerprints) that a client hears of, None for all.
    follow: asked for that again whenever the list of models changes; until then it hears of none.
    lan: where to find others without an address; a peer listens there for as long as it lives."""

    def __init__(
        self,
        transport: Transport,
        *,
        role: Literal["peer", "client"],
        state: StateDir | None = None,
        peer_dir: PeerDir | None = None,
        only: Collection[bytes] | None = None,
        follow: Callable[[tuple[ModelSeen, ...]], Collection[bytes] | None] | None = None,
        lan: Lan | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.transport, self.role = transport, role
        self.wall_ms: Callable[[], int] = wall_ms
        self.second_instance = False  # somebody else speaks with this identity
        self._state, self._peer_dir = state, peer_dir
        self._rng = rng or random.Random()
        first_seq = peer_dir.reserve_seq() if peer_dir is not None else int(time.time() * 1000)
        self._seq_end = first_seq + SEQ_BLOCK
        self.registry = Registry(
            transport.identity if role == "peer" else None,
            now=clock(),
            rng=self._rng,
            only=only if follow is None else (),
            first_seq=first_seq,
            unix_ms=wall_ms(),
        )
        self._keys = itertools.count(1)
        self._channels: dict[int, _Channel] = {}
        self._reached: dict[PeerId, str] = {}
        self._told: dict[str, MayDial] = {}  # addresses that are in no record, and where they may lead
        self._permits = Permits(self.registry.places_of, self._own_addresses)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._completed = asyncio.Event()
        self._follow = follow
        self._lists_version = -1
        self._load = Load()
        self._reach_us = Reachability(
            transport, self._gossips, self._own_addresses, self._rng, lambda: self.heartbeat(self._load)
        )
        hands = Hands(
            dial=self._dial,
            link_to=transport.link_to,
            become_neighbours=self._become_neighbours,
            listed=self._listed,
            remember=self._remember_on_lan,
            own=self._own,
        )
        self._joining = Joining(hands, lan, client=role == "client")
        self._closed = False
        transport.on_link.append(self._saw)

    # ------------------------------------------------------------ starting and ending

    async def start(self, join: Sequence[str] = ()) -> None:
        """Join by one of these addresses, else by a remembered one or the LAN. Returns with the first snapshot.

        Where nobody answers at any address of `join`, remembered ones are tried, since a swarm outlives its
        first address. Raises UsageError (an address that isn't one), and if nothing helps Unreachable,
        IdentityError, VersionMismatch or HandshakeError; a client that finds nobody without an address gets
        Unreachable. A peer starts alone then. Call `close` in any case.
        """
        given = [parse_address(text) for text in join]
        if self.role == "peer":
            self.transport.handle(GossipHello, self._serve_gossip)
            self.transport.handle(Subscribe, self._serve_subscriber)
            self.transport.handle(DialBack, DialsBack(self.transport, self._permits).answer)
        remembered = self._recall()
        self._told |= {str(address): anywhere for address in (*given, *remembered)}  # a person's, or they were met
        for address in given:
            self.registry.remember(str(address), address.peer, given=True)
        for address in reversed(remembered):
            self.registry.remember(str(address), address.peer)
        self._transmit()
        await self._joining.join(given, remembered)
        self._own(self._remember_regularly())

    async def leave(self) -> None:
        """A signed goodbye, out to all neighbours when this returns (or after a second)."""
        self.registry.leave(clock())
        self._transmit()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(self._flush(channel) for channel in tuple(self._channels.values())))
        except TimeoutError:
            log.info("not every neighbour took our leave in %g s", LEAVE_TIMEOUT_S)

    async def close(self) -> None:
        """Stop everything of the node. The transport stays the caller's."""
        if self._closed:
            return
        self._closed = True
        self.transport.on_link.remove(self._saw)
        if self._timer is not None:
            self._timer.cancel()
        await self._joining.close()
        self._write_remembered(self._worth_remembering())
        for channel in self._channels.values():
            channel.dropped = "leaving"
            channel.wake.set()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ what is known

    def entries(self, fingerprint: bytes | None = None) -> tuple[PeerEntry, ...]:
        """All whose lease runs, of one model or of all; a peer's own entry is among them."""
        return self.registry.live(clock(), fingerprint)

    def known(self, fingerprint: bytes | None = None) -> int:
        """Peers alive, and those that went missing within ten minutes."""
        return self.registry.known(clock(), fingerprint)

    async def changed(self) -> None:
        """Wait for the next change of the table: a record, a renewal, a lapse."""
        await self._changed.wait()

    @property
    def descriptor_bytes(self) -> bytes:
        """The own signed descriptor; b"" before `publish`."""
        return self.registry.descriptor_bytes

    @property
    def alone(self) -> bool:
        """Whether there is no neighbour."""
        return self.registry.alone

    @property
    def serving_allowed(self) -> bool:
        """Whether a load of `serving` is advertised as such: dialled back, or nobody there to ask."""
        return self._reach_us.reachable

    @property
    def confirmed_addresses(self) -> set[str]:
        """Those of ours that somebody dialled back."""
        return self._reach_us.confirmed

    # ------------------------------------------------------------ models, for a client

    def models(self) -> tuple[ModelSeen, ...]:
        """Which models are alive, the one with most peers first."""
        return self.registry.models()

    async def want(self, only: Collection[bytes] | None) -> None:
        """Hear of these models (fingerprints), or of all; returns when all about them is here.

        Raises Unreachable when nobody tells in SNAPSHOT_TIMEOUT_S.
        """
        self.registry.want(only, clock())
        self._transmit()
        await self.whole()

    async def seek(self, name: str) -> None:
        """Have models of this name listed; returns when the list has come again, or after SEEK_TIMEOUT_S."""
        self.registry.seek(name)
        before = self.registry.lists_version
        self._transmit()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEEK_TIMEOUT_S):
                while self.registry.lists_version == before:
                    await self.changed()

    async def whole(self) -> None:
        """Wait until a snapshot of what is wanted is here. Raises Unreachable."""
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                while not self.registry.complete:
                    await self._completed.wait()
        except TimeoutError:
            raise Unreachable("any peer", f"no records in {SNAPSHOT_TIMEOUT_S:g} s", "try again") from None

    # ------------------------------------------------------------ reaching others

    async def link(self, peer: PeerId) -> Link:
        """A connection, by where it was reached before and what it advertises. Raises PeerFailed."""
        reached = self._reached.get(peer)
        addresses = dict.fromkeys([*([reached] if reached else []), *self.registry.table.addresses(peer)])
        if not addresses and peer not in self.transport.links:
            raise PeerFailed(peer, "nobody here knows an address of it")
        return await self.transport.link_to(peer, tuple(addresses), self._permits.by_record(peer))

    async def link_for(self, peer: PeerId, addresses: Sequence[str], asker: Link) -> Link:
        """A connection to a hop that a client named, whose descriptor lists these addresses. Raises PeerFailed.

        What the registry knows of that peer comes before the client's word, which may be of last year.
        """
        if peer not in self.transport.links:
            host = asker.remote[0]
            addresses = self.registry.table.addresses(peer) or addresses
            if not self._permits.may_dial_for(address_group(host), max(1, len(addresses)), clock()):
                raise PeerFailed(peer, "too many unknown peers were to be dialled for clients of that network")
            return await self.transport.link_to(peer, addresses, self._permits.for_client(peer, host))
        return self.transport.links[peer]

    async def measure(
        self, peers: Iterable[PeerId], timeout_s: float = MEASURE_TIMEOUT_S
    ) -> dict[PeerId, float | None]:
        """Seconds for a round trip to each, all at once; None where no answer came in time, and for those
        beyond MOST_MEASURED. Never raises."""
        wanted = list(dict.fromkeys(peers))
        asked = wanted[:MOST_MEASURED]
        found = await asyncio.gather(*(self._ping(peer, timeout_s) for peer in asked))
        return dict.fromkeys(wanted) | dict(zip(asked, found, strict=True))

    # ------------------------------------------------------------ being known

    async def publish(self, descriptor: Descriptor, load: Load | None = None) -> Descriptor:
        """Sign and spread what this peer is; what was signed is returned.

        `peer` and `seq` are filled in, addresses that don't fit left out. Then neighbours are asked to
        dial the addresses back (`dialback.py`). Raises UsageError or MessageError (nothing changed) when a
        field is impossible.
        """
        first = not self.registry.descriptor_bytes
        before, self._load = self._load, load or self._load
        self._reach_us.begin()
        try:
            made = self.registry.publish(descriptor, self._advertised(), clock())
        except SwarmError:
            self._load = before
            raise
        self._transmit()
        if first:
            self._own(self._reach_us.watch(), "confirming addresses")
        self._reach_us.look()
        return made

    def heartbeat(self, load: Load) -> None:
        """Goes out with the next heartbeat; a change of state at once."""
        self._load = load
        if self.registry.descriptor_bytes:
            self.registry.set_load(self._advertised(), clock())
            self._transmit()

    def _advertised(self) -> Load:
        if self._load.state == "serving" and not self._reach_us.reachable:
            return dataclasses.replace(self._load, state="loading")
        return self._load

    def _gossips(self) -> dict[PeerId, Link]:
        return {one.peer: one.stream.link for one in self._channels.values() if one.kind is Kind.GOSSIP}

    def _own_addresses(self) -> tuple[str, ...]:
        return self.registry.table.addresses(self.transport.identity.peer_id)

    def _saw(self, link: Link) -> None:
        self.registry.proved(link.peer, link.remote[0])
        self._permits.saw(link.peer, link.remote[0])

    # ------------------------------------------------------------ joining

    async def _become_neighbours(self, link: Link, place: str) -> None:
        """Returns once its snapshot is whole. Raises Unreachable."""
        channel = self._open_channel(link)
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                await asyncio.shield(channel.snapshot)
        except TimeoutError:
            channel.dropped = "no snapshot"
            channel.wake.set()
            raise Unreachable(place, f"no records in {SNAPSHOT_TIMEOUT_S:g} s") from None
        except StreamClosed as error:
            raise Unreachable(place, error.reason, "try another peer's address") from None

    def _listed(self) -> set[PeerId]:
        return {entry.peer for entry in self.entries()} | {channel.peer for channel in self._channels.values()}

    def _remember_on_lan(self, address: str, peer: PeerId) -> None:
        text = f"{peer}@{address}"
        self._told.setdefault(text, on_the_lan)
        heard = [one for one, may_dial in self._told.items() if may_dial is on_the_lan]
        if len(heard) > MAX_HEARD:
            del self._told[heard[0]]
        self.registry.remember(text, peer)

    async def _dial(self, address: Address) -> Link:
        link = await self.transport.dial(address)
        place = str(Address(None, address.host, address.port))
        self._reached.pop(link.peer, None)
        self._reached[link.peer] = place
        if len(self._reached) > MAX_REACHED:
            del self._reached[next(iter(self._reached))]
        self.registry.reached(str(address), link.peer)
        return link

    # ------------------------------------------------------------ neighbours

    def _open_channel(self, link: Link) -> _Channel:
        kind = Kind.GOSSIP if self.role == "peer" else Kind.SOURCE
        channel = self._attach(link.open_stream(), kind, opened_here=True)
        self._own(self._run(channel))
        return channel

    def _attach(self, stream: Stream, kind: Kind, *, opened_here: bool) -> _Channel:
        channel = _Channel(next(self._keys), stream, kind)
        self._channels[channel.key] = channel
        host = stream.link.remote[0]
        self.registry.attach(channel.key, channel.peer, kind, opened_here=opened_here, now=clock(), host=host)
        return channel

    async def _serve_gossip(self, stream: Stream, first: Message) -> None:
        await self._run(self._attach(stream, Kind.GOSSIP, opened_here=False), first)

    async def _serve_subscriber(self, stream: Stream, first: Message) -> None:
        await self._run(self._attach(stream, Kind.SUBSCRIBER, opened_here=False), first)

    async def _run(self, channel: _Channel, first: Message | None = None) -> None:
        """Until the stream is over, or the core drops it, or it breaks a rule."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            if first is not None:
                self.registry.receive(channel.key, first, clock())
            tasks = [asyncio.create_task(self._write(channel)), asyncio.create_task(self._read(channel))]
            self._transmit()
            if channel.kind is Kind.GOSSIP:
                self._reach_us.look()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._let_go(channel)
        except StreamClosed as error:
            channel.dropped = error.reason
        except RemoteError as error:
            log.info("%s broke a rule of the registry: %s", channel.peer[:8], error)
            channel.stream.reset(str(error))
            channel.dropped = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._detach(channel)

    def _detach(self, channel: _Channel) -> None:
        channel.stream.finish()
        del self._channels[channel.key]
        if not channel.snapshot.done():
            channel.snapshot.set_exception(StreamClosed(channel.dropped or "this node was closed"))
        self.registry.detach(channel.key, clock())
        self._transmit()

    async def _read(self, channel: _Channel) -> None:
        while True:
            message = await channel.stream.receive()
            for part in in_parts(message):
                self.registry.receive(channel.key, part, clock())
                await asyncio.sleep(0)
            self._transmit()

    async def _write(self, channel: _Channel) -> None:
        """Returns when the core has let this neighbour go."""
        while channel.dropped is None:
            channel.wake.clear()
            message = self.registry.next_message(channel.key, clock())
            if message is not None:
                await channel.stream.send(message, _priority(message))
                continue
            self._act()  # a visitor that has had all is dropped only now
            if channel.dropped is None:
                await channel.wake.wait()

    async def _let_go(self, channel: _Channel) -> None:
        """What was queued leaves first; then the other side reads why."""
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await channel.stream.end()
        except TimeoutError:
            pass
        channel.stream.reset(channel.dropped or "done")

    async def _flush(self, channel: _Channel) -> None:
        try:
            while (message := self.registry.next_message(channel.key, clock())) is not None:
                await channel.stream.send(message, _priority(message))
            await channel.stream.end()
        except StreamClosed:
            pass

    # ------------------------------------------------------------ the core's wishes

    def _transmit(self) -> None:
        """Tick, wake the writers that have something, act, re-arm the one timer."""
        if self._closed:
            return
        now = clock()
        self.registry.tick(now, self.wall_ms())
        self._follow_models(now)
        for key in self.registry.sendable(now):
            if key in self._channels:
                self._channels[key].wake.set()
        self._act()
        self._keep_seq()
        if self.registry.table.version != self._version:
            self._version = self.registry.table.version
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.001, self.registry.deadline - clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._transmit)

    def _act(self) -> None:
        for action in self.registry.actions():
            if isinstance(action, Reach):
                self._own(self._reach(action.peer))
            elif isinstance(action, ReachAddress):
                self._own(self._reach_address(action.address))
            elif isinstance(action, Drop):
                self._drop(action)
            elif isinstance(action, SnapshotComplete):
                self._complete(action.key)
            elif isinstance(action, SecondInstance):
                self._warn_of_second_instance()
            elif isinstance(action, ClockOff):
                log.warning("%s", clock_warning(action))

    def _complete(self, key: int) -> None:
        channel = self._channels.get(key)
        if channel is not None and not channel.snapshot.done():
            channel.snapshot.set_result(None)
        completed, self._completed = self._completed, asyncio.Event()
        completed.set()

    def _follow_models(self, now: float) -> None:
        if self._follow is not None and self.registry.lists_version != self._lists_version:
            self._lists_version = self.registry.lists_version
            self.registry.want(self._follow(self.registry.models()), now)

    def _drop(self, action: Drop) -> None:
        channel = self._channels.get(action.key)
        if channel is not None:
            channel.dropped = action.reason
            channel.wake.set()

    def _warn_of_second_instance(self) -> None:
        if not self.second_instance:
            self.second_instance = True
            log.warning(
                "another process runs with the same identity %s: stop one of them, or start it with --new",
                self.transport.identity.peer_id[:8],
            )

    def _keep_seq(self) -> None:
        """What is on disk is above everything that was signed, so a restart outranks it. Where nothing can be written
        now (the disk is full, descriptors ran out) the wall clock has to do that."""
        if self._peer_dir is not None and self.registry.seq > self._seq_end - SEQ_MARGIN:
            first = self.registry.seq + 1
            try:
                first = self._peer_dir.reserve_seq(first)
            except OSError as error:
                log.warning("can't write down how far this peer has counted (%s)", error.strerror)
            self._seq_end = first + SEQ_BLOCK

    async def _reach(self, peer: PeerId) -> None:
        try:
            self._open_unless_there(await self.link(peer))
        except SwarmError as error:
            log.debug("%s isn't reached: %s", peer[:8], error)
            self.registry.unreached(peer, clock())
        self._transmit()

    async def _reach_address(self, text: str) -> None:
        try:
            address = parse_address(text)
            may_dial = self._told.get(text)
            if may_dial is anywhere:
                link = await self._dial(address)
            else:  # heard on the local network, or out of a record: somebody's in any case
                assert address.peer is not None
                place = str(Address(None, address.host, address.port))
                by_record = self._permits.by_record(address.peer)
                link = await self.transport.link_to(address.peer, (place,), may_dial or by_record)
            self._open_unless_there(link)
        except SwarmError as error:
            log.debug("nobody is reached at %s: %s", text, error)
            self.registry.unreached(text, clock())
        self._transmit()

    def _open_unless_there(self, link: Link) -> None:
        there = {one.peer for one in self._channels.values() if one.kind is not Kind.SUBSCRIBER}
        self.registry.reached(link.peer, link.peer)
        if link.peer not in there:
            self._open_channel(link)

    # ------------------------------------------------------------ remembering

    def _recall(self) -> list[Address]:
        """The remembered addresses of this network, the latest first."""
        found: list[Address] = []
        remembered = self._state.remembered(self.transport.network) if self._state is not None else {}
        for text, peer in remembered.items():
            try:
                found.append(parse_address(f"{peer}@{text}" if peer else text))
            except SwarmError:
                log.debug("a remembered address that isn't one: %.80r", text)
        return [address for address in found if address.peer != self.transport.identity.peer_id]

    def _worth_remembering(self) -> dict[str, str]:
        """Where live peers are: by what they advertise, and last by where they were really reached."""
        own = self.transport.identity.peer_id
        live = [entry for entry in self.entries() if entry.peer != own]
        advertised = {
            entry.descriptor.addresses[0]: entry.peer
            for entry in live
            if entry.descriptor.addresses and self._may_remember(entry.peer, entry.descriptor.addresses[0])
        }
        alive = {entry.peer for entry in live} | {channel.peer for channel in self._channels.values()}
        reached = {place: peer for peer, place in self._reached.items() if peer in alive}
        return {**advertised, **reached}

    def _may_remember(self, peer: PeerId, text: str) -> bool:
        """The next start dials what is remembered without asking whose word it was."""
        try:
            return self._permits.by_record(peer)(parse_address(text).host)
        except SwarmError:
            return False

    def _write_remembered(self, peers: dict[str, str]) -> None:
        if self._state is not None and peers:
            self._state.remember(self.transport.network, peers)

    async def _remember_regularly(self) -> None:
        pause_s = REMEMBER_FIRST_S
        while True:
            await asyncio.to_thread(self._write_remembered, self._worth_remembering())
            await asyncio.sleep(pause_s)
            pause_s = min(REMEMBER_S, 2 * pause_s)

    # ------------------------------------------------------------ tasks

    async def _ping(self, peer: PeerId, timeout_s: float) -> float | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await (await self.link(peer)).ping()
        except (SwarmError, TimeoutError):
            return None

    def _own(self, work: Coroutine[Any, Any, None], what: str = "a task") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        """Our own bugs are never swallowed; what the network did was dealt with where it happened."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SwarmError):
            log.error("a task of the node failed", exc_info=error)
            task.get_loop().call_exception_handler(
                {"message": "a task of the node failed", "exception": error}
            )


def clock_warning(off: ClockOff) -> str:
    """For the person whose clock it is."""
    remedy = {"linux": "timedatectl set-ntp true", "win32": "w32tm /resync"}.get(sys.platform, "")
    return (
        f"the clock of this machine is {describe(off.error_s)} those of "
        f"{off.clocks} neighbours (their median); the swarm works on, but set it"
        + (f", say with: {remedy}" if remedy else "")
    )


def _priority(message: Message) -> Priority:
    """Records may be many, and a step must not wait behind them; all else is a few bytes."""
    return Priority.BULK if isinstance(message, Delta) else Priority.CONTROL
