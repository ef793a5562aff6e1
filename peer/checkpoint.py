"""What loading needs to know of a model, wherever its files come from.

A `TensorSpec` says where a tensor lies and how large it is; it is read from file headers alone, so that
spans can be priced before a byte of weights is downloaded. `peer.source` makes checkpoints, `peer.weights`
reads the tensors of one span through them and nothing else. What differs between kinds of weight files is
a `WeightFormat`: which stored tensors make up one of the model's, and how each is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from swarm.errors import BrokenModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from peer.outline import Outline

SORTED_AT_ONCE = 4096  # a millisecond

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); all is 0 while it is not known."""


def broken(file: str, why: str, remedy: str = "fetch or copy that file again") -> BrokenModel:
    """The error for a file of weights that can't be used."""
    return BrokenModel(f"{file} can't be used: {why}; {remedy}")


def in_order(extents: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Sorted, some at a time: sorting as many as a file may have would keep Python's lock for tens of ms."""
    left = iter(extents)
    pieces = iter(lambda: sorted(islice(left, SORTED_AT_ONCE)), [])
    return merge(*pieces)


def no_progress(what: str, done: int, total: int) -> None:
    """The progress callback of callers that show none."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as its file's header describes it."""

    dtype: str  # the format's spelling: "F32", "F16", "BF16", "I64", "Q4_K", ...
    shape: tuple[int, ...]
    nbytes: int  # exactly the bytes that it takes in the file
    file: str  # the weight file that holds it, relative to the checkpoint, with "/"
    quantised: Quantised | None = None  # of a weight whose numbers and scales are stored apart

    @property
    def files(self) -> set[str]:
        """All that are needed to read it."""
        return {self.file, self.quantised.scales_spec.file} if self.quantised else {self.file}


@dataclass(frozen=True, slots=True)
class Quantised:
    """Where a quantised weight is stored (`peer.quantisation`). block: rows and columns that share a scale, if said."""

    numbers: str
    scales: str
    scales_spec: TensorSpec
    numbers_spec: TensorSpec
    block: tuple[int, int] | None


class Checkpoint(Protocol):
    """A model whose tensors can be listed at once and read where its files are present."""

    @property
    def config(self) -> PretrainedConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the whole model by its name in the files."""
        ...

    def path(self, file: str) -> Path:
        """Where `TensorSpec.file` lies on this machine. Raises BrokenModel when it isn't here."""
        ...


class Part(Protocol):
    """A stored tensor as (part of) one of the model's. What else it says is its format's own business."""

    @property
    def name(self) -> str:
        """The stored tensor's name in `Checkpoint.tensors`."""
        ...


class OpenWeights(Protocol):
    """The weight files of one checkpoint while a span is loaded, each opened when first needed."""

    def fill(self, final: Tensor, part: Part) -> None:
        """Read, convert and put a part where it belongs in `final`, which is the model's whole tensor.

        No more than this one part is held besides `final`. Raises BrokenModel naming tensor and file.
        """
        ...


class WeightFormat(Protocol):
    """One kind of weight files, such as safetensors."""

    def sources(self, checkpoint: Checkpoint, plan: Outline) -> Mapping[str, Sequence[Part]]:
        """For each of the model's tensors (its name there) the parts that make it up; absent if none do.

        Raises BrokenModel where some of a tensor's parts are missing, UnsupportedModel for a conversion
        that isn't built.
        """
        ...

    def open(self, checkpoint: Checkpoint) -> AbstractContextManager[OpenWeights]: ...
