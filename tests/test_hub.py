"""Models of the hub, against a server on loopback that speaks its interface, as far as a loaded span."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import constants

from peer import resumable
from peer.source import ModelSource, resolve_model
from peer.weights import load_span, span_tensors
from routing.spans import Span
from swarm.errors import (
    BrokenModel,
    CapacityError,
    GatedModel,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    UsageError,
)
from tests import fake_hub
from tests.fake_hub import COMMIT, FakeHub, Pause, Repo
from tests.gguf_files import Kind, convert_here, write_gguf
from tests.processes import ROOT, environment
from tests.published import publish_gpt_oss
from tests.tiny_model import LAYERS, change_json, shard_of, weights, write_tiny_model

SHARDS = sorted({shard_of(name) for name in weights()})


class World(NamedTuple):
    hub: FakeHub
    model: Path  # the same model as a directory
    cache: Path
    monkeypatch: pytest.MonkeyPatch

    def resolve(self, name: str = "org/tiny", **options: object) -> ModelSource:
        return resolve_model(name, cache=self.cache, **options)  # type: ignore[arg-type]

    def publish(self, name: str = "org/tiny", **options: object) -> Repo:
        self.hub.repos[name] = repo = Repo.of(self.model)
        for key, value in options.items():
            setattr(repo, key, value)
        return repo

    def cached(self, file: str, size: int) -> bool:
        """Whether the whole of a file is in huggingface_hub's cache."""
        found = huggingface_hub.try_to_load_from_cache("org/tiny-GGUF", file, revision=COMMIT)
        return isinstance(found, str) and Path(found).stat().st_size == size

    def offline(self) -> None:
        self.monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module", autouse=True)
def _connections() -> Iterator[None]:
    yield
    huggingface_hub.close_session()


