"""What the GGUF files of a model say of it: config, tensors, tokenizer, identity.

Everything is described from the beginnings of the files, so that a model that can't be served is refused
before its weights are fetched. Nothing depends on where the files are: they are named without folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import unpack
from typing import TYPE_CHECKING

from peer.checkpoint import Progress, TensorSpec, broken
from peer.gguf_choice import plain
from peer.gguf_config import Facts, load_gguf_config
from peer.gguf_header import GgufHeader, read_beginning
from peer.gguf_tokenizer import converted, make_gguf_bundle
from peer.layout import ModelFiles
from swarm.canonical import FileHash

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_SMALL_TENSOR = 1 << 16  # numbers of a tensor that the config needs: one for each pair of a head


@dataclass(frozen=True)
class GgufModel:
    """A described model. bundle: as `peer.tokenizer_bundle` says. hashes: the entries of its fingerprint."""

    config: PretrainedConfig
    tensors: Mapping[str, TensorSpec]
    bundle: Mapping[str, bytes]
    parts: tuple[str, ...]

    def hashes(self, files: ModelFiles, progress: Progress) -> list[FileHash]:
        return [FileHash("weights", plain(part), files.sha256(part, progress)) for part in self.parts]


def describe_gguf(
    files: ModelFiles,
    parts: tuple[str, ...],
    served: Callable[[PretrainedConfig], PretrainedConfig],
    cache: Path,
    progress: Progress,
) -> GgufModel:
    """Read the files' beginnings. Raises ModelError: what can't be served is refused before a download.

    served: of a config what is served, or UnsupportedModel.
    """
    beginning, first = _beginning(files, parts[0], progress)
    headers = {parts[0]: first} | {part: _beginning(files, part, progress)[1] for part in parts[1:]}
    _check_split(headers)
    tensors: dict[str, TensorSpec] = {}
    for part, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise broken(part, f"its tensor {name} is in {tensors[name].file} too")
            tensors[name] = TensorSpec(tensor.kind, tensor.shape, tensor.nbytes, part)

    def values(name: str) -> tuple[float, ...]:
        return _small_tensor(files, tensors[name].file, name, headers[tensors[name].file])

    shapes = {name: spec.shape for name, spec in tensors.items()}
    facts = Facts(plain(parts[0]), first.metadata, shapes, values)
    config = served(load_gguf_config(facts))
    config.dtype = _dtype(tensors.values())
    bundle = make_gguf_bundle(first, beginning, facts, config, cache, progress)
    return GgufModel(config, tensors, bundle, parts)


def prepare_tokenizer(files: ModelFiles, part: str, cache: Path, progress: Progress) -> None:
    """Convert it, so that peers which start together find that done. Imports no torch. Raises ModelError."""
    beginning, header = _beginning(files, part, progress)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    facts = Facts(plain(part), header.metadata, shapes, lambda _: ())
    converted(header, beginning, facts, cache, progress)


def _beginning(files: ModelFiles, part: str, progress: Progress) -> tuple[bytes, GgufHeader]:
    progress(f"reading the header of {plain(part)}", 0, 0)
    size = files.sizes[part]
    return read_beginning(lambda start, stop: files.read(part, start, stop), plain(part), size)


def _check_split(headers: Mapping[str, GgufHeader]) -> None:
    """Each part says which it is: copies under wrong names would make a model out of other models' layers."""
    for number, (part, header) in enumerate(headers.items()):
        said = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1)
        if said != (number, len(headers)):
            raise broken(
                plain(part),
                f"it says that it is part {said[0]!r}, counted from 0, of {said[1]!r}, "
                f"and its name and its neighbours make it part {number} of {len(headers)}",
                "give the parts the names that they had, and keep them together",
            )
    first = next(iter(headers.values()))
    wanted = first.metadata.get("split.tensors.count")
    there = sum(len(header.tensors) for header in headers.values())
    if wanted is not None and wanted != there:
        raise broken(
            plain(next(iter(headers))), f"the parts hold {there:,} of the {wanted!r} tensors that it states"
        )


def _small_tensor(files: ModelFiles, part: str, name: str, header: GgufHeader) -> tuple[float, ...]:
    tensor = header.tensors[name]
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_SMALL_TENSOR:
        raise broken(
            plain(part), f"its {name} is {tensor.kind} {list(tensor.shape)}, where a few F32 are needed"
        )
    raw = files.read(part, tensor.offset, tensor.offset + tensor.nbytes)
    return unpack(f"<{tensor.shape[0]}f", raw)


def _dtype(tensors: Iterable[TensorSpec]) -> str | None:
    """In which the matrices are stored, for an accelerator; None where they are quantised."""
    kinds: dict[str, int] = {}
    for spec in tensors:
        if len(spec.shape) > 1:
            kinds[spec.dtype] = kinds.get(spec.dtype, 0) + spec.nbytes
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names[max(kinds, key=lambda kind: kinds[kind])] if kinds.keys() <= names.keys() and kinds else None
