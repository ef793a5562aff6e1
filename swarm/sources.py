"""What a client's sources say of their swarm: which models there are, and where they listen themselves.

A client holds records of the models that it asked for; of all others it has these lists, one of each source.

Invariant: nothing is kept of a source that is gone but where it listens, and that of the latest few.
"""

from __future__ import annotations

from swarm.identity import PeerId
from swarm.listing import merged
from swarm.messages import ModelList, ModelSeen

SOURCES_REMEMBERED = 16  # a client has up to three at a time


class Sources:
    """Of one client. version: grows with each change of `models`."""

    def __init__(self) -> None:
        self.version = 0
        self._lists: dict[int, tuple[ModelSeen, ...]] = {}
        self._places: dict[PeerId, tuple[str, ...]] = {}  # the latest last

    def models(self) -> tuple[ModelSeen, ...]:
        return merged(self._lists.values())

    def places_of(self, peer: PeerId) -> tuple[str, ...]:
        return self._places.get(peer, ())

    def told(self, key: int, source: PeerId, message: ModelList) -> None:
        """key: of the stream."""
        self._lists[key] = message.models
        self._places.pop(source, None)
        self._places[source] = message.here
        if len(self._places) > SOURCES_REMEMBERED:
            del self._places[next(iter(self._places))]
        self.version += 1

    def gone(self, key: int) -> bool:
        """Whether that changes anything."""
        known = self._lists.pop(key, None) is not None
        self.version += known
        return known
