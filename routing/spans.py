"""Spans, offers, hops and routes: the frozen values that everything else speaks.

Invariant: a `Span` is never empty or negative, and the hops of a `Route` join without gap or
overlap and cover every layer of the model exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Consecutive layers `[start, stop)`, numbered from 0. Raises ValueError when empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got {self.start}:{self.stop}")

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `A:B` as `[A, B)`, the way `--layers` is typed. Raises ValueError."""
        start, colon, stop = text.partition(":")
        if not colon or not start.strip().isdecimal() or not stop.strip().isdecimal():
            raise ValueError(f"layers are written A:B, such as 0:12 for the first twelve, got {text!r}")
        return cls(int(start), int(stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def __str__(self) -> str:
        """For people, both ends included: `12-19`, or `7` for a single layer."""
        return str(self.start) if len(self) == 1 else f"{self.start}-{self.stop - 1}"


@dataclass(frozen=True, slots=True)
class Speed:
    """What a peer measured of its own engine. All in seconds; the sources are its trial steps.

    A decode step (one token of one session) over n layers is expected to take
    `step_s + n * layer_s`, plus `embed_s` with layer 0 and `head_s` with the last layer.
    A prefill token costs `prefill_layer_s` per layer.
    """

    step_s: float
    layer_s: float
    embed_s: float
    head_s: float
    prefill_layer_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What the planner knows of one live peer that serves this model.

    queue_s: what a new step is expected to wait there. link_s: half the round trip from here
    (the client) to it, in seconds, or None where it was never measured.
    """

    peer: str
    span: Span
    numerics: str
    speed: Speed
    queue_s: float
    free_kv_tokens: int
    link_s: float | None = None


@dataclass(frozen=True, order=True, slots=True)
class Hop:
    """One peer's part of a chain: it runs `span`, which may be less than its claim."""

    span: Span
    peer: str


@dataclass(frozen=True, slots=True)
class Route:
    """Hops that together cover `[0, layers)` in order, and the expected seconds per decode step."""

    hops: tuple[Hop, ...]
    step_s: float

    def __post_init__(self) -> None:
        expected = 0
        for hop in self.hops:
            if hop.span.start != expected:
                raise ValueError(f"hop {hop.span} should start at layer {expected}")
            expected = hop.span.stop
        if not self.hops:
            raise ValueError("a route needs at least one hop")

    @property
    def layers(self) -> int:
        return self.hops[-1].span.stop
