"""What one generation may be asked for: the names, the bounds, and what holds where nothing is said.

`Options` is what a caller writes, `Wanted` the same checked, `Wanted.sampling` what travels to the last hop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from swarm.codecs import MAX_POSITION
from swarm.errors import UsageError
from swarm.facts import SamplingDefaults
from swarm.messages import MAX_BIAS, MAX_BIASED, MAX_LOGPROBS, MAX_PENALTY, MAX_REPETITION, MIN_REPETITION, Sampling
from swarm.prompts import check_stop

SEEDS = 1 << 63
MAX_ANSWERS = 64  # to one prompt at once: each is a session of its own on every hop


class Options(TypedDict, total=False):
    """What `AsyncClient.stream` takes beside the prompt, and explains."""

    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    stop: str | Sequence[str]
    seed: int | None
    raw: bool


@dataclass(frozen=True, slots=True)
class _Bounds:
    """whole: an integer is needed. said: the bounds in words. above: `low` itself is out."""

    low: float
    high: float
    said: str
    whole: bool = False
    above: bool = False


_PENALTY = _Bounds(-MAX_PENALTY, MAX_PENALTY, f"lie between -{MAX_PENALTY:g} and {MAX_PENALTY:g} (0 is off)")
_BIAS = _Bounds(-MAX_BIAS, MAX_BIAS, f"lie between -{MAX_BIAS:g} and {MAX_BIAS:g}")
_BOUNDS = {
    "max_tokens": _Bounds(1, float("inf"), "be at least 1", whole=True),
    "temperature": _Bounds(0, 100, "lie between 0 (greedy) and 100"),
    "top_k": _Bounds(0, MAX_POSITION, f"lie between 0 (off) and {MAX_POSITION}", whole=True),
    "top_p": _Bounds(0, 1, "lie above 0 and be at most 1 (off)", above=True),
    "min_p": _Bounds(0, 1, "lie between 0 (off) and 1"),
    "repetition_penalty": _Bounds(
        MIN_REPETITION, MAX_REPETITION, f"lie between {MIN_REPETITION:g} and {MAX_REPETITION:g} (1 is off)"
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logprobs": _Bounds(
        0, MAX_LOGPROBS, f"lie between 0 (the chosen token's only) and {MAX_LOGPROBS}", whole=True
    ),
    "seed": _Bounds(0, SEEDS - 1, "lie between 0 and 2**63 - 1", whole=True),
}


@dataclass(frozen=True)
class Wanted:
    """The options of one generation. Making it raises UsageError naming the first that is out of bounds."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    raw: bool = False
    stops: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", check_stop(self.stop))
        for name, bounds in _BOUNDS.items():
            _check(name, getattr(self, name), bounds)
        _check_bias(self.logit_bias or {})

    def sampling(self, defaults: SamplingDefaults, vocabulary: int, answer_from: int) -> Sampling:
        """Filled up from the model's generation config; a fresh seed where none is given.

        vocabulary: how many ids the model has. answer_from: the answer's first position. Raises UsageError.
        """
        beyond = [token for token in self.logit_bias or {} if token >= vocabulary]
        if beyond:
            raise UsageError(
                f"logit_bias names the id {beyond[0]}, the model's go from 0 to {vocabulary - 1}"
            )
        return Sampling(
            temperature=float(_first(self.temperature, defaults.temperature)),
            top_k=int(_first(self.top_k, defaults.top_k)),
            top_p=float(_first(self.top_p, defaults.top_p)),
            min_p=float(_first(self.min_p, defaults.min_p)),
            repetition_penalty=float(_first(self.repetition_penalty, defaults.repetition_penalty)),
            presence_penalty=float(_first(self.presence_penalty, 0.0)),
            frequency_penalty=float(_first(self.frequency_penalty, 0.0)),
            answer_from=answer_from,
            logprobs=self.logprobs,
            seed=fresh_seed() if self.seed is None else self.seed,
            logit_bias=tuple((token, float(bias)) for token, bias in (self.logit_bias or {}).items()),
        )


def fresh_seed() -> int:
    return secrets.randbits(63)


def seeds_of(seed: int | None, answers: int) -> list[int]:
    """One for each of several answers: the given one (or a fresh one) and those that follow. Raises UsageError."""
    if not (isinstance(answers, int) and 1 <= answers <= MAX_ANSWERS):
        raise UsageError(f"n must lie between 1 and {MAX_ANSWERS} answers, got {answers!r}")
    _check("seed", seed, _BOUNDS["seed"])
    first = fresh_seed() if seed is None else seed
    return [(first + further) % SEEDS for further in range(answers)]


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _check(name: str, value: Any, bounds: _Bounds) -> None:
    if value is None:
        return
    kind = "a whole number" if bounds.whole else "a number"
    if not isinstance(value, int if bounds.whole else int | float) or isinstance(value, bool):
        raise UsageError(f"{name} is {kind}, got {value!r}")
    if not bounds.low <= value <= bounds.high or (bounds.above and value == bounds.low):
        raise UsageError(f"{name} must {bounds.said}, got {value}")


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED:
        raise UsageError(f"logit_bias maps at most {MAX_BIASED} token ids to numbers, got {str(bias)[:60]!r}")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise UsageError(f"logit_bias maps token ids to numbers, got the id {token!r}")
        _check(f"logit_bias of {token}", value, _BIAS)
