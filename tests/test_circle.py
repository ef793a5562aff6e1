"""circle.py: whom to dial, and for how long."""

from __future__ import annotations

import random

import pytest

from swarm import circle
from swarm.budget import Budget
from swarm.identity import Identity
from swarm.neighbour import Kind, Neighbour
from swarm.registry import Registry
from swarm.table import Table
from tests.told import ALICE, LEASE_S, told


def test_old_addresses_are_tried_each_in_its_turn_and_for_ever() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(3))
    for n in range(5):
        registry.remember(f"h{n}:1")
    tried: list[str] = []
    now = 0.0
    while len(tried) < 20:
        now = max(now, registry.deadline)
        registry.tick(now)
        for action in registry.actions():
            assert isinstance(action, circle.ReachAddress)
            tried.append(action.address)
            registry.unreached(action.address, now)
    assert set(tried[:6]) == {f"h{n}:1" for n in range(5)}
    assert min(tried.count(address) for address in set(tried)) >= 3


@pytest.mark.parametrize("alone", [True, False])
def test_one_old_address_a_minute_is_tried_after_two_days_as_on_the_first(alone: bool) -> None:
    """Also while others are alive: that is how two swarms that were cut apart find each other."""
    rng, day_s = random.Random(6), 86_400.0
    made = circle.Circle(ALICE.peer_id, "peer", rng, 0.0)
    for n in range(10):
        made.remember(f"h{n}:1", given=n == 0)
    kept = Table()
    share = Budget(0.0).of_neighbour(0.0)
    linked = [] if alone else [Neighbour(1, Identity.ephemeral().peer_id, Kind.GOSSIP, True, 0.0, share)]
    tried: list[float] = []
    while made.deadline < 2 * day_s:
        now = made.deadline
        for action in made.choose(linked, kept, now):
            assert isinstance(action, circle.ReachAddress)
            tried.append(now)
            made.failed(action.address, now, alone)
    last_hour = sum(at > 2 * day_s - 3600.0 for at in tried)
    each_time = circle.TRIES_ALONE if alone else 1
    assert 45 * each_time <= last_hour <= 75 * each_time
    if not alone:
        assert len(tried) <= 2 * 24 * 75


def test_a_crowd_that_came_and_vanished_takes_no_place_of_those_where_somebody_was() -> None:
    made = circle.Circle(ALICE.peer_id, "peer", random.Random(7), 0.0)
    made.remember("bootstrap:1", given=True)
    made.remember("friend:1", seen=True)
    made.remember("found:1")
    made.reached("found:1", ALICE.peer_id)
    for n in range(2 * circle.MAX_ADDRESSES):
        made.remember(f"crowd{n}:1")
    assert len(made._addresses) == circle.MAX_ADDRESSES
    assert {"bootstrap:1", "friend:1", "found:1"} <= made._addresses.keys()


def test_somebody_left_alone_tries_those_it_met_before_a_crowd_that_it_only_heard_of() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(4))
    friends = [Identity.ephemeral() for _ in range(2)]
    crowd = [Identity.ephemeral() for _ in range(60)]
    for n, one in enumerate([*crowd, *friends]):
        registry.table.accept(told(identity=one, addresses=(f"198.51.{n}.1:7070",)), 0.0)
    for one in friends:
        registry.proved(one.peer_id, "")
    registry.tick(LEASE_S)
    assert len(registry.table.lapsed()) == 62
    tried = [action.peer for action in registry.actions() if isinstance(action, circle.Reach)]
    assert len(tried) == circle.KEPT_NEIGHBOURS
    assert {one.peer_id for one in friends} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_old_addresses_where_somebody_was_get_half_of_the_tries() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(5))
    for n in range(200):
        registry.remember(f"hearsay{n}:1")
    registry.remember("home:1", given=True)
    tried: list[str] = []
    while len(tried) < 30:
        now = registry.deadline
        registry.tick(now)
        for action in registry.actions():
            assert isinstance(action, circle.ReachAddress)
            tried.append(action.address)
            registry.unreached(action.address, now)
    assert 6 <= tried.count("home:1") <= 24
    assert len(set(tried)) == len(tried) - tried.count("home:1") + 1
