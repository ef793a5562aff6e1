"""Tiny random models of several families, and a checkpoint over a real safetensors file of one."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from peer.checkpoint import TensorSpec
from peer.model import SpanModel
from peer.weights import load_span
from routing.spans import Span

LAYERS = 6
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name -> (transformers' model type, what differs from COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5, "num_key_value_heads": None}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ("gpt2", {"num_key_value_heads": None}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
}


def tiny_config(family: str) -> PretrainedConfig:
    kind, differs = TINY[family]
    return CONFIG_MAPPING[kind](**{**COMMON, **differs})


def tiny_model(family: str, seed: int = 7) -> PreTrainedModel:
    return random_model(tiny_config(family), seed)


def random_model(config: PretrainedConfig, seed: int = 7, attention: str | None = "eager") -> PreTrainedModel:
    """The uncut model. Weights are larger than transformers' own initial ones, so that errors show."""
    torch.manual_seed(seed)
    # eager: the one implementation that honours soft-capping and sinks in every release
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The same in float32, with numbers that bfloat16 has, as in models that are published in it. In place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def read_headers(folder: Path) -> dict[str, TensorSpec]:
    """The tensors of all safetensors files in a folder."""
    specs = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                specs[name] = TensorSpec(entry["dtype"], tuple(entry["shape"]), stop - start, path.name)
    return specs


class FolderCheckpoint:
    """What `peer/source.py` does, as far as `weights.py` cares."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self.folder, self.config, self.tensors = folder, config, read_headers(folder)

    def path(self, file: str) -> Path:
        return self.folder / file


class MemoryCheckpoint(FolderCheckpoint):
    """A model saved as transformers saves it, in a folder that `close` removes. stored: as what (None: as it is)."""

    def __init__(self, model: PreTrainedModel, stored: torch.dtype | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        (model if stored is None else copy.deepcopy(model).to(stored)).save_pretrained(self._temporary.name)
        super().__init__(Path(self._temporary.name), model.config)

    def close(self) -> None:
        self._temporary.cleanup()


def loaded(
    model: PreTrainedModel, span: Span, dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None
) -> SpanModel:
    """These layers of it, as a peer loads them."""
    checkpoint = MemoryCheckpoint(model, stored)
    try:
        return load_span(checkpoint, span, dtype)
    finally:
        checkpoint.close()
