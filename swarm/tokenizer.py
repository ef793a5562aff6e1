"""A model's text side at the client: prompt -> ids, ids -> text, from files that a peer sent.

Invariant: nothing in those files is trusted. They have size caps; they are read, and text is made into ids, in a
process of its own with a deadline (`tokenizer_worker.py` in `confined.py`), since a regular expression in them can
take for ever; the chat template runs in another (`template.py`); what stays in this process is plain data
(`vocabulary.py`). Whatever is wrong with them is a MessageError, TokenizerFailed or TemplateFailed, never a crash
and never a wait. What comes out equals transformers' `apply_chat_template`, `__call__` and
`decode(skip_special_tokens=True)` for the same files, without importing it.

`bundles.py` fetches the files and checks them against the hash that the peer signed (`bundle_hash`);
`peer/tokenizer_bundle.py` makes them and describes "model.json", which `facts.py` reads.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.canonical import FileHash, canonical_hash
from swarm.codecs import MAX_POSITION
from swarm.confined import Confined, First, Job, Limits, Said, one_line
from swarm.detokenizer import ByteLevelStage, IdStage, IncrementalText, WindowStage, clean_up
from swarm.errors import MessageError, TokenizerFailed, UsageError
from swarm.facts import ModelFacts, SamplingDefaults
from swarm.prompts import Prompt, check_stop, checked_messages, raw_text
from swarm.template import MAX_TEMPLATE_BYTES, TemplateLimits, TemplateRenderer
from swarm.vocabulary import MAX_SPELLINGS_BYTES, MAX_VOCABULARY, Vocabulary

MAX_FILE_BYTES = {
    "tokenizer.json": 48 << 20,  # the largest known, Gemma 3's, has 33 MB
    "tokenizer_config.json": 4 << 20,  # lists every added token
    "special_tokens_map.json": 1 << 20,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "model.json": 64 << 10,
}
# An id has a byte of what normalizing made of the text, which Unicode's normal forms make eleven times as long at most;
# and special ones.
MAX_IDS_PER_BYTE, MAX_IDS = 16, 1024
IDS_AT_ONCE = 1 << 16  # a millisecond
BUNDLE_DOMAIN = b"layerswarm tokenizer 1\n"

__all__ = ["EncodedPrompt", "IncrementalText", "TextCodec", "TokenizerLimits", "TokenizerProcess", "bundle_hash"]


@dataclass(frozen=True)
class TokenizerLimits:
    """What a stranger's tokenizer may cost. All of it is generous: real ones take milliseconds for a prompt, and to
    be read 30 ms a megabyte. The memory is three times what the largest known takes."""

    encode_s: float = 5.0
    encode_s_per_character: float = 1e-5
    load_s: float = 5.0
    load_s_per_byte: float = 1e-6
    start_s: float = 30.0  # importing the library on a busy machine
    memory_bytes: int = 3 << 30


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`note` tells the user what was done differently from what the prompt's form suggests."""

    ids: tuple[int, ...]
    note: str | None = None


class TokenizerProcess:
    """The process that reads one model's tokenizer and encodes with it. Safe to use from several threads."""

    def __init__(self, limits: TokenizerLimits | None = None) -> None:
        self.limits = limits or TokenizerLimits()
        answer = max(MAX_SPELLINGS_BYTES + 5 * MAX_VOCABULARY + MAX_TEMPLATE_BYTES, 4 * MAX_POSITION)
        allowed = Limits(self.limits.memory_bytes, answer, self.limits.start_s)
        self._confined = Confined(Job("swarm.tokenizer_worker", ("tokenizers",), TokenizerFailed), allowed)

    def start(self) -> None:
        """Have the process ready, while there is nothing to read yet. Raises TokenizerFailed."""
        self._confined.start()

    def load(self, files: Mapping[str, bytes]) -> Said:
        """Give it the files, once. A process that ends is replaced by one that reads them again."""
        wanted = {name: data for name, data in files.items() if name in MAX_FILE_BYTES and name != "model.json"}
        seconds = self.limits.load_s + self.limits.load_s_per_byte * sum(map(len, wanted.values()))
        request = Said({"do": "load", "names": list(wanted)}, tuple(wanted.values()))
        return self._confined.begin(First(request, seconds, _usable))

    def encode(self, text: str, special: bool) -> tuple[int, ...]:
        """special: add the special tokens that begin or end a text. Raises MessageError, TokenizerFailed."""
        seconds = self.limits.encode_s + self.limits.encode_s_per_character * len(text)
        data = text.encode()
        answer = self._confined.ask(Said({"do": "encode", "special": special}, (data,)), seconds)
        _usable(answer)
        return ids_of(answer, MAX_IDS + MAX_IDS_PER_BYTE * len(data))

    def close(self) -> None:
        self._confined.close()


