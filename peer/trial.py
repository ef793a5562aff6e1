"""What one token shows on its way through a model without memory: what each layer keeps, and what it attends to.

The layers are replaced by `_Trial`s, which run each as far as its attention (what follows may not run on meta: routing
doesn't) and hand on what layer 0 was given. Who notes is an attention function of its own, with masks of its own that
are asked what they would hide; or where a family has no use for such functions, a cache.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from peer.kv import LayerKV

NOTING = "layerswarm-noting"  # an attention of its own, so that the one that serves needn't ask if it is a trial
FAR = 1 << 30  # positions: no window is so long
SQUARE = 200  # a position whose keys are all asked for, whatever the window
MOST_KEYS = 1 << 16  # that one position is asked about

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # batch, head, query, key -> visible?


def accepted(model: PreTrainedModel) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    return frozenset(inspect.signature(model.base_model.forward).parameters)


class UnlikeMask(Exception):
    """A mask that our attention function doesn't have."""


class _ReachedAttention(Exception):
    """Ends a layer's trial: what it stores is known, and what follows may not run on meta (routing does not)."""


class _PassedLayers(Exception):
    """Ends the model's trial."""


@dataclass
class Notes:
    """called: modules outside the layers that ran before layer 0. kv[i]: what layer i wanted to store,
    None: nothing. failed: the first error of a layer that didn't get as far as its attention.
    masks: those that were made, with (window, chunked) of each;
    one of an unknown kind only matters to layers that take it."""

    kv: list[LayerKV | None]
    masks: list[tuple[int | None, bool] | UnlikeMask] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    hidden: Tensor | None = None
    layer: int = 0
    failed: Exception | None = None

    def note(self, key: Tensor, value: Tensor, window: int | None = None, chunked: bool = False) -> None:
        """key: [1, heads, 1, dim]."""
        self.kv[self.layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3], window, chunked)
        raise _ReachedAttention


_notes: ContextVar[Notes] = ContextVar("notes of the trial that runs")


def _noting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *_: Any,
    sliding_window: int | None = None,
    **__: Any,
) -> Any:
    """Notes what eager attention would do: it heeds its mask alone, so sliding_window only has to agree."""
    notes = _notes.get()
    reach = (None, False) if attention_mask is None else notes.masks[int(attention_mask.item())]
    if isinstance(reach, UnlikeMask):
        raise reach
    if sliding_window not in (None, reach[0]):
        raise UnlikeMask(f"a window of {sliding_window} beside a mask of {reach[0] or 'all'}")
    notes.note(key, value, *reach)


def _noting_mask(*_: Any, mask_function: MaskFunction, local_size: int | None = None, **__: Any) -> Tensor:
    """In place of a mask: its number in the notes."""
    notes = _notes.get()
    try:
        notes.masks.append(reach_of(mask_function, local_size))
    except UnlikeMask as error:
        notes.masks.append(error)
    return torch.tensor([[[[len(notes.masks) - 1]]]])


AttentionInterface.register(NOTING, _noting_attention)
AttentionMaskInterface.register(NOTING, _noting_mask)


def reach_of(mask_function: MaskFunction, local_size: int | None = None) -> tuple[int | None, bool]:
    """(window, chunked) as `LayerKV` has them, of a mask by what it says for positions far out and near.

    local_size: of one that can't be asked, being made of tensors on meta; transformers makes only chunks so.
    Raises UnlikeMask if it is another kind.
    """
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    def first(query: int) -> int:
        return bisect_left(range(query), True, key=lambda key: sees(query, key))

    try:
        mask_function(zero, zero, zero, zero)
    except NotImplementedError:  # it holds a tensor on meta
        return local_size, True
    since = first(FAR)
    if since == 0:
        kv = LayerKV(0, 0, 0)
    elif first(FAR + 1) == since + 1:
        kv = LayerKV(0, 0, 0, FAR + 1 - since)
    else:
        later = bisect_left(range(FAR, 2 * FAR), True, key=lambda query: first(query) != since)
        kv = LayerKV(0, 0, 0, FAR + later - since, chunked=True)
    size = kv.window or 1
    for query in (0, 1, size - 1, size, size + 1, 3 * size + 1, SQUARE, FAR + 7):
        seen = kv.first_seen(query)
        keys = _keys_to_ask(0 if query < MOST_KEYS else max(0, seen - size - 1), seen, query)
        said = torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, query), keys)).broadcast_to(keys.shape)
        if not torch.equal(said, (keys >= seen) & (keys <= query)):
            raise UnlikeMask("a mask that is neither causal, nor a window, nor chunks")
    return kv.window, kv.chunked


def _keys_to_ask(low: int, seen: int, query: int) -> Tensor:
    """[n] int64: every key from `low` to just after `query`, or where those are too many, so many evenly and all
    around the two ends of what `query` is to see."""
    step = -(-(query + 3 - low) // MOST_KEYS)
    ends = [at for end in (seen, query) for at in range(max(0, end - 2), end + 3)]
    return torch.cat([torch.arange(low, query + 3, step), torch.tensor(ends)])


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


class NotingCache(Cache):
    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_NotingLayer() for _ in range(layers)])


class _Trial(nn.Module):
    """A layer that runs as far as its attention and hands on what layer 0 was given."""

    def __init__(self, layer: nn.Module, index: int, count: int, notes: Notes) -> None:
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


def run_up_to_attention(model: PreTrainedModel, path: str, cache: Cache | None) -> Notes:
    """Run one token up to the attention of each layer in turn."""
    count = len(model.get_submodule(path))
    notes = Notes([None] * count)
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    names = accepted(model)
    if "position_ids" in names:
        inputs["position_ids"] = ids
    if cache is not None:
        inputs[cache_argument(names)] = cache
    else:  # with one, transformers doesn't look into the positions for several texts in a row
        inputs["attention_mask"] = torch.ones_like(ids)
    for module in model.modules():
        if hasattr(module, "rope_type"):  # what scales by the text's length looks at positions, and meta has none
            kinds = module.rope_type
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
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
def _trials(model: PreTrainedModel, path: str, notes: Notes) -> Iterator[None]:
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
