"""Ids to text with a stranger's vocabulary, in this process: what each id is spelled as, and the decoder.

Invariant: nothing of a stranger's runs here that could take long. The tokenizer itself stays in its own process
(`tokenizer_worker.py`), since its normalizer and pre-tokenizer are regular expressions, and reading it means
running them; it sends the spellings (`pack`) and the decoder's definition once. Of all decoders only Replace may
hold a regular expression: those that do are refused (no known model has one), as is a decoder of very many steps
or long texts. What is left looks at each character a bounded number of times, so that an answer's text is made
without waiting for another process: that would cost every token a round trip.

Layout of the spellings: all texts in UTF-8, one behind the other; where each ends (u32, native order); what each
id is: UNKNOWN, TEXT, or SPECIAL (known, but not part of what is said).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from tokenizers import Tokenizer, models

from swarm.errors import MessageError

MAX_VOCABULARY = 1 << 20  # the largest known has 2**18 entries
MAX_TOKEN_CHARACTERS = 1024  # real ones end at some hundred spaces; an answer has thousands of tokens
MAX_SPELLINGS_BYTES = 16 << 20  # those of 2**18 entries: 2 MB
MAX_DECODER_STEPS = 8  # real ones have up to 5; each looks at every character
MAX_DECODER_GROWTH = 8.0  # of a text by replacements; real ones keep its length, or shorten it
MAX_DECODER_TEXT = 64  # characters of a step's prefix, pattern, ...; real ones have up to 4
DECODERS = ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")
UNKNOWN, TEXT, SPECIAL = 0, 1, 2


def pack(tokenizer: Tokenizer) -> tuple[bytes, bytes, bytes]:
    """The spellings of all ids. Raises MessageError on one that is too long."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    spelled = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    spelled |= {token_id: token.content for token_id, token in added.items()}  # as id_to_token has it
    texts, ends, kinds = bytearray(), array("I"), bytearray()
    for token_id in sorted(spelled):
        if token_id >= MAX_VOCABULARY:
            break  # no model has it
        text = spelled[token_id]
        if len(text) > MAX_TOKEN_CHARACTERS:
            raise MessageError(
                f"token {token_id} has {len(text)} characters, at most {MAX_TOKEN_CHARACTERS} are accepted"
            )
        ends.extend([len(texts)] * (token_id - len(ends)))
        kinds.extend(bytes(token_id - len(kinds)))
        texts += text.encode("utf-8", "replace")
        ends.append(len(texts))
        kinds.append(SPECIAL if text in special else TEXT)
    if len(texts) > MAX_SPELLINGS_BYTES:
        raise MessageError(f"the vocabulary has {len(texts)} bytes, at most {MAX_SPELLINGS_BYTES} are accepted")
    return bytes(texts), ends.tobytes(), bytes(kinds)


class Vocabulary:
    """What `pack` made, and a decoder. Safe to use from several threads."""

    def __init__(self, texts: bytes, ends: bytes, kinds: bytes, decoder: object) -> None:
        """decoder: its definition as tokenizer.json has it. Raises MessageError."""
        if len(kinds) > MAX_VOCABULARY or len(ends) != 4 * len(kinds) or len(texts) > MAX_SPELLINGS_BYTES:
            raise MessageError(f"a vocabulary of {len(kinds)} tokens, {len(ends)} and {len(texts)} bytes")
        self._texts, self._ends, self._kinds = texts, memoryview(ends).cast("I"), kinds
        steps = list(_steps(decoder))
        for step in steps:
            _check(step)
        growth = prod(map(_growth, steps))
        if growth > MAX_DECODER_GROWTH:
            raise MessageError(f"the decoder that the peer sent may make a text {growth:.0f} times as long")
        self.steps = frozenset(step["type"] for step in steps)
        self.byte_level = isinstance(decoder, dict) and decoder["type"] == "ByteLevel"
        self._decoder = _made(decoder)

    def text(self, token_id: int) -> str | None:
        """How a token is spelled; None for those without text: special ones, and ids that nobody knows."""
        return self._spelling(token_id) if self._kind(token_id) == TEXT else None

    def special(self, token_id: int) -> str | None:
        """How a special token is spelled; None for all others."""
        return self._spelling(token_id) if self._kind(token_id) == SPECIAL else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all that have one, as the tokenizer itself would decode them. Raises MessageError."""
        tokens = [text for text in map(self.text, ids) if text is not None]
        if self._decoder is None:
            return " ".join(tokens)
        try:
            return str(self._decoder.decode(tokens))
        except BaseException as error:
            raise as_message_error("the decoder", error) from error

    def _kind(self, token_id: int) -> int:
        return self._kinds[token_id] if 0 <= token_id < len(self._kinds) else UNKNOWN

    def _spelling(self, token_id: int) -> str:
        start = self._ends[token_id - 1] if token_id else 0
        return self._texts[start : min(self._ends[token_id], start + 4 * MAX_TOKEN_CHARACTERS)].decode(
            "utf-8", "replace"
        )


def as_message_error(what: str, error: BaseException) -> BaseException:
    """Of the tokenizers library on a stranger's data, any failure, a panic too, is the data's fault."""
    # pyo3's PanicException is no Exception, and has no public name
    if isinstance(error, MessageError):
        return error
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return MessageError(f"{what} that the peer sent is unusable: {str(error)[:200]}")


def _steps(definition: Any) -> Iterator[dict[str, Any]]:
    """The single steps, sequences unfolded. Raises MessageError on what is no definition."""
    left, seen = [definition] if definition is not None else [], 0
    while left:
        step = left.pop()
        seen += 1
        if not isinstance(step, dict) or seen > 2 * MAX_DECODER_STEPS:
            raise MessageError("the decoder that the peer sent is no list of a few steps")
        if step.get("type") == "Sequence":
            inner = step.get("decoders")
            left += inner if isinstance(inner, list) else [None]
        else:
            yield step


def _check(step: dict[str, Any]) -> None:
    kind = step.get("type")
    if kind not in DECODERS:
        raise MessageError(f"the decoder that the peer sent has a step of a kind unknown here: {str(kind)[:60]!r}")
    pattern = step.get("pattern", None if kind == "Replace" else {"String": ""})
    if not isinstance(pattern, dict) or set(pattern) != {"String"}:
        raise MessageError("the decoder that the peer sent replaces by a regular expression, which may take for ever")
    if not isinstance(pattern["String"], str):
        raise MessageError(f"the decoder that the peer sent replaces {str(pattern['String'])[:60]!r}, which is no text")
    for text in (pattern["String"], *(value for name, value in step.items() if name != "pattern")):
        if not isinstance(text, str | bool | int) or (isinstance(text, str) and len(text) > MAX_DECODER_TEXT):
            raise MessageError(f"the decoder that the peer sent has a {kind} with {str(text)[:60]!r} in it")


def _growth(step: dict[str, Any]) -> float:
    """How many times as long the step may make a text. An empty pattern is found between any two characters."""
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"]["String"], str(step.get("content", ""))
    return max(1.0, len(content) / len(pattern) if pattern else 1.0 + len(content))


def _made(definition: object) -> Any:
    """The library's decoder. Only a whole tokenizer can be read, so one without a vocabulary is."""
    if definition is None:
        return None
    whole = json.loads(Tokenizer(models.BPE()).to_str())
    try:
        return Tokenizer.from_str(json.dumps({**whole, "decoder": definition})).decoder
    except BaseException as error:
        raise as_message_error("the decoder", error) from error
