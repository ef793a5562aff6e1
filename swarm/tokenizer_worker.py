"""The job that reads a stranger's tokenizer and makes ids of text, in a process of its own (`confined_worker.py`).

Requests: {"do": "load", "names"} with a blob for each file, answered {"variables", "cleaned", "decoder",
"template"} (true: there is one) and the blobs of `vocabulary.pack` and the template; {"do": "encode", "special"}
with the text as a blob, answered with a blob of the ids (u32, native order). Either may be answered {"unusable"}:
the words for the user.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from swarm.errors import MessageError
from swarm.json_fields import Fields, Json, json_object
from swarm.vocabulary import MAX_TOKEN_CHARACTERS, MAX_VOCABULARY, as_message_error, pack

MAX_GROWTH = 1 << 14  # of text in the normalizer or decoder; real ones keep its length, or double it
MAX_SAID_BYTES = 128 << 10  # names of special tokens and the decoder; real ones have some kilobytes
MAX_WORDS = 400  # of what is told to the user
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = tuple[dict[str, Any], list[bytes]]


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any], list[bytes]], Message]:
    """What answers requests."""
    made = Made()
    made.answer({"do": "encode", "special": False}, [b"warm"])  # what the library sets up on its first use
    return made.answer


class Made:
    """The tokenizer, once it is loaded."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.BPE())

    def answer(self, request: dict[str, Any], blobs: list[bytes]) -> Message:
        try:
            if request["do"] == "load":
                return self._load(dict(zip(request["names"], blobs, strict=True)))
            return {}, [array("I", self._encode(blobs[0].decode(), request["special"])).tobytes()]
        except MemoryError:
            return {"unusable": "the tokenizer that the peer sent takes too much memory", "ends": True}, []
        except BaseException as error:
            fault = as_message_error("the tokenizer", error)
            if not isinstance(fault, MessageError):
                raise
            return {"unusable": str(fault)[:MAX_WORDS]}, []

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _load(self, files: dict[str, bytes]) -> Message:
        config = _config(files)
        variables = _named_tokens(config) | _further_tokens(config)
        self._tokenizer = _load_tokenizer(files["tokenizer.json"], config, variables)
        template, decoder = _template(files, config), self._tokenizer.decoder
        said = {
            "variables": variables,
            "cleaned": _is_cleaned(self._tokenizer, config),
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
            "template": template is not None,
        }
        if len(json.dumps(said)) > MAX_SAID_BYTES:
            raise MessageError("tokenizer_config.json that the peer sent names too much")
        return said, [*pack(self._tokenizer), (template or "").encode("utf-8", "replace")]


def _config(files: Mapping[str, bytes]) -> Fields:
    config = Fields(
        "tokenizer_config.json", json_object("tokenizer_config.json", files.get("tokenizer_config.json", b"{}"))
    )
    if "special_tokens_map.json" in files and "added_tokens_decoder" not in config.names():
        config = config.overlaid(json_object("special_tokens_map.json", files["special_tokens_map.json"]))
    return config


def _content(token: Json) -> str | None:
    """A special token is written as its text, or as an object that has it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: Fields) -> dict[str, str]:
    """bos_token, eos_token, ...: what templates know them by."""
    texts = {name: _content(config.anything(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _further_tokens(config: Fields) -> dict[str, str]:
    """A model's own names for tokens (image_token, ...)."""
    further = {name: config.anything(name) for name in config.names() if name.endswith("_token")}
    extra = config.anything("extra_special_tokens")
    if isinstance(extra, dict):
        further |= {str(name): _content(token) for name, token in extra.items()}
    return {
        name: text for name, text in further.items() if isinstance(text, str) and name not in NAMED_TOKENS
    }


def _listed_tokens(config: Fields) -> list[str]:
    """Special tokens without a name."""
    listed = config.anything("extra_special_tokens") or config.anything("additional_special_tokens")
    contents = map(_content, listed) if isinstance(listed, list) else ()
    return [content for content in contents if content is not None]


