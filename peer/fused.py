"""Layers shaped like Llama's, without a module around each multiplication.

The same arithmetic in fewer and larger operations: q, k and v are one matrix, and so are gate and up (they lie one
after the other in memory, `weights.py` sees to that), the rotary table is made once a step, nothing is dispatched by
name. A token of SmolLM2-135M is 30 layers of about 1 ms, of which transformers' modules took a third.

One token of one session on a CPU has a way of its own (`_Layer.one`): its matrices are read once, at the pace of the
memory, and all that lies between them takes as long again, since the weights that stream by leave no cache warm. So it
counts operations: vectors without a batch, a norm in three, residuals added by the multiplication. torch.compile was
measured there too (SmolLM2, float32, two cores): 40 to 53 ms a token against 31 to 38.

Invariant: a span runs here only if every one of its layers, its embedding and its head gave in a trial what
transformers' own modules give (`matches`); otherwise all of it runs on those, and nobody needs to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peer.attention import Row, StepSlot, attend_rows
from peer.families import original_context
from routing.spans import Span

if TYPE_CHECKING:
    from peer.model import PackedStep, SpanModel, StepOutput

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # of Qwen 3 and others, over each head
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
# The norm of a trial's error over that of the right output: some roundings (2**-24, 2**-8, 2**-11), and no more. In
# bfloat16 a layer of SmolLM2 that has one huge channel was off by 0.032, the others by 0.016.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
TRIAL_TOKENS = (5, 1)  # a prefill, then a decode step after it
# What a part that only looks alike may raise: a rotary table of half a head, a norm over all heads, other arguments.
UNLIKE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """x, out: [n, width]."""
        if x.dtype != torch.float32:
            return torch.mul(F.rms_norm(x, (x.shape[-1],), None, self.eps), self.weight, out=out)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return torch.mul(x, scale, out=out).mul_(self.weight)

    def row(self, x: Tensor, zeros: Tensor, out: Tensor) -> Tensor:
        """x: [width] on a CPU. zeros, out: as many. Six operations of `F.rms_norm` in three."""
        if x.dtype == torch.float32:
            squares: float = torch.dot(x, x).item()
        else:
            squares = torch.linalg.vector_norm(x, dtype=torch.float32).item() ** 2
        return torch.addcmul(zeros, x, self.weight, value=(squares / x.shape[0] + self.eps) ** -0.5, out=out)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """weight: [out, in]; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in] -> [n, out]."""
        if x.shape[0] > 1 or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        return self.row(x[0])[None]

    def row(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [in] -> [out]."""
        # torch's matrix times vector; its linear takes a third longer over one row of bfloat16
        if self.bias is None:
            return torch.mv(self.weight, x, out=out)
        return torch.addmv(self.bias, self.weight, x, out=out)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """x: [n, in], out: [n, out]."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def added_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """sums: [n, out], to which the product with x: [n, in] is added in place."""
        sums.addmm_(x, self.weight.t())
        return sums if self.bias is None else sums.add_(self.bias)

    def onto(self, x: Tensor, row: Tensor) -> Tensor:
        """row: [out], to which the product with x: [in] is added in place."""
        if self.bias is None and x.dtype == torch.float32:
            return row.addmv_(self.weight, x)
        return row.add_(self.row(x))  # in bfloat16 a product that adds is the slower one


@dataclass(frozen=True, slots=True)
class _Layer:
    """index: in the model. heads, kv_heads: of `dim` values each. q_norm, k_norm: None where there are none."""

    index: int
    heads: int
    kv_heads: int
    dim: int
    scaling: float
    before: _Norm
    qkv: _Matrix
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: _Matrix
    between: _Norm
    gate_up: _Matrix
    act: Any
    down: _Matrix

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.kv_heads, self.dim, self.gate_up.weight.shape[0]

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slot: StepSlot, room: _Room) -> Tensor:
        """x: [n, width], changed in place; cos, sin: [n, 1, dim], sin with its first half negated. Returns x."""
        n, split, half = x.shape[0], self.heads + self.kv_heads, self.dim // 2
        states = self.qkv.into(self.before.into(x, room.normed), room.states).view(n, -1, self.dim)
        turned, value = states[:, :split], states[:, split:]
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat([self.q_norm(turned[:, : self.heads]), self.k_norm(turned[:, self.heads :])], 1)
        # rotary positions, arXiv:2104.09864: the second half of each head stands for the imaginary part
        made = torch.mul(turned, cos, out=room.turned)
        made[..., :half].addcmul_(turned[..., half:], sin[..., :half])
        made[..., half:].addcmul_(turned[..., :half], sin[..., half:])
        turned, value = made.transpose(0, 1)[None], value.transpose(0, 1)[None]
        query, key = turned[:, : self.heads], turned[:, self.heads :]
        seen = attend_rows(slot, self.index, query, key, value, self.scaling)
        self.out.added_to(x, seen.reshape(n, self.heads * self.dim))
        gate, up = self.gate_up.into(self.between.into(x, room.normed), room.gate_up).chunk(2, -1)
        return self.down.added_to(x, torch.mul(self.act(gate), up, out=room.inner))

    def one(self, x: Tensor, table: _Turn, row: Row, slot: StepSlot, room: _RowRoom) -> Tensor:
        """`__call__` for one token of one session on a CPU. x: [width], changed in place. Returns x."""
        self.qkv.row(self.before.row(x, room.zeros, room.normed), room.states)
        if self.q_norm is not None and self.k_norm is not None:
            torch.cat([self.q_norm(room.query), self.k_norm(room.key)], out=room.turned)
        torch.mul(room.second, table.first_sin, out=room.rolled_first)
        torch.mul(room.first, table.second_sin, out=room.rolled_second)
        torch.addcmul(room.rolled, room.turned, table.cos, out=room.turned)
        if slot.noted is not None:
            slot.noted += (room.query[None, :, None], room.key[None, :, None], room.value[None, :, None])
        layer = row.cache.layers[self.index - row.cache.span.start]
        keys, values = layer.write_one(row.position, room.key_value)
        # one token sees all keys: its grouped heads are the "length", and no key is repeated
        seen = F.scaled_dot_product_attention(room.grouped, keys, values, scale=self.scaling)
        self.out.onto(seen.reshape(-1), x)
        self.gate_up.row(self.between.row(x, room.zeros, room.normed), room.gate_up)
        return self.down.onto(self.act(room.gate).mul_(room.up), x)


class _Room:
    """Where the layers of a pass of n tokens put what lies between their operations: memory that is new each time costs
    as much as the operation. Nothing in it outlives a layer."""

    def __init__(self, layer: _Layer, tokens: int, like: Tensor) -> None:
        def make(*shape: int) -> Tensor:
            return torch.empty(tokens, *shape, dtype=like.dtype, device=like.device)

        self.normed = make(like.shape[-1])
        self.states = make(layer.qkv.weight.shape[0])
        self.turned = make(layer.heads + layer.kv_heads, layer.dim)
        self.gate_up = make(layer.gate_up.weight.shape[0])
        self.inner = make(layer.down.weight.shape[1])


class _RowRoom:
    """`_Room` for one token, with every view of it that a layer needs: making one costs as much as an operation."""

    def __init__(self, layer: _Layer, like: Tensor) -> None:
        heads, kv_heads, dim, half = layer.heads, layer.kv_heads, layer.dim, layer.dim // 2
        split = heads + kv_heads
        self.zeros, self.normed = torch.zeros_like(like), torch.empty_like(like)
        self.states = like.new_empty((split + kv_heads) * dim)
        by_head = self.states.view(-1, dim)
        self.turned, self.query, self.key = by_head[:split], by_head[:heads], by_head[heads:split]
        self.value, self.key_value = by_head[split:], by_head[heads:]
        self.grouped = self.query.view(1, kv_heads, heads // kv_heads, dim)
        self.first, self.second = self.turned[:, :half], self.turned[:, half:]
        self.rolled = torch.empty_like(self.turned)
        self.rolled_first, self.rolled_second = self.rolled[:, :half], self.rolled[:, half:]
        self.gate_up = like.new_empty(layer.gate_up.weight.shape[0])
        self.gate, self.up = self.gate_up.chunk(2)


class _Turn:
    """Of the rotary table at one position: [dim], and the sine's halves, the first negated."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        half = len(cos) // 2
        self.cos, self.first_sin, self.second_sin = cos, sin[:half], sin[half:]


