"""The language model in a multimodal checkpoint is served from it, as people publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from peer.source import resolve_model
from swarm.errors import UnsupportedModel
from tests.chain import Chain, uncut_logits
from tests.tiny import COMMON
from tests.tiny_model import VOCAB, write_json, write_tokenizer

torch.set_num_threads(1)

TEXT: dict[str, Any] = {**COMMON, "vocab_size": VOCAB, "head_dim": 8, "num_hidden_layers": 4}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
LLAMA4 = {"attention_chunk_size": 6, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
LLAMA4_VISION = {
    "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip
# wrapper -> (text type, what differs there, vision type, what differs there)
WRAPPERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"sliding_window": 6}, "siglip_vision_model", {}),
    "idefics3": ("llama", {}, "idefics3_vision", {}),
    "llama4": ("llama4_text", LLAMA4, "llama4_vision_model", LLAMA4_VISION),
    "llava": ("llama", {}, "clip_vision_model", {"projection_dim": 16}),
    "mistral3": ("mistral", {"sliding_window": 6}, "pixtral", {"head_dim": 8}),
}


def wrapper(kind: str, **differs: Any) -> PreTrainedModel:
    text, of_text, vision, of_vision = WRAPPERS[kind]
    config = CONFIG_MAPPING[kind](
        text_config={**TEXT, "model_type": text, **of_text},
        vision_config={**VISION, "model_type": vision, **of_vision},
        **differs,
    )
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def published(model: PreTrainedModel, directory: Path) -> Path:
    """With the names that transformers writes, which are those of the first release of a family."""
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def published_as_in_memory(model: PreTrainedModel, directory: Path) -> Path:
    """With the names that modules have now, as some checkpoints are."""
    directory.mkdir()
    write_json(directory / "config.json", model.config.to_dict() | {"dtype": "float32"})
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    save_file(state, directory / "model.safetensors")
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("write", [published, published_as_in_memory])
@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_the_language_model_of_a_multimodal_checkpoint_is_served(kind: str, write: Any, tmp_path: Path) -> None:
    model = wrapper(kind)
    source = resolve_model(str(write(model, tmp_path / kind)), cache=tmp_path / "cache")
    assert source.config.model_type == WRAPPERS[kind][0]
    chain = Chain.of(source, cuts=[1, 3])
    ids = [(7 * i + i * i) % VOCAB for i in range(17)]
    caches = chain.open(len(ids))
    ours = torch.cat([chain.step([(caches, 0, ids[:12])]), chain.step([(caches, 12, ids[12:])])])
    # llama4's wrapper can't run without an image in transformers 5.24; its language model can
    exact = uncut_logits(model.language_model if kind == "llama4" else model, ids)
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()
    assert ours.argmax(-1).tolist() == exact.argmax(-1).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_stored_is_used_whatever_the_configs_say_of_ties(tied: bool, tmp_path: Path) -> None:
    model = wrapper("mistral3", tie_word_embeddings=tied)
    source = resolve_model(str(published(model, tmp_path / "m")), cache=tmp_path / "cache")
    chain = Chain.of(source, cuts=[])
    ids = [5, 9, 3, 60, 2]
    ours, exact = chain.step([(chain.open(5), 0, ids)]), uncut_logits(model, ids)
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_what_the_whole_says_of_the_end_of_a_text_holds_for_its_language_model(tmp_path: Path) -> None:
    model = wrapper("gemma3", eos_token_id=[1, 7])
    source = resolve_model(str(published(model, tmp_path / "m")), cache=tmp_path / "cache")
    assert b'"eos_token_ids": [1, 7]' in source.tokenizer_files()["model.json"]


def test_a_language_model_that_transformers_has_only_inside_is_refused(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen2_vl"]()
    write_json(tmp_path / "config.json", config.to_dict())
    write_tokenizer(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="a qwen2_vl model can't be served: transformers has no causal language"):
        resolve_model(str(tmp_path), cache=tmp_path / "cache")
