"""The header of a safetensors file: which tensors it holds, without reading any of them.

Layout (https://huggingface.co/docs/safetensors/index#format): 8 bytes little-endian length N, N bytes of
JSON, then the tensors' bytes, in order and without a hole. Invariant: a header that is accepted describes
exactly the bytes that the file has, so that no later read can run past its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from peer.checkpoint import TensorSpec
from swarm.errors import BrokenModel

# the format's own bound, which keeps a damaged length from allocating gigabytes
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header(path: Path, file: str) -> dict[str, TensorSpec]:
    """The tensors of a local file. `file` is how its TensorSpecs name it. Raises BrokenModel."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise broken(file, f"its {size:,} bytes end within the header, or it isn't a safetensors file")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except ValueError:
        raise broken(file, "its header isn't JSON") from None
    tensors = describe(header, file)
    expected = _LENGTH_BYTES + length + sum(spec.nbytes for spec in tensors.values())
    if size < expected:
        raise broken(file, f"it is truncated: {size:,} of {expected:,} bytes are there")
    if size > expected:
        raise broken(file, f"it has {size:,} bytes where its header describes {expected:,}")
    return tensors


def describe(header: object, file: str) -> dict[str, TensorSpec]:
    """The tensors that a decoded header lists. Raises BrokenModel on anything but a sound description."""
    if not isinstance(header, Mapping):
        raise broken(file, "its header isn't a JSON object")
    extents: list[tuple[int, int]] = []
    tensors: dict[str, TensorSpec] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], extent = _tensor(name, entry, file)
        extents.append(extent)
    end = 0
    for start, stop in sorted(extents):
        if start != end:
            raise broken(file, f"its tensors don't join at byte {end:,} of the data")
        end = stop
    return tensors


def _tensor(name: str, entry: object, file: str) -> tuple[TensorSpec, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        sound = isinstance(dtype, str) and all(_is_size(n) for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise broken(file, f"its header describes tensor {name!r} wrongly")
    nbytes = stop - start
    if dtype not in _BITS or nbytes * 8 != math.prod(shape) * _BITS[dtype]:
        raise broken(file, f"tensor {name!r} is {dtype} {shape}, which doesn't fit its {nbytes:,} bytes")
    return TensorSpec(dtype, tuple(shape), nbytes, file), (start, stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def broken(file: str, why: str) -> BrokenModel:
    return BrokenModel(f"{file} can't be used: {why}; fetch or copy that file again")
