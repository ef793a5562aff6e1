"""The header of a safetensors file: which tensors it holds and where, without reading any of them.

Layout (https://huggingface.co/docs/safetensors/index#format): 8 bytes little-endian length N, N bytes of
JSON, then the tensors' bytes, in order and without a hole. Invariant: a header that is accepted describes
exactly the bytes that the file has, so that no later read can run past its end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from peer.checkpoint import TensorSpec
from swarm.errors import BrokenModel

# the format's own bound, which keeps a damaged length from allocating gigabytes
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


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
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(_exactly(stream, _LENGTH_BYTES, file, size), "little")
    if length > MAX_HEADER_BYTES:
        raise broken(
            file,
            f"its header would be {length:,} bytes long, the format allows {MAX_HEADER_BYTES:,}; "
            "it is damaged, or it isn't a safetensors file",
        )
    try:
        header = json.loads(_exactly(stream, length, file, size))
    except (ValueError, RecursionError):
        raise broken(file, "its header isn't JSON") from None
    tensors, starts = _described(header, file)
    data = _LENGTH_BYTES + length
    expected = data + sum(spec.nbytes for spec in tensors.values())
    if size < expected:
        raise broken(file, f"it is truncated: {size:,} of {expected:,} bytes are there")
    if size > expected:
        raise broken(file, f"it has {size:,} bytes where its header describes {expected:,}")
    return Header(tensors, {name: data + start for name, start in starts.items()})


def _exactly(stream: BinaryIO, count: int, file: str, size: int) -> bytes:
    data = stream.read(count) if count <= size else b""  # a damaged length allocates nothing
    if len(data) < count:
        raise broken(file, f"it is truncated: its {size:,} bytes end within the header")
    return data


def describe(header: object, file: str) -> dict[str, TensorSpec]:
    """The tensors that a decoded header lists. Raises BrokenModel on anything but a sound description."""
    return _described(header, file)[0]


def _described(header: object, file: str) -> tuple[dict[str, TensorSpec], dict[str, int]]:
    """The tensors, and of each its first byte, counted from the end of the header."""
    if not isinstance(header, Mapping):
        raise broken(file, "its header isn't a JSON object")
    extents: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorSpec] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], (start, stop) = _tensor(name, entry, file)
        extents.append((start, stop, name))
    end, before = 0, "the header"
    for start, stop, name in sorted(extents):
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
        sound = isinstance(dtype, str) and all(_is_size(n) for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise broken(file, f"its header describes tensor {name!r} wrongly")
    if dtype not in _BITS:
        raise broken(file, f"tensor {name!r} is of type {dtype!r}, which the format doesn't have")
    nbytes = stop - start
    if nbytes * 8 != math.prod(shape) * _BITS[dtype]:
        raise broken(
            file, f"tensor {name!r} is {dtype} {list(shape)}, which doesn't fit its {nbytes:,} bytes"
        )
    return TensorSpec(dtype, tuple(shape), nbytes, file), (start, stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def broken(file: str, why: str) -> BrokenModel:
    return BrokenModel(f"{file} can't be used: {why}; fetch or copy that file again")