class FusedSpan:
    """The claim of a `SpanModel`, run without its modules. Made by `fuse`."""

    def __init__(self, model: SpanModel, layers: list[_Layer]) -> None:
        self._layers, self._first = layers, model.span.start
        self.slot, self._device, self._dtype = StepSlot(), model.device, model.dtype
        base = model.shell.base_model
        self._rotary = base.rotary_emb
        self._embed = model.shell.get_input_embeddings()
        self._norm = base.norm
        head = model.shell.get_output_embeddings()
        self._row_room: _RowRoom | None = None
        self._head = _Matrix(head.weight, head.bias) if isinstance(head, nn.Linear) else None

    @torch.inference_mode()
    def run(self, step: PackedStep, positions: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The hidden states after the step's last layer [total, width], and the wanted logits [m, vocab] float32.

        positions: [1, total]. wanted: [m] indices of tokens, None where the step doesn't end the model.
        """
        if step.span.start == 0:
            assert step.ids is not None
            x = self._embed(step.ids.to(self._device))
        else:
            assert step.hidden is not None
            x = step.hidden.to(self._device, self._dtype, copy=True)  # layers add to it
        cos, sin = self._table(x, positions)
        layers = self._layers[step.span.start - self._first : step.span.stop - self._first]
        if len(x) == 1 and x.device.type == "cpu":
            x = self._one(layers, step.rows[0], x[0], cos.view(-1), sin.view(-1))[None]
        else:
            x = self._packed(layers, step, x, cos, sin)
        if wanted is None:
            return x, None
        assert self._head is not None
        return x, self._head(self._norm(x[wanted])).float()

    def _packed(self, layers: list[_Layer], step: PackedStep, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        room = _Room(layers[0], len(x), x)
        try:
            for number, layer in enumerate(layers):
                if number and step.between is not None:
                    step.between()
                self.slot.rows = step.rows  # others may have run since
                x = layer(x, cos, sin, self.slot, room)
        finally:
            self.slot.clear()
        return x

    def _one(self, layers: list[_Layer], row: Row, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._row_room is None:
            self._row_room = _RowRoom(layers[0], x)
        table = _Turn(cos, sin)
        for layer in layers:
            x = layer.one(x, table, row, self.slot, self._row_room)
        return x

    def _table(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(x[None], positions)
        half = cos.shape[-1] // 2
        return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)


# ---------------------------------------------------------------- whether it can be


def fuse(model: SpanModel) -> FusedSpan | None:
    """The model's claim, if all of it has the shape and gives the same numbers; None otherwise."""
    try:
        layers = [_read(layer, model.span.start + i) for i, layer in enumerate(model.layers)]
        if not model.packs or original_context(model.config) is not None or None in layers:
            return None
        alike = [layer for layer in layers if layer is not None]
        if len({layer.sizes for layer in alike}) > 1:  # they share their room
            return None
        made = FusedSpan(model, alike)
    except UNLIKE:
        return None
    return made if matches(model, made) else None


def _read(layer: nn.Module, index: int) -> _Layer | None:
    """None where a part is missing, or there is one that isn't known here."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = _linears(attention) | _linears(mlp)
    norms = _parts(attention) & HEAD_NORMS
    if _parts(layer) != LAYER_PARTS or set(linear) != ATTENTION_PARTS | MLP_PARTS or len(norms) == 1:
        return None
    if _parts(attention) - ATTENTION_PARTS - norms or _parts(mlp) - MLP_PARTS - {"act_fn"}:
        return None
    qkv = _joined([linear[name] for name in ("q_proj", "k_proj", "v_proj")])
    gate_up = _joined([linear[name] for name in ("gate_proj", "up_proj")])
    if qkv is None or gate_up is None:
        return None
    dim: int = attention.head_dim  # type: ignore[assignment]
    return _Layer(
        index=index,
        heads=linear["q_proj"].out_features // dim,
        kv_heads=linear["k_proj"].out_features // dim,
        dim=dim,
        scaling=attention.scaling,  # type: ignore[arg-type]
        before=_norm(layer.input_layernorm),
        qkv=qkv,
        q_norm=_norm(attention.q_norm) if norms else None,
        k_norm=_norm(attention.k_norm) if norms else None,
        out=_Matrix(linear["o_proj"].weight, linear["o_proj"].bias),
        between=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        act=F.silu if type(mlp.act_fn) is nn.SiLU else mlp.act_fn,  # no module's call around it
        down=_Matrix(linear["down_proj"].weight, linear["down_proj"].bias),
    )


def _parts(module: nn.Module) -> set[str]:
    """Names of the children that are anything: an Identity is nothing."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Identity)}


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if type(child) is nn.Linear}


