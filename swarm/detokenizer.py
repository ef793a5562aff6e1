"""Token ids to text, piece by piece, while they arrive.

Invariant: the pieces of `push` and the last one of `finish`, joined, are exactly the decoded whole (or that
text cut where the earliest stop string begins), and no piece has to be taken back. What may still change
is held back: an incomplete UTF-8 character, a run of byte tokens, the start of a stop string.

Three stages in a row, each with `feed` and `flush`: ids -> text, transformers' clean-up of spaces where it
applies, stop strings. Every stage looks at each token or character a bounded number of times, so a long
answer costs no more per token than a short one. `tokenizer.py` chooses the stages for a model.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# transformers' clean_up_tokenization (tokenization_utils_base.py), in its order
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
CLEAN_UP_REACH = 4  # one more than the longest run of other characters after a space in CLEAN_UP
LONGEST_HELD_TOKENS = 8  # of a decoder we don't know: a character has 4 bytes, so 4 tokens would do


def _byte_of() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (GPT-2's bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


BYTE_OF = _byte_of()


class IdStage(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class ByteLevelStage:
    """Byte-level BPE: every token is some bytes, the text is their UTF-8 decoding with U+FFFD for the rest.

    Python's incremental decoder and Rust's from_utf8_lossy replace the same "maximal subparts"
    (The Unicode Standard, chapter 3.9), so only a character that is still incomplete is held.
    """

    def __init__(self, text: Callable[[int], str | None]) -> None:
        """text(id): how the vocabulary spells a token, None for those without text."""
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _token_bytes(self, token_id: int) -> bytes:
        text = self._text(token_id) or ""
        try:
            return bytes(map(BYTE_OF.__getitem__, text))
        except KeyError:  # an added token, spelled as it is
            return text.encode()


class WindowStage:
    """Any other decoder, seen as a function: decode a few tokens before the new ones, with and without them.

    decode(ids): the tokenizer's own. is_fragment(id): the token's text depends on the one after it (byte
    tokens: a run of them is one UTF-8 string, or one U+FFFD per token if it is invalid anywhere).
    hold_replacement: for decoders we don't know, also take a U+FFFD at the end for unfinished.

    The tokens before must have text of their own, or the new ones would be decoded as the beginning of
    the answer, where decoders drop a leading space.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_fragment: Callable[[int], bool],
        hold_replacement: bool,
    ) -> None:
        self._decode, self._is_fragment, self._hold_replacement = decode, is_fragment, hold_replacement
        self._before: list[int] = []  # settled tokens that give the new ones their context
        self._before_text = ""
        self._latest: list[int] = []  # the last group of tokens that settled
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        settled = len(ids)
        while settled and self._is_fragment(ids[settled - 1]):
            settled -= 1
        if not settled:
            self._pending += ids
            return ""
        text = self._settle(self._pending + list(ids[:settled]), final=False)
        self._pending += ids[settled:]
        return text

    def flush(self) -> str:
        return self._settle(self._pending, final=True)

    def _settle(self, group: list[int], final: bool) -> str:
        window = self._before + group
        text = self._decode(window)
        unfinished = (
            self._hold_replacement and text.endswith(REPLACEMENT) and len(group) < LONGEST_HELD_TOKENS
        )
        if unfinished and not final:
            self._pending = group
            return ""
        new = text[len(self._before_text) :]
        self._remember(group, window, text)
        return new

    def _remember(self, group: list[int], window: list[int], text: str) -> None:
        for shorter in (group, self._latest + group):
            shorter_text = self._decode(shorter)
            if shorter_text:
                self._before, self._before_text = shorter, shorter_text
                break
        else:
            self._before, self._before_text = window, text
        self._latest, self._pending = group, []


def clean_up(text: str) -> str:
    for old, new in CLEAN_UP:
        text = text.replace(old, new)
    return text


class CleanUpStage:
    """`clean_up` of a text that is still growing.

    It only removes spaces, and each thing it replaces begins with a space that at most
    CLEAN_UP_REACH - 1 other characters follow; so behind CLEAN_UP_REACH of them nothing reaches across.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        seen, self._held = len(self._held), self._held + text
        for end in range(len(self._held), seen, -1):
            if " " not in self._held[max(0, end - CLEAN_UP_REACH) : end]:
                sure, self._held = self._held[:end], self._held[end:]
                return clean_up(sure)
        return ""

    def flush(self) -> str:
        sure, self._held = self._held, ""
        return clean_up(sure)


class StopStage:
    """Passes text on up to the stop string that begins first. `stopped` once it is found."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = self._found()
        possible = self._possible()
        if found is not None and found <= possible:
            return self._cut(found)
        # up to `possible` no stop string can begin any more; behind it an earlier one than `found` may
        sure, self._held = self._held[:possible], self._held[possible:]
        return sure

    def flush(self) -> str:
        found = self._found()
        if self.stopped or found is None:
            sure, self._held = self._held, ""
            return sure
        return self._cut(found)

    def _found(self) -> int | None:
        places = (self._held.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)

    def _possible(self) -> int:
        """Where the earliest incomplete stop string may begin; the end of the text if none does."""
        end = len(self._held)
        for start in range(max(0, end - self._reach + 1), end):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return end

    def _cut(self, place: int) -> str:
        sure, self._held, self.stopped = self._held[:place], "", True
        return sure


class IncrementalText:
    """The text of one answer. Not for several threads."""

    def __init__(self, ids: IdStage, cleaned: bool, stops: Sequence[str]) -> None:
        self._ids = ids
        self._clean_up = CleanUpStage() if cleaned else None
        self._stop = StopStage(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. What is pushed afterwards is ignored."""
        return self._stop.stopped

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and wasn't before; often one token late, sometimes empty."""
        if self.stopped:
            return ""
        text = self._ids.feed(ids)
        return self._stop.feed(self._clean_up.feed(text) if self._clean_up else text)

    def finish(self) -> str:
        """The rest, now that no more ids come. May still find a stop string: look at `stopped` after it."""
        if self.stopped:
            return ""
        text = self._ids.flush()
        if self._clean_up:
            text = self._clean_up.feed(text) + self._clean_up.flush()
        return self._stop.feed(text) + self._stop.flush()
