"""messages.py: what each kind of field takes, at its bounds and beyond them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarm import codecs, messages
from swarm.codecs import exact_text, integer, list_of, number, octets, one_of
from swarm.errors import MessageError
from swarm.messages import REGISTERED, Credit, Resume, Tokens
from swarm.tensors import RawTensor, ids_tensor

FAR = 70_000  # longer than a whole map may be


@pytest.mark.parametrize(
    ("codec", "taken", "refused"),
    [
        (integer(1, 3), [1, 3], [0, 4, True, 2.0, "2", b"2", None, [], math.nan]),
        (number(-1, 2.5), [-1, 0, 2.5], [-1.01, 2.6, math.nan, math.inf, -math.inf, True, "1", None]),
        (number(-math.inf, math.inf), [1e300], [math.nan, math.inf, -math.inf]),
        (octets(2, 3), [b"12", b"123"], [b"1", b"1234", "12", None, 12, [1, 2]]),
        (exact_text(2), ["", "ab", "é\n"], ["abc", b"ab", None, 1]),
        (list_of(integer(0, 9), 2), [[], [1, 2]], [[1, 2, 3], [10], ["1"], {}, "12", None]),
        (one_of("a", "b"), ["a", "b"], ["c", "", None, b"a", 1]),
    ],
)
def test_a_field_takes_what_is_within_its_bounds_and_nothing_else(
    codec: codecs.Codec, taken: list[Any], refused: list[Any]
) -> None:
    for value in taken:
        read = codec.read(value)
        assert read == (tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(MessageError, match="expected"):
            codec.read(value)


@pytest.mark.parametrize("kind", REGISTERED)
def test_no_field_of_any_message_is_without_bounds(kind: str) -> None:
    beyond = (1 << 64, -(1 << 64), 1e308, math.nan, "x" * FAR, b"x" * FAR, [b"x"] * FAR)
    for _, name, codec, _ in codecs._fields(REGISTERED[kind]):
        for value in beyond:
            with pytest.raises(MessageError):
                raise AssertionError(f"{kind}.{name} took {str(codec.read(value))[:60]}")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(MessageError, match=r"Credit\.upto is missing"):
        codecs.from_map(Credit, {"epoch": 1, "have": 0})


def test_what_goes_with_ids_must_fit_them() -> None:
    wrong = ids_tensor([1] * (messages.MAX_IDS_TOLD + 1))
    with pytest.raises(MessageError, match="are allowed"):
        messages.decode(*messages.encode(Tokens(1, 0, ids=wrong)))
    bias = RawTensor("float32", (1,), b"\x00\x00\x80\x7f")  # infinite
    with pytest.raises(MessageError, match="a logit bias lies between"):
        Resume(1, 0, 0, 0, ids=ids_tensor([1]), limit=9, bias_ids=ids_tensor([1]), bias=bias).complete_sampling()
    sure = RawTensor("float32", (1,), b"\x00\x00\x80\x3f")  # 1.0
    with pytest.raises(MessageError, match="a logprob is at most 0"):
        Tokens(1, 0, ids=ids_tensor([1]), logprobs=sure, top_ids=RawTensor("int32", (0,), b"")).likelihoods()
