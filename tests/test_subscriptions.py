"""Clients and newcomers: which models there are, records of the wanted ones only, one snapshot and no more."""

from __future__ import annotations

import random

import pytest

from swarm import circle, wishes
from swarm.digests import Models
from swarm.identity import Identity
from swarm.listing import MAX_LIST_BYTES, list_models, merged
from swarm.messages import Delta, Digest, GossipHello, Message, ModelSeen, Offer, Subscribe
from swarm.records import read_record
from swarm.registry import Kind, Registry
from swarm.table import Table
from tests.sim.records import FINGERPRINT
from tests.sim.scenario import World, size, through_the_wire
from tests.test_registry_hostile import somebody
from tests.told import ALICE, told

OTHER = b"g" * 32


def two_models(seed: int) -> World:
    """p0 to p3 serve one model, q0 to q2 another."""
    world = World(seed)
    world.peers(4)
    for n in range(3):
        world.start(f"q{n}", "p0", fingerprint=OTHER, model="other")
    world.run(20.0)
    return world


def owners(messages: list[Message]) -> set[str]:
    """Of all records in these."""
    return {read_record(t.head).peer for m in messages if isinstance(m, Delta) for t in m.records}


def peers(world: World, letter: str) -> set[str]:
    return {there.peer for name, there in world.there.items() if name.startswith(letter)}


# ---------------------------------------------------------------- models


def test_a_client_is_told_which_models_there_are_and_no_records_before_it_chooses() -> None:
    world = two_models(41)
    world.client("c", "p0", only=())
    world.run(30.0)
    assert world["c"].complete
    assert world["c"].models() == (
        ModelSeen(FINGERPRINT, ("smollm2-135m",), 4),
        ModelSeen(OTHER, ("other",), 3),
    )
    assert owners(world.arrived("c")) == set() and world.listed("c") == set()
    assert sum(size(message) for message in world.arrived("c")) < 1000


def test_a_client_of_one_model_receives_no_record_of_another() -> None:
    world = two_models(42)
    world.client("c", "p0", only=())
    world.run(1.0)
    world["c"].want((OTHER,), world.now)
    assert not world["c"].complete
    assert world.run(2.0, until=lambda: world["c"].complete)
    assert world.listed("c") == {"q0", "q1", "q2"}
    world.run(120.0)  # renewals, rotations, digests
    assert len(world["c"].neighbours) == circle.KEPT_SOURCES
    assert owners(world.arrived("c")) == peers(world, "q")
    world.there["q2"].leave()
    assert world.run(2.0, until=lambda: world.listed("c") == {"q0", "q1"})


def test_a_second_model_costs_its_own_records_only() -> None:
    world = two_models(43)
    world.client("c", "p0", only=(OTHER,))
    world.run(3.0)
    world.listen("c")
    world["c"].want((OTHER, FINGERPRINT), world.now)
    assert world.run(2.0, until=lambda: world["c"].complete)
    assert owners(world.arrived("c")) == peers(world, "p")
    assert world.listed("c") == {"p0", "p1", "p2", "p3", "q0", "q1", "q2"}
    world["c"].want(None, world.now)
    assert world.run(5.0, until=lambda: world["c"].complete)


def test_a_new_model_is_told_to_clients_that_listen() -> None:
    world = two_models(44)
    world.client("c", "p0", only=(FINGERPRINT,))
    world.run(3.0)
    world.start("r", "p1", fingerprint=b"h" * 32, model="newer")
    named = lambda: {name for model in world["c"].models() for name in model.names}  # noqa: E731
    assert world.run(5.0, until=lambda: "newer" in named())
    world.crash("r")
    assert world.run(30.0, until=lambda: "newer" not in named())


def test_a_source_that_leaves_a_model_out_hides_it_from_nobody_who_has_another() -> None:
    lists = [(ModelSeen(b"a" * 32, ("x",), 3),), (ModelSeen(b"b" * 32, ("x",), 9), ModelSeen(b"a" * 32, ("y",), 1))]
    assert merged(lists) == (ModelSeen(b"b" * 32, ("x",), 9), ModelSeen(b"a" * 32, ("x", "y"), 3))


def test_a_list_of_very_many_models_fits_a_message() -> None:
    """Each with several names as long as they may be, in a script of four bytes a character."""
    table = Table(check=lambda *_: None)
    for n in range(150):
        for m in range(5):
            long = chr(0x1F600 + m) * 90 + f"{n:03}"
            who = somebody(5 * n + m)
            table.accept(told(identity=who, model=long, fingerprint=n.to_bytes(32, "big"), device=""), 0.0)
    listed = list_models(table)
    assert 5 < len(listed.models) < 100
    assert size(listed) <= MAX_LIST_BYTES
    assert through_the_wire(listed) == listed


# ---------------------------------------------------------------- snapshots


def snapshots_asked(world: World) -> int:
    return sum(message.snapshot for message in world.arrived() if isinstance(message, Subscribe | GossipHello))


def test_a_client_with_three_sources_takes_one_snapshot() -> None:
    """12 peers, 560 bytes each: twice that would be two snapshots."""
    world = World(45)
    names = world.peers(12)
    world.run(20.0)
    world.listen(names)
    world.client("c", "p3")
    world.run(4.5)  # before the next renewals
    assert len(world["c"].neighbours) == circle.KEPT_SOURCES
    assert snapshots_asked(world) == 1
    told_full = sum(t.descriptor is not None for m in world.arrived("c") if isinstance(m, Delta) for t in m.records)
    assert told_full == 12
    assert sum(size(message) for message in world.arrived("c")) < 1.5 * 12 * 560


