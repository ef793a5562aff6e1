"""Coverage and capacity -> which span to claim, and whether moving is worth it.

Invariant: a choice depends on the arguments only, fits, and no other window that fits leaves the swarm
less of its weakest layers. Nobody coordinates, so the rules are such that peers who know the same
claims don't all do the same thing, and those who know different ones mend it without going around in
circles:

1. A starting peer waits a random delay, takes `choose_span` over all claims it knows, and advertises its
   claim as loading.
2. One spreading time later everybody who claimed at about that time knows of it, and it of them. It
   asks `recheck`, to which only earlier claims count, by (stamp, peer id): an order that all agree on
   however their clocks differ. So of two who took the same place at once exactly one yields. Claims
   that stand anyway, because they serve or have been known for a spreading time (*settled*), always count.
   Whoever yields has a new, later claim, and asks again one spreading time after that.
3. When `recheck` gives back the claim, the peer loads it. It moves later only if `should_move` says so.

What counts, in this order: that no layer is without a peer, that none has only one (`REDUNDANCY`),
throughput where it is least, and the use of one's own memory. Layers count by weight, in whole
ordinary layers rounded up: the layers at the model's ends carry embedding and head and can only be
held by who gives up many others, so they are taken first, while there still is somebody who can
(as the large items come first when a suitcase is packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from random import Random

from routing.planner import coverage
from routing.spans import Span

REDUNDANCY = 2  # peers per layer that survive the loss of any one; beyond it only throughput counts
WORTH_MOVING = (
    0.25  # share of the own weight that a move must relieve: loading costs minutes, and others see it late
)
WORTH_SPEED = 1.25  # or how much faster the slowest layer must get, all layers being redundant
SPEED_STEPS = 8  # throughput is compared in eighths of the own, so that small changes change nothing


class NothingFits(Exception):
    """Not one layer fits. Nothing was claimed; the numbers are the caller's."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of another peer's span of the same model, draining peers left out.

    stamp: the owner's own number for when it made this claim (its descriptor's seq, which is unix ms).
    settled: it serves, or this same span of it has been known here for at least one spreading time.
    tokens_per_s: of one session over its span, None where it isn't measured yet.
    """

    peer: str
    span: Span
    stamp: int = 0
    settled: bool = True
    tokens_per_s: float | None = None

    @property
    def rank(self) -> tuple[int, str]:
        return self.stamp, self.peer


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a peer can take on, in its own words.

    fits: whether the span fits into memory; a part of what fits must fit too. weight: bytes of a span, ends
    included, above 0 (by default all layers weigh the same). tokens_per_s: as in `Claim`, of this peer.
    """

    fits: Callable[[Span], bool]
    weight: Callable[[Span], float] = len
    tokens_per_s: float | None = None


def windows(layers: int, fits: Callable[[Span], bool]) -> tuple[Span, ...]:
    """The spans that fit and can't be extended at either end, by start. Calls `fits` 2 x layers times."""
    found: list[Span] = []
    stop = 0
    for start in range(layers):
        stop = max(stop, start)
        before = stop
        while stop < layers and fits(Span(start, stop + 1)):
            stop += 1
        if stop > before:  # else it lies inside the window before it
            found.append(Span(start, stop))
    return tuple(found)


def choose_span(layers: int, others: Sequence[Claim], capacity: Capacity, rng: Random | None = None) -> Span:
    """The window that relieves the weakest layers most. Raises NothingFits.

    rng picks among windows that are equally good; None takes the first of them.
    """
    candidates = windows(layers, capacity.fits)
    if not candidates:
        raise NothingFits
    score = _scorer(layers, others, capacity)
    scores = [score(span) for span in candidates]
    best = max(scores)
    equal = [span for span, its in zip(candidates, scores, strict=True) if its == best]
    return equal[0] if rng is None else rng.choice(equal)


def recheck(
    layers: int, mine: Claim, others: Sequence[Claim], capacity: Capacity, rng: Random | None = None
) -> Span:
    """Ask one spreading time after claiming: the same span, now to be loaded, or another to claim.

    An unsettled claim of a later rank doesn't count: it is the one to yield. The span is kept unless
    another relieves the weak layers by more.
    """
    standing = [c for c in others if c.peer != mine.peer and (c.settled or c.rank < mine.rank)]
    better = choose_span(layers, standing, capacity, rng)
    score = _scorer(layers, standing, capacity)
    return better if score(better).need > score(mine.span).need else mine.span


