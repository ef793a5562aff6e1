"""Layers shaped like Llama's, without a module around each multiplication.

The same arithmetic in fewer and larger operations: q, k and v are one matrix, and so are gate and up (they lie one
after the other in memory, `weights.py` sees to that), the rotary table is made once a step, nothing is dispatched by
name. A token of SmolLM2-135M is 30 layers of about 1 ms, of which transformers' modules took a third.

Steps of few tokens on a CPU, which is decoding, are one call of compiled loops (`compiled.py`). torch.compile was
measured there too (SmolLM2, float32, two cores): 40 to 53 ms a token where such operations took 31 to 38; the loops
take 21.

Invariant: a span runs here only if every one of its layers, its embedding and its head gave in a trial what
transformers' own modules give (`matches`); otherwise all of it runs on those, and nobody needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from peer.attention import Row, StepSlot, attend_rows
from peer.compiled import CompiledSpan, compile_span
from peer.families import original_context
from peer.matrix import LINEAR, Matrix
from routing.spans import Span

if TYPE_CHECKING:
    from peer.model import PackedStep, SpanModel

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
SILU = type(ACT2FN["silu"])
HEAD_NORMS = {"q_norm", "k_norm"}  # of Qwen 3 and others, over each head
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
# The norm of a trial's error over that of the right output: some roundings (2**-24, 2**-8, 2**-11), and no more. In
# bfloat16 a layer of SmolLM2 that has one huge channel was off by 0.032, the others by 0.016.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
TRIAL_TOKENS = (5, 1)  # a prefill, then a decode step after it
# By how many machine epsilons of float32 queries and keys are shaken in a trial. With one or two some right layers of
# Qwen 2's shape with biases of keys of up to 1,000 were refused, with four and sixteen none.
SHAKEN = 8
# What a part that only looks alike may raise: a rotary table of half a head, a norm over all heads, other arguments.
UNLIKE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Norm:
    """weight: [n]; wide: the same in float32."""

    weight: Tensor
    wide: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """index: in the model. heads, kv_heads: of `dim` values each. q_norm, k_norm: None where there are none."""

    index: int
    heads: int
    kv_heads: int
    dim: int
    scaling: float
    attention_norm: Norm
    qkv: Matrix
    q_norm: Norm | None
    k_norm: Norm | None
    out: Matrix
    mlp_norm: Norm
    gate_up: Matrix
    act: Any
    down: Matrix

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.kv_heads, self.dim, self.gate_up.weight.shape[0]

    def __call__(
        self, x: Tensor, rotary: Any, slot: StepSlot, rows: Rows, room: _Room, wanted: Tensor | None = None
    ) -> Tensor:
        """x: [n, width], changed in place. rotary: the tokens' positions, as `rows` has them. Returns x.

        wanted: indices of m tokens, the last ones of their rows, with which it goes on (None: all). Of the others only
        keys and values are made. x is left then, and what is returned is [m, width].
        """
        split = self.heads + self.kv_heads
        states = self.qkv.into(rows.norm(self.attention_norm, x, room.normed), room.states).view(len(x), -1, self.dim)
        value = states[:, split:].transpose(0, 1)[None]
        rotated = rows.rotate(self, states, rotary, room.rotated).transpose(0, 1)[None]
        query, key = rotated[:, : self.heads], rotated[:, self.heads :]
        if wanted is None:
            seen = attend_rows(slot, self.index, query, key, value, self.scaling)
            return self._rest(x, seen, rows, room)
        asking = [row.logits for row in slot.rows]
        seen = attend_rows(slot, self.index, query[:, :, wanted], key, value, self.scaling, asking=asking)
        return self._rest(x[wanted], seen, rows, room.of(len(wanted))) if len(wanted) else x[wanted]

    def _rest(self, x: Tensor, seen: Tensor, rows: Rows, room: _Room) -> Tensor:
        """What follows attention, in place. x: [n, width]; seen: [1, n, heads, dim]."""
        self.out.added_to(x, seen.reshape(len(x), self.heads * self.dim))
        gate_up = self.gate_up.into(rows.norm(self.mlp_norm, x, room.normed), room.gate_up)
        return self.down.added_to(x, rows.gate(self, gate_up, room.inner))


class Rows(Protocol):
    """What is done to each token's row between a layer's products. n tokens; everything is of the model's dtype, and
    where there is an `out`, it may be used for what is returned."""

    def rotary(self, cos: Tensor, sin: Tensor) -> Any:
        """cos, sin: [n, dim] of the rotary table -> as `rotate` takes them."""

    def norm(self, norm: Norm, x: Tensor, out: Tensor) -> Tensor:
        """x, out: [n, width]."""

    def rotate(self, layer: Layer, states: Tensor, rotary: Any, out: Tensor) -> Tensor:
        """states: [n, heads + 2 kv_heads, dim] -> queries and keys at their positions, [n, heads + kv_heads, dim]."""

    def gate(self, layer: Layer, gate_up: Tensor, out: Tensor) -> Tensor:
        """gate_up: [n, 2 inner]; out: [n, inner]."""


class TorchRows:
    """In torch's operations."""

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 1, dim], the sine with its first half negated."""
        half = cos.shape[-1] // 2
        return cos[:, None], torch.cat([-sin[:, None, :half], sin[:, None, half:]], -1)

    def norm(self, norm: Norm, x: Tensor, out: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return torch.mul(F.rms_norm(x, (x.shape[-1],), None, norm.eps), norm.weight, out=out)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(norm.eps).rsqrt_()
        return torch.mul(x, scale, out=out).mul_(norm.weight)

    def rotate(self, layer: Layer, states: Tensor, rotary: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        heads, dim, (cos, sin) = layer.heads, layer.dim, rotary
        made, half = states[:, : heads + layer.kv_heads], dim // 2
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = [(made[:, :heads], layer.q_norm), (made[:, heads:], layer.k_norm)]
            made = torch.cat([F.rms_norm(part, (dim,), norm.weight, norm.eps) for part, norm in parts], 1)
        # rotary positions, arXiv:2104.09864: the second half of each head stands for the imaginary part
        rotated = torch.mul(made, cos, out=out)
        rotated[..., :half].addcmul_(made[..., half:], sin[..., :half])
        rotated[..., half:].addcmul_(made[..., :half], sin[..., half:])
        return rotated

    def gate(self, layer: Layer, gate_up: Tensor, out: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.mul(layer.act(gate), up, out=out)


class _Room:
    """Where the layers of a pass of n tokens put what lies between their products: memory that is new each time costs
    as much as an operation. Nothing in it outlives a layer."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts
        self.normed, self.states, self.rotated, self.gate_up, self.inner = parts

    @classmethod
    def make(cls, layer: Layer, tokens: int, like: Tensor) -> _Room:
        shapes = [
            (like.shape[-1],),
            (layer.qkv.weight.shape[0],),
            (layer.heads + layer.kv_heads, layer.dim),
            (layer.gate_up.weight.shape[0],),
            (layer.down.weight.shape[1],),
        ]
        return cls([torch.empty(tokens, *shape, dtype=like.dtype, device=like.device) for shape in shapes])

    def of(self, tokens: int) -> _Room:
        """Of no more tokens than there is room for."""
        return _Room([part[:tokens] for part in self._parts])