HEADER = "bytes=0-3999"  # all that is asked of a weight file before its tensors are wanted


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    hub = FakeHub()
    endpoint = hub.start()
    # huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE once, when it is imported
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(resumable, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr("peer.hub.FIRST_HEADER_BYTES", 4000)  # less than the tiny model's shards have
    monkeypatch.delenv("HF_TOKEN", raising=False)
    try:
        world = World(hub, write_tiny_model(tmp_path / "tiny", sharded=True), tmp_path / "cache", monkeypatch)
        world.publish()
        yield world
    finally:
        hub.stop()


def refusal(world: World, kind: type[Exception], name: str = "org/tiny", **options: object) -> str:
    with pytest.raises(kind) as caught:
        world.resolve(name, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def weight_downloads(world: World) -> list[str]:
    """Weight files of which more than a header was asked for."""
    return [shard for shard in SHARDS if not all(span.startswith("bytes=0-") for span in world.hub.downloads(shard))]


def layer(number: int) -> list[str]:
    return [name for name in weights() if name.startswith(f"model.layers.{number}.")]


def test_a_model_is_described_without_a_download_of_its_weights(world: World) -> None:
    source = world.resolve()
    assert source.served_name == "org/tiny"
    assert source.layers == LAYERS
    assert {name: (s.shape, s.nbytes, s.file) for name, s in source.tensors.items()} == {
        name: (array.shape, array.nbytes, shard_of(name)) for name, array in weights().items()
    }
    assert weight_downloads(world) == []


def test_a_header_longer_than_what_is_asked_for_at_first_is_read_whole_and_no_further(world: World) -> None:
    world.monkeypatch.setattr("peer.hub.FIRST_HEADER_BYTES", 100)
    assert set(world.resolve().tensors) == set(weights())
    length = int.from_bytes((world.model / SHARDS[0]).read_bytes()[:8], "little")
    assert world.hub.downloads(SHARDS[0]) == ["bytes=0-99", f"bytes=8-{8 + length - 1}"]


def test_a_header_that_says_it_is_huge_is_not_fetched(world: World) -> None:
    shard = world.model / SHARDS[1]
    shard.write_bytes((1 << 40).to_bytes(8, "little") + shard.read_bytes()[8:])
    world.publish()
    assert "are accepted; it is damaged" in refusal(world, BrokenModel)
    assert world.hub.downloads(SHARDS[1]) == [HEADER]


def test_the_hub_and_a_directory_give_the_same_model_the_same_identity(world: World) -> None:
    hub, directory = world.resolve(), resolve_model(str(world.model), cache=world.cache)
    assert hub.fingerprint == directory.fingerprint
    assert hub.tokenizer_hash == directory.tokenizer_hash
    assert hub.tokenizer_files() == directory.tokenizer_files()


def test_a_span_downloads_only_its_own_shards(world: World) -> None:
    source, reports = world.resolve(), []
    source.fetch_tensors(layer(1) + layer(2), lambda *report: reports.append(report))
    assert weight_downloads(world) == ["model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors"]
    for number in (1, 2):
        shard = shard_of(layer(number)[0])
        assert source.path(shard).read_bytes() == (world.model / shard).read_bytes()
        size = (world.model / shard).stat().st_size
        assert (f"downloading {shard}", size, size) in reports
    with pytest.raises(BrokenModel, match=r"model-00001-of-00005.*isn't on this machine"):
        source.path("model-00001-of-00005.safetensors")


def test_what_is_here_is_not_fetched_again(world: World) -> None:
    world.resolve().fetch_tensors(layer(1))
    world.hub.requests.clear()
    world.resolve().fetch_tensors(layer(1))
    assert [path for _, path, _ in world.hub.requests] == ["/api/models/org/tiny"]


def test_an_interrupted_download_resumes_where_it_stopped(world: World) -> None:
    source = world.resolve()

    def interrupt(what: str, done: int, total: int) -> None:
        if done >= 3000:
            raise KeyboardInterrupt

    world.hub.break_after = 1500
    with pytest.raises(KeyboardInterrupt):
        source.fetch_tensors(layer(1), interrupt)
    world.hub.requests.clear()
    world.hub.break_after = None
    source.fetch_tensors(layer(1))
    shard = shard_of(layer(1)[0])
    assert world.hub.downloads(shard) == ["bytes=3000-"]
    assert source.path(shard).read_bytes() == (world.model / shard).read_bytes()


def test_a_line_that_breaks_is_taken_up_again_at_once(world: World) -> None:
    shard = shard_of(layer(1)[0])
    source = world.resolve()
    world.hub.break_after = 1500
    source.fetch_tensors(layer(1))
    size = (world.model / shard).stat().st_size
    assert world.hub.downloads(shard)[1:] == ["", *(f"bytes={start}-" for start in range(1500, size, 1500))]
    assert source.path(shard).read_bytes() == (world.model / shard).read_bytes()


def test_a_line_that_brings_nothing_is_given_up(world: World) -> None:
    source = world.resolve()
    world.hub.break_after = 0
    with pytest.raises(ModelError, match="can't reach the hub"):
        source.fetch_tensors(layer(1))


def test_a_file_with_another_hash_than_the_hub_states_is_refused_and_deleted(world: World) -> None:
    shard = shard_of(layer(1)[0])
    world.publish(stated={shard: "ab" * 32})
    source = world.resolve()
    with pytest.raises(BrokenModel, match=f"{shard} of org/tiny can't be used: its hash isn't"):
        source.fetch_tensors(layer(1))
    world.publish()
    world.resolve().fetch_tensors(layer(1))


def test_a_small_file_with_another_hash_than_the_hub_states_is_refused(world: World) -> None:
    world.publish(stated={"config.json": "ab" * 20})
    assert "config.json of org/tiny can't be used: its hash" in refusal(world, BrokenModel)


def test_too_little_disk_is_said_with_numbers_before_any_download(world: World) -> None:
    source = world.resolve()
    usage = type(shutil.disk_usage("/"))
    world.monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        CapacityError, match=r"needs 0\.00 GB of disk and 0\.27 GB to spare, 0\.00 GB are free.*HF_HOME"
    ):
        source.fetch_tensors(layer(1))
    assert weight_downloads(world) == []


# -- what the hub says no to -----------------------------------------------------------------------------


def test_a_gated_model_names_the_licence_page_and_the_token(world: World) -> None:
    world.publish(gated=True)
    text = refusal(world, GatedModel)
    assert "https://huggingface.co/org/tiny" in text
    assert "HF_TOKEN" in text


def test_a_gated_model_opens_to_the_token(world: World) -> None:
    world.publish(gated=True)
    world.monkeypatch.setenv("HF_TOKEN", world.hub.token)
    source = world.resolve()
    source.fetch_tensors(layer(1))
    assert source.layers == LAYERS


@pytest.mark.parametrize("status", [401, 403])
def test_a_bare_refusal_names_the_licence_page_too(world: World, status: int) -> None:
    world.hub.status = status
    with pytest.raises((GatedModel, ModelNotFound)) as caught:
        world.resolve()
    assert "HF_TOKEN" in str(caught.value)


def test_a_missing_model_is_said_to_be_in_neither_place(world: World) -> None:
    text = refusal(world, ModelNotFound, "org/nothing")
    assert "no model org/nothing on the hub" in text
    assert "no such directory" in text


def test_a_missing_revision_is_named(world: World) -> None:
    assert "no revision 'v9'" in refusal(world, ModelNotFound, revision="v9")


def test_a_revision_is_used(world: World) -> None:
    world.publish(revisions=("main", "v1"))
    assert world.resolve(revision="v1").layers == LAYERS
    assert ("GET", "/api/models/org/tiny/revision/v1", "") in world.hub.requests


def test_a_hub_in_trouble_is_no_fault_of_the_model(world: World) -> None:
    world.hub.status = 500
    assert "the hub answered 500 for org/tiny" in refusal(world, ModelError)


def test_the_hub_is_asked_for_the_model_alone_and_told_nothing_of_this_machine(world: World, tmp_path: Path) -> None:
    """huggingface_hub asks it for a list of programs, and says which of them runs and which torch is here."""
    world.publish()
    script = (
        "import sys; from pathlib import Path; from peer.source import resolve_model;"
        "from huggingface_hub.utils import build_hf_headers;"
        "resolve_model('org/tiny', cache=Path(sys.argv[1])); print(build_hf_headers()['user-agent'])"
    )
    own = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path / "hf"), "AI_AGENT": "some-program"}
    unset = ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_CACHE", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    known = {name: value for name, value in environment(tmp_path / "home").items() if name not in unset}
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    said = subprocess.run(command, cwd=ROOT, env={**known, **own}, capture_output=True, text=True, check=True).stdout
    assert "torch/" not in said and "agent/" not in said
    assert world.hub.requests and all("/org/tiny" in path for _, path, _ in world.hub.requests)


