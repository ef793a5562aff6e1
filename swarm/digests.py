"""Sums over what a table holds, so that two participants can tell where they differ without listing it.

Every head that is held falls into one of PLACES by its owner's key, and a digest is one sum per bucket of
places. What is summed is the hash of the descriptor (or of the leave) and the state, so renewals change nothing
and a head that one side lacks changes one bucket. So does one that it should have renewed: the table takes a
head out when half of its lease is over (`Table.fade`).

Invariant: the sums are kept as heads come and go, so a digest costs the same at ten thousand peers as at
ten; only the first one about a model walks through the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swarm.compact import compacted
from swarm.errors import MessageError
from swarm.identity import PeerId, key_bytes

PLACES = 512  # a digest's buckets divide it; at 10,000 peers one bucket of 64 holds 160 of them
MAX_MODELS_SUMMED = 16  # models of which clients ask for digests; the one asked for longest ago goes first


Models = frozenset[bytes]  # fingerprints, where somebody wants to hear of some models only


def place_of(peer: PeerId) -> int:
    return int.from_bytes(key_bytes(peer)[:4], "big") % PLACES


def check_buckets(buckets: int) -> None:
    """Raises MessageError for a number that nobody of ours would send."""
    if not buckets or PLACES % buckets:
        raise MessageError(f"a digest of {buckets} buckets; their number divides {PLACES}")


class Digests:
    """Of one table, which calls `add` and `remove` as heads come and go. value: what one adds to its bucket."""

    def __init__(self) -> None:
        self._all = [0] * PLACES
        self._of: dict[bytes, list[int]] = {}  # of some models; the last used last
        self._there: dict[int, dict[PeerId, tuple[bytes | None, int, bytes | None]]] = {}  # by place

    def add(self, peer: PeerId, fingerprint: bytes | None, value: int, before: bytes | None = None) -> None:
        """before: of another model, in whose sums it may still be elsewhere."""
        place = place_of(peer)
        self._there.setdefault(place, {})[peer] = (fingerprint, value, before)
        self._count(place, fingerprint, value)

    def remove(self, peer: PeerId) -> None:
        place = place_of(peer)
        there = self._there[place]
        fingerprint, value, _ = there.pop(peer)
        if not there:
            del self._there[place]
        self._count(place, fingerprint, -value)

    def compact(self) -> None:
        """Let go of room that nobody needs any more."""
        self._there = {place: compacted(there) for place, there in self._there.items()}

    def sums(self, buckets: int, only: Models | None = None) -> tuple[bytes, ...]:
        """8 bytes per bucket, of all or of these models. buckets divides PLACES."""
        totals = [0] * buckets
        for fine in [self._all] if only is None else [self._model(one) for one in only]:
            for place, value in enumerate(fine):
                totals[place % buckets] += value
        return tuple((total % (1 << 64)).to_bytes(8, "big") for total in totals)

    def within(self, chosen: Iterable[int], buckets: int, only: Models | None = None) -> Iterator[PeerId]:
        """Whoever is in the chosen buckets of a digest of so many, or was before it served another model."""
        for bucket in sorted(chosen):
            for place in range(bucket, PLACES, buckets):
                for peer, (fingerprint, _, before) in self._there.get(place, {}).items():
                    if only is None or fingerprint in only or before in only:
                        yield peer

    def _count(self, place: int, fingerprint: bytes | None, value: int) -> None:
        self._all[place] += value
        if fingerprint is not None and fingerprint in self._of:
            self._of[fingerprint][place] += value

    def _model(self, fingerprint: bytes) -> list[int]:
        fine = self._of.pop(fingerprint, None)
        if fine is None:
            fine = [0] * PLACES
            for place, there in self._there.items():
                fine[place] = sum(value for model, value, _ in there.values() if model == fingerprint)
        self._of[fingerprint] = fine
        if len(self._of) > MAX_MODELS_SUMMED:
            del self._of[next(iter(self._of))]
        return fine


def differing(ours: Iterable[bytes], theirs: Iterable[bytes]) -> set[int]:
    """The buckets whose sums aren't equal."""
    return {at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b}
