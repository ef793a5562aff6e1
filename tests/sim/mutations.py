"""Rules of the registry that can be taken away, so that one sees the simulator notice.

    python -m tests.sim --seeds 40 --without RULE

Each is one patch of the core for as long as `without` lasts. A rule that no history misses is either no rule or not
simulated; those in TOLD none of the first forty does but a told story: digests repair within a minute what most of
them spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from swarm import asks, circle, neighbour, owner, places, records, registry, table
from swarm.heads import Held, Rank, read_head
from swarm.messages import Delta, Told
from swarm.records import Descriptor, Leave
from swarm.table import Verdict
from tests.sim import records as notary


@dataclass(frozen=True)
class Patch:
    """what.name becomes `made(before)`."""

    what: Any
    name: str
    made: Callable[[Any], Any]


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda before: lambda *_, **__: value


def _old_rank(before: Any) -> Any:
    return lambda self, rank, head, identifier, now: True


def _no_tie_break(before: Any) -> Any:
    def outranks(self: Any, rank: Rank, head: Any, identifier: bytes, now: float) -> bool:
        past = self._past(head.peer)
        if past is not None and rank.seq == past.rank.seq and rank.hash != past.rank.hash:
            return False  # whoever came first
        return bool(before(self, rank, head, identifier, now))

    return outranks


def _drop_only(before: Any) -> Any:
    return lambda self, held, now: self._drop(held)


def _live_for_ever(before: Any) -> Any:
    def entry(held: Any, now: float) -> Any:
        return before(held, min(now, held.lapses_at - 1e-6))

    return entry


def _tell_no_age(before: Any) -> Any:
    return lambda self, held, now, full: replace(before(self, held, now, full), age_s=0.0)


def _hear_no_age(before: Any) -> Any:
    def accept(self: Any, told: Told, now: float, head: Any = None) -> Verdict:
        return before(self, replace(told, age_s=0.0), now, head)

    return accept


def _forget_first_hearing(before: Any) -> Any:
    """A head told again after its end is as young as it is said to be."""

    def store(
        self: Any, rank: Any, head: Any, told: Any, identifier: bytes, descriptor: Any, now: float
    ) -> Any:
        self._gone.pop(head.peer, None)
        return before(self, rank, head, told, identifier, descriptor, now)

    return store


def _check_heads_only(before: Any) -> Any:
    return lambda self, record, signed: (
        None if isinstance(record, Descriptor) else before(self, record, signed)
    )


def _any_descriptor(before: Any) -> Any:
    """The descriptor that came with a heartbeat is taken for the one that it names."""

    def descriptor_of(self: Any, head: Any, told: Told) -> Any:
        if isinstance(head, Leave) or told.descriptor is None:
            return before(self, head, told)
        record = records.read_record(told.descriptor)
        return (record, told.descriptor) if isinstance(record, Descriptor) else before(self, head, told)

    return descriptor_of


def _renew_whatever_is_held(before: Any) -> Any:
    """A heartbeat alone renews another descriptor than the one that it names."""

    def descriptor_of(self: Any, head: Any, told: Told) -> Any:
        held = self._held.get(head.peer)
        if told.descriptor is None and held is not None and held.descriptor is not None:
            return held.descriptor, held.descriptor_bytes
        return before(self, head, told)

    return descriptor_of


def _ignore_leaves(before: Any) -> Any:
    def accept(self: Any, told: Told, now: float, head: Any = None) -> Verdict:
        found = head or read_head(told.head)
        return Verdict.STALE if isinstance(found, Leave) else before(self, told, now, found)

    return accept


def _unanswered(before: Any) -> Any:
    return lambda self, identifier, asked, now, again=True: None


def _whole_snapshot(before: Any) -> Any:
    def next_of_all(self: Any, known: Any, now: float) -> Delta | None:
        if not self._snapshots:
            return None
        peers = self._snapshots.popleft()
        found = [held for held in map(known.get, peers) if held is not None]
        return Delta(tuple(known.told(held, now, full=True) for held in found), complete=True)

    return next_of_all


RULES: dict[str, list[Patch]] = {
    "signatures": [Patch(notary.Notary, "check", _always(None))],
    "descriptor-signatures": [Patch(notary.Notary, "check", _check_heads_only)],
    "descriptor-match": [Patch(table.Table, "_descriptor_of", _any_descriptor)],
    "renews-only-its-descriptor": [Patch(table.Table, "_descriptor_of", _renew_whatever_is_held)],
    "rank-order": [Patch(table.Table, "_outranks", _old_rank)],
    "hash-tie-break": [Patch(table.Table, "_outranks", _no_tie_break)],
    "tombstones": [Patch(table.Table, "_bury", _drop_only)],
    "first-hearing": [Patch(table.Table, "_store", _forget_first_hearing)],
    "lease": [Patch(table, "entry_of", _live_for_ever), Patch(table.Table, "lapse", _always([]))],
    "age-told": [Patch(table.Table, "told", _tell_no_age)],
    "age-heard": [Patch(table.Table, "accept", _hear_no_age)],
    "leaves": [Patch(table.Table, "accept", _ignore_leaves)],
    "owner-jumps": [Patch(owner.Owner, "outranked", _always(False))],
    "objections": [Patch(registry.Registry, "_object", _always(None))],
    "digests": [Patch(registry.Registry, "_on_digest", _always(None))],
    "faded-heads": [Patch(table.Table, "fade", _always(None))],
    "tells-of-another-model": [Patch(Held, "concerns", lambda _: Held.matches)],
    "asks-again": [Patch(asks.Asks, "next", _unanswered)],
    "spread": [Patch(registry.Registry, "_spread", _always(None))],
    "heal-dials": [Patch(circle.Circle, "_heal", _always([]))],
    "new-neighbours": [Patch(circle.Circle, "_fill", _always([]))],
    "one-stream-a-pair": [Patch(circle.Circle, "_duplicates", _always([]))],
    "room-for-neighbours": [Patch(registry.Registry, "_full", _always(False))],
    "room-by-group": [Patch(places.Places, "victims", _always([]))],
    "answers-owed": [Patch(neighbour, "MAX_OWED", lambda _: 10**9)],
    "heads-asked": [Patch(asks, "MAX_ASKED", lambda _: 10**9)],
    "snapshot-in-parts": [Patch(neighbour.Neighbour, "_next_of_all", _whole_snapshot)],
    "snapshot": [Patch(neighbour.Neighbour, "tell_all", _always(None))],
}


# rule -> the test that fails without it
TOLD = {
    "first-hearing": "test_a_head_that_was_told_dead_first_is_no_younger_than_that_telling",
    "snapshot": "test_a_client_has_the_snapshot_after_one_round_trip",
    "asks-again": "test_what_was_offered_twice_is_asked_for_once_and_of_the_other_if_no_answer_comes",
    "faded-heads": "test_a_peer_that_missed_renewals_hears_of_them_before_the_lease_is_over",
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    patches = [
        mock.patch.object(one.what, one.name, one.made(getattr(one.what, one.name))) for one in RULES[rule]
    ]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
