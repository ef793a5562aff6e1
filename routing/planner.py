"""Offers and estimates -> the fastest `Route`, or `NoChain` with the gap named.

Invariant: a returned route covers every layer once, uses only usable offers (room for the session,
not excluded) and links that aren't excluded, contains every kept hop unchanged, and no such route
of the preferred numerics class is faster by the estimates given.

The ring makes this more than a shortest path: a token goes from the last hop back to the first,
so the cost of the last hop depends on the first. The search has two parts, both exact.

1. *Relaxed sweep.* From the last layer to the first, `to_go[layer][part]` is the least cost of the
   layers from `layer` on when `part` runs it, with the closing link replaced by the cheapest one
   from that last hop to any possible first hop. O(layers x holders²).
2. *A\\** for each possible first hop, in the order of its relaxed cost, until that is no better than
   the best ring found. `to_go` is the exact cost of the relaxed problem, hence never too high and
   consistent (Hart, Nilsson, Raphael 1968), so each state is expanded at most once.

Cuts: a hop's cost is linear in its layers, so the cost of a chain of given peers is linear in every
cut, and its minimum lies at a corner: each cut at the end of a span, where a span that would shrink
to nothing is left out instead. Leaving a peer out is free only where a detour over it isn't
shorter than the direct link; excluded links and measured round trips break that, and then the best
route may keep a relay of a single layer, with cuts beside span ends. The sweep therefore allows a cut
before every layer and needs no such assumption; where several cuts cost the same, a hop runs as far as
its span goes, which is a span's end.

Size: exact while no layer has more than `MAX_HOLDERS` usable offers (measured: about 50 ms for 200
offers of 10 to 30 of 126 layers, 100 ms for 2,000; a few times that where the measured links are far
from any geometry, since the relaxed sweep then says little about the closing link). Beyond that, offers
are taken in the order of their seconds per layer (half trip, fixed cost and queue spread over the span),
and one is kept if at least one of its layers has fewer than `MAX_HOLDERS` kept offers; if that still
leaves more than `MAX_PARTS`, with a smaller number. So every covered layer stays covered, by the
best for it.

A peer may appear twice in a route; its KV then has to hold both sub-spans, which are disjoint, so
they are never more than its claim. The planner leaves it to the peer to refuse.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from random import Random
from typing import Literal

from routing.estimates import Links, Pair, compute_s, pair, ring_s
from routing.spans import Hop, Offer, Route, Span, Speed

NEAR_EQUAL = 0.05  # routes this close are equal for the user; spreading over them keeps clients from herding
MAX_HOLDERS = 40  # per layer; one sweep over 126 layers then takes about 10 ms
MAX_PARTS = 400  # link estimates grow with its square: 160,000 take about 30 ms

Cause = Literal["unserved", "full", "excluded", "unjoined"]


class NoChain(Exception):
    """No usable chain covers the model. `gap` is the first maximal run of layers without a usable offer.

    cause: "unserved" - no offer at all holds a layer of the gap; "full" - all that do lack room for the
    session; "excluded" - those with room are excluded; "unjoined" - every layer has a usable offer, but
    excluded links or kept hops leave no way across, and `gap` are the layers that can't be joined.
    """

    def __init__(self, gap: Span, cause: Cause) -> None:
        self.gap, self.cause = gap, cause
        super().__init__(f"no chain covers layers {gap} ({cause})")


def plan(
    layers: int,
    offers: Sequence[Offer],
    links: Links,
    *,
    need_kv: int,
    kept: Sequence[Hop] = (),
    excluded_peers: Collection[str] = frozenset(),
    excluded_links: Collection[Pair] = frozenset(),
    numerics: str | None = None,
    rng: Random | None = None,
) -> Route:
    """The fastest route over `layers` layers for a session of `need_kv` positions.

    kept: hops that stay exactly as they are in a repair; they need no room and no offer. excluded_links:
    pairs of peers, either way round. numerics: the class to stay in; by default that of the kept hops,
    else the best of all classes that make a chain. Only where no single class does is the chain mixed.
    rng: spreads routes over those within `NEAR_EQUAL` of the best, the better the likelier; None: the
    best itself, ties broken the same way every time.
    Raises NoChain, and ValueError for two offers of one peer or kept hops that overlap.
    """
    task = _Task(layers, tuple(kept), links.with_offers(offers), _normal(excluded_links))
    ordered = sorted(offers, key=lambda offer: offer.peer)
    by_peer = {offer.peer: offer for offer in ordered}
    if len(by_peer) != len(ordered):
        raise ValueError("two offers of one peer")
    usable = [o for o in ordered if o.free_kv_tokens >= need_kv and o.peer not in excluded_peers]
    favour = _favours(by_peer, kept, rng)
    for pools in _pools_by_preference(usable, _class_wanted(numerics, kept, by_peer), bool(kept)):
        found = [ring for pool in pools if (ring := _best_ring(task, pool, by_peer, favour)) is not None]
        if found:
            hops = min(found).hops
            return Route(hops, ring_s(layers, hops, by_peer, task.links))
    raise _no_chain(task, ordered, usable, need_kv)


def route_s(layers: int, route: Route, offers: Iterable[Offer], links: Links) -> float:
    """What a route that was planned earlier is expected to take per decode step now."""
    by_peer = {offer.peer: offer for offer in offers}
    return ring_s(layers, route.hops, by_peer, links.with_offers(by_peer.values()))


# ---------------------------------------------------------------- coverage, for people and placement


def coverage(layers: int, spans: Iterable[Span]) -> tuple[int, ...]:
    """How many of the spans hold each layer."""
    change = [0] * (layers + 1)
    for span in spans:
        change[min(span.start, layers)] += 1
        change[min(span.stop, layers)] -= 1
    counts, running = [], 0
    for step in change[:layers]:
        running += step
        counts.append(running)
    return tuple(counts)


def runs(values: Sequence[int], wanted: Callable[[int], bool]) -> tuple[Span, ...]:
    """The maximal runs of layers whose value is wanted, in order."""
    found: list[Span] = []
    start: int | None = None
    for layer, value in enumerate(values):
        if wanted(value) and start is None:
            start = layer
        elif not wanted(value) and start is not None:
            found.append(Span(start, layer))
            start = None
    return (*found, Span(start, len(values))) if start is not None else tuple(found)


def gaps(layers: int, spans: Iterable[Span]) -> tuple[Span, ...]:
    """The maximal runs of layers that nobody holds."""
    return runs(coverage(layers, spans), lambda count: count == 0)


def weakest(layers: int, spans: Iterable[Span]) -> tuple[Span, int]:
    """The first maximal run of layers that the fewest hold, and how many that is."""
    counts = coverage(layers, spans)
    fewest = min(counts)
    return runs(counts, lambda count: count == fewest)[0], fewest


# ---------------------------------------------------------------- what may be combined


@dataclass(frozen=True, slots=True)
class _Task:
    layers: int
    kept: tuple[Hop, ...]
    links: Links
    excluded_links: frozenset[Pair]

    def open_runs(self) -> tuple[Span, ...]:
        """The layers that no kept hop runs."""
        counts = coverage(self.layers, (hop.span for hop in self.kept))
        if max(counts) > 1 or any(hop.span.stop > self.layers for hop in self.kept):
            raise ValueError("kept hops overlap, or reach beyond the model")
        return runs(counts, lambda count: count == 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """A possible hop: any sub-span of `span`; for a kept hop all of it, as nothing else is there."""

    peer: str
    span: Span
    speed: Speed
    fixed_s: float
    favour: float


@dataclass(frozen=True, order=True, slots=True)
class _Ring:
    cost_s: float  # with favours; equals the estimate when there are none
    hops: tuple[Hop, ...]


_FREE = Speed(0.0, 0.0, 0.0, 0.0, 0.0)


def _normal(links: Iterable[Pair]) -> frozenset[Pair]:
    return frozenset(pair(a, b) for a, b in links)


def _favours(offers: Iterable[str], kept: Iterable[Hop], rng: Random | None) -> dict[str, float]:
    """A factor in [1, 1 + NEAR_EQUAL) on all costs of a peer and on the links towards it.

    With every cost of every route inflated by at most that much, the route that then looks best is
    within NEAR_EQUAL of the true best: cost <= inflated cost <= inflated cost of the best <=
    (1 + NEAR_EQUAL) x its cost.
    """
    peers = sorted({*offers, *(hop.peer for hop in kept)})
    return {peer: 1.0 if rng is None else 1.0 + NEAR_EQUAL * rng.random() for peer in peers}


def _class_wanted(numerics: str | None, kept: Sequence[Hop], offers: Mapping[str, Offer]) -> str | None:
    if numerics is not None:
        return numerics
    classes = {offers[hop.peer].numerics for hop in kept if hop.peer in offers}
    return classes.pop() if len(classes) == 1 else None


def _pools_by_preference(
    usable: Sequence[Offer], wanted: str | None, repairing: bool
) -> Iterator[list[list[Offer]]]:
    """Groups of offers to plan within; the first group in which some pool makes a chain decides."""
    classes: dict[str, list[Offer]] = {}
    for offer in usable:
        classes.setdefault(offer.numerics, []).append(offer)
    if wanted is not None:
        yield [classes.get(wanted, [])]
    if not repairing:
        yield [pool for name, pool in sorted(classes.items()) if name != wanted]
    yield [list(usable)]


def _parts(
    task: _Task, pool: Sequence[Offer], offers: Mapping[str, Offer], favour: Mapping[str, float]
) -> list[_Part]:
    parts: list[_Part] = []
    for hop in task.kept:
        known = offers.get(hop.peer)
        speed, queue_s = (known.speed, known.queue_s) if known is not None else (_FREE, 0.0)
        parts.append(_Part(hop.peer, hop.span, speed, queue_s + speed.step_s, favour[hop.peer]))
    for run in task.open_runs():
        inside = [
            (offer, Span(max(offer.span.start, run.start), min(offer.span.stop, run.stop)))
            for offer in pool
            if offer.span.start < run.stop and run.start < offer.span.stop
        ]
        parts += [
            _Part(o.peer, span, o.speed, o.queue_s + o.speed.step_s, favour[o.peer])
            for o, span in _best_holders(task, inside)
        ]
    return parts


def _best_holders(task: _Task, inside: list[tuple[Offer, Span]]) -> list[tuple[Offer, Span]]:
    """See "Size" above. Keeps the given order."""
    if len(inside) <= MAX_HOLDERS:
        return inside

    def seconds_per_layer(index: int) -> float:
        offer, span = inside[index]
        alone = offer.queue_s + compute_s(offer.speed, span, task.layers) + task.links.half_s(offer.peer)
        return alone / len(span)

    order = sorted(range(len(inside)), key=seconds_per_layer)
    holders = MAX_HOLDERS
    while len(chosen := _cover(task.layers, inside, order, holders)) > MAX_PARTS and holders > 1:
        holders //= 2
    return [inside[index] for index in sorted(chosen)]


def _cover(
    layers: int, inside: Sequence[tuple[Offer, Span]], order: Sequence[int], holders: int
) -> list[int]:
    counts = [0] * layers
    chosen: list[int] = []
    for index in order:
        span = inside[index][1]
        if min(counts[span.start : span.stop]) < holders:
            chosen.append(index)
            for layer in span:
                counts[layer] += 1
    return chosen


# ---------------------------------------------------------------- the search


class _Costs:
    """The parts as arrays: who may run each layer, and what running, entering and closing costs."""

    def __init__(self, task: _Task, parts: Sequence[_Part]) -> None:
        self.layers = task.layers
        self.spans = [part.span for part in parts]
        self.layer_s = [part.speed.layer_s * part.favour for part in parts]
        self.embed_s = [part.speed.embed_s * part.favour for part in parts]
        self.head_s = [part.speed.head_s * part.favour for part in parts]
        self.enter_s = [part.fixed_s * part.favour for part in parts]
        self.close_s = self._link_rows(task, parts)  # [last][first]
        # [from][to], with what entering `to` costs
        self.arc_s = [list(map(add, row, self.enter_s)) for row in self.close_s]
        self.holders: list[list[int]] = [[] for _ in range(task.layers)]
        for index, part in enumerate(parts):
            for layer in part.span:
                self.holders[layer].append(index)

    @staticmethod
    def _link_rows(task: _Task, parts: Sequence[_Part]) -> list[list[float]]:
        rows = task.links.matrix_s([part.peer for part in parts])
        favours = [part.favour for part in parts]
        if any(favour != 1.0 for favour in favours):
            rows = [[s * favour for s, favour in zip(row, favours, strict=True)] for row in rows]
        if task.excluded_links:
            for i, a in enumerate(parts):
                for j, b in enumerate(parts):
                    if pair(a.peer, b.peer) in task.excluded_links:
                        rows[i][j] = math.inf
        return rows

    def run_s(self, part: int, layer: int) -> float:
        seconds = self.layer_s[part]
        if layer == 0:
            seconds += self.embed_s[part]
        if layer == self.layers - 1:
            seconds += self.head_s[part]
        return seconds


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """Both are [layer][part]: the least cost of the layers from this one on."""

    to_go_s: list[list[float]]  # where the part runs this layer
    switch_s: list[list[float]]  # where the part ran the layer before and another takes over


def _sweep(costs: _Costs) -> _Relaxed:
    count, layers = len(costs.spans), costs.layers
    to_go = [[math.inf] * count for _ in range(layers)]
    switch = [[math.inf] * count for _ in range(layers)]
    firsts = costs.holders[0]
    for part in costs.holders[-1]:
        closing = min(costs.close_s[part][first] for first in firsts)
        to_go[-1][part] = costs.run_s(part, layers - 1) + closing
    rows: dict[int, Sequence[float]] = {}
    for layer in range(layers - 2, -1, -1):
        after, ahead = costs.holders[layer + 1], to_go[layer + 1]
        if layer == layers - 2 or after != costs.holders[layer + 2]:
            rows, pick = {}, _picker(after)
        onward = pick(ahead)
        for part in costs.holders[layer]:
            row = rows.get(part)
            if row is None:
                row = rows[part] = pick(costs.arc_s[part])
            switch[layer + 1][part] = least = min(map(add, row, onward))
            to_go[layer][part] = costs.run_s(part, layer) + min(ahead[part], least)
    return _Relaxed(to_go, switch)


def _picker(indices: Sequence[int]) -> Callable[[Sequence[float]], Sequence[float]]:
    if len(indices) == 1:  # itemgetter of one index returns no tuple
        only = indices[0]
        return lambda row: (row[only],)
    return itemgetter(*indices)


_Trail = tuple[int, int, "_Trail | None"]  # (start layer, part, the hop before)


def _best_ring(
    task: _Task, pool: Sequence[Offer], offers: Mapping[str, Offer], favour: Mapping[str, float]
) -> _Ring | None:
    parts = _parts(task, pool, offers, favour)
    if min(coverage(task.layers, (part.span for part in parts))) == 0:
        return None
    costs = _Costs(task, parts)
    relaxed = _sweep(costs)
    bounds = sorted((costs.enter_s[first] + relaxed.to_go_s[0][first], first) for first in costs.holders[0])
    best_s, best = math.inf, None
    for bound_s, first in bounds:
        if bound_s >= best_s:
            break
        best_s, best = _search_from(first, costs, relaxed, best_s, best)
    if best is None:
        return None
    return _Ring(best_s, _hops(best, parts, task.layers))


def _search_from(
    first: int, costs: _Costs, relaxed: _Relaxed, best_s: float, best: _Trail | None
) -> tuple[float, _Trail | None]:
    """A* over (start layer, part); returns the better of the best so far and the best ring from `first`."""
    enter_s = costs.enter_s[first]
    heap = [(enter_s + relaxed.to_go_s[0][first], 0, first, enter_s)]
    trails: dict[tuple[int, int], tuple[float, _Trail]] = {(0, first): (enter_s, (0, first, None))}
    while heap and heap[0][0] < best_s:
        _, start, part, spent_s = heapq.heappop(heap)
        known_s, trail = trails[start, part]
        if spent_s > known_s:
            continue  # reached more cheaply since
        for cut in range(start + 1, costs.spans[part].stop + 1):
            spent_s += costs.run_s(part, cut - 1)
            if cut == costs.layers:
                if spent_s + costs.close_s[part][first] < best_s:
                    best_s, best = spent_s + costs.close_s[part][first], trail
            elif spent_s + relaxed.switch_s[cut][part] < best_s:
                to_go, arc = relaxed.to_go_s[cut], costs.arc_s[part]
                for after in costs.holders[cut]:
                    there_s = spent_s + arc[after]
                    bound_s = there_s + to_go[after]
                    seen = trails.get((cut, after))
                    if bound_s < best_s and (seen is None or there_s < seen[0]):
                        trails[cut, after] = (there_s, (cut, after, trail))
                        heapq.heappush(heap, (bound_s, cut, after, there_s))
    return best_s, best


def _hops(trail: _Trail, parts: Sequence[_Part], layers: int) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    stop, before = layers, trail
    while True:
        start, part, earlier = before
        hops.append(Hop(Span(start, stop), parts[part].peer))
        if earlier is None:
            return tuple(reversed(hops))
        stop, before = start, earlier


# ---------------------------------------------------------------- why there is none


def _no_chain(task: _Task, offers: Sequence[Offer], usable: Sequence[Offer], need_kv: int) -> NoChain:
    kept = [hop.span for hop in task.kept]
    missing = gaps(task.layers, [*kept, *(offer.span for offer in usable)])
    if not missing:
        return NoChain(_unjoined(task, usable), "unjoined")
    gap = missing[0]
    there = [o for o in offers if o.span.start < gap.stop and gap.start < o.span.stop]
    served = coverage(task.layers, (offer.span for offer in there))
    if any(served[layer] == 0 for layer in gap):
        return NoChain(gap, "unserved")
    return NoChain(gap, "excluded" if any(o.free_kv_tokens >= need_kv for o in there) else "full")


def _unjoined(task: _Task, usable: Sequence[Offer]) -> Span:
    """The layers between the longest chain from the front and that from the back, and their neighbours.

    The whole model, where only the link that closes the ring is missing.
    """
    favour = dict.fromkeys([*(offer.peer for offer in usable), *(hop.peer for hop in task.kept)], 1.0)
    costs = _Costs(task, _parts(task, usable, {}, favour))
    front = _reach(costs.holders, lambda before, after: costs.arc_s[before][after] < math.inf)
    back = task.layers - _reach(
        costs.holders[::-1], lambda after, before: costs.arc_s[before][after] < math.inf
    )
    return Span(max(0, min(front, back) - 1), min(task.layers, max(front, back) + 1))


def _reach(holders: Sequence[Sequence[int]], joined: Callable[[int, int], bool]) -> int:
    """How many layers a chain can run before nobody can take over."""
    running = set(holders[0])
    for count, here in enumerate(holders[1:], start=1):
        running = {part for part in here if part in running or any(joined(p, part) for p in running)}
        if not running:
            return count
    return len(holders)
