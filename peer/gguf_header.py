"""The header of a GGUF file: what it says of its model and which tensors it holds; it reads none of them.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: "GGUF", version,
counts; the metadata, key by key; the tensors' names, shapes, types and offsets; padding; the tensors'
bytes. Counts and lengths in it are strangers' numbers: each is compared with the bytes that are there before
anything is made of it, and long values are stepped over, not built (`GgufArray`).

Invariant: a header that is accepted describes tensors that lie within the file, aligned, whole and apart, so
that no later read can run past its end. Whatever is wrong raises BrokenModel, and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from io import FileIO
from math import prod
from pathlib import Path

from peer.checkpoint import broken, in_order
from swarm.errors import BrokenModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # of version 1, which counted in 32 bits, no file is left that anybody shares
DEFAULT_ALIGNMENT = 32  # the format's

FIRST_BYTES = 1 << 20  # are read first, then as many that it's four times as much: vocabularies differ
# Far above what real files have (the largest vocabularies: 20 MB, 700,000 strings), far below what hurts.
MAX_HEADER_BYTES = 100_000_000
MAX_KEYS = 4_096
MAX_TENSORS = 65_536
MAX_STRINGS = 8_000_000  # in all arrays: stepping over one takes a fraction of a microsecond
MAX_NAME_BYTES = 65_535  # the format's, for keys
MAX_TEXT_BYTES = 1 << 20  # longer values are stepped over like arrays; chat templates have some 10 kB
MAX_TEXTS_BYTES = 8 << 20  # keys, texts and names that are kept, together, as they lie in memory
MAX_NUMBERS = 1_024  # of an array that is kept: one for each layer, or a few; vocabularies have more
MAX_KEPT_NUMBERS = 1 << 17  # of all such arrays; as objects they take 32 bytes each
MAX_DIMENSIONS = 4  # ggml's own

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A value that was stepped over: an array of strings or of many numbers, or a very long text."""

    count: int
    strings: bool


Value = Number | str | tuple[Number, ...] | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """kind: ggml's name of its type ("F32", "Q4_K", ...). shape: slowest dimension first, as torch has it."""

    kind: str
    shape: tuple[int, ...]
    offset: int  # of its bytes, from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """pairs: where key and value of each lie in the file. nbytes: of the header, without padding."""

    version: int
    metadata: Mapping[str, Value]
    pairs: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, GgufTensor]
    nbytes: int


class HeaderGoesOn(BrokenModel):
    """The header reaches beyond the bytes that were given, but not beyond the file."""


def read_gguf_header(source: Path | bytes, file: str, size: int | None = None) -> GgufHeader:
    """The header of a file on this machine, or of its first bytes. Allocates little more than what is kept.

    file: how errors name it. size: the whole file's bytes, where `source` is its beginning.
    Raises BrokenModel; HeaderGoesOn where more of the beginning is needed.
    """
    if isinstance(source, bytes):
        return _parse(memoryview(source), file, len(source) if size is None else size)
    with source.open("rb", buffering=0) as stream:
        return read_open_gguf(stream, file)


def read_open_gguf(stream: FileIO, file: str) -> GgufHeader:
    """The same of an open file."""

    def read(start: int, stop: int) -> bytes:
        stream.seek(start)
        return stream.read(stop - start)

    return read_beginning(read, file, stream.seek(0, 2))[1]


def read_beginning(read: Callable[[int, int], bytes], file: str, size: int) -> tuple[bytes, GgufHeader]:
    """As many bytes of a file as its header takes, or some more; and the header. read: bytes [start, stop).

    A file isn't mapped for that: a mapping of all of it is more than a limit of memory may allow.
    """
    beginning, length = b"", min(FIRST_BYTES, size)
    while True:
        beginning += read(len(beginning), length)
        try:
            return beginning, read_gguf_header(beginning, file, size)
        except HeaderGoesOn:
            if len(beginning) < length or length >= min(size, MAX_HEADER_BYTES):  # it was cut meanwhile
                raise broken(file, "it ends within its header") from None
            length = min(4 * length, MAX_HEADER_BYTES, size)


def _parse(data: memoryview, file: str, size: int) -> GgufHeader:
    cursor = _Cursor(data, file, min(size, MAX_HEADER_BYTES))
    version, tensor_count, key_count = _start(cursor, size)
    metadata: dict[str, Value] = {}
    pairs: dict[str, tuple[int, int]] = {}
    for _ in range(key_count):
        start = cursor.at
        key = cursor.text("a key", MAX_NAME_BYTES)
        if key in metadata:
            raise broken(file, f"its metadata has {key!r} twice")
        metadata[key] = _value(cursor, key)
        pairs[key] = (start, cursor.at)
    alignment = _alignment(metadata, file)
    listed: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text("a tensor's name", MAX_NAME_BYTES)
        if name in listed:
            raise broken(file, f"it has two tensors called {name!r}")
        listed[name] = _tensor(cursor, name, alignment)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(kind, shape, start + offset, nbytes)
        for name, (kind, shape, offset, nbytes) in listed.items()
    }
    _check_extents(tensors, file, size)
    return GgufHeader(version, metadata, pairs, tensors, cursor.at)


def _start(cursor: _Cursor, size: int) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    file = cursor.file
    if size < 24 or bytes(cursor.data[:4]) != MAGIC:
        raise broken(
            file, f"its {size:,} bytes don't begin as a GGUF file does", "is it another kind of file?"
        )
    cursor.at = 4
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise broken(file, "it was written for big-endian machines", "use the ordinary, little-endian file")
    if version not in VERSIONS:
        spoken = " and ".join(map(str, VERSIONS))
        raise broken(
            file, f"it is GGUF version {version}, {spoken} can be read", "use a file of one of those"
        )
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise broken(file, f"it claims to hold {tensors:,} tensors and {keys:,} metadata keys")
    return version, tensors, keys