@pytest.mark.parametrize("body", [b"<html>please log in</html>", b"[]", b"null", b'{"id": 5, "siblings": 7}'])
def test_a_network_that_answers_in_the_hubs_place_is_told(world: World, body: bytes) -> None:
    world.publish()
    world.hub._describe = lambda request, *_: fake_hub._reply(request, 200, {}, body)  # type: ignore[method-assign]
    text = refusal(world, ModelError)
    assert "something that isn't the hub's" in text and "log in" in text


def test_a_bare_404_is_no_trouble_that_passes(world: World) -> None:
    world.hub.status = 404
    assert "no model org/tiny on the hub" in refusal(world, ModelNotFound)


def test_no_network_says_what_helps(world: World) -> None:
    world.monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = refusal(world, ModelError)
    assert "can't reach the hub at http://127.0.0.1:9" in text
    assert "HF_HUB_OFFLINE" in text
    assert "local directory" in text


# -- refused before any download -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        ("pickle", UnsupportedModel, "only pickled weights"),
        ("remote code", UnsupportedModel, "needs remote code"),
        ("quantised", UnsupportedModel, "is quantised (gptq)"),
        ("recurrent", UnsupportedModel, "keep other state than keys and values"),
        ("not its parts", UnsupportedModel, "doesn't give the numbers of the whole"),
        ("gguf", BrokenModel, "x.gguf can't be used: its 1 bytes don't begin as a GGUF file does"),
        ("shard", BrokenModel, "lacks model-00002-of-00005.safetensors of the 6 weight files"),
        ("config", BrokenModel, "config.json of org/tiny isn't JSON (line 1, column 2"),
        ("cut", BrokenModel, "model-00002-of-00005.safetensors can't be used: it is truncated"),
        ("garbage", BrokenModel, "model-00002-of-00005.safetensors can't be used: its header"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_weight_is_fetched(
    world: World, spoil: str, kind: type[ModelError], says: str
) -> None:
    shard = world.model / "model-00002-of-00005.safetensors"
    if spoil in ("pickle", "gguf"):
        for path in world.model.glob("*.safetensors*"):
            path.unlink()
        (world.model / ("pytorch_model.bin" if spoil == "pickle" else "x.gguf")).write_bytes(b"x")
    elif spoil == "remote code":
        change_json(world.model / "config.json", model_type="strange", auto_map={"AutoConfig": "x.Y"})
    elif spoil == "quantised":
        change_json(world.model / "config.json", quantization_config={"quant_method": "gptq"})
    elif spoil == "recurrent":
        change_json(world.model / "config.json", model_type="mamba")
    elif spoil == "not its parts":
        change_json(world.model / "config.json", model_type="ctrl")
    elif spoil == "shard":
        shard.unlink()
    elif spoil == "config":
        (world.model / "config.json").write_text("{")
    elif spoil == "cut":
        shard.write_bytes(shard.read_bytes()[:-2000])
    else:
        shard.write_bytes(b"\x09" + bytes(7) + b"{garbage}" + bytes(100))
    world.publish()
    assert says in refusal(world, kind)
    assert weight_downloads(world) == []


def test_of_a_family_that_cannot_be_served_the_config_alone_is_fetched(world: World) -> None:
    change_json(world.model / "config.json", model_type="mamba")
    world.publish()
    refusal(world, UnsupportedModel)
    fetched = [path for method, path, _ in world.hub.requests if method == "GET" and "/resolve/" in path]
    assert {path.rpartition("/")[2] for path in fetched} == {"config.json"}


# -- offline ---------------------------------------------------------------------------------------------


def test_a_part_of_a_model_that_was_fetched_serves_offline(world: World) -> None:
    online = world.resolve()
    online.fetch_tensors(layer(1))
    world.hub.requests.clear()
    world.offline()
    source = world.resolve()
    source.fetch_tensors(layer(1))
    assert source.fingerprint == online.fingerprint
    assert source.tensors == online.tensors
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        source.fetch_tensors(layer(2))
    assert world.hub.requests == []


def test_a_model_that_another_program_fetched_serves_offline(world: World) -> None:
    online = world.resolve()
    huggingface_hub.snapshot_download("org/tiny")
    shutil.rmtree(world.cache)
    world.hub.requests.clear()
    world.offline()
    source = world.resolve()
    source.fetch_tensors(weights())
    assert source.fingerprint == online.fingerprint
    assert world.hub.requests == []


def test_a_model_that_was_never_fetched_says_so_offline(world: World) -> None:
    world.offline()
    text = refusal(world, ModelNotFound)
    assert "org/tiny isn't in the local cache" in text
    assert "HF_HUB_OFFLINE" in text


# -- as far as a loaded span -----------------------------------------------------------------------------


def load(source: ModelSource, span: Span) -> dict[str, np.ndarray]:
    """Fetch and load as a peer does; the tensors by name."""
    names = span_tensors(source, span)
    source.fetch_tensors(names)
    hop = load_span(source, span, torch.float32)
    layers = {f"model.layers.{i}.": layer for i, layer in zip(span, hop.layers, strict=True)}
    return {
        prefix + name: tensor.numpy()
        for prefix, layer in layers.items()
        for name, tensor in layer.state_dict().items()
    }


def assert_middle(loaded: dict[str, np.ndarray], seed: int = 0) -> None:
    expected = {
        name: array
        for name, array in weights(seed).items()
        if name.startswith(("model.layers.1.", "model.layers.2."))
    }
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(loaded[name], array), name


MIDDLE = Span(1, 3)
OWN = ["model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors"]


def test_a_middle_span_is_loaded_from_its_own_shards_and_no_others(world: World) -> None:
    assert_middle(load(world.resolve(), MIDDLE))
    assert weight_downloads(world) == OWN
    for shard in set(SHARDS) - set(OWN):
        assert world.hub.downloads(shard) == [HEADER]  # its header, in one request


def test_a_weight_and_its_scales_are_fetched_wherever_they_lie(world: World) -> None:
    model = publish_gpt_oss(world.model.parent / "gpt-oss")
    world.hub.repos["org/tiny"] = Repo.of(model)
    source, span = world.resolve(), Span(2, 3)
    load(source, span)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("model.layers.2.")}
    fetched = {file for file in set(index.values()) if len(world.hub.downloads(file)) > 1}
    assert fetched == needed != set(index.values())


