"""Which steps run together, on jobs that are nothing but three numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.batch import DECODE_TOKENS, MAX_WAITING, BatchConfig, Scheduler
from routing.spans import Span
from swarm.errors import CapacityError

WHOLE, PART = Span(0, 8), Span(2, 5)


@dataclass(frozen=True)
class Step:
    key: str
    tokens: int = 1
    span: Span = WHOLE
    number: int = 0


def scheduler(*steps: Step, prefill_tokens: int = 100, rows: int = 64) -> Scheduler[Step]:
    made: Scheduler[Step] = Scheduler(BatchConfig(prefill_tokens, rows))
    for step in steps:
        made.add(step)
    return made


def keys(steps: list[Step]) -> list[str]:
    return [step.key for step in steps]


def test_decode_steps_of_all_sessions_run_together() -> None:
    waiting = scheduler(Step("a"), Step("b"), Step("c"))
    assert keys(waiting.next()) == ["a", "b", "c"]
    assert waiting.next() == []


def test_steps_over_other_layers_wait_for_their_own_turn() -> None:
    waiting = scheduler(Step("a"), Step("b", span=PART), Step("c"))
    assert keys(waiting.next()) == ["a", "c"]
    assert keys(waiting.next()) == ["b"]


def test_steps_of_one_session_run_one_at_a_time_and_in_order() -> None:
    waiting = scheduler(Step("a", number=1), Step("a", number=2), Step("b"))
    assert [(s.key, s.number) for s in waiting.next()] == [("a", 1), ("b", 0)]
    assert [(s.key, s.number) for s in waiting.next()] == [("a", 2)]


def test_prefill_stays_within_the_token_budget_and_behind_decode() -> None:
    waiting = scheduler(Step("p", 60), Step("q", 60), Step("r", 40), Step("d"))
    assert keys(waiting.next()) == ["d", "p", "r"]
    assert keys(waiting.next()) == ["q"]


def test_a_chunk_larger_than_the_budget_still_runs() -> None:
    waiting = scheduler(Step("p", 500), Step("d"))
    assert keys(waiting.next()) == ["d", "p"]


def test_a_prompt_is_not_starved_by_a_full_house_of_decoders() -> None:
    waiting = scheduler(Step("p", 50), *(Step(f"d{i}") for i in range(4)), rows=3)
    assert "p" in keys(waiting.next())


def test_only_one_row_where_positions_depend_on_the_batch() -> None:
    waiting = scheduler(Step("a"), Step("b"))
    assert keys(waiting.next(most_rows=1)) == ["a"]
    assert keys(waiting.next(most_rows=1)) == ["b"]


def test_a_closed_session_takes_its_steps_with_it() -> None:
    waiting = scheduler(Step("a", number=1), Step("b"), Step("a", number=2))
    assert [s.number for s in waiting.drop("a")] == [1, 2]
    assert keys(waiting.next()) == ["b"]


def test_the_queue_is_bounded() -> None:
    waiting = scheduler(*(Step(str(i)) for i in range(MAX_WAITING)))
    with pytest.raises(CapacityError):
        waiting.add(Step("one too many"))


steps = st.builds(
    Step,
    st.sampled_from("abcdef"),
    st.integers(1, 150),
    st.sampled_from([WHOLE, PART]),
    st.integers(0, 1000),
)


@given(st.lists(steps, max_size=30), st.integers(1, 5))
def test_every_step_runs_once_in_its_sessions_order_and_none_starves(
    given_steps: list[Step], rows: int
) -> None:
    waiting = scheduler(*given_steps, rows=rows)
    ran: list[Step] = []
    while len(waiting):
        before = list(waiting._waiting.values())
        turn = waiting.next()
        assert turn and len(turn) <= rows
        assert any(step is before[0] for step in turn)  # the oldest always runs
        assert len({step.span for step in turn}) == 1
        assert len(set(keys(turn))) == len(turn)
        prompts = [step.tokens for step in turn if step.tokens > DECODE_TOKENS]
        assert len(prompts) <= 1 or sum(prompts) <= max(100, 150 + 100)
        ran += turn
    for key in "abcdef":
        assert [s for s in ran if s.key == key] == [s for s in given_steps if s.key == key]