def _usable(answer: Said) -> None:
    if "unusable" in answer.fields:
        raise MessageError(one_line(answer.fields["unusable"]))


def ids_of(answer: Said, most: int) -> tuple[int, ...]:
    """Of an answer to "encode". Raises TokenizerFailed if it isn't one, or has more than `most`.

    Read some at a time: a million at once would keep Python's lock from the event loop for 25 ms."""
    if len(answer.blobs) != 1 or len(answer.blobs[0]) % 4 or len(answer.blobs[0]) > 4 * MAX_POSITION:
        raise TokenizerFailed("it didn't answer with ids")
    found = memoryview(answer.blobs[0]).cast("I")
    if len(found) > most:
        raise TokenizerFailed(f"it made {len(found):,} ids of a text that can have {most:,} at most")
    ids: list[int] = []
    for at in range(0, len(found), IDS_AT_ONCE):
        ids.extend(found[at : at + IDS_AT_ONCE])
    return tuple(ids)


@dataclass(frozen=True)
class Loaded:
    """What is known here of a tokenizer that was read: see `tokenizer_worker.py`."""

    vocabulary: Vocabulary
    variables: Mapping[str, str]
    template: str | None
    cleaned: bool

    @classmethod
    def of(cls, answer: Said) -> Loaded:
        """Of an answer to "load". Raises MessageError, TokenizerFailed."""
        variables = answer.fields.get("variables")
        if len(answer.blobs) != 4 or not isinstance(variables, dict):
            raise TokenizerFailed("it didn't answer with a vocabulary")
        texts, ends, kinds, template = answer.blobs
        return cls(
            vocabulary=Vocabulary(texts, ends, kinds, answer.fields.get("decoder")),
            variables={name: str(text) for name, text in variables.items()},
            template=template.decode("utf-8", "replace") if answer.fields.get("template") else None,
            cleaned=bool(answer.fields.get("cleaned")),
        )


