"""A span of any decoder model as one callable over packed rows of several sessions.

Invariant: over any cut of the layers into spans, the same tokens give the same numbers as the uncut
model of transformers (float32: to rounding).

How. `AutoModelForCausalLM` is built whole, from the config, but with its parameters on the meta device,
where they cost nothing; only the claim's layers, and what precedes layer 0 or follows the last layer
if the claim has them, are given memory (`weights.py`). So each layer was constructed by transformers with its
true index, and no list, count or "every fourth layer is different" of a config needs translation. What
runs is a *view*: a shallow copy of the modules around the layers, whose list of layers is the sub-span
that a session wants, in which the first layer is given our hidden states whatever the model computed before it
(`_Entry`), and the last layer's output is taken before anything follows (`_Exit`).

All new tokens of a step form one row [1, tokens, width] with a position id each. Attention is the only
place where tokens meet: one function, registered with transformers, splits the row by session, writes
the keys and values into each session's cache and attends there. What it needs of the step it finds at
the module itself (`_StepSlot`), because some families don't hand keyword arguments down.

No mask function is registered: transformers then skips building masks altogether, which they are not
needed for here (`_preprocess_mask_arguments`: "other custom attention without equivalent mask creation").
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from peer.cache import LayerKV, SessionCache
from routing.spans import Span
from swarm.errors import UnsupportedModel
from swarm.tensors import RawTensor

ATTENTION = "layerswarm"
MAX_VIEWS = 32  # sub-spans in use at once; a view is a few Python objects, the bound only keeps it finite

# Attention that keeps nothing but keys and values, by transformers' names for layer types.
KV_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary scalings whose frequencies depend on the longest sequence in the batch.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


# ---------------------------------------------------------------- what can be served


def check_supported(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel with the reason. Needs the config only, so nothing was downloaded."""
    reason = _reason_against(config)
    if reason is not None:
        raise UnsupportedModel(f"a {config.model_type} model can't be served: {reason}")


