"""A model's text side at the client: prompt -> ids, ids -> text, from files that a peer sent.

Invariant: nothing in those files is trusted. They have size caps, what we read of them is validated, the
chat template runs in a process of its own (`template.py`), and whatever is wrong with them is a
MessageError or TemplateFailed, never a crash. What comes out equals transformers' `apply_chat_template`,
`__call__` and `decode(skip_special_tokens=True)` for the same files, without importing it.

`client.py` fetches the files and checks them against the hash that the peer signed (`bundle_hash`);
`peer/tokenizer_bundle.py` makes them and describes "model.json".
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from swarm.canonical import FileHash, canonical_hash
from swarm.detokenizer import ByteLevelStage, IdStage, IncrementalText, WindowStage, clean_up
from swarm.errors import MessageError, UsageError
from swarm.messages import MAX_POSITION, MAX_REPETITION, MAX_STOP_IDS, MIN_REPETITION
from swarm.template import MAX_TEMPLATE_BYTES, TemplateLimits, TemplateRenderer

MAX_FILE_BYTES = {
    "tokenizer.json": 64 << 20,  # the largest known, Gemma 3's, has 33 MB
    "tokenizer_config.json": 4 << 20,  # lists every added token
    "special_tokens_map.json": 1 << 20,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "model.json": 64 << 10,
}
MAX_VOCABULARY = 1 << 22  # the largest known has 2**18 entries
MAX_TOKEN_CHARACTERS = 4096  # real ones end at some hundred spaces; an answer has thousands of tokens
MAX_MESSAGES = 4096
MAX_PROMPT_CHARACTERS = 4 << 20  # more than fits any context; keeps a mistake from filling the memory
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # all of it is held back at worst, and compared at every token
MAX_GROWTH = 1 << 14  # of text in the normalizer or decoder; real ones keep its length, or double it
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BUNDLE_DOMAIN = b"layerswarm tokenizer 1\n"

__all__ = [
    "EncodedPrompt",
    "IncrementalText",
    "ModelFacts",
    "Prompt",
    "SamplingDefaults",
    "TextCodec",
    "bundle_hash",
    "check_stop",
]

Prompt = str | Sequence[Mapping[str, str]]
Json = Any  # what json.loads makes; narrowed where it is read


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`note` tells the user what was done differently from what the prompt's form suggests."""

    ids: tuple[int, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation config asks for, in the terms of `messages.Sampling` (0 is greedy)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """model.json, validated. `context`: positions the model was made for, None if it doesn't say."""

    model_type: str
    vocab_size: int
    context: int | None
    eos_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @classmethod
    def from_bytes(cls, data: bytes) -> ModelFacts:
        """Raises MessageError. Unknown keys are ignored: a newer peer may add some."""
        facts = _Fields("model.json", _json_object("model.json", data))
        return cls(
            model_type=facts.text("model_type", 64),
            vocab_size=facts.integer("vocab_size", 1, MAX_VOCABULARY),
            context=facts.integer_or_none("context_length", 1, MAX_POSITION),
            # one beyond this vocabulary (a cut model with the config of a whole one) is never generated
            eos_ids=facts.integers("eos_token_ids", 0, MAX_VOCABULARY, MAX_STOP_IDS),
            sampling=_sampling(facts.nested("sampling"), facts),
        )


def _sampling(fields: _Fields, facts: _Fields) -> SamplingDefaults:
    """A repetition penalty holds for greedy answers too, so it stands outside of what only sampling needs."""
    repetition = facts.number("repetition_penalty", MIN_REPETITION, MAX_REPETITION, missing=1.0)
    if not fields.names():
        return SamplingDefaults(repetition_penalty=repetition)
    return SamplingDefaults(
        temperature=fields.number("temperature", 0.0, 100.0),
        top_k=fields.integer("top_k", 0, MAX_POSITION),
        top_p=fields.number("top_p", 0.0, 1.0),
        min_p=fields.number("min_p", 0.0, 1.0, missing=0.0),
        repetition_penalty=repetition,
    )


class TextCodec:
    """One model's tokenizer and chat template. Safe to use from several threads; `aclose` ends its worker."""

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        template: str | None,
        variables: Mapping[str, str],
        cleaned: bool,
        limits: TemplateLimits,
    ) -> None:
        self.facts = facts
        self.template = template
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._cleaned = cleaned
        self._renderer = TemplateRenderer(limits)
        self._texts: dict[int, str | None] = {}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], limits: TemplateLimits | None = None) -> TextCodec:
        """Read a peer's bundle; a large one takes seconds, so call it in a thread. Raises MessageError."""
        for name, most in MAX_FILE_BYTES.items():
            if len(files.get(name, b"")) > most:
                raise MessageError(f"{name} has {len(files[name])} bytes, at most {most} are accepted")
        for name in ("tokenizer.json", "model.json"):
            if name not in files:
                raise MessageError(f"the peer sent no {name}")
        facts = ModelFacts.from_bytes(files["model.json"])
        config = _Fields(
            "tokenizer_config.json",
            _json_object("tokenizer_config.json", files.get("tokenizer_config.json", b"{}")),
        )
        if "special_tokens_map.json" in files and "added_tokens_decoder" not in config.names():
            config = config.overlaid(
                _json_object("special_tokens_map.json", files["special_tokens_map.json"])
            )
        variables = _named_tokens(config) | _further_tokens(config)
        tokenizer = _load_tokenizer(files["tokenizer.json"], config, variables)
        return cls(
            facts=facts,
            tokenizer=tokenizer,
            template=_template(files, config),
            variables=variables,
            cleaned=_is_cleaned(tokenizer, config),
            limits=limits or TemplateLimits(),
        )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.facts.eos_ids

    @property
    def context(self) -> int | None:
        return self.facts.context

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def defaults(self) -> SamplingDefaults:
        return self.facts.sampling

    # ------------------------------------------------------------ text -> ids

    async def encode_prompt(self, prompt: Prompt, *, raw: bool = False) -> EncodedPrompt:
        """A string (one user message, unless raw) or messages, as transformers would encode them.

        Raises UsageError for a prompt that can't be encoded, or with the template's own words when it
        refuses it; TemplateFailed and MessageError when the model's files are at fault.
        """
        return await asyncio.to_thread(self.encode_prompt_blocking, prompt, raw=raw)

    def encode_prompt_blocking(self, prompt: Prompt, *, raw: bool = False) -> EncodedPrompt:
        """`encode_prompt` for code without an event loop."""
        messages = _checked_messages(prompt)
        if raw or self.template is None:
            text, note = _raw_text(prompt, messages, raw)
            return EncodedPrompt(self._encode(text, add_special_tokens=True), note)
        rendered = self.render(messages)
        return EncodedPrompt(self._encode(rendered, add_special_tokens=False))

    def encode_after(self, text: str) -> tuple[int, ...]:
        """Ids of text that follows other text: none that only begin one, and not the space that some tokenizers
        put before a first word. So it is encoded behind a line's end, whose ids are cut off.

        Raises UsageError for text of which no id is made.
        """
        if not text:
            return ()
        with _strangers("the tokenizer"):
            alone = tuple(self._tokenizer.encode("\n", add_special_tokens=False).ids)
        both = self._encode("\n" + text, add_special_tokens=False)
        if both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
        return self._encode(text, add_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text, special tokens included: apply_chat_template(tokenize=False)."""
        assert self.template is not None
        variables = {
            **self._variables,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._renderer.render(self.template, variables)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        with _strangers("the tokenizer"):
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if not ids:
            raise UsageError("the prompt is empty: this model's tokenizer makes no token of it")
        if max(ids) >= self.vocab_size:
            raise MessageError(f"the tokenizer makes the id {max(ids)}, the model has {self.vocab_size}")
        return tuple(ids)

    # ------------------------------------------------------------ ids -> text

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens. Ids that the tokenizer doesn't know have no text."""
        text = self._decode_visible(self._visible(ids))
        return clean_up(text) if self._cleaned else text

    def spell(self, token_id: int) -> str:
        """One token by itself, special ones included; a part of a character is the replacement character."""
        text = self._text(token_id)
        return text if text is not None and text in self._special else self.decode([token_id])

    def detokenizer(self, stop: Sequence[str] = ()) -> IncrementalText:
        """For one answer. Raises UsageError on stop strings that are empty, too long or too many."""
        return IncrementalText(self._id_stage(), self._cleaned, check_stop(stop))

    def _id_stage(self) -> IdStage:
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return ByteLevelStage(self._token_bytes)
        return WindowStage(
            decode=lambda ids: self._decode_visible(self._visible(ids)),
            is_fragment=self._is_fragment,
            hold_replacement="ByteLevel" in self._decoder_steps,
        )

    @cached_property
    def _decoder_steps(self) -> frozenset[str]:
        return frozenset(step["type"] for step in _steps(_state(self._tokenizer.decoder)))

    def _decode_visible(self, ids: Sequence[int]) -> str:
        with _strangers("the tokenizer"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _visible(self, ids: Sequence[int]) -> list[int]:
        return [one for one in ids if self._text(one) is not None]

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def _text(self, token_id: int) -> str | None:
        """How the vocabulary spells a token; None for those without text."""
        if not 0 <= token_id < MAX_VOCABULARY:
            return None
        if token_id not in self._texts:
            known = self._tokenizer.id_to_token(token_id)
            if known is not None and len(known) > MAX_TOKEN_CHARACTERS:
                raise MessageError(
                    f"token {token_id} has {len(known)} characters, at most {MAX_TOKEN_CHARACTERS} do"
                )
            self._texts[token_id] = None if known in self._special else known
        return self._texts[token_id]

    def _token_bytes(self, token_id: int) -> bytes:
        text = self._text(token_id) or ""
        try:
            return bytes(map(BYTE_OF.__getitem__, text))
        except KeyError:  # an added token, spelled as it is
            return text.encode()

    def _is_fragment(self, token_id: int) -> bool:
        """Tokens without text settle nothing, and byte tokens (<0x0A>) only together with what follows."""
        text = self._text(token_id)
        if text is None:
            return True
        return (
            "ByteFallback" in self._decoder_steps and len(text) == 6 and text[:3] == "<0x" and text[5] == ">"
        )

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the template's worker process."""
        self._renderer.close()


def bundle_hash(files: Mapping[str, bytes]) -> bytes:
    """The 32 bytes that a peer's signed descriptor states for its bundle."""
    entries = (FileHash("tokenizer", name, hashlib.sha256(data).digest()) for name, data in files.items())
    return canonical_hash(BUNDLE_DOMAIN, entries)


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Raises UsageError on stop strings that are empty, too long or too many."""
    stops = (stop,) if isinstance(stop, str) else stop
    sound = isinstance(stops, Sequence) and len(stops) <= MAX_STOP_STRINGS
    if not sound or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        bounds = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise UsageError(f"stop takes {bounds}, got {str(stop)[:80]!r}")
    return tuple(stops)


# ---------------------------------------------------------------- the prompt


def _checked_messages(prompt: Prompt) -> list[dict[str, str]]:
    """What a template may see: plain dicts of strings. Raises UsageError."""
    if isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or not 0 < len(prompt) <= MAX_MESSAGES:
        raise UsageError(f"a prompt is a string or a list of 1 to {MAX_MESSAGES} messages")
    messages = [_checked_message(place, message) for place, message in enumerate(prompt)]
    characters = sum(len(text) for message in messages for text in message.values())
    if characters > MAX_PROMPT_CHARACTERS:
        raise UsageError(f"the prompt has {characters} characters, at most {MAX_PROMPT_CHARACTERS} are taken")
    return messages


def _checked_message(place: int, message: object) -> dict[str, str]:
    where = f"message {place} of the prompt"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} has to be a dict with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content", *plain):
        value = plain.get(key)
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{where} needs a string as {key!r}")
        if not _encodable(value):
            raise UsageError(
                f"the {key} of {where} has half of a surrogate pair in it, which no encoding has"
            )
    return _with_reasoning(plain)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_reasoning(message: dict[str, str]) -> dict[str, str]:
    """Reasoning under the names that templates read (transformers' _alias_reasoning_fields)."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raw_text(prompt: Prompt, messages: Sequence[Mapping[str, str]], raw: bool) -> tuple[str, str | None]:
    if raw:
        if not isinstance(prompt, str):
            raise UsageError("a raw prompt is a string; messages need the model's chat template")
        return prompt, None
    text = "\n\n".join(message["content"] for message in messages)
    return text, "this model has no chat template: the prompt was given to it as it is (raw)"


# ---------------------------------------------------------------- the files


@contextmanager
def _strangers(what: str) -> Iterator[None]:
    """The tokenizers library on a stranger's data: any failure, a panic too, is the data's fault."""
    try:
        yield
    except BaseException as error:
        # pyo3's PanicException is no Exception, and has no public name
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise MessageError(f"{what} that the peer sent is unusable: {str(error)[:200]}") from error


def _json_object(name: str, data: bytes) -> dict[str, Json]:
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{name} that the peer sent is not JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise MessageError(f"{name} that the peer sent is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Refuses a name that occurs twice: what we check and what another parser reads would differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return made


class _Fields:
    """A JSON object of a stranger, read field by field. Every reader raises MessageError."""

    def __init__(self, file: str, values: Mapping[str, Json]) -> None:
        self._file, self._values = file, values

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def overlaid(self, values: Mapping[str, Json]) -> _Fields:
        return _Fields(self._file, {**self._values, **values})

    def _wrong(self, name: str, expected: str) -> MessageError:
        return MessageError(f"{self._file}: {name} is not {expected}: {str(self._values.get(name))[:60]!r}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"a number from {low} to {high}")
        return value

    def integer_or_none(self, name: str, low: int, high: int) -> int | None:
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int, most: int) -> tuple[int, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) > most:
            raise self._wrong(name, f"a list of at most {most} numbers")
        return tuple(_Fields(self._file, {name: value}).integer(name, low, high) for value in values)

    def number(self, name: str, low: float, high: float, missing: float | None = None) -> float:
        value: Json = self._values.get(name, missing)
        # compared first: a whole number may be too large for a float, and isfinite would make it one
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise self._wrong(name, "true or false")
        return bool(value)

    def text(self, name: str, most: int) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self._wrong(name, f"a text of at most {most} characters")
        return value

    def nested(self, name: str) -> _Fields:
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return _Fields(f"{self._file}: {name}", value)

    def anything(self, name: str) -> Json:
        return self._values.get(name)


def _content(token: Json) -> str | None:
    """A special token is written as its text, or as an object that has it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: _Fields) -> dict[str, str]:
    """bos_token, eos_token, ...: what templates know them by."""
    texts = {name: _content(config.anything(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _further_tokens(config: _Fields) -> dict[str, str]:
    """A model's own names for tokens (image_token, ...)."""
    further = {name: config.anything(name) for name in config.names() if name.endswith("_token")}
    extra = config.anything("extra_special_tokens")
    if isinstance(extra, dict):
        further |= {str(name): _content(token) for name, token in extra.items()}
    return {
        name: text for name, text in further.items() if isinstance(text, str) and name not in NAMED_TOKENS
    }


def _listed_tokens(config: _Fields) -> list[str]:
    """Special tokens without a name."""
    listed = config.anything("extra_special_tokens") or config.anything("additional_special_tokens")
    contents = map(_content, listed) if isinstance(listed, list) else ()
    return [content for content in contents if content is not None]


def _template(files: Mapping[str, bytes], config: _Fields) -> str | None:
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


def _load_tokenizer(data: bytes, config: _Fields, named: Mapping[str, str]) -> Tokenizer:
    """The tokenizer as transformers sets it up (tokenization_utils_tokenizers.py, TokenizersBackend)."""
    definition = _json_object("tokenizer.json", data)
    # before the library sees it: it normalizes the added tokens as soon as it reads them
    growth = max(_growth(definition.get("normalizer")), _growth(definition.get("decoder")))
    if growth > MAX_GROWTH:
        raise MessageError(f"tokenizer.json that the peer sent may make a text {growth:.0f} times as long")
    del definition
    with _strangers("tokenizer.json"):
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > MAX_VOCABULARY:
        raise MessageError(f"the tokenizer has {size} tokens, at most {MAX_VOCABULARY} are accepted")
    with _strangers("tokenizer_config.json"):
        tokenizer.encode_special_tokens = config.flag("split_special_tokens")
        _add_tokens(tokenizer, config, named)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, config: _Fields, named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json declares."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.nested("added_tokens_decoder")
    for token_id in sorted(declared.names(), key=int):
        fields = declared.nested(token_id)
        content = fields.text("content", MAX_PROMPT_CHARACTERS)
        if content not in known:
            special = fields.flag("special") or content in named.values()
            tokenizer.add_tokens([AddedToken(content, special=special, **_matching(fields, special))])
            known.add(content)
    for content in (*named.values(), *_listed_tokens(config)):
        if content not in known:
            tokenizer.add_tokens([AddedToken(content, special=True)])
            known.add(content)


def _matching(fields: _Fields, special: bool) -> dict[str, bool]:
    flags = {name: fields.flag(name) for name in ("lstrip", "rstrip", "single_word")}
    flags["normalized"] = fields.flag("normalized") if "normalized" in fields.names() else not special
    return flags


def _is_cleaned(tokenizer: Tokenizer, config: _Fields) -> bool:
    """Whether decoded text has its spaces cleaned up; for BPE it would take out real ones."""
    anyway = config.flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    is_bpe = type(tokenizer.model).__name__ == "BPE"
    return config.flag("clean_up_tokenization_spaces") and (anyway or not is_bpe)


def _state(part: Any) -> Json:
    """A normalizer's or decoder's definition, as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(state: Json) -> Iterator[dict[str, Json]]:
    """The single steps of a definition, sequences unfolded."""
    if state is None:
        return
    if state["type"] == "Sequence":
        for inner in state.get("normalizers", state.get("decoders", ())):
            yield from _steps(inner)
    else:
        yield state


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


def _byte_of() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (GPT-2's bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


BYTE_OF = _byte_of()