class TextCodec:
    """One model's tokenizer and chat template. Safe to use from several threads; `aclose` ends its processes."""

    def __init__(
        self, facts: ModelFacts, loaded: Loaded, tokenizer: TokenizerProcess, renderer: TemplateRenderer
    ) -> None:
        self.facts = facts
        self.template = loaded.template
        self.vocabulary = loaded.vocabulary
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._renderer = renderer

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        limits: TemplateLimits | None = None,
        tokenizer: TokenizerProcess | None = None,
    ) -> TextCodec:
        """Read a peer's bundle; a large one takes seconds, so call it in a thread. tokenizer: a process that has read
        nothing yet; it is ended when it can't be used. Raises MessageError, TokenizerFailed."""
        tokenizer = tokenizer or TokenizerProcess()
        try:
            facts = checked_facts(files)
            loaded = Loaded.of(tokenizer.load(files))
        except BaseException:
            tokenizer.close()
            raise
        return cls(facts, loaded, tokenizer, TemplateRenderer(limits))

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
        refuses it; TemplateFailed, TokenizerFailed and MessageError when the model's files are at fault.
        """
        return await asyncio.to_thread(self.encode_prompt_blocking, prompt, raw=raw)

    def encode_prompt_blocking(self, prompt: Prompt, *, raw: bool = False) -> EncodedPrompt:
        """`encode_prompt` for code without an event loop."""
        messages = checked_messages(prompt)
        if raw or self.template is None:
            text, note = raw_text(prompt, messages, raw)
            return EncodedPrompt(self._encode(text, add_special_tokens=True), note)
        rendered = self.render(messages)
        return EncodedPrompt(self._encode(rendered, add_special_tokens=False))

    async def encode_after(self, text: str) -> tuple[int, ...]:
        """Ids of text that follows other text: none that only begin one, and not the space that some tokenizers
        put before a first word. So it is encoded behind a line's end, whose ids are cut off.

        Raises UsageError for text of which no id is made; TokenizerFailed and MessageError.
        """
        return await asyncio.to_thread(self._encode_after, text) if text else ()

    def _encode_after(self, text: str) -> tuple[int, ...]:
        alone = self._tokenizer.encode("\n", special=False)
        both = self._encode("\n" + text, add_special_tokens=False)
        if both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
        return self._encode(text, add_special_tokens=False)

    def start_rendering(self) -> None:
        """Have the chat template's process ready, so that the first prompt needn't wait for it. Blocks."""
        if self.template is not None:
            self._renderer.start()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text, special tokens included: apply_chat_template(tokenize=False)."""
        assert self.template is not None
        variables = {
            **self._loaded.variables,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._renderer.render(self.template, variables)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens)
        if not ids:
            raise UsageError("the prompt is empty: this model's tokenizer makes no token of it")
        if max(ids) >= self.vocab_size:
            raise MessageError(f"the tokenizer makes the id {max(ids)}, the model has {self.vocab_size}")
        return ids

    # ------------------------------------------------------------ ids -> text

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens. Ids that the tokenizer doesn't know have no text."""
        text = self.vocabulary.decode(ids)
        return clean_up(text) if self._loaded.cleaned else text

    def spell(self, token_id: int) -> str:
        """One token by itself, special ones included; a part of a character is the replacement character."""
        special = self.vocabulary.special(token_id)
        return self.decode([token_id]) if special is None else special

    def detokenizer(self, stop: Sequence[str] = ()) -> IncrementalText:
        """For one answer. Raises UsageError on stop strings that are empty, too long or too many."""
        return IncrementalText(self._id_stage(), self._loaded.cleaned, check_stop(stop))

    def _id_stage(self) -> IdStage:
        if self.vocabulary.byte_level:
            return ByteLevelStage(self.vocabulary.text)
        return WindowStage(
            decode=self.vocabulary.decode,
            is_fragment=self._is_fragment,
            hold_replacement="ByteLevel" in self.vocabulary.steps,
        )

    def _is_fragment(self, token_id: int) -> bool:
        """Tokens without text settle nothing, and byte tokens (<0x0A>) only together with what follows."""
        text = self.vocabulary.text(token_id)
        if text is None:
            return True
        is_byte = len(text) == 6 and text[:3] == "<0x" and text[5] == ">"
        return is_byte and "ByteFallback" in self.vocabulary.steps

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the processes. What is encoded later starts them again."""
        self._renderer.close()
        self._tokenizer.close()


def checked_facts(files: Mapping[str, bytes]) -> ModelFacts:
    """What "model.json" says, if the files are there and none is too large. Raises MessageError."""
    for name, most in MAX_FILE_BYTES.items():
        if len(files.get(name, b"")) > most:
            raise MessageError(f"{name} has {len(files[name])} bytes, at most {most} are accepted")
    for name in ("tokenizer.json", "model.json"):
        if name not in files:
            raise MessageError(f"the peer sent no {name}")
    return ModelFacts.from_bytes(files["model.json"])


def bundle_hash(files: Mapping[str, bytes]) -> bytes:
    """The 32 bytes that a peer's signed descriptor states for its bundle. Hashes all of it: call it in a thread."""
    entries = (FileHash("tokenizer", name, hashlib.sha256(data).digest()) for name, data in files.items())
    return canonical_hash(BUNDLE_DOMAIN, entries)
