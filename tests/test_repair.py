"""What a repair counts, and when it was enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from routing.spans import Hop, Span
from swarm.effects import Repaired, RepairStarted
from swarm.errors import NoRoute, SwarmError
from swarm.identity import PeerId
from swarm.repair import Repair, pause_s
from swarm.session_config import SessionConfig

A = PeerId("a" * 52)
B = PeerId("b" * 52)
CONFIG = SessionConfig(
    bytes(16), (1,), 9, bytes(32), 9, patience_s=10.0, min_attempts=3, max_attempts=5, no_route_patience_s=4.0
)
ERROR = SwarmError("it broke")


def repair(now: float = 100.0) -> Repair:
    return Repair("it broke", now - 2.0, (Hop(A, Span(0, 2)),), 7, patient_since=now)


@pytest.mark.parametrize(
    ("attempts", "longest"), [(0, 0.25), (1, 0.25), (2, 0.5), (3, 1.0), (4, 2.0), (5, 4.0), (6, 4.0), (5000, 4.0)]
)
def test_pauses_double_up_to_four_seconds_and_are_jittered_by_half(attempts: int, longest: float) -> None:
    assert pause_s(attempts, SimpleNamespace(random=lambda: 0.0)) == longest / 2
    assert pause_s(attempts, SimpleNamespace(random=lambda: 1.0)) == longest


def test_three_epochs_start_at_once_and_the_fourth_waits() -> None:
    told = repair()
    hasty = []
    for _ in range(4):
        told.failed(ERROR, 100.0, CONFIG)
        hasty.append(told.is_hasty)
    assert hasty == [True, True, True, False]


def test_it_is_given_up_when_late_and_tried_often_enough() -> None:
    told = repair()
    assert [told.failed(ERROR, 100.0 + at, CONFIG) for at in (1, 10, 10)] == [False, False, True]


def test_it_is_given_up_after_so_many_attempts_however_soon() -> None:
    told = repair()
    assert [told.failed(ERROR, 100.0, CONFIG) for _ in range(5)] == [False] * 4 + [True]


def test_success_that_nobody_reads_starts_the_count_anew() -> None:
    told = repair()
    for _ in range(4):
        told.failed(ERROR, 100.0, CONFIG)
    told.begin_anew(109.0)
    assert [told.failed(ERROR, at, CONFIG) for at in (110.0, 111.0, 118.9, 119.0)] == [False, False, False, True]


def test_a_gap_is_waited_for_so_long_and_from_its_own_beginning() -> None:
    told, gap = repair(), NoRoute("model", "2-3", 1, 2, "start one")
    assert [told.no_route(gap, at, CONFIG) for at in (103.0, 106.9, 107.0)] == [False, False, True]
    told.failed(ERROR, 108.0, CONFIG)  # there was a chain meanwhile
    assert [told.no_route(gap, at, CONFIG) for at in (109.0, 112.9)] == [False, False]
    assert told.last_error is gap


def test_every_third_refusal_closes_everything() -> None:
    told = repair()
    assert [told.refused() for _ in range(6)] == [False, False, True] * 2


def test_patience_with_the_slow_doubles_up_to_eightfold() -> None:
    told = repair()
    seen = []
    for _ in range(5):
        told.wait_longer()
        seen.append(told.slack)
    assert seen == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_what_is_told_names_each_lost_peer_once_and_counts_from_when_a_token_was_owed() -> None:
    told = repair(now=100.0)
    for peer in (A, B, A):
        told.lose(peer)
    after = (Hop(B, Span(0, 2)),)
    assert told.started(after) == RepairStarted("it broke", (A, B), told.hops_before, after, 7)
    told.failed(ERROR, 100.0, CONFIG)
    assert told.ended(after, 103.0) == Repaired("it broke", (A, B), told.hops_before, after, 7, 5.0, 1)
