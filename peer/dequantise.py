"""Published 8-bit and 4-bit numbers into the dtype that a span computes in.

A weight is its stored number times the scale of its block. Both products are taken in float32 and rounded once,
to the goal's dtype: an mxfp4 number is exact in bfloat16 too (an e2m1 number and a power of two,
OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1), an fp8 one is what transformers gets with `dequantize=True`.

Invariant: rows are done in pieces, on the device where they will stay if it can compute with them; no whole
tensor exists in a third form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

# read(first, last) -> bytes of the rows [first, last), in memory of their own
Rows = Callable[[int, int], Tensor]

# rows of a piece are chosen so that its float32 form stays below this
PIECE_BYTES = 8 << 20
# of a matrix that has to be turned: torch's transposing copy is twice as fast where source and goal stay in the cache
TURNED_ROWS = 128

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same with the sign bit, 8
GROUP = 32  # numbers that share a scale
EXPONENT_BIAS, NO_NUMBER = 127, 255  # of an e8m0 scale


def exponents(raw: Tensor) -> Tensor:
    """e8m0 scales (uint8) as the float32 powers of two that they are; 255 is NaN."""
    return _powers_of_two()[raw.int()]


def fill_fp8(goal: Tensor, read: Rows, scales: Tensor, block: tuple[int, int]) -> None:
    """goal: [rows, columns]. read: uint8 [rows, columns], e4m3. scales: float32, one for each block.

    A block's last row or column may lie beyond the matrix (576 rows of DeepSeek-V3's kv_a_proj in blocks of 128).
    """
    rows, columns = goal.shape
    work = _where(goal)
    grid = scales.reshape(-(-rows // block[0]), -(-columns // block[1])).to(work)
    wide = grid.repeat_interleave(block[1], 1)[:, :columns] if block[1] < columns else grid
    table = _e4m3().to(work)
    for first, last in _pieces(rows, columns, rows):
        numbers = _look_up(table, read(first, last).to(work)).view(last - first, columns)
        at = torch.arange(first, last, device=work) // block[0]
        goal[first:last].copy_(numbers.mul_(wide[at]))


def fill_mxfp4(goal: Tensor, read: Rows, scales: Tensor) -> None:
    """goal: [in, out], a matrix that is stored the other way round. read: uint8 [rows, in / 2], two numbers a byte,
    the low half first. scales: float32 [out, in / 32]."""
    columns, rows = goal.shape
    work = _where(goal)
    scales, table = scales.to(work), _e2m1_pairs().to(work)
    for first, last in _pieces(rows, columns, TURNED_ROWS):
        numbers = (
            _look_up(table, read(first, last).to(work)).view(torch.float32).view(last - first, -1, GROUP)
        )
        numbers *= scales[first:last, :, None]
        goal[:, first:last].copy_(numbers.view(last - first, columns).T)


def _where(goal: Tensor) -> torch.device:
    """CUDA has every type that is needed here; others may not."""
    return goal.device if goal.device.type == "cuda" else torch.device("cpu")


def _pieces(rows: int, columns: int, most: int) -> list[tuple[int, int]]:
    step = max(1, min(most, PIECE_BYTES // (4 * max(1, columns))))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Three times as fast as torch's own conversion of float8, on a CPU."""
    return torch.index_select(table, 0, codes.flatten().int())


@lru_cache(maxsize=1)
def _powers_of_two() -> Tensor:
    """[256]. By Python: torch's exp2 is not exact everywhere."""
    powers = [2.0 ** (exponent - EXPONENT_BIAS) for exponent in range(NO_NUMBER)]
    return torch.tensor([*powers, float("nan")], dtype=torch.float64).to(torch.float32)


@lru_cache(maxsize=1)
def _e4m3() -> Tensor:
    """[256] the number of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@lru_cache(maxsize=1)
def _e2m1_pairs() -> Tensor:
    """[256] the two float32 numbers of each byte, as eight bytes that are looked up at once."""
    signed = torch.tensor([*E2M1, *(-number for number in E2M1)])
    byte = torch.arange(256)
    return torch.stack([signed[byte & 15], signed[byte >> 4]], dim=1).view(torch.float64).flatten()
