"""The weight files that most models come in: which tensors of *.safetensors make up the model's, and reading them.

What a tensor is called in a checkpoint and in the model differ in some families; transformers' own tables
of renamings and merges say how, and are applied name by name (`SafetensorsFormat.sources`), so that an
expert's matrix goes straight to its slice of the merged one.

Invariant: besides the memory that is filled, a few pieces of PIECE_BYTES are held, however large a tensor,
a file or the checkpoint is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod

import torch
from torch import Tensor

from peer.checkpoint import Checkpoint, Part, Quantised, TensorSpec
from peer.dequantise import GROUP, Rows, exponents, fill_fp8, fill_mxfp4
from peer.outline import Outline
from peer.quantisation import MXFP4, NUMBERS_PER_BYTE, scale_block
from peer.safetensors_header import parse_header
from peer.weight_files import Location, StoredTensor, WeightFiles
from swarm.errors import BrokenModel, UnsupportedModel

# what is read at once where it is converted: large enough to keep calls cheap, small beside any span
PIECE_BYTES = 4 << 20

LOADABLE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
EXPONENTS = ("U8", "F8_E8M0")  # scales that are powers of two
GROUP_BYTES = GROUP // NUMBERS_PER_BYTE


@dataclass(frozen=True, slots=True)
class SafetensorsPart:
    """A tensor of the checkpoint and the slice of the model's tensor that it fills (None: all of it)."""

    name: str
    index: int | None = None  # along dimension 0: which expert
    offset: int | None = None  # along what is then dimension 0: where it starts


class SafetensorsFormat:
    """The `WeightFormat` of *.safetensors."""

    def sources(self, checkpoint: Checkpoint, plan: Outline) -> dict[str, list[SafetensorsPart]]:
        """As `WeightFormat` says. Every part has been checked to have the shape that its place has."""
        sources: dict[str, list[SafetensorsPart]] = {}
        for stored in checkpoint.tensors:
            name, part = _translate(stored, plan)
            if name is not None:
                sources.setdefault(name, []).append(part)
        return {name: _placed(parts, name, plan.shapes[name], checkpoint) for name, parts in sources.items()}

    def open(self, checkpoint: Checkpoint) -> SafetensorsFiles:
        return SafetensorsFiles(checkpoint)


# ---------------------------------------------------------------- names


def _translate(stored: str, plan: Outline) -> tuple[str | None, SafetensorsPart]:
    """The model's name for a stored tensor (None: the model has no use for it), and where it goes."""
    name, part = _in_language_model(stored), SafetensorsPart(stored)
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


def _in_language_model(stored: str) -> str:
    """A multimodal model's checkpoint has its language model's tensors under one of these names."""
    return ".".join(word for word in stored.split(".") if word not in ("language_model", "text_model"))


