"""Load exactly one span: each of its tensors from its file into its final memory, and nothing more.

Invariant: at no time is more than the span's own bytes plus one tensor's conversion held in anonymous
memory. Files are mapped, tensors are copied out of the mapping (with the dtype converted on the way), so a
loaded span depends on no file and no page cache.

How tensors are stored is the business of a `WeightFormat` (`_format`). For safetensors, which is here:
what a tensor is called in a checkpoint and in the model differ in some families; transformers' own tables
of renamings and merges say how, and are applied name by name (`_Safetensors.sources`), so that an expert's
matrix goes straight to its slice of the merged one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from peer.checkpoint import Checkpoint, Part, WeightFormat
from peer.model import SpanModel
from peer.outline import Outline, build_full, outline
from routing.spans import Span
from swarm.errors import BrokenModel, UnsupportedModel

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (as they will lie in memory)


def _format(checkpoint: Checkpoint) -> WeightFormat:
    """How this checkpoint's weights are stored."""
    return _Safetensors()


# ---------------------------------------------------------------- what a span needs


def span_tensors(checkpoint: Checkpoint, span: Span) -> list[str]:
    """Names, in the checkpoint, of every tensor that the span needs. Raises BrokenModel if one is missing."""
    plan = outline(checkpoint.config)
    sources = _format(checkpoint).sources(checkpoint, plan)
    return [part.name for name in plan.names(span) for part in _parts(plan, sources, name)]


@dataclass(frozen=True, slots=True)
class SpanPrices:
    """Bytes of a model's parts once loaded, from the files' headers. Called with a span: its bytes.

    shared: bytes of tied tensors, which a span with both ends holds once.
    """

    layers: tuple[int, ...]
    before: int
    after: int
    shared: int

    def __call__(self, span: Span) -> int:
        has_first, has_last = span.start == 0, span.stop == len(self.layers)
        ends = has_first * self.before + has_last * self.after - (has_first and has_last) * self.shared
        return sum(self.layers[span.start : span.stop]) + ends


def span_prices(checkpoint: Checkpoint, dtype: torch.dtype) -> SpanPrices:
    """What every span of the model costs as `dtype`. Raises BrokenModel if a tensor is missing."""
    plan = outline(checkpoint.config)
    sources = _format(checkpoint).sources(checkpoint, plan)

    def price(name: str) -> int:
        _parts(plan, sources, name)
        return prod(plan.shapes[name]) * dtype.itemsize

    shared = sum(price(name) for name in plan.after if plan.ties.get(name) in plan.before)
    return SpanPrices(
        tuple(sum(map(price, names)) for names in plan.layers),
        sum(map(price, plan.before)),
        sum(map(price, plan.after)),
        shared,
    )


def span_bytes(checkpoint: Checkpoint, span: Span, dtype: torch.dtype) -> int:
    """Bytes of the span's weights once loaded as `dtype`, embedding and head included where they belong."""
    return span_prices(checkpoint, dtype)(span)


def span_files(checkpoint: Checkpoint, span: Span) -> list[str]:
    """The files that hold the span's tensors."""
    return sorted({checkpoint.tensors[name].file for name in span_tensors(checkpoint, span)})


def _parts(plan: Outline, sources: Mapping[str, Sequence[Part]], name: str) -> Sequence[Part]:
    """Where a tensor of the model comes from. A tied one may be stored under either name."""
    tied = plan.ties.get(name, name)
    aliases = [tied, name, *(n for n, first in plan.ties.items() if first == tied)]
    for alias in aliases:
        if alias in sources:
            return sources[alias]
    raise BrokenModel(f"tensor {name} is in none of the model's files; download the model again")


# ---------------------------------------------------------------- loading


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> SpanModel:
    """The span with its weights. Raises BrokenModel naming tensor and file if one is missing, cut or misshapen."""
    plan, form = outline(checkpoint.config), _format(checkpoint)
    sources = form.sources(checkpoint, plan)
    full = build_full(checkpoint.config, dtype)
    names = plan.names(span)
    parts = {name: _parts(plan, sources, name) for name in names}
    total, done = sum(prod(plan.shapes[name]) for name in names) * dtype.itemsize, 0
    with form.open(checkpoint) as files:
        for name in names:
            final = torch.empty(plan.shapes[name], dtype=_dtype_of(full, name, dtype), device=device)
            for part in parts[name]:
                files.fill(final, part)
            _put(full, plan, name, final)
            done += final.numel() * dtype.itemsize
            if progress is not None:
                progress(done, total)
    _move_buffers(full, device)
    return SpanModel(full, span, plan)


