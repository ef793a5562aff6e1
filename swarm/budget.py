"""How much a registry may be made to verify: a signature costs 0.2-0.3 ms, and anybody can make work for it.

Verification follows asking, so the budget is spent when a record is asked for: what can't be paid for now
waits in the queue of asks, and nobody has to say it again. What comes unasked (a leave, an objection, or
rubbish) is paid for before it is even decoded, and dropped when it can't be: it was offered to others too, and
the next digest tells of it. The snapshot that a newcomer asks for is paid for out of the reserve.

Invariant: in any span of t seconds at most RESERVE + PER_S * t signatures are verified in all, and at most
NEIGHBOUR_RESERVE + NEIGHBOUR_PER_S * t for one neighbour, its snapshot aside.
"""

from __future__ import annotations

from swarm.buckets import Bucket

PER_S = 400.0  # a tenth of a core; 10,000 peers send 167 heartbeats a second
RESERVE = 32_768.0  # descriptors and heartbeats of a full snapshot
NEIGHBOUR_PER_S = 200.0  # enough that any one of them can tell all that 10,000 peers say
NEIGHBOUR_RESERVE = 2048.0
SCARCE = 1024.0  # with less than that in all, everybody asks for little at a time, and in turn
SLICE = 32
USELESS = 4.0  # what a telling costs a neighbour beyond its work when there was no room for it


class Budget:
    """Of one registry."""

    def __init__(self, now: float) -> None:
        self._all = Bucket(PER_S, RESERVE, now)

    def of_neighbour(self, now: float) -> Share:
        return Share(self._all, Bucket(NEIGHBOUR_PER_S, NEIGHBOUR_RESERVE, now))


class Share:
    """One neighbour's."""

    def __init__(self, everybody: Bucket, own: Bucket) -> None:
        self._all, self._own = everybody, own

    def room(self, now: float) -> int:
        """How many signatures may be asked for in one message now."""
        left = self._all.left(now)
        most = min(left, self._own.left(now))
        return max(0, int(min(most, SLICE) if left < SCARCE else most))

    def take(self, signatures: int, now: float, *, snapshot: bool = False) -> bool:
        """Pay, if there is enough."""
        if not snapshot and self._own.left(now) < signatures:
            return False
        return self._all.take(now, signatures) and (snapshot or self._own.take(now, signatures))

    def was_useless(self, now: float) -> None:
        self._own.spend(now, USELESS)

    def ready_at(self, now: float) -> float:
        """When it is worth asking again: for a slice, so that asks don't dribble."""
        return max(self._all.ready_at(now, SLICE), self._own.ready_at(now, SLICE))
