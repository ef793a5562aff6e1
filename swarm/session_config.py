"""What one generation is to be, and how patiently it is brought about."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.messages import Sampling


@dataclass(frozen=True)
class SessionConfig:
    """What is generated, and how patiently.

    session: 16 random bytes. prompt: at least one id. limit: generation ends before this position.
    reserve: KV positions that every hop holds, at least `limit`.
    credit_window: how far the swarm may run ahead of the reader. 64 is about a second at 60 tokens/s,
    far above a round trip, and all that a client that vanished can cost.
    renew_every_s: a sixth of the lease, so that a lost one doesn't matter.
    chunk: positions of a prefill step, for the estimate of how long a replay takes.
    vocab: ids of the model are lower; None: not known.
    min_deadline_s, deadline_factor: overdue = max(min, factor x p99).
    where_patience_s: how long a living peer may take to answer the second `Where`.
    exclusion_s: how long a failed peer or pair stays out of plans. refused_s: the same for a peer that
    refused without saying for how long.
    patience_s, min_attempts, max_attempts: a repair that made no token is given up after so long and
    at least so many epochs, or after so many. no_route_patience_s: how long to wait for a peer that
    would fill a gap which opened during the generation.
    """

    session: bytes
    prompt: tuple[int, ...]
    limit: int
    fingerprint: bytes
    reserve: int
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    credit_window: int = 64
    renew_every_s: float = 5.0
    chunk: int = 256
    vocab: int | None = None
    min_deadline_s: float = 2.0
    deadline_factor: float = 4.0
    where_patience_s: float = 2.0
    exclusion_s: float = 60.0
    refused_s: float = 5.0
    patience_s: float = 60.0
    min_attempts: int = 6
    max_attempts: int = 40
    no_route_patience_s: float = 30.0
