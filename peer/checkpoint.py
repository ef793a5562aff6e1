"""What loading needs to know of a model, wherever its files come from.

A `TensorSpec` says where a tensor lies and how large it is; it is read from safetensors headers alone, so
that spans can be priced before a byte of weights is downloaded. `peer.source` makes checkpoints,
`peer.weights` reads the tensors of one span through them and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); all is 0 while it is not known."""


def no_progress(what: str, done: int, total: int) -> None:
    """The progress callback of callers that show none."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as its safetensors header describes it."""

    dtype: str  # safetensors' spelling: "F32", "F16", "BF16", "I64", ...
    shape: tuple[int, ...]
    nbytes: int  # exactly the bytes that it takes in the file
    file: str  # the weight file that holds it, relative to the checkpoint, with "/"


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