def test_large_files_come_from_a_storage_that_never_sees_the_token(world: World) -> None:
    world.monkeypatch.setenv("HF_TOKEN", world.hub.token)
    storage = world.hub.use_storage()
    assert_middle(load(world.resolve(), MIDDLE))
    assert len(storage.seen) == len(SHARDS) + len(OWN)  # headers, and two shards
    assert {who for _, who in storage.seen} == {""}


def test_a_storage_that_hangs_up_is_asked_for_the_rest_at_a_fresh_address(world: World) -> None:
    source, storage = world.resolve(), world.hub.use_storage()
    storage.break_after = 2000
    assert_middle(load(source, MIDDLE))
    size = (world.model / OWN[0]).stat().st_size
    assert [span for span, _ in storage.seen[: -(-size // 2000)]] == [
        "",
        *(f"bytes={n}-" for n in range(2000, size, 2000)),
    ]


CHILD = """
import sys
from pathlib import Path
from peer.fingerprint import FileHashes
from peer.hub import open_hub
cache = Path(sys.argv[1])
files = open_hub("org/tiny", None, cache, FileHashes(cache / "hashes"))
files.fetch([sys.argv[2]], lambda what, done, total: print(done, flush=True))
"""


def test_a_download_outlives_the_process_that_began_it(world: World) -> None:
    shard = OWN[0]
    world.hub.pause = Pause(after=3000)
    home = world.cache.parent
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(world.cache), shard],
        cwd=ROOT,
        env={
            **environment(home, world.cache),
            "HF_ENDPOINT": constants.ENDPOINT,
            "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    with child.stdout:
        assert any(int(line) == 3000 for line in child.stdout)  # then nothing more comes
        child.kill()
        assert child.wait(30) == -signal.SIGKILL
    world.hub.pause.over.set()
    world.hub.pause = None
    world.hub.requests.clear()
    assert_middle(load(world.resolve(), MIDDLE))
    assert world.hub.downloads(shard) == [HEADER, "bytes=3000-"]


def test_a_revision_has_weights_of_its_own(world: World) -> None:
    other = write_tiny_model(world.model.parent / "other", sharded=True, seed=5)
    branch = Repo.of(other)
    branch.commit = "f" * 40
    world.publish(branches={"v2": branch})
    main, second = world.resolve(), world.resolve(revision="v2")
    assert main.fingerprint != second.fingerprint
    assert_middle(load(second, MIDDLE), seed=5)
    assert_middle(load(main, MIDDLE))
    world.offline()
    assert_middle(load(world.resolve(revision="v2"), MIDDLE), seed=5)


def test_a_span_that_was_fetched_is_loaded_without_a_network(world: World) -> None:
    load(world.resolve(), MIDDLE)
    world.hub.requests.clear()
    world.offline()
    source = world.resolve()
    assert_middle(load(source, MIDDLE))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        load(source, Span(3, 4))
    assert world.hub.requests == []


def test_a_token_that_ends_before_the_weights_are_fetched_is_said_as_such(world: World) -> None:
    world.publish(gated=True)
    world.monkeypatch.setenv("HF_TOKEN", world.hub.token)
    source = world.resolve()
    world.monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        GatedModel,
        match=r"org/tiny is gated: accept its licence at https://huggingface\.co/org/tiny, then set HF_TOKEN",
    ):
        load(source, MIDDLE)
    world.monkeypatch.setenv("HF_TOKEN", world.hub.token)
    assert_middle(load(source, MIDDLE))


def test_a_file_that_the_hub_describes_and_lacks_is_no_fault_of_the_network(world: World) -> None:
    source = world.resolve()
    world.publish(gone=frozenset(OWN[1:]))
    with pytest.raises(ModelError, match="the hub answered 404 for org/tiny"):
        load(source, MIDDLE)


def test_a_fetched_file_that_was_changed_is_found_out_and_fetched_again(world: World) -> None:
    source = world.resolve()
    load(source, MIDDLE)
    blob = source.path(OWN[1]).resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        BrokenModel, match=f"{OWN[1]} of org/tiny can't be used: its hash isn't the one that the hub states"
    ):
        load(source, MIDDLE)
    assert_middle(load(source, MIDDLE))


