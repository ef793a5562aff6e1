"""Configs out of GGUF metadata: what transformers makes of the same file, and what is said of nonsense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
from transformers import AutoConfig

from peer.gguf_config import ARCHITECTURES, Facts, load_gguf_config
from peer.gguf_header import GgufArray, Value, read_gguf_header
from swarm.errors import BrokenModel, ModelError, UnsupportedModel
from tests.gguf_files import FAMILIES, VOCABULARY, write_gguf


def facts_of(path: Path) -> Facts:
    header = read_gguf_header(path, path.name)
    rope = {name: tensor for name, tensor in header.tensors.items() if name.startswith("rope_")}

    def values(name: str) -> tuple[float, ...]:
        found = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
        assert name in rope
        return tuple(found.data.tolist())

    return Facts(path.name, header.metadata, {n: t.shape for n, t in header.tensors.items()}, values)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Facts]:
    folder, found = tmp_path_factory.mktemp("config"), {}
    for family in ("llama", "qwen2", "qwen3moe", "gemma3", "llama 3", "mixtral"):
        write_gguf(folder / f"{family}.gguf", family)
        found[family] = facts_of(folder / f"{family}.gguf")
    return found


def changed(facts: Facts, *, without: tuple[str, ...] = (), **changes: Value) -> Facts:
    """The same, with other metadata: `__` stands for a dot after the architecture's name."""
    metadata = {key: value for key, value in facts.metadata.items() if key not in without}
    for key, value in changes.items():
        metadata[f"{facts.architecture}.{key.replace('__', '.')}"] = value
    return Facts(facts.file, metadata, facts.shapes, facts.values)


def refusal(facts: Facts, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as caught:
        load_gguf_config(facts)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- against transformers --------------------------------------------------------------------------------

# What transformers' own tables leave to the config class, which is right for one checkpoint only.
LEFT_OUT = {
    "llama": {"attention_bias", "mlp_bias", "rope_parameters"},
    "gemma2": {"query_pre_attn_scalar"},
    "gemma3": {"query_pre_attn_scalar", "rope_parameters", "layer_types"},
    "qwen2moe": {"moe_intermediate_size", "shared_expert_intermediate_size"},
    "qwen3moe": {"moe_intermediate_size"},
    "phi3": {"sliding_window", "rope_parameters", "original_max_position_embeddings"},
    "gpt2": {"n_positions", "n_inner", "n_ctx", "feed_forward_length"},
    "starcoder2": {"rope_parameters"},
    "stablelm": {"qk_layernorm"},
    "nemotron": {"head_dim", "norm_eps"},
    "falcon": {
        "layer_norm_epsilon",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query",
        "new_decoder_architecture",
        "ffn_hidden_size",
        "intermediate_size",
    },
    "bloom": {"seq_length"},
    "minimax-m2": {"intermediate_size", "scoring_func", "use_routing_bias", "rope_parameters", "rotary_dim"},
}
UNTOLD = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "torch_dtype", "unk_token_id"}
BY_TRANSFORMERS = [family for family in FAMILIES if FAMILIES[family].gguf not in ("gemma", "gpt-oss")]


@pytest.mark.parametrize("family", [family for family in BY_TRANSFORMERS if family != "mixtral"])
def test_a_config_is_that_of_transformers_where_its_tables_go(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", family)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
    ours = load_gguf_config(facts_of(tmp_path / "tiny.gguf")).to_dict()
    left_out = UNTOLD | LEFT_OUT.get(FAMILIES[family].gguf, set())
    differ = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    assert differ <= left_out, {key: (ours.get(key), theirs.get(key)) for key in differ - left_out}


def test_every_architecture_has_a_family_in_these_tests() -> None:
    assert {family.gguf for family in FAMILIES.values()} == set(ARCHITECTURES)


# -- what is refused -------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_refused_with_those_that_are_known(files: Mapping[str, Facts]) -> None:
    metadata = {**files["llama"].metadata, "general.architecture": "mamba"}
    facts = Facts("x.gguf", metadata, files["llama"].shapes, files["llama"].values)
    text = refusal(facts, UnsupportedModel)
    assert text.startswith(
        "x.gguf is a mamba model, and of GGUF files these can be served: bloom, falcon, gemma, "
    )
    assert "llama" in text and "starcoder2" in text and "Hugging Face layout" in text


def test_a_file_without_an_architecture_is_broken(files: Mapping[str, Facts]) -> None:
    with pytest.raises(BrokenModel, match=r"no text general\.architecture"):
        changed(files["llama"], without=("general.architecture",))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"block_count": 1_000_000}, "claims 1,000,000 layers and holds tensors of 3"),
        ({"block_count": 2}, "claims 2 layers and holds tensors of 3"),
        ({"block_count": 0}, "claims 0 layers"),
        ({"block_count": -3}, "llama.block_count is -3, where a count is needed"),
        ({"block_count": 3.0}, "llama.block_count is 3.0"),
        ({"block_count": True}, "llama.block_count is True"),
        ({"block_count": "3"}, "llama.block_count is '3'"),
        ({"embedding_length": 128}, "a width of 128, its embedding is 64 wide"),
        ({"attention__head_count": 0}, "says 0 heads"),
        ({"attention__head_count": 1 << 30}, "heads and a width of 64"),
        (
            {"attention__key_length": 1 << 30, "attention__value_length": 1 << 30},
            "heads of 1,073,741,824 numbers",
        ),
        ({"context_length": 1 << 62}, "llama.context_length is 4611686018427387904"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, where a number is needed"),
        ({"rope__freq_base": float("inf")}, "freq_base is inf"),
        ({"rope__freq_base": "ten"}, "freq_base is 'ten'"),
        ({"rope__freq_base": -1.0}, "freq_base is -1.0, where a number above 0 is needed"),
        ({"rope__freq_base": 0.0}, "freq_base is 0.0, where a number above 0 is needed"),
        (
            {"rope__dimension_count": 32, "attention__key_length": 16},
            "rotates 32 numbers of heads that have 16",
        ),
    ],
)
def test_nonsense_is_refused_with_the_fact(
    change: dict[str, Value], fact: str, files: Mapping[str, Facts]
) -> None:
    facts = files["llama 3"] if "dimension_count" in str(change) else files["llama"]
    assert fact in refusal(changed(facts, **change), BrokenModel)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"attention__head_count_kv": (1, 2, 2)}, "its layers differ in llama.attention.head_count_kv"),
        ({"attention__head_count": GgufArray(2_000, strings=False)}, "its layers differ in"),
        ({"attention__key_length": 16, "attention__value_length": 8}, "keys of 16 and values of 8"),
        ({"rope__scaling__type": "strange", "rope__scaling__factor": 2.0}, "of the unknown kind 'strange'"),
        ({"attention__causal": False}, "attends in both directions"),
        ({"attention__sliding_window": 4096}, "attention.sliding_window is 4096, which transformers'"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    ],
)
def test_what_transformers_model_cannot_do_is_refused(
    change: dict[str, Value], fact: str, files: Mapping[str, Facts]
) -> None:
    assert fact in refusal(changed(files["llama"], **change), UnsupportedModel)


