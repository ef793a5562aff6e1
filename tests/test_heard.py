"""heard.py: what is remembered of heads, and for how long."""

from __future__ import annotations

import random

from swarm import heard
from swarm.heard import Filter, Recent
from swarm.identity import PeerId


def identifiers(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(8) for _ in range(count)]


def test_a_head_is_known_exactly_for_one_turn_at_least_and_two_at_most() -> None:
    recent = Recent()
    recent.turn(100.0, 15.0)
    recent.add(b"early---", PeerId("a"))
    recent.turn(114.9, 15.0)
    recent.add(b"late----", PeerId("b"))
    recent.turn(115.0, 15.0)
    assert recent.owner_of(b"early---") == "a" and b"late----" in recent
    recent.turn(129.9, 15.0)
    assert b"early---" in recent
    recent.turn(130.0, 15.0)
    assert b"early---" not in recent and recent.owner_of(b"late----") is None and len(recent) == 0


def test_recent_heads_are_bounded_and_the_newest_stay() -> None:
    recent, ids = Recent(), identifiers(2 * heard.MAX_RECENT, 1)
    for one in ids:
        recent.add(one, PeerId("a"))
        assert len(recent) <= heard.MAX_RECENT
    assert all(one in recent for one in ids[-heard.MAX_RECENT // 2 :])


def test_the_filter_forgets_nothing_of_the_last_forty_thousand() -> None:
    kept, ids = Filter(), identifiers(5 * heard.FILTER_HEADS // 2, 2)
    for one in ids:
        kept.add(one)
    assert all(one in kept for one in ids[-heard.FILTER_HEADS :])


def test_the_filter_takes_few_for_known_that_it_never_saw() -> None:
    """With k probes into m bits for n heads, (1 - exp(-kn/m))**k in each half: 0.04% of 40,000 in 2**20 bits."""
    kept = Filter()
    for one in identifiers(2 * heard.FILTER_HEADS, 3):
        kept.add(one)
    wrong = sum(one in kept for one in identifiers(20_000, 4))
    assert wrong <= 40  # 18 expected


def test_the_filter_forgets_in_the_end_and_takes_the_same_memory_always() -> None:
    kept, first = Filter(), identifiers(1000, 5)
    for one in first + identifiers(2 * heard.FILTER_HEADS, 6):
        kept.add(one)
    assert sum(one in kept for one in first) < 20
    assert len(kept._new) == len(kept._old) == heard.FILTER_BYTES
