"""The Hugging Face layout of a model: which file plays which role, and what we refuse to serve.

Invariant: everything here is decided from file names, sizes, small JSON files and safetensors headers, so
that a model that can't be served is refused, with the reason and the remedy, before any weight is fetched.
Where the files are (a directory, the hub) is the business of a `ModelFiles`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peer.checkpoint import Progress, TensorSpec
from peer.json_cursor import JsonCursor
from peer.quantisation import Quantisation, read_quantisation
from swarm.canonical import FileHash
from swarm.codecs import MAX_LAYERS
from swarm.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# any of these makes a tokenizer; all but the first need converting
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
UNUSED = (
    "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "return_dict", "torchscript",
    "output_attentions", "output_hidden_states", "num_labels", "id2label", "label2id",
)  # fmt: skip
MAX_JSON_BYTES = 512 << 10  # of a config; real ones have some kilobytes, what is made of it up to 65 times as much
MAX_INDEX_BYTES = 24 << 20  # of 100,000 tensors: 9 MB
MAX_NAME = 1024  # characters, of a tensor or a file
MAX_METADATA = 4096  # beside the index: how many bytes there are in all, and who wrote it
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelFiles(Protocol):
    """The files at the root of one model."""

    @property
    def label(self) -> str:
        """How a person named the model."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Every file's name and bytes, present on this machine or not."""
        ...

    def fetch(self, names: Iterable[str], progress: Progress) -> None:
        """Bring files to this machine. Raises ModelError, or CapacityError before anything is fetched."""
        ...

    def local(self, name: str) -> Path:
        """Where a file lies that is already here. Raises BrokenModel when it isn't."""
        ...

    def sha256(self, name: str, progress: Progress) -> bytes:
        """Of the file's content, without a download where the hub states it."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it is a model of the hub."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a weight file, without a download of the rest. Raises ModelError."""
        ...

    def headers(self, names: Collection[str], progress: Progress) -> dict[str, TensorSpec]:
        """The tensors of weight files, without a download of their weights. Raises BrokenModel."""
        ...


@dataclass(frozen=True)
class Layout:
    """What was found: names of files by role."""

    weights: tuple[str, ...]
    tokenizer: tuple[str, ...]
    template: tuple[str, ...]
    generation: tuple[str, ...]

    @property
    def small(self) -> tuple[str, ...]:
        """Everything but the weights."""
        return (CONFIG, *self.generation, *self.tokenizer, *self.template)

    def hashes(self, files: ModelFiles, progress: Progress) -> list[FileHash]:
        """The entries of the fingerprint."""
        roles = {
            "config": (CONFIG,),
            "generation": self.generation,
            "tokenizer": self.tokenizer,
            "template": self.template,
            "weights": self.weights,
        }
        return [
            FileHash(role, name, files.sha256(name, progress))
            for role, names in roles.items()
            for name in names
        ]


def read_layout(files: ModelFiles, progress: Progress) -> Layout:
    """Give every file its role. Raises ModelError when the weights are missing or not safetensors."""
    names = files.sizes
    return Layout(
        weights=_weight_files(files, progress),
        tokenizer=tuple(name for name in TOKENIZER_FILES if name in names),
        template=tuple(name for name in TEMPLATE_FILES if name in names),
        generation=tuple(name for name in (GENERATION,) if name in names),
    )


def read_json(files: ModelFiles, name: str) -> dict[str, object]:
    """A small JSON object that is on this machine. Raises BrokenModel with the place of the fault."""
    data = _read_small(files, name, MAX_JSON_BYTES)
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise BrokenModel(f"{name} of {files.label} isn't JSON ({where}); fetch that file again") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start}: {error.reason}"
        raise BrokenModel(f"{name} of {files.label} isn't text ({where}); fetch that file again") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise BrokenModel(f"{name} of {files.label} can't be read ({error}); fetch that file again") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{name} of {files.label} isn't a JSON object; fetch that file again")
    return value


def _read_small(files: ModelFiles, name: str, most: int) -> bytes:
    path = files.local(name)
    if (size := path.stat().st_size) > most:
        raise BrokenModel(
            f"{name} of {files.label} has {size:,} bytes, {most:,} are accepted; fetch that file again"
        )
    return path.read_bytes()


def _no_config(files: ModelFiles) -> ModelError:
    if "adapter_config.json" in files.sizes:
        return UnsupportedModel(
            f"{files.label} is an adapter, not a model; merge it into its base model and serve the result"
        )
    return ModelNotFound(
        f"{files.label} has no {CONFIG}, so it isn't a model in Hugging Face layout, and no GGUF file; "
        f"name the directory that holds {CONFIG} and *.safetensors, or a file *.gguf"
    )


def _weight_files(files: ModelFiles, progress: Progress) -> tuple[str, ...]:
    names = files.sizes
    if WEIGHTS in names:
        return (WEIGHTS,)
    if WEIGHTS_INDEX not in names:
        raise _no_weights(files)
    files.fetch([WEIGHTS_INDEX], progress)
    shards = _shards(files)
    missing = [shard for shard in shards if shard not in names]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BrokenModel(
            f"{files.label} lacks {missing[0]}{more} of the {len(shards)} weight files that its index names; "
            "fetch the missing files"
        )
    return tuple(shards)


