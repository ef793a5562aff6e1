"""Dicts as small as what they hold.

A dict grows with what is put in and doesn't shrink with what is taken out, and a copy by `dict(it)` may be as large
as the original; so one in which much came and went is built anew from its items.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def compacted(full: dict[K, V]) -> dict[K, V]:
    """The same in the same order, in no more room than if nothing else had ever been there."""
    return {key: value for key, value in full.items()}  # noqa: C416 (see above)
