"""Measured and advertised figures -> seconds for a hop, a link, a step.

Invariant: every estimate is finite, not negative, and a function of its arguments only. What peers
advertise comes in as `Speed` and `queue_s`, what was measured on the network as `Links`, and what a
client saw with its own eyes corrects both through `Corrections`. `planner` minimises exactly what
`ring_s` adds up, so that a planned and an explained step time can't differ.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from routing.spans import Hop, Offer, Span, Speed

Pair = tuple[str, str]

UNKNOWN_HALF_S = 0.025  # half a round trip between two homes on one continent; used until one is measured
EWMA_WEIGHT = 0.2  # about the last ten observations count; one stall in between moves a peer by half
MAX_RATIO = 8.0  # one observation counts as at most 8 times too slow or too fast; so does their mean
MAX_CORRECTED = 1024  # peers remembered by one client; the one longest unseen goes first


def pair(a: str, b: str) -> Pair:
    """The name of the link between two peers, whichever way round they are given."""
    return (a, b) if a <= b else (b, a)


def compute_s(speed: Speed, span: Span, layers: int) -> float:
    """Seconds of one decode step (one token of one session) on `span` of a model of `layers` layers."""
    return speed.step_s + len(span) * speed.layer_s + _ends_s(speed, span, layers)


def prefill_s(speed: Speed, span: Span, layers: int, tokens: int) -> float:
    """Seconds until one hop has run a prompt (or a chunk of one) of `tokens` positions.

    Only the last position goes through the head, and embedding is a look-up: both count once.
    """
    return speed.step_s + tokens * len(span) * speed.prefill_layer_s + _ends_s(speed, span, layers)


def _ends_s(speed: Speed, span: Span, layers: int) -> float:
    return (speed.embed_s if 0 in span else 0.0) + (speed.head_s if layers - 1 in span else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Seconds one way between two peers, from whatever was measured.

    round_trip_s: measured round trips between two peers, keyed by `pair(a, b)`.
    client_s: half the round trip from here (the client) to a peer.

    A pair never measured is estimated from the client's two half trips x and y as sqrt(x² + y²).
    The triangle inequality bounds the distance by |x - y| (both lie in the same direction) and
    x + y (in opposite ones); by the law of cosines its square is x² + y² - 2xy·cos(angle), and the
    mean of that over unrelated directions is x² + y². It is a metric (a detour over a third
    peer never looks shorter), and pessimistic where all peers share one far LAN, which the first
    measured round trip corrects. A half trip never measured is the median of those that were.
    Network coordinates (Vivaldi) will come behind these same methods.
    """

    round_trip_s: Mapping[Pair, float] = field(default_factory=dict)
    client_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measured(cls, round_trip_s: Mapping[Pair, float], client_s: Mapping[str, float]) -> Links:
        """Accepts pairs in either order; of two figures for one link the smaller stands (queues only add)."""
        trips: dict[Pair, float] = {}
        for (a, b), seconds in round_trip_s.items():
            trips[pair(a, b)] = min(seconds, trips.get(pair(a, b), math.inf))
        return cls(round_trip_s=trips, client_s=dict(client_s))

    def with_offers(self, offers: Iterable[Offer]) -> Links:
        """Also use the `link_s` of offers, for peers whose half trip isn't known here yet."""
        halves = {offer.peer: offer.link_s for offer in offers if offer.link_s is not None}
        return Links(round_trip_s=self.round_trip_s, client_s={**halves, **self.client_s})

    def half_s(self, peer: str) -> float:
        """Seconds one way between the client and a peer."""
        known = self.client_s.get(peer)
        return self._usual_half_s() if known is None else known

    def between_s(self, a: str, b: str) -> float:
        """Seconds one way between two peers; 0 from a peer to itself."""
        return self.matrix_s([a, b])[0][1]

    def matrix_s(self, peers: Sequence[str]) -> list[list[float]]:
        """`between_s` for all pairs at once: [from][to], in the order given; a peer may appear twice."""
        usual = self._usual_half_s()
        halves = [self.client_s.get(peer, usual) for peer in peers]
        rows = [[math.hypot(x, y) for y in halves] for x in halves]
        places: dict[str, list[int]] = {}
        for index, peer in enumerate(peers):
            places.setdefault(peer, []).append(index)
        for same in places.values():
            for i in same:
                for j in same:
                    rows[i][j] = 0.0
        for a, b, seconds in self._trips_among(places):
            for i in places[a]:
                for j in places[b]:
                    rows[i][j] = rows[j][i] = seconds / 2
        return rows

    def _trips_among(self, peers: Mapping[str, object]) -> list[tuple[str, str, float]]:
        if len(peers) * len(peers) < len(self.round_trip_s):  # look up the few pairs asked for
            asked = ((a, b) for a in peers for b in peers if a < b and (a, b) in self.round_trip_s)
            return [(a, b, self.round_trip_s[a, b]) for a, b in asked]
        trips = self.round_trip_s.items()
        return [(a, b, seconds) for (a, b), seconds in trips if a != b and a in peers and b in peers]

    def _usual_half_s(self) -> float:
        return statistics.median(self.client_s.values()) if self.client_s else UNKNOWN_HALF_S


