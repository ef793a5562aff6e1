"""A GGUF file of the llama architecture, converted once into Hugging Face layout with float32 weights.

For `peer.smollm2` only: serving any GGUF file directly is a later step. The result equals what
transformers reads from the same file, tensor by tensor and token by token (tests compare them); tensors
are done here because transformers needs accelerate for it, and three times the memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp stores the rows of each query
and key head with their two rotary halves interleaved; transformers wants the halves one after the other.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.checkpoint import Progress

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert(gguf: Path, target: Path, report: Progress) -> None:
    """Write the model into the existing directory `target`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    config = _config(reader)
    weights: dict[str, np.ndarray] = {}
    done, total = 0, sum(int(tensor.n_elements) * 4 for tensor in reader.tensors)
    for tensor in reader.tensors:
        weights[_name(tensor.name)] = _values(tensor, config)
        done += int(tensor.n_elements) * 4
        report(f"converting {gguf.name}", done, total)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    weights.clear()
    _write_json(target / "config.json", config)
    stops = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(target / "generation_config.json", stops)
    size = gguf.stat().st_size
    report("converting its tokenizer", 0, size)
    _write_tokenizer(gguf, target)
    report("converting its tokenizer", size, size)
    for path in target.iterdir():
        _flush(path)


def _config(reader: GGUFReader) -> dict[str, Any]:
    def field(key: str) -> Any:
        found = reader.get_field(key)
        return None if found is None else found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise ValueError(f"a GGUF of architecture {architecture!r}, where llama is needed")
    names = {tensor.name for tensor in reader.tensors}
    heads = field("llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv") or heads,
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base") or 10000.0},
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _name(gguf_name: str) -> str:
    layer = _LAYER_TENSOR.fullmatch(gguf_name)
    if layer:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
    return _NAMES[gguf_name]


def _values(tensor: Any, config: dict[str, Any]) -> np.ndarray:
    import numpy as np
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if ".attn_q." in tensor.name:
        values = _halves_apart(values, config["num_attention_heads"])
    elif ".attn_k." in tensor.name:
        values = _halves_apart(values, config["num_key_value_heads"])
    return np.ascontiguousarray(values)


def _halves_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """[heads * size, width]: each head's rows 0, h, 1, h + 1, ... back in order, h = size / 2."""
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(gguf: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _flush(path: Path) -> None:
    """Onto the disk, so that the rename that follows never survives a power loss without the content."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