def _shards(files: ModelFiles) -> list[str]:
    """The weight files that the index names, each once. Raises BrokenModel."""

    def wrong(why: str = "isn't JSON as an index of weights has it") -> BrokenModel:
        return BrokenModel(f"{WEIGHTS_INDEX} of {files.label} {why}; fetch that file again")

    data = _read_small(files, WEIGHTS_INDEX, MAX_INDEX_BYTES)
    if not data.isascii() and 4 * len(data) > MAX_INDEX_BYTES:  # such text takes Python four bytes a character
        raise wrong(f"has {len(data):,} bytes that aren't all ASCII")
    try:
        cursor, shards = JsonCursor(data.decode(), wrong), set[str]()
    except UnicodeDecodeError:
        raise wrong() from None
    for part in cursor.names(MAX_NAME):
        if part != "weight_map":
            cursor.value(MAX_METADATA)
            continue
        if not cursor.stands("{"):
            raise wrong("lists no weights")
        for _ in cursor.names(MAX_NAME):
            shard = cursor.value(MAX_NAME)
            if not _is_file_name(shard):
                raise wrong(f"names {shard!r}, which can't be a file beside it")
            shards.add(str(shard))
            if len(shards) > len(files.sizes):
                return sorted(shards)  # some are missing
    cursor.end()
    if not shards:
        raise wrong("lists no weights")
    return sorted(shards)


def _is_file_name(name: object) -> bool:
    """Nothing that leads elsewhere, on any platform."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _no_weights(files: ModelFiles) -> ModelError:
    names = sorted(files.sizes)
    pickled = [name for name in names if name.endswith(_PICKLED) and name != "training_args.bin"]
    if pickled:
        return UnsupportedModel(
            f"{files.label} has only pickled weights ({pickled[0]}), and reading a pickle can run "
            "the code of whoever made it; use a version with *.safetensors, or convert it with "
            "https://huggingface.co/spaces/safetensors/convert"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    there = f" ({others[0]} is there, which neither names)" if others else ""
    return ModelNotFound(
        f"{files.label} has no weights ({WEIGHTS}, or {WEIGHTS_INDEX} with its shards){there}; fetch them into it"
    )


def load_config(files: ModelFiles, progress: Progress) -> PretrainedConfig:
    """A model's transformers config, which is all that is fetched. Raises ModelError for what we can't run."""
    if CONFIG not in files.sizes:
        raise _no_config(files)
    files.fetch([CONFIG], progress)
    raw = read_json(files, CONFIG)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise BrokenModel(f"{CONFIG} of {files.label} names no model_type; fetch that file again")
    quantisation_of(files)  # refuses, and imports nothing for it
    for key in ("quantization_config", "compression_config"):  # once dequantised, the model is like any other
        raw.pop(key, None)
    _forget(raw)

    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UnsupportedModel(
                f"{files.label} needs remote code (auto_map in its {CONFIG}), which is never run here; "
                f"use a model whose type transformers {transformers.__version__} has built in"
            )
        raise UnsupportedModel(
            f"{files.label} is of type {model_type!r}, "
            f"which transformers {transformers.__version__} doesn't know; "
            "a newer one may: pip install -U transformers"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not isinstance(raw.get("text_config"), dict):
        raise UnsupportedModel(
            f"{files.label} is of type {model_type!r}, which doesn't generate text; "
            "use a causal language model"
        )
    _refuse_too_many_layers(files.label, raw)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # what a config class raises on bad values is not ours to list
        fault = " ".join(str(error).split())[:200]
        raise BrokenModel(
            f"{CONFIG} of {files.label} has a wrong value ({fault}); fetch that file again"
        ) from error
    if not isinstance(config.get_text_config(decoder=True), transformers.PretrainedConfig):
        raise BrokenModel(
            f"{CONFIG} of {files.label} has a text_config that a {model_type} model doesn't have; fetch that file again"
        )
    return config


def _forget(raw: dict[str, object]) -> None:
    """What changes how a model answers its caller, not what it computes; and labels, of which a config class makes
    as many as it is told to."""
    left: list[dict[str, object]] = [raw]
    while left:
        config = left.pop()
        for key in UNUSED:
            config.pop(key, None)
        left += [value for value in config.values() if isinstance(value, dict)]


def quantisation_of(files: ModelFiles) -> Quantisation | None:
    """How the weights are stored, by the config. Raises UnsupportedModel for a way that can't be read."""
    return read_quantisation(files.label, read_json(files, CONFIG), files.sizes)


def _refuse_too_many_layers(label: str, raw: Mapping[str, object]) -> None:
    """Config classes make lists as long as the model is deep: two thousand million layers would take hours."""
    left: list[Mapping[str, object]] = [raw]
    while left:
        for key, value in left.pop().items():
            if isinstance(value, dict):
                left.append(value)
            elif "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
                raise BrokenModel(
                    f"{CONFIG} of {label} says {key} = {value}, {MAX_LAYERS:,} are accepted; fetch that file again"
                )
