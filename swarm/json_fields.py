"""A stranger's JSON, read field by field: what isn't as it should be is a MessageError that says which.

Imports nothing but the errors: the process that reads a stranger's tokenizer (`tokenizer_worker.py`) uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarm.errors import MessageError

Json = Any  # what json.loads makes; narrowed where it is read


def json_object(name: str, data: bytes) -> dict[str, Json]:
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{name} that the peer sent is not JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise MessageError(f"{name} that the peer sent is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Refuses a name that occurs twice: what we check and what another parser reads would differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return made


class Fields:
    """A JSON object of a stranger, read field by field. Every reader raises MessageError."""

    def __init__(self, file: str, values: Mapping[str, Json]) -> None:
        self._file, self._values = file, values

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def overlaid(self, values: Mapping[str, Json]) -> Fields:
        return Fields(self._file, {**self._values, **values})

    def _wrong(self, name: str, expected: str) -> MessageError:
        return MessageError(f"{self._file}: {name} is not {expected}: {str(self._values.get(name))[:60]!r}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"a number from {low} to {high}")
        return value

    def integer_or_none(self, name: str, low: int, high: int) -> int | None:
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int, most: int) -> tuple[int, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) > most:
            raise self._wrong(name, f"a list of at most {most} numbers")
        return tuple(Fields(self._file, {name: value}).integer(name, low, high) for value in values)

    def number(self, name: str, low: float, high: float, missing: float | None = None) -> float:
        value: Json = self._values.get(name, missing)
        # compared first: a whole number may be too large for a float, and isfinite would make it one
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise self._wrong(name, "true or false")
        return bool(value)

    def text(self, name: str, most: int) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self._wrong(name, f"a text of at most {most} characters")
        return value

    def nested(self, name: str) -> Fields:
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(f"{self._file}: {name}", value)

    def anything(self, name: str) -> Json:
        return self._values.get(name)
