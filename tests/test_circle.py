"""circle.py: whom to dial, and for how long."""

from __future__ import annotations

import random

from swarm import circle
from swarm.identity import Identity
from swarm.registry import Registry
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
