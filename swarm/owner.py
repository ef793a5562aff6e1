"""A peer's own records: publishing, renewing, ending, and staying above its own past.

Invariant: only this signs for the own identity, and `seq` only grows: over restarts because the
caller starts it at `max(persisted + 1, unix ms)`, and against a past that the caller forgot (or a
second live instance) because whoever shows a higher one makes it jump above that.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from swarm.identity import Identity, PeerId
from swarm.messages import Told
from swarm.records import (
    MAX_LEASE_S,
    MAX_SEQ,
    Descriptor,
    Heartbeat,
    Leave,
    Load,
    fitting,
    record_hash,
    sign_record,
)

LEASE_INTERVALS = 3  # two heartbeats may be lost before anybody doubts
JUMP_INTERVAL_S = 5.0  # two instances of one identity outbid each other no faster than this
SEQ_ROOM = 1 << 32  # a seq this near the top is nobody's clock; it isn't followed
OWN_ECHO_S = 2.0  # a record issued less than this after our start may still be the last run's
# (peers, seconds between heartbeats): straight lines between these in log-log, so that the traffic
# per peer grows slower than the swarm.
_INTERVALS = ((200, 5.0), (1_000, 20.0), (10_000, 60.0))


def heartbeat_interval_s(peers: int) -> float:
    """Seconds between a peer's heartbeats in a swarm of so many."""
    for (low, short), (high, long) in itertools.pairwise(_INTERVALS):
        if peers <= low:
            return short
        if peers < high:
            return float(short * (long / short) ** (math.log(peers / low) / math.log(high / low)))
    return _INTERVALS[-1][1]


class Owner:
    """Pure: `now` is the registry's clock. unix_ms: the wall clock at `now`, written into heartbeats
    for people. seq: the last number used; the next is one above."""

    def __init__(self, identity: Identity, *, first_seq: int, now: float, unix_ms: int) -> None:
        self._identity = identity
        self._wall_ms = unix_ms - int(now * 1000)
        self.seq = first_seq - 1
        self.load = Load()
        self.due: float | None = None  # when the next heartbeat is
        self.left = False
        self._descriptor: Descriptor | None = None
        self._descriptor_bytes = b""
        self._descriptor_hash = b""
        self._heartbeat_bytes = b""
        self._heartbeat_seq = 0
        self._lease_s = LEASE_INTERVALS * heartbeat_interval_s(0)
        self._first_publish: float | None = None
        self._outbid = False
        self._jumped_at = -math.inf

    def set_wall(self, unix_ms: int, now: float) -> None:
        """The wall clock shows this now; it may have been set meanwhile."""
        self._wall_ms = unix_ms - int(now * 1000)

    @property
    def peer(self) -> PeerId:
        return self._identity.peer_id

    @property
    def descriptor(self) -> Descriptor | None:
        return self._descriptor

    @property
    def descriptor_bytes(self) -> bytes:
        return self._descriptor_bytes

    def publish(self, descriptor: Descriptor, now: float, alive: int) -> Told:
        """Sign `descriptor` under the next seq, with as many of its addresses as fit, and a heartbeat.

        Raises UsageError or MessageError (nothing changed) when a field is impossible.
        """
        made = fitting(self._identity, replace(descriptor, peer=self.peer, seq=self.seq + 1))
        self._descriptor_bytes = sign_record(self._identity, made)
        self._descriptor, self._descriptor_hash = made, record_hash(self._descriptor_bytes)
        self.seq, self.left = made.seq, False
        if self._first_publish is None:
            self._first_publish = now
        return self._heartbeat(now, alive)

    def renew(self, now: float, alive: int) -> Told:
        """The next heartbeat, or all of it anew if our past outranks us."""
        if self._outbid and self._descriptor is not None:
            self._outbid, self._jumped_at = False, now
            return self.publish(self._descriptor, now, alive)
        return self._heartbeat(now, alive)

    def _heartbeat(self, now: float, alive: int) -> Told:
        assert self._descriptor is not None, "a heartbeat renews a descriptor"
        interval_s = heartbeat_interval_s(alive)
        self.seq += 1
        self._lease_s = min(MAX_LEASE_S, LEASE_INTERVALS * interval_s)
        heartbeat = Heartbeat(
            peer=self.peer,
            seq=self.seq,
            descriptor_hash=self._descriptor_hash,
            issued_ms=max(0, self._wall_ms + int(now * 1000)),
            lease_s=self._lease_s,
            **{name: getattr(self.load, name) for name in Load.__dataclass_fields__},
        )
        self._heartbeat_bytes = sign_record(self._identity, heartbeat)
        self._heartbeat_seq = self.seq
        self.due = now + interval_s
        return Told(self._heartbeat_bytes, 0.0, self._descriptor_bytes)

    def leave(self) -> Told:
        """Ends what was published. The lease tells others how long to remember it."""
        self.seq += 1
        self.due, self.left = None, True
        return Told(sign_record(self._identity, Leave(self.peer, self.seq, self._lease_s)), 0.0)

    def outranked(self, head: Heartbeat | Leave, head_bytes: bytes, now: float) -> bool:
        """Somebody shows a record of ours (its signature was checked). Whether this is news and may
        outrank what we say now; `seq` is above it from here on, and publishing again is due."""
        if head_bytes == self._heartbeat_bytes or head.seq > MAX_SEQ - SEQ_ROOM:
            return False
        if self._descriptor is None or self.left:
            self.seq = max(self.seq, head.seq)
            return False
        same = isinstance(head, Heartbeat) and head.descriptor_hash == self._descriptor_hash
        if head.seq < (self._heartbeat_seq if same else self._descriptor.seq):
            return False
        self.seq = max(self.seq, head.seq)
        if self._outbid:
            return False
        self._outbid, self.due = True, max(now, self._jumped_at + JUMP_INTERVAL_S)
        return True

    def is_second_instance(self, age_s: float, now: float) -> bool:
        """Whether a record of that age, not ours, was issued while this process was already public."""
        return self._first_publish is not None and now - age_s > self._first_publish + OWN_ECHO_S
