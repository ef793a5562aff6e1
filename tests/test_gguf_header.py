"""The header reader against the gguf package's own, and against damaged and hostile files."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.gguf_header import MAX_TENSORS, GgufArray, GgufHeader, HeaderGoesOn, read_gguf_header
from swarm.errors import BrokenModel

FEW_BYTES = 2_000_000  # what refusing a file of a few hundred bytes may take


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny ☃")
    writer.add_context_length(256)
    writer.add_rope_freq_base(1e4)
    writer.add_add_bos_token(True)
    writer.add_int64("some.negative", -(1 << 40))
    writer.add_head_count_kv([1, 2, 3])
    writer.add_token_list(["a", "bc", "é"])
    writer.add_token_scores([float(i) for i in range(1_100)])
    writer.add_chat_template("x" * 300)
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("cube", np.zeros((2, 3, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def read(content: bytes) -> GgufHeader:
    return read_gguf_header(content, "tiny.gguf")


def refusal(content: bytes) -> str:
    with pytest.raises(BrokenModel, match=r"^tiny\.gguf can't be used: .*; ") as caught:
        read(content)
    assert type(caught.value) is BrokenModel
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- files by hand, so that each count and length can lie -------------------------------------------------


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def start(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def padded(header: bytes, data: int = 0) -> bytes:
    return header + bytes(-len(header) % 32 + data)


# -- what is right ---------------------------------------------------------------------------------------


def test_a_header_says_what_the_gguf_package_reads(file: Path) -> None:
    header, theirs = read_gguf_header(file, "tiny.gguf"), gguf.GGUFReader(file)
    assert {
        name: (found.kind, found.shape, found.offset, found.nbytes) for name, found in header.tensors.items()
    } == {
        found.name: (
            found.tensor_type.name,
            tuple(found.shape[::-1].tolist()),
            found.data_offset,
            found.n_bytes,
        )
        for found in theirs.tensors
    }
    fields = {key: found.contents() for key, found in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for key, value in header.metadata.items():
        if isinstance(value, GgufArray):
            assert value.count == len(fields[key])
        elif isinstance(value, tuple):
            assert list(value) == fields[key]
        else:
            assert value == fields[key]
            assert type(value) is type(fields[key])
    assert header.metadata["tokenizer.ggml.tokens"] == GgufArray(3, strings=True)
    assert header.metadata["tokenizer.ggml.scores"] == GgufArray(1_100, strings=False)


def test_the_beginning_is_enough_and_less_asks_for_more(file: Path) -> None:
    whole = file.read_bytes()
    header = read(whole)
    assert read_gguf_header(whole[: header.nbytes], "tiny.gguf", len(whole)) == header
    for length in range(24, header.nbytes):
        with pytest.raises(HeaderGoesOn):
            read_gguf_header(whole[:length], "tiny.gguf", len(whole))


def test_a_pair_lies_where_the_header_says(file: Path) -> None:
    whole = file.read_bytes()
    header = read(whole)
    for key, (first, last) in header.pairs.items():
        alone = start(0, 1) + whole[first:last]
        assert read(alone).metadata == {key: header.metadata[key]}


def test_alignment_and_version_2_are_honoured() -> None:
    head = start(1, 1, version=2) + pair(b"general.alignment", 4, struct.pack("<I", 64)) + tensor()
    header = read(head + bytes(-len(head) % 64 + 16))
    assert (header.version, header.tensors["t"].offset) == (2, -(-len(head) // 64) * 64)


def test_a_very_long_text_is_stepped_over() -> None:
    long = pair(b"long", 8, text(b"x" * (1 << 21))) + pair(b"short", 8, text(b"y"))
    assert read(start(0, 2) + long).metadata == {"long": GgufArray(1 << 21, strings=False), "short": "y"}


# -- what is wrong ---------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused_at_every_length(file: Path, tmp_path: Path) -> None:
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    last = max(found.offset + found.nbytes for found in read(whole).tensors.values())
    for length in range(last):
        refusal(whole[:length])
    assert f"truncated: {last - 1:,} of at least {last:,} bytes" in refusal(whole[: last - 1])
    for length in (0, 3, 24, last - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(BrokenModel, match="tiny"):
            read_gguf_header(cut, "tiny.gguf")


BIG = 10**9
HOSTILE: dict[str, tuple[bytes, str]] = {
    "another kind of file": (b"PK\3\4" + bytes(60), "another kind of file"),
    "magic alone": (b"GGUF", "another kind of file"),
    "version 1": (start(version=1), "version 1, 2 and 3 can be read"),
    "version 4": (start(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "very many tensors": (start(1 << 62), "4,611,686,018,427,387,904 tensors"),
    "very many keys": (start(0, 1 << 62), "metadata keys"),
    "more tensors than bytes": (start(60_000), "beyond its end"),
    "a long key": (start(0, 1) + text(b"k", BIG), "a key at byte 32 claims to be 1,000,000,000 bytes"),
    "a long text": (start(0, 1) + pair(b"k", 8, text(b"", BIG)), "beyond its end"),
    "a text of all bytes there are": (start(0, 1) + pair(b"k", 8, text(b"", (1 << 64) - 1)), "beyond its end"),
    "a key that is no text": (start(0, 1) + pair(b"\xff", 4, bytes(4)), "isn't text in UTF-8"),
    "a value that is no text": (start(0, 1) + pair(b"k", 8, text(b"\xff")), "the value of k at byte"),
    "a value of an unknown type": (start(0, 1) + pair(b"k", 13, bytes(8)), "unknown type 13"),
    "a value that is neither true nor false": (start(0, 1) + pair(b"k", 7, b"\2"), "neither true nor false"),
    "an array of an unknown type": (start(0, 1) + pair(b"k", 9, struct.pack("<IQ", 99, 1)), "unknown type 99"),
    "an array of arrays": (start(0, 1) + pair(b"k", 9, struct.pack("<IQ", 9, BIG)), "unknown type 9"),
    "10^9 numbers": (start(0, 1) + pair(b"k", 9, struct.pack("<IQ", 12, BIG)), "the 1,000,000,000 numbers of k"),
    "10^9 strings": (start(0, 1) + pair(b"k", 9, struct.pack("<IQ", 8, BIG)), "the 1,000,000,000 strings of k"),
    "a string in an array that goes on": (
        start(0, 1) + pair(b"k", 9, struct.pack("<IQ", 8, 2) + text(b"", (1 << 64) - 1) + bytes(32)),
        "the 2 strings of k",
    ),
    "the same key twice": (start(0, 2) + 2 * pair(b"k", 0, b"1"), "has 'k' twice"),
    "two tensors of one name": (padded(start(2) + 2 * tensor(), 64), "two tensors called 't'"),
    "a tensor of an unknown type": (padded(start(1) + tensor(kind=4711), 64), "4711; a newer gguf may know it"),
    "a tensor without dimensions": (padded(start(1) + tensor(shape=()), 64), "0 dimensions"),
    "a tensor of many dimensions": (padded(start(1) + tensor(shape=(1,) * 5), 64), "5 dimensions"),
    "a tensor of 10^9 dimensions": (
        start(1) + text(b"t") + struct.pack("<I", BIG) + bytes(64), "1,000,000,000 dimensions"),
    "dimensions whose product overflows": (padded(start(1) + tensor(shape=(1 << 40,) * 4), 64), "truncated"),
    "rows that blocks don't divide": (padded(start(1) + tensor(shape=(48,), kind=2), 64), "Q4_0's blocks of 32"),
    "a tensor beyond the end": (padded(start(1) + tensor(offset=1 << 40), 64), "truncated"),
    "a tensor that isn't aligned": (padded(start(1) + tensor(offset=4), 64), "isn't a multiple of 32"),
    "tensors that overlap": (padded(start(2) + tensor(b"a", (16,)) + tensor(b"b", (4,), offset=32), 99), "overlap"),
    "an alignment of 0": (start(0, 1) + pair(b"general.alignment", 4, bytes(4)), "alignment is 0"),
    "an alignment of 12": (start(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 12)), "alignment is 12"),
    "an alignment that is a text": (start(0, 1) + pair(b"general.alignment", 8, text(b"32")), "alignment is '32'"),
    "an alignment that is true": (start(0, 1) + pair(b"general.alignment", 7, b"\1"), "alignment is True"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_fact_and_next_to_no_memory(name: str) -> None:
    content, fact = HOSTILE[name]
    refusal(content)  # the table of ggml's types is made once
    tracemalloc.start()
    try:
        said = refusal(content)
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()
    assert fact in said


def test_metadata_full_of_texts_is_refused_before_it_is_kept() -> None:
    content = start(0, 40) + b"".join(pair(b"%d" % i, 8, text(b"x" * (1 << 19))) for i in range(40))
    assert "more than 8,388,608 bytes of names and texts" in refusal(content)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Bytes changed, cut out and put in, mostly within the header."""

    def change(content: bytes, at: int, new: bytes, gone: int) -> bytes:
        at %= len(content) + 1
        return content[:at] + new + content[at + gone :]

    edit: st.SearchStrategy[Callable[[bytes], bytes]] = st.builds(
        lambda at, new, gone: lambda content: change(content, at, new, gone),
        st.integers(0, 1_200) | st.integers(0, 10**6),
        st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, struct.pack("<Q", 1 << 40), bytes(8)]),
        st.integers(0, 12),
    )
    return st.lists(edit, max_size=3).map(lambda edits: _all(edits, whole))