def _reason_against(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has cross-attention to an encoder"
    if config.get_text_config(decoder=True) is not config:
        return "it is multimodal, and only its text part could be split"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised in a way that can't be read yet"
    foreign = set(getattr(config, "layer_types", None) or ()) - KV_LAYER_TYPES
    if foreign:
        return f"its layers keep other state than keys and values ({', '.join(sorted(foreign))})"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values, so they can't be split at any layer"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "it attends in both directions"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False):
        return "it keeps recurrent state besides keys and values"
    if not getattr(cls, "_supports_attention_backend", False):
        return "its attention doesn't go through transformers' attention interface"
    return None


def kv_layers(config: PretrainedConfig) -> list[LayerKV]:
    """What each of all layers stores per position."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):
        heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA as transformers computes it: per head, decompressed
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        kv = LayerKV(config.num_attention_heads, key_dim, config.v_head_dim)
    else:
        kv = LayerKV(heads, head_dim, head_dim)
    return [kv] * config.num_hidden_layers


def packs_sessions(config: PretrainedConfig) -> bool:
    """False where a token's position encoding depends on the other sessions in the step."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    return not kinds & BATCH_DEPENDENT_ROPE


# ---------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one session. logits: of how many of its last tokens logits are wanted (last span)."""

    cache: SessionCache
    position: int
    tokens: int
    logits: int = 0


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Rows that run over the same layers. ids: [total] int64 if span.start is 0, else hidden: [total, width]."""

    span: Span
    rows: Sequence[Row]
    ids: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """hidden: [total, width] after the span's last layer, before any final norm.
    logits: [sum of the rows' `logits`, vocab] float32, None if none was wanted or the span isn't last."""

    hidden: Tensor
    logits: Tensor | None


@dataclass(slots=True)
class _StepSlot:
    """The step that runs now, where the attention function and the wrappers find it."""

    rows: Sequence[Row] = ()
    hidden_in: Tensor | None = None
    hidden_out: Tensor | None = None
    wanted: Tensor | None = None  # indices of the tokens whose logits are wanted
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.rows, self.hidden_in, self.hidden_out, self.wanted = (), None, None, None
        self.masks.clear()


# ---------------------------------------------------------------- attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend per session, over its cache and its new tokens.

    query: [1, heads, total, dim], key and value: [1, kv_heads, total, dim] -> [1, total, heads, value_dim].
    sliding_window: a token sees so many positions, itself included. softcap: arXiv:2408.00118.
    s_aux: [heads] attention sinks, arXiv:2309.17453.
    """
    slot: _StepSlot = module.step_slot  # type: ignore[assignment]
    index: int = module.layer_idx  # type: ignore[assignment]
    attend = _attend_plain if softcap is None and s_aux is None else _attend_special
    assert attention_mask is None, "a mask was built although none is registered for us"
    pieces, start = [], 0
    for row in slot.rows:
        tokens, cache = row.tokens, row.cache
        stop, end = start + tokens, row.position + tokens
        if len(slot.rows) == 1:
            q, k, v = query, key, value
        else:
            q, k, v = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        layer = index - cache.span.start
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, row.position : end] = k
        values[:, :, row.position : end] = v
        seen = max(0, row.position + 1 - sliding_window) if sliding_window else 0
        pieces.append(
            attend(
                slot, q, keys[:, :, seen:end], values[:, :, seen:end], scaling, sliding_window, softcap, s_aux
            )
        )
        start = stop
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out, None


def _attend_plain(
    slot: _StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    *_special: Any,
) -> Tensor:
    """query: [1, heads, n, dim]; keys: [1, kv_heads, m, dim], the last n of which are the query's own."""
    _, heads, n, dim = query.shape
    kv_heads, m = keys.shape[1], keys.shape[2]
    if n == 1:  # one token sees all keys: its grouped heads become the "length", and no key is repeated
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, 1, heads, -1)
    if n == m and not (window and m > window):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
    else:
        mask = _mask(slot, n, m, window, query)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads
        )
    return out.transpose(1, 2)


