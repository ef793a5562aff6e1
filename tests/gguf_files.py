"""Tiny models of transformers, written as GGUF files in the way in which llama.cpp's converter writes them.

What happens to names, tensors and numbers on the way follows https://github.com/ggml-org/llama.cpp, directory
`conversion`, one class a family; the product's code, which undoes it, has no part in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer import gguf_tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Kind = gguf.GGMLQuantizationType

VOCABULARY = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """gguf: llama.cpp's name. model_type, differs: of transformers' config. writes: metadata of its own."""

    gguf: str
    model_type: str
    differs: dict[str, Any] = field(default_factory=dict)
    writes: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None


def _experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _local_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _qwen_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


def _partly(writer: gguf.GGUFWriter, config: Any) -> None:
    part = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(part * config.hidden_size // config.num_attention_heads))


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    _partly(writer, config)
    writer.add_sliding_window(config.sliding_window or 0)
    original = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(original)


def _nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    _partly(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _stablelm(writer: gguf.GGUFWriter, config: Any) -> None:
    _partly(writer, config)
    writer.add_parallel_residual(config.use_parallel_residual)


def _gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    _local_experts(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    _local_experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _all_heads(writer: gguf.GGUFWriter, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)


def _mixtral(writer: gguf.GGUFWriter, config: Any) -> None:
    _all_heads(writer, config)
    _local_experts(writer, config)


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
    "long_factor": [1.0 + i / 3 for i in range(8)], "short_factor": [1.0 + i / 50 for i in range(8)],
}  # fmt: skip
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_HEAD = {"head_dim": 32}
_MHA = {"num_key_value_heads": None}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "llama", {"rms_norm_eps": 1e-5}, _all_heads),
    "llama, biased, wide heads": Family("llama", "llama", {"attention_bias": True, **_HEAD}, _all_heads),
    "llama 3": Family("llama", "llama", {"rope_parameters": _LLAMA3}, _all_heads),
    "llama, tied": Family("llama", "llama", {"tie_word_embeddings": True}, _all_heads),
    "llama with yarn": Family("llama", "llama", {"rope_parameters": _YARN}, _all_heads),
    "mixtral": Family("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, _mixtral),
    "qwen2": Family("qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": Family("qwen3", "qwen3", {"head_dim": 128}),
    "qwen2moe": Family(
        "qwen2moe",
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        _qwen_moe,
    ),
    "qwen3moe": Family(
        "qwen3moe",
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            **_HEAD,
        },
        _qwen_moe,
    ),
    "gemma": Family("gemma", "gemma", _HEAD),
    "gemma2": Family(
        "gemma2", "gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 32, **_HEAD}, _gemma2
    ),
    "gemma3": Family(
        "gemma3",
        "gemma3_text",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": _GEMMA3_ROPE,
            **_HEAD,
        },
        _gemma3,
    ),
    "phi3": Family("phi3", "phi3", {"sliding_window": 6}, _phi3),
    "phi3, long": Family("phi3", "phi3", {"rope_parameters": _LONG}, _phi3),
    "phi3, partly rotated": Family("phi3", "phi3", {"partial_rotary_factor": 0.75}, _phi3),
    "gpt2": Family("gpt2", "gpt2", {**_MHA, "n_inner": 256, "max_position_embeddings": 1024}),
    "starcoder2": Family(
        "starcoder2", "starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    ),
    "stablelm": Family(
        "stablelm", "stablelm", {"use_qkv_bias": True, "tie_word_embeddings": False}, _stablelm
    ),
    "stablelm, normed, parallel": Family(
        "stablelm", "stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, _stablelm
    ),
    "nemotron": Family("nemotron", "nemotron", {}, _nemotron),
    "falcon": Family("falcon", "falcon", {}),
    "falcon, new": Family("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": Family("bloom", "bloom", _MHA),
    "gpt-oss": Family(
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "intermediate_size": 64,
            **_HEAD,
        },
        _gpt_oss,
    ),
    "minimax-m2": Family(
        "minimax-m2",
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        _minimax,
    ),
}


def make_model(family: str, seed: int = 7) -> PreTrainedModel:
    """The model that is written. Weights are larger than transformers' initial ones, so that errors show."""
    torch.manual_seed(seed)
    known = FAMILIES[family]
    config = CONFIG_MAPPING[known.model_type](**{**COMMON, **known.differs})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return model.eval()


# ---------------------------------------------------------------- tensors, as the converter changes them


def converted(model: PreTrainedModel, family: str) -> dict[str, Array]:
    """Every tensor that the file gets, in float32, slowest dimension first."""
    known, config = FAMILIES[family], model.config
    state = model.state_dict()
    tied = bool(config.tie_word_embeddings)
    tensors = {name: value for name, value in state.items() if not (tied and name == "lm_head.weight")}
    names = _NamesOf(known.gguf, config.num_hidden_layers)
    made: dict[str, Array] = {}
    for name, value in tensors.items():
        for new, changed in _changed(name, value.float(), known, config):
            made[names(new)] = changed.contiguous().numpy()
    for name in ("q", "k"):  # norms of single heads: one tensor
        for layer in range(config.num_hidden_layers):
            heads = [key for key in state if f".{layer}.self_attn.{name}_layernorm.norms." in key]
            if heads:
                made[f"blk.{layer}.attn_{name}_norm.weight"] = torch.stack(
                    [state[key] for key in heads]
                ).numpy()
    return made


class _NamesOf:
    def __init__(self, arch: str, layers: int) -> None:
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        self._map = gguf.get_tensor_name_map(number, layers)

    def __call__(self, name: str) -> str:
        if name.startswith("blk."):
            return name
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found


