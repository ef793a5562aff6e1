"""The header reader against the safetensors library, and against damaged files."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from peer.safetensors_header import describe, read_header
from swarm.errors import BrokenModel


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": np.zeros((3, 5), np.float32),
        "b": np.ones((7,), np.float16),
        "scalar": np.array(4, np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_header_lists_what_the_library_lists(file: Path) -> None:
    tensors = read_header(file, "model.safetensors").tensors
    with safe_open(file, "np") as theirs:
        assert set(tensors) == set(theirs.keys())
        for name, spec in tensors.items():
            array = theirs.get_tensor(name)
            assert (spec.shape, spec.nbytes, spec.file) == (array.shape, array.nbytes, "model.safetensors")
            assert spec.dtype == theirs.get_slice(name).get_dtype()


def test_a_truncated_file_is_refused_at_every_length(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BrokenModel, match=r"model\.safetensors can't be used"):
            read_header(file, "model.safetensors")


def test_a_truncated_file_says_how_much_is_there(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(BrokenModel, match=f"{len(whole) - 3:,} of {len(whole):,} bytes"):
        read_header(file, "model.safetensors")


def test_a_file_with_more_bytes_than_its_header_describes_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(BrokenModel, match="its header describes"):
        read_header(file, "model.safetensors")


def test_a_huge_header_length_allocates_nothing(file: Path) -> None:
    file.write_bytes(b"\xff" * 7 + b"\x7f" + file.read_bytes()[8:])
    with pytest.raises(BrokenModel, match="9,223,372,036,854,775,807 bytes long, the format allows 100,000,000"):
        read_header(file, "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": 3, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    ],
)
def test_an_unsound_description_is_refused(entry: object) -> None:
    with pytest.raises(BrokenModel):
        describe({"w": entry}, "model.safetensors")


def test_tensors_that_overlap_are_refused() -> None:
    one = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    with pytest.raises(BrokenModel, match="'b' starts at byte 0 of the data and overlaps tensor 'a', which ends at 4"):
        describe({"a": one, "b": one}, "model.safetensors")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_entry = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "I8"]) | _json, "shape": _json, "data_offsets": _json}
)


@settings(max_examples=200, deadline=None)
@given(_json | st.dictionaries(st.text(max_size=4), _entry, max_size=3))
def test_any_json_is_described_or_refused(header: object) -> None:
    with contextlib.suppress(BrokenModel):
        describe(json.loads(json.dumps(header)), "model.safetensors")
