"""Which models there are, in a message: what a client reads before it asks for anybody's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarm.messages import MAX_MODELS_TOLD, MAX_NAMES_TOLD, ModelList, ModelSeen
from swarm.table import Table

MAX_LIST_BYTES = 15 * 1024  # of a message's 16 KiB; `here` takes at most 700 bytes more
OVERHEAD_BYTES = 48  # the fingerprint, the count and lengths


def list_models(table: Table, named: str = "", here: tuple[str, ...] = ()) -> ModelList:
    """Those called `named` first, then those with the most peers, as many as one message holds.

    here: where the peer listens that tells them.
    """
    seen = [
        ModelSeen(fingerprint, _told_names(names, named), names.total())
        for fingerprint, names in table.models().items()
    ]
    seen.sort(key=lambda model: (named not in model.names, -model.peers, model.fingerprint))
    told, room = [], MAX_LIST_BYTES
    for model in seen[:MAX_MODELS_TOLD]:
        room -= OVERHEAD_BYTES + sum(len(name.encode()) + 3 for name in model.names)
        if room < 0:
            break
        told.append(model)
    return ModelList(tuple(told), here)


def merged(lists: Iterable[tuple[ModelSeen, ...]]) -> tuple[ModelSeen, ...]:
    """What several sources say, as one: one that one of them leaves out is there all the same."""
    found: dict[bytes, ModelSeen] = {}
    for model in (model for models in lists for model in models):
        before = found.get(model.fingerprint, ModelSeen(model.fingerprint, (), 0))
        names = tuple(dict.fromkeys((*before.names, *model.names)))
        found[model.fingerprint] = ModelSeen(model.fingerprint, names, max(before.peers, model.peers))
    return tuple(sorted(found.values(), key=lambda model: (-model.peers, model.fingerprint)))


def _told_names(names: Counter[str], named: str) -> tuple[str, ...]:
    """The commonest, and the one that was asked for."""
    ordered = sorted(names, key=lambda name: (-names[name], name))
    return tuple(ordered if named not in ordered[MAX_NAMES_TOLD:] else [*ordered[: MAX_NAMES_TOLD - 1], named])[
        :MAX_NAMES_TOLD
    ]
