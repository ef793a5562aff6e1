"""Layers in compiled loops on a CPU: what of the model and its sessions they are given, and which steps they take.

`kernels.py` knows addresses; here they are taken from tensors that are kept alive. Steps of so few tokens that reading
the weights is what takes time run there as a whole, in one call unless others are let in between layers. Longer ones
are products of matrices, which torch does best, and only what is done to each token's row is compiled. Where there is
no numba, or it can't compile, everything runs on torch's operations (`prepare`).

A process that has run this must not fork and go on here: GNU OpenMP ends such a child.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import Tensor

from peer.attention import Row
from peer.pace import DECODE_TOKENS

if TYPE_CHECKING:
    from peer.fused import Layer, Norm
    from peer.matrix import Matrix
    from peer.model import PackedStep

log = logging.getLogger(__name__)

# What matrices are held as, and what is computed in.
FLOAT32, BFLOAT16, WIDENED = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)
# Most tokens of a step, where layers are thin and where they are thick. Two cores with AMX, sessions of a token each,
# parts of the time on torch's operations. SmolLM2 (3.5M weights in a layer): in float32 0.7 with 1, 16 and 32, 0.8 with
# 64; in bfloat16 0.6, 0.8, 1.0 and 1.0. The 1B shape (61M): in float32 0.6 with 4, 0.9 with 16, 1.3 with 48; in
# bfloat16 1.0 with 4, 1.2 with 8, 1.7 with 16, but where torch may not use AMX 0.35, 0.33 and 0.32. Where float32 is
# computed with matrices in bfloat16, which torch is given a widened piece at a time (`matrix.py`): 0.4 with 16 and 0.9
# with 64, thin and thick, 1.2 with 128 in thick layers.
MOST_TOKENS = {FLOAT32: (64, 24), BFLOAT16: (24, 4), WIDENED: (64, 64)}
WITHOUT_AMX = MOST_TOKENS | {BFLOAT16: (24, 24)}
THICK = 16_000_000  # weights of a layer
# Where a prompt's piece ends at most. With 16 tokens from position 60, 1,000 and 4,000 on: in float32 0.8, 1.0 and 1.1
# of torch's time, in bfloat16 1.0, 1.5 and 2.5.
NEAR = {torch.float32: 1024, torch.bfloat16: 64}
FloatArray = npt.NDArray[np.float32]
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}
PATIENCE_S = 120.0  # for another process that compiles; it takes a quarter of a minute, unless it was stopped
# One pass at a time in a process: not each of numba's ways to run threads may be entered by two of ours.
_ENTERED = threading.Lock()


@cache
def prepare(weight_dtype: torch.dtype, dtype: torch.dtype) -> ModuleType | None:
    """The kernels, compiled for a model that computes in `dtype` with matrices held as `weight_dtype`: a quarter of a
    minute once on a machine, then numba remembers. None where that can't be, with a line in the log."""
    if (weight_dtype, dtype) not in MOST_TOKENS:
        return None
    try:
        from peer import kernels

        kept = Path(kernels.run_layers.stats.cache_path)
        with _alone(kept / "kernels.lock"):
            try:
                _warm(kernels, NUMPY[weight_dtype], NUMPY[dtype])
            except Exception:  # what was kept is damaged, mostly
                for file in kept.glob("kernels.*.nb[ic]"):
                    file.unlink(missing_ok=True)
                _warm(kernels, NUMPY[weight_dtype], NUMPY[dtype])
    except Exception as error:  # whatever it is, there is another way
        _tell((str(error).splitlines() or ["no reason given"])[0])
        return None
    return kernels


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Of peers that start together one compiles, and the others wait for it; but not for ever."""
    lock = FileLock(path)
    with suppress(Timeout):
        lock.acquire(timeout=PATIENCE_S)
    try:
        with _ENTERED:
            yield
    finally:
        lock.release()


@cache
def _tell(reason: str) -> None:
    """Once, for however many dtypes."""
    log.warning(
        "decoding runs on torch's own operations, more slowly: loops can't be compiled here (%s); "
        "pip install numba, or let NUMBA_CACHE_DIR name a directory that can be written",
        reason,
    )


def _warm(kernels: ModuleType, weight_dtype: Any, kv_dtype: Any) -> None:
    """One token through one layer of nothing: whatever takes these types is compiled, or read from numba's cache."""
    dim = 4
    weights = np.zeros(1024, np.uint8)
    address = weights.ctypes.data
    layers = np.zeros((1, kernels.LAYER_COLUMNS), np.int64)
    layers[:, list(kernels.WEIGHTS)] = address
    places = np.array([[[address, address, 1, 0, 0]]])
    scratch = _Scratch(dim, heads=1, kv_heads=1, dim=dim, inner=dim)
    x, table, numbers = np.zeros((1, dim), np.float32), np.zeros((1, dim), np.float32), np.ones((1, 5), np.float32)
    kernels.run_layers(
        weight_dtype, kv_dtype, 1, layers, numbers, places, x, table, table, 1, 1, *scratch.of(1)
    )
    kernels.run_head(weight_dtype, 1, address, np.float32(1), address, 0, x, table)
    rows = np.zeros((1, 2 * dim), kv_dtype)
    kernels.norm_rows(1, rows, address, np.float32(1), rows)
    kernels.rotate_rows(1, rows.reshape(1, 2, dim), 1, 1, 0, np.float32(1), 0, np.float32(1), x, table)
    kernels.gate_rows(1, rows, np.zeros((1, dim), kv_dtype))


