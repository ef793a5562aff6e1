"""What memory the tensors of a span end up in: as which dtype each is held, and which lie together.

Matrices that were published in bfloat16 stay so where a peer computes in float32 and its loops widen them as they read
(`kernels.py`): the same numbers, half the memory, and nearly twice the tokens a second, for reading weights is what a
token waits for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from peer.checkpoint import Checkpoint, Part
from peer.compiled import WIDENED, prepare
from peer.families import Way
from peer.fused import is_known
from peer.matrix import WIDENING
from peer.model import SpanModel
from peer.outline import Outline, Said, build_full, put_tensor
from peer.proof import small_model
from routing.spans import Span

# Matrices that are applied to the same input, by the last parts of their names: `peer.fused` runs each group as one.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


# ---------------------------------------------------------------- as which dtype


def held_dtypes(full: PreTrainedModel, dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What each tensor of `full`, which was built as `dtype`, is held as. weight_dtype: as `pick_weight_dtype` says."""
    held = _as_transformers_holds(full, dtype)
    if weight_dtype != dtype:
        held |= {name: weight_dtype for name, tensor in full.state_dict().items() if tensor.ndim > 1}
    return held


def _as_transformers_holds(full: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """A few families keep some (routers, mostly) in float32 whatever the rest is in: by patterns that are searched for
    in the name, some of them in float16 only, or by giving the parameter a type of its own.
    """
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(full._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(full._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(sorted(part.replace("*", ".*") for part in kept)) or "$^")
    return {
        name: torch.float32 if pattern.search(name) else tensor.dtype
        for name, tensor in full.state_dict().items()
    }


def pick_weight_dtype(
    checkpoint: Checkpoint,
    full: PreTrainedModel,
    plan: Outline,
    sources: Mapping[str, Sequence[Part]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.dtype:
    """What matrices are held as where `full` computes in `dtype`: that, or bfloat16 if they all come so and `can_widen`
    says that this is right. Compiles the loops that will run the layers, where they are for that."""
    if torch.device(device).type != "cpu":
        return dtype
    picked = dtype
    if dtype == torch.float32 and _stored(checkpoint, plan, sources) == {"BF16"}:
        picked = torch.bfloat16 if can_widen(checkpoint.config, full, plan) else dtype
    if _has_known_layers(full, plan):
        prepare(picked, dtype)
    return picked


def _stored(checkpoint: Checkpoint, plan: Outline, sources: Mapping[str, Sequence[Part]]) -> set[str]:
    """As what the model's matrices are stored."""
    matrices = (parts for name, parts in sources.items() if len(plan.shapes[name]) > 1)
    return {checkpoint.tensors[part.name].dtype for parts in matrices for part in parts}


def can_widen(config: PretrainedConfig, full: PreTrainedModel, plan: Outline) -> bool:
    """Whether models of this shape that compute in float32 on a CPU run in loops that widen bfloat16 as they read it.

    Compiles them, and tries a small model once, which takes a second at most for any real one's shape.
    """
    owners = {name.rpartition(".")[0] for name, tensor in full.state_dict().items() if tensor.ndim > 1}
    known = _has_known_layers(full, plan) and all(type(full.get_submodule(owner)) in WIDENING for owner in owners)
    return known and prepare(*WIDENED) is not None and _small_one_widens(Said.of(config), plan.way)


def _has_known_layers(full: PreTrainedModel, plan: Outline) -> bool:
    return all(map(is_known, full.get_submodule(plan.layers_path)))


@lru_cache(maxsize=4)
def _small_one_widens(said: Said, way: Way) -> bool:
    try:
        small, plan, weights = small_model(said.config, way)
        small.max_position_embeddings = said.config.max_position_embeddings  # up to which it is tried
        full, span = build_full(small, torch.float32, plan.way), Span(0, len(plan.layers))
        held = held_dtypes(full, torch.float32, torch.bfloat16)
        model = assembled(full, span, plan, held, torch.float32, "cpu", lambda name, final: final.copy_(weights[name]))
    except Exception:  # whatever a family's code says to a small one: there is another way
        return False
    return model.fused is not None and model.fused.compiled is not None


# ---------------------------------------------------------------- together


def assembled(
    full: PreTrainedModel,
    span: Span,
    plan: Outline,
    held: Mapping[str, torch.dtype],
    dtype: torch.dtype,
    device: torch.device | str,
    fill: Callable[[str, Tensor], object],
) -> SpanModel:
    """The span of a model without memory, with memory. fill: writes a tensor, given its name and its memory."""
    names = plan.names(span)
    finals = Finals(plan.shapes, held, device, names)
    for name in names:
        final = finals.take(name)
        fill(name, final)
        put_tensor(full, plan, name, final)
    move_buffers(full, device)
    return SpanModel(full, span, plan, dtype)


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


def move_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Rotary frequencies and the like, which were computed rather than loaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)
