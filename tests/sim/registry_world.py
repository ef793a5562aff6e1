"""Registry cores on the virtual network: what node.py does for one of them on a real one, and who is there.

A `Participant` is the shell of one core: it dials, opens one stream to each peer, tells the core what comes,
sends what the core says, and keeps on its "disk" what a real one keeps (the highest seq, and addresses).
After every message and every turn the world's `Invariants` look at what has changed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from swarm.errors import MessageError
from swarm.identity import Identity, PeerId
from swarm.messages import Delta, GossipHello, Message, Subscribe
from swarm.records import Load
from swarm.registry import (
    Action,
    Drop,
    Kind,
    Reach,
    ReachAddress,
    Registry,
    SecondInstance,
    in_parts,
)
from tests.sim.hostile import Hostile
from tests.sim.invariants import Invariants
from tests.sim.network import CALM, End, Host, Network, Weather
from tests.sim.records import Keys, Notary, descriptor, serving

MOST_REMEMBERED = 64  # addresses kept on a disk
LOOK_S = 0.1  # between looks at whether something has come about


@dataclass
class Disk:
    """What outlives a process, unless it is lost."""

    seq: int = 0
    addresses: dict[str, PeerId] = field(default_factory=dict)


class Participant:
    """A peer's or a client's shell. identity: a client's is for its connections only."""

    def __init__(
        self,
        world: RegistryWorld,
        host: Host,
        identity: Identity,
        *,
        client: bool,
        fingerprint: bytes | None,
        only: Collection[bytes] | None,
        first_seq: int | None,
        disk: Disk,
    ) -> None:
        self.world, self.host, self.identity, self.disk = world, host, identity, disk
        self.client, self.fingerprint = client, fingerprint
        self.actions: list[Action] = []
        self.joining: set[str] = set()
        self.arrived: list[Message] | None = None  # all that comes, for whoever wants to look
        self.published_at: float | None = None  # virtual time of the first
        self.ended_at: float | None = None  # left, or crashed
        wall_ms = host.wall_ms()
        self.first_seq = max(disk.seq + 1, wall_ms) if first_seq is None else first_seq
        self.registry = Registry(
            None if client else identity,
            now=host.clock(),
            rng=random.Random(f"{world.seed} {host.name} {host.network.now}"),
            only=only,
            first_seq=self.first_seq,
            unix_ms=wall_ms,
            check=world.notary.check,
        )
        self._keys = itertools.count(1)
        self._ends: dict[int, End] = {}
        host.shell = self

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def now(self) -> float:
        """Its own clock."""
        return self.host.clock()

    @property
    def running(self) -> bool:
        return self.host.up and not self.host.asleep

    def linked(self) -> set[PeerId]:
        return {one.peer for one in self.registry.neighbours if one.kind is not Kind.SUBSCRIBER}

    def addresses_known(self) -> set[str]:
        """Where it would dial sooner or later."""
        table = self.registry.table
        peers = {held.peer for held in table.held()} | set(table.lapsed()) | self.linked()
        tried = {address.rpartition("@")[2] for address in self.registry.addresses}
        return tried | {address for peer in peers for address in table.addresses(peer)}

    # ------------------------------------------------------------ what a node does

    def join(self, address: str) -> None:
        """By an address that the user gave."""
        self.registry.remember(address, given=True)
        self.joining.add(address)
        self._dial(address, (address,))

    def recall(self) -> None:
        """By what the disk knows."""
        for address, peer in self.disk.addresses.items():
            self.registry.remember(address, peer)
        for address in list(self.disk.addresses)[:8]:
            self._dial(address, (address,))

    def publish(self, load: Load | None = None, **changes: object) -> None:
        own = {"addresses": (self.host.address,), "name": self.name}
        fingerprint = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        self.registry.publish(descriptor(**(own | fingerprint | changes)), load or serving(), self.now)
        if self.published_at is None:
            self.published_at = self.host.network.now
        self._changed()

    def set_load(self, load: Load) -> None:
        self.registry.set_load(load, self.now)
        self._changed()

    def leave(self) -> None:
        self.registry.leave(self.now)
        self.ended_at = self.host.network.now
        self._changed()

    def save(self) -> None:
        """As a real node does now and then."""
        self.disk.seq = self.registry.seq + 1024  # it reserves numbers in blocks
        for entry in self.registry.live(self.now):
            if entry.peer != self.peer and entry.descriptor.addresses:
                self.disk.addresses[entry.descriptor.addresses[0]] = entry.peer
        while len(self.disk.addresses) > MOST_REMEMBERED:
            del self.disk.addresses[next(iter(self.disk.addresses))]

    def _changed(self) -> None:
        self.host.mark()
        self.world.invariants.look_at(self, self.peer)

    # ------------------------------------------------------------ the shell of network.py

    def opened(self, end: End) -> None:
        if self.client:
            raise MessageError("clients are dialled by nobody")

    def received(self, end: End, message: Message) -> None:
        if self.arrived is not None:
            self.arrived.append(message)
        if end.tag is None:
            if not isinstance(message, GossipHello | Subscribe):
                raise MessageError(f"a stream begins with {message.kind}")
            self._attach(end, Kind.GOSSIP if isinstance(message, GossipHello) else Kind.SUBSCRIBER)
        try:
            for part in in_parts(message):
                self.registry.receive(end.tag, part, self.now)
        finally:
            if isinstance(message, Delta):
                self.world.invariants.heard(self, end, message)

    def ended(self, end: End) -> None:
        if end.tag is not None:
            self._ends.pop(end.tag, None)
            self.registry.detach(end.tag, self.now)

    def turn(self) -> None:
        registry, now = self.registry, self.now
        registry.tick(now, self.host.wall_ms())
        self._act()
        for key in registry.sendable(now):
            end = self._ends.get(key)
            while end is not None and end.writable and (message := registry.next_message(key, now)):
                end.send(message)
        self._act()
        self.host.alarm(registry.deadline)
        self.world.invariants.after_turn(self)

    def _attach(self, end: End, kind: Kind) -> None:
        end.tag = next(self._keys)
        self._ends[end.tag] = end
        peer, host = self.world.peer_at(end.peer), end.peer.address.rpartition(":")[0]
        self.registry.proved(peer, host)
        self.registry.attach(end.tag, peer, kind, opened_here=end.opened_here, now=self.now, host=host)

    def _act(self) -> None:
        for action in self.registry.actions():
            self.actions.append(action)
            if isinstance(action, Drop):
                end = self._ends.pop(action.key, None)
                if end is not None:
                    end.close()
                    self.registry.detach(action.key, self.now)
            elif isinstance(action, Reach):
                self._dial(action.peer, self.registry.table.addresses(action.peer))
            elif isinstance(action, ReachAddress):
                self._dial(action.address, (action.address.partition("@")[2] or action.address,))
        del self.actions[:-100]

    def _dial(self, target: PeerId | str, addresses: tuple[str, ...]) -> None:
        """Each address in turn, as far as the first where somebody is."""

        def answer(end: End | None) -> None:
            if end is not None:
                self._reached(target, end)
            elif rest:
                self._dial(target, rest)
            else:
                self.registry.unreached(target, self.now)

        if not addresses:
            self.registry.unreached(target, self.now)
            return
        first, rest = addresses[0], addresses[1:]
        self.host.dial(first, answer)

    def _reached(self, target: PeerId | str, end: End) -> None:
        peer = self.world.peer_at(end.peer)
        self.registry.reached(target, peer)
        self.registry.reached(peer, peer)
        if peer in self.linked() or peer == self.peer:
            end.reset()
        else:
            self._attach(end, Kind.SOURCE if self.client else Kind.GOSSIP)


