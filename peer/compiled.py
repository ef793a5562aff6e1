"""A step of few tokens on a CPU in one call of compiled loops: what of the model and its sessions they are given.

`kernels.py` knows addresses; here they are taken from tensors that are kept alive, and it is decided which steps run
there: those of so few tokens that reading the weights is what takes time. Longer ones are products of matrices, which
torch does best. Where there is no numba, or it can't compile, everything runs on torch's operations (`prepare`).

A process that has run this must not fork and go on here: GNU OpenMP ends such a child.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

from peer.attention import Row
from peer.pace import DECODE_TOKENS

if TYPE_CHECKING:
    from peer.fused import Layer, Norm
    from peer.matrix import Matrix
    from peer.model import PackedStep

log = logging.getLogger(__name__)

# Most tokens of a step, where layers are thin and where they are thick. Two cores with AMX, sessions of a token each,
# parts of the time on torch's operations. SmolLM2 (3.5M weights in a layer): in float32 0.7 with 1, 16 and 32, 0.8 with
# 64; in bfloat16 0.6, 0.8, 1.0 and 1.0. The 1B shape (61M): in float32 0.6 with 4, 0.9 with 16, 1.3 with 48; in
# bfloat16 1.0 with 4, 1.2 with 8, 1.7 with 16, but where torch may not use AMX 0.35, 0.33 and 0.32. Where float32 is
# computed with matrices in bfloat16, which torch is given a widened piece at a time (`matrix.py`): 0.4 with 16 and 0.9
# with 64, thin and thick, 1.2 with 128 in thick layers.
FLOAT32, BFLOAT16, WIDENED = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)
MOST_TOKENS = {FLOAT32: (64, 24), BFLOAT16: (24, 4), WIDENED: (64, 64)}
WITHOUT_AMX = MOST_TOKENS | {BFLOAT16: (24, 24)}
THICK = 16_000_000  # weights of a layer
# Where a prompt's piece ends at most. With 16 tokens from position 60, 1,000 and 4,000 on: in float32 0.8, 1.0 and 1.1
# of torch's time, in bfloat16 1.0, 1.5 and 2.5.
NEAR = {torch.float32: 1024, torch.bfloat16: 64}
FloatArray = npt.NDArray[np.float32]
STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16}
# One pass at a time in a process: not each of numba's ways to run threads may be entered by two of ours.
_ENTERED = threading.Lock()


@cache
def prepare(dtype: torch.dtype, stored: torch.dtype | None = None) -> ModuleType | None:
    """The kernels, compiled for a model that computes in `dtype` with matrices that are `stored` so (None: the same): a
    quarter of a minute once on a machine, then numba remembers. None, with a line in the log, where that can't be."""
    stored = stored or dtype
    if not {dtype, stored} <= STORED.keys():
        return None
    try:
        from peer import kernels

        kept = Path(kernels.run_layers.stats.cache_path)
        with FileLock(kept / "kernels.lock"), _ENTERED:  # of peers that start together one compiles
            try:
                _warm(kernels, STORED[stored], STORED[dtype])
            except Exception:  # what was kept is damaged, mostly
                for file in kept.glob("kernels.*.nb[ic]"):
                    file.unlink(missing_ok=True)
                _warm(kernels, STORED[stored], STORED[dtype])
    except Exception as error:  # whatever it is, there is another way
        _tell((str(error).splitlines() or ["no reason given"])[0])
        return None
    return kernels


@cache
def _tell(reason: str) -> None:
    """Once, for however many dtypes."""
    log.warning(
        "decoding runs on torch's own operations, more slowly: loops can't be compiled here (%s); they are kept "
        "beside the program, or where NUMBA_CACHE_DIR says",
        reason,
    )


def _warm(kernels: ModuleType, stored: Any, kept: Any) -> None:
    """One token through one layer of nothing: whatever takes these types is compiled, or read from numba's cache."""
    dim = 4
    weights = np.zeros(1024, np.uint8)
    layers = np.zeros((1, kernels.LAYER_COLUMNS), np.int64)
    layers[:, list(kernels.WEIGHTS)] = weights.ctypes.data
    places = np.array([[[weights.ctypes.data, weights.ctypes.data, 1, 0, 0]]])
    scratch = _Scratch(1, dim, heads=1, kv_heads=1, dim=dim, inner=dim)
    x, turn, numbers = np.zeros((1, dim), np.float32), np.zeros((1, dim), np.float32), np.ones((1, 5), np.float32)
    kernels.run_layers(stored, kept, 1, layers, numbers, places, x, turn, turn, 1, 1, *scratch.of(1))
    kernels.run_head(stored, 1, weights.ctypes.data, np.float32(1), weights.ctypes.data, 0, x, turn)
    rows = np.zeros((1, 2 * dim), kept)
    kernels.norm_rows(1, rows, np.zeros(2 * dim, np.float32), np.float32(1), rows)
    kernels.turn_rows(1, rows.reshape(1, 2, dim), 1, 1, 0, np.float32(1), 0, np.float32(1), x, turn)
    kernels.gate_rows(1, rows, np.zeros((1, dim), kept))


