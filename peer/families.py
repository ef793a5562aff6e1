"""Which models can be served, and what they keep per position. Needs a config, and nothing that must be fetched."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from peer.cache import LayerKV
from swarm.errors import UnsupportedModel

# Attention that keeps nothing but keys and values, by transformers' names for layer types.
KV_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary scalings whose frequencies depend on the longest sequence in the batch.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_supported(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel with the reason. Needs the config only, so nothing was downloaded."""
    reason = _reason_against(config)
    if reason is not None:
        raise UnsupportedModel(f"a {config.model_type} model can't be served: {reason}")


def _reason_against(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has cross-attention to an encoder"
    if config.get_text_config(decoder=True) is not config:
        return "it is multimodal, and only its text part could be split"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised in a way that can't be read yet"
    foreign = set(getattr(config, "layer_types", None) or ()) - KV_LAYER_TYPES
    if foreign:
        return f"its layers keep other state than keys and values ({', '.join(sorted(foreign))})"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values, so they can't be split at any layer"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "it attends in both directions"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False):
        return "it keeps recurrent state besides keys and values"
    if not getattr(cls, "_supports_attention_backend", False):
        return "its attention doesn't go through transformers' attention interface"
    return None


def kv_layers(config: PretrainedConfig) -> list[LayerKV]:
    """What each of all layers stores per position."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):
        heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA as transformers computes it: per head, decompressed
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        kv = LayerKV(config.num_attention_heads, key_dim, config.v_head_dim)
    else:
        kv = LayerKV(heads, head_dim, head_dim)
    return [kv] * config.num_hidden_layers


def packs_sessions(config: PretrainedConfig) -> bool:
    """False where a token's position encoding depends on the other sessions in the step."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    return not kinds & BATCH_DEPENDENT_ROPE
