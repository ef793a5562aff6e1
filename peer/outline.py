"""A whole model without memory behind its parameters, and the plan of which tensor belongs where.

`AutoModelForCausalLM` is built whole, from the config, but with its parameters on the meta device, where they
cost nothing. So each layer is constructed by transformers with its true index, and no list, count or "every
fourth layer is different" of a config needs translation.

What precedes the layers, whether their attention is ours to compute, and what each keeps per position is not
read off names in a config but seen: one token runs through the meta model as far as each layer's attention
(`_Trial`), first with an attention function that notes what it is given, then, where that wasn't called, with a cache
that does.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights

from peer.attention import ATTENTION
from peer.families import Way, depends_on_length, windows
from peer.kv import LayerKV
from routing.spans import Span
from swarm.errors import UnsupportedModel

_NOTING = "layerswarm-noting"  # an attention of its own, so that the one that serves needn't ask if it is a trial


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


def build_full(config: PretrainedConfig, dtype: torch.dtype, way: Way) -> PreTrainedModel:
    """The whole model of `config`, to run that way, with no memory behind its parameters."""
    return _build(config, dtype, None if way is Way.OWN_CACHE else ATTENTION)


def _build(config: PretrainedConfig, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """attention: transformers' name for it; None for what it chooses itself."""
    config = copy.deepcopy(config)
    # some families look for padding in every input, to warn about it; and some validate what is set here
    object.__setattr__(config, "pad_token_id", None)
    with _building, no_init_weights(), _ParametersOnMeta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()  # no_init_weights leaves this out too
    model.eval()
    return model


@dataclass(frozen=True, slots=True)
class Outline:
    """Where the tensors of a model belong, by their names in the whole model, and what its layers keep.

    layers_path: of the list of layers. layers[i]: the names of layer i. before: what precedes layer 0 (embedding).
    after: what follows the last (final norm, head). ties: name -> the name whose tensor it shares.
    transforms: transformers' renamings and merges from a checkpoint's names to these.
    way: how steps run. kv[i]: what layer i stores per position, run that way.
    """

    layers_path: str
    layers: tuple[tuple[str, ...], ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    ties: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    transforms: tuple[WeightTransform, ...]
    kv: tuple[LayerKV, ...]
    way: Way

    def names(self, span: Span) -> list[str]:
        """Everything that the span needs, each memory once."""
        names = [name for i in span for name in self.layers[i]]
        if span.start == 0:
            names = [*self.before, *names]
        if span.stop == len(self.layers):
            names += self.after
        there = set(names)
        return [name for name in names if self.ties.get(name) not in there]


@dataclass(frozen=True)
class _Asked:
    """A config and how it is to run, as the key of a cache: by what it says."""

    text: str
    way: Way | None
    config: PretrainedConfig = field(compare=False)


def outline(config: PretrainedConfig, way: Way | None = None) -> Outline:
    """The outline of `config`'s model. Built once per config. way: None for the best that its code allows.

    Raises UnsupportedModel if it can't be split, or not run that way.
    """
    return _outline(_Asked(config.to_json_string(use_diff=False), way, config))


@lru_cache(maxsize=4)
def _outline(asked: _Asked) -> Outline:
    config, kind = asked.config, asked.config.model_type
    try:
        found = _packing_outline(config) if asked.way is not Way.OWN_CACHE else None
        return found or _own_cache_outline(config)
    except (ImportError, UnsupportedModel):
        raise
    except Exception as error:  # whatever a family's code does on meta
        raise UnsupportedModel(f"a {kind} model can't be served: it can't be taken apart ({_line(error)})") from error


def _packing_outline(config: PretrainedConfig) -> Outline | None:
    """None if the family's attention doesn't go through the interface, or it doesn't take positions, or names
    other windows than its masks have."""
    try:
        model = _build(config, torch.float32, _NOTING).to("meta")
    except KeyError:  # a table of its own, of attention classes
        return None
    if "position_ids" not in accepted(model):
        return None
    path = layers_path(model)
    notes = _try(model, path, None)
    seen = windows(config) if _masks_windows(model) else [None] * len(notes.kv)
    if not all(notes.kv) or any(named not in (None, window) for named, window in zip(notes.windows, seen, strict=True)):
        return None
    notes.kv = [kv and replace(kv, window=window) for kv, window in zip(notes.kv, seen, strict=True)]
    return _outline_of(model, path, notes, Way.ALONE if depends_on_length(config) else Way.PACKED)


def _masks_windows(model: PreTrainedModel) -> bool:
    """Whether the family's code has masks for windows: configs also name windows that no code heeds."""
    return hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")


def _own_cache_outline(config: PretrainedConfig) -> Outline:
    model = _build(config, torch.float32, None).to("meta")
    path = layers_path(model)
    notes = _try(model, path, _NotingCache(len(model.get_submodule(path))))
    if notes.failed is not None:
        raise UnsupportedModel(
            f"a {config.model_type} model can't be served: what its layers keep between tokens "
            f"isn't known ({_line(notes.failed)})"
        )
    if not any(notes.kv):
        raise UnsupportedModel(
            f"a {config.model_type} model can't be served: its layers keep no keys and values in transformers' cache"
        )
    return _outline_of(model, path, notes, Way.OWN_CACHE)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _outline_of(model: PreTrainedModel, path: str, notes: _Notes, way: Way) -> Outline:
    layers: list[list[str]] = [[] for _ in notes.kv]
    outside = []
    state = model.state_dict(keep_vars=True)
    for name in state:
        if name.startswith(path + "."):
            layers[int(name[len(path) + 1 :].split(".", 1)[0])].append(name)
        else:
            outside.append(name)
    before = tuple(name for name in outside if name.rpartition(".")[0] in notes.called)
    after = tuple(name for name in outside if name not in before)
    ties = {
        name: first
        for name, tensor in state.items()
        if (first := next(n for n, t in state.items() if t is tensor)) != name
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    transforms = tuple(get_model_conversion_mapping(model))
    kv = tuple(kv or LayerKV(0, 0, 0) for kv in notes.kv)
    return Outline(path, tuple(map(tuple, layers)), before, after, ties, shapes, transforms, kv, way)


def put_tensor(model: PreTrainedModel, plan: Outline, name: str, tensor: Tensor) -> None:
    """Give the tensor to its module, and to those that share it."""
    first, parameter = plan.ties.get(name, name), nn.Parameter(tensor, requires_grad=False)
    for alias in {name, first, *(n for n, tied in plan.ties.items() if tied == first)}:
        owner, _, attribute = alias.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._parameters:
            module._parameters[attribute] = parameter
        else:
            module._buffers[attribute] = tensor


def accepted(model: PreTrainedModel) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    return frozenset(inspect.signature(model.base_model.forward).parameters)


def layers_path(model: PreTrainedModel) -> str:
    """Of the list of decoder layers: of all lists of that length the one that holds most."""
    count = model.config.num_hidden_layers
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not sizes:
        raise UnsupportedModel(f"a {model.config.model_type} model has no list of {count} layers to split")
    return max(sizes, key=lambda name: sizes[name])


# ---------------------------------------------------------------- one token through the meta model


class _ReachedAttention(Exception):
    """Ends a layer's trial: what it stores is known, and what follows may not run on meta (routing does not)."""


class _PassedLayers(Exception):
    """Ends the model's trial."""


@dataclass
class _Notes:
    """called: modules outside the layers that ran before layer 0. kv[i]: what layer i wanted to store,
    None: nothing. windows[i]: the window that it named, None: none. failed: the first error of a layer that
    didn't get as far as its attention."""

    kv: list[LayerKV | None]
    windows: list[int | None]
    called: set[str] = field(default_factory=set)
    hidden: Tensor | None = None
    layer: int = 0
    failed: Exception | None = None

    def note(self, key: Tensor, value: Tensor, window: int | None = None) -> None:
        """key: [1, heads, 1, dim]."""
        self.windows[self.layer] = window
        self.kv[self.layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3])
        raise _ReachedAttention


_notes: ContextVar[_Notes] = ContextVar("notes of the trial that runs")


def _noting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    sliding_window: int | None = None,
    **__: Any,
) -> Any:
    _notes.get().note(key, value, sliding_window)


