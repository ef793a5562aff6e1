"""Valid inputs, changed: as an attacker would, who knows the format, and as a bad disk would, which doesn't.

`mutated_bytes` knows nothing but that there are lengths and counts somewhere; `mutated_tree` changes what a
map or JSON object says and leaves the encoding right, so that it gets past the first check. Both draw from the
`random.Random` that they are given and from nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 4095, 4096, 32767, 32768, 65519, 65535, 1 << 24, (1 << 31) - 1, 1 << 31)
NUMBERS += ((1 << 32) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
BYTES = bytes(range(0, 256, 17)) + b"\x7f\x80\x81\x90\x93\xc0\xc1\xc7\xca\xcb\xd4\xd9\xdb\xdc\xdd\xde\xdf\xff"
PIECES = (b"\x91", b"\x81\xa0", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
PIECES += (b"[", b"{", b'{"":', b"[[],", b'"', b"\\", b"\\ud800", b"9" * 400, b"1e999", b"-", b"NaN", b"\xff\xfe")
PIECES += (b"{{", b"}}", b"{%", b"%}", b"\x00", b"\n", b"\xed\xa0\x80", b"@", b":", b"%", b"]")
MOST_BYTES = 1 << 16  # of an input; the largest of each kind are measured elsewhere (benchmarks/parsers.py)

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutated_bytes(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """`data` after one to four changes; one in a hundred stays as it was, or valid inputs would never be fed."""
    if rng.random() < 0.01:
        return data
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        data = rng.choice(MUTATIONS)(rng, data, corpus)[:MOST_BYTES]
    return data


def _place(rng: random.Random, data: bytes) -> int:
    """Early places more often: that is where lengths stand."""
    return min(rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)) if data else 0


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _set(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + bytes([rng.choice(BYTES)]) + data[at + 1 :]


def _truncate(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extend(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data + rng.randbytes(rng.choice((1, 2, 16, 300)))


def _length(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Whatever stands there, as if it were a number of 1, 2, 4 or 8 bytes: another one, or a neighbour."""
    at, size, order = _place(rng, data), rng.choice((1, 2, 4, 8)), rng.choice(("big", "little"))
    before = int.from_bytes(data[at : at + size], order)  # type: ignore[arg-type]
    value = rng.choice((rng.choice(NUMBERS), before + rng.choice((-1, 1, 8)), len(data), len(data) - at - size))
    return data[:at] + (value % (1 << 8 * size)).to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice(PIECES) * rng.choice((1, 1, 2, 9, 100, 3000)) + data[at:]


def _cut_out(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 1, 2, 4, 32)) :]


def _double(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    piece = data[at : at + rng.choice((1, 2, 4, 16, 64, 256))]
    return data[:at] + piece * rng.choice((2, 2, 3, 50)) + data[at + len(piece) :]


def _splice(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = rng.choice(corpus)
    return data[: _place(rng, data)] + other[_place(rng, other) :]


MUTATIONS: tuple[Mutation, ...] = (_flip, _set, _truncate, _extend, _length, _insert, _cut_out, _double, _splice)


# ---------------------------------------------------------------- trees

# What stands where something else belongs. Nesting and sizes stay within what encoders can write.
ODD: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2.5, -0.0, float("inf"), float("nan"), "", "x")
ODD += ("\x1b[31m\n", "é" * 200, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
ODD += ([], {}, [[]], [None] * 300, [[[[[[[[[[1]]]]]]]]]], {"": {"": {"": {}}}})
ODD_FOR_MSGPACK: tuple[Any, ...] = (*ODD, b"", b"\xff" * 64, bytes(32), bytes(2000), [0] * 4000, {"k": b""})
ODD_FOR_JSON: tuple[Any, ...] = (*ODD, 10**400, "\ud800", "{{ 1 }}", "[" * 2000, {"type": "Sequence"})


def mutated_tree(rng: random.Random, tree: Any, odd: Sequence[Any]) -> Any:
    """`tree` (maps, lists and leaves) after one to three changes."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _changed(rng, tree, odd)
    return tree


def _changed(rng: random.Random, tree: Any, odd: Sequence[Any]) -> Any:
    """A copy in which one place is another: walks down at random and stops with every step more surely."""
    if not tree or not isinstance(tree, dict | list) or rng.random() < 0.15:
        return rng.choice(odd)
    made: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    what = rng.random()
    if what < 0.12:
        del made[key]
    elif what < 0.2 and isinstance(made, list):
        made.insert(key, made[rng.randrange(len(made))])
    elif what < 0.2:
        made[rng.choice((f"{key}x", "", "#", "kind"))] = made[key]
    elif what < 0.26:
        other = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        made[key], made[other] = made[other], made[key]
    else:
        made[key] = _changed(rng, made[key], odd)
    return made