def test_a_full_disk_is_no_trouble_with_the_hub(world: World) -> None:
    source = world.resolve()

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.monkeypatch.setattr(resumable.os, "fsync", no_room)
    with pytest.raises(CapacityError, match=r"\.layerswarm can't be written \(no space left on device; .* GB are free"):
        source.fetch_tensors(layer(1))


# -- GGUF ------------------------------------------------------------------------------------------------


@pytest.fixture
def quantised(world: World, tmp_path: Path) -> Repo:
    """A repository as people publish them: several quantisations, a split one in a folder, no config."""
    world.monkeypatch.setattr("peer.gguf_tokenizer.run_child", convert_here)
    folder = tmp_path / "gguf"
    (folder / "BF16").mkdir(parents=True)
    write_gguf(folder / "tiny-Q8_0.gguf", "llama", Kind.Q8_0)
    write_gguf(folder / "tiny-Q4_0.gguf", "llama 3", Kind.Q4_0)
    write_gguf(folder / "BF16" / "tiny-BF16.gguf", "llama", Kind.BF16, split=5)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.gguf")}
    world.hub.repos["org/tiny-GGUF"] = repo = Repo({**files, "README.md": b"hello", "mmproj-tiny.gguf": b"x"})
    return repo


def test_a_gguf_model_of_the_hub_is_described_by_its_header_alone(world: World, quantised: Repo) -> None:
    source = world.resolve("org/tiny-GGUF:Q4_0")
    assert source.served_name == "tiny-Q4_0"
    assert source.config.rope_parameters["rope_type"] == "llama3"  # which is in a tensor
    asked = [span.removeprefix("bytes=").split("-") for span in world.hub.downloads("tiny-Q4_0.gguf")]
    size = len(quantised.files["tiny-Q4_0.gguf"])
    assert asked[0] == ["0", str(size - 1)]  # a tiny file is smaller than what a header may have
    assert len(asked) == 2
    assert int(asked[1][1]) - int(asked[1][0]) + 1 == 8 * 4
    assert world.hub.downloads("tiny-Q8_0.gguf") == []


