"""registry.py among liars: ages told wrongly, recordings, floods, claims to other people's addresses."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from swarm import asks, budget
from swarm.heads import head_id, read_head
from swarm.identity import Identity, PeerId
from swarm.messages import Ask, Delta, Digest, Message, Offer, Told
from swarm.neighbour import Neighbour
from swarm.records import Record, check_signature
from swarm.registry import Kind, Reach, Registry
from tests.sim.records import descriptor, serving
from tests.sim.scenario import World
from tests.told import ALICE, LEASE_S, told

INTERVAL_S = 5.0
LIAR = 666  # the key of its stream, at whoever it speaks to


def somebody(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def with_liar(world: World, name: str) -> Registry:
    """A stream to somebody who speaks the protocol by hand, at `name`."""
    liar = Identity.from_seed(b"m" * 32).peer_id
    world.invariants.watching = False  # they don't know what it says
    world[name].attach(LIAR, liar, Kind.GOSSIP, opened_here=False, now=world.now)
    return world[name]


def recording(world: World, at: str, of: str, seconds: float) -> list[Told]:
    """Every head of `of` that comes by `at` meanwhile."""
    peer = world.there[of].peer
    found: dict[bytes, Told] = {}

    def look() -> bool:
        held = world[at].table.get(peer)
        if held is not None:
            found[held.head_id] = Told(held.head_bytes, 0.0, held.descriptor_bytes)
        return False

    world.run(seconds, until=look)
    return list(found.values())


# ---------------------------------------------------------------- ages


@pytest.mark.parametrize("every_s", [0.5, 5.0, 14.0])
def test_a_recording_brings_a_dead_peer_back_for_one_lease_at_most(every_s: float) -> None:
    """A newcomer with one honest neighbour hears a dead peer's heartbeats from a liar, each as brand new."""
    world = World(31)
    world.peers(3)
    world.connect("p2", "p1")
    beats = recording(world, "p0", "p2", 100.0)
    assert len(beats) > 15
    world.crash("p2")
    world.run(2 * LEASE_S)
    world.start("new", "p0")
    world.run(1.0)
    newcomer = with_liar(world, "new")
    started = world.now
    for beat in beats:
        newcomer.receive(LIAR, Delta((beat,)), world.now)
        world.run(every_s)
        if world.now > started + LEASE_S + 1.0:
            assert "p2" not in world.listed("new"), f"{world.now - started} s after it was first heard of"
    assert "p2" not in world.listed("p0") | world.listed("p1")


@pytest.mark.parametrize("age_s", [7.5, 14.9, 15.0, 1000.0])
def test_exaggerated_ages_hide_nobody_for_longer_than_a_heartbeat(age_s: float) -> None:
    """A liar is the first to tell every heartbeat of a live peer, and always with this age."""
    world = World(32)
    world.peers(2)
    world.run(20.0)
    world.start("new", "p0")
    world.run(3.0)
    victim, hidden_since, longest = with_liar(world, "new"), None, 0.0
    peer = world.there["p1"].peer
    last = b""
    for _ in range(600):
        world.run(0.1)
        held = world["p1"].table.get(peer)
        assert held is not None
        if held.head_bytes != last:
            last = held.head_bytes
            victim.receive(LIAR, Delta((Told(last, age_s, held.descriptor_bytes),)), world.now)
        if "p1" in world.listed("new"):
            hidden_since = None
        else:
            hidden_since = world.now if hidden_since is None else hidden_since
            longest = max(longest, world.now - hidden_since)
    assert longest < INTERVAL_S


def test_a_peer_that_lost_its_state_and_its_clock_comes_back_though_only_tombstones_know_it() -> None:
    """Nobody holds its record any more, so nobody would tell it: they object with the last that it said."""
    world = World(33)
    names = world.peers(4)
    world.run(30.0)
    world.crash("p2")
    world.run(3 * LEASE_S)
    assert "p2" not in world.listed("p0")
    world.start("p2", "p0", first_seq=5)
    assert world.run(30.0, until=lambda: world.everybody_lists(names))
    assert world.second_instances("p2") == 0


def test_objections_are_said_once_and_bounded() -> None:
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0))
    core.attach(1, ALICE.peer_id, Kind.GOSSIP, opened_here=True, now=0.0)
    core.drain(0.0)
    core.table.accept(told(seq=1, beat=2), 0.0)
    core.table.accept(told(seq=1, beat=3), 0.0)
    core.tick(LEASE_S)
    core.drain(LEASE_S)
    for _ in range(50):
        core.receive(1, Offer((), (head_id(told(seq=1, beat=2).head),)), LEASE_S)
    said = [message for _, message in core.drain(LEASE_S) if isinstance(message, Delta)]
    assert len(said) == 1 and said[0].records[0].age_s >= LEASE_S
    assert said[0].records[0].head == told(seq=1, beat=3).head


