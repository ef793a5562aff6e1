"""How the fields of a dataclass travel: what each is written as in a map, and what of a stranger's map is taken.

A field that travels carries a `Codec` (`of`). What doesn't fit raises `MessageError` before the dataclass exists, so
nobody behind it ever sees a bad value. Unknown keys are ignored: a newer minor version may add some. `messages.py`
and `records.py` are made of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from routing.spans import Span
from swarm.errors import MessageError
from swarm.identity import PeerId, key_bytes, peer_id

MAX_POSITION = 1 << 24   # longer than any context; keeps sums far from 2**63
MAX_EPOCH = 1 << 32
MAX_LAYERS = 1 << 12
MAX_SECONDS = 1e6        # eleven days; whatever takes longer has failed
MAX_TEXT = 512           # reasons and names, for people

Wire = Any  # what msgpack can hold; for codecs, messages.py and wire.py alone


@dataclass(frozen=True, slots=True)
class Codec:
    """How one field is written to a map and read back. `read` raises MessageError."""

    write: Callable[[Any], Wire]
    read: Callable[[Wire], Any]


def _same(value: Wire) -> Wire:
    return value


def expect(good: bool, what: str, value: object) -> None:
    """Raises MessageError unless `good`."""
    if not good:
        raise MessageError(f"expected {what}, got {str(value)[:80]!r}")


def integer(low: int, high: int) -> Codec:
    def read(value: Wire) -> int:
        expect(type(value) is int and low <= value <= high, f"an integer from {low} to {high}", value)
        return int(value)

    return Codec(_same, read)


def number(low: float, high: float) -> Codec:
    def read(value: Wire) -> float:
        good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
        expect(good, f"a number from {low} to {high}", value)
        return float(value)

    return Codec(_same, read)


def printable(value: str) -> str:
    """A stranger's words may end up on a terminal, where escape sequences are orders."""
    return value if value.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in value)


def exact_text(most: int) -> Codec:
    def read(value: Wire) -> str:
        expect(isinstance(value, str) and len(value) <= most, f"text of at most {most} characters", value)
        return str(value)

    return Codec(lambda value: value[:most], read)


def text(most: int = MAX_TEXT) -> Codec:
    """What is said to people: printable, whatever came."""
    exact = exact_text(most)
    return Codec(exact.write, lambda value: printable(exact.read(value)))


def octets(least: int, most: int) -> Codec:
    def read(value: Wire) -> bytes:
        expect(isinstance(value, bytes) and least <= len(value) <= most, f"{least} to {most} bytes", value)
        return bytes(value)

    return Codec(_same, read)


def list_of(item: Codec, most: int) -> Codec:
    def read(value: Wire) -> tuple[Any, ...]:
        expect(isinstance(value, list) and len(value) <= most, f"a list of at most {most}", value)
        return tuple(item.read(one) for one in value)

    return Codec(lambda values: [item.write(one) for one in values], read)


def optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.write(value),
        lambda value: None if value is None else inner.read(value),
    )


def one_of(*choices: str) -> Codec:
    def read(value: Wire) -> str:
        expect(value in choices, f"one of {choices}", value)
        return str(value)

    return Codec(_same, read)


def _read_flag(value: Wire) -> bool:
    expect(type(value) is bool, "true or false", value)
    return bool(value)


def _read_span(value: Wire) -> Span:
    good = isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value)
    expect(good and 0 <= value[0] < value[1] <= MAX_LAYERS, "a span [start, stop)", value)
    return Span(*value)


def _read_peer(value: Wire) -> PeerId:
    expect(isinstance(value, bytes) and len(value) == 32, "a peer id of 32 bytes", value)
    return peer_id(value)


flag = Codec(_same, _read_flag)
span = Codec(lambda value: [value.start, value.stop], _read_span)
peer = Codec(key_bytes, _read_peer)
epoch = integer(0, MAX_EPOCH)
position = integer(0, MAX_POSITION)
session_id = octets(16, 16)
digest = octets(32, 32)
seconds = number(0.0, MAX_SECONDS)


def nested(cls: type[Any]) -> Codec:
    return Codec(lambda value: to_map(value), lambda value: from_map(cls, value))


def of(codec: Codec, **default: Any) -> Any:
    """A dataclass field that travels by `codec`."""
    return field(metadata={"codec": codec}, **default)


M = TypeVar("M")


Field = tuple[str, str, Codec, bool]  # key in the map, name in the dataclass, codec, whether it has to be there

_known_fields: dict[type[Any], tuple[Field, ...]] = {}  # one entry a class of ours


def _fields(cls: type[Any]) -> tuple[Field, ...]:
    """All fields that travel, under their own names; remembered, for every step asks."""
    if cls not in _known_fields:
        missing = dataclasses.MISSING
        _known_fields[cls] = tuple(
            (f.name, f.name, f.metadata["codec"], f.default is missing and f.default_factory is missing)
            for f in dataclasses.fields(cls)
            if "codec" in f.metadata
        )
    return _known_fields[cls]


def to_map(message: Any) -> dict[str, Wire]:
    """All fields that carry a codec, by name."""
    return {key: codec.write(getattr(message, name)) for key, name, codec, _ in _fields(type(message))}


def from_map(cls: type[M], values: Wire) -> M:
    """Build `cls` from a map. Raises MessageError naming the field."""
    if not isinstance(values, Mapping):
        raise MessageError(f"{cls.__name__} should be a map, got {type(values).__name__}")
    return build(cls, _fields(cls), values)


def build(cls: type[M], fields: Iterable[Field], values: Mapping[str, Wire]) -> M:
    """A `cls` of what a map has of these fields. Raises MessageError naming the field."""
    read: dict[str, Any] = {}
    for key, name, codec, required in fields:
        if key in values:
            try:
                read[name] = codec.read(values[key])
            except MessageError as error:
                raise MessageError(f"{cls.__name__}.{name}: {error}") from None
        elif required:
            raise MessageError(f"{cls.__name__}.{name} is missing")
    return cls(**read)