def test_only_as_much_as_the_header_takes_is_read(world: World, quantised: Repo) -> None:
    world.monkeypatch.setattr("peer.gguf_header.FIRST_BYTES", 3_000)
    world.resolve("org/tiny-GGUF:Q8_0")
    asked = world.hub.downloads("tiny-Q8_0.gguf")
    assert asked == ["bytes=0-2999", "bytes=3000-11999"]
    assert len(quantised.files["tiny-Q8_0.gguf"]) > 100_000
    world.resolve("org/tiny-GGUF:Q8_0")
    assert world.hub.downloads("tiny-Q8_0.gguf") == asked  # it was kept


def test_a_file_of_the_hub_is_fetched_verified_and_is_the_file_on_a_disk(
    world: World, quantised: Repo, tmp_path: Path
) -> None:
    source = world.resolve("org/tiny-GGUF/tiny-Q8_0.gguf")
    on_disk = resolve_model(str(tmp_path / "gguf" / "tiny-Q8_0.gguf"), cache=world.cache)
    assert source.fingerprint == on_disk.fingerprint
    assert source.served_name == on_disk.served_name == "tiny-Q8_0"
    source.fetch_tensors(span_tensors(source, Span(1, 2)))
    loaded, again = (load_span(one, Span(1, 2), torch.float32) for one in (source, on_disk))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    world.offline()
    assert world.resolve("org/tiny-GGUF:Q8_0").fingerprint == source.fingerprint


