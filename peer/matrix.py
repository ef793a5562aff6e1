"""A matrix of a model and the product with it, also where its numbers are held in fewer bits than are computed with.

A model published in bfloat16 that is computed in float32 needs no float32 in memory: widening is exact, and costs less
than reading twice the bytes. Where few tokens go through, the compiled loops widen each number as they read it; here,
for everything else, a piece of the matrix at a time is widened into memory that the next piece overwrites.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of a widened piece at most. Rows too few make slow products: two cores, 1,024 tokens, [2048, 8192]: 1.14 times what it
# takes without widening in pieces of 256 rows, 1.08 in pieces of 1,024; [16384, 2048] in pieces of 1,024: 1.0. All of
# it at once leaves the caches: 1.25 times with 256 tokens.
PIECE_ROWS, PIECE_BYTES = 1024, 32 << 20


@dataclass(frozen=True, slots=True)
class Matrix:
    """weight: [out, in], of the dtype that is computed in or a narrower one; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """x: [n, in], out: [n, out]."""
        if self.weight.dtype != x.dtype:
            for columns, piece in self._widened(x.dtype):
                piece.into(x, out[:, columns])
            return out
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def added_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """sums: [n, out], to which the product with x: [n, in] is added in place."""
        if self.weight.dtype != x.dtype:
            for columns, piece in self._widened(x.dtype):
                piece.added_to(sums[:, columns], x)
            return sums
        sums.addmm_(x, self.weight.t())
        return sums if self.bias is None else sums.add_(self.bias)

    def _widened(self, dtype: torch.dtype) -> Iterator[tuple[slice, Matrix]]:
        """Runs of rows, each until the next one is asked for, and where in the output they belong."""
        rows, width = self.weight.shape
        step = max(1, min(PIECE_ROWS, PIECE_BYTES // (width * dtype.itemsize)))
        room = _room(min(step, rows) * width, dtype).view(-1, width)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            weight = room[: part.stop - start].copy_(self.weight[part])
            yield part, Matrix(weight, None if self.bias is None else self.bias[part])


_rooms = threading.local()


def _room(count: int, dtype: torch.dtype) -> Tensor:
    """[count], the same memory for all products of a thread: new memory each time costs more than the widening."""
    room: Tensor | None = getattr(_rooms, "last", None)
    if room is None or len(room) < count or room.dtype != dtype:
        with torch.inference_mode(False):  # so that it can be written in that mode and outside of it
            room = _rooms.last = torch.empty(count, dtype=dtype)
    return room[:count]


class WideningLinear(nn.Linear):
    """An nn.Linear whose weight is narrower than its input."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.empty(len(flat), len(self.weight), dtype=x.dtype, device=x.device)
        return Matrix(self.weight, self.bias).into(flat, out).view(*x.shape[:-1], -1)


class _WideningEmbedding(nn.Embedding):
    """An nn.Embedding whose weight is narrower than what is computed with."""

    dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).to(self.dtype)


LINEAR = (nn.Linear, WideningLinear)  # and no subclass: nobody knows what it does with its weight
WIDENING: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WideningLinear, nn.Embedding: _WideningEmbedding}


def widen_as_read(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the modules of `model` whose matrices are narrower than `dtype` compute in it all the same."""
    for module in model.modules():
        widening = WIDENING.get(type(module))
        if widening is not None and module.weight.dtype.itemsize < dtype.itemsize:
            module.__class__, module.dtype = widening, dtype
