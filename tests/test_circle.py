"""circle.py: whom to dial, and for how long."""

from __future__ import annotations

import random

from swarm import circle
from swarm.registry import Registry
from tests.told import ALICE


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
