"""20,000 hostile inputs in every run, the same ones; tests/fuzz says what they are and what may come of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm import messages, packing, records
from swarm.canonical import FileHash, canonical_hash
from swarm.messages import REGISTERED
from tests.fuzz import values
from tests.fuzz.targets import TARGETS, Target, accepts, input_of

SEED = 0
ROUND_TRIPS = settings(
    max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def name_of(target: Target) -> str:
    return target.name


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_what_a_careful_sender_makes_is_accepted(target: Target) -> None:
    for place, data in enumerate(target.corpus()):
        assert target.feed(data), (place, data[:200])


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_hostile_input_brings_out_nothing_but_the_typed_error(target: Target) -> None:
    accepted = 0
    for number in range(target.inputs):
        data = input_of(target, SEED, number)
        try:
            accepted += accepts(target, data)
        except Exception as error:
            error.add_note(f'python -m tests.fuzz --only "{target.name}" --seed {SEED} --start {number} --inputs 1')
            raise
    assert 0 < accepted < target.inputs, "all of it, or none: this says nothing of the parser"


def test_that_is_20_000_inputs() -> None:
    assert sum(target.inputs for target in TARGETS) >= 20_000


@ROUND_TRIPS
@given(values.any_message)
def test_every_message_comes_back_as_it_was_sent(message: Any) -> None:
    data = b"".join(packing.pack(*messages.encode(message)))
    assert messages.decode(*packing.unpack(data)) == message


def test_every_kind_of_message_is_among_those() -> None:
    drawn = {type(message) for message in values.examples(values.any_message, 1500)}
    assert drawn == set(REGISTERED.values())


@ROUND_TRIPS
@given(values.any_record)
def test_every_record_comes_back_as_it_was_signed(record: Any) -> None:
    once = records.open_record(records.sign_record(values.SIGNER, record))
    assert records.open_record(records.sign_record(values.SIGNER, once)) == once


file_hashes = st.builds(FileHash, st.text(max_size=4), st.text(max_size=4), st.binary(min_size=32, max_size=32))


@ROUND_TRIPS
@given(st.lists(file_hashes, max_size=3), st.lists(file_hashes, max_size=3))
def test_two_lists_of_files_have_one_hash_only_if_they_are_the_same(one: list[Any], other: list[Any]) -> None:
    same = sorted(one) == sorted(other)
    assert (canonical_hash(b"x\n", one) == canonical_hash(b"x\n", other)) is same
