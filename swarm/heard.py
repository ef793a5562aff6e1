"""Which heads were heard of already, in little memory: exactly while others may still offer them, then by a filter.

Honest peers offer a head for one lease at most, so for that long its identifier is kept, with whose it is, and
nobody is asked for it twice. A liar may tell it at any later time. While its owner's tombstone lasts (`table.py`),
that is what refuses it; after that `Filter` knows that this very head was held here before. It needs no proof, and
can't keep a living owner out, whose next head is another one.

Invariant: at most MAX_RECENT identifiers, and FILTER_BYTES twice, whatever comes.
"""

from __future__ import annotations

from swarm.identity import PeerId

MAX_RECENT = 65_536  # identifiers, about 150 bytes each: two leases of 10,000 peers' heads
FILTER_BYTES = 1 << 17  # of each half: 2**20 bits
FILTER_HEADS = 40_000  # in a half; an hour of 100 peers in both, and one unheard head in 1,000 is taken for a heard one
_PROBES = 4


class Recent:
    """Identifier -> whose head it is, for at least one turn and at most two."""

    def __init__(self) -> None:
        self._new: dict[bytes, PeerId] = {}
        self._old: dict[bytes, PeerId] = {}
        self._turn_at = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def __contains__(self, identifier: bytes) -> bool:
        return identifier in self._new or identifier in self._old

    def owner_of(self, identifier: bytes) -> PeerId | None:
        return self._new.get(identifier) or self._old.get(identifier)

    def add(self, identifier: bytes, peer: PeerId) -> None:
        self._new[identifier] = peer
        if len(self._new) >= MAX_RECENT // 2:
            self._turn()

    def turn(self, now: float, every_s: float) -> bool:
        """Called often; forgets once in `every_s`, and says so."""
        if now < self._turn_at:
            return False
        self._turn_at = now + every_s
        self._turn()
        return True

    def _turn(self) -> None:
        self._old, self._new = self._new, {}


class Filter:
    """Heads that were held. Source: Bloom, Space/time trade-offs in hash coding, CACM 13(7), 1970; two halves in turn,
    so that it forgets the oldest."""

    def __init__(self) -> None:
        self._new, self._old = bytearray(FILTER_BYTES), bytearray(FILTER_BYTES)
        self._heads = 0

    def add(self, identifier: bytes) -> None:
        if self._heads >= FILTER_HEADS:
            self._old, self._new = self._new, bytearray(FILTER_BYTES)
            self._heads = 0
        self._heads += 1
        for at in _places(identifier):
            self._new[at >> 3] |= 1 << (at & 7)

    def __contains__(self, identifier: bytes) -> bool:
        places = _places(identifier)
        return any(all(half[at >> 3] >> (at & 7) & 1 for at in places) for half in (self._new, self._old))


def _places(identifier: bytes) -> list[int]:
    """The bits of an identifier, which is a hash already. Source: Kirsch and Mitzenmacher, Less hashing, 2006."""
    number = int.from_bytes(identifier, "big")
    step = number >> 32 | 1
    return [(number + n * step) % (8 * FILTER_BYTES) for n in range(_PROBES)]
