"""The tokenizer of a GGUF file, as the files that clients are handed (`peer.tokenizer_bundle` lists them).

A GGUF has its vocabulary, merges and special tokens in its metadata. transformers' converters make a
tokenizer of them (`AutoTokenizer.from_pretrained(..., gguf_file=...)`), once on a machine, in a child
process: they take far more memory than a peer may keep. They are shown a file that has the vocabulary and
nothing else, cut out of the real one, so that they depend on no other file, and work before any weight was
fetched.

Three things are taken from the metadata whatever the converters make of them, since some releases overlook
them: which tokens stand for themselves in a text, which are the special ones, and whether a text begins
with one.

`python -m peer.gguf_tokenizer VOCABULARY DIRECTORY FACTS` is the child: it makes the directory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.checkpoint import Progress, broken
from peer.child import report, run_child, work_as_child
from peer.gguf_config import Facts
from peer.gguf_header import MAGIC, GgufArray, GgufHeader, read_gguf_header
from peer.layout import GENERATION
from peer.tokenizer_bundle import model_facts
from swarm.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

KEPT = ("tokenizer.json", "tokenizer_config.json", GENERATION)
FORMAT = 1  # grows when `_convert` makes something else of the same file
# what the metadata calls the special tokens, and what transformers does
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# what transformers calls what the maker of a model may say about sampling, and what the metadata does
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Ends of a turn, by which llama.cpp stops too: many files state the end of a text only. "<|end|>" ends a
# message, which is the answer's end except where there is a token that says that of itself.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|end|>")
# vocabularies of architectures that transformers' converters don't know by name, but by another's
SAME_VOCABULARY = {"gemma": "gemma2"}
TYPES = "tokenizer.ggml.token_type"
CONTROL, USER_DEFINED = 3, 4  # of those types: tokens that stand for themselves, the former as special ones
# how such vocabularies split a text before merging: releases of transformers that have no table of these
# split all alike, and ids that the model was not trained with make it stupid without a word
OWN_SPLITS = (
    "llama-bpe", "llama3", "llama-v3", "llama4", "falcon3", "pixtral", "dbrx", "smaug-bpe", "tekken",
    "gpt-4o",
)  # fmt: skip


def make_gguf_bundle(
    header: GgufHeader,
    beginning: bytes,
    facts: Facts,
    config: PretrainedConfig,
    cache: Path,
    progress: Progress,
) -> dict[str, bytes]:
    """What a client needs, by name. beginning: of the file, as far as the header goes. Raises ModelError."""
    bundle = converted(header, beginning, facts, cache, progress)
    template = facts.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        bundle["chat_template.jinja"] = template.encode()
    known = model_facts(config, json.loads(bundle[GENERATION]))
    bundle["model.json"] = json.dumps(known, sort_keys=True).encode()
    return bundle


def converted(
    header: GgufHeader, beginning: bytes, facts: Facts, cache: Path, progress: Progress
) -> dict[str, bytes]:
    """The files called KEPT, made if they aren't there yet. Imports no torch. Raises ModelError."""
    return _made(_vocabulary(header, beginning, facts), _wanted(facts), facts.file, cache, progress)


def _vocabulary(header: GgufHeader, beginning: bytes, facts: Facts) -> bytes:
    """A GGUF file with the tokenizer's part of the metadata, and no tensors."""
    if "tokenizer.ggml.tokens" not in header.pairs:
        raise broken(facts.file, "its metadata has no tokenizer", "use a file that has one")
    architecture = SAME_VOCABULARY.get(facts.architecture, facts.architecture)
    pairs = [_text_pair("general.architecture", architecture)]
    for key, (first, last) in header.pairs.items():
        if key.startswith("tokenizer."):
            pairs.append(beginning[first:last])
    return MAGIC + struct.pack("<IQQ", header.version, 0, len(pairs)) + b"".join(pairs)


def _text_pair(key: str, text: str) -> bytes:
    encoded = [part.encode() for part in (key, text)]
    return (
        struct.pack("<Q", len(encoded[0])) + encoded[0] + struct.pack("<IQ", 8, len(encoded[1])) + encoded[1]
    )


def _wanted(facts: Facts) -> dict[str, object]:
    """What the child is told besides the vocabulary."""
    metadata, kind = facts.metadata, facts.metadata.get("tokenizer.ggml.model")
    said = metadata.get("tokenizer.ggml.add_bos_token")
    sampling = {
        name: value
        for name, key in SAMPLING.items()
        if type(value := metadata.get(f"general.sampling.{key}")) in (int, float)
    }
    return {
        "file": facts.file,
        "named": {name: facts.token(key) for key, name in NAMED.items()},
        # SentencePiece vocabularies of old files state nothing and mean yes
        "begins": said if isinstance(said, bool) else kind == "llama",
        "stops": [token for key in ("eos", "eot", "eom") if (token := facts.token(key)) is not None],
        "sampling": sampling,
        "split": metadata.get("tokenizer.ggml.pre") if kind == "gpt2" else None,
    }


