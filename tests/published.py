"""Tiny checkpoints written in exactly the layout in which quantised models are published.

Names, shapes and configs as in openai/gpt-oss-20b and deepseek-ai/DeepSeek-V3; the arithmetic of quantising is
written here in numpy, apart from what reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.tiny_model import VOCAB, write_json, write_tokenizer

BLOCK = 128
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}

GPT_OSS: dict[str, Any] = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "attention_bias": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False},
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}
# no matrix of more than BLOCK rows or columns ends in half a block: transformers stretches the blocks of those
DEEPSEEK_V3: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "factor": 40, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def publish_gpt_oss(directory: Path) -> Path:
    """Experts' matrices as blocks and scales, everything else in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in unquantised(GPT_OSS, directory).items():
        if name.endswith("_proj") and ".experts." in name:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    return write(directory, GPT_OSS, tensors)


def publish_deepseek_v3(directory: Path) -> Path:
    """Linear layers in blocks of fp8, everything else as it is, and one layer more, for predicting a second token."""
    layers, tensors = DEEPSEEK_V3["num_hidden_layers"], dict[str, Tensor]()
    plain = unquantised(DEEPSEEK_V3, directory)
    last = f"model.layers.{layers - 1}."
    plain |= {
        name.replace(last, f"model.layers.{layers}."): t for name, t in plain.items() if name.startswith(last)
    }
    width = DEEPSEEK_V3["hidden_size"]
    plain |= {f"model.layers.{layers}.{name}.weight": torch.randn(width) for name in ("enorm", "hnorm")}
    plain[f"model.layers.{layers}.eh_proj.weight"] = torch.randn(width, 2 * width)
    plain[f"model.layers.{layers}.embed_tokens.weight"] = torch.randn(VOCAB, width)
    plain[f"model.layers.{layers}.shared_head.head.weight"] = torch.randn(VOCAB, width)
    for name, tensor in plain.items():
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8(tensor)
        else:
            tensors[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    return write(directory, DEEPSEEK_V3, tensors)


def unquantised(config: dict[str, Any], directory: Path) -> dict[str, Tensor]:
    """A random model's float32 tensors, named as transformers publishes them."""
    torch.manual_seed(11)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[plain["model_type"]].from_dict(plain))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.1) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    made.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return tensors


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, in, out] -> blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]; OCP MX 1.0, 6.3."""
    rows = weight.numpy().transpose(0, 2, 1).astype(np.float64)
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 2  # 6 is 1.5 * 2 ** 2
    scaled = groups / 2.0**exponent
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1) | (np.signbit(scaled) * 8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = exponent[..., 0] + 127
    return torch.from_numpy(blocks.astype(np.uint8)), torch.from_numpy(scales.astype(np.uint8))


def fp8(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> e4m3 numbers and float32 scales, one for each block, the last ones ragged."""
    rows, columns = weight.shape
    grid = torch.ones(-(-rows // block), -(-columns // block))
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i, j in np.ndindex(*grid.shape):
        place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
        grid[i, j] = weight[place].abs().max() / 448.0
        numbers[place] = (weight[place] / grid[i, j]).to(torch.float8_e4m3fn)
    return numbers, grid


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 5) -> Path:
    """Config, tokenizer, index and shards: a boundary may fall between a weight and its scales."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    write_json(directory / "config.json", config)
    write_tokenizer(directory)
    names = sorted(tensors, key=_natural)
    size, weight_map = -(-len(names) // shards), dict[str, str]()
    for number in range(shards):
        file = f"model-{number:05}-of-{shards - 1:05}.safetensors"
        own = names[number * size : (number + 1) * size]
        save_file(
            {name: tensors[name].contiguous() for name in own}, directory / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(own, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return directory


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def stored(directory: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    for path in sorted(directory.glob("*.safetensors")):
        yield path, load_file(path)


def replace_tensors(directory: Path, changed: dict[str, Tensor | None]) -> None:
    """Write shards again with some tensors changed, or left out where None."""
    for path, tensors in stored(directory):
        if tensors.keys() & changed.keys():
            merged = {name: changed.get(name, tensor) for name, tensor in tensors.items()}
            save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, path)


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())
