"""Several registry cores on a virtual network: virtual time, real encode and decode of every message.

A `World` holds participants and the streams between them. Messages take time, and while `loss` or
`doubling` is above zero some get lost, doubled or overtaken (worse than what TCP does to a stream,
on purpose). Signatures are real, and each is verified once per world: a good one is remembered by
its bytes. Cutting a pair ends their streams and refuses new ones. `run` moves time from event to
event; nothing here reads a clock or the global random state.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgpack

from swarm.errors import MessageError
from swarm.identity import Identity, PeerId
from swarm.messages import Message, decode, encode
from swarm.records import Record, check_signature
from swarm.registry import Action, Drop, Kind, Reach, ReachAddress, Registry, SecondInstance
from tests.sim.records import descriptor, serving

MESSAGE_LIMIT = 16 * 1024  # protocol.md


def through_the_wire(message: Message) -> Message:
    """What arrives: encoded, measured and decoded as the wire does it."""
    values, tensors = encode(message)
    data = msgpack.packb(values)
    assert len(data) <= MESSAGE_LIMIT, f"{message.kind} of {len(data)} bytes"
    assert not tensors
    return decode(msgpack.unpackb(data), {})


def size(message: Message) -> int:
    """In bytes, as it travels."""
    return len(msgpack.packb(encode(message)[0]))


@dataclass
class Participant:
    name: str
    registry: Registry
    identity: Identity | None
    streams: dict[int, tuple[str, int]] = field(default_factory=dict)  # own key -> (other, its key)
    seen: list[Action] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        """A client has an identity for its connections only."""
        return self.identity.peer_id if self.identity is not None else PeerId(self.name)


class World:
    def __init__(self, seed: int, *, loss: float = 0.0, doubling: float = 0.0, delay_s: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.seed, self.loss, self.doubling, self.delay_s = seed, loss, doubling, delay_s
        self.now = 1000.0
        self.unix_ms = 1_764_000_000_000
        self.there: dict[str, Participant] = {}
        self.cut: set[frozenset[str]] = set()
        self.sent_bytes = 0
        self.arrived: dict[str, list[Message]] = {}  # name -> all that came, for those who are put here
        self._good: set[bytes] = set()
        self._keys = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    # ------------------------------------------------------------ who is there

    def add(
        self,
        name: str,
        *,
        client: bool = False,
        only: Collection[bytes] | None = None,
        first_seq: int | None = None,
    ) -> Participant:
        """A peer's identity follows from its name, so adding it again is a restart."""
        identity = None if client else Identity.from_seed(name.encode().ljust(32, b"\1"))
        wall_ms = self.unix_ms + int(self.now * 1000)
        registry = Registry(
            identity,
            now=self.now,
            rng=random.Random(self.rng.random()),
            only=only,
            first_seq=wall_ms if first_seq is None else first_seq,
            unix_ms=wall_ms,
            check=self._check,
        )
        made = Participant(name, registry, identity)
        self.there[name] = made
        return made

    def peers(self, count: int) -> list[str]:
        """So many, published, each knowing the first one's address."""
        names = [f"p{n}" for n in range(count)]
        for name in names:
            self.add(name)
            self.publish(name)
            if name != names[0]:
                self.there[name].registry.remember(names[0], given=True)
                self.connect(name, names[0])
        return names

    def publish(self, name: str, **changes: object) -> None:
        self[name].publish(
            descriptor(**({"addresses": (name,), "name": name} | changes)), serving(), self.now
        )

    def crash(self, name: str) -> None:
        """Gone without a word; the others' streams end, as when a process dies."""
        dead = self.there.pop(name)
        for other, key in dead.streams.values():
            self._detach(other, key)

    def connect(self, name: str, other: str) -> bool:
        if other not in self.there or other == name or frozenset((name, other)) in self.cut:
            return False
        here, there = self.there[name], self.there[other]
        a, b = next(self._keys), next(self._keys)
        here.streams[a], there.streams[b] = (other, b), (name, a)
        client = here.identity is None
        here.registry.attach(
            a, there.peer, Kind.SOURCE if client else Kind.GOSSIP, opened_here=True, now=self.now
        )
        there.registry.attach(
            b, here.peer, Kind.SUBSCRIBER if client else Kind.GOSSIP, opened_here=False, now=self.now
        )
        return True

    def cut_off(self, group: Iterable[str], rest: Iterable[str]) -> None:
        for a, b in itertools.product(group, rest):
            self.cut.add(frozenset((a, b)))
            if a in self.there:
                for key, (other, _) in list(self.there[a].streams.items()):
                    if other == b:
                        self._hang_up(a, key)

    def heal(self) -> None:
        self.cut.clear()

    def __getitem__(self, name: str) -> Registry:
        return self.there[name].registry

    # ------------------------------------------------------------ what they see

    def listed(self, name: str, fingerprint: bytes | None = None) -> set[str]:
        """The names (of descriptors) that `name` holds for alive."""
        return {entry.descriptor.name for entry in self[name].live(self.now, fingerprint)}

    def everybody_lists(self, names: Iterable[str]) -> bool:
        expected = set(names)
        return all(self.listed(name) == expected for name in self.there)

    def second_instances(self, name: str) -> int:
        return sum(isinstance(one, SecondInstance) for one in self.there[name].seen)

    def _check(self, record: Record, signed: bytes) -> None:
        if signed not in self._good:
            check_signature(record, signed)
            self._good.add(signed)

    # ------------------------------------------------------------ time

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True as soon as `until` holds."""
        end = self.now + seconds
        while True:
            self._turn()
            if until is not None and until():
                return True
            due = [self[name].deadline for name in self.there] + [event[0] for event in self._events[:1]]
            following = max(self.now, min(due, default=end))
            if following > end:
                self.now = end
                return False
            self.now = following if following > self.now else self.now + 1e-6
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for name in list(self.there):
                self[name].tick(self.now)

    def _turn(self) -> None:
        """Everybody says and does what there is to say and do now."""
        for name in list(self.there):
            self._act(name)
            for key, message in self[name].drain(self.now):
                self._send(name, key, message)
            self._act(name)

    def _act(self, name: str) -> None:
        here = self.there[name]
        for action in here.registry.actions():
            here.seen.append(action)
            if isinstance(action, Drop):
                self._let_go(name, action.key)
            elif isinstance(action, Reach):
                self._reach(name, action.peer, here.registry.table.addresses(action.peer))
            elif isinstance(action, ReachAddress):
                self._reach(name, action.address, (action.address.partition("@")[2] or action.address,))

    def _reach(self, name: str, target: PeerId | str, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            if self.connect(name, address):
                self[name].reached(target, self.there[address].peer)
                return
        self[name].unreached(target, self.now)

    def _send(self, name: str, key: int, message: Message) -> None:
        if key not in self.there[name].streams:
            return
        other, other_key = self.there[name].streams[key]
        arriving = through_the_wire(message)
        self.sent_bytes += len(msgpack.packb(encode(message)[0]))
        copies = 1 - (self.rng.random() < self.loss) + (self.rng.random() < self.doubling)
        if message.kind in ("gossip-hello", "subscribe"):
            copies = 1  # a stream exists with its first message, or not at all
        for _ in range(copies):
            unruly = self.loss > 0 or self.doubling > 0
            delay = self.delay_s * (self.rng.uniform(0.1, 30.0) if unruly else 1.0)
            if message.kind in ("gossip-hello", "subscribe"):
                delay = 0.0
            at = self.now + delay
            heapq.heappush(
                self._events, (at, next(self._order), lambda: self._arrive(other, other_key, arriving))
            )

    def _arrive(self, name: str, key: int, message: Message) -> None:
        if name not in self.there or key not in self.there[name].streams:
            return
        if name in self.arrived:
            self.arrived[name].append(message)
        try:
            self[name].receive(key, message, self.now)
        except MessageError:
            self._hang_up(name, key)

    def _let_go(self, name: str, key: int) -> None:
        """A polite end: what is on its way arrives first."""
        if key in self.there[name].streams:
            other, other_key = self.there[name].streams[key]
            self._detach(name, key)
            at = self.now + self.delay_s
            heapq.heappush(self._events, (at, next(self._order), lambda: self._detach(other, other_key)))

    def _hang_up(self, name: str, key: int) -> None:
        if key not in self.there[name].streams:
            return
        other, other_key = self.there[name].streams[key]
        self._detach(name, key)
        if other in self.there:
            self._detach(other, other_key)

    def _detach(self, name: str, key: int) -> None:
        if name in self.there and self.there[name].streams.pop(key, None) is not None:
            self[name].detach(key, self.now)
