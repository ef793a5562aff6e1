"""Whether our wall clock is the odd one out. Nothing depends on it but the warning.

Heartbeats say what their owner's wall clock showed, and how old they are; from each neighbour's own we get
how far its clock is from ours. A single one proves nothing, the median of several does, unless most of our
neighbours lie, and then it costs a wrong warning.

Pure: `now` is the registry's clock, and our wall clock comes in as an argument, since it may be set at any time.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.identity import PeerId

MIN_CLOCKS = 3  # with two others, nobody can say who is wrong
TOLERANCE_S = 30.0  # far above what a record takes on its way, which no age counts


@dataclass(frozen=True)
class ClockOff:
    """Our wall clock is `error_s` ahead of the median of `clocks` neighbours (behind, if negative)."""

    error_s: float
    clocks: int


def clock_errors(shown_s: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Those who are off, and by how much. shown_s: what each one's wall clock shows at one and the same moment."""
    if len(shown_s) < MIN_CLOCKS:
        return {}
    middle = statistics.median(shown_s.values())
    return {peer: shown - middle for peer, shown in shown_s.items() if abs(shown - middle) > TOLERANCE_S}


def describe(error_s: float) -> str:
    """`2 h 3 min ahead of`, `45 s behind`"""
    minutes, seconds = divmod(round(abs(error_s)), 60)
    hours, minutes = divmod(minutes, 60)
    amount = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return f"{amount} {'ahead of' if error_s > 0 else 'behind'}"


class Clocks:
    """Those of the neighbours, compared with ours."""

    def __init__(self) -> None:
        self._shown: dict[PeerId, float] = {}  # -> what its wall clock shows when ours, monotonic, shows 0
        self._told = False
        self.error_s = 0.0  # the last that was worth a warning, 0 while there is none

    def heard(self, peer: PeerId, issued_ms: int, age_s: float, now: float) -> None:
        self._shown[peer] = issued_ms / 1000 + age_s - now

    def check(self, neighbours: Collection[PeerId], unix_ms: int, now: float) -> ClockOff | None:
        """A warning, once until our clock is right again. Forgets everybody but `neighbours`."""
        self._shown = {peer: shown for peer, shown in self._shown.items() if peer in neighbours}
        if len(self._shown) < MIN_CLOCKS:
            return None
        error_s = unix_ms / 1000 - now - statistics.median(self._shown.values())
        off = abs(error_s) > TOLERANCE_S
        first, self._told = off and not self._told, off
        self.error_s = error_s if off else 0.0
        return ClockOff(error_s, len(self._shown)) if first else None