def _norm(module: Any) -> _Norm:
    eps = getattr(module, "variance_epsilon", None)
    eps = module.eps if eps is None else eps
    if not eps > 0:
        raise ValueError("a norm of zeros would divide by zero")
    return _Norm(module.weight, eps)


def _joined(parts: list[nn.Linear]) -> _Matrix | None:
    """Matrices that lie one after the other in memory as one, without a copy; None if they don't."""
    weight = join([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    bias = join(biases) if biases else None
    if weight is None or (biases and (len(biases) != len(parts) or bias is None)):
        return None
    return _Matrix(weight, bias)


def join(tensors: list[Tensor]) -> Tensor | None:
    """Tensors [n_i, ...] that lie one after the other in one storage, as one [sum n_i, ...]; None if they don't."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.is_contiguous() and tensor.shape[1:] == first.shape[1:] and tensor.dtype == first.dtype
        if not alike or tensor.data_ptr() != end or first.untyped_storage() != tensor.untyped_storage():
            return None
        end += tensor.nbytes
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())


@torch.inference_mode()
def matches(model: SpanModel, made: FusedSpan) -> bool:
    """Whether each layer by itself, with embedding and head where it has them, gives what the modules give.

    Both at the beginning of a text and at the end of the longest, since there are layers in which something
    begins only at some position.
    """
    last = getattr(model.config, "max_position_embeddings", None) or 0
    shifts = {0, max(0, last - sum(TRIAL_TOKENS))}
    with _noting(model.slot) as right, _noting(made.slot) as ours:
        return all(_layer_matches(model, made, i, shift, right, ours) for i in model.span for shift in shifts)


@contextmanager
def _noting(slot: StepSlot) -> Iterator[list[Tensor]]:
    """Compared too, since a wrong query may change little in what becomes of it."""
    slot.noted = []
    try:
        yield slot.noted
    finally:
        slot.noted = None


def _layer_matches(
    model: SpanModel, made: FusedSpan, index: int, shift: int, right: list[Tensor], ours: list[Tensor]
) -> bool:
    """right, ours: what attention is given is added there."""
    from peer.model import PackedStep

    generator, span = torch.Generator().manual_seed(index), Span(index, index + 1)
    caches = [model.new_cache(sum(TRIAL_TOKENS), span) for _ in range(2)]
    position = 0
    for tokens in TRIAL_TOKENS:
        inputs: dict[str, Tensor] = (
            {"ids": torch.randint(model.vocab, (tokens,), generator=generator)}
            if index == 0
            else {"hidden": torch.randn(tokens, model.width, generator=generator).to(model.dtype)}
        )
        logits = tokens if span.stop == model.layers_total else 0
        steps = [PackedStep(span, [Row(cache, position, tokens, logits)], **inputs) for cache in caches]
        right.clear()
        ours.clear()
        outputs = [model.run(steps[0], None, shift)]
        try:
            outputs.append(model.run(steps[1], made, shift))
        except UNLIKE:
            return False
        if not _alike(_tensors(outputs[0], right), _tensors(outputs[1], ours)):
            return False
        position += tokens
    return True


def _tensors(output: StepOutput, noted: list[Tensor]) -> list[Tensor]:
    return [output.hidden, *noted, *([] if output.logits is None else [output.logits])]


def _alike(right: list[Tensor], ours: list[Tensor]) -> bool:
    for one, other in zip(right, ours, strict=True):
        limit = TOLERANCE[right[0].dtype] * one.float().norm()
        if not (one.float() - other.float()).norm() <= limit:  # not a number fails too
            return False
    return True