def should_move(
    layers: int, mine: Claim, others: Sequence[Claim], capacity: Capacity, rng: Random | None = None
) -> Span | None:
    """Another span if serving it instead is clearly better and no layer is left without a peer; else None.

    While the peer loads, it serves neither span, so each layer of the old one must be held by a settled peer
    of a lower id. Lower, so that all may decide at the same moment: of those who then leave a layer, the
    one of the lowest id relies on somebody who stays. A mover claims as a newcomer does, `recheck` included.
    """
    others = [claim for claim in others if claim.peer != mine.peer]
    relied = coverage(layers, (claim.span for claim in others if claim.settled and claim.peer < mine.peer))
    if min(relied[mine.span.start : mine.span.stop]) == 0:
        return None
    better = choose_span(layers, others, capacity, rng)
    score = _scorer(layers, others, capacity)
    now, then = score(mine.span), score(better)
    least = WORTH_MOVING * sum(_weights(layers, capacity.weight)[mine.span.start : mine.span.stop])
    if then.need > now.need and (now.relief_to(then) >= least or then.bare > now.bare):
        return better
    if then.need == now.need and then.slowest >= now.slowest * WORTH_SPEED and then.slowest > now.slowest:
        return better
    return None


# ---------------------------------------------------------------- how good a window is


@dataclass(frozen=True, order=True, slots=True)
class _Score:
    """Larger is better, the first field first."""

    bare: int  # minus the weight of the layers that nobody would hold
    thin: int  # minus the weight of those that fewer than REDUNDANCY would
    speeds: tuple[int, ...]  # throughput of each layer in steps, as often as its weight, the least first
    weight: int  # of the window
    joints: int  # ends of the window that meet an end of the model or of another span

    @property
    def need(self) -> tuple[int, int]:
        return self.bare, self.thin

    @property
    def slowest(self) -> int:
        return self.speeds[0]

    def relief_to(self, other: _Score) -> int:
        return other.bare + other.thin - self.bare - self.thin


def _scorer(layers: int, others: Sequence[Claim], capacity: Capacity) -> Callable[[Span], _Score]:
    weights = _weights(layers, capacity.weight)
    counts = coverage(layers, (claim.span for claim in others))
    own = capacity.tokens_per_s or 1.0
    steps = _speed_steps(layers, others, own)
    ends = {0, layers, *(claim.span.start for claim in others), *(claim.span.stop for claim in others)}

    def score(span: Span) -> _Score:
        held = [count + (layer in span) for layer, count in enumerate(counts)]
        speeds = [step + SPEED_STEPS * (layer in span) for layer, step in enumerate(steps)]
        return _Score(
            bare=-sum(w for w, count in zip(weights, held, strict=True) if count == 0),
            thin=-sum(w for w, count in zip(weights, held, strict=True) if count < REDUNDANCY),
            speeds=tuple(sorted(chain.from_iterable(map(repeat, speeds, weights)))),
            weight=sum(weights[span.start : span.stop]),
            joints=(span.start in ends) + (span.stop in ends),
        )

    return score


def _weights(layers: int, weight: Callable[[Span], float]) -> list[int]:
    """Per layer, in ordinary (the lightest) layers, rounded up."""
    bytes_each = [weight(Span(layer, layer + 1)) for layer in range(layers)]
    ordinary = min(bytes_each)
    return [math.ceil(each / ordinary - 0.01) for each in bytes_each]  # 1% more is the same layer


def _speed_steps(layers: int, others: Sequence[Claim], own: float) -> list[int]:
    """Throughput over each layer in steps of the own; a peer never measured counts as much as this one."""
    total = [0.0] * layers
    for claim in others:
        for layer in range(claim.span.start, min(claim.span.stop, layers)):
            total[layer] += claim.tokens_per_s or own
    return [round(SPEED_STEPS * tokens_per_s / own) for tokens_per_s in total]
