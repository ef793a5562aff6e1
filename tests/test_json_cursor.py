"""Large JSON read piece by piece, against what the json module makes of the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.json_cursor import JsonCursor
from swarm.errors import BrokenModel

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def cursor_of(text: str) -> JsonCursor:
    return JsonCursor(text, lambda: BrokenModel("refused"))


@given(st.dictionaries(st.text(max_size=5), values, max_size=5), st.sampled_from([None, 0, 3]))
def test_the_members_are_those_that_json_reads(whole: dict[str, object], indent: int | None) -> None:
    cursor = cursor_of(f" {json.dumps(whole, indent=indent)}\n")
    assert {name: cursor.value(1000) for name in cursor.names(1000)} == whole
    cursor.end()


@given(st.text(alphabet="a\\\"\u00e9\U0001f600\n", max_size=3000))
def test_texts_of_any_length_are_read_whole(text: str) -> None:
    cursor = cursor_of(json.dumps(text) + " 1")
    assert cursor.string(1 << 20) == text and cursor.value(9) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", '{"a"}', '{"a":}', '{"a":1', '{"a":1,}', '{,"a":1}', '{"a":1 "b":2}', '{1:1}', "{a:1}"]
)
def test_what_is_no_object_is_refused(text: str) -> None:
    cursor = cursor_of(text)
    with pytest.raises(BrokenModel, match="refused"):
        [cursor.value(9) for _ in cursor.names(9)]


def test_a_value_takes_no_more_than_its_reader_says() -> None:
    assert cursor_of("[1, 2]").value(6) == [1, 2]
    for read in (lambda: cursor_of("[1, 2]").value(5), lambda: cursor_of(f'"{"a" * 5000}"').string(5000)):
        with pytest.raises(BrokenModel):
            read()
    assert len(cursor_of(f'"{"a" * 5000}"').string(5002)) == 5000


def test_a_name_that_occurs_twice_within_a_value_is_refused() -> None:
    with pytest.raises(BrokenModel):
        cursor_of('{"a":1,"a":1}').value(99)


@pytest.mark.parametrize("behind", ["x", "{}", " " * 10_000 + "0"])
def test_nothing_may_stand_behind_the_end(behind: str) -> None:
    cursor = cursor_of("{} " + " " * 10_000 + behind)
    assert list(cursor.names(9)) == []
    with pytest.raises(BrokenModel):
        cursor.end()