class _Scratch:
    """Where a pass puts what lies between its products, for up to `tokens` tokens."""

    def __init__(self, tokens: int, width: int, *, heads: int, kv_heads: int, dim: int, inner: int) -> None:
        shapes = [(width,), (heads + 2 * kv_heads, dim), (heads, dim), (2 * inner,), (inner,)]
        self.tokens, self._arrays = tokens, [np.empty((tokens, *shape), np.float32) for shape in shapes]

    def of(self, tokens: int) -> list[FloatArray]:
        return [array[:tokens] for array in self._arrays]


class CompiledSpan:
    """Layers, and a model's end, as `kernels.py` takes them. Their tensors are kept alive here. Made by `compiled`.

    end: the norm and the head after the last layer, where the span has them. dtype: what the model computes in.
    """

    def __init__(
        self, kernels: ModuleType, layers: list[Layer], end: tuple[Norm, Matrix] | None, dtype: torch.dtype
    ) -> None:
        self._kernels, self._kept = kernels, list[Tensor]()
        first = layers[0]
        self._dtype, self._stored, self._most = dtype, STORED[first.qkv.weight.dtype], _most_tokens(first, dtype)
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._layers = np.array([self._addresses(layer) for layer in layers], np.int64)
        self._numbers = np.array([_numbers(layer) for layer in layers], np.float32)
        self._end = None if end is None else (self._float(end[0].weight), np.float32(end[0].eps), *self._matrix(end[1]))
        self._vocab = 0 if end is None else len(end[1].weight)
        width, inner = first.qkv.weight.shape[1], first.down.weight.shape[1]
        self._sizes = {"heads": first.heads, "kv_heads": first.kv_heads, "dim": first.dim, "inner": inner}
        self._scratch = _Scratch(1, width, **self._sizes)

    def _addresses(self, layer: Layer) -> list[int]:
        """In the order of the kernels' columns."""
        q_norm, k_norm = (0 if norm is None else self._float(norm.weight) for norm in (layer.q_norm, layer.k_norm))
        before, between = self._float(layer.before.weight), self._float(layer.between.weight)
        attention = [before, *self._matrix(layer.qkv), q_norm, k_norm, *self._matrix(layer.out)]
        return [*attention, between, *self._matrix(layer.gate_up), *self._matrix(layer.down)]

    def _matrix(self, matrix: Matrix) -> tuple[int, int]:
        self._kept.append(matrix.weight)
        return matrix.weight.data_ptr(), 0 if matrix.bias is None else self._float(matrix.bias)

    def _float(self, vector: Tensor) -> int:
        self._kept.append(vector.detach().to(torch.float32).contiguous())
        return self._kept[-1].data_ptr()

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
        made = x.to(torch.float32, copy=True)
        turns = _float_array(cos), _float_array(sin)
        places = np.concatenate([row.cache.places(step.span, row.position, row.tokens) for row in step.rows], axis=1)
        assert places.shape[1] == n == len(cos), "each token has its place"
        assert all(row.cache.layers[0].keys.dtype == self._dtype for row in step.rows), "KV of the model's dtype"
        if n > self._scratch.tokens:
            self._scratch = _Scratch(n, x.shape[1], **self._sizes)
        at_once = count if step.between is None else 1
        for first in range(0, count, at_once):
            if first and step.between is not None:
                step.between()
            here = slice(start + first, start + first + at_once)
            with _ENTERED:
                self._kernels.run_layers(
                    self._stored, STORED[self._dtype], _threads(), self._layers[here], self._numbers[here],
                    places[first : first + at_once], made.numpy(), *turns, self._heads, self._kv_heads,
                    *self._scratch.of(n),
                )  # fmt: skip
        return made.to(self._dtype)

    def attended(self, n: int) -> list[Tensor]:
        """The queries, keys and values of the last layer of the last step, which had n tokens: [1, heads, n, dim]."""
        states = torch.from_numpy(self._scratch.of(n)[1].copy()).transpose(0, 1)[None]
        keys = self._heads + self._kv_heads
        return [states[:, : self._heads], states[:, self._heads : keys], states[:, keys:]]

    def reads_out(self, n: int) -> bool:
        """Whether so many tokens' logits are made here also where the layers were not."""
        return n <= self._most

    def logits(self, x: Tensor) -> Tensor:
        """x: [m, width] after the last layer -> [m, vocab] float32."""
        assert self._end is not None
        made = torch.empty(len(x), self._vocab)
        with _ENTERED:
            self._kernels.run_head(self._stored, _threads(), *self._end, x.float().contiguous().numpy(), made.numpy())
        return made