def _template(files: Mapping[str, bytes], config: Fields) -> str | None:
    """The default template; several may be listed by name in tokenizer_config.json."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise MessageError(f"chat_template.jinja that the peer sent is not UTF-8: {error}") from error
    template = config.anything("chat_template")
    if isinstance(template, list):
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _load_tokenizer(data: bytes, config: Fields, named: Mapping[str, str]) -> Tokenizer:
    """The tokenizer as transformers sets it up (tokenization_utils_tokenizers.py, TokenizersBackend)."""
    definition = json_object("tokenizer.json", data)
    # before the library sees it: it normalizes the added tokens as soon as it reads them
    growth = max(_growth(definition.get("normalizer")), _growth(definition.get("decoder")))
    if growth > MAX_GROWTH:
        raise MessageError(f"tokenizer.json that the peer sent may make a text {growth:.0f} times as long")
    del definition
    tokenizer = _read(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > MAX_VOCABULARY:
        raise MessageError(f"the tokenizer has {size} tokens, at most {MAX_VOCABULARY} are accepted")
    tokenizer.encode_special_tokens = config.flag("split_special_tokens")
    _add_tokens(tokenizer, config, named)
    return tokenizer


def _read(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except BaseException as error:
        raise as_message_error("tokenizer.json", error) from error


def _add_tokens(tokenizer: Tokenizer, config: Fields, named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json declares."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.nested("added_tokens_decoder")
    for token_id in sorted(declared.names(), key=int):
        fields = declared.nested(token_id)
        content = fields.text("content", MAX_TOKEN_CHARACTERS)
        if content not in known:
            special = fields.flag("special") or content in named.values()
            tokenizer.add_tokens([AddedToken(content, special=special, **_matching(fields, special))])
            known.add(content)
    for content in (*named.values(), *_listed_tokens(config)):
        if content not in known:
            tokenizer.add_tokens([AddedToken(content, special=True)])
            known.add(content)


def _matching(fields: Fields, special: bool) -> dict[str, bool]:
    flags = {name: fields.flag(name) for name in ("lstrip", "rstrip", "single_word")}
    flags["normalized"] = fields.flag("normalized") if "normalized" in fields.names() else not special
    return flags


def _is_cleaned(tokenizer: Tokenizer, config: Fields) -> bool:
    """Whether decoded text has its spaces cleaned up; for BPE it would take out real ones."""
    anyway = config.flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    is_bpe = type(tokenizer.model).__name__ == "BPE"
    return config.flag("clean_up_tokenization_spaces") and (anyway or not is_bpe)


def _growth(definition: Json) -> float:
    """How many times as long the steps could make a text: a chain of replacements grows exponentially."""
    growth, left = 1.0, [definition]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            growth *= _step_growth(part)
        if isinstance(part, (dict, list)):
            left += part.values() if isinstance(part, dict) else part
    return growth


def _step_growth(step: Mapping[str, Json]) -> float:
    """Of one step, by the fields that the library knows it by; it may do without a type."""
    if "prepend" in step:
        return 1.0 + len(str(step["prepend"]))
    if "precompiled_charsmap" in step:
        return _longest_mapping(step["precompiled_charsmap"])
    if "pattern" not in step:
        return 1.0
    content, pattern = str(step.get("content")), step["pattern"]
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    # a regular expression may match nothing, between any two characters
    return (
        max(1.0, len(content) / len(literal)) if isinstance(literal, str) and literal else 1.0 + len(content)
    )


def _longest_mapping(charsmap: Json) -> float:
    """Bytes: u32 length of a trie, the trie, then what characters are mapped to, each ended by a zero."""
    try:
        data = base64.b64decode(charsmap)
    except (ValueError, TypeError):
        return math.inf
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1.0, *(len(text) for text in texts.split(b"\0")))
