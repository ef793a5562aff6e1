"""The frozen values: what they refuse, and how they read for people."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.spans import Hop, Route, Span


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_an_empty_or_negative_span_does_not_exist(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"{start}:{stop}"):
        Span(start, stop)


@given(st.integers(0, 99), st.integers(1, 30))
def test_a_span_is_read_as_it_is_typed(start: int, length: int) -> None:
    assert Span.parse(f"{start}:{start + length}") == Span(start, start + length)


@pytest.mark.parametrize("text", ["", "12", ":12", "3:", "a:b", "-1:4", "4:4", "1:2:3", "1.5:3"])
def test_what_is_not_a_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Span.parse(text)


def test_a_span_names_both_its_ends_for_people() -> None:
    assert str(Span(12, 20)) == "12-19"
    assert str(Span(7, 8)) == "7"


@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 60))
def test_a_span_holds_exactly_the_layers_it_iterates_over(start: int, length: int, layer: int) -> None:
    span = Span(start, start + length)
    assert list(span) == list(range(start, start + length))
    assert (layer in span) == (layer in list(span))
    assert len(span) == length
    assert "0" not in span


def test_a_span_covers_itself_and_what_lies_inside() -> None:
    assert Span(2, 6).covers(Span(2, 6))
    assert Span(2, 6).covers(Span(3, 5))
    assert not Span(2, 6).covers(Span(5, 7))


def test_spans_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Span(0, 1).start = 5  # type: ignore[misc]


def test_the_hops_of_a_route_join_without_gap_or_overlap() -> None:
    assert Route((Hop(Span(0, 3), "a"), Hop(Span(3, 7), "b")), 0.1).layers == 7
    for wrong in [(Span(0, 3), Span(4, 7)), (Span(0, 3), Span(2, 7)), (Span(1, 3), Span(3, 7))]:
        with pytest.raises(ValueError, match="should start at"):
            Route(tuple(Hop(span, "a") for span in wrong), 0.1)
    with pytest.raises(ValueError, match="at least one hop"):
        Route((), 0.0)
