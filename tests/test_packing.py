"""Messages as bytes: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import packing
from swarm.errors import MessageError
from swarm.tensors import RawTensor, ids_tensor


def test_a_message_comes_back_as_it_was_packed() -> None:
    tensors = {"hidden": RawTensor("float32", (2, 3), bytes(range(24))), "ids": ids_tensor([1, 2, 3])}
    values, got = packing.unpack(b"".join(packing.pack({"kind": "x", "n": 1}, tensors)))
    assert values == {"kind": "x", "n": 1}
    assert list(got) == ["hidden", "ids"]
    assert bytes(got["hidden"].data) == bytes(range(24)) and got["hidden"].shape == (2, 3)


def framed(value: object) -> bytes:
    body = msgpack.packb(value)
    return struct.pack(">H", len(body)) + body


def nested(depth: int) -> object:
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (framed(nested(60)), "nested more than 8 deep"),
        (framed({"a": [0] * 5000}), "over 4096 items"),
        (framed({"a": [{} for _ in range(5000)]}), "over 4096 items"),
        (struct.pack(">H", 6) + b"\x81\xa1a\xdd\xff\xff", "over 4096 items"),
        (framed([1, 2]), "a message is a map"),
        (framed({"a": msgpack.ExtType(5, b"x")}), "not used here"),
        (framed({1: 2}), "readable"),
        (struct.pack(">H", 3) + b"\x81\xa1\xff", "cut short"),
        (struct.pack(">H", 5) + b"\x81\xa1a\x01\x01", "1 bytes follow"),
        (struct.pack(">H", 20_000) + bytes(20_000), "a map of 20000 bytes"),
        (framed({})[:-1], "ends inside its map"),
        (framed({"#": [["x", "uint8", [3]]]}) + b"12", "its map says"),
        (framed({"#": [["x", "uint8", [3]]]}) + b"1234", "its map says"),
        (framed({"#": [["x", "object", [3]]]}) + b"123", "not one of"),
        (framed({"#": [["x", "uint8", [-3]]]}), "out of bounds"),
        (framed({"#": [["x", "uint8", [True]]]}) + b"1", "bad name or shape"),
        (framed({"#": [["x", "uint8", [1]]] * 2}) + b"12", "same name"),
        (framed({"#": 5}), "no list"),
        (framed({"#": [[1, 2]]}), "described by"),
        (framed({"a": "é"}).replace("é".encode(), b"\xff\xff"), "readable"),
    ],
)
def test_a_bad_message_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        packing.unpack(data)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_either_a_message_or_a_message_error(data: bytes) -> None:
    for candidate in (data, struct.pack(">H", len(data)) + data):
        with contextlib.suppress(MessageError):
            packing.unpack(candidate)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
scalars = scalars | st.text(max_size=300) | st.binary(max_size=300)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=40).filter(lambda key: key != "#"), trees, max_size=20))
def test_the_scan_agrees_with_msgpack_on_what_is_well_formed(values: dict[str, Any]) -> None:
    packed = msgpack.packb(values)
    try:
        assert packing.read_map(packed) == values
    except MessageError as error:
        assert "nested" in str(error)  # the only bound that such trees can reach
    for cut in range(0, len(packed), 1 + len(packed) // 40):
        with pytest.raises(MessageError):
            packing.scan(packed[:cut])


def test_a_map_that_is_too_large_to_send_is_the_senders_own_bug() -> None:
    with pytest.raises(ValueError, match="16384 are allowed"):
        packing.pack({"a": "x" * 20_000}, {})
