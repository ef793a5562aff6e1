"""budget.py: what others can make us verify."""

from __future__ import annotations

from swarm import budget
from swarm.budget import Budget


def test_in_all_and_for_one_there_is_so_much_per_second() -> None:
    made = Budget(0.0)
    greedy, modest = made.of_neighbour(0.0), made.of_neighbour(0.0)
    taken = sum(greedy.take(1, n / 1000) for n in range(10_000))
    assert taken <= budget.NEIGHBOUR_RESERVE + 10 * budget.NEIGHBOUR_PER_S
    assert modest.take(1000, 10.0)  # what the other used up was its own


def test_many_greedy_neighbours_use_up_what_there_is_in_all() -> None:
    made = Budget(0.0)
    crowd = [made.of_neighbour(0.0) for _ in range(100)]
    taken = sum(one.take(1, n / 100) for n in range(1000) for one in crowd)
    assert taken <= budget.RESERVE + 10 * budget.PER_S + 1
    assert crowd[0].room(10.0) <= budget.SLICE  # and now all have little at a time


def test_a_snapshot_is_paid_for_out_of_the_reserve() -> None:
    share = Budget(0.0).of_neighbour(0.0)
    assert all(share.take(2, 0.0, snapshot=True) for _ in range(10_000))
    assert not share.take(budget.NEIGHBOUR_RESERVE + 1, 0.0)  # type: ignore[arg-type]


def test_ready_says_when_a_slice_is_there() -> None:
    share = Budget(0.0).of_neighbour(0.0)
    while share.take(1, 0.0):
        pass
    assert share.room(0.0) == 0
    at = share.ready_at(0.0)
    assert share.room(at - 0.01) < budget.SLICE <= share.room(at + 1e-6)


def test_a_neighbour_that_is_over_its_own_share_uses_up_nobody_elses() -> None:
    made = Budget(0.0)
    greedy, other = made.of_neighbour(0.0), made.of_neighbour(0.0)
    for _ in range(40 * int(budget.NEIGHBOUR_RESERVE)):
        greedy.take(1, 0.0)
    assert not greedy.take(1, 0.0)
    assert other.room(0.0) == int(budget.NEIGHBOUR_RESERVE)