def _attend_special(
    slot: _StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Written out, for what no fused kernel does."""
    _, heads, n, dim = query.shape
    kv_heads, m = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    scale = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(kv_heads, group * n, dim)
    scores = torch.matmul(grouped, keys[0].transpose(1, 2)).view(kv_heads, group, n, m) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if n > 1:
        scores = scores + _mask(slot, n, m, window, query)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :m]
    out = torch.matmul(weights.reshape(kv_heads, group * n, m), values[0])
    return out.view(1, heads, n, -1).transpose(1, 2)


def _mask(slot: _StepSlot, n: int, m: int, window: int | None, like: Tensor) -> Tensor:
    """Additive [n, m]: query i is at key m - n + i and sees `window` keys, itself included. Made once a step."""
    made = slot.masks.get((n, m, window or 0))
    if made is None:
        at = torch.arange(m - n, m, device=like.device)[:, None]
        keys = torch.arange(m, device=like.device)[None, :]
        hidden = keys > at
        if window:
            hidden |= keys <= at - window
        made = torch.zeros(n, m, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        slot.masks[n, m, window or 0] = made
    return made


AttentionInterface.register(ATTENTION, packed_attention)


# ---------------------------------------------------------------- building


class _ParametersOnMeta(TorchFunctionMode):
    """Parameters (`torch.empty` everywhere in torch and transformers) go to meta; computed buffers are real.

    A mode rather than `torch.device("meta")`, because rotary frequencies and the like are buffers that no
    checkpoint holds; and a mode is this thread's only, a patched nn.Module would not be.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_building = threading.Lock()  # no_init_weights patches transformers' init functions while it lasts


def build_full(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model of `config` with our attention and no memory behind its parameters."""
    config = copy.deepcopy(config)
    config.pad_token_id = None  # some families look for padding in every input, to warn about it
    with _building, no_init_weights(), _ParametersOnMeta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    model.tie_weights()  # no_init_weights leaves this out too
    model.eval()
    return model


@dataclass(frozen=True, slots=True)
class Outline:
    """Where the tensors of a model belong, by their names in the whole model.

    layers_path: of the list of layers. layers[i]: the names of layer i. before: what precedes layer 0 (embedding).
    after: what follows the last (final norm, head). ties: name -> the name whose tensor it shares.
    transforms: transformers' renamings and merges from a checkpoint's names to these.
    """

    layers_path: str
    layers: tuple[tuple[str, ...], ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    ties: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    transforms: tuple[WeightTransform, ...]

    def names(self, span: Span) -> list[str]:
        """Everything that the span needs, each memory once."""
        names = [name for i in span for name in self.layers[i]]
        if span.start == 0:
            names = [*self.before, *names]
        if span.stop == len(self.layers):
            names += self.after
        there = set(names)
        return [name for name in names if self.ties.get(name) not in there]


def outline(config: PretrainedConfig) -> Outline:
    """The outline of `config`'s model. Built once per config."""
    return _outline(type(config), config.to_json_string(use_diff=False))


@lru_cache(maxsize=4)
def _outline(cls: type[PretrainedConfig], text: str) -> Outline:
    return outline_of(build_full(cls.from_dict(json.loads(text)), torch.float32))


def outline_of(model: PreTrainedModel) -> Outline:
    path = _layers_path(model)
    count = len(model.get_submodule(path))
    layers: list[list[str]] = [[] for _ in range(count)]
    outside = []
    state = model.state_dict(keep_vars=True)
    for name in state:
        if name.startswith(path + "."):
            layers[int(name[len(path) + 1 :].split(".", 1)[0])].append(name)
        else:
            outside.append(name)
    early = _called_before_layers(model, path)
    before = tuple(name for name in outside if name.rpartition(".")[0] in early)
    after = tuple(name for name in outside if name not in before)
    ties = {
        name: first
        for name, tensor in state.items()
        if (first := next(n for n, t in state.items() if t is tensor)) != name
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    transforms = tuple(get_model_conversion_mapping(model))
    return Outline(path, tuple(map(tuple, layers)), before, after, ties, shapes, transforms)


def _layers_path(model: PreTrainedModel) -> str:
    """The list of decoder layers: of all lists of that length the one that holds most."""
    count = model.config.num_hidden_layers
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not sizes:
        raise UnsupportedModel(f"a {model.config.model_type} model has no list of {count} layers to split")
    return max(sizes, key=lambda name: sizes[name])


class _ReachedLayers(Exception):
    """Ends the trial of `_called_before_layers`."""


def _called_before_layers(model: PreTrainedModel, path: str) -> set[str]:
    """Names of the modules that run before the first layer, found by running up to there on meta."""
    called: set[str] = set()
    hooks = []

    def reached(*_: Any) -> None:
        raise _ReachedLayers

    for name, module in model.named_modules():
        if name and not f"{name}.".startswith(path + "."):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
    hooks.append(model.get_submodule(path)[0].register_forward_pre_hook(reached))
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except _ReachedLayers:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return called


# ---------------------------------------------------------------- running


class _Entry(nn.Module):
    """The first layer of a view that doesn't start the model: it gets our hidden states."""

    def __init__(self, layer: nn.Module, slot: _StepSlot) -> None:
        super().__init__()
        self.layer, self._slot = layer, slot

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(self._slot.hidden_in, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


class _Exit(nn.Module):
    """The last layer of a view: its output is kept before anything else sees it."""

    def __init__(self, layer: nn.Module, slot: _StepSlot) -> None:
        super().__init__()
        self.layer, self._slot = layer, slot

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        self._slot.hidden_out = out[0] if isinstance(out, tuple) else out
        return out

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


def _inner_attribute(wrapper: nn.Module, name: str) -> Any:
    """Models read attributes such as `attention_type` off their layers."""
    modules = wrapper.__dict__["_modules"]
    return modules["layer"] if name == "layer" else getattr(modules["layer"], name)


class _WantedRows(nn.Module):
    """The LM head over the tokens whose logits are wanted, and no others."""

    def __init__(self, head: nn.Module, slot: _StepSlot) -> None:
        super().__init__()
        self.head, self._slot = head, slot

    def forward(self, hidden: Tensor) -> Tensor:
        assert self._slot.wanted is not None
        logits: Tensor = self.head(hidden[:, self._slot.wanted])
        return logits


class SpanModel:
    """The claim's layers with memory behind them, callable over any sub-span. Not thread-safe: the engine's.

    Made by `weights.load_span`.
    """

    def __init__(self, full: PreTrainedModel, span: Span, plan: Outline) -> None:
        self.config, self.span, self.outline = full.config, span, plan
        self.layers_total = len(plan.layers)
        if not Span(0, self.layers_total).covers(span):
            raise ValueError(f"layers {span} of a model that has {self.layers_total}")
        self.width: int = full.config.hidden_size
        self.vocab: int = full.config.vocab_size
        self.kv = kv_layers(full.config)[span.start : span.stop]
        self.packs = packs_sessions(full.config)
        self._slot = _StepSlot()
        self._layers = list(full.get_submodule(plan.layers_path))[span.start : span.stop]
        for layer in self._layers:
            for module in layer.modules():
                module.step_slot = self._slot
        self._shell = self._prune(full)
        self._views: dict[Span, PreTrainedModel] = {}
        parameter = next(self._layers[0].parameters())
        self.dtype, self.device = parameter.dtype, parameter.device

    @torch.inference_mode()
    def forward(self, step: PackedStep) -> StepOutput:
        """Run `step.span` over new tokens, writing each session's KV (its `length` is left to the caller).

        The caches have been `begin`-ed. Raises what torch raises.
        """
        view, slot = self._view(step.span), self._slot
        is_last = step.span.stop == self.layers_total
        try:
            slot.rows = step.rows
            inputs: dict[str, Any] = {"position_ids": self._positions(step.rows), "use_cache": False}
            if step.span.start == 0:
                assert step.ids is not None
                inputs["input_ids"] = step.ids.to(self.device)[None]
            else:
                assert step.hidden is not None
                slot.hidden_in = step.hidden.to(self.device, self.dtype)[None]
                inputs["inputs_embeds"] = slot.hidden_in
            slot.wanted = self._wanted(step.rows) if is_last else None
            logits = None
            if slot.wanted is not None:
                logits = view(**inputs).logits[0].float()
            else:
                view.base_model(**inputs)
            assert slot.hidden_out is not None
            return StepOutput(slot.hidden_out[0], logits)
        finally:
            slot.clear()

    def new_cache(self, positions: int, span: Span | None = None) -> SessionCache:
        """A cache outside of any pool, for trial steps and tests."""
        span = span or self.span
        kv = self.kv[span.start - self.span.start : span.stop - self.span.start]
        return SessionCache(span, kv, positions, dtype=self.dtype, device=self.device)

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor that holds weights, each once."""
        seen: set[int] = set()
        for module in (self._shell, *self._layers):
            for parameter in module.parameters():
                if id(parameter) not in seen and parameter.device.type != "meta":
                    seen.add(id(parameter))
                    yield parameter

    def _positions(self, rows: Sequence[Row]) -> Tensor:
        if len(rows) == 1:
            row = rows[0]
            return torch.arange(row.position, row.position + row.tokens, device=self.device)[None]
        numbers = [p for row in rows for p in range(row.position, row.position + row.tokens)]
        return torch.tensor([numbers], device=self.device)

    def _wanted(self, rows: Sequence[Row]) -> Tensor | None:
        wanted: list[int] = []
        end = 0
        for row in rows:
            end += row.tokens
            wanted += range(end - row.logits, end)
        return torch.tensor(wanted, device=self.device) if wanted else None

    def _prune(self, full: PreTrainedModel) -> PreTrainedModel:
        """What surrounds the layers; parts that this claim doesn't have become no-ops."""
        absent = set(() if self.span.start == 0 else self.outline.before)
        absent |= set(() if self.span.stop == self.layers_total else self.outline.after)
        shell, copies = _copy_along(full, self.outline.layers_path)
        copies[-1]._modules[self.outline.layers_path.rpartition(".")[2]] = nn.ModuleList()
        for path in {name.rpartition(".")[0] for name in absent}:
            parent = shell.get_submodule(path.rpartition(".")[0])
            parent._modules[path.rpartition(".")[2]] = _stand_in(full.get_submodule(path))
        return shell

    def _view(self, span: Span) -> PreTrainedModel:
        view = self._views.get(span)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.pop(next(iter(self._views)))
            view = self._views[span] = self._make_view(span)
        return view

    def _make_view(self, span: Span) -> PreTrainedModel:
        if not self.span.covers(span):
            raise ValueError(f"layers {span} are not within the claim {self.span}")
        layers: list[nn.Module] = self._layers[span.start - self.span.start : span.stop - self.span.start]
        layers[-1] = _Exit(layers[-1], self._slot)
        if span.start > 0:
            layers[0] = _Entry(layers[0], self._slot)
        view, copies = _copy_along(self._shell, self.outline.layers_path)
        config = _cut_config(self.config, span)
        for module in copies:
            if isinstance(getattr(module, "config", None), PretrainedConfig):
                module.config = config
        owner, _, name = self.outline.layers_path.rpartition(".")
        listed = nn.ModuleList()
        listed._modules = {str(i): layer for i, layer in enumerate(layers)}
        view.get_submodule(owner)._modules[name] = listed
        if span.stop == self.layers_total:
            head = view.get_output_embeddings()
            view.set_output_embeddings(_WantedRows(head, self._slot))
        return view


def _copy_along(model: PreTrainedModel, path: str) -> tuple[PreTrainedModel, list[nn.Module]]:
    """A copy of the modules from the top down to the owner of `path`; everything beside them is shared."""
    copies = [_shallow(model)]
    for name in path.split(".")[:-1]:
        child = _shallow(copies[-1]._modules[name])
        copies[-1]._modules[name] = child
        copies.append(child)
    return copies[0], copies


def _shallow(module: Any) -> Any:
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    made._modules = dict(module._modules)
    return made


class _Zeros(nn.Module):
    """Stands in for learned positions, which layer 0's peer has already added."""

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=positions.device)  # without dimensions: promotes no dtype


def _stand_in(module: nn.Module) -> nn.Module:
    return _Zeros() if isinstance(module, nn.Embedding) else nn.Identity()


def _cut_config(config: PretrainedConfig, span: Span) -> PretrainedConfig:
    """For the loop over the layers: their number, and the lists that it reads by its own counter."""
    cut, total = copy.deepcopy(config), config.num_hidden_layers
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == total and "layer" in name:
            object.__setattr__(cut, name, value[span.start : span.stop])
    object.__setattr__(cut, cut.attribute_map.get("num_hidden_layers", "num_hidden_layers"), len(span))
    return cut


# ---------------------------------------------------------------- tensors on the wire


def to_raw(tensor: Tensor) -> RawTensor:
    """A CPU tensor as it travels. Copies, so that a packed step's other rows aren't kept alive."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def from_raw(raw: RawTensor) -> Tensor:
    """The reverse. Shares memory with `raw` where that is writable, else copies."""
    data, dtype = memoryview(raw.data), getattr(torch, raw.dtype)
    if not data.nbytes:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).reshape(raw.shape)
