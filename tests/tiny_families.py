"""A tiny random model of every family that is served: what tests/test_families.py runs and docs/models.md lists.

Everything that a config asks for beyond the plainest decoder is named in `shows`, in the words of docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from peer.families import Way
from tests.tiny import COMMON, LAYERS

WINDOW = 6  # positions, shorter than all but the start of the texts
FEATURES = (
    GROUPED := "grouped-query",
    MULTI_QUERY := "multi-query",
    MLA := "MLA",
    WINDOWS := "sliding window",
    CHUNKS := "chunked attention",
    SINKS := "attention sinks",
    SOFT_CAPS := "soft-capping",
    QK_NORM := "q/k norm",
    LEARNED := "learned positions",
    SINUSOIDS := "sinusoidal positions",
    ALIBI := "ALiBi",
    NO_POSITIONS := "layers without positions",
    SCALED_ROPE := "rope scaled by length",
    EXPERTS := "MoE",
    PARALLEL := "parallel attention and MLP",
    TIED := "tied head",
)  # in the order in which docs/models.md names them


@dataclass(frozen=True)
class Case:
    """One tiny model. differs: from `COMMON`. shows: what it covers. attention: of the uncut model.
    way: how it runs with the newest transformers that was tested."""

    family: str
    differs: dict[str, Any]
    shows: tuple[str, ...]
    attention: str | None = "eager"
    way: Way = Way.PACKED

    @property
    def name(self) -> str:
        return "-".join((self.family, *(word.replace(" ", "_") for word in self.shows)))

    @property
    def exists(self) -> bool:
        """Whether this transformers has the family."""
        return self.family in CONFIG_MAPPING

    def config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.family](**{**COMMON, **self.differs})


def case(
    family: str, *shows: str, attention: str | None = "eager", way: Way = Way.PACKED, **differs: Any
) -> Case:
    return Case(family, differs, shows, attention, way)


def own(family: str, *shows: str, attention: str | None = "eager", **differs: Any) -> Case:
    """One that runs through its own attention and masks."""
    return case(family, *shows, attention=attention, way=Way.OWN_CACHE, **differs)


# what many families call their experts
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}

CASES: tuple[Case, ...] = (
    case("afmoe", GROUPED, EXPERTS, WINDOWS, QK_NORM, head_dim=16, num_dense_layers=1, **MIXED, **MOE),
    case("apertus", GROUPED, QK_NORM),
    case("arcee", GROUPED),
    case("aria_text", GROUPED, EXPERTS, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    case("biogpt", LEARNED, TIED, num_key_value_heads=None),
    case("bitnet", GROUPED),
    own("bloom", ALIBI, TIED, n_layer=LAYERS, n_head=4),
    case("codegen", n_positions=128, n_ctx=128, n_embd=32, n_layer=LAYERS, n_head=4, rotary_dim=4),
    case("cohere", GROUPED, TIED, PARALLEL),
    case("cohere2", GROUPED, WINDOWS, NO_POSITIONS, TIED, PARALLEL, head_dim=8, **MIXED),
    case("cohere2_moe", GROUPED, EXPERTS, WINDOWS, TIED, head_dim=8, **MIXED, **MOE),
    case("cwm", GROUPED, WINDOWS, head_dim=8, **MIXED, **ROTARY),
    case("deepseek_v2", MLA, EXPERTS, **LATENT, **MOE, n_shared_experts=1, **GROUPS, first_k_dense_replace=1),
    case("deepseek_v3", MLA, EXPERTS, **LATENT, **MOE, n_group=2, topk_group=1, first_k_dense_replace=2),
    own("diffllama", GROUPED),
    case("dots1", GROUPED, EXPERTS, head_dim=8, n_shared_experts=1, **GROUPS, first_k_dense_replace=1, **MOE),
    case("ernie4_5", GROUPED, TIED, head_dim=8),
    case("ernie4_5_moe", GROUPED, EXPERTS, TIED, moe_num_experts=4, moe_k=2, moe_intermediate_size=24,
         moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=LAYERS - 1),
    case("exaone4", GROUPED, WINDOWS, NO_POSITIONS, QK_NORM, **MIXED),
    case("exaone_moe", GROUPED, EXPERTS, WINDOWS, **MIXED, head_dim=8, **GROUPS, **MOE),
    own("falcon", MULTI_QUERY, TIED, PARALLEL, multi_query=True),
    # its eager attention adds ALiBi twice, so here the uncut model has what transformers chooses
    own("falcon", ALIBI, attention=None, alibi=True, new_decoder_architecture=True, num_kv_heads=2,
         tie_word_embeddings=False),
    case("flex_olmo", GROUPED, EXPERTS, QK_NORM, **MOE),
    case("gemma", MULTI_QUERY, TIED, head_dim=16, num_key_value_heads=1),
    case("gemma2", GROUPED, WINDOWS, SOFT_CAPS, TIED, head_dim=16, **SLIDING, query_pre_attn_scalar=16,
         attn_logit_softcapping=5.0),
    case("gemma3_text", GROUPED, WINDOWS, QK_NORM, TIED, head_dim=16, **SLIDING, query_pre_attn_scalar=16),
    case("gemma4_text", GROUPED, WINDOWS, QK_NORM, TIED, head_dim=16, global_head_dim=16, **MIXED,
         hidden_size_per_layer_input=0, num_kv_shared_layers=0, vocab_size_per_layer_input=97),
    case("glm", GROUPED, head_dim=8),
    case("glm4", GROUPED, head_dim=16),
    case("glm4_moe", GROUPED, EXPERTS, head_dim=16, **GROUPS, first_k_dense_replace=1, **MOE),
    case("glm4_moe_lite", MLA, EXPERTS, **LATENT, **MOE, **GROUPS),
    case("gpt2", LEARNED, TIED, num_key_value_heads=None),
    case("gpt_bigcode", MULTI_QUERY, LEARNED, TIED),
    own("gpt_neo", WINDOWS, LEARNED, TIED, num_layers=LAYERS, num_heads=4,
         attention_types=[[["global", "local"], LAYERS // 2]], window_size=WINDOW),
    case("gpt_neox", PARALLEL, rotary_pct=0.5, num_key_value_heads=None),
    own("gpt_neox_japanese", TIED, num_key_value_heads=None),
    case("gpt_oss", GROUPED, EXPERTS, WINDOWS, SINKS, head_dim=16, **SLIDING, **MOE),
    case("gptj", PARALLEL, n_positions=128, n_embd=32, n_layer=LAYERS, n_head=4, rotary_dim=4),
    case("granite", GROUPED, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7),
    case("granitemoe", GROUPED, EXPERTS, **MOE),
    case("granitemoeshared", GROUPED, EXPERTS, shared_intermediate_size=24, **MOE),
    case("helium", GROUPED, head_dim=8),
    case("hunyuan_v1_dense", GROUPED, QK_NORM, head_dim=16, **ROTARY),
    case("hunyuan_v1_moe", GROUPED, EXPERTS, QK_NORM, head_dim=16, moe_topk=2, **ROTARY, **MOE),
    case("hy_v3", GROUPED, EXPERTS, head_dim=8, **MOE),
    case("hyperclovax", GROUPED),
    case("internlm3", GROUPED, head_dim=8),
    case("iquestcoder", GROUPED, head_dim=8),
    case("jais2", GROUPED, head_dim=8),
    own("jetmoe", GROUPED, EXPERTS, TIED, kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    case("llama", GROUPED),
    case("llama", MULTI_QUERY, TIED, tie_word_embeddings=True, num_key_value_heads=1),
    case("llama", GROUPED, SCALED_ROPE, way=Way.ALONE, max_position_embeddings=16,
         rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    case("llama4_text", GROUPED, EXPERTS, CHUNKS, NO_POSITIONS, head_dim=8, attention_chunk_size=WINDOW, floor_scale=4,
         attn_scale=0.5, intermediate_size_mlp=48, no_rope_layers=[1, 0, 1, 1, 0, 1],
         interleave_moe_layer_step=2, **MOE),
    case("mimo_v2_flash", GROUPED, EXPERTS, WINDOWS, SINKS, head_dim=12, v_head_dim=8, swa_head_dim=12,
         swa_v_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, **MIXED, **GROUPS, **MOE),
    case("minicpm3", MLA, TIED, **LATENT),
    case("minimax_m2", GROUPED, EXPERTS, QK_NORM, head_dim=8, rotary_dim=4, **MOE),
    case("ministral", GROUPED, WINDOWS, head_dim=8, **MIXED, **ROTARY),
    case("ministral3", GROUPED, head_dim=8),
    case("mistral", GROUPED, WINDOWS, **SLIDING),
    case("mixtral", GROUPED, EXPERTS, WINDOWS, **SLIDING, **MOE),
    own("mpt", ALIBI, TIED, n_layers=LAYERS, d_model=32, n_heads=4, max_seq_len=128, expansion_ratio=2),
    case("nanochat", GROUPED, QK_NORM),
    case("nemotron", GROUPED),
    case("olmo", GROUPED),
    case("olmo2", GROUPED, QK_NORM),
    case("olmo3", GROUPED, WINDOWS, QK_NORM, **MIXED),
    case("olmoe", GROUPED, EXPERTS, QK_NORM, **MOE),
    case("opt", LEARNED, TIED, ffn_dim=48, word_embed_proj_dim=16, num_key_value_heads=None),
    case("persimmon", QK_NORM, num_key_value_heads=None),
    case("phi", GROUPED, PARALLEL),
    case("phi3", GROUPED),
    case("phi3", GROUPED, SCALED_ROPE, way=Way.ALONE, original_max_position_embeddings=16,
         rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
                          "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16}),
    case("phimoe", GROUPED, EXPERTS, WINDOWS, **SLIDING, **MOE),
    case("qwen2", GROUPED),
    case("qwen2", GROUPED, WINDOWS, TIED, tie_word_embeddings=True, use_sliding_window=True, **SLIDING,
         max_window_layers=3),
    case("qwen2_moe", GROUPED, EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=2, **MOE),
    case("qwen3", GROUPED, QK_NORM, head_dim=16),
    case("qwen3_moe", GROUPED, EXPERTS, QK_NORM, head_dim=16, **MOE),
    case("sarvam_mla", MLA, EXPERTS, **LATENT, **MOE, **GROUPS, first_k_dense_replace=1),
    case("seed_oss", GROUPED, head_dim=16),
    case("smollm3", GROUPED, NO_POSITIONS, TIED, no_rope_layer_interval=3),
    case("solar_open", GROUPED, EXPERTS, head_dim=8, **GROUPS, **MOE),
    case("stablelm", GROUPED, partial_rotary_factor=0.5),
    case("starcoder2", GROUPED, WINDOWS, TIED, **SLIDING),
    case("vaultgemma", GROUPED, WINDOWS, SOFT_CAPS, TIED, head_dim=16, query_pre_attn_scalar=16, **MIXED),
    own("xglm", SINUSOIDS, TIED, num_layers=LAYERS, attention_heads=4, d_model=32, ffn_dim=48),
    case("youtu", MLA, TIED, **LATENT),
)  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """One kind of model that can't be served yet. reason: what is said of it. such_as: families of the kind."""

    kind: str
    family: str
    reason: str
    such_as: str
    differs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '_')}-{self.family}"

    def config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.family](**self.differs)


