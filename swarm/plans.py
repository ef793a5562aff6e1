"""What a session asks of a planner, what it gets, and how long the steps of its chains took so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from routing.spans import Hop, Route
from swarm.identity import PeerId

SAMPLES_FOR_P99 = 20  # before that the plan's estimate counts (protocol.md)
SAMPLES_KEPT = 100  # a p99 needs about as many; older ones describe another load


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """kept: hops that hold this session's KV; a plan that uses them recomputes nothing there.
    fresh: nothing is held and no chain ran before. positions: that every hop has to hold."""

    kept: tuple[Hop, ...]
    excluded_peers: frozenset[PeerId]
    excluded_links: frozenset[tuple[PeerId, PeerId]]
    fresh: bool
    positions: int


@dataclass(frozen=True, slots=True)
class Plan:
    """descriptors: the signed bytes of at least the route's peers. step_s, chunk_s: expected seconds,
    queues included, of a decode step (None: what the route says) and of a whole prefill chunk on the
    whole chain. open_s: of an answer to Open, connecting included."""

    route: Route
    descriptors: Mapping[PeerId, bytes]
    step_s: float | None = None
    chunk_s: float = 1.0
    open_s: float = 0.5


Planner = Callable[[PlanRequest], Plan]


class Timings:
    """How long each kind of step took lately; may be shared by a client's sessions."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def saw(self, kind: str, seconds: float) -> None:
        self._seen.setdefault(kind, deque(maxlen=SAMPLES_KEPT)).append(seconds)

    def p99(self, kind: str, estimate: float) -> float:
        """In seconds; the estimate until enough were seen."""
        seen = self._seen.get(kind, ())
        if len(seen) < SAMPLES_FOR_P99:
            return estimate
        return sorted(seen)[min(len(seen) - 1, int(len(seen) * 0.99))]