def _made(
    vocabulary: bytes, wanted: Mapping[str, object], file: str, cache: Path, progress: Progress
) -> dict[str, bytes]:
    """Made once, and kept under the hash of all that it depends on."""
    from filelock import FileLock

    facts = json.dumps({key: value for key, value in wanted.items() if key != "file"}, sort_keys=True)
    made_by = f"{FORMAT} {importlib.metadata.version('transformers')} {facts}"
    kept = cache / "tokenizers" / hashlib.sha256(made_by.encode() + vocabulary).hexdigest()
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.with_suffix(".lock")):  # of peers that start together, one converts
            if not kept.is_dir():
                with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".converting-") as folder:
                    source, target = Path(folder) / "vocabulary.gguf", Path(folder) / "out"
                    source.write_bytes(vocabulary)
                    arguments = [str(source), str(target), json.dumps(wanted)]
                    run_child("peer.gguf_tokenizer", arguments, progress, f"the tokenizer of {file}")
                    target.rename(kept)
    return {name: (kept / name).read_bytes() for name in KEPT}


# ---------------------------------------------------------------- the child process


def main(arguments: list[str]) -> int:
    source, target, wanted = Path(arguments[0]), Path(arguments[1]), json.loads(arguments[2])

    def explain(error: OSError) -> str:
        where, why = error.filename or target, (error.strerror or str(error)).lower()
        return (
            f"the tokenizer of {wanted['file']} can't be kept at {where} ({why}); set SWARM_CACHE elsewhere"
        )

    return work_as_child(lambda: _convert(source, target, wanted), explain, lambda: None)


def _convert(source: Path, target: Path, wanted: Mapping[str, Any]) -> None:
    size = source.stat().st_size
    report("converting its tokenizer", 0, size)
    _refuse_wrong_split(wanted)
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        tokenizer = made.backend_tokenizer
    except Exception as error:  # a stranger's vocabulary in transformers' converters: any of them may fail
        fault = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModel(
            f"the tokenizer of {wanted['file']} can't be converted ({fault}); "
            "a newer transformers may do it: pip install -U transformers; "
            "or use the same model in Hugging Face layout"
        ) from error
    _add_own_tokens(tokenizer, source)
    _begin_texts(tokenizer, wanted["named"]["bos_token"], wanted["begins"])
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    named = {
        name: tokenizer.id_to_token(token) for name, token in wanted["named"].items() if token is not None
    }
    _write_json(target / "tokenizer_config.json", named)
    _write_json(target / GENERATION, _generation(tokenizer, wanted))
    report("converting its tokenizer", size, size)


def _refuse_wrong_split(wanted: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where the installed transformers can't split texts as the vocabulary needs."""
    if wanted["split"] not in OWN_SPLITS:
        return
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:
        known = {}
    if wanted["split"] not in known:
        version = importlib.metadata.version("transformers")
        raise UnsupportedModel(
            f"the tokenizer of {wanted['file']} splits texts the way called {wanted['split']}, "
            f"which transformers {version} doesn't know of; a newer one does: pip install -U transformers"
        )


def _add_own_tokens(tokenizer: Tokenizer, source: Path) -> None:
    """Those that the file marks are found whole in a text."""
    import numpy as np
    from tokenizers import AddedToken

    header = read_gguf_header(source, source.name)
    types = header.metadata.get(TYPES)
    count = types.count if isinstance(types, GgufArray) else len(types) if isinstance(types, tuple) else 0
    first, last = header.pairs.get(TYPES, (0, 0))
    if (
        last - first != count and last - first != len(TYPES) + 24 + 4 * count
    ):  # the key, its types and lengths
        raise broken(source.name, f"its {TYPES} aren't 32-bit numbers")
    kinds = np.frombuffer(source.read_bytes()[last - 4 * count : last], "<i4")
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [(int(i), tokenizer.id_to_token(int(i))) for i in np.flatnonzero(kinds == kind)]
        # a converter may have spelled one otherwise: added as it is here it would get another id
        known = [text for i, text in texts if text is not None and tokenizer.token_to_id(text) == i]
        added = [AddedToken(text, normalized=False, special=special) for text in known]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)


def _begin_texts(tokenizer: Tokenizer, first: int | None, begins: bool) -> None:
    """See to it that an encoded text begins with the first token, or doesn't."""
    from tokenizers.processors import TemplateProcessing

    if (tokenizer.encode("a").ids[:1] == [first]) == begins or (begins and first is None):
        return
    text = tokenizer.id_to_token(first) if begins else ""
    single = f"{text}:0 $A:0" if begins else "$A:0"
    pair = f"{text}:0 $A:0 {text}:1 $B:1" if begins else "$A:0 $B:1"
    special = [(text, first)] if begins else []
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _generation(tokenizer: Tokenizer, wanted: Mapping[str, Any]) -> dict[str, object]:
    """A generation config: what ends a text or a turn, and how its maker would have it sampled."""
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    ends = [text for text in TURN_ENDS if text in added]
    if "<|return|>" in ends and "<|end|>" in ends:
        ends.remove("<|end|>")
    stops = list(dict.fromkeys([*wanted["stops"], *(added[text] for text in ends)]))
    first, sampling = wanted["named"]["bos_token"], wanted["sampling"]
    return {
        "bos_token_id": first,
        "eos_token_id": stops,
        "do_sample": sampling.get("temperature", 0) > 0,
        **sampling,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
