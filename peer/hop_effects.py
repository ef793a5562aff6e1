"""What a hop asks of those around it: values only. A server carries them out in their order.

`ToClient` goes to the client, `EnsureLink`, `SendStep` and `SendTokens` to the next hop, `Compute` to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from peer.journal import Rows
from routing.spans import Span
from swarm.messages import HopRef, Message, Sampling, Spent


@dataclass(frozen=True, slots=True)
class ToClient:
    message: Message


@dataclass(frozen=True, slots=True)
class EnsureLink:
    """Open this epoch's stream to `to` (StepsLink; TokensLink from the last hop), then say
    `link_up` or `link_down`. `to` may be another hop state on this very peer."""

    epoch: int
    to: HopRef


@dataclass(frozen=True, slots=True)
class SendStep:
    """round None: replay. payload: hidden rows [n, width]."""

    epoch: int
    to: HopRef
    round: int | None
    position: int
    sample: bool
    payload: Rows
    spent: Spent


@dataclass(frozen=True, slots=True)
class SendTokens:
    epoch: int
    to: HopRef
    first_position: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleAt:
    """position: of the id to be drawn. ids: all ids before it."""

    position: int
    sampling: Sampling
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Cut the session's KV to `position`, then run these positions: `ids` on the first hop, else
    `payload`. job: given back with the answer. sample: draw an id after the last position."""

    epoch: int
    job: int
    span: Span
    position: int
    ids: tuple[int, ...] | None
    payload: Rows | None
    sample: SampleAt | None


@dataclass(frozen=True, slots=True)
class Free:
    """This hop is finished: the ledger is told already, drop it and its streams."""


Effect = ToClient | EnsureLink | SendStep | SendTokens | Compute | Free
