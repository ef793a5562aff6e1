"""Models in directories: what is accepted, and the one line that each refusal says."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from peer.source import ModelSource, resolve_model
from peer.weights import span_tensors
from routing.spans import Span
from swarm.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel, UsageError
from tests.tiny_model import CONFIG, LAYERS, change_json, shard_of, weights, write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", sharded=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def resolve(directory: Path | str, cache: Path, **options: str) -> ModelSource:
    return resolve_model(str(directory), cache=cache, **options)


def refusal(directory: Path | str, cache: Path, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as caught:
        resolve(directory, cache)
    text = str(caught.value)
    assert "\n" not in text
    assert type(caught.value) is kind
    return text


def test_a_directory_is_described(model: Path, cache: Path) -> None:
    source = resolve(model, cache)
    assert source.served_name == "tiny"
    assert source.layers == LAYERS
    expected = {name: (array.shape, array.nbytes) for name, array in weights().items()}
    assert {name: (spec.shape, spec.nbytes) for name, spec in source.tensors.items()} == expected
    assert source.path("model.safetensors") == (model / "model.safetensors").resolve()
    assert source.config.model_type == "llama"


def test_shards_are_described_each_tensor_in_its_own(sharded: Path, cache: Path) -> None:
    source = resolve(sharded, cache)
    assert {name: spec.file for name, spec in source.tensors.items()} == {
        name: shard_of(name) for name in weights()
    }
    second = [name for name in source.tensors if name.startswith("model.layers.1.")]
    assert source.files_of(second) == ("model-00002-of-00005.safetensors",)
    source.fetch_tensors(second)


def test_a_tensor_that_the_span_needs_and_the_files_lack_is_named(model: Path, cache: Path) -> None:
    with pytest.raises(BrokenModel, match=r"lacks the tensor model\.layers\.9\.w; fetch"):
        resolve(model, cache).fetch_tensors(["model.layers.9.w"])


def test_the_served_name_can_be_chosen(model: Path, cache: Path) -> None:
    assert resolve(model, cache, served_name="mine").served_name == "mine"


def test_the_current_directory_has_its_own_name(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    assert resolve(".", cache).served_name == "tiny"


def test_a_relative_path_without_a_dot_is_a_directory_if_it_exists(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent.parent)
    assert resolve(f"{model.parent.name}/tiny", cache).served_name == "tiny"


# -- the fingerprint -------------------------------------------------------------------------------------


def test_the_fingerprint_follows_every_file_that_decides_what_is_computed(sharded: Path, cache: Path) -> None:
    before = resolve(sharded, cache).fingerprint
    assert len(before) == 32
    seen = {before}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        original = (sharded / name).read_bytes()
        (sharded / name).write_bytes(original + b"\n")
        seen.add(resolve(sharded, cache).fingerprint)
        (sharded / name).write_bytes(original)
    (sharded / "chat_template.jinja").write_text("hello")
    seen.add(resolve(sharded, cache).fingerprint)
    (sharded / "chat_template.jinja").unlink()
    for shard in sorted({shard_of(name) for name in weights()}):
        original = (sharded / shard).read_bytes()
        (sharded / shard).write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        seen.add(resolve(sharded, cache).fingerprint)
        (sharded / shard).write_bytes(original)
    assert len(seen) == 1 + 4 + 1 + LAYERS + 2
    assert resolve(sharded, cache).fingerprint == before


def test_neither_place_nor_other_files_change_the_fingerprint(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    before = resolve(model, cache).fingerprint
    (model / "README.md").write_text("hello")
    (model / "training_args.bin").write_bytes(b"pickle")
    moved = model.rename(tmp_path / "elsewhere")
    assert resolve(moved, tmp_path / "another cache").fingerprint == before


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["/no/such/model", "./nothing", "~/surely/not/here", "~nobody-of-that-name/model", "../nothing/at/all/here"],
)
def test_no_such_directory(text: str, cache: Path) -> None:
    assert f"no such directory: {text}" in refusal(text, cache, ModelNotFound)


def test_a_single_word_that_is_no_directory_says_what_can_be_named(cache: Path) -> None:
    text = refusal("llama", cache, ModelNotFound)
    assert "no such directory: llama" in text
    assert "org/name" in text
    assert "smollm2" in text


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "/blob/main/config.json"])
def test_an_address_of_the_hub_says_what_to_write(rest: str, cache: Path) -> None:
    text = refusal(f"https://huggingface.co/org/some.name{rest}", cache, ModelNotFound)
    assert text.endswith("write: org/some.name")


def test_what_is_no_name_at_all_is_told_shortly(cache: Path) -> None:
    assert len(refusal("x" * 5000, cache, ModelNotFound)) < 400


def test_a_file_in_place_of_a_directory(model: Path, cache: Path) -> None:
    assert "is a file; name the directory" in refusal(model / "model.safetensors", cache, ModelNotFound)


def test_no_config(model: Path, cache: Path) -> None:
    (model / "config.json").unlink()
    assert "has no config.json" in refusal(model, cache, ModelNotFound)


def test_an_adapter_is_not_a_model(model: Path, cache: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    assert "is an adapter" in refusal(model, cache, UnsupportedModel)


def test_a_broken_config_names_the_place(model: Path, cache: Path) -> None:
    (model / "config.json").write_text('{\n  "model_type": "llama",\n  "x": }\n')
    assert "config.json" in (text := refusal(model, cache, BrokenModel))
    assert "line 3, column 8" in text


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"[1]", b"3", b"{}", b'{"model_type": 3}'])
def test_a_config_that_is_no_config(model: Path, cache: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    assert "config.json" in refusal(model, cache, BrokenModel)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": "four"}, {"hidden_size": None}, {"num_attention_heads": 0}]
)
def test_a_config_with_a_wrong_value(model: Path, cache: Path, change: dict[str, object]) -> None:
    change_json(model / "config.json", **change)
    assert "config.json" in refusal(model, cache, BrokenModel)


@pytest.mark.parametrize("value", [5, {}, {"model_type": "llama"}])
def test_a_text_config_where_none_belongs(model: Path, cache: Path, value: object) -> None:
    change_json(model / "config.json", text_config=value)
    assert "has a text_config that a llama model doesn't" in refusal(model, cache, BrokenModel)


@pytest.mark.parametrize("change", [{"head_dim": 10**9}, {"hidden_size": 2 * 10**8}])
def test_tables_that_no_model_has_are_refused_before_they_are_computed(
    model: Path, cache: Path, change: dict[str, object]
) -> None:
    change_json(model / "config.json", **change)
    assert "a table of" in refusal(model, cache, UnsupportedModel)


def test_a_model_of_no_layers(model: Path, cache: Path) -> None:
    change_json(model / "config.json", num_hidden_layers=0)
    assert "it has no list of 0 layers to split" in refusal(model, cache, UnsupportedModel)


@pytest.mark.parametrize(
    "change", [{"return_dict": False}, {"torchscript": True}, {"output_attentions": True}, {"base_model_tp_plan": 7}]
)
def test_how_a_models_makers_had_it_called_changes_nothing(
    model: Path, cache: Path, change: dict[str, object]
) -> None:
    change_json(model / "config.json", **change)
    config = resolve(model, cache).config
    assert all(getattr(config, key, None) != value for key, value in change.items())


def test_a_million_labels_are_not_made(model: Path, cache: Path) -> None:
    change_json(model / "config.json", num_labels=10**6)
    assert resolve(model, cache).config.num_labels == 2


@pytest.mark.parametrize(
    ("folder", "name"),
    [("new\nline", "new_line"), ("red\x1b[31m", "red_[31m"), ("x" * 99, "x" * 96), ("a\udcffb", "a_b"), ("模", "模")],
)
def test_a_folders_name_is_made_one_that_can_be_served(
    model: Path, cache: Path, tmp_path: Path, folder: str, name: str
) -> None:
    assert resolve(model.rename(tmp_path / folder), cache).served_name == name


def test_whole_numbers_without_a_scale_are_no_weights(model: Path, cache: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].astype("int8")}, model / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"tensor {name} in model.safetensors is stored as I8 without scales"):
        span_tensors(resolve(model, cache), Span(0, 1))


def test_a_weight_file_of_no_tensors(model: Path, cache: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert "model.safetensors holds no tensors" in refusal(model, cache, BrokenModel)


def test_no_weights(model: Path, cache: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no weights (model.safetensors" in refusal(model, cache, ModelNotFound)


def test_whoever_has_only_a_config_hears_first_that_its_family_cannot_be_served(model: Path, cache: Path) -> None:
    (model / "model.safetensors").unlink()
    change_json(model / "config.json", model_type="mamba")
    assert "a mamba model can't be served" in refusal(model, cache, UnsupportedModel)


def test_weights_under_another_name_are_said_to_be_there(model: Path, cache: Path) -> None:
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    text = refusal(model, cache, ModelNotFound)
    assert "has no weights (model.safetensors" in text and "consolidated.safetensors is there" in text


def test_a_tensor_that_is_missed_in_the_only_file_speaks_of_no_index(model: Path, cache: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"lm_head.weight isn't in model.safetensors; fetch that file again"):
        span_tensors(resolve(model, cache), Span(3, 4))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_only_pickled_weights_are_refused_with_the_reason(model: Path, cache: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    text = refusal(model, cache, UnsupportedModel)
    assert f"only pickled weights ({name})" in text
    assert "run the code" in text
    assert "safetensors" in text


def test_pickled_weights_beside_safetensors_are_no_matter(model: Path, cache: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    assert resolve(model, cache).layers == LAYERS


def test_remote_code_is_refused(model: Path, cache: Path) -> None:
    change_json(model / "config.json", model_type="strange", auto_map={"AutoConfig": "configuration.Strange"})
    assert "needs remote code (auto_map" in refusal(model, cache, UnsupportedModel)


def test_remote_code_for_a_built_in_type_is_left_alone(model: Path, cache: Path) -> None:
    change_json(model / "config.json", auto_map={"AutoConfig": "configuration.Llama"})
    assert type(resolve(model, cache).config).__module__.startswith("transformers.")


def test_an_unknown_model_type_names_the_release_of_transformers(model: Path, cache: Path) -> None:
    import transformers

    change_json(model / "config.json", model_type="strange")
    text = refusal(model, cache, UnsupportedModel)
    assert "'strange'" in text
    assert transformers.__version__ in text


def test_a_model_that_generates_no_text_is_refused(model: Path, cache: Path) -> None:
    change_json(model / "config.json", model_type="vit")
    assert "doesn't generate text" in refusal(model, cache, UnsupportedModel)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantisation_is_refused_by_name(model: Path, cache: Path, key: str) -> None:
    change_json(model / "config.json", **{key: {"quant_method": "awq"}})
    assert "quantised (awq)" in refusal(model, cache, UnsupportedModel)


def test_a_truncated_weight_file_is_named(sharded: Path, cache: Path) -> None:
    shard = sharded / "model-00003-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    assert "model-00003-of-00005.safetensors" in (text := refusal(sharded, cache, BrokenModel))
    assert "truncated" in text


def test_a_shard_that_the_index_names_and_nobody_has(sharded: Path, cache: Path) -> None:
    (sharded / "model-00003-of-00005.safetensors").unlink()
    (sharded / "model-00004-of-00005.safetensors").unlink()
    text = refusal(sharded, cache, BrokenModel)
    assert "lacks model-00003-of-00005.safetensors and 1 more of the 6 weight files" in text


@pytest.mark.parametrize("weight_map", [None, {}, [], 3])
def test_an_index_that_names_no_files(sharded: Path, cache: Path, weight_map: object) -> None:
    change_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    assert "model.safetensors.index.json of" in (text := refusal(sharded, cache, BrokenModel))
    assert "lists no weights" in text


@pytest.mark.parametrize(
    "shard",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "sub/w.safetensors",
        "..\\w.safetensors",
        "C:w",
        "..",
        "",
        None,
        3,
        [],
    ],
)
def test_an_index_that_leads_out_of_the_directory_is_named(sharded: Path, cache: Path, shard: object) -> None:
    change_json(sharded / "model.safetensors.index.json", weight_map={"w": shard})
    text = refusal(sharded, cache, BrokenModel)
    assert f"names {shard!r}, which can't be a file beside it" in text


def test_an_index_is_read_in_pieces_whatever_stands_around_its_map(sharded: Path, cache: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": said["weight_map"], "metadata": {"by": "é" * 400}}, indent=4) + "\n")
    found = {spec.file for spec in resolve(sharded, cache).tensors.values()}
    assert found == {shard for name, shard in said["weight_map"].items() if name in weights()}


@pytest.mark.parametrize("behind", ["x", "{}", ", {}"])
def test_an_index_with_something_behind_it_is_none(sharded: Path, cache: Path, behind: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text() + behind)
    assert "isn't JSON as an index of weights has it" in refusal(sharded, cache, BrokenModel)


@pytest.mark.parametrize(
    "hostile",
    [
        '{"weight_map":{' + ",".join(f'"{n}":"w{n}"' for n in range(1_000_000)) + "}}",
        '{"weight_map":' + "[]," * 7_000_000,
    ],
    ids=["a million files", "21 MB of empty lists"],
)
def test_a_hostile_index_fills_no_memory(sharded: Path, cache: Path, hostile: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(hostile)
    tracemalloc.start()
    try:
        text = refusal(sharded, cache, BrokenModel)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "lacks w" in text or "lists no weights" in text


def test_a_tensor_that_two_shards_have_is_named_with_both(sharded: Path, cache: Path) -> None:
    one, two = (sharded / f"model-0000{number}-of-00005.safetensors" for number in (2, 4))
    tensors = load_file(one)
    save_file(
        {**load_file(two), "model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"]},
        two,
    )
    text = refusal(sharded, cache, BrokenModel)
    assert f"tensor model.layers.1.mlp.up_proj.weight is in {one.name} and in {two.name}" in text


def test_what_a_shard_holds_that_its_index_leaves_out_is_missed_before_anything_is_loaded(
    sharded: Path, cache: Path
) -> None:
    kept = {
        name: shard_of(name) for name in weights() if shard_of(name) != "model-00003-of-00005.safetensors"
    }
    change_json(sharded / "model.safetensors.index.json", weight_map=kept)
    assert unpriced(sharded, cache).endswith(
        "is in none of the model's 5 weight files, model-00000-of-00005.safetensors to "
        "model-00005-of-00005.safetensors; fetch them and their index again"
    )
    assert "tensor model.layers.2." in unpriced(sharded, cache)


def test_weights_of_another_size_than_the_config_says_are_named_before_anything_is_loaded(
    sharded: Path, cache: Path
) -> None:
    change_json(sharded / "config.json", intermediate_size=32)
    assert (
        "tensor model.layers.0.mlp.down_proj.weight in model-00001-of-00005.safetensors has shape [16, 24], "
        "the config asks for [16, 32]" in unpriced(sharded, cache)
    )


def unpriced(directory: Path, cache: Path) -> str:
    """What a peer says that is about to choose its layers."""
    import torch

    from peer.weights import span_prices

    with pytest.raises(BrokenModel) as caught:
        span_prices(resolve(directory, cache), torch.float32)
    return str(caught.value)


def test_a_file_that_changed_since_the_model_was_described_is_named_before_it_is_loaded(
    sharded: Path, cache: Path
) -> None:
    source = resolve(sharded, cache)
    names = [name for name in weights() if name.startswith("model.layers.1.")]
    source.fetch_tensors(names)
    spoil_quietly(sharded / "model-00002-of-00005.safetensors")
    with pytest.raises(
        BrokenModel,
        match=r"model-00002-of-00005\.safetensors was changed since .* SHA-256 was [0-9a-f]{16}\.\.\. and",
    ):
        source.fetch_tensors(names)
    source.fetch_tensors(
        [name for name in weights() if name.startswith("model.layers.2.")]
    )  # the others are sound


def test_a_file_that_changed_between_two_starts_is_another_model(sharded: Path, cache: Path) -> None:
    before = resolve(sharded, cache).fingerprint
    spoil_quietly(sharded / "model-00002-of-00005.safetensors")
    assert resolve(sharded, cache).fingerprint != before


def spoil_quietly(path: Path) -> None:
    """One bit, and the time of change put back."""
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    while path.stat().st_ctime_ns == state.st_ctime_ns:  # a clock that ticks every few milliseconds
        path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns


def test_no_tokenizer(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer (tokenizer.json" in refusal(model, cache, ModelNotFound)
    (model / "tokenizer_config.json").unlink()
    assert "has no tokenizer (tokenizer.json" in refusal(model, cache, ModelNotFound)


def test_a_revision_of_a_directory_makes_no_sense(model: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match="--revision is for models of the hub"):
        resolve(model, cache, revision="main")


def test_describing_a_model_imports_no_torch_before_its_first_refusal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {}}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    program = (
        "import sys\nfrom pathlib import Path\nfrom peer.source import resolve_model\n"
        "from swarm.errors import UnsupportedModel\n"
        f"try: resolve_model({str(tmp_path)!r}, cache=Path({str(tmp_path / 'c')!r}))\n"
        "except UnsupportedModel: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 5000, "can't be read"),
        (b'{"model_type": ' + b"9" * 5000 + b"}", "can't be read"),
        (b"\xff", "isn't text"),
        (b"[]", "isn't a JSON object"),
    ],
)
def test_a_config_that_no_json_reader_takes_is_refused(model: Path, cache: Path, content: bytes, words: str) -> None:
    (model / "config.json").write_bytes(content)
    assert words in refusal(model, cache, BrokenModel)


def test_a_config_larger_than_any_is_refused_unread(model: Path, cache: Path) -> None:
    with (model / "config.json").open("ab") as file:
        file.truncate((512 << 10) + 1)
    assert "524,288 are accepted" in refusal(model, cache, BrokenModel)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1 << 31}, {"text_config": {"n_layer": 4097}}])
def test_a_model_of_a_thousand_million_layers_is_refused_before_anything_is_as_long(
    model: Path, cache: Path, change: dict[str, object]
) -> None:
    change_json(model / "config.json", **change)
    assert "4,096 are accepted" in refusal(model, cache, BrokenModel)
