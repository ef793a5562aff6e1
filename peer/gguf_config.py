"""From what a GGUF file says of its model to transformers' config of it.

A GGUF states the shape of a model under llama.cpp's keys, one function an architecture turns them into a
config (`ARCHITECTURES`). What the keys leave out is taken from the tensors, or is what llama.cpp computes for
every model of that architecture. transformers has such tables too, as far as they go these agree with them;
they leave out what a model can do without for a few words (rotary scaling, windows, soft caps, widths of
experts), and take the config class's default there, which is right for one model only.

Numbers come from strangers: each is bounded by what the tensors really are before a model is built of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peer.checkpoint import broken
from peer.gguf_header import GgufArray, Value
from swarm.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Config = dict[str, object]

MAX_COUNT = 1 << 31  # no length, width or number of heads comes near
MAX_LAYERS = 1_024  # the deepest that anybody shares have 126
MAX_HEAD = 1 << 16  # tables of rotary frequencies are really allocated; the widest head there is has 512
# How Llama 3's scaling is computed but for its factor, in all models that have it. A GGUF holds the result.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
LLAMA3_TOLERANCE = 1e-4  # the result was stored in float32
GEMMA_LOCAL_THETA = 10_000.0  # llama.cpp's for the window layers of gemma 3, whose files don't state it

# Keys that change what is computed, each of which only the architectures that read it below know.
TELLING = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "expert_shared_count",
    "expert_weights_scale",
    "final_logit_softcapping",
    "leading_dense_block_count",
    "logit_scale",
    "nextn_predict_layers",
    "residual_scale",
)


class Facts:
    """What a file's metadata and tensors say, typed. Every getter raises BrokenModel for nonsense.

    shapes: of the tensors, slowest dimension first. values: the numbers of a small float32 tensor.
    """

    def __init__(
        self,
        file: str,
        metadata: Mapping[str, Value],
        shapes: Mapping[str, tuple[int, ...]],
        values: Callable[[str], Sequence[float]],
    ) -> None:
        self.file, self.metadata, self.shapes, self.values = file, metadata, shapes, values
        self.architecture = self.text("general.architecture")
        self._asked: set[str] = set()

    def text(self, key: str, default: str | None = None) -> str:
        """Of a whole key."""
        found = self.metadata.get(key, default)
        if not isinstance(found, str):
            raise broken(self.file, f"its metadata has no text {key}")
        return found

    def token(self, which: str) -> int | None:
        """A token's id; None where there is none, for which some writers put a huge number."""
        found = self.metadata.get(f"tokenizer.ggml.{which}_token_id")
        return found if type(found) is int and 0 <= found < self.vocabulary[0] else None

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Tokens and width, which are the embedding's shape whatever the metadata says."""
        shape = self.shapes.get("token_embd.weight", ())
        if len(shape) != 2 or not all(shape):
            raise broken(self.file, "it has no token_embd.weight, so no embedding")
        return shape[0], shape[1]

    def has(self, name: str) -> bool:
        """Whether layer 0 has such a tensor."""
        return f"blk.0.{name}" in self.shapes

    def given(self, key: str) -> bool:
        """Whether the metadata has a key of the architecture."""
        return self._find(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things, at least 0. Layers that differ in it can't be served."""
        found = self._find(key)
        found = default if found is None else found
        if isinstance(found, tuple) and len(set(found)) == 1:
            found = found[0]
        if isinstance(found, tuple | GgufArray):
            raise UnsupportedModel(
                f"{self.file} can't be served: its layers differ in {self.architecture}.{key}"
            )
        if type(found) is not int or not 0 <= found < MAX_COUNT:
            raise broken(self.file, f"{self.architecture}.{key} is {found!r}, where a count is needed")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self._find(key)
        found = default if found is None else found
        if type(found) not in (int, float) or not math.isfinite(found):  # type: ignore[arg-type]
            raise broken(self.file, f"{self.architecture}.{key} is {found!r}, where a number is needed")
        return float(found)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        found = self._find(key)
        return found if isinstance(found, bool) else default

    def refuse_what_was_not_asked(self) -> None:
        """Raises UnsupportedModel for a key that would change what is computed and that nobody read."""
        for key in TELLING:
            if key not in self._asked and self._find(key):
                raise UnsupportedModel(
                    f"{self.file} can't be served: its {self.architecture}.{key} is "
                    f"{self._find(key)}, which transformers' model of that kind doesn't know"
                )
        if not self.flag("attention.causal", True):
            raise UnsupportedModel(f"{self.file} can't be served: it attends in both directions")

    def _find(self, key: str) -> Value | None:
        self._asked.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """gguf: its name in the gguf package's tables. types: transformers' model types that `config` names."""

    gguf: str
    types: tuple[str, ...]
    config: Callable[[Facts], Config]


def load_gguf_config(facts: Facts) -> PretrainedConfig:
    """transformers' config of a described file. Raises BrokenModel, or UnsupportedModel with the reason."""
    known = ARCHITECTURES.get(facts.architecture)
    if known is None:
        raise UnsupportedModel(
            f"{facts.file} is a {facts.architecture} model, and of GGUF files these can be served: "
            f"{', '.join(sorted(ARCHITECTURES))}; use the same model in Hugging Face layout, if that can be"
        )
    _check_layers(facts)
    raw = known.config(facts) | _tokens(facts)
    facts.refuse_what_was_not_asked()

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(raw.pop("model_type"))
    try:
        return CONFIG_MAPPING[model_type](**raw)
    except Exception as error:  # what a config class raises on bad values is not ours to list
        fault = " ".join(str(error).split())[:200]
        raise broken(facts.file, f"its metadata makes no {model_type} model ({fault})") from error


def _check_layers(facts: Facts) -> None:
    """Before anything is built for each of them: a layer for each number up to the count."""
    said = facts.count("block_count")
    there = {name.split(".")[1] for name in facts.shapes if name.startswith("blk.")}
    if not 1 <= said <= MAX_LAYERS or {str(i) for i in range(min(said, len(there) + 1))} != there:
        raise broken(facts.file, f"it claims {said:,} layers and holds tensors of {len(there):,}")


def _tokens(facts: Facts) -> Config:
    """Ids, stated even where there are none: a config class's default is another model's."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return {f"{ours}_token_id": facts.token(theirs) for theirs, ours in names.items()}


# ---------------------------------------------------------------- what most architectures share


def _decoder(facts: Facts, model_type: str) -> Config:
    """Names that most config classes share."""
    vocabulary, width = facts.vocabulary
    heads = facts.count("attention.head_count")
    if facts.count("embedding_length") != width or not 0 < heads <= width:
        raise broken(
            facts.file,
            f"its metadata says {heads:,} heads and a width of {facts.count('embedding_length'):,}, "
            f"its embedding is {width:,} wide",
        )
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": facts.count("feed_forward_length", 0),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "max_position_embeddings": facts.count("context_length"),
        "tie_word_embeddings": "output.weight" not in facts.shapes,
        "rope_parameters": _rope(facts),
    }


def _rms(facts: Facts) -> Config:
    return {"rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon")}


def _head_dim(facts: Facts) -> int:
    """Numbers in a head's key."""
    heads, width = facts.count("attention.head_count"), facts.vocabulary[1]
    keys = facts.count("attention.key_length", 0)
    if not keys and facts.architecture == "llama":
        keys = facts.count("rope.dimension_count", 0)  # all of a head is rotated, and old files say no more
    keys = keys or width // heads
    values = facts.count("attention.value_length", keys)
    if values != keys:
        raise UnsupportedModel(
            f"{facts.file} can't be served: its heads have keys of {keys} and values of {values} numbers"
        )
    if not 0 < keys <= MAX_HEAD:
        raise broken(facts.file, f"its metadata says heads of {keys:,} numbers")
    return keys


def _rotated(facts: Facts) -> int:
    """How many numbers of a head are rotated."""
    rotated = facts.count("rope.dimension_count", _head_dim(facts))
    if rotated > _head_dim(facts):
        raise broken(
            facts.file, f"its metadata rotates {rotated:,} numbers of heads that have {_head_dim(facts):,}"
        )
    return rotated


def _partly(facts: Facts) -> Config:
    """Rotary positions in a part of each head."""
    return {"rope_parameters": _rope(facts) | {"partial_rotary_factor": _rotated(facts) / _head_dim(facts)}}


def _experts(facts: Facts) -> int:
    """How many there are, as the tensors say."""
    shape = facts.shapes.get("blk.0.ffn_gate_exps.weight", ())
    said = facts.count("expert_count")
    if len(shape) != 3 or shape[0] != said:
        raise broken(
            facts.file, f"it claims {said:,} experts and blk.0.ffn_gate_exps.weight is {list(shape)}"
        )
    return said


def _rope(facts: Facts) -> Config:
    """Rotary positions. Source of the scalings: arXiv:2309.00071 (yarn), arXiv:2402.13753 (longrope)."""
    theta = facts.number("rope.freq_base", 10_000.0)
    if theta <= 0:
        raise broken(
            facts.file, f"{facts.architecture}.rope.freq_base is {theta}, where a number above 0 is needed"
        )
    plain: Config = {"rope_type": "default", "rope_theta": theta}
    if "rope_freqs.weight" in facts.shapes:
        return plain | _llama3(facts)
    if "rope_factors_long.weight" in facts.shapes:
        return plain | {
            "rope_type": "longrope",
            "long_factor": list(facts.values("rope_factors_long.weight")),
            "short_factor": list(facts.values("rope_factors_short.weight")),
            "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
        }
    kind = facts.text(f"{facts.architecture}.rope.scaling.type", "")
    if not kind and facts.given("rope.scale_linear"):  # as old files say it
        kind = "linear"
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    if kind in ("", "none") or factor in (0.0, 1.0):
        return plain
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return plain | {"rope_type": "yarn", "factor": factor} | _yarn(facts)
    raise UnsupportedModel(
        f"{facts.file} can't be served: its rotary scaling is of the unknown kind {kind!r}"
    )


def _yarn(facts: Facts) -> Config:
    original = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    names = {
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_attn_factor": "attention_factor",
    }
    given = {
        name: facts.number(f"rope.scaling.{key}")
        for key, name in names.items()
        if facts.given(f"rope.scaling.{key}")
    }
    return {"original_max_position_embeddings": original, **given}


def _llama3(facts: Facts) -> Config:
    """Which parameters make the stored divisors of frequencies: found, and checked by computing again."""
    stored = list(facts.values("rope_freqs.weight"))
    if 2 * len(stored) != _rotated(facts):
        raise broken(facts.file, f"its rope_freqs.weight has {len(stored)} numbers for {_rotated(facts)}")
    if all(divisor == 1.0 for divisor in stored):
        return {}
    factor = max(stored)
    original = facts.count("rope.scaling.original_context_length", LLAMA3_CONTEXT)
    theta = facts.number("rope.freq_base", 10_000.0)
    computed = [
        _llama3_divisor(factor, original, theta ** (2 * i / (2 * len(stored)))) for i in range(len(stored))
    ]
    if any(abs(a - b) > LLAMA3_TOLERANCE * b for a, b in zip(stored, computed, strict=True)):
        raise UnsupportedModel(
            f"{facts.file} can't be served: its rope_freqs.weight isn't the scaling of Llama 3, "
            "and transformers has no other that it could be"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }


def _llama3_divisor(factor: float, original: int, inverse_frequency: float) -> float:
    """https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, `apply_scaling`."""
    wavelength = 2 * math.pi * inverse_frequency
    if wavelength < original / LLAMA3_HIGH:
        return 1.0
    if wavelength > original / LLAMA3_LOW:
        return factor
    smooth = (original / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


# ---------------------------------------------------------------- one function an architecture


def _llama(facts: Facts) -> Config:
    """llama and mistral; with experts, mixtral."""
    config = _decoder(facts, "llama") | _rms(facts)
    config["head_dim"] = _head_dim(facts)
    if facts.count("expert_count", 0):
        return config | {
            "model_type": "mixtral",
            "num_local_experts": _experts(facts),
            "num_experts_per_tok": facts.count("expert_used_count"),
        }
    return config | {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_gate.bias")}


def _qwen2(facts: Facts) -> Config:
    return _decoder(facts, "qwen2") | _rms(facts)


def _qwen3(facts: Facts) -> Config:
    return _decoder(facts, "qwen3") | _rms(facts) | {"head_dim": _head_dim(facts)}


def _qwen_experts(facts: Facts) -> Config:
    width = facts.shapes.get("blk.0.ffn_gate_exps.weight", (0, 0))[1:2]
    return {
        "num_experts": _experts(facts),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length", *width),
    }


def _qwen2moe(facts: Facts) -> Config:
    shared = facts.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
    return (
        _decoder(facts, "qwen2_moe")
        | _rms(facts)
        | _qwen_experts(facts)
        | {"shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length", shared)}
    )


def _qwen3moe(facts: Facts) -> Config:
    """llama.cpp normalises the chosen experts' weights in every model of this kind."""
    own = {"head_dim": _head_dim(facts), "norm_topk_prob": True}
    return _decoder(facts, "qwen3_moe") | _rms(facts) | _qwen_experts(facts) | own


def _gemma(facts: Facts) -> Config:
    return _decoder(facts, "gemma") | _rms(facts) | {"head_dim": _head_dim(facts)}


def _gemma_scale(facts: Facts, largest: int) -> int:
    """What the attention's scale is the root of: in the model with most layers a width, else a head's."""
    heads, width = facts.count("attention.head_count"), facts.vocabulary[1]
    return width // heads if facts.count("block_count") == largest else _head_dim(facts)


def _gemma2(facts: Facts) -> Config:
    return _gemma(facts) | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _gemma_scale(facts, 46),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "sliding_window": facts.count("attention.sliding_window", 4096),
    }


def _gemma3(facts: Facts) -> Config:
    """Every sixth layer sees everything; the others have a window, and rotary positions of their own."""
    window = facts.count("attention.sliding_window", 0)
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)}
    layers = facts.count("block_count")
    full = [i % 6 == 5 or not window for i in range(layers)]
    cap = facts.number("final_logit_softcapping", 0.0)
    return _gemma(facts) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _gemma_scale(facts, 62),
        "final_logit_softcapping": cap or None,
        "sliding_window": window or None,
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "rope_parameters": {"full_attention": _rope(facts), "sliding_attention": local},
    }


