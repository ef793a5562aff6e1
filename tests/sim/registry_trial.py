"""One seed, one history of a swarm: everybody joins, a storm of faults, a calm in which all must agree.

    python -m tests.sim --seed N [-v]     replays one
    python -m tests.sim --seeds N         runs many

The seed draws who there is, the weather, the speed of heartbeats, and a plan of faults. The invariants are
looked at all the time (`invariants.py`); in the end everybody who is connected must list exactly the living,
with what they said last, within CALM_S, and go on doing so until every lease of the dead is over (a liar can
make that twice as long).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from routing.spans import Span
from swarm import owner
from swarm.circle import HEAL_S
from swarm.identity import PeerId
from swarm.owner import LEASE_INTERVALS
from tests.sim.hostile import Hostile
from tests.sim.network import CALM, Weather
from tests.sim.records import FINGERPRINT, serving
from tests.sim.registry_world import Participant, RegistryWorld

OTHER_MODEL = b"g" * 32
DAY_S = 86_400.0
JOINING_S = 30.0  # until everybody must have joined, in good weather
CALM_S = 60.0  # issue 5: a healed partition is equal again within this
TURN_S = 0.005  # an event loop's turn answers whatever has come by then
LARGE_EVERY = 20  # each twentieth seed is a swarm of 25 to 60 peers, the others have 10 to 16
LEAVE_S = 3.0  # until nobody lists a peer that said goodbye, in good weather
ED25519_EVERY = 4  # each fourth seed signs with real keys, the others with keyed hashes


@dataclass(frozen=True)
class Setting:
    """What a seed draws. slowness: heartbeats take this many times as long, as in a larger swarm."""

    peers: int
    clients: int
    slowness: float
    storm_s: float
    weather: Weather
    faults: int
    hostile: int
    flood: bool
    two_models: bool

    @classmethod
    def draw(cls, rng: random.Random, large: bool) -> Setting:
        peers = rng.randrange(25, 61) if large else rng.randrange(10, 17)
        low = rng.choice([0.005, 0.02, 0.1])
        slowness = 1.0 if large else rng.choice([1.0, 1.0, 2.0, 4.0, 12.0])
        weather = Weather(
            delay_s=(low, low * rng.uniform(1.0, 5.0)),
            ordered=rng.random() < 0.5,
            loss=rng.choice([0.0, rng.uniform(0.0, 0.3), 0.3]),
            doubling=rng.choice([0.0, 0.2]),
            overtaking=rng.choice([0.0, 0.3]),
            breaks_per_s=rng.choice([0.0, 1 / 300, 1 / 30]),
        )
        hostile = rng.choice([0, 0, 1, 2])
        return cls(
            peers=peers,
            clients=rng.randrange(3),
            slowness=slowness,
            storm_s=rng.uniform(12.0, 18.0 if large else 32.0) * slowness**0.6,
            weather=weather,
            faults=rng.randrange(2, 9),
            hostile=hostile,
            flood=hostile > 0 and not large and rng.random() < 0.2,
            two_models=rng.random() < 0.3,
        )

    @property
    def lease_s(self) -> float:
        return LEASE_INTERVALS * owner.heartbeat_interval_s(0)


@dataclass(frozen=True)
class Outcome:
    """agreed_s: from the end of the storm until everybody listed all the living."""

    trace: str
    peers: int
    events: int
    virtual_s: float
    agreed_s: float
    counts: Counter[str]


class Trial:
    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"trial {seed}")
        self.setting = Setting.draw(self.rng, large=seed % LARGE_EVERY == LARGE_EVERY - 1)
        keys = "ed25519" if seed % ED25519_EVERY == 0 else "hash"
        self.world = RegistryWorld(seed, keys=keys, turn_s=TURN_S)  # type: ignore[arg-type]
        self.world.invariants.sweep_s = self.setting.slowness
        self.world.network.on_event = log
        self.counts: Counter[str] = Counter()
        self._names = (f"p{n}" for n in itertools.count())
        self._storming = True
        self._hostile: list[Hostile] = []
        self._spans = itertools.cycle([Span(0, 10), Span(10, 20), Span(20, 30), Span(0, 30)])

    def run(self) -> Outcome:
        """Raises AssertionError when an invariant doesn't hold, or no agreement comes about."""
        with slow_heartbeats(self.setting.slowness):
            self._join()
            self._storm()
            agreed_s = self._calm()
            self._hold()
            self._say_goodbye()
        return Outcome(
            trace=self.world.network.trace(),
            peers=self.setting.peers,
            events=self.world.network.events,
            virtual_s=self.world.now,
            agreed_s=agreed_s,
            counts=self.counts
            + self.world.invariants.counts
            + sum((h.counts for h in self._hostile), Counter()),
        )

    # ------------------------------------------------------------ the phases

    def _join(self) -> None:
        world, rng = self.world, self.rng
        for _ in range(self.setting.peers):
            world.network.at(rng.uniform(0.0, 3.0), self._start_peer)
        for n in range(self.setting.clients):
            world.network.at(rng.uniform(3.0, 6.0), self._start_client, f"c{n}")
        world.run(6.0)
        if not world.run(JOINING_S, until=self._agreed):
            raise AssertionError(f"no agreement {JOINING_S:g} s after the start: {self._differences()}")

    def _storm(self) -> None:
        world, rng, setting = self.world, self.rng, self.setting
        began = world.now
        world.network.note(f"a storm: {setting}")
        world.network.storm(setting.weather)
        for _ in range(setting.faults):
            fault = rng.choice(FAULTS)
            world.network.at(began + rng.uniform(0.0, setting.storm_s), self._fault, fault)
        for n in range(setting.hostile):
            world.network.at(began + rng.uniform(0.0, setting.storm_s / 2), self._start_hostile, f"h{n}")
        world.run(setting.storm_s)

    def _calm(self) -> float:
        """Seconds until everybody agrees."""
        world = self.world
        self._storming = False
        world.network.note("calm")
        for one in self._hostile:
            world.network.crash(one.host, silently=False)
        world.network.storm(CALM)
        for here in list(world.there.values()):
            if here.host.asleep:
                world.network.wake(here.host)
        world.heal()
        self._introduce()
        began = world.now
        agreed = world.run(CALM_S, until=self._agreed)
        if not agreed and self._apart():
            self.counts["found each other late"] += 1
            world.run(self._patience_s(), until=lambda: not self._apart())
            agreed = world.run(CALM_S, until=self._agreed)
        if not agreed:
            took_s = world.now - began
            raise AssertionError(f"no agreement {took_s:g} s after the storm: {self._differences()}")
        return world.now - began

    def _apart(self) -> bool:
        """Whether there still are groups without a stream between them.

        Usually that is over in seconds. But somebody who came back without its state, and whose user knows only an
        address that has died, dials nobody; and those who remember it have many old addresses, of which each peer
        tries one a minute, as issue 5 has it: anybody who dialled them all at once would be one of ten thousand who
        do. So from the end of the storm that takes as many minutes as there are such addresses, and CALM_S counts
        from when the groups have met.
        """
        groups: list[set[PeerId]] = []
        for here in self.world.there.values():
            group = {here.peer} | (here.linked() if not here.client else set())
            if here.client and here.linked():
                continue
            apart = [one for one in groups if not one & group]
            groups = [*apart, group.union(*(one for one in groups if one & group))]
        return len(groups) > 1

    def _patience_s(self) -> float:
        """Until the least likely of all old addresses has been tried: at least every other try, on average, is of the
        one that was tried longest ago (circle.py)."""
        most = max(len(here.registry.addresses) for here in self.world.there.values())
        return 4 * (most + 1) * 1.2 * HEAL_S

    def _introduce(self) -> None:
        """A newcomer whose only address died before it told anything knows nobody, and nobody knows it: no rule of the
        registry brings such groups together, so their users do, and what remains is the registry's."""
        groups = self._acquainted()
        largest = max(groups, key=len)
        for group in groups:
            if group is not largest:
                self.counts["given an address anew"] += 1
                peers = sorted(name for name in largest if not self.world.there[name].client)
                self.world.there[min(group)].join(self.world.address(self.rng.choice(peers)))

    def _acquainted(self) -> list[set[str]]:
        """Who could reach whom, over any number of others, by the addresses that are known somewhere."""
        at = {here.host.address: name for name, here in self.world.there.items()}
        groups: list[set[str]] = []
        for name, here in self.world.there.items():
            group = {name} | {at[address] for address in here.addresses_known() if address in at}
            apart = [one for one in groups if not one & group]
            groups = [*apart, group.union(*(one for one in groups if one & group))]
        return groups

    def _hold(self) -> None:
        world = self.world
        world.network.note("agreed")
        world.invariants.expected = self._living()
        world.run(self.setting.lease_s * (2.0 if self.setting.hostile else 1.2))
        world.invariants.sweep()
        if not self._agreed(exactly=True):
            raise AssertionError(f"no agreement any more: {self._differences()}")
        world.invariants.check_equal(world.there.values())
        world.invariants.check_one_stream_a_pair(world.there.values())

    def _say_goodbye(self) -> None:
        """In good weather a leave is known to everybody at once."""
        here = self._somebody()
        if here is None:
            return
        self.world.invariants.expected = None
        here.leave()
        self.world.run(0.2)
        self._vanish(here)
        if not self.world.run(LEAVE_S, until=lambda: self._agreed(exactly=True)):
            raise AssertionError(f"{here.name} left {LEAVE_S:g} s ago: {self._differences()}")

    # ------------------------------------------------------------ who should list whom

    def _living(self) -> dict[PeerId, bytes]:
        return {
            here.peer: here.registry.descriptor_bytes
            for here in self.world.there.values()
            if not here.client and here.published_at is not None and here.ended_at is None
        }

    def _agreed(self, exactly: bool = False) -> bool:
        return self.world.invariants.agreed(self._living(), self.world.there.values(), exactly=exactly)

    def _differences(self) -> str:
        living = {self.world.name_of(peer) for peer in self._living()}
        told = []
        for name in self.world.there:
            listed = self.world.listed(name)
            if listed != living:
                told.append(f"{name} misses {sorted(living - listed)} and has {sorted(listed - living)}")
        return "; ".join(told) or "some have old records"

    # ------------------------------------------------------------ coming

    def _start_peer(self, name: str | None = None, wall_error_s: float = 0.0) -> None:
        name = name or next(self._names)
        others = sorted(one for one, here in self.world.there.items() if not here.client)
        model = OTHER_MODEL if self.setting.two_models and self.rng.random() < 0.4 else FINGERPRINT
        here = self.world.add(name, fingerprint=model, wall_error_s=wall_error_s)
        here.recall()
        if others:
            here.join(self.world.address(self.rng.choice(others)))
        elif name != "p0":
            here.join(self.world.address("p0"))
        here.publish(span=next(self._spans))

    def _start_client(self, name: str) -> None:
        model = self.rng.choice([None, FINGERPRINT, FINGERPRINT])
        here = self.world.add(name, client=True, fingerprint=model)
        peers = [one for one, there in self.world.there.items() if not there.client]
        for other in self.rng.sample(peers, min(2, len(peers))):
            here.join(self.world.address(other))

    def _start_hostile(self, name: str) -> None:
        self.counts["hostile peers"] += 1
        every_s = self.rng.choice([0.3, 1.0]) * self.setting.slowness**0.5
        self._hostile.append(self.world.add_hostile(name, every_s=every_s, flood=self.setting.flood))

    # ------------------------------------------------------------ faults

    def _fault(self, name: str) -> None:
        if not self._storming:  # one of the storm's last instant, rounded up to a turn (`Network.at`)
            return
        self.counts[name] += 1
        self.world.network.note(f"fault: {name}")
        getattr(self, f"_{name}")()

    def _somebody(self) -> Participant | None:
        """A published peer that runs; some are always left."""
        able = [
            here
            for here in self.world.there.values()
            if not here.client and here.running and here.published_at is not None and here.ended_at is None
        ]
        return self.rng.choice(able) if len(able) > 3 else None

    def _some_names(self) -> tuple[list[str], list[str]]:
        names = [*self.world.there, *(one.host.name for one in self._hostile)]
        self.rng.shuffle(names)
        at = self.rng.choice([1, max(1, len(names) // 4), max(1, len(names) // 2)])
        return names[:at], names[at:]

    def _after(self, low_s: float, high_s: float, call: Callable[..., None], *args: object) -> None:
        """Unless the storm is over by then."""

        def unless_calm() -> None:
            if self._storming:
                call(*args)

        self.world.network.at(self.world.now + self.rng.uniform(low_s, high_s), unless_calm)

    def _cut(self) -> None:
        self.world.cut_off(*self._some_names())
        if self.rng.random() < 0.5:
            self._after(5.0, 2 * self.setting.lease_s, self.world.heal)

    def _cut_one_way(self) -> None:
        self.world.cut_off(*self._some_names(), one_way=True)
        if self.rng.random() < 0.5:
            self._after(5.0, 2 * self.setting.lease_s, self.world.heal)

    def _crash(self) -> None:
        """And perhaps come back, perhaps without what was on the disk, perhaps with another clock."""
        here = self._somebody()
        if here is None:
            return
        if self.rng.random() < 0.5:
            here.save()
        self.world.crash(here.name, silently=self.rng.random() < 0.5)
        if self.rng.random() < 0.7:
            if self.rng.random() < 0.4:
                self.counts["state lost"] += 1
                self.world.disks.pop(here.name)
            self._after(0.1, 1.5 * self.setting.lease_s, self._restart, here.name)

    def _restart(self, name: str) -> None:
        if name not in self.world.there:
            step_s = self.rng.choice([0.0, 0.0, self.rng.uniform(-DAY_S, DAY_S)])
            self.counts["clock steps"] += step_s != 0.0
            self.counts["restarts"] += 1
            self._start_peer(name, wall_error_s=step_s)

    def _step_clock(self) -> None:
        """Of a running peer: whatever it writes into its records, its membership doesn't depend on it."""
        here = self._somebody()
        if here is not None:
            here.host.wall_error_s += self.rng.uniform(-DAY_S, DAY_S)

    def _suspend(self) -> None:
        here = self._somebody()
        if here is not None:
            self.world.network.sleep(here.host)
            self._after(1.0, self.rng.choice([10.0, 3600.0]), self._resume, here)

    def _resume(self, here: Participant) -> None:
        if here.host.asleep:
            self.world.network.wake(here.host)

    def _leave(self) -> None:
        here = self._somebody()
        if here is not None:
            here.leave()
            self.world.network.at(self.world.now + self.rng.uniform(0.3, 1.0), self._vanish, here)

    def _vanish(self, here: Participant) -> None:
        if self.world.there.get(here.name) is here:
            self.world.crash(here.name)

    def _publish_anew(self) -> None:
        here = self._somebody()
        if here is not None:
            here.publish(span=next(self._spans))

    def _change_state(self) -> None:
        here = self._somebody()
        if here is not None:
            here.set_load(serving(state=self.rng.choice(["draining", "loading", "serving"])))

    def _wave_of_joins(self) -> None:
        for _ in range(self.rng.randrange(2, 6)):
            self._after(0.0, 5.0, self._start_peer)

    def _wave_of_leaves(self) -> None:
        for _ in range(self.rng.randrange(2, 6)):
            self._after(0.0, 5.0, self._fault, self.rng.choice(["leave", "crash"]))


FAULTS = (
    "cut", "cut", "cut_one_way", "crash", "crash", "step_clock", "suspend", "leave", "publish_anew",
    "change_state", "wave_of_joins", "wave_of_leaves",
)  # fmt: skip


@contextmanager
def slow_heartbeats(factor: float) -> Iterator[None]:
    """As in a swarm so much larger: 5 s become 60 s at 12."""
    before = owner._INTERVALS
    owner._INTERVALS = tuple((peers, min(60.0, factor * seconds)) for peers, seconds in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        owner._INTERVALS = before