class RegistryWorld:
    """keys: how records are signed. turn_s: see `Network`. Names are identities and addresses: adding one
    again after its end is a restart."""

    def __init__(
        self, seed: object, weather: Weather = CALM, *, keys: Keys = "hash", turn_s: float = 0.0
    ) -> None:
        self.seed = seed
        self.network = Network(seed, weather, turn_s=turn_s)
        self.notary = Notary(keys, lambda: self.network.now)
        self.there: dict[str, Participant] = {}
        self.disks: dict[str, Disk] = {}
        self.hostile: set[PeerId] = set()  # identities of those who lie; see hostile.py
        self.invariants = Invariants(self)
        self._peers: dict[str, PeerId] = {}
        self._numbers: dict[str, int] = {}

    @property
    def now(self) -> float:
        return self.network.now

    # ------------------------------------------------------------ who is there

    def add(
        self,
        name: str,
        *,
        client: bool = False,
        fingerprint: bytes | None = None,
        only: Collection[bytes] | None = None,
        first_seq: int | None = None,
        wall_error_s: float = 0.0,
        identity_of: str | None = None,
    ) -> Participant:
        """Not published, and without a neighbour. fingerprint: what it serves, or a client wants to hear of (`only`:
        of so many). identity_of: somebody whose key it has, if not its own."""
        host = self.network.add(name, self.address(name), wall_error_s=wall_error_s)
        identity = self.notary.identity(identity_of or name)
        if client and fingerprint is not None:
            only = (fingerprint,)
        self._peers[name] = identity.peer_id
        disk = self.disks.setdefault(name, Disk())
        made = Participant(
            self,
            host,
            identity,
            client=client,
            fingerprint=fingerprint,
            only=only,
            first_seq=first_seq,
            disk=disk,
        )
        self.there[name] = made
        host.mark()
        return made

    def add_hostile(self, name: str, *, every_s: float, flood: bool) -> Hostile:
        host = self.network.add(name, self.address(name))
        self._peers[name] = self.notary.identity(name).peer_id
        host.mark()
        return Hostile(self, host, every_s=every_s, flood=flood)

    def peers(self, count: int) -> list[str]:
        """So many, published, each a neighbour of the first one."""
        names = [f"p{n}" for n in range(count)]
        for name in names:
            self.add(name).publish()
            if name != names[0]:
                self.there[name].join(self.address(names[0]))
        return names

    def crash(self, name: str, *, silently: bool = False) -> None:
        dead = self.there.pop(name)
        if dead.ended_at is None:
            dead.ended_at = self.now
        self.network.crash(dead.host, silently=silently)
        self.invariants.gone(dead)

    def connect(self, name: str, other: str) -> None:
        """Neighbours at once."""
        here, there = self.there[name], self.there[other]
        end = self.network.connect(here.host, there.host)
        here._attach(end, Kind.SOURCE if here.client else Kind.GOSSIP)
        here.host.mark()

    def cut_off(self, group: Iterable[str], rest: Iterable[str], *, one_way: bool = False) -> None:
        """Nothing gets from the one to the other, nor back. What was connected finds out by itself."""
        group, rest = list(group), list(rest)
        self.network.cut(group, rest)
        if not one_way:
            self.network.cut(rest, group)

    def heal(self) -> None:
        self.network.heal()

    def weather(self, **changes: object) -> None:
        self.network.storm(replace(self.network.weather, **changes))  # type: ignore[arg-type]

    def address(self, name: str) -> str:
        """A public one, each name's in a /24 of its own."""
        number = self._numbers.setdefault(name, len(self._numbers))
        return f"{20 + number // 250}.{number % 250}.1.1:7070"

    def peer_at(self, host: Host) -> PeerId:
        return self._peers[host.name]

    def name_of(self, peer: PeerId) -> str:
        return next((name for name, one in self._peers.items() if one == peer), peer[:8])

    def __getitem__(self, name: str) -> Registry:
        return self.there[name].registry

    # ------------------------------------------------------------ what they see

    def listed(self, name: str, fingerprint: bytes | None = None) -> set[str]:
        """The names (of descriptors) that `name` holds for alive."""
        here = self.there[name]
        return {entry.descriptor.name for entry in here.registry.live(here.now, fingerprint)}

    def everybody_lists(self, names: Iterable[str]) -> bool:
        expected = set(names)
        return all(self.listed(name) == expected for name in self.there)

    def second_instances(self, name: str) -> int:
        return sum(isinstance(one, SecondInstance) for one in self.there[name].actions)

    # ------------------------------------------------------------ time

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True as soon as `until` holds (which is asked every LOOK_S)."""
        end = self.now + seconds
        if until is None:
            self.network.run(end)
            return True
        while not until():
            if self.now >= end:
                return False
            self.network.run(min(end, self.now + LOOK_S))
        return True
