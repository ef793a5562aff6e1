"""A family that no test knows is tried on a small model of its shape, and refused with what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AttentionInterface

from peer import families, proof
from peer.attention import ATTENTION, packed_attention
from peer.families import Way, served_config
from peer.outline import outline
from peer.proof import proven_outline, shrunk
from swarm.errors import UnsupportedModel
from tests.chain import Chain
from tests.tiny import random_model, tiny_config

torch.set_num_threads(1)


@pytest.fixture
def nothing_is_tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every family is one that no test knows."""
    monkeypatch.setattr(proof, "FAMILIES", {})
    proof._proven.cache_clear()
    yield
    proof._proven.cache_clear()


FEW: dict[str, object] = {"num_hidden_layers": 6}


# as wide as they are published, or as wide as the class makes them: nothing of that size is ever made. Taking a model
# apart takes as long as it has layers, so only the first has as many as are published
@pytest.mark.usefixtures("nothing_is_tested")
@pytest.mark.parametrize(
    ("kind", "differs", "way"),
    [
        ("llama", {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
         Way.PACKED),
        ("gemma3_text", {"num_hidden_layers": 12}, Way.PACKED),
        ("mixtral", {**FEW, "sliding_window": 4096}, Way.PACKED),
        ("gpt_oss", FEW, Way.PACKED),
        ("gpt2", FEW, Way.PACKED),
        ("minicpm3", FEW, Way.PACKED),
        ("llama4_text", {"num_hidden_layers": 8}, Way.PACKED),
        ("phi3", {**FEW, "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48,
                                              "long_factor": [2.0] * 48,
                                              "original_max_position_embeddings": 4096}},
         Way.ALONE),
        ("bloom", {"n_layer": 6, "hidden_size": 1024, "n_head": 16}, Way.OWN_CACHE),
        ("falcon", FEW, Way.OWN_CACHE),
    ],
)  # fmt: skip
def test_a_family_that_no_test_knows_is_served_if_a_small_model_of_its_shape_is_right(
    kind: str, differs: dict[str, object], way: Way
) -> None:
    config = CONFIG_MAPPING[kind](**differs)
    plan = proven_outline(served_config(config))
    assert plan.way is way
    assert len(plan.layers) == config.num_hidden_layers


@pytest.mark.usefixtures("nothing_is_tested")
def test_attention_that_packs_wrongly_is_left_to_the_family_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", {})
    config = CONFIG_MAPPING["diffllama"]()
    assert outline(config).way is Way.PACKED  # as far as can be seen
    assert proven_outline(config).way is Way.OWN_CACHE


def test_a_family_outside_of_the_table_is_served_like_any_other() -> None:
    config = CONFIG_MAPPING["granite_swa"](
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = random_model(config)
    chain = Chain(model, cuts=[1])
    ids = [(5 * i + 2) % 97 for i in range(15)]
    ours = chain.step([(chain.open(15), 0, ids)])
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0]
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def off(*arguments: object, scaling: float, **keywords: object) -> object:
    return packed_attention(*arguments, scaling=scaling * 1.01, **keywords)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_is_tested")
def test_what_is_wrong_by_a_little_is_refused_with_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    assert proven_outline(config).way is Way.PACKED
    proof._proven.cache_clear()
    AttentionInterface.register(ATTENTION, off)
    try:
        assert proven_outline(config).way is Way.OWN_CACHE  # which our attention has no part in
        proof._proven.cache_clear()
        monkeypatch.setattr(proof, "Way", type("OnlyOne", (), {"OWN_CACHE": None}))  # nothing to fall back on
        with pytest.raises(UnsupportedModel, match=r"a llama model .* of the whole \(logits are off by \d\.\de-0\d of"):
            proven_outline(config)
    finally:
        AttentionInterface.register(ATTENTION, packed_attention)


def test_with_a_newer_transformers_than_was_tested_the_tested_families_are_tried_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(proof, "_shown_right", lambda config, way: tried.append(config.model_type))
    for newest in ("5.17", "5.999"):
        monkeypatch.setattr(proof, "TESTED_TRANSFORMERS", ("5.1", newest))
        monkeypatch.setattr(transformers, "__version__", "5.18.0")
        proof._proven.cache_clear()
        proven_outline(tiny_config("llama"))
    assert tried == ["llama"]  # with 5.18 after 5.17, not with 5.18 before 5.999


def test_a_tested_family_of_a_shape_that_can_not_be_tried_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "TESTED_TRANSFORMERS", ("5.1", "5.2"))
    monkeypatch.setattr(proof, "MOST_PARAMETERS", 0)
    proof._proven.cache_clear()
    assert proven_outline(tiny_config("llama")).way is Way.PACKED
    monkeypatch.setattr(proof, "FAMILIES", {})
    proof._proven.cache_clear()
    with pytest.raises(UnsupportedModel, match=r"no small model of its shape could be made .* \(it is too large\)"):
        proven_outline(tiny_config("llama"))
    proof._proven.cache_clear()


def test_a_trial_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    proof._shown_right(tiny_config("gpt2"), None)
    assert torch.equal(torch.rand(2), expected)


# ---------------------------------------------------------------- the small model


def test_widths_keep_their_proportions_and_heads_their_number() -> None:
    config = CONFIG_MAPPING["deepseek_v3"]()
    made = shrunk(config, 8)
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank",
              "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # fmt: skip
    for name in widths:
        assert getattr(made, name) == getattr(config, name) // 8, name
    assert made.num_attention_heads == config.num_attention_heads
    assert made.num_local_experts == 16  # two for each of eight groups
    assert made.first_k_dense_replace == 1


def test_every_kind_of_layer_is_in_the_small_model() -> None:
    kinds = ["sliding_attention"] * 9 + ["full_attention"]
    made = shrunk(CONFIG_MAPPING["gemma2"](num_hidden_layers=10, layer_types=kinds), 8)
    assert made.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert made.sliding_window < 9  # the shorter of the texts


def test_thresholds_are_shorter_than_the_texts() -> None:
    assert shrunk(CONFIG_MAPPING["llama4_text"](), 16).floor_scale == proof.THRESHOLD
    made = shrunk(CONFIG_MAPPING["minimax_m3_vl_text"](), 16)
    assert made.index_block_size * made.index_topk_blocks < 14
