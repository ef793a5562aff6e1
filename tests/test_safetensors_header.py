"""The header reader against the safetensors library, and against damaged files."""

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from peer.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, parse, read_header
from swarm.errors import BrokenModel


def describe(header: object, file: str) -> None:
    """What a header of this content, before all the bytes that it may mean, is said to be."""
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text
    parse(lambda start, stop: content[start:stop], 1 << 40, file)


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
    with pytest.raises(BrokenModel, match="9,223,372,036,854,775,807 bytes long, 12,582,912 are accepted"):
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


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
            "tensor 'w' is of type 'F99', which the format",
        ),
        (
            {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 9]},
            r"tensor 'w' is F32 \[2, 3\], which doesn't fit its 9",
        ),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            "'w' starts at byte 4 .* a gap after the header",
        ),
    ],
)
def test_what_a_description_gets_wrong_is_said_with_the_tensor(entry: object, says: str) -> None:
    with pytest.raises(BrokenModel, match=rf"w\.safetensors can't be used: .*{says}"):
        describe({"w": entry}, "w.safetensors")


def test_a_tensor_that_lies_beyond_the_file_is_missed(file: Path) -> None:
    far = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[9],"data_offsets":[1,10]}}'
    with pytest.raises(
        BrokenModel, match=f"it is truncated: {8 + len(far) + 4} of {8 + len(far) + 10} bytes are there"
    ):
        read_header(of_header(file, far.encode(), bytes(4)), "model.safetensors")


def of_header(file: Path, header: bytes, data: bytes = b"") -> Path:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return file


ONE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "metadata",
    [
        "{}",
        '{"a":"b"}',
        r'{ "a" : "}\\\"{" , "\\\\" : "[[[" }',
        '{"deep": "' + "[" * 5000 + '"}',
        '{"é":"😀"}',
    ],
)
def test_metadata_is_stepped_over_wherever_it_stands(file: Path, metadata: str) -> None:
    meta = f'"__metadata__": {metadata}'
    for header in (f'{{{meta}, "w": {ONE}}}', f'{{"w":{ONE},{meta}}}', f' {{ "w" : {ONE} ,\n{meta} }}  '):
        assert list(read_header(of_header(file, header.encode(), b"x"), "model.safetensors").tensors) == ["w"]


def test_metadata_of_more_than_a_mib_is_refused(file: Path) -> None:
    texts = {f"{n}": "x" * 1000 for n in range(1000)}
    with pytest.raises(BrokenModel, match="bytes where its header describes"):  # it was read to its end
        describe({"__metadata__": texts, "w": json.loads(ONE)}, "model.safetensors")
    with pytest.raises(BrokenModel, match="its metadata has more than 1,048,576 characters"):
        describe({"__metadata__": texts | {f"more {n}": "x" * 1000 for n in range(60)}}, "model.safetensors")


def test_an_escaped_name_is_read_as_json_has_it(file: Path) -> None:
    header = r'{"a\"\u00e9\\": ' + ONE + "}"
    assert list(read_header(of_header(file, header.encode(), b"x"), "model.safetensors").tensors) == ['a"é\\']


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "[]",
        "{}{}",
        '{"w"}',
        '{"w":}',
        '{"w":1}',
        '{"w":[]}',
        f'{{"w":{ONE}',
        f'{{"w":{ONE}}} x',
        f'{{,"w":{ONE}}}',
        f'{{"w":{ONE},}}',
        f'{{"w":{ONE} "v":{ONE}}}',
        f'{{"w":{ONE},"w":{ONE}}}',
        '{"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":[]}',
        '{"__metadata__":{"a":1}}',
        '{"__metadata__":{"a":{}}}',
        '{"__metadata__":{"a":"b",}}',
        '{"__metadata__":{"a":"b"',
        '{"__metadata__":{"a":"b\\"}}',
        "{" + " " * 12_000_000 + "}",
        '{"w":' + "[" * 100_000,
        '{"w":{"shape":' + "[" * 900 + "}",
        '{"w":{"shape":' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"' + "w" * 5000 + f'":{ONE}}}',
        '{"w":{"dtype":"U8","shape":[' + "9," * 100_000 + '1],"data_offsets":[0,1]}}',
        '{"w":{"dtype":"U8","shape":[' + "9" * 500 + '],"data_offsets":[0,1]}}',
        '{"w":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,1]}}',
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[' + f"{10**600},{10**600 + 1}" + "]}}",
        '{"w":{"dtype":"U8","shape":[' + "1," * 9 + '1],"data_offsets":[0,1]}}',
    ],
)
def test_a_header_that_is_none_is_refused(file: Path, header: str) -> None:
    with pytest.raises(BrokenModel, match=r"model\.safetensors can't be used"):
        read_header(of_header(file, header.encode(), b"x"), "model.safetensors")


@pytest.mark.parametrize(
    "piece", [b"[],", b'"ab":"cd",', b'{"a":{}},', b'"", ', b'\\"', b'"a":' + ONE.encode() + b",", b"0,"]
)
@pytest.mark.parametrize("start", [b"{", b'{"__metadata__":{', b'{"w":{"shape":[', b'{"'])
def test_no_header_takes_more_than_64_mib_of_memory(file: Path, start: bytes, piece: bytes) -> None:
    header = start + piece * ((MAX_HEADER_BYTES - len(start)) // len(piece))
    of_header(file, header)
    del header
    assert peak_bytes(lambda: refused(file)) < 64 << 20


def test_as_many_tensors_as_are_accepted_take_less_than_64_mib_of_memory(file: Path) -> None:
    count = MAX_TENSORS // 16
    entries = ",".join(
        f'"model.layers.{n:05d}.mlp.experts.{n:06d}.down_proj.weight":'
        f'{{"dtype":"U8","shape":[1,1],"data_offsets":[{n},{n + 1}]}}'
        for n in range(count)
    )
    of_header(file, b"{" + entries.encode() + b"}", bytes(count))
    del entries
    assert 16 * peak_bytes(lambda: read_header(file, "model.safetensors")) < 64 << 20
    one = json.loads(ONE)
    with pytest.raises(BrokenModel, match="save the model in several files"):
        describe({f"{n}": one for n in range(MAX_TENSORS + 1)}, "model.safetensors")


def refused(file: Path) -> None:
    with pytest.raises(BrokenModel):
        read_header(file, "model.safetensors")


def peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_tensors_that_overlap_are_refused() -> None:
    one = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    with pytest.raises(
        BrokenModel, match="'b' starts at byte 0 of the data and overlaps tensor 'a', which ends at 4"
    ):
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
