"""Which span a peer claims: the rules one by one, and whole swarms of choosers, one after another or all at once."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.estimates import Links
from routing.placement import Capacity, Claim, NothingFits, choose_span, recheck, should_move, windows
from routing.planner import coverage, plan
from routing.spans import Offer, Span, Speed

# SmolLM2-135M in float32, as the demo serves it: bytes of a layer with 1.6 MB of KV, and of the tied
# embedding and head, which is needed at both ends and held once by a span that has both.
LAYERS, LAYER_BYTES, END_BYTES = 30, 15_800_000, 113_000_000
DEMO_BUDGETS = (360_000_000, 375_000_000, 390_000_000, 405_000_000, 420_000_000)
# With five peers and every layer held twice, a chain of two hops is always possible: two peers hold layer 0 and
# two others the last, and were there a gap between them, the fifth alone would hold it. Six need no such chain.
SIX_BUDGETS = (300_000_000, 310_000_000, 320_000_000, 330_000_000, 340_000_000, 348_000_000)


def smollm2_bytes(span: Span) -> int:
    return len(span) * LAYER_BYTES + END_BYTES * (span.start == 0 or span.stop == LAYERS)


def capacity(budget: int) -> Capacity:
    return Capacity(lambda span: smollm2_bytes(span) <= budget, smollm2_bytes)


def layers_up_to(longest: int) -> Capacity:
    return Capacity(lambda span: len(span) <= longest)


def claims(*spans: tuple[int, int]) -> list[Claim]:
    return [Claim(f"other{index}", Span(*span)) for index, span in enumerate(spans)]


# ---------------------------------------------------------------- windows


@st.composite
def costs(draw: st.DrawFn) -> tuple[int, Callable[[Span], bool]]:
    layers = draw(st.integers(1, 12))
    each = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    tied, budget = draw(st.integers(0, 20)), draw(st.integers(1, 60))

    def fits(span: Span) -> bool:
        return sum(each[span.start : span.stop]) + tied * (0 in span or layers - 1 in span) <= budget

    return layers, fits


@given(costs())
def test_the_windows_are_all_that_fit_and_cannot_be_extended(
    case: tuple[int, Callable[[Span], bool]],
) -> None:
    layers, fits = case
    fitting = [Span(a, b) for a in range(layers) for b in range(a + 1, layers + 1) if fits(Span(a, b))]
    longest = [span for span in fitting if not any(other != span and other.covers(span) for other in fitting)]
    assert list(windows(layers, fits)) == sorted(longest)


def test_a_peer_too_small_for_the_ends_still_serves_the_middle() -> None:
    small = capacity(5 * LAYER_BYTES)
    assert choose_span(LAYERS, [], small, Random(0)).start > 0
    assert len(choose_span(LAYERS, [], small)) == 5


def test_nothing_is_claimed_where_not_one_layer_fits() -> None:
    with pytest.raises(NothingFits):
        choose_span(LAYERS, [], capacity(LAYER_BYTES - 1))


# ---------------------------------------------------------------- the choice


def test_what_nobody_holds_comes_first() -> None:
    assert choose_span(12, claims((0, 4), (0, 4), (8, 12)), layers_up_to(4)) == Span(4, 8)


def test_what_only_one_holds_comes_next() -> None:
    assert choose_span(12, claims((0, 12), (0, 4), (8, 12)), layers_up_to(4)) == Span(4, 8)


def test_then_the_layers_of_the_least_throughput() -> None:
    others = [
        Claim("a", Span(0, 12), tokens_per_s=10.0),
        Claim("b", Span(0, 6), tokens_per_s=1.0),
        Claim("c", Span(6, 12), tokens_per_s=9.0),
    ]
    chooser = Capacity(lambda span: len(span) <= 6, tokens_per_s=5.0)
    assert choose_span(12, others, chooser) == Span(0, 6)


def test_the_ends_are_taken_while_somebody_can() -> None:
    assert {choose_span(LAYERS, [], capacity(400_000_000), Random(seed)) for seed in range(20)} == {
        Span(0, 18),
        Span(12, 30),
    }


def test_a_choice_is_the_same_for_the_same_arguments() -> None:
    others = claims((0, 14), (3, 20))
    for seed in range(5):
        picked = {choose_span(LAYERS, others, capacity(370_000_000), Random(seed)) for _ in range(5)}
        assert len(picked) == 1


def test_small_changes_of_throughput_and_size_do_not_change_the_choice() -> None:
    def chosen(factor: float) -> Span:
        others = [
            Claim("a", Span(0, 14), tokens_per_s=10 * factor),
            Claim("b", Span(8, 30), tokens_per_s=12.0),
        ]
        sized = Capacity(lambda s: smollm2_bytes(s) <= 370_000_000, lambda s: factor * smollm2_bytes(s), 10.0)
        return choose_span(LAYERS, others, sized)

    assert {chosen(factor) for factor in (0.98, 0.99, 1.0, 1.01, 1.02)} == {chosen(1.0)}


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=6))
def test_no_other_window_leaves_less_of_the_weakest(longest: int, spans: list[tuple[int, int]]) -> None:
    others = claims(*((start, min(12, start + length)) for start, length in spans))

    def lacking(span: Span) -> tuple[int, int]:
        held = coverage(12, [span, *(claim.span for claim in others)])
        return sum(c == 0 for c in held), sum(c < 2 for c in held)

    chosen = choose_span(12, others, layers_up_to(longest))
    every = [Span(a, b) for a in range(12) for b in range(a + 1, 13) if b - a <= longest]
    assert lacking(chosen) == min(lacking(span) for span in every)


# ---------------------------------------------------------------- checking again


def test_of_two_who_took_the_same_place_at_once_only_the_later_yields() -> None:
    early, late = Claim("a", Span(0, 6), 1, settled=False), Claim("b", Span(0, 6), 1, settled=False)
    assert recheck(12, early, [late], layers_up_to(6)) == Span(0, 6)
    assert recheck(12, late, [early], layers_up_to(6)) == Span(6, 12)


def test_of_many_who_took_the_same_place_at_once_one_stays() -> None:
    same = [Claim(f"{index}", Span(0, 6), 7, settled=False) for index in range(9)]
    answers = [recheck(12, mine, [c for c in same if c != mine], layers_up_to(6)) for mine in same]
    assert answers == [Span(0, 6)] + [Span(6, 12)] * 8


def test_a_settled_claim_stands_whatever_its_rank() -> None:
    mine = Claim("a", Span(0, 6), 1, settled=False)
    assert recheck(12, mine, [Claim("b", Span(0, 6), 2, settled=True)], layers_up_to(6)) == Span(6, 12)


def test_a_claim_is_kept_where_another_would_be_only_as_good() -> None:
    mine = Claim("b", Span(2, 8), 5, settled=False)
    for seed in range(10):
        assert recheck(12, mine, [], layers_up_to(6), Random(seed)) == mine.span


# ---------------------------------------------------------------- moving later


def test_a_peer_moves_from_the_crowd_to_a_layer_that_nobody_holds() -> None:
    others = [Claim("a", Span(0, 6)), Claim("b", Span(0, 6))]
    assert should_move(12, Claim("c", Span(0, 6)), others, layers_up_to(6)) == Span(6, 12)


def test_a_peer_stays_where_a_layer_would_be_left_alone() -> None:
    others = [Claim("a", Span(0, 5)), Claim("b", Span(0, 6), settled=False)]
    assert should_move(12, Claim("c", Span(0, 6)), others, layers_up_to(6)) is None


def test_a_peer_stays_for_a_small_gain() -> None:
    others = [Claim("a", Span(0, 12)), Claim("b", Span(1, 11)), Claim("c", Span(0, 11))]
    assert should_move(12, Claim("d", Span(0, 6)), others, layers_up_to(6)) is None  # layer 11 is 1 of 6
    thinner = [*others[:1], Claim("b", Span(0, 9)), Claim("c", Span(0, 9))]
    assert should_move(12, Claim("d", Span(0, 6)), thinner, layers_up_to(6)) == Span(6, 12)


def test_a_peer_moves_to_where_throughput_is_clearly_least() -> None:
    others = [Claim("a", Span(0, 12), tokens_per_s=4.0), Claim("b", Span(0, 12), tokens_per_s=4.0)]
    quick = [Claim("c", Span(0, 6), tokens_per_s=8.0)]
    chooser = Capacity(lambda span: len(span) <= 6, tokens_per_s=8.0)
    assert should_move(12, Claim("d", Span(0, 6)), [*others, *quick], chooser) == Span(6, 12)
    assert should_move(12, Claim("d", Span(6, 12)), [*others, *quick], chooser) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), min_size=1, max_size=8), st.integers(1, 6))
@settings(max_examples=300)
def test_no_layer_is_lost_even_if_all_decide_to_move_at_the_same_moment(
    spans: list[tuple[int, int]], longest: int
) -> None:
    known = claims(*((start, min(10, start + length)) for start, length in spans))
    moved = [should_move(10, mine, [c for c in known if c != mine], layers_up_to(longest)) for mine in known]
    before = coverage(10, (claim.span for claim in known))
    loading = coverage(10, (c.span for c, to in zip(known, moved, strict=True) if to is None))
    assert all(now > 0 for was, now in zip(before, loading, strict=True) if was > 0)


# ---------------------------------------------------------------- whole swarms


def one_after_another(budgets: Sequence[int], rng: Random | None) -> list[Span]:
    taken: list[Claim] = []
    for index, budget in enumerate(budgets):
        taken.append(Claim(f"{index}", choose_span(LAYERS, taken, capacity(budget), rng)))
    return [claim.span for claim in taken]


@dataclass
class Chooser:
    name: str
    budget: int
    span: Span | None = None
    stamp: int = 0
    seen: dict[str, tuple[int, Span, float]] = field(default_factory=dict)  # stamp, span, known since

    def known(self, now: float) -> list[Claim]:
        return [
            Claim(name, span, stamp, now - since >= 1.0) for name, (stamp, span, since) in self.seen.items()
        ]

    def hear(self, name: str, stamp: int, span: Span, now: float) -> None:
        if name not in self.seen or self.seen[name][0] < stamp:
            self.seen[name] = (stamp, span, now)


def interleaved(budgets: Sequence[int], seed: int) -> tuple[list[Span], int]:
    """All start within a few spreading times (of 1 s); each claim reaches each peer after a delay of its own."""
    rng = Random(seed)
    names = rng.sample([f"{index:02}" for index in range(100)], len(budgets))
    choosers = [
        Chooser(name, budget) for name, budget in zip(names, rng.sample(budgets, len(budgets)), strict=True)
    ]
    order, claimed = count(), 0
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def claim(who: Chooser, span: Span, now: float) -> None:
        nonlocal claimed
        claimed += 1
        who.span, who.stamp = span, int(1000 * now)
        for other in choosers:
            if other is not who:
                at(now + rng.random(), lambda t, o=other, s=who.stamp: o.hear(who.name, s, span, t))
        at(now + 1.0, lambda t: check(who, t))

    def check(who: Chooser, now: float) -> None:
        assert who.span is not None
        mine = Claim(who.name, who.span, who.stamp, settled=False)
        span = recheck(LAYERS, mine, who.known(now), capacity(who.budget), rng)
        if span != who.span:
            claim(who, span, now)

    def start(who: Chooser, now: float) -> None:
        claim(who, choose_span(LAYERS, who.known(now), capacity(who.budget), rng), now)

    spread = rng.choice([0.01, 0.5, 2.0, 5.0])
    for chooser in choosers:
        at(rng.uniform(0.0, spread), lambda t, who=chooser: start(who, t))
    while events:
        when, _, what = heapq.heappop(events)
        what(when)
    return [chooser.span for chooser in choosers if chooser.span is not None], claimed


def fewest_hops(spans: Sequence[Span]) -> int:
    only_hops_count = Speed(step_s=1.0, layer_s=0.0, embed_s=0.0, head_s=0.0, prefill_layer_s=0.0)
    offers = [Offer(f"{i}", span, "cpu", only_hops_count, 0.0, 1, 0.0) for i, span in enumerate(spans)]
    return len(plan(LAYERS, offers, Links(), need_kv=1).hops)


def test_five_demo_peers_hold_every_layer_twice_in_every_order_of_arrival() -> None:
    for order in permutations(DEMO_BUDGETS):
        for rng in (None, Random(1), Random(2)):
            spans = one_after_another(order, rng)
            assert min(coverage(LAYERS, spans)) >= 2, (order, spans)
            assert fewest_hops(spans) >= 2


def test_five_demo_peers_hold_every_layer_twice_if_they_start_together() -> None:
    for seed in range(150):
        spans, claimed = interleaved(DEMO_BUDGETS, seed)
        assert min(coverage(LAYERS, spans)) >= 2, (seed, spans)
        assert claimed <= 5 * 5, seed  # each yields a few times at most


def test_six_smaller_peers_hold_every_layer_twice_and_need_three_hops() -> None:
    for index, order in enumerate(permutations(SIX_BUDGETS)):
        if index % 6 == 0:
            spans = one_after_another(order, Random(index))
            assert min(coverage(LAYERS, spans)) >= 2, (order, spans)
            assert fewest_hops(spans) >= 3
    for seed in range(50):
        spans, _ = interleaved(SIX_BUDGETS, seed)
        assert min(coverage(LAYERS, spans)) >= 2, (seed, spans)