def _changed(
    name: str, value: torch.Tensor, known: Family, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    arch = known.gguf
    if "_layernorm.norms." in name:
        return
    if arch == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
        value = _permute(value, config.num_attention_heads)
    if arch == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
        value = _permute(value, config.num_key_value_heads)
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        value = value + 1
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        value = value.transpose(1, 0)
    if arch == "bloom":
        name = name.replace("transformer.", "")
    if "query_key_value" in name:
        value = _bloom_qkv(value, config) if arch == "bloom" else _falcon_qkv(value, config)
    if name.endswith(("self_attn.sinks", "mlp.experts.down_proj")):
        value = value.transpose(1, 2) if arch == "gpt-oss" and value.ndim > 1 else value
        name += ".weight"
    if name.endswith("mlp.experts.down_proj_bias"):
        name = name.replace("down_proj_bias", "down_proj.bias")
    if ".mlp.experts.gate_up_proj" in name:
        yield from _gate_up(name, value, arch)
        return
    if name.endswith("e_score_correction_bias"):
        name = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    yield name, value.squeeze(0) if name.endswith("shared_expert_gate.weight") else value


def _permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _falcon_qkv(value: torch.Tensor, config: Any) -> torch.Tensor:
    heads = config.num_attention_heads
    kv = config.num_kv_heads if config.new_decoder_architecture else 1
    size = config.hidden_size // heads
    qkv = value.view(kv, heads // kv + 2, size, size * heads)
    q = qkv[:, :-2].reshape(heads * size, size * heads)
    k = qkv[:, [-2]].reshape(kv * size, size * heads)
    v = qkv[:, [-1]].reshape(kv * size, size * heads)
    return torch.cat((q, k, v)).reshape_as(value)


def _bloom_qkv(value: torch.Tensor, config: Any) -> torch.Tensor:
    width = config.hidden_size
    parts = value.reshape(config.n_head, 3, width // config.n_head, *value.shape[1:])
    return torch.cat([parts[:, i].reshape(-1, *value.shape[1:]) for i in range(3)])


def _gate_up(name: str, value: torch.Tensor, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    layer = name.split(".")[2]
    kind = "bias" if name.endswith("_bias") else "weight"
    if arch == "gpt-oss":
        value = value.transpose(1, 2) if kind == "weight" else value
        halves = (value[:, ::2], value[:, 1::2])
    else:
        halves = (value[:, : value.shape[1] // 2], value[:, value.shape[1] // 2 :])
    for which, half in zip(("gate", "up"), halves, strict=True):
        yield f"blk.{layer}.ffn_{which}_exps.{kind}", half


# ---------------------------------------------------------------- the file


def write_gguf(
    path: Path,
    family: str,
    kind: Kind = Kind.F32,
    *,
    model: PreTrainedModel | None = None,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    split: int = 0,
) -> PreTrainedModel:
    """Write a model, and return it as it was before. kind: of all matrices that it can hold.

    split: so many tensors a file; the files are then called path-00001-of-0000N.gguf.
    """
    model = model or make_model(family)
    known = FAMILIES[family]
    writer = gguf.GGUFWriter(path, known.gguf, split_max_tensors=split)
    writer.add_name("Tiny")
    _write_shape(writer, model.config)
    known.writes(writer, model.config)
    (vocabulary or write_vocabulary)(writer)
    for name, values in (_computed(model.config) | converted(model, family)).items():
        add_tensor(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, kind: Kind) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if values.ndim < 2 or values.shape[-1] % block or "ffn_gate_inp" in name or "position_embd" in name:
        kind = Kind.F32
    writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """`TextModel.set_gguf_parameters`, and what the classes of older families write instead of it."""

    def get(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(get("max_position_embeddings", "seq_length") or config.hidden_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(
        get("n_inner", "ffn_hidden_size", "intermediate_size") or 4 * config.hidden_size
    )
    writer.add_head_count(config.num_attention_heads)
    keys = get("num_kv_heads", "num_key_value_heads")
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        keys = 1
    if keys is not None and config.model_type != "gpt2":
        writer.add_head_count_kv(keys)
    if (eps := get("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := get("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if "head_dim" in vars(config) and config.head_dim is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type not in ("gpt2", "bloom", "falcon", "gemma", "gemma2"):
        _write_rope(writer, config)


def _write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_freq_base(rope["rope_theta"])


def _computed(config: Any) -> dict[str, Array]:
    """`generate_extra_tensors` of llama and phi3."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size = config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factors = rope["original_max_position_embeddings"], []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def convert_here(module: str, arguments: Sequence[str], *_: object) -> None:
    """In place of `run_child`: starting Python and torch anew takes longer than all conversions of a test."""
    assert module == "peer.gguf_tokenizer"
    gguf_tokenizer._convert(Path(arguments[0]), Path(arguments[1]), json.loads(arguments[2]))


# ---------------------------------------------------------------- vocabularies

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL, NORMAL, USER_DEFINED, BYTE, UNKNOWN = 3, 1, 4, 6, 2


def write_vocabulary(
    writer: gguf.GGUFWriter, pre: str = "default", ends: Sequence[str] = (), template: str = TEMPLATE
) -> None:
    """Byte-level, with a few merges. 0 to 2 are special; `ends` follow, at 3 and so on."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ends]
    letters = list(bytes_to_unicode().values())
    merges = ["t h", "th e", "Ġ c", "c a", "1 2", "12 3", "Ġ the"]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in merges), "<think>"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), VOCABULARY)]
    types = [NORMAL] * VOCABULARY
    types[: len(special)] = [CONTROL] * len(special)
    types[tokens.index("<think>")] = USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(template)
