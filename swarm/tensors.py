"""Tensors as they travel: raw little-endian bytes with a dtype and a shape, no torch.

Invariant: `len(data)` is exactly what dtype and shape say, and the dtype is on the allow-list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.errors import MessageError

# Everything a step or a file transfer needs and nothing that could carry objects.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
MAX_DIMENSIONS = 4  # hidden states need two, a batch of anything foreseeable four


@dataclass(frozen=True, slots=True)
class RawTensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        if len(self.data) != tensor_bytes(self.dtype, self.shape):
            raise MessageError(
                f"tensor {self.dtype}{list(self.shape)} needs {tensor_bytes(self.dtype, self.shape)} bytes, "
                f"got {len(self.data)}"
            )


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that such a tensor takes. Raises MessageError on an unknown dtype or absurd shape."""
    if dtype not in ITEM_BYTES:
        raise MessageError(f"tensor dtype {dtype!r} is not one of {sorted(ITEM_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or any(side < 0 or side > 1 << 31 for side in shape):
        raise MessageError(f"tensor shape {list(shape)} is out of bounds")
    return math.prod(shape) * ITEM_BYTES[dtype]


def ids_tensor(ids: list[int] | tuple[int, ...]) -> RawTensor:
    """Token ids, shape [n], int32."""
    return RawTensor("int32", (len(ids),), np.asarray(ids, dtype="<i4").tobytes())


def floats_tensor(values: Sequence[float]) -> RawTensor:
    """Shape [n], float32."""
    return RawTensor("float32", (len(values),), np.asarray(values, dtype="<f4").tobytes())


def read_floats(tensor: RawTensor) -> list[float]:
    """The reverse of `floats_tensor`. Raises MessageError unless float32 [n]; NaN is the caller's to refuse."""
    if tensor.dtype != "float32" or len(tensor.shape) != 1:
        raise MessageError(f"numbers travel as float32 [n], got {tensor.dtype}{list(tensor.shape)}")
    values: list[float] = np.frombuffer(tensor.data, dtype="<f4").tolist()
    return values


def read_ids(tensor: RawTensor) -> list[int]:
    """The reverse of `ids_tensor`. Raises MessageError unless int32 [n] without negatives.

    A list of 100,000 takes milliseconds: whoever only wants to know whether they are right calls `check_ids`.
    """
    ids: list[int] = _ids(tensor).tolist()
    return ids


def check_ids(tensor: RawTensor, vocab: int) -> None:
    """Raises MessageError unless int32 [n], each from 0 up to below `vocab`."""
    ids = _ids(tensor)
    if ids.size and int(ids.max()) >= vocab:
        raise MessageError(f"token id {int(ids.max())} is beyond the vocabulary of {vocab}")


def _ids(tensor: RawTensor) -> npt.NDArray[np.int32]:
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        raise MessageError(f"token ids travel as int32 [n], got {tensor.dtype}{list(tensor.shape)}")
    ids: npt.NDArray[np.int32] = np.frombuffer(tensor.data, dtype="<i4")
    if ids.size and int(ids.min()) < 0:
        raise MessageError(f"negative token id {int(ids.min())}")
    return ids
