"""`smollm2` with a wheel of a few kilobytes that pip finds in a folder, and, with -m long, the real one."""

from __future__ import annotations

import errno
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
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from peer import smollm2
from peer.smollm2 import SMOLLM2, PackagedModel, converted_directory, ensure_smollm2
from peer.source import resolve_model
from swarm.errors import BrokenModel, CapacityError, ModelError

LAYERS, WIDTH, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
TEXTS = ["the cat 1234", "a  b\n\n c", "<|im_start|>user hi<|im_end|>", "你好 🙂 é", "", "def f(x):\n    return x"]


def write_gguf(path: Path) -> None:
    """A llama with grouped query heads, quantised to Q4_1 like the real one, norms in float32."""
    generator = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    vocabulary = _write_vocabulary(writer)
    writer.add_vocab_size(vocabulary)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH)}
    shapes |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    _add(writer, "token_embd.weight", generator.standard_normal((vocabulary, WIDTH)))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            _add(writer, f"blk.{layer}.{name}.weight", generator.standard_normal(shape))
        for name in ("attn_norm", "ffn_norm"):
            _add(writer, f"blk.{layer}.{name}.weight", generator.standard_normal(WIDTH))
    _add(writer, "output_norm.weight", generator.standard_normal(WIDTH))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    values = values.astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    if values.ndim == 2:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def _write_vocabulary(writer: gguf.GGUFWriter) -> int:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *bytes_to_unicode().values(), "th", "the", "Ġc", "ca"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["t h", "th e", "Ġ c", "c a"])
    for add, token in (
        (writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2),
    ):  # fmt: skip
        add(token)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
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
        metadata = "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1.2\nRequires-Dist: must-not-be-fetched\n"
        archive.writestr("llm_tiny-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_tiny-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_tiny-0.1.2.dist-info/RECORD", "")
    return wheel


class Prepared(NamedTuple):
    directory: Path
    cache: Path
    reports: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def prepared(packaged: PackagedModel, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The whole way, once: converting imports transformers, which is what takes the time."""
    folder, cache = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("cache")
    write_wheel(folder, gguf_file.read_bytes())
    reports: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", folder.as_uri())
        directory = ensure_smollm2(cache, lambda *report: reports.append(report), packaged)
    return Prepared(directory, cache, reports)


@pytest.fixture
def converted(prepared: Prepared) -> Path:
    return prepared.directory


def litter(cache: Path, model: PackagedModel) -> list[str]:
    return [path.name for path in (cache / model.keyword).glob("partial-*")]


# -- the conversion, against transformers reading the same GGUF -------------------------------------------


def compare_with_transformers(gguf_path: Path, converted: Path, texts: list[str]) -> None:
    """Config, every tensor, logits and token ids. transformers needs accelerate to make a model of a GGUF
    itself, so the tensors are taken from its reader and put into its model here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    mine, theirs = ours.config.to_dict(), config.to_dict()
    unused = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "torch_dtype", "unk_token_id"}
    assert {k: v for k, v in mine.items() if k not in unused} == {k: v for k, v in theirs.items() if k not in unused}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=skeleton)["tensors"]
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference.load_state_dict({name: tensor.float() for name, tensor in read.items()}, strict=False)
    reference.tie_weights()
    written = load_file(converted / "model.safetensors")
    assert set(written) == set(read)
    for name, tensor in read.items():
        assert np.array_equal(written[name], tensor.float().numpy()), name

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    again = AutoTokenizer.from_pretrained(converted)
    for text in texts:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"], text
    assert again.chat_template == tokenizer.chat_template
    ids = torch.tensor([tokenizer("the cat sat")["input_ids"]])
    with torch.inference_mode():
        assert torch.equal(ours.eval()(ids).logits, reference.eval()(ids).logits)


def test_the_converted_model_is_the_one_that_transformers_reads(gguf_file: Path, converted: Path) -> None:
    compare_with_transformers(gguf_file, converted, TEXTS)


