"""The models that benchmarks run, each twice: a span of ours and transformers' own, over the same weights.

Both share one memory, so that neither the machine's memory nor its caches favour one of them. Random weights
in a published shape take no download.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from peer.held import assembled, can_widen, held_dtypes, move_buffers
from peer.model import SpanModel
from peer.outline import build_full, build_whole, put_tensor
from peer.proof import proven_outline
from peer.source import resolve_model
from peer.weights import load_span
from routing.spans import Span
from swarm.state import StateDir

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Published shapes (the models' config.json), and a small one of the same kind for tests
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
    },
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "tiny": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
    },
}
MODELS = ("smollm2", "llama-1b")
_BLOCK = 4_194_301  # prime, so that no two rows of a matrix start alike
_STD = 0.02  # as transformers initialises them


@dataclass(frozen=True)
class Both:
    """ours and theirs: the same weights. weight_bytes: what one token reads of them."""

    name: str
    ours: SpanModel
    theirs: PreTrainedModel
    weight_bytes: int


def load(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu", layers: int | None = None
) -> Both:
    """name: smollm2 (downloaded once), or one of SHAPES, with its first `layers` only."""
    ours = _real(dtype) if name == "smollm2" else _random(shape_config(name, layers), dtype, device)
    return Both(name, ours, _theirs(ours), _read_per_token(ours))


def shape_config(name: str, layers: int | None = None) -> LlamaConfig:
    shape = dict(SHAPES[name])
    shape["num_hidden_layers"] = min(shape["num_hidden_layers"], layers or shape["num_hidden_layers"])
    return LlamaConfig(**shape, max_position_embeddings=131072, rms_norm_eps=1e-5)


def _real(dtype: torch.dtype) -> SpanModel:
    source = resolve_model("smollm2", cache=StateDir.open(None).cache)
    return load_span(source, Span(0, source.layers), dtype)


def _random(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> SpanModel:
    """Held as it would be if it were published in bfloat16, as such models are."""
    plan = proven_outline(config)
    full = build_full(config, dtype, plan.way)
    widens = dtype == torch.float32 and torch.device(device).type == "cpu" and can_widen(config, full, plan)
    held = held_dtypes(full, dtype, torch.bfloat16 if widens else dtype)
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(_BLOCK).normal_(0.0, _STD, generator=generator)
    block = block.to(device, torch.bfloat16)  # the same weights in every dtype
    span = Span(0, len(plan.layers))
    return assembled(full, span, plan, held, dtype, device, lambda _, final: _fill(final, block))


def _theirs(ours: SpanModel) -> PreTrainedModel:
    """transformers' own model, with the attention that it chooses, over the tensors of ours where they are as wide."""
    plan = ours.outline
    theirs = build_whole(ours.config, attention=None)
    layers = f"{plan.layers_path}."
    for name in plan.names(ours.span):
        if name.startswith(layers):
            index, _, rest = name.removeprefix(layers).partition(".")
            tensor = ours.layers[int(index)].get_parameter(rest)
        else:
            tensor = ours.shell.get_parameter(plan.ties.get(name, name))
        put_tensor(theirs, plan, name, tensor.detach().to(ours.dtype))
    theirs.config.dtype = ours.dtype
    move_buffers(theirs, ours.device)
    return theirs


def _fill(tensor: Tensor, block: Tensor) -> None:
    """Norms are one, matrices the block over and over."""
    if tensor.ndim == 1:
        tensor.fill_(1.0)
        return
    flat = tensor.view(-1)
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])


def _read_per_token(model: SpanModel) -> int:
    """All weights, but of an embedding that isn't the head's one row only."""
    embedding, head = model.shell.get_input_embeddings().weight, model.shell.get_output_embeddings().weight
    apart = embedding.nbytes if embedding.data_ptr() != head.data_ptr() else 0
    return sum(parameter.nbytes for parameter in model.parameters()) - apart


def save_random(name: str, folder: Path) -> None:
    """A checkpoint of random weights in that shape, in bfloat16, as transformers lays it out, without a tokenizer."""
    _theirs(_random(shape_config(name), torch.bfloat16, "cpu")).save_pretrained(folder)