def test_a_thousand_layers_and_more_are_refused_even_where_the_file_has_them(
    files: Mapping[str, Facts],
) -> None:
    """Each is built, in Python's time."""
    small = files["llama"]
    shapes = {**small.shapes, **{f"blk.{i}.attn_norm.weight": (64,) for i in range(1_025)}}
    deep = changed(small, block_count=1_025)
    assert "claims 1,025 layers" in refusal(Facts("x", deep.metadata, shapes, deep.values), BrokenModel)


def test_layers_that_agree_may_say_so_each(files: Mapping[str, Facts]) -> None:
    config = load_gguf_config(changed(files["llama"], attention__head_count_kv=(2, 2, 2)))
    assert config.num_key_value_heads == 2


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "context_length", "embedding_length"])
def test_a_missing_count_is_named(key: str, files: Mapping[str, Facts]) -> None:
    text = refusal(changed(files["llama"], without=(f"llama.{key}",)), BrokenModel)
    assert f"llama.{key} is None, where a count is needed" in text


def test_experts_that_the_tensors_lack_are_refused(files: Mapping[str, Facts]) -> None:
    text = refusal(changed(files["qwen3moe"], expert_count=1 << 20), BrokenModel)
    assert "claims 1,048,576 experts and blk.0.ffn_gate_exps.weight is [4, 32, 64]" in text


def test_a_rotary_scaling_that_is_not_llama_3s_is_refused(files: Mapping[str, Facts]) -> None:
    right = files["llama 3"]

    def other(name: str) -> list[float]:
        return [value * 1.01 if value > 1 else value for value in right.values(name)]

    facts = Facts(right.file, right.metadata, right.shapes, other)
    load_gguf_config(right)
    assert "isn't the scaling of Llama 3" in refusal(facts, UnsupportedModel)


def test_rotary_divisors_that_divide_nothing_are_no_scaling(files: Mapping[str, Facts]) -> None:
    right = files["llama 3"]
    facts = Facts(right.file, right.metadata, right.shapes, lambda name: [1.0] * len(right.values(name)))
    assert load_gguf_config(facts).rope_parameters["rope_type"] == "default"


def test_ids_outside_the_vocabulary_are_none(files: Mapping[str, Facts]) -> None:
    metadata = {**files["llama"].metadata, "tokenizer.ggml.bos_token_id": VOCABULARY}
    config = load_gguf_config(Facts("x", metadata, files["llama"].shapes, files["llama"].values))
    assert (config.bos_token_id, config.eos_token_id) == (None, 2)


def test_the_largest_gemmas_scale_by_their_width(files: Mapping[str, Facts]) -> None:
    """llama.cpp: 1/sqrt(n_embd / n_head) for 27B, which has 62 layers (gemma 3), else 1/sqrt(head size)."""
    small = files["gemma3"]
    shapes = {
        name.replace("blk.0.", f"blk.{i}."): shape for i in range(62) for name, shape in small.shapes.items()
    }
    deep = changed(small, block_count=62)
    config = load_gguf_config(Facts(deep.file, deep.metadata, shapes, deep.values))
    assert (load_gguf_config(small).query_pre_attn_scalar, config.query_pre_attn_scalar) == (32, 64 // 4)