def test_what_is_owed_to_a_neighbour_takes_no_room_once_it_is_told() -> None:
    """Of 300 peers who all ended, and whom it believes alive: asks, offers, answers and objections."""
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0), check=lambda *_: None)
    everybody = [somebody(n) for n in range(300)]
    core.attach(1, ALICE.peer_id, Kind.GOSSIP, opened_here=True, now=0.0)
    (one,) = core.neighbours
    core.drain(0.0)
    fresh = neighbours_room(one)
    for who in everybody:
        core.receive(1, Delta((told(seq=1, beat=2, identity=who),)), 0.0)
        core.receive(1, Offer((), (head_id(told(seq=1, beat=4, identity=who).head),)), 0.0)
        core.table.accept(told(seq=1, beat=3, identity=who), 0.0)
    core.receive(1, Ask((), tuple(held.head_id for held in core.table.held())), 0.0)
    core.receive(1, Digest((bytes(8),) * 64), 0.0)
    now = LEASE_S
    while core.table.next_lapse is not None:
        core.tick(now)
        now += 0.001
    for who in everybody:
        core.receive(1, Offer((), (head_id(told(seq=1, beat=2, identity=who).head),)), now)
    assert neighbours_room(one) > 10 * fresh
    for _ in range(60):
        now += 1.0
        core.tick(now)
        core.drain(now)
    assert neighbours_room(one) == fresh


def neighbours_room(one: Neighbour) -> int:
    """Bytes of the dicts in which is kept what it is owed."""
    owed = (value for name, value in vars(one).items() if name.startswith("_") and isinstance(value, dict))
    return sum(map(sys.getsizeof, owed))


# ---------------------------------------------------------------- work that others make


class Watched:
    """A registry that counts what it verifies; its neighbours are played by hand."""

    def __init__(self) -> None:
        self.checks: list[PeerId] = []
        self.now = 0.0
        self.core = Registry(
            Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0), check=self._check
        )

    def _check(self, record: Record, signed: bytes) -> None:
        self.checks.append(record.peer)

    def neighbour(self, key: int) -> None:
        self.core.attach(key, somebody(10_000 + key).peer_id, Kind.GOSSIP, opened_here=True, now=self.now)
        self.core.drain(self.now)
        self.core.receive(key, Delta((), complete=True), self.now)  # its snapshot

    def turn(self, seconds: float) -> list[tuple[int, Message]]:
        self.now += seconds
        self.core.tick(self.now)
        out = []
        while found := self.core.sendable(self.now):
            for key in found:
                message = self.core.next_message(key, self.now)
                out += [(key, message)] if message is not None else []
        return out


def identities(first: int) -> Iterator[Told]:
    """Records of ever new identities, all of the LAN."""
    number = first
    while True:
        number += 1
        yield told(identity=somebody(number), addresses=("10.0.0.1:7070",))


def test_what_comes_unasked_makes_a_bounded_amount_of_work() -> None:
    watched = Watched()
    watched.neighbour(1)
    source = identities(0)
    for _ in range(40):
        watched.core.receive(1, Delta(tuple(next(source) for _ in range(40))), watched.now)
        watched.turn(0.001)
    seconds = 40 * 0.001
    assert len(watched.checks) <= budget.NEIGHBOUR_RESERVE + budget.NEIGHBOUR_PER_S * seconds
    assert watched.core.table.places._groups.keys() == {held.peer for held in watched.core.table.held()}


def test_what_is_over_budget_waits_and_is_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "NEIGHBOUR_RESERVE", 64.0)
    monkeypatch.setattr(budget, "NEIGHBOUR_PER_S", 20.0)
    watched = Watched()
    watched.neighbour(1)
    source = identities(0)
    offered = {head_id(one.head): one for one in (next(source) for _ in range(200))}
    watched.core.receive(1, Offer((), tuple(offered)), watched.now)
    wait_s = 0.0
    while len(set(watched.checks)) < 200:
        for _, message in watched.turn(wait_s):
            if isinstance(message, Ask):
                watched.core.receive(1, Delta(tuple(offered[one] for one in message.full)), watched.now)
        watched.core.tick(watched.now)
        wait_s = watched.core.deadline - watched.now
        assert wait_s > 0.0 and watched.now < 60.0
    waited = watched.now
    assert len(watched.checks) <= 64 + 20 * waited
    assert waited > (400 - 64) / 20 - 5.0


