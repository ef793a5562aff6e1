"""`smollm2` with a wheel of a few kilobytes that pip finds in a folder, and, with -m long, the real one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peer import smollm2
from peer.smollm2 import SMOLLM2, PackagedModel, ensure_smollm2, packaged_file
from peer.source import ModelSource, prepare_smollm2, resolve_model
from peer.weights import load_span
from routing.spans import Span
from swarm.errors import BrokenModel, CapacityError, ModelError
from tests.gguf_files import TEMPLATE, VOCABULARY, Kind, write_gguf

TEXTS = [
    "the cat 1234",
    "a  b\n\n c",
    "<|im_start|>user hi<|im_end|>",
    "你好 🙂 é",
    "",
    "def f(x):\n    return x",
]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantised to Q4_1 like the real one, norms in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, "llama, tied", Kind.Q4_1)
    return path


@pytest.fixture(scope="module")
def packaged(gguf_file: Path) -> PackagedModel:
    return PackagedModel(
        keyword="tiny",
        served_name="tiny-instruct",
        requirement="llm-tiny==0.1.2",
        wheel_bytes=100_000,
        member=gguf_file.name,
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        disk_bytes=1_000_000,
    )


@pytest.fixture
def index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip looks, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, gguf_file.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


def write_wheel(folder: Path, content: bytes, member: str = "tiny.gguf") -> Path:
    wheel = folder / "llm_tiny-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_tiny/{member}", content)
        metadata = (
            "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1.2\nRequires-Dist: must-not-be-fetched\n"
        )
        archive.writestr("llm_tiny-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_tiny-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_tiny-0.1.2.dist-info/RECORD", "")
    return wheel


class Prepared(NamedTuple):
    cache: Path
    source: ModelSource
    reports: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def as_smollm2(packaged: PackagedModel) -> PackagedModel:
    return replace(packaged, keyword="smollm2")


@pytest.fixture(scope="module")
def prepared(
    as_smollm2: PackagedModel, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Prepared:
    """The whole way, once, child processes included: converting a tokenizer imports torch in one."""
    folder, cache = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("cache")
    write_wheel(folder, gguf_file.read_bytes())
    reports: list[tuple[str, int, int]] = []

    def report(*progress: object) -> None:
        reports.append(progress)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", folder.as_uri())
        patch.setattr("peer.source.SMOLLM2", as_smollm2)
        patch.setattr("peer.source.ensure_smollm2", lambda c, p: ensure_smollm2(c, p, as_smollm2))
        prepare_smollm2(cache, report)
        patch.setattr(subprocess, "Popen", None)  # nothing is left to do that takes a process
        source = resolve_model("smollm2", cache=cache, progress=report)
    return Prepared(cache, source, reports)


def litter(cache: Path, model: PackagedModel) -> list[str]:
    return [path.name for path in (cache / model.keyword).glob("partial-*")]


# -- a GGUF file like any other --------------------------------------------------------------------------


def test_it_is_served_from_the_file_that_was_unpacked(prepared: Prepared, gguf_file: Path) -> None:
    source, kept = prepared.source, prepared.cache / "smollm2" / "tiny.gguf"
    assert kept.read_bytes() == gguf_file.read_bytes()
    assert sorted(path.name for path in kept.parent.iterdir()) == ["lock", "tiny.gguf"]
    assert source.path("tiny.gguf") == kept
    assert source.served_name == "tiny-instruct"
    alone = resolve_model(str(gguf_file), cache=prepared.cache)
    assert alone.fingerprint == source.fingerprint
    ours, theirs = (load_span(one, Span(0, 2), torch.float32) for one in (source, alone))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_its_identity_is_the_gguf_file(prepared: Prepared, packaged: PackagedModel) -> None:
    entries = [b"weights", packaged.member.encode()]
    framed = b"".join(len(text).to_bytes(2, "big") + text for text in entries) + bytes.fromhex(
        packaged.sha256
    )
    right = hashlib.sha256(b"layerswarm model fingerprint 1\n" + framed).digest()
    assert prepared.source.fingerprint == right


def test_its_tokenizer_comes_out_of_the_file(prepared: Prepared) -> None:
    files = prepared.source.tokenizer_files()
    assert files["chat_template.jinja"].decode() == TEMPLATE
    assert json.loads(files["model.json"]) == {
        "model_type": "llama", "vocab_size": VOCABULARY, "context_length": 128, "bos_token_id": 1,
        "eos_token_ids": [2], "sampling": {},
    }  # fmt: skip


def test_preparing_reports_each_part_up_to_its_end(prepared: Prepared) -> None:
    last = {what: (done, total) for what, done, total in prepared.reports}
    assert list(last) == [
        "downloading llm-tiny==0.1.2", "unpacking tiny.gguf", "reading the header of tiny.gguf",
        "converting its tokenizer", "checking tiny.gguf",
    ]  # fmt: skip
    assert all(done == total for done, total in last.values())


def test_a_file_that_was_changed_since_is_refused(
    prepared: Prepared, as_smollm2: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.source.SMOLLM2", as_smollm2)
    monkeypatch.setattr("peer.source.ensure_smollm2", lambda c, p: ensure_smollm2(c, p, as_smollm2))
    path = packaged_file(tmp_path, as_smollm2)
    path.parent.mkdir()
    path.write_bytes((prepared.cache / "smollm2" / "tiny.gguf").read_bytes() + b"\0")
    with pytest.raises(BrokenModel, match=r"tiny\.gguf isn't what was fetched any more; delete it"):
        resolve_model("smollm2", cache=tmp_path)


# -- fetching --------------------------------------------------------------------------------------------


def test_a_prepared_model_is_found_without_starting_anything(
    packaged: PackagedModel, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    path = packaged_file(tmp_path, packaged)
    path.parent.mkdir()
    path.write_bytes(gguf_file.read_bytes())
    assert ensure_smollm2(tmp_path, model=packaged) == path


def test_what_earlier_releases_converted_is_removed_and_not_used(
    packaged: PackagedModel, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They kept the GGUF file beside it, which is used as it is."""
    monkeypatch.setattr(subprocess, "Popen", None)
    path = packaged_file(tmp_path, packaged)
    old = path.parent / "converted-1-b179c9523d0e"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"x" * 1000)
    path.write_bytes(gguf_file.read_bytes())
    assert ensure_smollm2(tmp_path, model=packaged) == path
    assert [one.name for one in path.parent.iterdir()] == ["tiny.gguf"]


