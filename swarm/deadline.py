"""When a chain that owes something has been silent for too long.

A hop that says that it still computes puts that off, but not for ever: only a figure that grows shows progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.effects import HopKey

WORKING_STRETCH = 5  # a hop that says it still computes extends a deadline at most so many times


@dataclass
class Deadline:
    """at: the time when it is over; None: nothing is owed."""

    at: float | None = None
    _longest: float = 0.0  # it is put off until then at most
    _since: float = 0.0  # the last sign of progress
    _figures: dict[HopKey, int] = field(default_factory=dict)  # what hops last said, in this epoch

    def new_epoch(self) -> None:
        self._figures.clear()

    def begin(self, wait_s: float, now: float) -> None:
        self.at, self._longest = now + wait_s, now + wait_s * WORKING_STRETCH

    def stop(self) -> None:
        self.at = None

    def progress(self, now: float) -> None:
        """The ring was seen to move."""
        self._since = now

    def still_working(self, key: HopKey, figure: int, wait_s: float, now: float) -> None:
        """Slow is not dead: extend by `wait_s`, and start over where the figure shows progress."""
        if self.at is None:
            return
        if figure > self._figures.setdefault(key, figure):
            self._figures[key] = figure
            self._longest = max(self._longest, now + (self._longest - self._since))
            self._since = now
        self.at = max(self.at, min(now + wait_s, self._longest))
