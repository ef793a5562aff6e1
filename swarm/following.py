"""Which models' records a client asks for: of a swarm with many, it hears of those that it uses.

The list of models comes first and is small. Followed are the model that the client was made for (or the only
one there is), whatever it generated with since, and everything once somebody wants to see everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from swarm.chains import choose_model
from swarm.errors import SwarmError
from swarm.messages import MAX_MODELS_WANTED, ModelSeen


class Following:
    """default: a model's name, or None. Called with the list of models it says which to ask for, None for all."""

    def __init__(self, default: str | None, *, everything: bool = False) -> None:
        self.everything = everything
        self._default = default
        self._models: dict[bytes, None] = {}  # the last used last

    def __call__(self, models: Sequence[ModelSeen]) -> tuple[bytes, ...] | None:
        if self.everything:
            return None
        if not self._models:
            with contextlib.suppress(SwarmError):  # told to whoever asks for an answer
                return (choose_model(models, self._default).fingerprint,)
        return tuple(self._models)

    def use(self, fingerprint: bytes) -> None:
        """It is wanted now; the one not used for longest makes room."""
        self._models.pop(fingerprint, None)
        self._models[fingerprint] = None
        if len(self._models) > MAX_MODELS_WANTED:
            del self._models[next(iter(self._models))]
