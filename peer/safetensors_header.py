"""The header of a safetensors file: which tensors it holds and where, without reading any of them.

Layout (https://huggingface.co/docs/safetensors/index#format): 8 bytes little-endian length N, N bytes of
JSON, then the tensors' bytes, in order and without a hole. Invariant: a header that is accepted describes
exactly the bytes that the file has, so that no later read can run past its end; and whatever it holds, reading it
takes less than 64 MiB (`JsonCursor`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from peer.checkpoint import TensorSpec, broken, in_order
from peer.json_cursor import JsonCursor
from swarm.errors import BrokenModel

# Far above what is shared (19,000 tensors of a mixture of experts in one file: 2.5 MB), far below the 100 MB that
# the format allows.
MAX_HEADER_BYTES = 12 << 20
MAX_TENSORS = 65_536  # in one file; each takes half a kilobyte here
MAX_NAME = 1024  # characters, as are the next two
MAX_ENTRY = 1024  # of what is said of one tensor
MAX_METADATA = 1 << 20  # a training script's are some hundred thousand
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 62  # elements or bytes: JSON's numbers have no end, and 4,000 digits times 4,000 digits take seconds
METADATA = "__metadata__"
_LENGTH_BYTES = 8
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

Read = Callable[[int, int], bytes]  # bytes [start, stop) of a file; fewer where it ends


@dataclass(frozen=True, slots=True)
class Header:
    """starts: of each tensor the place of its first byte, from the beginning of the file."""

    tensors: dict[str, TensorSpec]
    starts: dict[str, int]


def read_header(path: Path, file: str) -> Header:
    """Of a local file. `file` is how its TensorSpecs name it. Raises BrokenModel."""
    try:
        with path.open("rb") as stream:
            return parse_header(stream, file)
    except OSError as error:
        raise broken(file, f"it can't be read ({error.strerror or error})") from error


def parse_header(stream: BinaryIO, file: str) -> Header:
    """Of an open file, from its beginning. Raises BrokenModel, or OSError."""

    def read(start: int, stop: int) -> bytes:
        stream.seek(start)
        return stream.read(stop - start)

    return parse(read, os.fstat(stream.fileno()).st_size, file)


def parse(read: Read, size: int, file: str) -> Header:
    """Of a file of `size` bytes, wherever it is. Raises BrokenModel, or what `read` does."""
    length = int.from_bytes(_exactly(read, 0, _LENGTH_BYTES, file, size), "little")
    tensors, starts = _described(_members(_text(read, length, file, size), file), file)
    data = _LENGTH_BYTES + length
    expected = data + sum(spec.nbytes for spec in tensors.values())
    if size < expected:
        raise broken(file, f"it is truncated: {size:,} of {expected:,} bytes are there")
    if size > expected:
        raise broken(file, f"it has {size:,} bytes where its header describes {expected:,}")
    return Header(tensors, {name: data + start for name, start in starts.items()})


def _text(read: Read, length: int, file: str, size: int) -> str:
    if length > MAX_HEADER_BYTES:
        raise broken(
            file,
            f"its header would be {length:,} bytes long, {MAX_HEADER_BYTES:,} are accepted; "
            "it is damaged, or it isn't a safetensors file",
        )
    raw = _exactly(read, _LENGTH_BYTES, _LENGTH_BYTES + length, file, size)
    if not raw.isascii() and 4 * length > MAX_HEADER_BYTES:  # such text takes Python four bytes a character
        raise broken(file, f"its header of {length:,} bytes isn't all ASCII; write it with shorter metadata")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _not_json(file) from None


def _not_json(file: str) -> BrokenModel:
    return broken(file, "its header isn't JSON as a safetensors file has it")


def _wrong(file: str, name: str) -> BrokenModel:
    return broken(file, f"its header describes tensor {name!r} wrongly")


def _members(text: str, file: str) -> Iterator[tuple[str, object]]:
    """The members of the one object that `text` is, but for the metadata, which nothing here uses."""
    cursor = JsonCursor(text, partial(_not_json, file))
    for name in cursor.names(MAX_NAME):
        if name == METADATA:
            _step_over_metadata(cursor, file)
        else:
            yield name, cursor.value(MAX_ENTRY)
    cursor.end()


def _step_over_metadata(cursor: JsonCursor, file: str) -> None:
    """An object of texts."""
    end = cursor.at + MAX_METADATA
    for _ in cursor.names(MAX_NAME):
        cursor.string(MAX_METADATA)
        if cursor.at > end:
            raise broken(file, f"its metadata has more than {MAX_METADATA:,} characters")


def _exactly(read: Read, start: int, stop: int, file: str, size: int) -> bytes:
    data = read(start, stop) if stop <= size else b""  # a damaged length allocates nothing
    if len(data) < stop - start:
        raise broken(file, f"it is truncated: its {size:,} bytes end within the header")
    return data


def _described(
    members: Iterable[tuple[str, object]], file: str
) -> tuple[dict[str, TensorSpec], dict[str, int]]:
    """The tensors, and of each its first byte, counted from the end of the header. Raises BrokenModel."""
    extents: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorSpec] = {}
    for name, entry in members:
        if name in tensors:
            raise broken(file, f"its header describes tensor {name!r} twice")
        if len(tensors) >= MAX_TENSORS:
            raise broken(file, f"it holds over {MAX_TENSORS:,} tensors; save the model in several files")
        tensors[name], (start, stop) = _tensor(name, entry, file)
        extents.append((start, stop, name))
    end, before = 0, "the header"
    for start, stop, name in in_order(extents):
        if start != end:
            fault = f"overlaps {before}" if start < end else f"leaves a gap after {before}"
            raise broken(
                file,
                f"tensor {name!r} starts at byte {start:,} of the data and {fault}, which ends at {end:,}",
            )
        end, before = stop, f"tensor {name!r}"
    return tensors, {name: start for start, _, name in extents}


def merged(files: Iterable[Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """The tensors of a model's files together. Raises BrokenModel when two files have the same one."""
    tensors: dict[str, TensorSpec] = {}
    for file in files:
        for name, spec in file.items():
            if name in tensors:
                raise BrokenModel(
                    f"tensor {name} is in {tensors[name].file} and in {spec.file}, and which one counts isn't said; "
                    "fetch both files again"
                )
            tensors[name] = spec
    return tensors


def _tensor(name: str, entry: object, file: str) -> tuple[TensorSpec, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        sound = isinstance(dtype, str) and len(shape) <= MAX_DIMENSIONS
        sound = sound and all(_is_size(n) for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise _wrong(file, name)
    if dtype not in _BITS:
        raise broken(file, f"tensor {name!r} is of type {dtype!r}, which the format doesn't have")
    nbytes = stop - start
    if nbytes * 8 != math.prod(shape) * _BITS[dtype]:
        raise broken(
            file, f"tensor {name!r} is {dtype} {list(shape)}, which doesn't fit its {nbytes:,} bytes"
        )
    return TensorSpec(dtype, tuple(shape), nbytes, file), (start, stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE
