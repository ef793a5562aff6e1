"""From registry entries to a chain: models, choices, offers, plans, and why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from routing.spans import Hop, Route, Span, Speed
from swarm.chains import choose_model, live_models, make_plan, model_status, offers, plan_chain
from swarm.errors import AmbiguousModel, NoRoute, UnknownModel
from swarm.identity import PeerId
from swarm.records import Descriptor, Heartbeat
from swarm.registry import PeerEntry
from tests.sim.records import descriptor

SPEED = Speed(step_s=0.001, layer_s=0.002, embed_s=0.003, head_s=0.005, prefill_layer_s=0.0001)
A, B = b"\xaa" * 32, b"\xbb" * 32


BEAT = ("free_kv_tokens", "queue_s", "sessions", "issued_ms")  # of its fields, those that tests change


def entry(peer: str, start: int = 0, stop: int = 6, state: str = "serving", **changes: Any) -> PeerEntry:
    """A live peer of a model of 6 layers. What isn't of its heartbeat is of its descriptor."""
    beat = {name: changes.pop(name) for name in BEAT if name in changes}
    values = {"fingerprint": A, "model": "tiny", "layers": 6, "name": peer, "context": 1000} | changes
    what: Descriptor = descriptor(peer=PeerId(peer), span=Span(start, stop), **values)
    load = {"free_kv_tokens": 4000, "speed": SPEED, "tokens_per_s": 10.0, "issued_ms": 0} | beat
    heartbeat = Heartbeat(
        state=state, peer=PeerId(peer), seq=1, descriptor_hash=b"h" * 16, lease_s=15.0, **load
    )
    return PeerEntry(what, heartbeat, b"signed by " + peer.encode(), 1.0, 14.0)


def hops(route: Route) -> list[tuple[str, int, int]]:
    return [(hop.peer, hop.span.start, hop.span.stop) for hop in route.hops]


# ---------------------------------------------------------------- models


def test_status_tells_whose_clock_is_off_the_others() -> None:
    times = {"ada": 1_000_000, "bob": 1_004_000, "cleo": 1_000_000 + 7_500_000, "dan": 999_000}
    (model,) = live_models([entry(name, issued_ms=at) for name, at in times.items()])
    status = model_status(model, {}, known=4)
    off = {peer.descriptor.name: peer.clock_error_s for peer in status.peers}
    assert off == {"ada": 0.0, "bob": 0.0, "cleo": pytest.approx(7498.0), "dan": 0.0}


def test_entries_are_grouped_by_fingerprint_and_ordered_by_name() -> None:
    models = live_models(
        [entry("p", fingerprint=B, model="zeta"), entry("q"), entry("r", fingerprint=B, model="zeta")]
    )
    assert [(m.name, m.fingerprint, len(m.entries)) for m in models] == [("tiny", A, 1), ("zeta", B, 2)]
    assert live_models([]) == ()


def test_the_commonest_name_counts_and_a_tie_goes_by_text() -> None:
    (model,) = live_models([entry("p", model="b"), entry("q", model="a"), entry("r", model="b")])
    assert model.name == "b"
    (model,) = live_models([entry("p", model="b"), entry("q", model="a")])
    assert model.name == "a"


def test_a_peer_that_claims_another_layer_count_is_left_out() -> None:
    (model,) = live_models([entry("p"), entry("liar", layers=9), entry("q")])
    assert (model.layers, [e.peer for e in model.entries]) == (6, ["p", "q"])