AttentionInterface.register(_NOTING, _noting_attention)


class _NotingLayer(CacheLayerMixin):
    """Of a cache that holds nothing."""

    is_sliding = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        _notes.get().note(key_states, value_states)

    def lazy_initialization(self, *_: Any) -> None: ...

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class _NotingCache(Cache):
    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_NotingLayer() for _ in range(layers)])


class _Trial(nn.Module):
    """A layer that runs as far as its attention and hands on what layer 0 was given."""

    def __init__(self, layer: nn.Module, index: int, count: int, notes: _Notes) -> None:
        super().__init__()
        self.layer, self._index, self._count, self._notes = layer, index, count, notes

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        notes = self._notes
        if notes.hidden is None:
            notes.hidden = hidden_states
        notes.layer = self._index
        try:
            self.layer(notes.hidden, *args, **kwargs)
        except _ReachedAttention:
            pass
        except Exception as error:  # whatever a family does on meta; it counts only if nothing was noted
            notes.failed = notes.failed or error
        if self._index + 1 == self._count:
            raise _PassedLayers
        return notes.hidden

    def __getattr__(self, name: str) -> Any:
        return inner_attribute(self, name)


def inner_attribute(wrapper: nn.Module, name: str) -> Any:
    """Models read attributes such as `attention_type` off their layers."""
    modules = wrapper.__dict__["_modules"]
    return modules["layer"] if name == "layer" else getattr(modules["layer"], name)


def _try(model: PreTrainedModel, path: str, cache: Cache | None) -> _Notes:
    """Run one token up to the attention of each layer in turn."""
    count = len(model.get_submodule(path))
    notes = _Notes([None] * count, [None] * count)
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    names = accepted(model)
    if "position_ids" in names:
        inputs["position_ids"] = ids
    if cache is not None:
        inputs[cache_argument(names)] = cache
    token = _notes.set(notes)
    try:
        with _trials(model, path, notes), torch.inference_mode():
            model(**inputs)
    except _PassedLayers:
        pass
    finally:
        _notes.reset(token)
    return notes


def cache_argument(names: frozenset[str]) -> str:
    """What a forward calls its cache: `cache` from transformers 5.20 on, `past_key_values` before."""
    return "cache" if "cache" in names else "past_key_values"


@contextmanager
def _trials(model: PreTrainedModel, path: str, notes: _Notes) -> Iterator[None]:
    """While it lasts the layers are `_Trial`s, and what runs before them is noted."""

    def runs(name: str) -> None:
        if notes.hidden is None:
            notes.called.add(name)

    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: runs(name))
        for name, module in model.named_modules()
        if name and not f"{name}.".startswith(path + ".")
    ]
    listed = model.get_submodule(path)._modules
    layers = dict(listed)
    listed.update({str(i): _Trial(layer, i, len(layers), notes) for i, layer in enumerate(layers.values())})
    try:
        yield
    finally:
        listed.update(layers)
        for hook in hooks:
            hook.remove()