def _value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("I")
    if kind == _STRING:
        return cursor.text_or_skip(f"the value of {key}")
    if kind in _NUMBERS:
        return cursor.numbers(kind, 1, key)[0]
    if kind != _ARRAY:
        raise broken(cursor.file, f"the value of {key} is of the unknown type {kind}")
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        cursor.skip_strings(count, key)
        return GgufArray(count, strings=True)
    if kind not in _NUMBERS:
        raise broken(cursor.file, f"the value of {key} is an array of the unknown type {kind}")
    if count <= MAX_NUMBERS:
        return cursor.numbers(kind, count, key)
    cursor.skip(count * struct.calcsize("<" + _NUMBERS[kind]), f"the {count:,} numbers of {key}")
    return GgufArray(count, strings=False)


def _alignment(metadata: Mapping[str, Value], file: str) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise broken(file, f"its alignment is {alignment!r}, which isn't a power of two")
    return alignment


def _tensor(cursor: _Cursor, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, offset from the start of the data, bytes."""
    file, dimensions = cursor.file, cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise broken(file, f"tensor {name!r} has {dimensions:,} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in _types():
        raise broken(
            file,
            f"tensor {name!r} is of the unknown type {number}",
            "a newer gguf may know it: pip install -U gguf",
        )
    kind, block, block_bytes = _types()[number]
    if shape[-1] % block:
        raise broken(
            file, f"tensor {name!r} has rows of {shape[-1]:,}, which {kind}'s blocks of {block} don't divide"
        )
    if offset % alignment:
        raise broken(file, f"tensor {name!r} lies at {offset:,}, which isn't a multiple of {alignment}")
    return kind, shape, offset, prod(shape) // block * block_bytes


@cache
def _types() -> Mapping[int, tuple[str, int, int]]:
    """ggml's numbers of types: name, numbers in a block, bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _check_extents(tensors: Mapping[str, GgufTensor], file: str, size: int) -> None:
    end, before = 0, ""
    for offset, nbytes, name in in_order((one.offset, one.nbytes, name) for name, one in tensors.items()):
        if offset < end:
            raise broken(file, f"tensors {before!r} and {name!r} overlap")
        end, before = offset + nbytes, name
    if end > size:
        raise broken(file, f"it is truncated: {size:,} of at least {end:,} bytes are there")


class _Cursor:
    """Reads forward, never past `end` (of the file, or of what a header may take)."""

    def __init__(self, data: memoryview, file: str, end: int) -> None:
        self.data, self.file, self.end = data, file, end
        self.at = 0
        self._strings = self._kept = self._numbers = 0

    def _step(self, length: int, what: str) -> int:
        """Where the next `length` bytes begin; the cursor is then behind them."""
        start, self.at = self.at, self.at + length
        if self.at > self.end:
            limit = (
                "its end" if self.end < MAX_HEADER_BYTES else f"the {self.end:,} bytes that a header may have"
            )
            raise broken(self.file, f"{what} at byte {start:,} would reach {self.at:,}, beyond {limit}")
        if self.at > len(self.data):
            raise HeaderGoesOn(f"the header of {self.file} goes on behind its first {len(self.data):,} bytes")
        return start

    def skip(self, length: int, what: str) -> None:
        self._step(length, what)

    def number(self, code: str) -> int:
        start = self._step(struct.calcsize("<" + code), "a number")
        return int(struct.unpack_from("<" + code, self.data, start)[0])

    def numbers(self, kind: int, count: int, key: str) -> tuple[Number, ...]:
        """kind: the format's number of a type of numbers. At most MAX_NUMBERS."""
        self._numbers += count
        if self._numbers > MAX_KEPT_NUMBERS:
            raise broken(self.file, f"its metadata has more than {MAX_KEPT_NUMBERS:,} numbers in short lists")
        code = f"<{count}{_NUMBERS[kind]}"
        start = self._step(struct.calcsize(code), f"the value of {key}")
        found = struct.unpack_from(code, self.data, start)
        if kind != _BOOL:
            return found
        if not set(found) <= {0, 1}:
            raise broken(self.file, f"the value of {key} is neither true nor false")
        return tuple(map(bool, found))

    def text(self, what: str, most: int) -> str:
        length = self.number("Q")
        if length > most:
            raise broken(self.file, f"{what} at byte {self.at:,} claims to be {length:,} bytes long")
        start = self._step(length, what)
        raw = bytes(self.data[start : self.at])
        self._kept += length if raw.isascii() else 4 * length  # Python's own size of a text
        if self._kept > MAX_TEXTS_BYTES:
            raise broken(
                self.file, f"its metadata has more than {MAX_TEXTS_BYTES:,} bytes of names and texts"
            )
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise broken(self.file, f"{what} at byte {start:,} isn't text in UTF-8") from None

    def text_or_skip(self, what: str) -> str | GgufArray:
        length = self.number("Q")
        if length > MAX_TEXT_BYTES:
            self._step(length, what)
            return GgufArray(length, strings=False)
        self.at -= 8
        return self.text(what, MAX_TEXT_BYTES)

    def skip_strings(self, count: int, key: str) -> None:
        what = f"the {count:,} strings of {key}"
        self._strings += count
        if self._strings > MAX_STRINGS or self.at + 8 * count > self.end:
            raise broken(self.file, f"{what} are more than its bytes can hold")
        unpack, data, at, end = (
            struct.Struct("<Q").unpack_from,
            self.data,
            self.at,
            min(self.end, len(self.data)),
        )
        for _ in range(count):
            if at + 8 > end:
                at += 8  # what is missing at least
                break
            at += 8 + unpack(data, at)[0]
        self._step(at - self.at, what)