def _most_tokens(layer: Layer, dtype: torch.dtype) -> int:
    import llvmlite.binding as llvm

    limits = MOST_TOKENS if llvm.get_host_cpu_features().get("amx-bf16") else WITHOUT_AMX
    thin, thick = limits[layer.qkv.weight.dtype, dtype]
    weights = sum(matrix.weight.numel() for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return thick if weights > THICK else thin


def _numbers(layer: Layer) -> list[float]:
    norms = (layer.before, layer.q_norm, layer.k_norm, layer.between)
    return [*(0.0 if norm is None else norm.eps for norm in norms), layer.scaling]


def _threads() -> int:
    """As many as torch has in this thread."""
    from numba import config, set_num_threads

    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    set_num_threads(threads)
    return threads


class CompiledBetween:
    """What `fused.TorchBetween` does, in loops that read and write each number once."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels, self._floats = kernels, dict[int, Tensor]()

    def turns(self, cos: Tensor, sin: Tensor) -> tuple[FloatArray, FloatArray]:
        return _float_array(cos), _float_array(sin)

    def norm(self, norm: Norm, x: Tensor, out: Tensor) -> Tensor:
        with _ENTERED:
            self._kernels.norm_rows(_threads(), _array(x), self._float(norm).numpy(), np.float32(norm.eps), _array(out))
        return out

    def turn(self, layer: Layer, states: Tensor, turns: tuple[FloatArray, FloatArray], room: object) -> Tensor:
        turned = layer.heads + layer.kv_heads
        _check_table(*turns, layer.dim)
        norms = list[Any]()
        for norm in (layer.q_norm, layer.k_norm):
            norms += [0, np.float32(0)] if norm is None else [self._float(norm).data_ptr(), np.float32(norm.eps)]
        with _ENTERED:
            self._kernels.turn_rows(_threads(), _array(states), layer.heads, turned, *norms, *turns)
        return states[:, :turned]

    def gate(self, layer: Layer, gate_up: Tensor, out: Tensor) -> Tensor:
        with _ENTERED:
            self._kernels.gate_rows(_threads(), _array(gate_up), _array(out))
        return out

    def _float(self, norm: Norm) -> Tensor:
        """Its weight in float32, made once."""
        made = self._floats.get(id(norm))
        if made is None:
            made = self._floats[id(norm)] = norm.weight.detach().to(torch.float32).contiguous()
        return made


def _check_table(cos: Tensor | FloatArray, sin: Tensor | FloatArray, dim: int) -> None:
    """Raises ValueError where only a part of each head is turned: the loops would read on behind the table."""
    if not cos.shape[-1] == sin.shape[-1] == dim:
        raise ValueError(f"a rotary table of {cos.shape[-1]} for heads of {dim}")


def _float_array(tensor: Tensor) -> FloatArray:
    return tensor.to(torch.float32).contiguous().numpy()


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """As the kernels know the dtype; shares memory."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


def compiled(
    layers: list[Layer], end: tuple[Norm, Matrix] | None, dtype: torch.dtype
) -> tuple[CompiledBetween, CompiledSpan] | None:
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
    kernels = prepare(dtype, first.dtype)
    return None if kernels is None else (CompiledBetween(kernels), CompiledSpan(kernels, layers, end, dtype))


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
    norms += [(layer.before, width), (layer.between, width)]
    shared = layer.kv_heads > 0 and layer.heads % layer.kv_heads == 0
    fits = all(matrix.weight.shape == shape for matrix, shape in matrices)
    return shared and fits and all(norm.weight.shape == (size,) for norm, size in norms)


def _can_be_read(matrix: Matrix, dtype: torch.dtype) -> bool:
    """In one run, and by fours of bytes: two of bfloat16 at once."""
    weight, bias = matrix.weight, matrix.bias
    as_kept = weight.dtype == dtype and weight.is_contiguous() and weight.data_ptr() % 4 == 0
    return as_kept and weight.shape[1] % 2 == 0 and (bias is None or bias.shape == weight.shape[:1])
