"""A whole model without memory behind its parameters, and the plan of which tensor belongs where.

`AutoModelForCausalLM` is built whole, from the config, but with its parameters on the meta device, where they
cost nothing. So each layer is constructed by transformers with its true index, and no list, count or "every
fourth layer is different" of a config needs translation.

What precedes the layers, whether their attention is ours to compute, and what each keeps per position is not
read off names in a config but seen (`trial.py`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights

from peer.attention import ATTENTION
from peer.families import Way, family, original_context, refused
from peer.kv import LayerKV
from peer.trial import NOTING, Notes, NotingCache, accepted, run_up_to_attention
from routing.spans import Span
from swarm.errors import UnsupportedModel

# larger than any table that is computed, smaller than the experts of one layer of any model that matters
LARGEST_BUFFER = 1 << 25
LARGEST_TABLE = 1 << 24  # of positions or of a head's frequencies: as many positions as a text may have
_FILLED = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


class _ParametersOnMeta(TorchFunctionMode):
    """Parameters go to meta, which takes no memory; computed buffers are real.

    Parameters are made with `torch.empty` almost everywhere in torch and transformers; the few that are made
    full of something are told from buffers by their size, or are small.
    A mode rather than `torch.device("meta")`, because rotary frequencies and the like are buffers that no
    checkpoint holds; and a mode is this thread's only, a patched nn.Module would not be.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None and (func is torch.empty or (func in _FILLED and _is_large(args))):
            kwargs["device"] = "meta"
        if func is torch.arange:  # what every table begins with
            _check_table(args)
        return func(*args, **kwargs)


def _check_table(bounds: Sequence[Any]) -> None:
    numbers = [n for n in bounds if isinstance(n, int | float)]
    if any(abs(n) > LARGEST_TABLE for n in numbers):
        raise ValueError(f"it computes a table of {max(map(abs, numbers)):,.0f} numbers")


def _is_large(shape: Sequence[Any]) -> bool:
    sizes = shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape
    return prod(n for n in sizes if isinstance(n, int)) > LARGEST_BUFFER


_building = threading.Lock()  # no_init_weights patches transformers' init functions while it lasts


def build_full(config: PretrainedConfig, dtype: torch.dtype, way: Way) -> PreTrainedModel:
    """The whole model of `config`, to run that way, with no memory behind its parameters."""
    return _build(config, dtype, None if way is Way.OWN_CACHE else ATTENTION)


def build_whole(config: PretrainedConfig, attention: str | None = "eager") -> PreTrainedModel:
    """The same as transformers itself runs it, in float32. attention: eager does all that a config may ask for;
    None for what transformers chooses."""
    return _build(config, torch.float32, attention)


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
class Said:
    """A config as the key of a cache: by what it says."""

    text: str
    config: PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig) -> Said:
        return cls(config.to_json_string(use_diff=False), config)


def outline(config: PretrainedConfig, way: Way | None = None) -> Outline:
    """The outline of `config`'s model. Built once per config. way: None for the best that its code allows.

    Raises UnsupportedModel if it can't be split, or not run that way.
    """
    return _outline(Said.of(config), way)


@lru_cache(maxsize=4)
def _outline(said: Said, way: Way | None) -> Outline:
    config = said.config
    try:
        found = _packing_outline(config) if way is not Way.OWN_CACHE else None
        return found or _own_cache_outline(config)
    except (ImportError, UnsupportedModel):
        raise
    except Exception as error:  # whatever a family's code does on meta
        raise refused(config, f"it can't be taken apart ({_line(error)})") from error


def _packing_outline(config: PretrainedConfig) -> Outline | None:
    """None if the family's attention doesn't go through the interface, or it doesn't take positions."""
    try:
        model = _build(config, torch.float32, NOTING).to("meta")
    except KeyError:  # a table of its own, of attention classes
        return None
    if "position_ids" not in accepted(model):
        return None
    path = layers_path(model)
    notes = run_up_to_attention(model, path, None)
    if not all(notes.kv):
        return None
    return _outline_of(model, path, notes, Way.PACKED if original_context(config) is None else Way.ALONE)


def _own_cache_outline(config: PretrainedConfig) -> Outline:
    model = _build(config, torch.float32, None).to("meta")
    path = layers_path(model)
    notes = run_up_to_attention(model, path, NotingCache(len(model.get_submodule(path))))
    said = family(config).kv
    if said is not None:
        notes.kv, notes.failed = [said(config)] * len(notes.kv), None
    if notes.failed is not None:
        raise refused(config, f"what its layers keep between tokens isn't known ({_line(notes.failed)})")
    if not any(notes.kv):
        raise refused(config, "its layers keep no keys and values in transformers' cache")
    return _outline_of(model, path, notes, Way.OWN_CACHE)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _outline_of(model: PreTrainedModel, path: str, notes: Notes, way: Way) -> Outline:
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


def layers_path(model: PreTrainedModel) -> str:
    """Of the list of decoder layers: of all lists of that length the one that holds most."""
    count = model.config.num_hidden_layers
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not sizes or not count:
        raise refused(model.config, f"it has no list of {count} layers to split")
    return max(sizes, key=lambda name: sizes[name])
