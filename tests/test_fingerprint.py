"""The canonical encoding against its description, and the memory of hashes."""

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from peer import fingerprint
from peer.fingerprint import FileHashes
from swarm.canonical import FileHash, canonical_hash
from swarm.errors import BrokenModel


def test_the_encoding_is_the_documented_one() -> None:
    one, two = hashlib.sha256(b"1").digest(), hashlib.sha256(b"2").digest()
    files = [FileHash("weights", "é.safetensors", two), FileHash("config", "config.json", one)]
    entries = b"".join(
        struct.pack(">H", len(role)) + role + struct.pack(">H", len(name)) + name + digest
        for role, name, digest in [
            (b"config", b"config.json", one),
            (b"weights", "é.safetensors".encode(), two),
        ]
    )
    assert canonical_hash(b"domain\n", files) == hashlib.sha256(b"domain\n" + entries).digest()


def test_neither_order_nor_where_a_name_is_cut_makes_two_models_equal() -> None:
    digest = bytes(32)
    ab, ba = FileHash("config", "a", digest), FileHash("weights", "b", digest)
    assert canonical_hash(b"d", [ab, ba]) == canonical_hash(b"d", [ba, ab])
    assert canonical_hash(b"d", [FileHash("ab", "c", digest)]) != canonical_hash(
        b"d", [FileHash("a", "bc", digest)]
    )
    assert canonical_hash(b"d", [ab]) != canonical_hash(b"e", [ab])


def test_a_file_is_hashed_once_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    original = fingerprint.hash_file
    monkeypatch.setattr(
        fingerprint, "hash_file", lambda path, *_: hashed.append(path) or original(path)
    )
    file, hashes = tmp_path / "w", FileHashes(tmp_path / "memory")
    file.write_bytes(b"one")
    for _ in range(3):
        assert hashes.sha256(file) == hashlib.sha256(b"one").digest()
    assert len(hashed) == 1
    file.write_bytes(b"two")
    os.utime(file, ns=(0, 12345))
    assert hashes.sha256(file) == hashlib.sha256(b"two").digest()
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"sha256": 3}'])
def test_a_damaged_memory_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    file, hashes = tmp_path / "w", FileHashes(tmp_path / "memory")
    file.write_bytes(b"one")
    hashes.sha256(file)
    (memory,) = hashes.directory.iterdir()
    memory.write_bytes(damage)
    assert hashes.sha256(file) == hashlib.sha256(b"one").digest()
    assert json.loads(memory.read_bytes())["sha256"] == hashlib.sha256(b"one").hexdigest()


def test_hashing_reports_its_progress(tmp_path: Path) -> None:
    file, reports = tmp_path / "w.safetensors", []
    file.write_bytes(bytes(3_000_000))
    FileHashes(tmp_path / "memory").sha256(file, lambda *report: reports.append(report))
    assert reports[-1] == ("checking w.safetensors", 3_000_000, 3_000_000)
    assert [done for _, done, _ in reports] == sorted({done for _, done, _ in reports})


def test_a_link_is_called_by_its_own_name(tmp_path: Path) -> None:
    """The hub's cache has links to files that are called by their hashes."""
    (tmp_path / "bffa7447").write_bytes(b"one")
    (tmp_path / "config.json").symlink_to(tmp_path / "bffa7447")
    reports: list[tuple[str, int, int]] = []
    FileHashes(tmp_path / "memory").sha256(tmp_path / "config.json", lambda *report: reports.append(report))
    assert reports == [("checking config.json", 3, 3)]


@pytest.mark.parametrize("content", [b"[" * 5000, b"null", b"\xff", b'{"size": ' + b"9" * 5000 + b"}"])
def test_a_damaged_memory_of_a_hash_is_hashed_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights").write_bytes(b"abc")
    hashes = FileHashes(tmp_path / "hashes")
    first = hashes.sha256(tmp_path / "weights")
    for memory in (tmp_path / "hashes").iterdir():
        memory.write_bytes(content)
    assert hashes.sha256(tmp_path / "weights") == first == hashlib.sha256(b"abc").digest()


def test_a_file_that_is_still_being_written_is_no_model_yet(tmp_path: Path) -> None:
    file, hashes = tmp_path / "w.safetensors", FileHashes(tmp_path / "memory")
    file.write_bytes(bytes(1000))

    def another_program(*_: object) -> None:
        with file.open("ab") as end:
            end.write(b"more")

    with pytest.raises(BrokenModel, match=r"w\.safetensors changes while it is read; start again when"):
        hashes.sha256(file, another_program)
    assert hashes.sha256(file) == hashlib.sha256(file.read_bytes()).digest()