def test_one_neighbour_that_offers_without_end_doesnt_starve_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "RESERVE", 50.0)
    monkeypatch.setattr(budget, "PER_S", 50.0)
    monkeypatch.setattr(asks, "ASK_TIMEOUT_S", 0.5)
    watched = Watched()
    for key in range(1, 6):
        watched.neighbour(key)
    flood, honest = identities(0), identities(5_000)
    offered: dict[bytes, Told] = {}
    wanted: list[Told] = []
    asked = dict.fromkeys(range(1, 6), 0)
    for step in range(200):  # 20 s
        for key, source in [(1, flood)] * 10 + [(2 + step % 4, honest)]:
            one = next(source)
            offered[head_id(one.head)] = one
            if source is honest and step < 180:
                wanted.append(one)
            watched.core.receive(key, Offer((), (head_id(one.head),)), watched.now)
        for key, message in watched.turn(0.1):
            if isinstance(message, Ask):
                asked[key] += len(message.full)
                there = tuple(offered[one] for one in message.full)
                for part in range(0, len(there), 30):
                    watched.core.receive(key, Delta(there[part : part + 30]), watched.now)
    came = {read_head(one.head).peer for one in wanted} & set(watched.checks)
    assert len(came) > 0.9 * len(wanted), f"{len(came)} of {len(wanted)} came, asked {asked}"


def test_two_neighbours_with_much_to_tell_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "RESERVE", 50.0)
    monkeypatch.setattr(budget, "PER_S", 50.0)
    watched = Watched()
    asked = {1: 0, 2: 0}
    for key in asked:
        watched.neighbour(key)
        watched.core.receive(key, Offer((), tuple(bytes([key, n]) * 4 for n in range(200))), watched.now)
    for _ in range(15):
        for key, message in watched.turn(1.0):
            asked[key] += len(message.full) if isinstance(message, Ask) else 0
    assert min(asked.values()) > 0.25 * sum(asked.values()), asked


# ---------------------------------------------------------------- addresses that are somebody else's


def test_a_flood_from_one_group_leaves_room_for_everybody_else() -> None:
    world = World(34)
    names = world.peers(4)
    world.run(10.0)
    liar = with_liar(world, "p0")
    flood = [
        told(identity=somebody(n), addresses=(f"45.9.9.{n % 250}:{7000 + n}",), name=f"f{n}") for n in range(1000)
    ]
    for first in range(0, len(flood), 25):
        liar.receive(LIAR, Delta(tuple(flood[first : first + 25])), world.now)
        world.run(0.1)
    for name in names:
        assert set(names) <= world.listed(name)
        assert len(world.listed(name)) <= 64 + 4


def test_what_has_no_room_costs_whoever_tells_it_more_than_its_work() -> None:
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(5), check=lambda *_: None)
    core.attach(1, somebody(1).peer_id, Kind.GOSSIP, opened_here=True, now=0.0)
    (neighbour,) = core.neighbours
    flood = [told(identity=somebody(n), addresses=(f"45.9.9.{n}:7070",)) for n in range(100, 167)]
    for one in flood[:64]:  # all that a group has room for
        core.receive(1, Delta((one,)), 0.0)
    left = neighbour.share.room(0.0)
    for one in flood[64:]:
        core.receive(1, Delta((one,)), 0.0)
    assert left - neighbour.share.room(0.0) >= 3 * budget.USELESS
    assert len(core.table) == 64


def test_claims_to_a_strangers_group_are_found_empty_one_by_one() -> None:
    """The group of an honest newcomer is full of claims: it is dialled into, and who isn't there goes."""
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(5), check=lambda *_: None)
    core.publish(descriptor(addresses=("46.1.1.1:7070",)), serving(), 0.0)
    core.attach(1, somebody(1).peer_id, Kind.GOSSIP, opened_here=True, now=0.0)
    claims = {somebody(n).peer_id for n in range(100, 164)}
    now = 0.0
    for beat in range(2, 100):
        for n in range(100, 164):  # each renewed by its owner
            one = told(identity=somebody(n), seq=1, beat=beat, addresses=(f"45.9.9.{n}:7070",))
            core.receive(1, Delta((one,)), now)
        honest = told(seq=1, beat=beat, addresses=("45.9.9.200:7070",))
        core.receive(1, Delta((honest,)), now)
        now += 10.0
        core.tick(now)
        core.drain(now)
        for action in core.actions():
            if isinstance(action, Reach) and action.peer in claims:
                core.unreached(action.peer, now)
        if ALICE.peer_id in core.table:
            break
    assert ALICE.peer_id in core.table and now <= 600.0, f"after {now} s"


def test_neighbours_and_clients_of_one_group_are_limited() -> None:
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(5))
    for key in range(1, 80):
        core.attach(key, somebody(key).peer_id, Kind.GOSSIP, opened_here=False, now=0.0, host=f"45.9.9.{key}")
    assert sum(not one.visitor for one in core.neighbours) == 8
    for key in range(100, 120):
        core.attach(key, somebody(key).peer_id, Kind.GOSSIP, opened_here=False, now=0.0, host=f"10.0.0.{key}")
    assert sum(not one.visitor for one in core.neighbours) == 8  # 79 there are more than 32 in all


def test_signatures_are_really_checked_by_default() -> None:
    """The other tests of this file watch or skip the check."""
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(5))
    assert core.table._check is check_signature
