"""Weight files that are open while a span is loaded: what safetensors and GGUF have in common.

Invariant: a file is opened when the first of its tensors is needed, and closed at the end, however it comes. What is
read of it lies where its header, read from the same open file, says; and a tensor that isn't what it was when the model
was described is noticed before a byte of it is taken.

Files are read, not mapped: pages of a mapping count as ours until the kernel takes them back, and a mapped file that
somebody cuts ends the process (SIGBUS) where a short read is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Self

from peer.checkpoint import Checkpoint, Part, TensorSpec, broken
from swarm.errors import BrokenModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Location:
    """A tensor as its file's header has it. kind: of its numbers, as `TensorSpec.dtype`. start: its first byte."""

    kind: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor, ready to be read in pieces."""

    handle: FileIO
    file: str
    name: str
    at: Location

    def read_into(self, piece: memoryview, skip: int) -> None:
        """Fill `piece` from the tensor's byte `skip` on. Raises BrokenModel."""
        try:
            self.handle.seek(self.at.start + skip)
            done = 0
            while done < len(piece):
                count = self.handle.readinto(piece[done:])
                if not count:
                    raise self._unreadable(f"it ends {len(piece) - done:,} bytes too early")
                done += count
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error

    def _unreadable(self, why: str) -> BrokenModel:
        return BrokenModel(
            f"tensor {self.name} can't be read from {self.file} ({why}); the file is cut or damaged, "
            "fetch or copy it again"
        )


class WeightFiles(ABC):
    """A checkpoint's files, as a context that closes them. One kind of files says how it is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._stack, self._open = ExitStack(), dict[str, tuple[FileIO, Mapping[str, Location]]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open.clear()

    @abstractmethod
    def fill(self, final: Tensor, part: Part) -> None:
        """As `OpenWeights` says."""

    @staticmethod
    @abstractmethod
    def locate(handle: FileIO, file: str) -> Mapping[str, Location]:
        """Every tensor of an open file. Raises BrokenModel where its header isn't right, or OSError."""

    def stored(self, name: str, described: TensorSpec) -> StoredTensor:
        """Raises BrokenModel where the file can't be read, or isn't what it was when the model was described."""
        file = described.file
        if file not in self._open:
            self._open[file] = self._opened(file)
        handle, tensors = self._open[file]
        there = tensors.get(name)
        if there is None or (there.kind, there.shape) != (described.dtype, described.shape):
            found = f"{there.kind} {list(there.shape)}" if there else "not in it"
            raise BrokenModel(
                f"{file} was changed while it was in use: tensor {name} was {described.dtype} "
                f"{list(described.shape)} and is {found} now; start the peer again"
            )
        return StoredTensor(handle, file, name, there)

    def _opened(self, file: str) -> tuple[FileIO, Mapping[str, Location]]:
        path = self.checkpoint.path(file)
        try:
            handle = self._stack.enter_context(FileIO(path))
            return handle, self.locate(handle, file)
        except OSError as error:
            raise broken(file, f"it can't be read ({error.strerror or error})") from error
