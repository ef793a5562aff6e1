"""Rates and penalties, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.buckets import (
    FIRST_PENALTY_S,
    FORGIVE_S,
    LONGEST_PENALTY_S,
    MAX_PENALTIES,
    Bucket,
    Penalties,
)


@given(st.lists(st.floats(0.0, 3.0), max_size=60), st.floats(0.5, 20.0), st.integers(1, 10))
def test_no_more_is_taken_than_the_burst_and_the_rate_allow(gaps: list[float], rate: float, burst: int) -> None:
    now, bucket, taken = 100.0, Bucket(rate, burst, 100.0), 0
    for gap in gaps:
        now += gap
        while bucket.take(now):
            taken += 1
        assert taken <= burst + (now - 100.0) * rate + 1e-6


def test_whoever_was_quiet_for_long_has_a_burst_and_no_more() -> None:
    bucket = Bucket(rate=1.0, burst=3.0, now=0.0)
    assert bucket.take(0.0) and bucket.left(1000.0) == 3.0
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
    bucket.spend(2000.0, 1.0)
    assert [bucket.take(2000.0) for _ in range(3)] == [True, True, False]


def test_what_was_not_there_is_there_when_it_says() -> None:
    bucket = Bucket(rate=2.0, burst=3.0, now=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    at = bucket.ready_at(0.0)
    assert at == pytest.approx(0.5)
    assert not bucket.take(at - 0.01) and bucket.take(at)
    assert bucket.ready_at(100.0) == 100.0


def test_each_strike_shuts_out_for_twice_as_long_up_to_a_minute() -> None:
    penalties, now, lasted = Penalties(), 0.0, []
    for _ in range(9):
        lasted.append(penalties.strike("a", now))
        until = penalties.refused_until("a", now)
        assert until == now + lasted[-1]
        assert penalties.refused_until("b", now) is None
        now = until
        assert penalties.refused_until("a", now) is None
    assert lasted == [min(LONGEST_PENALTY_S, FIRST_PENALTY_S * 2**n) for n in range(9)]


def test_quiet_time_is_forgiven() -> None:
    penalties = Penalties()
    for _ in range(3):
        penalties.strike("a", 0.0)
    assert penalties.strike("a", 2 * FORGIVE_S) == 2 * FIRST_PENALTY_S  # of three strikes one was left
    assert penalties.refused_until("a", 20 * FORGIVE_S) is None
    assert len(penalties) == 0


def test_the_table_is_bounded_and_the_last_ones_stay() -> None:
    penalties = Penalties()
    for number in range(MAX_PENALTIES + 100):
        penalties.strike(str(number), 0.0)
    assert len(penalties) == MAX_PENALTIES
    assert penalties.refused_until("99", 0.5) is None
    assert penalties.refused_until(str(MAX_PENALTIES + 99), 0.5) is not None
