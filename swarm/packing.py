"""A message as bytes, and back: the innermost layer of the wire.

    message   u16 length of the map | msgpack map | raw bytes of the tensors, in order     big-endian
    map       the message's fields (swarm/messages.py), and under "#" the tensors: [[name, dtype, shape], ...]

`wire.py` cuts these bytes into frames and puts them together again; it reads the head of a message as
soon as it is here, so that a bad or too large one is refused before its tensors come.

Invariant: whatever the bytes, nothing is built before its size, depth and number of items were checked,
and nothing but MessageError is raised.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from swarm.errors import MessageError
from swarm.tensors import RawTensor, tensor_bytes

Buffer = bytes | bytearray | memoryview
Specs = list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape

MAX_MAP_BYTES = 16 << 10
MAX_MAP_DEPTH = 8  # our deepest message has 3
MAX_MAP_ITEMS = 4096  # the longest list of ours has 256 entries; an item costs Python up to 100 bytes
MAX_TENSOR_NAME = 128  # a file name at most
TENSORS_KEY = "#"

_LENGTH = struct.Struct(">H")


def pack(values: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> list[Buffer]:
    """A message as buffers to be sent one after the other; tensor bytes aren't copied.

    Raises ValueError if the map is too large (long things travel as tensors): the sender's own bug.
    """
    if tensors:
        specs = [[name, t.dtype, list(t.shape)] for name, t in tensors.items()]
        values = {**values, TENSORS_KEY: specs}
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    if len(packed) > MAX_MAP_BYTES:
        raise ValueError(f"a message's map takes {len(packed)} bytes, {MAX_MAP_BYTES} are allowed")
    buffers: list[Buffer] = [_LENGTH.pack(len(packed)) + packed]
    buffers += [t.data for t in tensors.values() if len(t.data)]
    return buffers


class Head(NamedTuple):
    """The map of a message whose tensors may not be here yet. total: bytes of the whole message."""

    values: dict[str, Any]
    specs: Specs
    sizes: list[int]
    start: int
    total: int


def read_head(data: Buffer) -> Head | None:
    """The map at the start of `data`, or None while it isn't complete. Raises MessageError."""
    if len(data) < 2:
        return None
    size = data[0] << 8 | data[1]
    if size > MAX_MAP_BYTES:
        raise MessageError(f"a map of {size} bytes, {MAX_MAP_BYTES} are allowed")
    if len(data) < 2 + size:
        return None
    values = read_map(bytes(data[2 : 2 + size]))
    specs = _read_specs(values.pop(TENSORS_KEY, ()))
    sizes = [tensor_bytes(dtype, shape) for _, dtype, shape in specs]
    return Head(values, specs, sizes, 2 + size, 2 + size + sum(sizes))


def cut_tensors(head: Head, data: Buffer) -> dict[str, RawTensor]:
    """Views into `data`, which is the whole message. Raises MessageError unless the sizes match."""
    if len(data) != head.total:
        raise MessageError(f"the message has {len(data)} bytes, its map says {head.total}")
    view, at = memoryview(data), head.start
    tensors = {}
    for (name, dtype, shape), size in zip(head.specs, head.sizes, strict=True):
        end = at + size
        tensors[name] = RawTensor(dtype, shape, view[at:end])
        at = end
    return tensors


def unpack(data: Buffer) -> tuple[dict[str, Any], dict[str, RawTensor]]:
    """The reverse of `pack`. Raises MessageError."""
    head = read_head(data)
    if head is None:
        raise MessageError("the message ends inside its map")
    return head.values, cut_tensors(head, data)


def read_map(data: bytes) -> dict[str, Any]:
    """A msgpack map, bounded before any object is built. Raises MessageError."""
    scan(data)
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"the map isn't readable msgpack: {error}") from None
    if not isinstance(values, dict):
        raise MessageError(f"a message is a map, not {type(values).__name__}")
    return values


def _fixed_sizes() -> list[int]:
    """By first byte: bytes that the value takes, 0 if that isn't fixed (msgpack's format table)."""
    sizes = [1] * 256
    for byte in range(0xA0, 0xC0):  # fixstr
        sizes[byte] = 1 + (byte & 0x1F)
    for byte, size in {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.items():
        sizes[byte] = size
    for byte, size in {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.items():
        sizes[byte] = size
    for byte in (*range(0x80, 0xA0), 0xC1, *range(0xC4, 0xCA), *range(0xD4, 0xE0)):
        sizes[byte] = 0
    return sizes


_FIXED = _fixed_sizes()
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str
_COUNT_BYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # array and map


def scan(data: bytes) -> None:
    """Walk over one msgpack value and refuse what is too deep, too rich or of an extension type.

    msgpack's own limits bound each container, not all together: 4 MB of empty maps cost 278 MB.
    """
    at, end, items, left = 0, len(data), 0, 1
    outer: list[int] = []
    while True:
        while left == 0:
            if not outer:
                if at != end:
                    raise MessageError(f"{end - at} bytes follow the map")
                return
            left = outer.pop()
        left -= 1
        if at >= end:
            raise MessageError("the map is cut short")
        byte = data[at]
        size = _FIXED[byte]
        if size:
            at += size
            continue
        at, children = _variable(data, at, byte)
        if children:
            items += children
            if items > MAX_MAP_ITEMS:
                raise MessageError(f"the map has over {MAX_MAP_ITEMS} items")
            outer.append(left)
            if len(outer) > MAX_MAP_DEPTH:
                raise MessageError(f"the map is nested more than {MAX_MAP_DEPTH} deep")
            left = children


def _variable(data: bytes, at: int, byte: int) -> tuple[int, int]:
    """Where a value of variable size goes on, and how many values it contains."""
    if byte < 0x90:  # fixmap
        return at + 1, 2 * (byte & 0x0F)
    if byte < 0xA0:  # fixarray
        return at + 1, byte & 0x0F
    if byte in _LENGTH_BYTES:
        body = at + 1 + _LENGTH_BYTES[byte]
        return body + int.from_bytes(data[at + 1 : body], "big"), 0
    if byte in _COUNT_BYTES:
        body = at + 1 + _COUNT_BYTES[byte]
        count = int.from_bytes(data[at + 1 : body], "big")
        return body, 2 * count if byte >= 0xDE else count
    raise MessageError(f"msgpack type 0x{byte:02x} is not used here")


def _read_specs(raw: Any) -> Specs:
    if not isinstance(raw, list | tuple):
        raise MessageError("the list of tensors is no list")
    specs: Specs = []
    for one in raw:
        good = isinstance(one, list) and len(one) == 3 and isinstance(one[2], list)
        if not good or not isinstance(one[0], str) or not isinstance(one[1], str):
            raise MessageError("a tensor is described by [name, dtype, shape]")
        if len(one[0]) > MAX_TENSOR_NAME or any(type(side) is not int for side in one[2]):
            raise MessageError(f"tensor {one[0][:MAX_TENSOR_NAME]!r} has a bad name or shape")
        specs.append((one[0], one[1], tuple(one[2])))
    if len({name for name, _, _ in specs}) != len(specs):
        raise MessageError("two tensors of a message have the same name")
    return specs
