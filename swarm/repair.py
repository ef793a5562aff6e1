"""One repair of a generation: what is counted over the whole of it, and when it was enough.

It begins with the first trouble and ends with the next new token, however many epochs that takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from routing.spans import Hop
from swarm.effects import Repaired, RepairStarted
from swarm.errors import NoRoute, SwarmError
from swarm.identity import PeerId
from swarm.session_config import SessionConfig

MOST_SLACK = 8.0  # if the only peer for a span is merely slow, a later try of a repair waits longer
REFUSALS_IN_A_REPAIR = 3  # then everything is closed, or two clients wait for each other's room for ever
QUICK_ATTEMPTS = 3  # epochs in one repair that start at once; the later ones wait
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0  # doubling; long enough for a peer to restart


class Chance(Protocol):
    """The part of random.Random that is used."""

    def random(self) -> float: ...


def pause_s(attempts: int, rng: Chance) -> float:
    """Before the next epoch. Jittered and doubling, so that clients in trouble don't march in step."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(0, attempts - 1), 10))
    return longest * (0.5 + rng.random() / 2)


@dataclass
class Repair:
    """at_token: ids known at its beginning. slack: of deadlines; grows when slowness was mistaken for death."""

    reason: str
    since: float
    hops_before: tuple[Hop, ...]
    at_token: int
    patient_since: float
    lost: list[PeerId] = field(default_factory=list)
    attempts: int = 0
    slack: float = 1.0
    last_error: SwarmError | None = None
    _refusals: int = 0
    _no_route_since: float | None = None

    @property
    def is_hasty(self) -> bool:
        """Whether the next epoch may start at once."""
        return self.attempts <= QUICK_ATTEMPTS

    def lose(self, peer: PeerId) -> None:
        if peer not in self.lost:
            self.lost.append(peer)

    def wait_longer(self) -> None:
        """Somebody was slow, and may not be dead."""
        self.slack = min(MOST_SLACK, 2 * self.slack)

    def refused(self) -> bool:
        """Count a refusal; whether everything is to be closed before the next try."""
        self._refusals += 1
        return self._refusals % REFUSALS_IN_A_REPAIR == 0

    def no_route(self, error: NoRoute, now: float, config: SessionConfig) -> bool:
        """There is no chain at present; whether that has been so for too long."""
        self.last_error = error
        if self._no_route_since is None:
            self._no_route_since = now
        return now - self._no_route_since >= config.no_route_patience_s

    def begin_anew(self, now: float) -> None:
        """It had succeeded, but nobody reads."""
        self.attempts, self.patient_since = 0, now

    def failed(self, error: SwarmError, now: float, config: SessionConfig) -> bool:
        """Count one more epoch that came to nothing; whether that was one too many."""
        self.attempts += 1
        self.last_error = error
        self._no_route_since = None
        late = now - self.patient_since >= config.patience_s
        return self.attempts >= config.max_attempts or (late and self.attempts >= config.min_attempts)

    def started(self, hops: tuple[Hop, ...]) -> RepairStarted:
        return RepairStarted(self.reason, tuple(self.lost), self.hops_before, hops, self.at_token)

    def ended(self, hops: tuple[Hop, ...], now: float) -> Repaired:
        told = self.reason, tuple(self.lost), self.hops_before, hops, self.at_token
        return Repaired(*told, now - self.since, self.attempts)
