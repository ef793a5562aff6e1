"""A large JSON text read piece by piece, as the headers and indexes of weight files are.

Decoded in one go, JSON that holds nothing but empty lists takes twenty times its size, and Python's lock for as long
as that takes. Here a value is decoded when its reader asks for it. Invariant: it takes no more characters than that
reader says, and space between two values is stepped over some thousand characters at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from swarm.errors import BrokenModel

_SPACE = re.compile(r"[ \t\r\n]{0,4096}")  # between two words; 12 MB of it would keep Python's lock for long
_SHORT = 1024  # characters that are tried first: a MiB isn't copied for each of many short texts


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses a name that occurs twice: what is checked here and what another reader takes would differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


class JsonCursor:
    """at: the place of what is read next. Every reader raises what `refused` makes, where something else is there."""

    def __init__(self, text: str, refused: Callable[[], BrokenModel]) -> None:
        self.text, self.at = text, 0
        self._refused = refused

    def names(self, most: int) -> Iterator[str]:
        """Of the object that begins here. Whoever takes one reads its value before the next; then the cursor is behind
        the object. most: characters of a name. The names aren't compared with each other."""
        self._step("{")
        first = True
        while not self.stands("}"):
            if not first:
                self._step(",")
            name = self.string(most)
            self._step(":")
            yield name
            first = False
        self._step("}")

    def value(self, most: int) -> object:
        """Whatever begins here and takes no more than `most` characters."""
        at = self._behind_space()
        try:
            value, length = _DECODER.raw_decode(self.text[at : at + most])
        except (ValueError, RecursionError):
            raise self._refused() from None
        self.at = at + length
        return value

    def string(self, most: int) -> str:
        """The text that begins here."""
        if not self.stands('"'):
            raise self._refused()
        shorter = _SHORT
        while shorter < most:
            try:
                return str(self.value(shorter))
            except BrokenModel:
                shorter *= 32
        return str(self.value(most))

    def end(self) -> None:
        """Nothing but space may be left."""
        while (behind := self._behind_space()) > self.at:
            self.at = behind
        if self.at < len(self.text):
            raise self._refused()

    def stands(self, expected: str) -> bool:
        """Whether `expected` comes next, spaces aside."""
        return self.text.startswith(expected, self._behind_space())

    def _behind_space(self) -> int:
        found = _SPACE.match(self.text, self.at)
        assert found is not None, "it matches nothing too"
        return found.end()

    def _step(self, expected: str) -> None:
        if not self.stands(expected):
            raise self._refused()
        self.at = self._behind_space() + len(expected)
