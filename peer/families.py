"""Which models can be served, and what they keep per position. Needs a config, and nothing that must be fetched."""

from __future__ import annotations

from enum import Enum

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.errors import UnsupportedModel


class Way(Enum):
    """How a model's steps run.

    PACKED: rows of several sessions as one row, through our attention function.
    ALONE: through our attention function, but a row at a time: a token's place depends on the text's length.
    OWN_CACHE: a row at a time, through the family's own attention and masks.
    """

    PACKED = "packed"
    ALONE = "alone"
    OWN_CACHE = "own cache"


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


def windows(config: PretrainedConfig) -> list[int | None]:
    """How many positions a token of each layer attends to, itself included, as transformers' masks have it."""
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        sliding = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [sliding] * config.num_hidden_layers
    return [sliding if kind == "sliding_attention" else None for kind in layer_types]


def depends_on_length(config: PretrainedConfig) -> bool:
    """Whether a token's position encoding depends on how long the text is: then no two sessions share a row."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    return bool(kinds & BATCH_DEPENDENT_ROPE)
