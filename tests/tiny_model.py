"""A llama of a few kilobytes in Hugging Face layout, written without torch, for tests that handle files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, WIDTH, HEADS, VOCAB = 4, 16, 2, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(WIDTH, WIDTH)
        for name, shape in (("gate", (24, WIDTH)), ("up", (24, WIDTH)), ("down", (WIDTH, 24))):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}.{name}_layernorm.weight"] = matrix(WIDTH)
    tensors["model.norm.weight"] = matrix(WIDTH)
    tensors["lm_head.weight"] = matrix(VOCAB, WIDTH)
    return tensors


def write_tiny_model(directory: Path, *, sharded: bool = False, seed: int = 0) -> Path:
    """Config, tokenizer, template and weights: one file, or one for each layer and two for the ends."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 5], "bos_token_id": 1})
    write_tokenizer(directory)
    if not sharded:
        save_file(weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    shards: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in weights(seed).items():
        shards.setdefault(shard_of(name), {})[name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {}, "weight_map": {name: shard_of(name) for name in weights()}},
    )
    return directory


def shard_of(tensor: str) -> str:
    """The layer's own file; the embedding's and the head's are the first and the last."""
    parts = tensor.split(".")
    number = int(parts[2]) + 1 if parts[1] == "layers" else 0 if "embed" in tensor else LAYERS + 1
    return f"model-{number:05}-of-{LAYERS + 1:05}.safetensors"


def write_tokenizer(directory: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {letter: 3 + index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ")}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": TEMPLATE})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change_json(path: Path, **changes: object) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})