def test_the_end_of_a_message_ends_a_generation(converted: Path) -> None:
    generation = json.loads((converted / "generation_config.json").read_text())
    tokenizer = json.loads((converted / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert generation["eos_token_id"] == ids["<|im_end|>"] == 2
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE


# -- fetching --------------------------------------------------------------------------------------------


def test_a_prepared_model_is_found_without_starting_anything(
    packaged: PackagedModel, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    cache = converted.parent.parent
    assert ensure_smollm2(cache, model=packaged) == converted
    assert litter(cache, packaged) == []


def test_its_identity_is_the_gguf_file_not_what_was_made_of_it(
    packaged: PackagedModel, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.source.SMOLLM2", replace(packaged, keyword="smollm2"))
    monkeypatch.setattr("peer.source.ensure_smollm2", lambda cache, progress: converted)
    cache = converted.parent.parent
    source = resolve_model("smollm2", cache=cache)
    entries = [b"weights", packaged.member.encode()]
    framed = b"".join(len(text).to_bytes(2, "big") + text for text in entries) + bytes.fromhex(packaged.sha256)
    assert source.fingerprint == hashlib.sha256(b"layerswarm model fingerprint 1\n" + framed).digest()
    assert source.served_name == "tiny-instruct"
    assert json.loads(source.tokenizer_files()["model.json"])["eos_token_ids"] == [2]
    assert resolve_model(str(converted), cache=cache).fingerprint != source.fingerprint


def test_preparing_reports_each_part_up_to_its_end(prepared: Prepared) -> None:
    last = {what: (done, total) for what, done, total in prepared.reports}
    assert list(last) == [
        "downloading llm-tiny==0.1.2", "unpacking tiny.gguf", "converting tiny.gguf", "converting its tokenizer",
    ]  # fmt: skip
    assert all(done == total > 0 for done, total in last.values())


def test_after_interruptions_five_that_start_together_do_the_rest_once(
    packaged: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    children: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])
    for stage in ("downloading", "unpacking", "converting tiny.gguf"):

        def interrupt(what: str, done: int, total: int, stage: str = stage) -> None:
            if what.startswith(stage):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ensure_smollm2(cache, interrupt, packaged)
        assert children[-1].poll() is not None
        assert not converted_directory(cache, packaged).exists()

    converted: list[str] = []

    def watch(what: str, done: int, total: int) -> None:
        assert not what.startswith("unpacking"), "that was done before the last interruption"
        if what == "converting its tokenizer" and done == total:
            converted.append(what)

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda _: ensure_smollm2(cache, watch, packaged), range(5)))
    assert set(found) == {converted_directory(cache, packaged)}
    assert len(converted) == 1
    assert litter(cache, packaged) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_parent_leaves_no_child(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nimport peer.smollm2 as s\nimport json\n"
        "def kill(what, done, total):\n"
        "    if what.startswith('unpacking'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.ensure_smollm2(Path(sys.argv[1]), kill, s.PackagedModel(**json.loads(sys.argv[2])))\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", program, str(tmp_path / "cache"), json.dumps(packaged.__dict__)]
    # the child inherits standard error, so that this returns only when the last of them is gone
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not converted_directory(tmp_path / "cache", packaged).exists()


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


def test_a_wheel_without_the_file_is_refused(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    write_wheel(index, b"x", member="other.gguf")
    assert "doesn't contain tiny.gguf" in failure(tmp_path / "cache", packaged, BrokenModel)


def test_a_file_that_is_no_llama_gguf_is_refused(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    write_wheel(index, b"GGUF but no more")
    other = replace(packaged, sha256=hashlib.sha256(b"GGUF but no more").hexdigest())
    assert "tiny.gguf can't be converted" in failure(tmp_path / "cache", other, BrokenModel)


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


def test_a_cache_that_cannot_be_written_is_named(packaged: PackagedModel, index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    text = failure(tmp_path / "cache", packaged, ModelError)
    assert f"{tmp_path / 'cache'}" in text
    assert "not a directory" in text
    assert "SWARM_CACHE" in text


def test_a_disk_that_fills_while_converting_does_not_cost_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("peer.gguf_llama.convert", full)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(OSError, match="No space left"):
        smollm2._convert(gguf, tmp_path / "partial", tmp_path / "target")
    assert gguf.exists()


# -- the real one ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_real_model_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    converted = ensure_smollm2(tmp_path)
    source = resolve_model("smollm2", cache=tmp_path)
    assert source.served_name == "smollm2-135m-instruct"
    assert source.layers == 30
    assert json.loads(source.tokenizer_files()["model.json"]) == {
        "model_type": "llama",
        "vocab_size": 49152,
        "context_length": 8192,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "sampling": {},
    }
    prompts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    compare_with_transformers(tmp_path / "smollm2" / SMOLLM2.member, converted, TEXTS + _strings(prompts))


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for child in children for text in _strings(child)]
