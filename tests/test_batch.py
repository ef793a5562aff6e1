"""Which steps run together, on jobs that are nothing but three numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.batch import MAX_WAITING, BatchConfig, Piece, Scheduler
from peer.pace import DECODE_TOKENS, DEEPEST_DEBT, LEAST_PIECE
from routing.spans import Span
from swarm.errors import CapacityError

WHOLE, PART = Span(0, 8), Span(2, 5)


@dataclass(frozen=True)
class Step:
    key: str
    tokens: int = 1
    span: Span = WHOLE
    number: int = 0
    chunk: int | None = None


def scheduler(
    *steps: Step, prefill_tokens: int = 100, rows: int = 64, long_tokens: int = 1000
) -> Scheduler[Step]:
    made: Scheduler[Step] = Scheduler(BatchConfig(prefill_tokens, rows, long_tokens))
    for step in steps:
        made.add(step, 0.0)
    return made


def keys(turn: list[Piece[Step]]) -> list[str]:
    return [piece.job.key for piece in turn]


def turn(waiting: Scheduler[Step], took: float = 1.0, **options: int) -> list[Piece[Step]]:
    """One turn from beginning to end."""
    made = waiting.next(0.0, **options)
    waiting.ended(made, 0.0, took)
    for piece in made:
        if not piece.is_last:
            waiting.put_back(piece, took)
    return made


def parts(turn: list[Piece[Step]]) -> list[tuple[str, int, int]]:
    return [(piece.job.key, piece.start, piece.stop) for piece in turn]


def test_decode_steps_of_all_sessions_run_together() -> None:
    waiting = scheduler(Step("a"), Step("b"), Step("c"))
    assert keys(turn(waiting)) == ["a", "b", "c"]
    assert turn(waiting) == []


def test_steps_over_other_layers_wait_for_their_own_turn() -> None:
    waiting = scheduler(Step("a"), Step("b", span=PART), Step("c"))
    assert keys(turn(waiting)) == ["a", "c"]
    assert keys(turn(waiting)) == ["b"]


def test_steps_of_one_session_run_one_at_a_time_and_in_order() -> None:
    waiting = scheduler(Step("a", number=1), Step("a", number=2), Step("b"))
    assert [(p.job.key, p.job.number) for p in turn(waiting)] == [("a", 1), ("b", 0)]
    assert [(p.job.key, p.job.number) for p in turn(waiting)] == [("a", 2)]


def test_where_nobody_decodes_prompts_fill_the_whole_budget() -> None:
    waiting = scheduler(Step("p", 60), Step("q", 60), Step("r", 40))
    assert parts(turn(waiting)) == [("p", 0, 60), ("q", 0, 40)]
    assert parts(turn(waiting)) == [("r", 0, 40), ("q", 40, 60)]


def test_a_long_pass_is_shared_by_the_prompts_that_wait() -> None:
    for count, each in ((1, 400), (2, 200), (4, 100), (6, 100)):
        waiting = scheduler(*(Step(f"p{i}", 1000) for i in range(count)), long_tokens=400)
        assert parts(waiting.next(0.0, long=True)) == [(f"p{i}", 0, each) for i in range(min(count, 4))]
    waiting = scheduler(Step("p", 30), Step("q", 1000), long_tokens=400)
    assert parts(waiting.next(0.0, long=True)) == [("p", 0, 30), ("q", 0, 370)]
    assert parts(scheduler(Step("p", 1000, chunk=64), long_tokens=400).next(0.0, long=True)) == [("p", 0, 64)]


def test_beside_those_who_decode_a_long_pass_is_no_longer_than_others() -> None:
    waiting = scheduler(Step("p", 1000), Step("d"), long_tokens=400)
    turn(waiting)
    waiting.pace._credit_s = 1e9
    waiting.pace._sessions["p"].price_s, waiting.pace._sessions["p"].largest = 1e-9, 1000
    waiting.add(Step("d"), 1.0)
    assert parts(waiting.next(1.0, long=True)) == [("d", 0, 1), ("p", 0, 100)]


def test_a_long_pass_lets_in_decode_steps_and_short_prompts_of_others() -> None:
    waiting = scheduler(Step("busy"), Step("long", 101), Step("d"), Step("e"))
    assert parts(waiting.urgent({"busy"}, 1000, 0.0)) == [("d", 0, 1), ("e", 0, 1)]
    waiting = scheduler(Step("short", 100), Step("other", 30))
    assert waiting.urgent({"busy"}, 29, 0.0) == []
    assert parts(waiting.urgent({"busy"}, 99, 0.0)) == [("other", 0, 30)]
    assert parts(waiting.urgent({"busy"}, 1000, 0.0)) == [("short", 0, 100)]
    assert waiting.urgent({"busy"}, 1000, 0.0) == []


def test_prompts_take_turns() -> None:
    waiting = scheduler(Step("p", 250), Step("q", 150))
    seen = [parts(turn(waiting)) for _ in range(4)]
    assert seen == [[("p", 0, 100)], [("q", 0, 100)], [("p", 100, 200)], [("q", 100, 150), ("p", 200, 250)]]


def test_no_piece_reaches_over_the_end_of_a_chunk() -> None:
    waiting = scheduler(Step("p", 250, chunk=40), prefill_tokens=30)
    assert [parts(turn(waiting))[0][1:] for _ in range(4)] == [(0, 30), (30, 40), (40, 70), (70, 80)]


def test_beside_decode_steps_a_prompt_begins_small_and_only_when_their_cost_is_known() -> None:
    waiting = scheduler(Step("p", 90), Step("d"))
    assert parts(turn(waiting)) == [("d", 0, 1)]
    waiting.add(Step("d"), 1.0)
    assert parts(turn(waiting)) == [("d", 0, 1), ("p", 0, LEAST_PIECE)]


def test_decode_steps_over_other_layers_dont_wait_with_a_prompt_in_debt() -> None:
    waiting = scheduler(Step("d"))
    for now in (0.0, 1.0, 2.0):  # its rhythm: it is due at 3.0
        waiting.ended(waiting.next(now), now, now + 0.1)
        waiting.add(Step("d"), now + 1.0)
    waiting.ended(waiting.next(3.0), 3.0, 3.1)
    waiting.pace._credit_s = -1.0
    waiting.add(Step("p", 90), 3.2)
    due = waiting.begin_at(3.2)
    assert due is not None and due > 3.5
    waiting.add(Step("e", span=PART), 3.3)
    assert waiting.begin_at(3.3) == 3.3 and not waiting.pace.awaited
    assert parts(waiting.next(3.3)) == [("p", 0, LEAST_PIECE)] and keys(waiting.next(3.3)) == ["e"]


def test_a_prompt_that_stands_aside_holds_up_nobody_over_other_layers() -> None:
    waiting = scheduler(Step("p", 90), Step("d"), Step("e", span=PART))
    assert keys(turn(waiting)) == ["d"]  # nothing is known yet, so the prompt stands aside
    waiting.add(Step("d"), 1.0)
    waiting.pace._credit_s = -100.0
    assert keys(turn(waiting)) == ["e"]


def test_a_prompt_is_not_starved_by_a_full_house_of_decoders() -> None:
    waiting = scheduler(Step("p", 50), *(Step(f"d{i}") for i in range(4)), rows=3)
    seen: list[str] = []
    for _ in range(3):
        ran = keys(turn(waiting))
        seen += ran
        for key in ran:
            if key != "p":
                waiting.add(Step(key), 1.0)
    assert "p" in seen


def test_only_one_row_where_positions_depend_on_the_batch() -> None:
    waiting = scheduler(Step("a"), Step("b"), Step("p", 50))
    assert [keys(turn(waiting, most_rows=1)) for _ in range(3)] == [["a"], ["b"], ["p"]]


def test_a_closed_session_takes_its_steps_with_it() -> None:
    waiting = scheduler(Step("a", number=1), Step("b"), Step("a", number=2))
    assert [s.number for s in waiting.drop("a")] == [1, 2]
    assert keys(turn(waiting)) == ["b"]


def test_the_queue_is_bounded() -> None:
    waiting = scheduler(*(Step(str(i)) for i in range(MAX_WAITING)))
    with pytest.raises(CapacityError):
        waiting.add(Step("one too many"), 0.0)


steps = st.builds(
    Step,
    st.sampled_from("abcdef"),
    st.integers(1, 150),
    st.sampled_from([WHOLE, PART]),
    st.integers(0, 1000),
    st.sampled_from([None, 16, 64]),
)


@given(st.lists(steps, max_size=30), st.integers(1, 5), st.floats(0.001, 5.0))
def test_every_token_runs_once_in_its_sessions_order_and_none_starves(
    given_steps: list[Step], rows: int, took: float
) -> None:
    waiting = scheduler(*given_steps, rows=rows)
    ran: list[Piece[Step]] = []
    aside = 0
    while len(waiting):
        before = waiting._ready()
        made = turn(waiting, took)
        assert made and len(made) <= rows
        assert len({piece.job.span for piece in made}) == 1
        assert len(set(keys(made))) == len(made)
        assert sum(p.tokens for p in made if p.job.tokens > DECODE_TOKENS) <= 100
        runs = any(piece.job is before[0].job for piece in made)
        decoding = [entry.job for entry in before if entry.decodes]
        assert runs or (not before[0].decodes and any(piece.job is decoding[0] for piece in made))
        aside = 0 if runs else aside + 1
        assert aside <= DEEPEST_DEBT + 2  # and the turn in which nothing was known
        ran += made
    for key in "abcdef":
        own = [piece for piece in ran if piece.job.key == key]
        whole = [(step, 0) for step in given_steps if step.key == key]
        assert [(p.job, p.start) for p in own if p.start == 0] == whole
        for step, _ in whole:
            cut = [(p.start, p.stop) for p in own if p.job is step]
            assert cut[0][0] == 0 and cut[-1][1] == step.tokens
            assert all(a[1] == b[0] for a, b in pairwise(cut))
            size = step.chunk or step.tokens
            assert all(start // size == (stop - 1) // size for start, stop in cut)