def ring_s(layers: int, hops: Sequence[Hop], offers: Mapping[str, Offer], links: Links) -> float:
    """Expected seconds per decode step: compute and queue of every hop, and the links around the ring.

    The link from the last hop back to the first is one of them (the client is not in the ring).
    A hop whose peer makes no offer any more counts with its links only.
    """
    rows = links.matrix_s([hop.peer for hop in hops])
    total = sum(row[(index + 1) % len(hops)] for index, row in enumerate(rows))
    for hop in hops:
        offer = offers.get(hop.peer)
        if offer is not None:
            total += offer.queue_s + compute_s(offer.speed, hop.span, layers)
    return total


def first_token_s(
    layers: int, hops: Sequence[Hop], offers: Mapping[str, Offer], links: Links, tokens: int
) -> float:
    """Expected seconds from sending `tokens` ids to receiving the first token, on an open chain."""
    rows = links.matrix_s([hop.peer for hop in hops])
    total = links.half_s(hops[0].peer) + links.half_s(hops[-1].peer)
    total += sum(rows[index][index + 1] for index in range(len(hops) - 1))
    for hop in hops:
        offer = offers.get(hop.peer)
        if offer is not None:
            total += offer.queue_s + prefill_s(offer.speed, hop.span, layers, tokens)
    return total


class Corrections:
    """How much slower (above 1) or faster each peer is than it says, as seen by one client.

    An exponentially weighted mean of log(observed / expected), so that twice and half as fast weigh
    the same; observations and mean are bounded by `MAX_RATIO`, so that neither one stall nor a liar
    can move a peer out of reach. A corrected peer that is avoided is never seen again, so `relax`
    lets old judgements fade.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}  # in order of last observation

    def observe(self, peer: str, expected_s: float, observed_s: float) -> None:
        """Count one step (or the mean of several). Figures that aren't above 0 say nothing: ignored."""
        if not (0 < expected_s < math.inf and 0 < observed_s < math.inf):
            return
        bound = math.log(MAX_RATIO)
        seen = max(-bound, min(bound, math.log(observed_s) - math.log(expected_s)))
        before = self._logs.pop(peer, 0.0)
        self._logs[peer] = before + EWMA_WEIGHT * (seen - before)
        if len(self._logs) > MAX_CORRECTED:
            del self._logs[next(iter(self._logs))]

    def ratio(self, peer: str) -> float:
        """1.0 for a peer that keeps its word or was never seen."""
        return math.exp(self._logs.get(peer, 0.0))

    def relax(self, share: float = 0.02) -> None:
        """Forget that share of every judgement. Meant to be called once per plan or per minute."""
        for peer in self._logs:
            self._logs[peer] *= 1 - share

    def apply(self, offer: Offer) -> Offer:
        """The same offer with its compute and queue as this client expects to see them."""
        ratio = self.ratio(offer.peer)
        if ratio == 1.0:
            return offer
        speed = Speed(*(getattr(offer.speed, f.name) * ratio for f in dataclasses.fields(Speed)))
        return dataclasses.replace(offer, speed=speed, queue_s=offer.queue_s * ratio)
