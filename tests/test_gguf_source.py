"""Which GGUF files are meant, what they are called and what they are: on this machine and on the hub."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from peer import gguf_header, gguf_tokenizer
from peer.source import ModelSource, resolve_model
from swarm.errors import BrokenModel, ModelNotFound, UnsupportedModel, UsageError
from tests.gguf_files import Kind, convert_here, write_gguf
from tests.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def _convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "run_child", convert_here)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in a file, and in six."""
    folder = tmp_path_factory.mktemp("made")
    write_gguf(folder / "tiny-Q8_0.gguf", "llama", Kind.Q8_0)
    (folder / "split").mkdir()
    write_gguf(folder / "split" / "tiny.gguf", "llama", split=5)
    return folder


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made / "tiny-Q8_0.gguf", tmp_path / "tiny-Q8_0.gguf"))


@pytest.fixture
def split(made: Path, tmp_path: Path) -> Path:
    """The directory of the parts."""
    return Path(shutil.copytree(made / "split", tmp_path / "split"))


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "gguf cache"  # so that the one vocabulary is converted once


def resolve(path: Path | str, cache: Path, **options: str) -> ModelSource:
    return resolve_model(str(path), cache=cache, **options)


def refusal(path: Path | str, cache: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        resolve(path, cache)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(split: Path) -> list[str]:
    return sorted(path.name for path in split.iterdir())


def fingerprint(entries: dict[str, bytes]) -> bytes:
    """By hand, as protocol.md says: role, name and SHA-256 of every weight file, in order."""
    framed = b""
    for name, content in sorted(entries.items()):
        for text in (b"weights", name.encode()):
            framed += len(text).to_bytes(2, "big") + text
        framed += hashlib.sha256(content).digest()
    return hashlib.sha256(b"layerswarm model fingerprint 1\n" + framed).digest()


# -- which files -----------------------------------------------------------------------------------------


def test_a_file_is_a_model(file: Path, cache: Path) -> None:
    source = resolve(file, cache)
    assert source.served_name == "tiny-Q8_0"
    assert source.layers == 3
    assert source.path("tiny-Q8_0.gguf") == file.resolve()
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {
        name: (spec.dtype, spec.shape, spec.nbytes, spec.file) for name, spec in source.tensors.items()
    } == {
        name: (t.tensor_type.name, tuple(t.shape[::-1].tolist()), t.n_bytes, "tiny-Q8_0.gguf")
        for name, t in theirs.items()
    }
    assert set(source.tokenizer_files()) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.json",
    }


def test_a_directory_with_one_model_is_that_model(file: Path, split: Path, cache: Path) -> None:
    (file.parent / "mmproj-tiny-f16.gguf").write_bytes(b"a projector")
    (file.parent / "README.md").write_text("hello")
    assert resolve(file.parent, cache).fingerprint == resolve(file, cache).fingerprint
    assert resolve(split, cache).fingerprint == resolve(split / parts(split)[0], cache).fingerprint


def test_a_config_beside_a_file_does_not_make_it_another_model(file: Path, cache: Path) -> None:
    before = resolve(file, cache).fingerprint
    (file.parent / "config.json").write_text("{}")
    (file.parent / "tokenizer.json").write_text("{}")
    source = resolve(file.parent, cache)
    assert source.fingerprint == before
    assert source.tokenizer_files() == resolve(file, cache).tokenizer_files()


def test_where_there_is_both_a_directory_means_hugging_face_layout(file: Path, cache: Path) -> None:
    write_tiny_model(file.parent)
    assert resolve(file.parent, cache).layers == 4
    assert resolve(file, cache).layers == 3


@pytest.mark.parametrize("typed", ["tiny-Q8_0.gguf", "./tiny-Q8_0.gguf", "sub/../tiny-Q8_0.gguf"])
def test_however_a_path_is_written(
    typed: str, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "sub").mkdir()
    monkeypatch.chdir(file.parent)
    assert resolve(typed, cache).fingerprint == resolve(file, cache).fingerprint


def test_the_served_name_can_be_chosen(file: Path, cache: Path) -> None:
    assert resolve(file, cache, served_name="mine").served_name == "mine"


def test_a_long_name_is_cut_to_what_can_be_served(file: Path, cache: Path) -> None:
    long = file.rename(file.with_name("x" * 150 + ".gguf"))
    assert resolve(long, cache).served_name == "x" * 96


def test_a_file_that_is_not_there_is_said_with_those_that_are(file: Path, cache: Path) -> None:
    text = refusal(file.with_name("other.gguf"), cache, ModelNotFound)
    assert "has no other.gguf; there are tiny-Q8_0" in text
    assert "no such directory" in refusal(file.parent / "nowhere" / "x.gguf", cache, ModelNotFound)
    assert "it has no GGUF files" in refusal(Path("/", "x.gguf"), cache, ModelNotFound)


def test_of_several_models_one_must_be_named(file: Path, split: Path, cache: Path) -> None:
    for path in split.iterdir():
        path.rename(file.parent / path.name.replace("tiny", "tiny-F32"))
    text = refusal(file.parent, cache, UsageError)
    assert "has 2 models in GGUF files (F32, Q8_0); say which: " in text
    assert text.endswith(str(file.parent / "tiny-F32-00001-of-00006.gguf"))


def test_a_revision_of_a_file_makes_no_sense(file: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match="--revision is for models of the hub"):
        resolve(file, cache, revision="main")


# -- split models ----------------------------------------------------------------------------------------