class FusedSpan:
    """The claim of a `SpanModel`, run without its modules. Made by `fuse`.

    compiled: of the same layers; it takes the steps that it can.
    """

    def __init__(
        self, model: SpanModel, layers: list[Layer], rows: Rows, compiled: CompiledSpan | None = None
    ) -> None:
        self._layers, self._rows, self.compiled = layers, rows, compiled
        self._first, self._total = model.span.start, model.layers_total
        self.slot, self._device, self._dtype = StepSlot(), model.device, model.dtype
        base = model.shell.base_model
        self._rotary = base.rotary_emb
        self._embed = model.shell.get_input_embeddings()
        self._norm, self._head = base.norm, model.shell.get_output_embeddings()

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
            x = step.hidden.contiguous().to(self._device, self._dtype, copy=True)  # layers add to it
        cos, sin = (table[0] for table in self._rotary(x[None], positions))
        if self.compiled is not None and self.compiled.takes(step):
            x = self.compiled.layers(step, step.span.start - self._first, x, cos, sin)
            if self.slot.watch is not None:
                self.slot.watch(*self.compiled.attended(len(x)))
        else:
            self._packed(step, x, cos, sin, wanted)
        return x, None if wanted is None else self._logits(x[wanted])

    def _logits(self, x: Tensor) -> Tensor:
        if self.compiled is not None and self.compiled.takes_logits(len(x)):
            return self.compiled.logits(x)
        return self._head(self._norm(x)).float()

    def _packed(self, step: PackedStep, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> None:
        """In place. Where the step ends the model, the last layer goes on with the `wanted` tokens only."""
        layers = self._layers[step.span.start - self._first : step.span.stop - self._first]
        some = None
        if step.span.stop == self._total and (wanted is None or len(wanted) < len(x)):
            some = torch.empty(0, dtype=torch.long, device=x.device) if wanted is None else wanted
        room, rotary = _Room.make(layers[0], len(x), x), self._rows.rotary(cos, sin)
        try:
            for number, layer in enumerate(layers):
                if number and step.between is not None:
                    step.between()
                self.slot.rows = step.rows  # others may have run since
                if layer is not layers[-1] or some is None:
                    layer(x, rotary, self.slot, self._rows, room)
                else:
                    x[some] = layer(x, rotary, self.slot, self._rows, room, some)
        finally:
            self.slot.clear()


# ---------------------------------------------------------------- whether it can be


def fuse(model: SpanModel) -> FusedSpan | None:
    """The model's claim, if all of it has the shape and gives the same numbers; None otherwise."""
    if not model.packs or original_context(model.config) is not None:
        return None
    try:
        layers = [_read(layer, model.span.start + i) for i, layer in enumerate(model.layers)]
        plain = FusedSpan(model, layers, TorchRows())
    except UNLIKE:
        return None
    if len({layer.sizes for layer in layers}) > 1:  # they share their room
        return None
    for ways in (_compiled(model, layers), [plain]):
        if ways and matches(model, ways):
            return ways[-1]
    return None


def _compiled(model: SpanModel, layers: list[Layer]) -> list[FusedSpan]:
    """With compiled rows alone, and with steps of few tokens too, which is to be used; nothing where it can't be."""
    try:
        end = _end(model)
    except UNLIKE:  # of another shape
        return []
    made = compile_span(layers, end, model.dtype)
    if made is None:
        return []
    rows, few = made
    return [FusedSpan(model, layers, rows), FusedSpan(model, layers, rows, few)]


def _end(model: SpanModel) -> tuple[Norm, Matrix] | None:
    """The last norm and the head, where the claim has them."""
    if model.span.stop != model.layers_total:
        return None
    head = model.shell.get_output_embeddings()
    return _norm(model.shell.base_model.norm), Matrix(head.weight, head.bias)


def is_known(layer: nn.Module) -> bool:
    """Whether it has the parts of a layer shaped like Llama's, and no others."""
    if _parts(layer) != LAYER_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = _parts(attention) & HEAD_NORMS
    if set(_linears(attention) | _linears(mlp)) != ATTENTION_PARTS | MLP_PARTS or len(norms) == 1:
        return False
    return not (_parts(attention) - ATTENTION_PARTS - norms or _parts(mlp) - MLP_PARTS - {"act_fn"})


def _read(layer: nn.Module, index: int) -> Layer:
    """Raises ValueError where it isn't known here, or its matrices lie apart."""
    if not is_known(layer):
        raise ValueError("a layer of another shape")
    attention, mlp = layer.self_attn, layer.mlp
    linear = _linears(attention) | _linears(mlp)
    norms = _parts(attention) & HEAD_NORMS
    dim: int = attention.head_dim  # type: ignore[assignment]
    return Layer(
        index=index,
        heads=linear["q_proj"].out_features // dim,
        kv_heads=linear["k_proj"].out_features // dim,
        dim=dim,
        scaling=attention.scaling,  # type: ignore[arg-type]
        attention_norm=_norm(layer.input_layernorm),
        qkv=_joined([linear[name] for name in ("q_proj", "k_proj", "v_proj")]),
        q_norm=_norm(attention.q_norm) if norms else None,
        k_norm=_norm(attention.k_norm) if norms else None,
        out=Matrix(linear["o_proj"].weight, linear["o_proj"].bias),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined([linear[name] for name in ("gate_proj", "up_proj")]),
        act=F.silu if isinstance(mlp.act_fn, SILU) else mlp.act_fn,  # no module's call around it
        down=Matrix(linear["down_proj"].weight, linear["down_proj"].bias),
    )


def _parts(module: nn.Module) -> set[str]:
    """Names of the children that are anything: an Identity is nothing."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Identity)}


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if type(child) in LINEAR}


def _norm(module: Any) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    eps = module.eps if eps is None else eps
    if not eps > 0:
        raise ValueError("a norm of zeros would divide by zero")
    weight = module.weight.detach()
    return Norm(weight, weight.float().contiguous(), eps)


def _joined(parts: list[nn.Linear]) -> Matrix:
    """Matrices that lie one after the other in memory as one, without a copy. Raises ValueError if they don't."""
    weight = join([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    bias = join(biases) if biases else None
    if weight is None or (biases and (len(biases) != len(parts) or bias is None)):
        raise ValueError("matrices that lie apart")
    return Matrix(weight, bias)


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
def matches(model: SpanModel, ways: list[FusedSpan]) -> bool:
    """Whether each layer by itself, with embedding and head where it has them, gives in all ways what the modules give.

    Both at the beginning of a text and at the end of the longest, since there are layers in which something
    begins only at some position.
    """
    last = getattr(model.config, "max_position_embeddings", None) or 0
    shifts = {0, max(0, last - sum(TRIAL_TOKENS))}
    trials = [_LayerTrial(model, ways, index, shift) for index in model.span for shift in shifts]
    exact = model.dtype == torch.float32
    return all(trial.passes(shaken=False) or (exact and trial.passes(shaken=True)) for trial in trials)


@dataclass(frozen=True)
class _LayerTrial:
    """shift: added to what the tokens are told of their positions."""

    model: SpanModel
    ways: list[FusedSpan]
    index: int
    shift: int

    def passes(self, *, shaken: bool) -> bool:
        """shaken: what the modules' output moves by if queries and keys are off by a few roundings is allowed too.
        Where biases of keys are large, as Qwen 2 has them, scores are so large that no two ways to add up agree. Only
        in float32: what shaken numbers of fewer bits move would hide a missing bias, or another gate."""
        from peer.model import PackedStep

        model, span = self.model, Span(self.index, self.index + 1)
        generator = torch.Generator().manual_seed(self.index)
        caches = [model.new_cache(sum(TRIAL_TOKENS), span) for _ in ("modules", "shaken", *self.ways)]
        position = 0
        for tokens in TRIAL_TOKENS:
            inputs: dict[str, Tensor] = (
                {"ids": torch.randint(model.vocab, (tokens,), generator=generator)}
                if self.index == 0
                else {"hidden": torch.randn(tokens, model.width, generator=generator).to(model.dtype)}
            )
            logits = tokens if span.stop == model.layers_total else 0
            steps = [PackedStep(span, [Row(cache, position, tokens, logits)], **inputs) for cache in caches]
            right = self._seen(steps[0], None)
            allowed = [TOLERANCE[model.dtype] * one.norm() for one in right]
            if shaken:
                moved = self._seen(steps[1], None, generator)
                more = [(one - other).norm() for one, other in zip(right, moved, strict=True)]
                allowed = [limit + further for limit, further in zip(allowed, more, strict=True)]
            try:
                made = [self._seen(step, way) for step, way in zip(steps[2:], self.ways, strict=True)]
            except UNLIKE:
                return False
            for ours in made:
                off = [(one - other).norm() for one, other in zip(right, ours, strict=True)]
                # not a number fails too, and what moves without bounds says nothing
                if not all(far <= limit < torch.inf for far, limit in zip(off, allowed, strict=True)):
                    return False
            position += tokens
        return True

    def _seen(
        self, step: PackedStep, way: FusedSpan | None, shake: torch.Generator | None = None
    ) -> list[Tensor]:
        """What comes out, and what attention was given: a wrong query may change little in what becomes of it."""
        slot, noted = self.model.slot if way is None else way.slot, list[Tensor]()

        def watch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            noted.extend((query.float(), key.float(), value.float()))
            return (query, key) if shake is None else (_shaken(query, shake), _shaken(key, shake))

        slot.watch = watch
        try:
            output = self.model.run(step, way, self.shift)
            return [output.hidden.float(), *noted, *([] if output.logits is None else [output.logits])]
        finally:
            slot.watch = None


def _shaken(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator).to(x.device)
    return x * (1 + SHAKEN * torch.finfo(torch.float32).eps * noise)