def _phi3(facts: Facts) -> Config:
    window = facts.count("attention.sliding_window", 0)
    original = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    return (
        _decoder(facts, "phi3")
        | _rms(facts)
        | _partly(facts)
        | {
            "original_max_position_embeddings": original,
            "sliding_window": window or None,
        }
    )


def _gpt2(facts: Facts) -> Config:
    """Its positions are learned, so that there are as many as the table has rows."""
    config = _decoder(facts, "gpt2")
    positions = facts.shapes.get("position_embd.weight", (0,))[0]
    return {
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_positions": positions,
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _starcoder2(facts: Facts) -> Config:
    return _decoder(facts, "starcoder2") | {
        "norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "use_bias": facts.has("attn_q.bias"),
    }


def _stablelm(facts: Facts) -> Config:
    return (
        _decoder(facts, "stablelm")
        | _partly(facts)
        | {
            "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
            "use_qkv_bias": facts.has("attn_q.bias"),
            "qk_layernorm": facts.has("attn_q_norm.weight"),
            "use_parallel_residual": not facts.has("ffn_norm.weight"),
        }
    )


def _nemotron(facts: Facts) -> Config:
    return (
        _decoder(facts, "nemotron")
        | _partly(facts)
        | {
            "norm_eps": facts.number("attention.layer_norm_epsilon", 1e-5),
            "head_dim": _head_dim(facts),
            "attention_bias": facts.has("attn_q.bias"),
            "mlp_bias": facts.has("ffn_up.bias"),
        }
    )


def _falcon(facts: Facts) -> Config:
    """Two norms a layer: the newer kind (40B, 180B). llama.cpp reads no falcon with ALiBi."""
    config = _decoder(facts, "falcon")
    keys = config.pop("num_key_value_heads")
    config.pop("intermediate_size")
    two_norms = facts.has("attn_norm_2.weight")
    return config | {
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "new_decoder_architecture": two_norms or keys not in (1, config["num_attention_heads"]),
        "ffn_hidden_size": facts.count("feed_forward_length"),
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "bias": facts.has("attn_qkv.bias"),
    }


def _bloom(facts: Facts) -> Config:
    config = _decoder(facts, "bloom")
    return {
        "model_type": "bloom",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _gpt_oss(facts: Facts) -> Config:
    """transformers rounds no bounds of its yarn, and the windows are on every other layer."""
    rope = _rope(facts)
    if rope["rope_type"] == "yarn":
        rope |= {"truncate": False}
    return (
        _decoder(facts, "gpt_oss")
        | _rms(facts)
        | {
            "head_dim": _head_dim(facts),
            "intermediate_size": facts.count("expert_feed_forward_length"),
            "num_local_experts": _experts(facts),
            "num_experts_per_tok": facts.count("expert_used_count"),
            "sliding_window": facts.count("attention.sliding_window"),
            "rope_parameters": rope,
        }
    )


def _minimax_m2(facts: Facts) -> Config:
    return (
        _decoder(facts, "minimax_m2")
        | _rms(facts)
        | _partly(facts)
        | {
            "head_dim": _head_dim(facts),
            "intermediate_size": facts.count(
                "expert_feed_forward_length", facts.count("feed_forward_length", 0)
            ),
            "num_local_experts": _experts(facts),
            "num_experts_per_tok": facts.count("expert_used_count"),
        }
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    name: Architecture(name, types, config)
    for name, types, config in (
        ("bloom", ("bloom",), _bloom),
        ("falcon", ("falcon",), _falcon),
        ("gemma", ("gemma",), _gemma),
        ("gemma2", ("gemma2",), _gemma2),
        ("gemma3", ("gemma3_text",), _gemma3),
        ("gpt-oss", ("gpt_oss",), _gpt_oss),
        ("gpt2", ("gpt2",), _gpt2),
        ("llama", ("llama", "mixtral"), _llama),
        ("minimax-m2", ("minimax_m2",), _minimax_m2),
        ("nemotron", ("nemotron",), _nemotron),
        ("phi3", ("phi3",), _phi3),
        ("qwen2", ("qwen2",), _qwen2),
        ("qwen2moe", ("qwen2_moe",), _qwen2moe),
        ("qwen3", ("qwen3",), _qwen3),
        ("qwen3moe", ("qwen3_moe",), _qwen3moe),
        ("stablelm", ("stablelm",), _stablelm),
        ("starcoder2", ("starcoder2",), _starcoder2),
    )
}
