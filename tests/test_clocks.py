"""clocks.py: whose clock is wrong."""

from __future__ import annotations

import pytest

from swarm.clocks import MIN_CLOCKS, ClockOff, Clocks
from swarm.identity import PeerId

NOW, UNIX_MS = 5000.0, 1_764_000_000_000
PEERS = [PeerId(f"p{n}") for n in range(7)]


def heard(errors_s: list[float]) -> Clocks:
    """Neighbours whose clocks are so far ahead of the true one; each heartbeat is 3 s old."""
    clocks = Clocks()
    for peer, error_s in zip(PEERS, errors_s, strict=False):
        clocks.heard(peer, UNIX_MS + int(1000 * (error_s - 3.0)), 3.0, NOW)
    return clocks


def test_the_odd_clock_is_told_how_far_off_it_is() -> None:
    found = heard([0.0, 1.0, -1.0, 0.5, 86_400.0]).check(PEERS, UNIX_MS + 7_200_000, NOW)
    assert found == ClockOff(pytest.approx(7199.5, abs=1.0), 5)


def test_a_minority_of_wrong_clocks_around_us_is_no_reason_to_doubt_ours() -> None:
    assert heard([0.0, 0.0, 0.0, 9999.0, -9999.0]).check(PEERS, UNIX_MS, NOW) is None


def test_fewer_than_three_can_say_nothing() -> None:
    clocks = heard([7200.0] * (MIN_CLOCKS - 1))
    assert clocks.check(PEERS, UNIX_MS, NOW) is None and clocks.error_s == 0.0


def test_it_is_said_once_until_the_clock_was_right_again() -> None:
    clocks = heard([0.0] * 5)
    wrong, right = UNIX_MS - 3_600_000, UNIX_MS
    assert clocks.check(PEERS, wrong, NOW) is not None
    assert clocks.check(PEERS, wrong, NOW) is None and clocks.error_s == pytest.approx(-3600.0)
    assert clocks.check(PEERS, right, NOW) is None and clocks.error_s == 0.0
    assert clocks.check(PEERS, wrong, NOW) is not None


def test_those_who_are_no_neighbours_any_more_have_no_say() -> None:
    clocks = heard([0.0] * 5)
    assert clocks.check(PEERS[:2], UNIX_MS + 7_200_000, NOW) is None