_CROSS, _STATE = "it has cross-attention to an encoder", "its layers keep other state than keys and values"
_HYBRIDS = "Qwen3-Next, Qwen3.5, Jamba, Bamba, Granite 4 hybrids, Falcon H1, Zamba, Nemotron H, MiniMax-01, Kimi Linear"
_SPARSE, _SHARED = "DeepSeek V3.2 and V4, GLM 5 DSA", "Gemma 3n, the Gemma 4 E-variants"

REFUSED: tuple[Refused, ...] = (
    Refused("encoder and decoder", "t5", _CROSS, "T5, BART, Whisper, Marian"),
    Refused("cross-attention layers", "mllama", _CROSS, "Llama 3.2 Vision"),
    Refused("recurrent state", "mamba", _STATE, "Mamba, RWKV, xLSTM"),
    Refused("recurrent state", "rwkv", "it keeps recurrent state besides keys and values", "Mamba, RWKV, xLSTM"),
    Refused("recurrent layers among others", "qwen3_next", f"{_STATE} (linear_attention)", _HYBRIDS),
    Refused("recurrent layers among others", "falcon_h1", f"{_STATE} (hybrid)", _HYBRIDS),
    Refused("convolutions", "lfm2", f"{_STATE} (conv)", "LFM2",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    Refused("an index beside the keys", "deepseek_v32", _STATE, _SPARSE),
    Refused("keys shared across layers", "gemma3n_text", "its layers share keys and values", _SHARED),
    Refused("token ids at each layer", "gemma4_text", "each of its layers takes the tokens' ids", _SHARED),
    Refused("attention in both directions", "bert", "it attends in both directions", "BERT, RoBERTa, EmbeddingGemma"),
    Refused("attention in both directions", "gemma3_text", "it attends in both directions",
            "BERT, RoBERTa, EmbeddingGemma", {"use_bidirectional_attention": True}),
    Refused("language model only inside a larger one", "qwen2_vl", "transformers has no causal language model for it",
            "Qwen2-VL, Qwen3-VL, GLM-4V"),
    Refused("no cache", "openai-gpt", "its layers keep no keys and values in transformers' cache", "GPT (the first)"),
    Refused("layers run more than once", "hrm_text", "it has no list of 4 layers to split", "HRM"),
    Refused("not what its parts are", "ctrl", "cut into spans, doesn't give the numbers of the whole", "CTRL"),
)  # fmt: skip
