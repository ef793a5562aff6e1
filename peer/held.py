"""What memory the tensors of a span end up in: as which dtype each is held, and which lie together.

Matrices that were published in bfloat16 stay so where a peer computes in float32 and its loops widen them as they read
(`kernels.py`): the same numbers, half the memory, and nearly twice the tokens a second, for reading weights is what a
token waits for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from peer.checkpoint import Checkpoint, Part
from peer.compiled import prepare
from peer.fused import is_known
from peer.matrix import widens
from peer.model import SpanModel
from peer.outline import Outline, build_full, put_tensor
from peer.proof import small_model
from routing.spans import Span

# Matrices that are applied to the same input, by the last parts of their names: `peer.fused` runs each group as one.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


# ---------------------------------------------------------------- as which dtype


def held_dtypes(model: PreTrainedModel, dtype: torch.dtype, matrices: torch.dtype) -> dict[str, torch.dtype]:
    """What each tensor of `model`, which was built as `dtype`, is held as. matrices: as `matrix_dtype` says."""
    held = _as_transformers_holds(model, dtype)
    if matrices != dtype:
        held |= {name: matrices for name, tensor in model.state_dict().items() if tensor.ndim > 1}
    return held


def _as_transformers_holds(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """A few families keep some (routers, mostly) in float32 whatever the rest is in: by patterns that are searched for
    in the name, some of them in float16 only, or by giving the parameter a type of its own.
    """
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(sorted(part.replace("*", ".*") for part in kept)) or "$^")
    return {
        name: torch.float32 if pattern.search(name) else tensor.dtype
        for name, tensor in model.state_dict().items()
    }


def matrix_dtype(
    checkpoint: Checkpoint,
    plan: Outline,
    sources: Mapping[str, Sequence[Part]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.dtype:
    """What the matrices of a model that computes in `dtype` are held as: that, or bfloat16 if they all come so, and a
    small model of this shape, held so, was seen to run in loops that widen them."""
    kinds = {
        checkpoint.tensors[part.name].dtype
        for name, parts in sources.items()
        for part in parts
        if len(plan.shapes[name]) > 1
    }
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu or dtype != torch.float32 or kinds != {"BF16"} or not can_widen(checkpoint.config, plan):
        return dtype
    return torch.bfloat16


def can_widen(config: PretrainedConfig, plan: Outline) -> bool:
    """Whether models of this shape that compute in float32 on a CPU run in loops that widen bfloat16 as they read it.

    Compiles them, and tries a small model, which takes less than a second.
    """
    return _runs_widening(_Asked(config.to_json_string(use_diff=False), config, plan))


@dataclass(frozen=True)
class _Asked:
    """A config as the key of a cache: by what it says."""

    text: str
    config: PretrainedConfig = field(compare=False)
    plan: Outline = field(compare=False)


@lru_cache(maxsize=4)
def _runs_widening(asked: _Asked) -> bool:
    full = build_full(asked.config, torch.float32, asked.plan.way)
    owners = {name.rpartition(".")[0] for name, tensor in full.state_dict().items() if tensor.ndim > 1}
    layers = full.get_submodule(asked.plan.layers_path)
    if not all(map(is_known, layers)) or not all(widens(full.get_submodule(owner)) for owner in owners):
        return False
    if prepare(torch.float32, torch.bfloat16) is None:
        return False
    try:
        model = _small_span(asked.config, asked.plan)
    except Exception:  # whatever a family's code says to a small one: there is another way
        return False
    return model.fused is not None and model.fused.compiled is not None


def _small_span(config: PretrainedConfig, plan: Outline) -> SpanModel:
    """All of a small random model of that shape, its matrices in bfloat16."""
    small, plan, weights = small_model(config, plan.way)
    full, names = build_full(small, torch.float32, plan.way), plan.names(Span(0, len(plan.layers)))
    finals = Finals(plan.shapes, held_dtypes(full, torch.float32, torch.bfloat16), "cpu", names)
    for name in names:
        put_tensor(full, plan, name, finals.take(name).copy_(weights[name]))
    return SpanModel(full, Span(0, len(plan.layers)), plan, torch.float32)


# ---------------------------------------------------------------- together


class Finals:
    """The memory that the span's tensors end up in: each its own, but for those of a group, which lie one after the
    other in one piece."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device | str,
        names: Sequence[str],
    ) -> None:
        self._shapes, self._dtypes, self._device = shapes, dtypes, device
        self._names = frozenset(names)
        self._waiting: dict[str, Tensor] = {}  # parts of a piece that was taken already

    def take(self, name: str) -> Tensor:
        """Its memory, not yet written. Once for each name."""
        if name not in self._waiting:
            self._make(self._group(name))
        return self._waiting.pop(name)

    def _group(self, name: str) -> list[str]:
        """All that lie together with `name`, in their order."""
        parent, _, rest = name.rpartition(".")
        parent, _, part = parent.rpartition(".")
        for parts in TOGETHER:
            group = [f"{parent}.{each}.{rest}" for each in parts]
            if part in parts and self._names.issuperset(group) and self._alike(group):
                return group
        return [name]

    def _alike(self, group: Sequence[str]) -> bool:
        return len({(self._dtypes[one], *self._shapes[one][1:]) for one in group}) == 1

    def _make(self, group: Sequence[str]) -> None:
        rows = [self._shapes[one][0] if self._shapes[one] else 1 for one in group]
        shape = (sum(rows), *self._shapes[group[0]][1:]) if len(group) > 1 else self._shapes[group[0]]
        piece = torch.empty(tuple(shape), dtype=self._dtypes[group[0]], device=self._device)
        self._waiting |= zip(group, piece.split(rows) if len(group) > 1 else (piece,), strict=True)