def test_of_a_split_model_only_the_parts_of_the_span_are_fetched(world: World, quantised: Repo) -> None:
    source = world.resolve("org/tiny-GGUF:BF16")
    assert source.served_name == "tiny-BF16"
    assert len({spec.file for spec in source.tensors.values()}) == 6
    needed = source.files_of(span_tensors(source, Span(1, 2)))
    assert 0 < len(needed) < 6
    source.fetch_tensors(span_tensors(source, Span(1, 2)))
    whole = {path for path, content in quantised.files.items() if (world.cached(path, len(content)))}
    assert whole == set(needed)
    load_span(source, Span(1, 2), torch.float32)


def test_a_repository_of_several_gguf_models_says_how_to_name_one(world: World, quantised: Repo) -> None:
    text = refusal(world, UsageError, "org/tiny-GGUF")
    assert "org/tiny-GGUF has 3 models in GGUF files (" in text
    assert "Q8_0" in text and "say which: org/tiny-GGUF:" in text
    named = text.rpartition("say which: ")[2]
    assert world.resolve(named).layers == 3  # what it says works
    text = refusal(world, ModelNotFound, "org/tiny-GGUF:Q5_K_M")
    assert "has no GGUF file called Q5_K_M; there are" in text
    assert "has no other.gguf; there are" in refusal(world, ModelNotFound, "org/tiny-GGUF/other.gguf")


def test_a_repository_with_one_gguf_model_needs_no_more_words(world: World, quantised: Repo) -> None:
    del quantised.files["tiny-Q4_0.gguf"]
    for path in [path for path in quantised.files if path.startswith("BF16/")]:
        del quantised.files[path]
    assert world.resolve("org/tiny-GGUF").served_name == "tiny-Q8_0"


def test_a_gguf_file_that_is_not_what_the_hub_states_is_refused(world: World, quantised: Repo) -> None:
    quantised.stated["tiny-Q8_0.gguf"] = "ab" * 32
    source = world.resolve("org/tiny-GGUF:Q8_0")
    with pytest.raises(BrokenModel, match=r"tiny-Q8_0\.gguf of org/tiny-GGUF.* hash isn't the one"):
        source.fetch_tensors(span_tensors(source, Span(0, 1)))


def test_a_gguf_model_that_cannot_be_served_is_refused_before_a_download(world: World, quantised: Repo) -> None:
    world.monkeypatch.setattr("peer.gguf_header.FIRST_BYTES", 3_000)
    content = quantised.files["tiny-Q8_0.gguf"]
    quantised.files["tiny-Q8_0.gguf"] = content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv7", 1)
    assert "is a rwkv7 model" in refusal(world, UnsupportedModel, "org/tiny-GGUF:Q8_0")
    assert all(span for span in world.hub.downloads("tiny-Q8_0.gguf"))
