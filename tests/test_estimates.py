"""Estimates: hand-computed sums, the triangle's bounds, and what a correction may and may not do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.estimates import (
    MAX_CORRECTED,
    MAX_RATIO,
    UNKNOWN_HALF_S,
    Corrections,
    Links,
    compute_s,
    first_token_s,
    pair,
    prefill_s,
    ring_s,
)
from routing.spans import Hop, Offer, Span, Speed

SPEED = Speed(step_s=1.0, layer_s=10.0, embed_s=100.0, head_s=1000.0, prefill_layer_s=2.0)
seconds = st.floats(1e-4, 1.0)


def offer(peer: str, span: Span, queue_s: float = 0.0, link_s: float | None = None) -> Offer:
    return Offer(peer, span, "cpu-float32", SPEED, queue_s, 4096, link_s)


@pytest.mark.parametrize(
    ("span", "expected"),
    [(Span(1, 4), 31.0), (Span(0, 4), 141.0), (Span(4, 8), 1041.0), (Span(0, 8), 1181.0)],
)
def test_only_the_ends_pay_for_embedding_and_head(span: Span, expected: float) -> None:
    assert compute_s(SPEED, span, 8) == expected


def test_a_prompt_costs_by_the_token_but_goes_through_the_head_once() -> None:
    assert prefill_s(SPEED, Span(1, 4), 8, tokens=5) == 1 + 5 * 3 * 2
    assert prefill_s(SPEED, Span(0, 8), 8, tokens=5) == 1 + 5 * 8 * 2 + 100 + 1000


def test_a_measured_round_trip_counts_half_and_in_both_directions() -> None:
    links = Links.measured({("b", "a"): 0.08}, {"a": 0.001, "b": 0.001})
    assert links.between_s("a", "b") == links.between_s("b", "a") == 0.04


def test_of_two_measurements_of_one_link_the_smaller_stands() -> None:
    assert Links.measured({("b", "a"): 0.08, ("a", "b"): 0.06}, {}).between_s("a", "b") == 0.03


@given(seconds, seconds, seconds)
def test_an_unmeasured_link_keeps_the_triangle_inequality(x: float, y: float, z: float) -> None:
    links = Links(client_s={"a": x, "b": y, "c": z})
    ab, bc, ac = links.between_s("a", "b"), links.between_s("b", "c"), links.between_s("a", "c")
    assert abs(x - y) <= ab <= x + y
    assert ac <= ab + bc


@given(seconds, seconds)
def test_an_unmeasured_link_is_the_root_mean_square_over_all_directions(x: float, y: float) -> None:
    angles = [2 * math.pi * k / 360 for k in range(360)]
    squares = [(x - y * math.cos(a)) ** 2 + (y * math.sin(a)) ** 2 for a in angles]
    assert Links(client_s={"a": x, "b": y}).between_s("a", "b") == pytest.approx(
        math.sqrt(sum(squares) / len(squares))
    )


def test_a_peer_is_at_no_distance_from_itself() -> None:
    assert Links(client_s={"a": 0.5}).between_s("a", "a") == 0.0


def test_a_half_trip_never_measured_is_the_usual_one() -> None:
    assert Links().half_s("a") == UNKNOWN_HALF_S
    assert Links(client_s={"b": 0.01, "c": 0.02, "d": 0.09}).half_s("a") == 0.02


def test_own_measurements_stand_above_what_offers_carry() -> None:
    links = Links(client_s={"a": 0.01}).with_offers(
        [offer("a", Span(0, 1), link_s=0.5), offer("b", Span(0, 1), link_s=0.02), offer("c", Span(0, 1))]
    )
    assert (links.half_s("a"), links.half_s("b")) == (0.01, 0.02)
    assert links.half_s("c") == 0.015


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6))
def test_the_matrix_agrees_with_single_pairs_however_it_is_looked_up(peers: list[str]) -> None:
    halves = {"a": 0.01, "b": 0.02, "d": 0.04}
    few = {pair("a", "b"): 0.5, pair("c", "d"): 0.3, pair("b", "d"): 0.1}
    many = {**few, **{pair("x", str(k)): 1.0 for k in range(60)}}
    for trips in (few, many):
        links = Links(round_trip_s=trips, client_s=halves)
        single = [[links.between_s(x, y) for y in peers] for x in peers]
        assert links.matrix_s(peers) == single


def test_a_step_goes_once_around_the_ring() -> None:
    offers = {"a": offer("a", Span(0, 4), queue_s=0.5), "b": offer("b", Span(2, 8), queue_s=0.25)}
    links = Links(round_trip_s={pair("a", "b"): 0.08}, client_s={"a": 7.0, "b": 7.0})
    hops = [Hop(Span(0, 3), "a"), Hop(Span(3, 8), "b")]
    assert ring_s(8, hops, offers, links) == pytest.approx(
        (0.5 + 1 + 30 + 100) + (0.25 + 1 + 50 + 1000) + 0.04 + 0.04
    )
    assert ring_s(8, [Hop(Span(0, 8), "b")], offers, links) == pytest.approx(0.25 + 1 + 80 + 100 + 1000)


def test_the_first_token_pays_the_way_from_and_to_the_client_instead_of_the_ring() -> None:
    offers = {"a": offer("a", Span(0, 4)), "b": offer("b", Span(2, 8))}
    links = Links(round_trip_s={pair("a", "b"): 0.08}, client_s={"a": 0.003, "b": 0.005})
    hops = [Hop(Span(0, 3), "a"), Hop(Span(3, 8), "b")]
    assert first_token_s(8, hops, offers, links, tokens=5) == pytest.approx(
        0.003 + (1 + 5 * 3 * 2 + 100) + 0.04 + (1 + 5 * 5 * 2 + 1000) + 0.005
    )


def test_a_peer_that_is_twice_as_slow_as_it_says_is_soon_known_for_it() -> None:
    corrections = Corrections()
    for _ in range(30):
        corrections.observe("a", expected_s=0.1, observed_s=0.2)
    assert corrections.ratio("a") == pytest.approx(2.0, rel=0.01)
    assert corrections.ratio("b") == 1.0
    slow = corrections.apply(offer("a", Span(1, 4), queue_s=1.0))
    assert compute_s(slow.speed, slow.span, 8) == pytest.approx(62.0, rel=0.01)
    assert slow.queue_s == pytest.approx(2.0, rel=0.01)


def test_one_stall_moves_a_peer_by_half_at_most() -> None:
    corrections = Corrections()
    corrections.observe("a", expected_s=0.1, observed_s=60.0)
    assert 1.0 < corrections.ratio("a") < 1.6


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=50))
def test_no_observation_moves_a_peer_out_of_bounds(observed: list[tuple[float, float]]) -> None:
    corrections = Corrections()
    for expected_s, observed_s in observed:
        corrections.observe("a", expected_s, observed_s)
    assert 1 / MAX_RATIO * 0.999 <= corrections.ratio("a") <= MAX_RATIO * 1.001


def test_an_old_judgement_fades() -> None:
    corrections = Corrections()
    corrections.observe("a", 0.1, 0.8)
    before = corrections.ratio("a")
    corrections.relax(0.5)
    assert corrections.ratio("a") == pytest.approx(math.sqrt(before))


def test_the_peer_unseen_for_longest_is_forgotten_first() -> None:
    corrections = Corrections()
    for index in range(MAX_CORRECTED):
        corrections.observe(str(index), 0.1, 0.2)
    corrections.observe("0", 0.1, 0.2)
    corrections.observe("one more", 0.1, 0.2)
    assert corrections.ratio("1") == 1.0
    assert corrections.ratio("0") > 1.0 and corrections.ratio("one more") > 1.0
