"""How news spreads among very many peers: a model of the registry's gossip, one number per peer.

A peer that has learnt something offers it to all its neighbours but those who offered it themselves; whoever doesn't
know it asks the first one who offers, and the next one when no answer comes. Every message takes a while and may
be lost. So the model has the rules of `swarm/asks.py` and `Registry._spread`, and none of the bytes; digests, which
repair what was missed, are left out, so it is slower than life. `benchmarks/registry.py` shows it beside full cores.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence

from benchmarks.full_cores import DELAY_S, TURN_S, random_links
from swarm.asks import ASK_TIMEOUT_S, MAX_OTHERS, MAX_TRIES
from swarm.neighbour import BATCH_S

Graph = list[list[int]]


def random_graph(peers: int, rng: random.Random) -> Graph:
    """Everybody's neighbours, drawn as those of the full cores are."""
    graph: Graph = [[] for _ in range(peers)]
    for a, b in random_links(peers, rng):
        graph[a].append(b)
        graph[b].append(a)
    return graph


def share_s(known_at: Sequence[float], share: float = 0.99) -> float:
    """Seconds until so many know. known_at: when each one did."""
    return sorted(known_at)[math.ceil(share * len(known_at)) - 1]


class Epidemic:
    """One piece of news. renewal: a heartbeat like the one before, which waits for company. mute: somebody who tells
    nobody."""

    def __init__(
        self, graph: Graph, rng: random.Random, *, loss: float, renewal: bool = False, mute: int | None = None
    ) -> None:
        self._graph, self._rng, self._loss = graph, rng, loss
        self._wait_s, self._mute = BATCH_S if renewal else 0.0, mute
        self.known_at = [math.inf] * len(graph)
        self.asked_at = [math.inf] * len(graph)  # when each one first asked for it
        self._asked: list[int | None] = [None] * len(graph)  # whom each one asks now
        self._others: list[list[int]] = [[] for _ in graph]
        self._tries = [MAX_TRIES] * len(graph)
        self._order = itertools.count()
        self._queue: list[tuple[float, int, str, int, int]] = []

    def spread(self, source: int) -> list[float]:
        """Seconds until each one knows; infinite for whoever only a digest would tell."""
        self._learn(source, 0.0, ())
        while self._queue:
            now, _, what, here, other = heapq.heappop(self._queue)
            if what == "offer":
                self._offered(here, other, now)
            elif what == "ask":
                self._send(now, "delta", other, here)
            elif what == "delta":
                if self.known_at[here] == math.inf:
                    self._learn(here, now, {other, *self._others[here]})
            elif self._asked[here] == other and self.known_at[here] == math.inf:
                self._ask_next(here, now)
        return self.known_at

    def _learn(self, here: int, now: float, told_by: set[int] | tuple[()]) -> None:
        self.known_at[here] = now
        if here == self._mute:
            return
        for other in self._graph[here]:
            if other not in told_by:
                self._send(now + self._rng.uniform(0.0, self._wait_s), "offer", other, here)

    def _offered(self, here: int, by: int, now: float) -> None:
        if self.known_at[here] < math.inf:
            return
        if self._asked[here] is None:
            self._ask(here, by, now)
        elif by not in self._others[here] and len(self._others[here]) < MAX_OTHERS:
            self._others[here].append(by)

    def _ask(self, here: int, other: int, now: float) -> None:
        self._asked[here] = other
        self.asked_at[here] = min(self.asked_at[here], now)
        self._send(now, "ask", other, here)
        heapq.heappush(self._queue, (now + ASK_TIMEOUT_S, next(self._order), "no answer", here, other))

    def _ask_next(self, here: int, now: float) -> None:
        asked = self._asked[here]
        assert asked is not None
        self._tries[here] -= 1
        if self._tries[here] > 0:
            turn = [*self._others[here], asked]
            self._others[here] = turn[1:]
            self._ask(here, turn[0], now)
        else:
            self._asked[here], self._others[here] = None, []

    def _send(self, now: float, what: str, to: int, by: int) -> None:
        if self._rng.random() >= self._loss:
            at = now + self._rng.uniform(*DELAY_S) + TURN_S / 2
            heapq.heappush(self._queue, (at, next(self._order), what, to, by))