def _present(name: str, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Checkpoints of a bare base model lack its prefix (`h.0...` for `transformer.h.0...`)."""
    if name in expected:
        return name
    prefixes = {known.split(".", 1)[0] for known in expected}
    return next((f"{p}.{name}" for p in sorted(prefixes) if f"{p}.{name}" in expected), None)


def _placed(
    parts: list[SafetensorsPart], name: str, shape: tuple[int, ...], checkpoint: Checkpoint
) -> list[SafetensorsPart]:
    """Turn the order of concatenated parts into offsets; check that all parts are there and fit."""
    if parts[0].index is None:
        _check(parts[0], shape, checkpoint)
        return parts[:1]
    per_expert = len({part.offset for part in parts})
    there = {(part.index, part.offset) for part in parts}
    missing = shape[0] * per_expert - sum(index in range(shape[0]) for index, _ in there)
    if missing or len(parts) != len(there):
        raise BrokenModel(
            f"{shape[0] * per_expert - missing} of {shape[0] * per_expert} expert tensors of {name} are there, "
            f"such as {parts[0].name} in {checkpoint.tensors[parts[0].name].file}; download the model again"
        )
    rows = shape[1] // per_expert
    for part in parts:
        _check(part, shape[1:] if part.offset is None else (rows, *shape[2:]), checkpoint)
    return [SafetensorsPart(p.name, p.index, None if p.offset is None else p.offset * rows) for p in parts]


def _check(part: SafetensorsPart, shape: tuple[int, ...], checkpoint: Checkpoint) -> None:
    spec = checkpoint.tensors[part.name]
    if tuple(spec.shape) != shape:
        raise BrokenModel(
            f"tensor {part.name} in {spec.file} has shape {list(spec.shape)}, the config asks for {list(shape)}; "
            "one of the two files is of another model: fetch both again"
        )
    if spec.quantised is not None:
        _check_scales(part.name, spec, spec.quantised)
    elif spec.dtype not in LOADABLE or (len(shape) > 1 and not LOADABLE[spec.dtype].is_floating_point):
        raise UnsupportedModel(
            f"tensor {part.name} in {spec.file} is stored as {spec.dtype} without scales that its config explains, "
            "so what its numbers mean isn't known; use a version in bfloat16 or float32"
        )


def _check_scales(name: str, spec: TensorSpec, quantised: Quantised) -> None:
    scales = quantised.scales_spec
    if spec.dtype == MXFP4:
        fits = (
            scales.shape == quantised.numbers_spec.shape[:-1]
            and quantised.numbers_spec.shape[-1] == GROUP_BYTES
        )
        kinds = EXPONENTS
    else:
        scale_block(name, spec)
        fits, kinds = True, (*EXPONENTS, "F32", "BF16", "F16")
    if not fits or scales.dtype not in kinds:
        raise BrokenModel(
            f"tensor {quantised.scales} in {scales.file} is {scales.dtype} {list(scales.shape)}, which aren't the "
            f"scales of {quantised.numbers}, {quantised.numbers_spec.dtype} {list(quantised.numbers_spec.shape)}; "
            "fetch the files again"
        )


# ---------------------------------------------------------------- reading


class SafetensorsFiles(WeightFiles):
    """Open *.safetensors."""

    @staticmethod
    def locate(handle: FileIO, file: str) -> dict[str, Location]:
        header = parse_header(handle, file)
        return {
            name: Location(spec.dtype, spec.shape, header.starts[name]) for name, spec in header.tensors.items()
        }

    def fill(self, final: Tensor, part: Part) -> None:
        """As `OpenWeights` says."""
        assert isinstance(part, SafetensorsPart)
        spec = self.checkpoint.tensors[part.name]
        goal = final if part.index is None else final[part.index]
        if part.offset is not None:
            goal = goal[part.offset : part.offset + spec.shape[0]]
        if spec.quantised is None:
            self._stored(part.name, spec).copy_to(goal)
        else:
            self._dequantise(goal.view(-1, *goal.shape[-2:]), part.name, spec, spec.quantised)

    def _dequantise(self, goal: Tensor, name: str, spec: TensorSpec, quantised: Quantised) -> None:
        """goal: [matrices, rows, columns], done one after the other."""
        numbers = self._stored(quantised.numbers, quantised.numbers_spec)
        scales = self._stored(quantised.scales, quantised.scales_spec)
        for index, matrix in enumerate(goal):
            scale = scales.scales(index, len(goal))
            if spec.dtype == MXFP4:
                columns, rows = matrix.shape
                fill_mxfp4(matrix, numbers.rows(index * rows, columns // NUMBERS_PER_BYTE), scale.view(rows, -1))
            else:
                rows, columns = matrix.shape
                fill_fp8(matrix, numbers.rows(index * rows, columns), scale, scale_block(name, spec))

    def _stored(self, name: str, spec: TensorSpec) -> Stored:
        return Stored(self.stored(name, spec))


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored tensor as numbers."""

    raw: StoredTensor

    def copy_to(self, goal: Tensor) -> None:
        """All of it into the contiguous `goal`, which has its shape, as `goal`'s dtype. Raises BrokenModel."""
        dtype, flat = LOADABLE[self.raw.at.kind], goal.view(-1)
        if flat.dtype == dtype and flat.device.type == "cpu":
            self._read_into(flat, 0)
            return
        step = PIECE_BYTES // dtype.itemsize
        piece = torch.empty(min(step, len(flat)), dtype=dtype)
        for first, last in pieces(len(flat), step):
            self._read_into(piece[: last - first], first * dtype.itemsize)
            flat[first:last].copy_(piece[: last - first])

    def read(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Elements [first, last) of the flattened tensor, in memory of their own. Raises BrokenModel."""
        piece = torch.empty(last - first, dtype=dtype)
        self._read_into(piece, first * dtype.itemsize)
        return piece

    def rows(self, skip: int, width: int) -> Rows:
        """Rows of `width` bytes, counted from row `skip`."""
        return lambda first, last: self.read((skip + first) * width, (skip + last) * width, torch.uint8)

    def scales(self, index: int, count: int) -> Tensor:
        """Part `index` of `count` equal ones, as float32; all of it if there is but one scale. Raises BrokenModel."""
        each = prod(self.raw.at.shape) // count
        first, each = (index * each, each) if each else (0, 1)
        if self.raw.at.kind in EXPONENTS:
            values = exponents(self.read(first, first + each, torch.uint8))
        else:
            values = self.read(first, first + each, LOADABLE[self.raw.at.kind]).float()
        if not torch.isfinite(values).all():
            raise BrokenModel(
                f"tensor {self.raw.name} in {self.raw.file} holds a scale that isn't a finite number; the file is "
                "damaged, download it again"
            )
        return values

    def _read_into(self, piece: Tensor, skip: int) -> None:
        self.raw.read_into(memoryview(piece.view(torch.uint8).numpy()), skip)


def pieces(count: int, most: int) -> Iterator[tuple[int, int]]:
    """[first, last) of consecutive runs of at most `most` (at least one) that make up `count`."""
    most = max(1, most)
    for first in range(0, count, most):
        yield first, min(first + most, count)
