"""Model files in a directory of this machine. Everything is present, and nothing is ever written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peer.checkpoint import Progress, TensorSpec
from peer.fingerprint import FileHashes
from peer.safetensors_header import merged, read_header
from swarm.errors import BrokenModel, ModelNotFound


@dataclass(frozen=True)
class DirectoryFiles:
    label: str
    directory: Path
    sizes: Mapping[str, int]
    hashes: FileHashes
    is_remote = False

    def fetch(self, names: Iterable[str], progress: Progress) -> None:
        for name in names:
            self.hashes.verify(self.local(name), progress)

    def local(self, name: str) -> Path:
        path = self.directory / name
        if name not in self.sizes or not path.is_file():
            raise BrokenModel(f"{self.label} has no {name}; fetch that file into it")
        return path

    def sha256(self, name: str, progress: Progress) -> bytes:
        return self.hashes.sha256(self.local(name), progress)

    def read(self, name: str, start: int, stop: int) -> bytes:
        return read_piece(self.local(name), name, start, stop)

    def headers(self, names: Collection[str], progress: Progress) -> dict[str, TensorSpec]:
        return merged(read_header(self.local(name), name).tensors for name in names)


def read_piece(path: Path, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file. Raises BrokenModel where they aren't there."""
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            piece = stream.read(stop - start)
    except OSError as error:
        raise BrokenModel(f"{name} can't be read ({error.strerror}); check its permissions") from error
    if len(piece) != stop - start:
        raise BrokenModel(f"{name} can't be read: it ends before byte {stop:,}; fetch or copy that file again")
    return piece


def expanded(text: str) -> Path:
    """With what ~ stands for; as it is where no user has that name."""
    with suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)


def open_directory(text: str, hashes: FileHashes) -> DirectoryFiles:
    """The files of the directory that a person typed, or of that where a GGUF file is which was typed.

    Raises ModelError when there is none.
    """
    directory = expanded(text)
    if directory.suffix.lower() == ".gguf" and not directory.is_dir():
        directory = directory.parent
        text = str(directory) if directory != Path() else "the current directory"
    if directory.is_dir():
        try:
            sizes = {entry.name: entry.stat().st_size for entry in directory.iterdir() if entry.is_file()}
        except OSError as error:
            raise ModelNotFound(f"{text} can't be read ({error.strerror}); check its permissions") from error
        return DirectoryFiles(text, directory.resolve(), sizes, hashes)
    if directory.exists():
        raise ModelNotFound(f"{text} is a file; name the directory that holds it, with its config.json")
    raise ModelNotFound(f"no such directory: {text}; a model of the hub is written org/name, without ./ or ~")
