"""A swarm of whole registry cores in virtual time, begun as one that has stood for hours, and what it costs.

Everybody holds everybody's record and has about twelve neighbours; heartbeats are spread over their interval.
From then on nothing is modelled: cores, their shells and the network are those of tests/sim, with real encoding
and decoding. What all would do alike is done once: a signature is verified, and a record decoded, for the whole
swarm (cores of 1,000 peers would fill a machine otherwise), but never for the few `timed` peers, whose CPU time
is taken with everything that they have to do.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from swarm import heads, owner, records, table
from swarm.circle import MAX_ADDRESSES
from swarm.digests import Digests
from swarm.heads import Held
from swarm.identity import Identity
from swarm.messages import Message, decode, encode
from swarm.owner import LEASE_INTERVALS, heartbeat_interval_s
from swarm.packing import pack, unpack
from swarm.places import Places
from swarm.records import Record, check_signature
from swarm.registry import Registry
from swarm.table import Table, _Pace
from tests.sim.network import End, Weather
from tests.sim.records import Notary, serving
from tests.sim.registry_world import Participant, RegistryWorld
from tests.sim.scenario import OneClock

DELAY_S = (0.02, 0.1)  # one way, between homes on two continents or in one town
FINE = Weather(delay_s=DELAY_S)
LOSSY = Weather(delay_s=DELAY_S, ordered=False, loss=0.3)  # lost for good, worse than what TCP does
TURN_S = 0.02  # a shell answers together what came within that; delays are rounded up to it
LINKS = 12  # neighbours of a peer, on average: circle.py keeps 8 and lets old ones go above 12
ENVELOPE_BYTES = 76  # per message: record and frame 24, TCP and IP 52
MOST_HEAL_S = 120.0  # that a partition's end is waited for
LOOK_S = 0.05  # between looks at who knows
CHURN_S = 0.06  # between two replacements: six seconds for a swarm of a hundred, faster than any lease
TOMBSTONES_S = 30.0  # a twentieth of what tombstones last, so that one needn't wait for ten minutes


def random_links(peers: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Who has whom for a neighbour: each dials LINKS / 2 others."""
    there: set[frozenset[int]] = set()
    for here in range(peers):
        others = [other for other in range(peers) if other != here]
        for other in rng.sample(others, min(LINKS // 2, len(others))):
            pair = frozenset((here, other))
            if pair not in there:
                there.add(pair)
                yield here, other


class Swarm:
    """peers: how many. timed: how many of them do all their work themselves, and have it timed."""

    def __init__(self, peers: int, seed: int, timed: int = 0) -> None:
        self.rng = random.Random(f"benchmark {seed}")
        self.world = RegistryWorld(seed, FINE, keys="ed25519", turn_s=TURN_S)
        self.world.network.__class__ = OneClock
        self.world.invariants.watching = False
        self.notary = _Once(self.world)
        self.world.notary = self.notary
        self.names = [f"p{n}" for n in range(peers)]
        self.timed = [_Timed(self, name) for name in self.names[:timed]]

    def begin(self) -> None:
        """Everybody knows everybody, and gossips."""
        interval_s = heartbeat_interval_s(len(self.names))
        with mock.patch.object(owner, "_INTERVALS", ((0, interval_s),)):
            for name in self.names:  # a heartbeat of each, the oldest nearly due
                self.world.run(interval_s / len(self.names))
                self.world.add(name).publish()
        first, *others = (self.world[name] for name in self.names)
        for other in others:
            held = next(other.table.held())
            first.table.accept(other.table.told(held, self.world.now, full=True), self.world.now)
        first._wishes.complete = True
        for other in others:
            _become_like(other.table, first.table)
            other._wishes.complete = True
        for a, b in random_links(len(self.names), self.rng):
            self.world.connect(self.names[a], self.names[b])
        for one in self.timed:
            one.begin()
        gc.freeze()
        self.world.run(2.0)  # the digests that new neighbours exchange

    # ------------------------------------------------------------ what is measured

    def traffic(self, seconds: float) -> dict[str, float]:
        """Bytes a second and direction: on average, and of the peer that sends most; CPU share of the timed."""
        hosts = [self.world.there[name].host for name in self.names]
        before = [(host.sent_bytes, host.sent_messages) for host in hosts]
        cpu = [one.cpu_s for one in self.timed]
        self.world.run(seconds)
        sent = [
            (host.sent_bytes - size + ENVELOPE_BYTES * (host.sent_messages - count)) / seconds
            for host, (size, count) in zip(hosts, before, strict=True)
        ]
        found = {"bytes_per_s": sum(sent) / len(sent), "most_bytes_per_s": max(sent)}
        found["links"] = sum(len(self.world[name].neighbours) for name in self.names) / len(self.names)
        if self.timed:
            shares = [(one.cpu_s - was) / seconds for one, was in zip(self.timed, cpu, strict=True)]
            found["cpu_share"] = max(shares)
        return found

    def spread(self, changes: int, most_s: float = 30.0) -> list[float]:
        """Seconds until 99% know, for so many changes of state by different peers, 30% of all messages lost."""
        self.world.network.storm(LOSSY)
        chosen = self.rng.sample(self.names, changes)
        began, took = self.world.now, [most_s] * changes
        for name in chosen:
            self.world.there[name].set_load(serving(state="draining"))
        missing = dict(enumerate(self.world.there[name].peer for name in chosen))
        while missing and self.world.now - began < most_s:
            self.world.run(LOOK_S)
            for at, peer in list(missing.items()):
                if self._knowing(peer) >= 0.99 * len(self.names):
                    took[at] = self.world.now - began
                    del missing[at]
        self.world.network.storm(FINE)
        return took

    def _knowing(self, peer: Any) -> int:
        tables = (self.world[name].table for name in self.names)
        return sum(held is not None and held.head.state == "draining" for held in (one.get(peer) for one in tables))

    def heal(self) -> float:
        """Seconds after a partition until all list all again. Both sides have forgotten the other one before."""
        half = len(self.names) // 2
        self.world.cut_off(self.names[:half], self.names[half:])
        lease_s = LEASE_INTERVALS * heartbeat_interval_s(len(self.names))
        self.world.run(2.0 * lease_s)
        assert all(len(self.world.listed(name)) <= len(self.names) - half for name in self.names)
        self.world.heal()
        began = self.world.now
        return self.world.now - began if self.world.run(MOST_HEAL_S, until=self._is_whole) else MOST_HEAL_S

    def _is_whole(self) -> bool:
        there = set(self.world.there)
        return all(self.world.listed(name) == there for name in self.names)

    def churn(self, times: int) -> dict[str, float]:
        """Bytes that the first peer holds before, at the end of, and after a time in which all others were replaced
        so often, one each CHURN_S, half of them with a goodbye. Tombstones last TOMBSTONES_S here.

        Before, it remembers as many old addresses as a peer ever does, as it would after some hours: that list is
        bounded, and churn only fills it. After, leases, tombstones and what was heard of them have had their time.
        """
        lease_s = LEASE_INTERVALS * heartbeat_interval_s(len(self.names))
        with mock.patch.object(table, "GONE_S", TOMBSTONES_S):
            for n in range(MAX_ADDRESSES):
                there = self.notary.identity(f"long ago {n}").peer_id
                self.world[self.names[0]].remember(f"{there}@203.0.113.{n}:7070", there)
            self.world.run(TOMBSTONES_S)
            found = {"before": self._most_bytes()}
            for n in range(times * (len(self.names) - 1)):
                self._replace(self.names.pop(1), f"r{n}")
                self.world.run(CHURN_S)
            found["at_the_end"] = heap_bytes(self.world[self.names[0]])
            self.world.run(TOMBSTONES_S + 4 * lease_s)
            if not self.world.run(MOST_HEAL_S, until=self._is_whole):
                raise AssertionError(f"tables differ {MOST_HEAL_S:g} s after the churn")
            found["after"] = self._most_bytes()
        return found

    def _replace(self, old: str, new: str) -> None:
        here = self.world.there[old]
        if self.rng.random() < 0.5:
            here.leave()
            self.world.network.at(self.world.now + 0.5, self.world.crash, old)
        else:
            self.world.crash(old, silently=True)
        there = self.world.add(new)
        for other in self.rng.sample(self.names, 2):  # either may be gone before it has told anything
            there.join(self.world.address(other))
        there.publish()
        self.names.append(new)

    def _most_bytes(self) -> float:
        """Of two leases' time: identifiers of heads are forgotten once a lease."""
        most = 0
        for _ in range(8):
            self.world.run(LEASE_INTERVALS * heartbeat_interval_s(len(self.names)) / 4)
            most = max(most, heap_bytes(self.world[self.names[0]]))
        return float(most)


def _become_like(one: Table, other: Table) -> None:
    """Hold what the other one does: a million records told one by one would take a minute."""
    own, places_own = one._own, one.places._own
    vars(one).update({name: _copied(value) for name, value in vars(other).items() if name not in _NOT_COPIED})
    one._own, one.places._own = own, places_own


_NOT_COPIED = ("_check", "_once_held", "_recent")


def _copied(value: Any) -> Any:
    """With containers of its own; what they hold in the end is never changed, but for `_Pace`."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, one in value.items():
            if not isinstance(one, str | Held | type(None) | float):
                made[key] = _copied(one)
        return made
    if isinstance(value, list | set | _Pace):
        return copy.copy(value)
    if isinstance(value, tuple) and any(isinstance(one, dict) for one in value):
        return tuple(map(_copied, value))
    if isinstance(value, Places | Digests):
        made = copy.copy(value)
        vars(made).update({name: _copied(one) for name, one in vars(value).items()})
        return made
    return value


# ---------------------------------------------------------------- work that is done once


class _Once(Notary):
    """Signatures are verified and records decoded once, but by `timed` cores each time."""

    def __init__(self, world: RegistryWorld) -> None:
        super().__init__("ed25519", lambda: world.network.now)
        self.timing = False
        self._read: dict[bytes, Record] = {}

    def check(self, record: Record, signed: bytes) -> None:
        if self.timing:
            check_signature(record, signed)
        else:
            super().check(record, signed)

    def read(self, signed: bytes) -> Record:
        if self.timing:
            return records.read_record(signed)
        found = self._read.get(signed)
        if found is None:
            found = self._read[signed] = records.read_record(signed)
        return found

    def _note(self, owner: Any, signed: bytes) -> None:
        """Nobody looks at invariants here."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        with mock.patch.object(heads, "read_record", self.read), mock.patch.object(table, "read_record", self.read):
            yield


class _Timed:
    """In place of a participant as its host's shell. cpu_s: of this thread, for all that it does."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.cpu_s = 0.0
        self._swarm, self._name = swarm, name

    def begin(self) -> None:
        self._here: Participant = self._swarm.world.there[self._name]
        self._here.host.shell = self

    def opened(self, end: End) -> None:
        self._here.opened(end)

    def ended(self, end: End) -> None:
        self._time(lambda: self._here.ended(end))

    def received(self, end: End, message: Message) -> None:
        data = b"".join(map(bytes, pack(*encode(message))))
        self._time(lambda: self._here.received(end, decode(*unpack(data))))

    def turn(self) -> None:
        self._time(self._here.turn)

    def _time(self, call: Callable[[], None]) -> None:
        self._swarm.notary.timing, began = True, time.thread_time()
        try:
            call()
        finally:
            self.cpu_s += time.thread_time() - began
            self._swarm.notary.timing = False


@contextmanager
def swarm_of(peers: int, seed: int, timed: int = 0) -> Iterator[Swarm]:
    made = Swarm(peers, seed, timed)
    with made.notary.reading():
        made.begin()
        try:
            yield made
        finally:
            gc.unfreeze()


# ---------------------------------------------------------------- memory

_SHARED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def heap_bytes(core: Registry) -> int:
    """What a core holds, by `sys.getsizeof` of all that can be reached from it: code, its random numbers, its key
    and whoever verifies for it aside. Allocators round each object up by a few bytes."""
    seen: set[int] = set()
    total, waiting = 0, [core]
    while waiting:
        one: Any = waiting.pop()
        if id(one) in seen or isinstance(one, (*_SHARED, random.Random, Identity)):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total