class _Scratch:
    """Where a pass puts what lies between its products; nothing in it outlives a layer."""

    def __init__(self, width: int, *, heads: int, kv_heads: int, dim: int, inner: int) -> None:
        self._shapes = [(width,), (heads + 2 * kv_heads, dim), (heads, dim), (2 * inner,), (inner,)]
        self._arrays = self._make(1)

    def _make(self, tokens: int) -> list[FloatArray]:
        return [np.empty((tokens, *shape), np.float32) for shape in self._shapes]

    def of(self, tokens: int) -> list[FloatArray]:
        if tokens > len(self._arrays[0]):
            self._arrays = self._make(tokens)
        return [array[:tokens] for array in self._arrays]


class CompiledSpan:
    """Layers, and a model's end, as `kernels.py` takes them. Their tensors are kept alive here. Made by `compile_span`.

    end: the norm and the head after the last layer, where the span has them. dtype: what the model computes in.
    """

    def __init__(
        self, kernels: ModuleType, layers: list[Layer], end: tuple[Norm, Matrix] | None, dtype: torch.dtype
    ) -> None:
        self._kernels, self._alive = kernels, list[Tensor]()
        first = layers[0]
        weight_dtype, width = first.qkv.weight.dtype, first.qkv.weight.shape[1]
        self._dtype, self._weight_dtype, self._kv_dtype = dtype, NUMPY[weight_dtype], NUMPY[dtype]
        self._most = _most_tokens(first, dtype, amx=kernels.HAS_AMX)
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._layers = np.array([self._addresses(layer) for layer in layers], np.int64)
        self._numbers = np.array([_numbers(layer) for layer in layers], np.float32)
        self._end = None if end is None else (self._norm(end[0]), np.float32(end[0].eps), *self._matrix(end[1]))
        self._vocab = 0 if end is None else len(end[1].weight)
        sizes = {"heads": first.heads, "kv_heads": first.kv_heads, "dim": first.dim}
        self._scratch = _Scratch(width, **sizes, inner=first.down.weight.shape[1])

    def _addresses(self, layer: Layer) -> list[int]:
        """In the order of the kernels' columns."""
        heads_norms = map(self._norm, (layer.q_norm, layer.k_norm))
        attention = [self._norm(layer.attention_norm), *self._matrix(layer.qkv), *heads_norms, *self._matrix(layer.out)]
        mlp = [self._norm(layer.mlp_norm), *self._matrix(layer.gate_up), *self._matrix(layer.down)]
        return attention + mlp

    def _matrix(self, matrix: Matrix) -> tuple[int, int]:
        bias = None if matrix.bias is None else matrix.bias.detach().float().contiguous()
        return self._address(matrix.weight), 0 if bias is None else self._address(bias)

    def _norm(self, norm: Norm | None) -> int:
        return 0 if norm is None else self._address(norm.wide)

    def _address(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()

    def takes(self, step: PackedStep) -> bool:
        return sum(row.tokens for row in step.rows) <= self._most and all(map(self._takes_row, step.rows))

    def _takes_row(self, row: Row) -> bool:
        """Not what a window would have to be moved for in the middle (`LayerStore.pieces`), and of prompts only those
        whose attention is little beside their products."""
        if row.cache.chunk is not None and row.tokens > row.cache.chunk:
            return False
        return row.tokens <= DECODE_TOKENS or row.position + row.tokens <= NEAR[self._dtype]

    def layers(self, step: PackedStep, start: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What comes out of the step's layers, the first of which is number `start` of this span's. KV is written.

        x: [n, width]. cos, sin: [n, dim] of the rotary table.
        """
        n, count = len(x), len(step.span)
        _check_table(cos, sin, self._dim)
        places = np.concatenate([row.cache.places(step.span, row.position, row.tokens) for row in step.rows], axis=1)
        if not places.shape[1] == n == len(cos):
            raise ValueError(f"{n} tokens with places for {places.shape[1]} and rotary positions for {len(cos)}")
        if any(row.cache.layers[0].keys.dtype != self._dtype for row in step.rows):
            raise ValueError(f"keys and values that aren't {self._dtype}")
        made, rotary = x.to(torch.float32, copy=True), (_float_array(cos), _float_array(sin))
        at_once = count if step.between is None else 1
        for first in range(0, count, at_once):
            if first and step.between is not None:
                step.between()  # may run other steps here
            here, scratch = slice(start + first, start + first + at_once), self._scratch.of(n)
            with _ENTERED:
                self._kernels.run_layers(
                    self._weight_dtype, self._kv_dtype, _threads(), self._layers[here], self._numbers[here],
                    places[first : first + at_once], made.numpy(), *rotary, self._heads, self._kv_heads, *scratch,
                )  # fmt: skip
        return made.to(self._dtype)

    def attended(self, n: int) -> list[Tensor]:
        """The queries, keys and values of the last layer of the last step, which had n tokens: [1, heads, n, dim]."""
        states = torch.from_numpy(self._scratch.of(n)[1].copy()).transpose(0, 1)[None]
        keys = self._heads + self._kv_heads
        return [states[:, : self._heads], states[:, self._heads : keys], states[:, keys:]]

    def takes_logits(self, n: int) -> bool:
        """Whether so many tokens' logits are made here, also where the layers ran elsewhere."""
        return n <= self._most

    def logits(self, x: Tensor) -> Tensor:
        """x: [m, width] after the last layer -> [m, vocab] float32."""
        assert self._end is not None
        made = torch.empty(len(x), self._vocab)
        with _ENTERED:
            wide = x.float().contiguous().numpy()
            self._kernels.run_head(self._weight_dtype, _threads(), *self._end, wide, made.numpy())
        return made


def _most_tokens(layer: Layer, dtype: torch.dtype, *, amx: bool) -> int:
    thin, thick = (MOST_TOKENS if amx else WITHOUT_AMX)[layer.qkv.weight.dtype, dtype]
    weights = sum(matrix.weight.numel() for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return thick if weights > THICK else thin


def _numbers(layer: Layer) -> list[float]:
    norms = (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
    return [*(0.0 if norm is None else norm.eps for norm in norms), layer.scaling]


def _threads() -> int:
    """As many as torch has in this thread."""
    from numba import config, set_num_threads

    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    set_num_threads(threads)
    return threads


class CompiledRows:
    """What `fused.TorchRows` does, in loops that read and write each number once."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[FloatArray, FloatArray]:
        return _float_array(cos), _float_array(sin)

    def norm(self, norm: Norm, x: Tensor, out: Tensor) -> Tensor:
        with _ENTERED:
            self._kernels.norm_rows(_threads(), _array(x), norm.wide.data_ptr(), np.float32(norm.eps), _array(out))
        return out

    def rotate(self, layer: Layer, states: Tensor, rotary: tuple[FloatArray, FloatArray], out: Tensor) -> Tensor:
        rotated = layer.heads + layer.kv_heads
        _check_table(*rotary, layer.dim)
        norms = list[Any]()
        for norm in (layer.q_norm, layer.k_norm):
            norms += [0, np.float32(0)] if norm is None else [norm.wide.data_ptr(), np.float32(norm.eps)]
        with _ENTERED:
            self._kernels.rotate_rows(_threads(), _array(states), layer.heads, rotated, *norms, *rotary)
        return states[:, :rotated]

    def gate(self, layer: Layer, gate_up: Tensor, out: Tensor) -> Tensor:
        with _ENTERED:
            self._kernels.gate_rows(_threads(), _array(gate_up), _array(out))
        return out


def _check_table(cos: Tensor | FloatArray, sin: Tensor | FloatArray, dim: int) -> None:
    """Raises ValueError where only a part of each head is rotated: the loops would read on behind the table."""
    if not cos.shape[-1] == sin.shape[-1] == dim:
        raise ValueError(f"a rotary table of {cos.shape[-1]} for heads of {dim}")


def _float_array(tensor: Tensor) -> FloatArray:
    return tensor.to(torch.float32).contiguous().numpy()


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """As the kernels know the dtype; shares memory."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


def compile_span(
    layers: list[Layer], end: tuple[Norm, Matrix] | None, dtype: torch.dtype
) -> tuple[CompiledRows, CompiledSpan] | None:
    """For a model that computes in `dtype`. None where this machine or this model's shape isn't one for it."""
    first = layers[0].qkv.weight
    if first.device.type != "cpu" or layers[0].dim % 2 or any(layer.act is not F.silu for layer in layers):
        return None
    if not all(_has_its_shapes(layer, first.shape[1]) for layer in layers):
        return None
    matrices = [matrix for layer in layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    if end is not None:
        norm, head = end
        if norm.weight.shape != (first.shape[1],) or head.weight.shape[1] != first.shape[1]:
            return None
        matrices.append(head)
    if not all(_can_be_read(matrix, first.dtype) for matrix in matrices):
        return None
    kernels = prepare(first.dtype, dtype)
    return None if kernels is None else (CompiledRows(kernels), CompiledSpan(kernels, layers, end, dtype))


def _has_its_shapes(layer: Layer, width: int) -> bool:
    """The loops take each from the others, and look at no bounds."""
    inner, queries = layer.down.weight.shape[1], layer.heads * layer.dim
    matrices = [
        (layer.qkv, (queries + 2 * layer.kv_heads * layer.dim, width)),
        (layer.out, (width, queries)),
        (layer.gate_up, (2 * inner, width)),
        (layer.down, (width, inner)),
    ]
    norms = [(norm, layer.dim) for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    norms += [(layer.attention_norm, width), (layer.mlp_norm, width)]
    shared = layer.kv_heads > 0 and layer.heads % layer.kv_heads == 0
    fits = all(matrix.weight.shape == shape for matrix, shape in matrices)
    return shared and fits and all(norm.weight.shape == (size,) for norm, size in norms)


def _can_be_read(matrix: Matrix, weight_dtype: torch.dtype) -> bool:
    """In one run, and by fours of bytes: two of bfloat16 at once."""
    weight, bias = matrix.weight, matrix.bias
    as_held = weight.dtype == weight_dtype and weight.is_contiguous() and weight.data_ptr() % 4 == 0
    return as_held and weight.shape[1] % 2 == 0 and (bias is None or bias.shape == weight.shape[:1])