def test_after_interruptions_five_that_start_together_do_the_rest_once(
    packaged: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    children: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])
    for stage in ("downloading", "unpacking"):

        def interrupt(what: str, done: int, total: int, stage: str = stage) -> None:
            if what.startswith(stage):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ensure_smollm2(cache, interrupt, packaged)
        assert children[-1].poll() is not None

    unpacked: list[str] = []

    def watch(what: str, done: int, total: int) -> None:
        if what == "unpacking tiny.gguf" and done == total:
            unpacked.append(what)

    packaged_file(cache, packaged).unlink(
        missing_ok=True
    )  # the last child may have been done before it was told
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda _: ensure_smollm2(cache, watch, packaged), range(5)))
    assert set(found) == {packaged_file(cache, packaged)}
    assert len(unpacked) == 1
    assert litter(cache, packaged) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_parent_leaves_no_child(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nimport peer.smollm2 as s\nimport json\n"
        "def kill(what, done, total):\n"
        "    if what.startswith('downloading'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.ensure_smollm2(Path(sys.argv[1]), kill, s.PackagedModel(**json.loads(sys.argv[2])))\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", program, str(tmp_path / "cache"), json.dumps(packaged.__dict__)]
    # the child inherits standard error, so that this returns only when the last of them is gone
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_folders_that_pip_removes_while_the_download_is_measured_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: when it is their turn to be looked into. The race made a good download fail."""
    for name, size in (("kept", 30), ("gone", 900)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "llm_tiny.whl").write_bytes(b"x" * size)
    (tmp_path / "kept" / "llm_moved.whl").symlink_to("gone by now")
    scandir = os.scandir

    def scan(path: Any = ".") -> Any:
        if Path(path).name == "gone" and Path(path).exists():
            Path(path, "llm_tiny.whl").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert smollm2._wheel_bytes_in(tmp_path) == 30


# -- what goes wrong -------------------------------------------------------------------------------------


def failure(cache: Path, model: PackagedModel, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        ensure_smollm2(cache, model=model)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert litter(cache, model) == []
    return str(caught.value)


def test_another_file_than_expected_is_refused(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    other = replace(packaged, sha256="ab" * 32)
    text = failure(tmp_path / "cache", other, BrokenModel)
    assert packaged.sha256 in text
    assert "ab" * 32 in text
    assert not packaged_file(tmp_path / "cache", other).exists()


def test_a_wheel_without_the_file_is_refused(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    write_wheel(index, b"x", member="other.gguf")
    assert "doesn't contain tiny.gguf" in failure(tmp_path / "cache", packaged, BrokenModel)


def test_no_network_says_what_pip_said(
    packaged: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (index / "llm_tiny-0.1.2-py3-none-any.whl").unlink()
    text = failure(tmp_path / "cache", packaged, ModelError)
    assert "pip can't download llm-tiny==0.1.2" in text
    assert "check the network" in text


def test_a_python_without_pip_says_how_to_get_it() -> None:
    log = f"{sys.executable}: No module named pip\n"
    assert "python -m ensurepip" in smollm2._pip_failure(SMOLLM2, log)


def test_too_little_disk_is_said_with_numbers(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    greedy = replace(packaged, disk_bytes=10**18)
    text = failure(tmp_path / "cache", greedy, CapacityError)
    assert "tiny needs 1000000000.00 GB of disk" in text
    assert "are free at" in text


def test_a_cache_that_cannot_be_written_is_named(
    packaged: PackagedModel, index: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    text = failure(tmp_path / "cache", packaged, ModelError)
    assert f"{tmp_path / 'cache'}" in text
    assert "not a directory" in text
    assert "SWARM_CACHE" in text


# -- the real one ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_real_model_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve_model("smollm2", cache=tmp_path)
    assert source.served_name == "smollm2-135m-instruct"
    assert source.fingerprint.hex().startswith("c41147d1")
    assert json.loads(source.tokenizer_files()["model.json"]) == {
        "model_type": "llama", "vocab_size": 49152, "context_length": 8192, "bos_token_id": 1,
        "eos_token_ids": [2], "sampling": {},
    }  # fmt: skip
    file = packaged_file(tmp_path, SMOLLM2)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    state = theirs.state_dict()
    for span in (Span(0, 1), Span(14, 16), Span(29, 30)):
        hop = load_span(source, span, torch.float32)
        for number, layer in zip(span, hop.layers, strict=True):
            for name, value in layer.named_parameters():
                assert torch.equal(value, state[f"model.layers.{number}.{name}"]), name
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = Tokenizer.from_str(source.bundle["tokenizer.json"].decode())
    prompts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    for text in TEXTS + _strings(prompts):
        assert ours.encode(text).ids == tokenizer(text)["input_ids"], text


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for child in children for text in _strings(child)]