def test_what_the_first_source_leaves_out_the_others_tell() -> None:
    world = World(46)
    names = world.peers(5)
    world.run(20.0)
    world["p0"].table.evict(world.there["p4"].peer, world.now)
    world.client("c", "p0")
    world["c"].remember(world.address("p1"), given=True)
    world.connect("c", "p1")
    assert world.run(2.0, until=lambda: world.listed("c") == set(names))


def test_once_all_is_told_the_others_are_compared_with_and_not_the_teller() -> None:
    core = Registry(None, now=0.0, rng=random.Random(0), check=lambda *_: None)
    for key in (1, 2):
        core.attach(key, somebody(key).peer_id, Kind.SOURCE, opened_here=True, now=0.0)
    asked = {key: message for key, message in core.drain(0.0) if isinstance(message, Subscribe)}
    assert [asked[key].snapshot for key in (1, 2)] == [True, False]
    core.receive(1, Delta((told(identity=somebody(3)),), complete=True), 0.1)
    assert core.complete
    ((key, message),) = core.drain(0.1)
    assert key == 2 and message == Digest(core.table.digests.sums(64))


def test_a_newcomer_with_three_addresses_takes_one_snapshot() -> None:
    world = World(47)
    names = world.peers(12)
    world.run(20.0)
    world.start("new")
    world.listen((*names, "new"))
    for name in names[:3]:
        world.connect("new", name)
    assert world.run(5.0, until=lambda: world.listed("new") == {*names, "new"})
    assert snapshots_asked(world) == 1


def test_a_snapshot_that_stops_half_way_is_asked_of_somebody_else() -> None:
    world = World(48)
    names = world.peers(3)
    world.run(20.0)
    for kind in ("stalls", "dies"):
        world.network.cut(["p0"], [kind])  # nothing comes from there
        world.client(kind, "p0")
        world.connect(kind, "p1")
        world.run(0.5)
        assert not world[kind].complete
        if kind == "dies":
            (first,) = (one.key for one in world[kind].neighbours if one.peer == world.there["p0"].peer)
            world[kind].detach(first, world.now)
        within_s = wishes.SNAPSHOT_STALL_S + 1.0 if kind == "stalls" else 0.5
        assert world.run(within_s, until=lambda kind=kind: world[kind].complete)  # type: ignore[misc]
        assert world.listed(kind) == set(names)


def test_a_client_that_there_is_no_room_for_learns_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circle, "MAX_SUBSCRIBERS", 1)
    world = World(49)
    names = world.peers(3)
    world.run(20.0)
    world.client("c1", "p0")
    world.client("c2", "p0")
    assert world.run(20.0, until=lambda: world.listed("c2") == set(names))
    world.run(20.0)
    assert {one.peer for one in world["c2"].neighbours} <= {world.there["p1"].peer, world.there["p2"].peer}


def test_a_client_that_has_all_of_its_model_is_offered_nothing_when_it_compares() -> None:
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0), check=lambda *_: None)
    for n in range(6):
        core.table.accept(told(identity=somebody(n), fingerprint=OTHER if n % 2 else FINGERPRINT), 0.0)
    core.attach(1, ALICE.peer_id, Kind.SUBSCRIBER, opened_here=False, now=0.0)
    core.receive(1, Subscribe((OTHER,), snapshot=False), 0.0)
    core.drain(0.0)
    core.receive(1, Digest(core.table.digests.sums(1, Models((OTHER,)))), 0.0)
    assert core.drain(0.0) == []
    core.receive(1, Digest((bytes(8),) * 64), 1.0)
    ((_, offer),) = core.drain(1.0)
    assert isinstance(offer, Offer) and len(offer.changes) == 3


# ---------------------------------------------------------------- who serves another model now


def test_a_client_hears_at_once_that_a_peer_serves_another_model_now() -> None:
    """And of its renewals no more."""
    world = two_models(50)
    world.client("c", "p0", only=(FINGERPRINT,))
    world.run(3.0)
    assert world.listed("c") == {"p0", "p1", "p2", "p3"}
    world.there["p3"].publish(fingerprint=OTHER, model="other")
    assert world.run(1.0, until=lambda: world.listed("c", FINGERPRINT) == {"p0", "p1", "p2"})
    world.listen("c")
    world.run(20.0)
    assert world.there["p3"].peer not in owners(world.arrived("c"))


def test_a_client_that_missed_it_hears_by_a_digest_that_a_peer_serves_another_model_now() -> None:
    core = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0), check=lambda *_: None)
    for n in range(3):
        core.table.accept(told(identity=somebody(n)), 0.0)
    before = core.table.digests.sums(64, Models((FINGERPRINT,)))
    core.table.accept(told(seq=5, identity=somebody(2), fingerprint=OTHER), 1.0)
    core.attach(1, ALICE.peer_id, Kind.SUBSCRIBER, opened_here=False, now=1.0)
    core.receive(1, Subscribe((FINGERPRINT,), snapshot=False), 1.0)
    core.drain(1.0)
    core.receive(1, Digest(before), 1.0)
    ((_, offer),) = core.drain(1.0)
    moved = core.table.get(somebody(2).peer_id)
    assert moved is not None and offer == Offer((), (moved.head_id,))
