"""What a session asks its driver to do, and what it tells the reader: values only.

`Send` and `Release` are for the hops, the rest for whoever reads the text. A driver carries them out in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from routing.spans import Hop
from swarm.errors import SwarmError
from swarm.identity import PeerId
from swarm.messages import Likelihoods, Message, Spent


class HopKey(NamedTuple):
    """One hop's state at one peer, and the stream to it."""

    peer: PeerId
    start: int


@dataclass(frozen=True, slots=True)
class Send:
    key: HopKey
    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """The stream to this hop may be closed after what was sent. A later `Send` opens a new one."""

    key: HopKey


@dataclass(frozen=True, slots=True)
class Grew:
    """New ids at `first_position`. finish: they are the last. spent: on their round, as the hops say."""

    ids: tuple[int, ...]
    first_position: int
    finish: str | None
    spent: Spent
    likelihoods: tuple[Likelihoods, ...] = ()  # one for each id, if they were asked for


@dataclass(frozen=True, slots=True)
class _RepairTold:
    """at_token: ids known when the trouble began, the prompt's included."""

    reason: str
    lost: tuple[PeerId, ...]
    hops_before: tuple[Hop, ...]
    hops_after: tuple[Hop, ...]
    at_token: int


@dataclass(frozen=True, slots=True)
class RepairStarted(_RepairTold):
    """A new chain is planned."""


@dataclass(frozen=True, slots=True)
class Repaired(_RepairTold):
    """The first new token after trouble. stalled_s: since it was owed, so what nobody noticed for a
    while counts too. epochs: tries."""

    stalled_s: float
    epochs: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: SwarmError


@dataclass(frozen=True, slots=True)
class Ended:
    """The last effect. finish: "stop", "length", "cancelled" or "failed"."""

    finish: str


Effect = Send | Release | Grew | RepairStarted | Repaired | Failed | Ended
