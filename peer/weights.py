"""Load exactly one span: each of its tensors from its file into its final memory, and nothing more.

Invariant: at no time is more than the span's own bytes plus a piece of one tensor's conversion held, and a
loaded span depends on no file and no page cache.

How tensors are stored is the business of a `WeightFormat` (`_format`): `peer.safetensors_weights`, `peer.gguf_weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from peer.checkpoint import Checkpoint, Part, WeightFormat
from peer.gguf_weights import GgufFormat
from peer.held import assembled, held_dtypes, pick_weight_dtype
from peer.model import SpanModel
from peer.outline import Outline, build_full
from peer.proof import proven_outline
from peer.safetensors_weights import SafetensorsFormat
from routing.spans import Span
from swarm.errors import BrokenModel

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (as they will lie in memory)


def _format(checkpoint: Checkpoint) -> WeightFormat:
    """How this checkpoint's weights are stored."""
    if any(spec.file.lower().endswith(".gguf") for spec in checkpoint.tensors.values()):
        return GgufFormat()
    return SafetensorsFormat()


# ---------------------------------------------------------------- what a span needs


def span_tensors(checkpoint: Checkpoint, span: Span) -> list[str]:
    """Names, in the checkpoint, of every tensor that the span needs. Raises BrokenModel if one is missing."""
    plan = proven_outline(checkpoint.config)
    sources = _format(checkpoint).sources(checkpoint, plan)
    return [part.name for name in plan.names(span) for part in _parts(checkpoint, plan, sources, name)]


@dataclass(frozen=True, slots=True)
class SpanPrices:
    """Bytes of a model's parts once loaded, from the files' headers. Called with a span: its bytes.

    shared: bytes of tied tensors, which a span with both ends holds once. matrices: what they are held as.
    """

    layers: tuple[int, ...]
    before: int
    after: int
    shared: int
    weight_dtype: torch.dtype

    def __call__(self, span: Span) -> int:
        has_first, has_last = span.start == 0, span.stop == len(self.layers)
        ends = has_first * self.before + has_last * self.after - (has_first and has_last) * self.shared
        return sum(self.layers[span.start : span.stop]) + ends


def span_prices(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu") -> SpanPrices:
    """What every span of the model costs where it computes in `dtype`. Raises BrokenModel if a tensor is missing.

    Compiles the loops that will run them, so what is free is to be asked afterwards.
    """
    plan = proven_outline(checkpoint.config)
    sources = _format(checkpoint).sources(checkpoint, plan)
    full = build_full(checkpoint.config, dtype, plan.way)
    weight_dtype = pick_weight_dtype(checkpoint, full, plan, sources, dtype, device)
    held = held_dtypes(full, dtype, weight_dtype)

    def price(name: str) -> int:
        _parts(checkpoint, plan, sources, name)
        return prod(plan.shapes[name]) * held[name].itemsize

    shared = sum(price(name) for name in plan.after if plan.ties.get(name) in plan.before)
    return SpanPrices(
        tuple(sum(map(price, names)) for names in plan.layers),
        sum(map(price, plan.before)),
        sum(map(price, plan.after)),
        shared,
        weight_dtype,
    )


def _parts(
    checkpoint: Checkpoint, plan: Outline, sources: Mapping[str, Sequence[Part]], name: str
) -> Sequence[Part]:
    """Where a tensor of the model comes from. A tied one may be stored under either name."""
    tied = plan.ties.get(name, name)
    aliases = [tied, name, *(n for n, first in plan.ties.items() if first == tied)]
    for alias in aliases:
        if alias in sources:
            return sources[alias]
    files = sorted({spec.file for spec in checkpoint.tensors.values()})
    if len(files) == 1:
        raise BrokenModel(f"tensor {name} isn't in {files[0]}; fetch that file again")
    raise BrokenModel(
        f"tensor {name} is in none of the model's {len(files)} weight files, {files[0]} to {files[-1]}; "
        "fetch them and their index again"
    )


# ---------------------------------------------------------------- loading


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    weight_dtype: torch.dtype | None = None,
) -> SpanModel:
    """The span with its weights. weight_dtype: as it was priced (None: as it would be).

    Raises BrokenModel naming tensor and file if one is missing, cut or misshapen.
    """
    plan, form = proven_outline(checkpoint.config), _format(checkpoint)
    sources, full = form.sources(checkpoint, plan), build_full(checkpoint.config, dtype, plan.way)
    parts = {name: _parts(checkpoint, plan, sources, name) for name in plan.names(span)}
    if weight_dtype is None:
        weight_dtype = pick_weight_dtype(checkpoint, full, plan, sources, dtype, device)
    held = held_dtypes(full, dtype, weight_dtype)
    total, done = sum(prod(plan.shapes[name]) * held[name].itemsize for name in parts), 0
    with form.open(checkpoint) as files:

        def fill(name: str, final: Tensor) -> None:
            nonlocal done
            for part in parts[name]:
                files.fill(final, part)
            done += final.nbytes
            if progress is not None:
                progress(done, total)

        model = assembled(full, span, plan, held, dtype, device, fill)
    if weight_dtype != dtype and (model.fused is None or model.fused.compiled is None):
        log.warning("layers %s run slowly: their matrices are widened for every token; try --dtype bfloat16", span)
    return model