def _dtype_of(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """A few families keep some tensors (routers, mostly) in float32 whatever the rest is in."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    return torch.float32 if any(module in name.split(".") for module in kept) else dtype


def _put(model: PreTrainedModel, plan: Outline, name: str, tensor: Tensor) -> None:
    """Give the tensor to its module, and to those that share it."""
    first, parameter = plan.ties.get(name, name), nn.Parameter(tensor, requires_grad=False)
    for alias in {name, first, *(n for n, tied in plan.ties.items() if tied == first)}:
        owner, _, attribute = alias.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._parameters:
            module._parameters[attribute] = parameter
        else:
            module._buffers[attribute] = tensor


def _move_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Rotary frequencies and the like, which were computed rather than loaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


# ---------------------------------------------------------------- safetensors


@dataclass(frozen=True, slots=True)
class SafetensorsPart:
    """A tensor of the checkpoint and the slice of the model's tensor that it fills (None: all of it)."""

    name: str
    index: int | None = None  # along dimension 0: which expert
    offset: int | None = None  # along what is then dimension 0: where it starts


class _Safetensors:
    """The `WeightFormat` of *.safetensors."""

    def sources(self, checkpoint: Checkpoint, plan: Outline) -> dict[str, list[SafetensorsPart]]:
        return _sources(checkpoint, plan)

    def open(self, checkpoint: Checkpoint) -> _SafetensorsFiles:
        return _SafetensorsFiles(checkpoint)


def _sources(checkpoint: Checkpoint, plan: Outline) -> dict[str, list[SafetensorsPart]]:
    sources: dict[str, list[SafetensorsPart]] = {}
    for stored in checkpoint.tensors:
        name, part = _translate(stored, plan)
        if name is not None:
            sources.setdefault(name, []).append(part)
    return {name: _placed(parts, plan.shapes[name], checkpoint) for name, parts in sources.items()}


def _translate(stored: str, plan: Outline) -> tuple[str | None, SafetensorsPart]:
    """The model's name for a stored tensor (None: the model has no use for it), and where it goes."""
    name, part = stored, SafetensorsPart(stored)
    for transform in plan.transforms:
        renamed, pattern = transform.rename_source_key(name)
        if pattern is None:
            continue
        operations = [type(op).__name__ for op in getattr(transform, "operations", ())]
        if operations not in ([], ["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            if _present(renamed, plan.shapes) is not None:
                raise UnsupportedModel(
                    f"tensor {stored} would need {', '.join(operations)}, which isn't built yet"
                )
            continue
        if operations:
            expert = int(stored.rsplit(".experts.", 1)[1].split(".", 1)[0])
            order = transform.source_patterns.index(pattern) if len(operations) == 2 else None
            part = SafetensorsPart(stored, expert, order)
        name = renamed
    return _present(name, plan.shapes), part


def _present(name: str, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Checkpoints of a bare base model lack its prefix (`h.0...` for `transformer.h.0...`)."""
    if name in expected:
        return name
    prefixes = {known.split(".", 1)[0] for known in expected}
    return next((f"{p}.{name}" for p in sorted(prefixes) if f"{p}.{name}" in expected), None)


def _placed(parts: list[SafetensorsPart], shape: tuple[int, ...], checkpoint: Checkpoint) -> list[SafetensorsPart]:
    """Turn the order of concatenated parts into offsets, and check that all parts are there."""
    if parts[0].index is None:
        return parts[:1]
    per_expert = len({part.offset for part in parts})
    if len(parts) != shape[0] * per_expert:
        raise BrokenModel(
            f"{len(parts)} of {shape[0] * per_expert} expert tensors are there, such as {parts[0].name} in "
            f"{checkpoint.tensors[parts[0].name].file}; download the model again"
        )
    rows = shape[1] // per_expert
    return [SafetensorsPart(p.name, p.index, None if p.offset is None else p.offset * rows) for p in parts]


class _SafetensorsFiles:
    """The checkpoint's files, each mapped when first needed and let go at the end."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._stack, self._open = ExitStack(), dict[str, Any]()

    def __enter__(self) -> _SafetensorsFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open.clear()

    def fill(self, final: Tensor, part: Part) -> None:
        """As `OpenWeights` says."""
        assert isinstance(part, SafetensorsPart)
        goal = final if part.index is None else final[part.index]
        if part.offset is not None:
            rows = self.checkpoint.tensors[part.name].shape[0]
            goal = goal[part.offset : part.offset + rows]
        goal.copy_(self._read(part.name, tuple(goal.shape)))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The stored tensor, still on its file's pages. Raises BrokenModel."""
        spec = self.checkpoint.tensors[name]
        if tuple(spec.shape) != shape:
            raise BrokenModel(
                f"tensor {name} in {spec.file} has shape {list(spec.shape)}, the config asks for {list(shape)}"
            )
        try:
            return self._mapped(spec.file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BrokenModel(
                f"tensor {name} can't be read from {spec.file} ({error}); the file is cut or damaged, "
                "download it again"
            ) from error

    def _mapped(self, file: str) -> Any:
        if file not in self._open:
            mapped = safe_open(self.checkpoint.path(file), framework="pt", device="cpu")
            self._open[file] = self._stack.enter_context(mapped)
        return self._open[file]
