"""The planner against brute force over every cut and every choice of peers, and each rule by itself."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.estimates import Links, pair
from routing.planner import (
    MAX_HOLDERS,
    NEAR_EQUAL,
    NoChain,
    coverage,
    gaps,
    plan,
    route_s,
    weakest,
)
from routing.spans import Hop, Offer, Route, Span, Speed

FAST = Speed(step_s=0.001, layer_s=0.001, embed_s=0.0, head_s=0.0, prefill_layer_s=0.001)
NOTHING = Speed(0.0, 0.0, 0.0, 0.0, 0.0)


def offer(peer: str, start: int, stop: int, **changes: object) -> Offer:
    base = Offer(peer, Span(start, stop), "cpu-float32", FAST, 0.0, 1000, 0.001)
    return replace(base, **changes)  # type: ignore[arg-type]


def hops(route: Route) -> list[tuple[str, int, int]]:
    return [(hop.peer, hop.span.start, hop.span.stop) for hop in route.hops]


# ---------------------------------------------------------------- brute force, written from the definitions


def cuttings(layers: int) -> Iterator[list[Span]]:
    for bits in product([False, True], repeat=layers - 1):
        edges = [0, *(layer for layer, cut in enumerate(bits, start=1) if cut), layers]
        yield [Span(a, b) for a, b in pairwise(edges)]


def cost_s(
    layers: int, chain: list[Hop], offers: dict[str, Offer], trips: dict[tuple[str, str], float]
) -> float:
    total = 0.0
    for index, hop in enumerate(chain):
        one, other = hop.peer, chain[(index + 1) % len(chain)].peer
        x, y = offers[one].link_s, offers[other].link_s
        assert x is not None and y is not None
        estimated = 0.0 if one == other else math.sqrt(x * x + y * y)
        total += trips[pair(one, other)] / 2 if pair(one, other) in trips and one != other else estimated
        speed = offers[one].speed
        total += offers[one].queue_s + speed.step_s + len(hop.span) * speed.layer_s
        total += speed.embed_s * (hop.span.start == 0) + speed.head_s * (hop.span.stop == layers)
    return total


def brute_force(
    layers: int,
    offers: list[Offer],
    trips: dict[tuple[str, str], float],
    kept: list[Hop],
    excluded_links: set[tuple[str, str]],
) -> float:
    """The least cost of any chain of any of these offers; infinite if there is none."""
    by_peer = {o.peer: o for o in offers}
    fixed = {hop.span: hop.peer for hop in kept}
    taken = [hop.span for hop in kept]
    best = math.inf
    for spans in cuttings(layers):
        if not all(span in spans for span in taken):
            continue
        choices = [
            [fixed[span]] if span in fixed else [o.peer for o in offers if o.span.covers(span)]
            for span in spans
        ]
        for peers in product(*choices):
            chain = [Hop(span, peer) for span, peer in zip(spans, peers, strict=True)]
            around = zip(peers, peers[1:] + peers[:1], strict=True)
            if not any(pair(a, b) in excluded_links for a, b in around):
                best = min(best, cost_s(layers, chain, by_peer, trips))
    return best


figures = st.sampled_from([0.0, 0.001, 0.002, 0.003, 0.005, 0.011, 0.02])


@st.composite
def speeds(draw: st.DrawFn) -> Speed:
    return Speed(draw(figures), draw(figures), draw(figures), draw(figures), 0.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Offer], dict[tuple[str, str], float]]:
    layers = draw(st.integers(1, 6))
    names = "abcd"[: draw(st.integers(1, 4))]
    offers = []
    for name in names:
        start = draw(st.integers(0, layers - 1))
        stop = draw(st.integers(start + 1, layers))
        offers.append(
            offer(name, start, stop, speed=draw(speeds()), queue_s=draw(figures), link_s=draw(figures))
        )
    pairs = [(a, b) for a in names for b in names if a < b]
    measured = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return layers, offers, {ab: draw(figures) * 4 for ab in measured}


@given(cases())
@settings(max_examples=300, deadline=None)
def test_no_chain_of_any_cuts_and_peers_is_faster(
    case: tuple[int, list[Offer], dict[tuple[str, str], float]],
) -> None:
    layers, offers, trips = case
    best = brute_force(layers, offers, trips, [], set())
    if best == math.inf:
        with pytest.raises(NoChain):
            plan(layers, offers, Links(round_trip_s=trips), need_kv=1)
        return
    route = plan(layers, offers, Links(round_trip_s=trips), need_kv=1)
    assert route.layers == layers
    by_peer = {o.peer: o for o in offers}
    assert all(by_peer[hop.peer].span.covers(hop.span) for hop in route.hops)
    assert route.step_s == pytest.approx(best)
    assert cost_s(layers, list(route.hops), by_peer, trips) == pytest.approx(best)


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_repair_is_the_best_around_what_is_kept_and_excluded(
    case: tuple[int, list[Offer], dict[tuple[str, str], float]], data: st.DataObject
) -> None:
    layers, offers, trips = case
    kept = []
    for one in data.draw(st.lists(st.sampled_from(offers), unique=True, max_size=2)):
        start = data.draw(st.integers(one.span.start, one.span.stop - 1))
        hop = Hop(Span(start, data.draw(st.integers(start + 1, one.span.stop))), one.peer)
        if not any(a in hop.span for other in kept for a in other.span):
            kept.append(hop)
    pairs = [(a.peer, b.peer) for a in offers for b in offers if a.peer != b.peer]
    excluded = set(data.draw(st.lists(st.sampled_from(pairs), max_size=2))) if pairs else set()
    gone = set(data.draw(st.lists(st.sampled_from(offers).map(lambda o: o.peer), max_size=1)))
    gone -= {hop.peer for hop in kept}
    rest = [o for o in offers if o.peer not in gone]
    best = brute_force(layers, rest, trips, kept, {pair(a, b) for a, b in excluded})

    def planned() -> Route:
        return plan(
            layers,
            offers,
            Links(round_trip_s=trips),
            need_kv=1,
            kept=kept,
            excluded_peers=gone,
            excluded_links=excluded,
        )

    if best == math.inf:
        with pytest.raises(NoChain) as raised:
            planned()
        assert 0 <= raised.value.gap.start < raised.value.gap.stop <= layers
        return
    assert planned().step_s == pytest.approx(best)
    assert set(kept) <= set(planned().hops)


@given(cases(), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_a_spread_choice_is_within_the_promise_of_the_best(
    case: tuple[int, list[Offer], dict[tuple[str, str], float]], seed: int
) -> None:
    layers, offers, trips = case
    best = brute_force(layers, offers, trips, [], set())
    if best < math.inf:
        chosen = plan(layers, offers, Links(round_trip_s=trips), need_kv=1, rng=Random(seed)).step_s
        assert best * (1 - 1e-9) <= chosen <= best * (1 + NEAR_EQUAL) + 1e-12


# ---------------------------------------------------------------- each rule by itself


def test_a_relay_of_one_layer_is_found_where_a_detour_is_shorter() -> None:
    offers = [offer("a", 0, 5), offer("b", 3, 8), offer("relay", 1, 7, speed=replace(FAST, layer_s=0.004))]
    links = Links(round_trip_s={pair("a", "b"): 2.0, pair("a", "relay"): 0.001, pair("b", "relay"): 0.001})
    ring = plan(8, offers, links, need_kv=1)
    assert "relay" in [hop.peer for hop in ring.hops]
    lengths = [len(hop.span) for hop in ring.hops if hop.peer == "relay"]
    assert lengths == [1]


def test_hops_are_cut_where_a_span_ends() -> None:
    offers = [offer("slow", 0, 6, speed=replace(FAST, layer_s=0.009)), offer("quick", 4, 10)]
    assert hops(plan(10, offers, Links(), need_kv=1)) == [("slow", 0, 4), ("quick", 4, 10)]
    swapped = [offer("quick", 0, 6), offer("slow", 4, 10, speed=replace(FAST, layer_s=0.009))]
    assert hops(plan(10, swapped, Links(), need_kv=1)) == [("quick", 0, 6), ("slow", 6, 10)]


def test_the_way_back_to_the_first_hop_counts() -> None:
    offers = [offer("a", 0, 5), offer("far", 5, 10), offer("near", 5, 10, queue_s=0.01)]
    links = Links(round_trip_s={pair("a", "far"): 0.05, pair("a", "near"): 0.01})
    assert hops(plan(10, offers, links, need_kv=1))[1][0] == "near"  # 0.01 + 0.01 < 0.05


def test_a_peer_may_serve_both_sides_of_another() -> None:
    slow = offer("slow", 0, 9, speed=replace(FAST, layer_s=0.1))
    route = plan(9, [slow, offer("quick", 3, 6)], Links(), need_kv=1)
    assert hops(route) == [("slow", 0, 3), ("quick", 3, 6), ("slow", 6, 9)]


def test_a_peer_without_room_for_the_session_is_left_out() -> None:
    offers = [offer("full", 0, 4, free_kv_tokens=99), offer("free", 0, 4, queue_s=1.0)]
    assert hops(plan(4, offers, Links(), need_kv=100)) == [("free", 0, 4)]
    assert hops(plan(4, offers, Links(), need_kv=99)) == [("full", 0, 4)]


def test_a_chain_is_of_one_numerics_class_even_where_a_mixed_one_is_faster() -> None:
    offers = [
        offer("a", 0, 4),
        offer("b", 4, 8, queue_s=1.0),
        offer("c", 4, 8, numerics="cuda-bfloat16"),
    ]
    assert hops(plan(8, offers, Links(), need_kv=1)) == [("a", 0, 4), ("b", 4, 8)]
    without_b = plan(8, offers, Links(), need_kv=1, excluded_peers={"b"})
    assert hops(without_b) == [("a", 0, 4), ("c", 4, 8)]


def test_the_fastest_class_is_taken_unless_one_is_wanted() -> None:
    offers = [offer("a", 0, 4, queue_s=1.0), offer("c", 0, 4, numerics="cuda-bfloat16")]
    assert hops(plan(4, offers, Links(), need_kv=1)) == [("c", 0, 4)]
    assert hops(plan(4, offers, Links(), need_kv=1, numerics="cpu-float32")) == [("a", 0, 4)]
    elsewhere = plan(4, offers, Links(), need_kv=1, numerics="cpu-float32", excluded_peers={"a"})
    assert hops(elsewhere) == [("c", 0, 4)]


def test_a_repair_stays_in_the_class_of_what_it_keeps() -> None:
    offers = [
        offer("a", 0, 4),
        offer("b", 4, 8, queue_s=1.0),
        offer("c", 0, 8, numerics="cuda-bfloat16"),
    ]
    kept = [Hop(Span(0, 4), "a")]
    assert hops(plan(8, offers, Links(), need_kv=1, kept=kept)) == [("a", 0, 4), ("b", 4, 8)]
    without_b = plan(8, offers, Links(), need_kv=1, kept=kept, excluded_peers={"b"})
    assert hops(without_b) == [("a", 0, 4), ("c", 4, 8)]


def test_a_kept_hop_needs_neither_room_nor_an_offer() -> None:
    offers = [offer("a", 0, 4, free_kv_tokens=0), offer("b", 2, 8), offer("c", 0, 8)]
    for known in (offers, offers[1:]):
        route = plan(8, known, Links(), need_kv=100, kept=[Hop(Span(0, 3), "a")])
        assert hops(route) == [("a", 0, 3), ("b", 3, 8)]


def test_kept_hops_that_overlap_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="overlap"):
        plan(4, [offer("a", 0, 4)], Links(), need_kv=1, kept=[Hop(Span(0, 3), "a"), Hop(Span(2, 4), "a")])


def test_two_offers_of_one_peer_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="two offers"):
        plan(4, [offer("a", 0, 4), offer("a", 0, 3)], Links(), need_kv=1)


def test_an_excluded_link_is_gone_around_in_both_directions() -> None:
    offers = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 4, 8, queue_s=1.0)]
    for link in [("a", "b"), ("b", "a")]:
        route = plan(8, offers, Links(), need_kv=1, excluded_links={link})
        assert hops(route) == [("a", 0, 4), ("c", 4, 8)]


def test_equal_choices_fall_the_same_way_whatever_the_order_of_offers() -> None:
    offers = [
        offer(name, start, start + 4) for start in (0, 4) for name in (f"x{start}", f"y{start}", f"z{start}")
    ]
    chosen = {plan(8, Random(seed).sample(offers, 6), Links(), need_kv=1) for seed in range(20)}
    assert len(chosen) == 1


def test_clients_spread_over_equal_peers_and_shun_the_much_slower() -> None:
    offers = [offer(name, 0, 8) for name in "abcd"] + [offer("slow", 0, 8, queue_s=0.01)]
    rng = Random(7)
    picked = [plan(8, offers, Links(), need_kv=1, rng=rng).hops[0].peer for _ in range(400)]
    assert all(60 <= picked.count(name) <= 140 for name in "abcd")
    assert "slow" not in picked


def test_the_gap_is_the_first_run_that_nobody_serves() -> None:
    offers = [offer("a", 0, 4), offer("b", 8, 9), offer("c", 11, 12)]
    with pytest.raises(NoChain) as raised:
        plan(12, offers, Links(), need_kv=1)
    assert (raised.value.gap, raised.value.cause) == (Span(4, 8), "unserved")
    assert "4-7" in str(raised.value)
    with pytest.raises(NoChain) as raised:
        plan(12, [], Links(), need_kv=1)
    assert (raised.value.gap, raised.value.cause) == (Span(0, 12), "unserved")


def test_full_and_excluded_peers_are_told_from_missing_ones() -> None:
    offers = [offer("a", 0, 4), offer("b", 4, 8, free_kv_tokens=5)]
    with pytest.raises(NoChain) as raised:
        plan(8, offers, Links(), need_kv=6)
    assert (raised.value.gap, raised.value.cause) == (Span(4, 8), "full")
    with pytest.raises(NoChain) as raised:
        plan(8, offers, Links(), need_kv=1, excluded_peers={"a"})
    assert (raised.value.gap, raised.value.cause) == (Span(0, 4), "excluded")


def test_layers_that_only_a_broken_link_separates_are_named() -> None:
    offers = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]
    with pytest.raises(NoChain) as raised:
        plan(12, offers, Links(), need_kv=1, excluded_links={("b", "c")})
    assert (raised.value.gap, raised.value.cause) == (Span(7, 9), "unjoined")
    with pytest.raises(NoChain) as raised:
        plan(12, offers, Links(), need_kv=1, excluded_links={("a", "c")})
    assert (raised.value.gap, raised.value.cause) == (Span(0, 12), "unjoined")


def test_among_thousands_every_layer_keeps_its_best_offers() -> None:
    rng = Random(3)
    offers = [
        offer(f"{index:04}", start, start + 8, queue_s=1 + rng.random(), link_s=0.05)
        for index, start in enumerate(start for start in range(0, 32, 4) for _ in range(4 * MAX_HOLDERS))
        if start <= 24
    ]
    best = [offer(f"best{start}", start, start + 8) for start in (0, 8, 16, 24)]
    lonely = offer("lonely", 32, 33, queue_s=9.0)
    route = plan(33, [*offers, *best, lonely], Links(), need_kv=1)
    assert [hop.peer for hop in route.hops] == ["best0", "best8", "best16", "best24", "lonely"]


def test_a_planned_route_can_be_priced_again_later() -> None:
    offers = [offer("a", 0, 4), offer("b", 4, 8)]
    route = plan(8, offers, Links(), need_kv=1)
    assert route_s(8, route, offers, Links()) == route.step_s
    loaded = [offers[0], replace(offers[1], queue_s=0.5)]
    assert route_s(8, route, loaded, Links()) == pytest.approx(route.step_s + 0.5)


# ---------------------------------------------------------------- coverage


def test_coverage_counts_the_spans_over_each_layer() -> None:
    spans = [Span(0, 3), Span(2, 5), Span(2, 3), Span(4, 99)]
    assert coverage(6, spans) == (1, 1, 3, 1, 2, 1)
    assert weakest(6, spans) == (Span(0, 2), 1)
    assert gaps(6, spans) == ()
    assert gaps(8, [Span(1, 3), Span(5, 6)]) == (Span(0, 1), Span(3, 5), Span(6, 8))
    assert weakest(8, [Span(1, 3)]) == (Span(0, 1), 0)
