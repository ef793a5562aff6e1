"""A whole model without memory behind its parameters, and the plan of which tensor belongs where.

`AutoModelForCausalLM` is built whole, from the config, but with its parameters on the meta device, where they
cost nothing. So each layer is constructed by transformers with its true index, and no list, count or "every
fourth layer is different" of a config needs translation.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights

from peer.attention import ATTENTION
from routing.spans import Span
from swarm.errors import UnsupportedModel


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
