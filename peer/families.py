"""Which models can be served, and the one table of what families need that isn't seen by itself.

A family is a `model_type` of transformers. Almost everything about it is seen when its model is taken apart
(`outline.py`): where its layers are, what they keep per position, whether their attention goes through transformers'
interface. `FAMILIES` holds what tests/test_families.py tests, and beside each name only what isn't seen. A family
that isn't in it is tried on a small random model first (`proof.py`).

What can't work is refused by what its config and class say, with the reason, before anything was fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from peer.kv import LayerKV
from swarm.errors import UnsupportedModel

TESTED_TRANSFORMERS = ("5.17", "5.24")  # the oldest and the newest that the tests were run with

# Attention that keeps nothing but keys and values, by transformers' names for layer types.
KV_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Rotary scalings whose frequencies depend on how long the text is.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class Way(Enum):
    """How a model's steps run.

    PACKED: rows of several sessions as one row, through our attention function.
    ALONE: through our attention function, but a row at a time: a token's place depends on the text's length.
    OWN_CACHE: a row at a time, through the family's own attention and masks, over the same KV.
    """

    PACKED = "packed"
    ALONE = "alone"
    OWN_CACHE = "own cache"


@dataclass(frozen=True, slots=True)
class Family:
    """What differs. why: for people, if anything does.

    way: None for the best that its code allows. kv: of every layer, where attention can't be reached on meta.
    counts_from_cache: takes positions from the cache's length even where it is given them.
    tested_from: the oldest tested transformers that has it.
    """

    why: str = ""
    way: Way | None = None
    kv: Callable[[PretrainedConfig], LayerKV] | None = None
    counts_from_cache: bool = False
    tested_from: str = TESTED_TRANSFORMERS[0]


_PLAIN = Family()
_NEWEST = Family(tested_from=TESTED_TRANSFORMERS[1])

# fmt: off
FAMILIES: dict[str, Family] = {
    **dict.fromkeys((
        "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "bloom", "codegen", "cohere",
        "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
        "exaone4", "exaone_moe", "falcon", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text",
        "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
        "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoeshared", "helium",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "llama", "mimo_v2_flash",
        "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nanochat",
        "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
        "vaultgemma", "xglm", "youtu",
    ), _PLAIN),
    **dict.fromkeys(("internlm3", "iquestcoder", "sarvam_mla"), _NEWEST),
    "diffllama": Family("its attention runs twice over one layer's keys", way=Way.OWN_CACHE),
    "jetmoe": Family(
        "the experts of its attention share their keys",
        way=Way.OWN_CACHE,
        kv=lambda config: LayerKV(config.num_key_value_heads, config.kv_channels, config.kv_channels),
    ),
    "llama4_text": Family("it scales queries by positions that it counts in its cache", counts_from_cache=True),
}
# fmt: on


def family(config: PretrainedConfig) -> Family:
    return FAMILIES.get(config.model_type, _PLAIN)


# ---------------------------------------------------------------- what can't be served


def served_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model in `config`'s model: of a multimodal one, its text part's.

    Raises UnsupportedModel with the reason. Needs nothing but the config.
    """
    if config.is_encoder_decoder:
        raise refused(config, "it has cross-attention to an encoder")
    text = config.get_text_config(decoder=True)
    reason = _reason_against(text)
    if reason is not None:
        raise refused(config, reason)
    if text is not config:
        text = copy.deepcopy(text)
        for name in ("bos_token_id", "eos_token_id", "dtype"):  # what is said of the whole holds for its text
            if getattr(config, name, None) is not None:
                object.__setattr__(text, name, getattr(config, name))
    return text


def refused(config: PretrainedConfig, reason: str) -> UnsupportedModel:
    """The error for a model that can't be served."""
    return UnsupportedModel(
        f"a {config.model_type} model can't be served: {reason}; docs/models.md lists families that can"
    )


def _reason_against(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder or _says(config, "add_cross_attention", "cross_attention_layers"):
        return "it has cross-attention to an encoder"
    if _says(config, "quantization_config"):
        return "its weights are quantised in a way that can't be read yet"
    if _says(config, "num_kv_shared_layers") or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        return "its layers share keys and values, so they can't be split at any layer"
    if _says(config, "hidden_size_per_layer_input"):
        return "each of its layers takes the tokens' ids, which a peer of later layers doesn't get"
    foreign = set(getattr(config, "layer_types", None) or ()) - KV_LAYER_TYPES
    if foreign:
        return f"its layers keep other state than keys and values ({', '.join(sorted(foreign))})"
    both = getattr(config, "use_bidirectional_attention", None)
    if not getattr(config, "is_causal", True) or both in (True, "all"):
        return "it attends in both directions"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        return "it keeps recurrent state besides keys and values"
    return None


def _says(config: PretrainedConfig, *names: str) -> bool:
    return any(getattr(config, name, None) for name in names)


def original_context(config: PretrainedConfig) -> int | None:
    """In texts longer than that all positions are encoded differently, so no two sessions share a row. None where the
    encoding of a position doesn't depend on how long the text is."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # or one for each type of layer
    originals = [
        # dynamic NTK scales what is beyond the config's own limit, which no session exceeds
        config.max_position_embeddings
        if each["rope_type"] == "dynamic"
        else each["original_max_position_embeddings"]
        for each in kinds
        if each.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
    return min(originals, default=None)
