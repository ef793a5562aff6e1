"""How often: a token bucket, and what it costs a neighbourhood to overrun its limits. Pure; `now` in seconds."""

from __future__ import annotations

from collections import OrderedDict


class Bucket:
    """`burst` at once, `rate` a second in the long run. Starts full."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """False: that would be too many, and nothing was taken."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """What has been used already, even if it wasn't there."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - amount
        self._at = now

    def left(self, now: float) -> float:
        """How much could be taken."""
        return min(self._burst, self._left + (now - self._at) * self._rate)

    def ready_at(self, now: float, amount: float = 1.0) -> float:
        """When `take` would succeed, if nobody takes meanwhile."""
        left = self.left(now)
        return now if left >= amount else now + (amount - left) / self._rate


MAX_BUCKETS = 4096  # of one table, about 0.5 MiB; those used the longest ago go first, and would be full by then


class BucketTable:
    """A bucket for each name, all alike."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, now: float, amount: float = 1.0) -> bool:
        """False: that would be too many, and nothing was taken."""
        bucket = self._buckets.pop(name, None) or Bucket(self._rate, self._burst, now)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return bucket.take(now, amount)


FIRST_PENALTY_S = 1.0
# A neighbourhood is more than the flooder in it: whoever shares its /24 isn't kept out for longer than a minute.
LONGEST_PENALTY_S = 64.0
FORGIVE_S = 600.0  # quiet for so long: one strike less
MAX_PENALTIES = 4096  # groups remembered, about 0.5 MiB; whoever was struck longest ago goes first


class Penalties:
    """Who has been thrown out lately: refused for a second, then two, four, ..., LONGEST_PENALTY_S."""

    def __init__(self) -> None:
        self._struck: OrderedDict[str, tuple[int, float]] = OrderedDict()  # group -> strikes, the last one's time

    def __len__(self) -> int:
        return len(self._struck)

    def strike(self, group: str, now: float) -> float:
        """Another one; returns the seconds for which the group is refused now."""
        strikes = self._strikes(group, now) + 1
        self._struck.pop(group, None)
        self._struck[group] = strikes, now
        while len(self._struck) > MAX_PENALTIES:
            self._struck.popitem(last=False)
        return self._lasts(strikes)

    def refused_until(self, group: str, now: float) -> float | None:
        """None: it may come in."""
        if group not in self._struck:
            return None
        strikes, at = self._struck[group]
        until = at + self._lasts(strikes)
        if until > now:
            return until
        if self._strikes(group, now) == 0:
            del self._struck[group]
        return None

    def _strikes(self, group: str, now: float) -> int:
        strikes, at = self._struck.get(group, (0, now))
        return max(0, strikes - int((now - at) / FORGIVE_S))

    @staticmethod
    def _lasts(strikes: int) -> float:
        return min(LONGEST_PENALTY_S, FIRST_PENALTY_S * 2.0 ** min(strikes - 1, 32))
