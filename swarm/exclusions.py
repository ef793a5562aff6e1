"""CORE: which peers and pairs of peers a session keeps out of its plans, and until when.

A peer that failed and a pair that failed twice stay out for a while; a peer that is full or leaves is avoided for as
long as it asked. Everything expires: an exclusion may cost a better chain, never the answer (protocol.md, "Deadlines
and blame").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.identity import PeerId

Pair = tuple[PeerId, PeerId]


@dataclass
class Exclusions:
    """exclusion_s: how long a failure counts. The tables hold when each entry expires or, of a first fault that has
    no consequence yet, when it was."""

    exclusion_s: float
    failed: dict[PeerId, float] = field(default_factory=dict)
    avoided: dict[PeerId, float] = field(default_factory=dict)
    links: dict[Pair, float] = field(default_factory=dict)
    link_faults: dict[Pair, float] = field(default_factory=dict)
    stream_faults: dict[PeerId, float] = field(default_factory=dict)

    def peer_failed(self, peer: PeerId, now: float) -> None:
        self.failed[peer] = now + self.exclusion_s

    def avoid(self, peer: PeerId, pause_s: float, now: float) -> None:
        """It refused, or leaves: nobody's fault."""
        self.avoided[peer] = now + pause_s

    def link_failed(self, a: PeerId, b: PeerId, now: float) -> None:
        """What `a` sends doesn't reach `b`. The second time within `exclusion_s` the pair is kept out."""
        if self._lately(self.link_faults.get((a, b)), now):
            self.links[a, b] = now + self.exclusion_s
        self.link_faults[a, b] = now

    def stream_failed(self, peer: PeerId, now: float) -> bool:
        """Our stream to a living peer failed; whether that is the second time within `exclusion_s`."""
        again = self._lately(self.stream_faults.get(peer), now)
        self.stream_faults[peer] = now
        return again

    def _lately(self, before: float | None, now: float) -> bool:
        return before is not None and now - before < self.exclusion_s

    def forget_expired(self, now: float) -> None:
        for table in (self.failed, self.avoided):
            for peer in [peer for peer, until in table.items() if until <= now]:
                del table[peer]
        for pair in [pair for pair, until in self.links.items() if until <= now]:
            del self.links[pair]

    def bad_peers(self) -> frozenset[PeerId]:
        return frozenset(self.failed) | frozenset(self.avoided)

    def bad_links(self) -> frozenset[Pair]:
        return frozenset(self.links)