def _all(edits: list[Callable[[bytes], bytes]], content: bytes) -> bytes:
    for edit in edits:
        content = edit(content)
    return content


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_described_or_refused(file: Path, data: st.DataObject) -> None:
    content = data.draw(damaged(file.read_bytes()))
    try:
        header = read(content)
    except BrokenModel as error:
        assert type(error) is BrokenModel
        return
    end = 0
    for found in sorted(header.tensors.values(), key=lambda one: (one.offset, one.nbytes)):
        assert end <= found.offset <= found.offset + found.nbytes <= len(content)
        end = found.offset + found.nbytes


# -- what a header may take ------------------------------------------------------------------------------


def peak_bytes(content: bytes) -> int:
    tracemalloc.start()
    try:
        with contextlib.suppress(BrokenModel):
            read(content)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_short_lists_of_numbers_do_not_add_up() -> None:
    numbers = struct.pack("<IQ1024d", 12, 1024, *(number + 0.5 for number in range(1024)))
    whole = start(keys=400) + b"".join(pair(b"k%d" % key, 9, numbers) for key in range(400))
    assert "131,072 numbers in short lists" in refusal(whole)
    assert peak_bytes(whole) < 16 << 20


def test_texts_count_as_they_lie_in_memory() -> None:
    """One emoji makes each character of a text take four bytes."""
    emoji = text("😀".encode() + b"x" * 1_000_000)
    whole = start(keys=15) + b"".join(pair(b"k%d" % key, 8, emoji) for key in range(15))
    assert "8,388,608 bytes of names and texts" in refusal(whole)
    assert peak_bytes(whole) < 32 << 20


def test_the_most_tensors_of_all_take_less_than_64_mib() -> None:
    count = MAX_TENSORS // 16
    listed = b"".join(
        tensor(b"model.layers.%06d.mlp.down_proj.weight" % n, (1,) * 4, 0, 32 * n) for n in range(count)
    )
    whole = padded(start(tensors=count) + listed, 32 * count)
    assert len(read(whole).tensors) == count
    assert 16 * peak_bytes(whole) < 64 << 20


def test_very_many_empty_strings_are_refused_before_they_are_stepped_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight bytes each: of a header's 100 MB they would take seconds."""
    monkeypatch.setattr("peer.gguf_header.MAX_STRINGS", 100)
    for count, refused in ((50, False), (51, True)):
        array = struct.pack("<IQ", 8, count) + bytes(8 * count)
        whole = start(keys=2) + pair(b"a", 9, array) + pair(b"b", 9, array)
        if refused:
            assert "the 51 strings of b are more than" in refusal(whole)
        else:
            assert read(whole).metadata["b"] == GgufArray(50, strings=True)