def test_grouping_a_thousand_peers_looks_at_each_a_few_times() -> None:
    class Counted(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

    live_models([entry(f"p{number}", model=Counted("tiny")) for number in range(1000)])
    assert Counted.compared < 10_000


def test_the_only_model_needs_no_name() -> None:
    models = live_models([entry("p"), entry("q")])
    assert choose_model(models, None) is models[0]
    assert choose_model(models, "tiny") is models[0]
    assert choose_model(models, "tiny@aaaa") is models[0]
    assert choose_model(models, "tiny@AAAA") is models[0]


def test_a_model_may_be_called_by_any_name_that_a_peer_gives_it() -> None:
    models = live_models([entry("p"), entry("q"), entry("r", model="org/tiny")])
    assert choose_model(models, "org/tiny") is models[0]


def test_an_unknown_model_is_told_with_those_that_are_there() -> None:
    with pytest.raises(UnknownModel, match=r"no peer serves 'other'; this swarm serves tiny") as caught:
        choose_model(live_models([entry("p")]), "other")
    assert (caught.value.model, caught.value.known) == ("other", ("tiny",))
    with pytest.raises(UnknownModel, match="no peer serves any model here; start one with: swarm peer"):
        choose_model((), None)


def test_several_models_are_listed_when_none_is_named() -> None:
    models = live_models([entry("p"), entry("q", fingerprint=B, model="zeta")])
    with pytest.raises(AmbiguousModel) as caught:
        choose_model(models, None)
    assert caught.value.choices == ("tiny", "zeta")


def test_one_name_with_two_fingerprints_is_listed_with_them_and_one_can_be_named() -> None:
    models = live_models([entry("p"), entry("q", fingerprint=B)])
    with pytest.raises(AmbiguousModel) as caught:
        choose_model(models, "tiny")
    assert caught.value.choices == ("tiny@aaaaaaaa", "tiny@bbbbbbbb")
    assert choose_model(models, caught.value.choices[1]).fingerprint == B


# ---------------------------------------------------------------- chains


def test_only_serving_peers_are_offered_with_their_measured_distance() -> None:
    made = offers(
        [entry("p", 0, 3), entry("q", 3, 6, "loading"), entry("r", 3, 6, "draining")], {PeerId("p"): 0.01}
    )
    assert [(o.peer, o.span, o.link_s, o.free_kv_tokens) for o in made] == [("p", Span(0, 3), 0.01, 4000)]


def test_a_chain_takes_peers_with_room_and_context() -> None:
    (model,) = live_models(
        [entry("small", 0, 6, context=50), entry("full", 0, 6, free_kv_tokens=10), entry("ok", 0, 6)]
    )
    assert hops(plan_chain(model, {}, 3, need_kv=100, context=100)) == [("ok", 0, 6)]


def test_a_gap_is_named_with_the_command_that_fills_it() -> None:
    (model,) = live_models([entry("p", 0, 2), entry("q", 4, 6)])
    with pytest.raises(NoRoute) as caught:
        plan_chain(model, {}, 5)
    assert str(caught.value) == (
        "no live peer serves layers 2-3 of tiny (2 of 5 known peers alive); "
        "start one with: swarm peer MODEL --layers 2:4 --join ADDR"
    )
    assert (caught.value.gap, caught.value.alive, caught.value.known) == ("2-3", 2, 5)


def test_a_gap_that_is_being_loaded_is_worth_waiting_for() -> None:
    (model,) = live_models([entry("p", 0, 4), entry("q", 4, 6, "loading")])
    with pytest.raises(
        NoRoute, match=r"layers 4-5 .* 1 of them is loading those layers; try again in a moment"
    ):
        plan_chain(model, {}, 2)


def test_a_full_swarm_is_told_as_full_with_numbers() -> None:
    (model,) = live_models(
        [entry("p", 0, 4), entry("q", 4, 6, free_kv_tokens=7), entry("r", 4, 6, free_kv_tokens=9)]
    )
    with pytest.raises(
        NoRoute, match=r"every peer with layers 4-5 of tiny is full: 100 positions .*, at most 9 are free"
    ):
        plan_chain(model, {}, 3, need_kv=100)
    assert hops(plan_chain(model, {}, 3, need_kv=100, hopeful=True))[0] == ("p", 0, 4)


def test_hope_prefers_peers_with_room_and_makes_up_no_peers() -> None:
    (model,) = live_models([entry("p", free_kv_tokens=9, queue_s=0.0), entry("q", queue_s=9.0)])
    assert hops(plan_chain(model, {}, 3, need_kv=100, hopeful=True)) == [("q", 0, 6)]
    with pytest.raises(NoRoute, match="can't be used now"):
        plan_chain(model, {}, 3, need_kv=5, hopeful=True, excluded_peers=["p", "q"])


def test_kept_hops_stay_and_excluded_ones_go() -> None:
    (model,) = live_models(
        [entry("p", 0, 3), entry("q", 3, 6), entry("r", 3, 6), entry("s", 0, 6, queue_s=0.0)]
    )
    kept = (Hop(Span(0, 3), "p"),)
    assert hops(plan_chain(model, {}, 4, kept=kept, excluded_peers=["q", "s"])) == [("p", 0, 3), ("r", 3, 6)]


# ---------------------------------------------------------------- plans


def test_of_two_kept_hops_that_cant_reach_each_other_either_may_be_replaced() -> None:
    (model,) = live_models([entry("p", 0, 3), entry("q", 3, 6), entry("r", 3, 6), entry("s", 0, 3)])
    kept = [Hop(Span(0, 3), "p"), Hop(Span(3, 6), "q")]
    assert hops(plan_chain(model, {}, 4, kept=kept)) == [("p", 0, 3), ("q", 3, 6)]
    assert hops(plan_chain(model, {}, 4, kept=kept, excluded_links={("r", "s")})) == [("p", 0, 3), ("q", 3, 6)]
    found = hops(plan_chain(model, {}, 4, kept=kept, excluded_links={("p", "q")}))
    assert {found[0][0], found[1][0]} != {"p", "q"} and len(found) == 2


def test_a_models_vocabulary_is_what_most_of_its_peers_say() -> None:
    (model,) = live_models([entry("p", vocab=100), entry("q", vocab=1 << 20), entry("r", vocab=100)])
    assert model.vocab == 100


def test_a_plan_says_how_long_a_prefill_chunk_takes_on_the_whole_chain() -> None:
    (model,) = live_models([entry("p", 0, 4, queue_s=0.25), entry("q", 4, 6)])
    route = plan_chain(model, {}, 2)
    made = make_plan(route, model, {PeerId("p"): b"1", PeerId("q"): b"2"}, chunk=256)
    # by hand: p: a step, 4 layers of 256 tokens, the embedding, its queue; q: a step, 2 layers, the head
    p = 0.001 + 256 * 4 * 0.0001 + 0.003 + 0.25
    q = 0.001 + 256 * 2 * 0.0001 + 0.005
    assert made.chunk_s == pytest.approx(p + q)
    assert made.route is route and set(made.descriptors) == {"p", "q"}


def test_a_hop_that_left_the_registry_costs_a_plan_nothing() -> None:
    (model,) = live_models([entry("q", 3, 6)])
    made = make_plan(Route((Hop(Span(0, 3), "gone"), Hop(Span(3, 6), "q")), 0.1), model, {}, chunk=100)
    assert made.chunk_s == pytest.approx(0.001 + 100 * 3 * 0.0001 + 0.005)


# ---------------------------------------------------------------- status


def test_status_shows_peers_by_span_coverage_and_the_planned_route() -> None:
    (model,) = live_models([entry("late", 3, 6), entry("early", 0, 4), entry("spare", 3, 5, "loading")])
    status = model_status(model, {PeerId("early"): 0.02, PeerId("late"): None}, known=4)
    assert [peer.descriptor.name for peer in status.peers] == ["early", "spare", "late"]
    assert status.coverage == (1, 1, 1, 2, 1, 1)
    assert status.problem is None and status.route is not None and status.route.layers == 6
    assert [peer.rtt_s for peer in status.peers] == [0.02, None, None]


def test_status_is_unhealthy_exactly_where_a_client_finds_no_route() -> None:
    (model,) = live_models([entry("p", 0, 4), entry("q", 4, 6, "draining")])
    status = model_status(model, {}, known=2)
    assert status.route is None and status.weakest == Span(4, 6)
    with pytest.raises(NoRoute) as caught:
        plan_chain(model, {}, 2)
    assert status.problem == str(caught.value)