def test_any_part_means_all(split: Path, cache: Path) -> None:
    whole = resolve(split, cache)
    assert len(parts(split)) == 6
    assert whole.served_name == "tiny"
    assert {spec.file for spec in whole.tensors.values()} == set(parts(split))
    for part in parts(split):
        assert resolve(split / part, cache).fingerprint == whole.fingerprint


def test_a_missing_part_is_named(split: Path, cache: Path) -> None:
    (split / "tiny-00003-of-00006.gguf").unlink()
    text = "lacks tiny-00003-of-00006.gguf of the 6 parts of tiny; fetch the missing parts"
    for part in ("tiny-00001-of-00006.gguf", "tiny-00003-of-00006.gguf"):
        assert text in refusal(split / part, cache, BrokenModel)
    (split / "tiny-00001-of-00006.gguf").unlink()
    assert "lacks tiny-00001-of-00006.gguf and 1 more of the 6 parts" in refusal(split, cache, BrokenModel)


def test_two_splits_of_one_model_are_not_mixed(split: Path, cache: Path) -> None:
    shutil.copy(split / "tiny-00001-of-00006.gguf", split / "tiny-00001-of-00002.gguf")
    assert "has tiny both in 2 parts and 6 parts; keep one" in refusal(split, cache, BrokenModel)
    assert resolve(split / "tiny-00002-of-00006.gguf", cache).layers == 3


def test_a_part_under_another_parts_name_is_noticed(split: Path, cache: Path) -> None:
    second, third = split / "tiny-00002-of-00006.gguf", split / "tiny-00003-of-00006.gguf"
    second.rename(split / "aside")
    third.rename(second)
    (split / "aside").rename(third)
    text = refusal(split, cache, BrokenModel)
    assert "tiny-00002-of-00006.gguf can't be used: it says that it is part 2, counted from 0, of 6" in text


def test_a_part_that_is_called_a_whole_is_noticed(split: Path, cache: Path) -> None:
    alone = (split / "tiny-00001-of-00006.gguf").rename(split.parent / "alone.gguf")
    assert "it says that it is part 0, counted from 0, of 6" in refusal(alone, cache, BrokenModel)


def test_a_part_of_another_model_is_noticed(split: Path, made: Path, cache: Path) -> None:
    """One with fewer tensors, or with one that another part has too."""
    path = split / "tiny-00006-of-00006.gguf"
    for tensors, fact in (
        ([], "hold 25 of the 30"),
        (["a", "b", "c", "d", "blk.0.attn_q.weight"], "is in tiny-0000"),
    ):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", 5)
        writer.add_uint16("split.count", 6)
        for name in tensors:
            writer.add_tensor(name, np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert fact in refusal(split, cache, BrokenModel)


# -- identity --------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_weight_files(file: Path, split: Path, cache: Path) -> None:
    assert resolve(file, cache).fingerprint == fingerprint({"tiny-Q8_0.gguf": file.read_bytes()})
    contents = {name: (split / name).read_bytes() for name in parts(split)}
    assert resolve(split, cache).fingerprint == fingerprint(contents)


def test_neither_place_nor_neighbours_change_it_and_every_byte_does(
    file: Path, tmp_path: Path, cache: Path
) -> None:
    before = resolve(file, cache).fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / file.name)
    (tmp_path / "elsewhere" / "README.md").write_text("hello")
    assert resolve(moved, cache).fingerprint == before
    content = moved.read_bytes()
    moved.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert resolve(moved, cache).fingerprint != before


# -- what is refused, before anything is served ----------------------------------------------------------


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    assert "x.gguf can't be used: its 104 bytes don't begin as a GGUF" in refusal(
        tmp_path / "x.gguf", cache, BrokenModel
    )
    (tmp_path / "x.gguf").write_bytes(b"")
    assert "x.gguf can't be used" in refusal(tmp_path / "x.gguf", cache, BrokenModel)


def test_a_truncated_file_is_refused_by_name(file: Path, cache: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    assert "tiny-Q8_0.gguf can't be used: it is truncated" in refusal(file, cache, BrokenModel)


def test_what_cannot_be_served_is_refused_before_it_is_hashed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.fingerprint.hash_file", None)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_block_count(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "x.gguf is a mamba model, and of GGUF files these" in refusal(
        tmp_path / "x.gguf", cache, UnsupportedModel
    )


def test_an_unreadable_file_is_refused_by_name(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", forbidden)
    assert "tiny-Q8_0.gguf can't be read (Permission denied)" in refusal(file, cache, BrokenModel)


def test_a_header_may_be_longer_than_what_is_read_first(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve(file, cache)
    monkeypatch.setattr(gguf_header, "FIRST_BYTES", 100)
    assert resolve(file, cache).tensors == before.tensors


def test_a_huge_sparse_file_is_described_without_reading_it(file: Path, cache: Path) -> None:
    """Its tensors end long before the file does; nothing but the header is read, hashing apart."""
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer.fingerprint.hash_file", lambda *_: bytes(32))
        assert resolve(file, cache).layers == 3


def test_a_claim_of_10_9_layers_builds_none_of_them(file: Path, cache: Path) -> None:
    content = bytearray(file.read_bytes())
    key = b"llama.block_count" + struct.pack("<I", 4)
    at = content.index(key) + len(key)
    content[at : at + 4] = struct.pack("<I", 10**9)
    file.write_bytes(bytes(content))
    assert "it claims 1,000,000,000 layers and holds tensors of 3" in refusal(file, cache, BrokenModel)
