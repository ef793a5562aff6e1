"""The files that a torch-free client needs to turn text into ids and back, as a peer hands them out.

Always there: "tokenizer.json", "tokenizer_config.json" and "model.json" (below). There if the model has
them: "generation_config.json", "special_tokens_map.json", and "chat_template.jinja", whichever of the four
places the template was in. A tokenizer that exists only as SentencePiece or as vocabulary files is converted
by transformers once and kept in the cache.

"model.json" is ours: {"model_type", "vocab_size", "context_length" (null: unknown), "bos_token_id",
"eos_token_ids" (a list, every id that ends a generation), "sampling" (temperature, top_k, top_p of the
generation config; {} means greedy)}.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import swarm
from peer.layout import GENERATION, VOCABULARY_FILES, Layout, ModelFiles, read_json
from swarm.canonical import FileHash, canonical_hash
from swarm.errors import BrokenModel, MessageError, ModelNotFound, TokenizerFailed, UnsupportedModel
from swarm.state import atomic_write
from swarm.tokenizer import TextCodec, bundle_hash, checked_facts
from swarm.tokenizer_worker import Made
from swarm.vocabulary import MAX_VOCABULARY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONVERTED_DOMAIN = b"layerswarm converted tokenizer 1\n"
READ_HERE_BYTES = 1 << 20  # takes some 20 MB and milliseconds, where another process takes a second to start
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", GENERATION)
# what GenerationConfig means by do_sample without further values (transformers' documented defaults)
_SAMPLING_DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


def make_bundle(files: ModelFiles, layout: Layout, config: PretrainedConfig, cache: Path) -> dict[str, bytes]:
    """Read or convert. The model's small files are on this machine. Raises ModelError."""
    if not set(layout.tokenizer) & set(VOCABULARY_FILES):
        raise ModelNotFound(
            f"{files.label} has no tokenizer (tokenizer.json or tokenizer.model); "
            "fetch the tokenizer's files of the same model"
        )
    names = [name for name in _COPIED if name in layout.small]
    bundle = {name: files.local(name).read_bytes() for name in names}
    if "tokenizer.json" not in bundle:
        bundle.update(_converted(files, layout, cache))
    bundle.setdefault("tokenizer_config.json", b"{}")
    template = _chat_template(files, layout)
    if template is not None:
        bundle["chat_template.jinja"] = template.encode("utf-8", "replace")
    facts = model_facts(config, read_json(files, GENERATION) if layout.generation else {})
    bundle["model.json"] = json.dumps(facts, sort_keys=True).encode()
    return bundle


def check_usable(label: str, bundle: Mapping[str, bytes], cache: Path) -> None:
    """Raises BrokenModel for a bundle that no client takes: better than a peer that serves to nobody.

    What was found good is remembered in `cache`, since a large vocabulary takes seconds to read.
    """
    found_good = cache / "tokenizers" / f"{bundle_hash(bundle).hex()}-{swarm.__version__}.usable"
    if found_good.is_file():
        return
    try:
        read_bundle(bundle)
    except TokenizerFailed:
        return  # too slow on this machine now; clients may have better ones
    except MessageError as error:
        fault = str(error).replace(" that the peer sent", "")
        raise BrokenModel(
            f"no client could use the tokenizer and the defaults of {label} ({fault}); fetch these files again"
        ) from None
    atomic_write(found_good, b"")


def read_bundle(bundle: Mapping[str, bytes]) -> None:
    """As a client does. Raises MessageError, TokenizerFailed. A large one in a process that takes its memory along,
    and so one with an expression that may take for ever."""
    if len(bundle["tokenizer.json"]) > READ_HERE_BYTES or b'"Regex"' in bundle["tokenizer.json"]:
        TextCodec.from_files(bundle).close()
        return
    checked_facts(bundle)
    answer, _ = Made().answer({"do": "load", "names": list(bundle)}, list(bundle.values()))
    if "unusable" in answer:
        raise MessageError(answer["unusable"])


def model_facts(config: PretrainedConfig, generation: Mapping[str, object]) -> dict[str, object]:
    """The content of "model.json"."""
    text = config.get_text_config()
    stops = generation.get("eos_token_id", getattr(text, "eos_token_id", None))
    stops = stops if isinstance(stops, list) else [stops]
    sampling = {}
    if generation.get("do_sample") is True:
        sampling = {key: generation.get(key) for key in _SAMPLING_DEFAULTS}
        sampling = {
            key: _SAMPLING_DEFAULTS[key] if value is None else value for key, value in sampling.items()
        }
        if generation.get("min_p"):
            sampling["min_p"] = generation["min_p"]
    repetition = generation.get("repetition_penalty")
    return {
        "model_type": config.model_type,
        "vocab_size": text.vocab_size,
        "context_length": getattr(text, "max_position_embeddings", None),
        "bos_token_id": generation.get("bos_token_id", getattr(text, "bos_token_id", None)),
        "eos_token_ids": [stop for stop in stops if type(stop) is int and 0 <= stop <= MAX_VOCABULARY],
        "sampling": sampling,
    } | ({} if repetition in (None, 1.0) else {"repetition_penalty": repetition})


def _chat_template(files: ModelFiles, layout: Layout) -> str | None:
    if "chat_template.jinja" in layout.template:
        return files.local("chat_template.jinja").read_bytes().decode("utf-8", "replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in layout.small:
            template = read_json(files, name).get("chat_template")
            if isinstance(template, list):  # several, named: chat uses the one called "default"
                named = {
                    entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
                }
                template = named.get("default")
            if isinstance(template, str):
                return template
    return None


def _converted(files: ModelFiles, layout: Layout, cache: Path) -> dict[str, bytes]:
    """tokenizer.json and its config, made by transformers and kept under the hash of their sources."""
    entries = [FileHash("source", name, files.sha256(name, lambda *_: None)) for name in sorted(layout.small)]
    kept = cache / "tokenizers" / canonical_hash(CONVERTED_DOMAIN, entries).hex()
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".converting-") as partial:
            _convert(files, layout, Path(partial))
            try:
                (Path(partial) / "out").rename(kept)
            except OSError:
                if not kept.is_dir():  # else another process was quicker, with the same result
                    raise
    return {name: (kept / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


def _convert(files: ModelFiles, layout: Layout, workspace: Path) -> None:
    from transformers import AutoTokenizer

    source = workspace / "in"
    source.mkdir()
    for name in layout.small:
        shutil.copyfile(files.local(name), source / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
        tokenizer.save_pretrained(workspace / "out")
        made = (workspace / "out" / "tokenizer.json").is_file()
    except Exception as error:  # strangers' files in transformers' many converters: any of them may fail
        fault = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"the tokenizer of {files.label} can't be converted ({fault}); "
            "use a version of the model that has a tokenizer.json"
        ) from error
    if not made:
        raise UnsupportedModel(
            f"the tokenizer of {files.label} has no fast form; "
            "use a version of the model that has a tokenizer.json"
        )
