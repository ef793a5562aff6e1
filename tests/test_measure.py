"""A span that can't work is told before it serves."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from peer.compiled import MOST_TOKENS, WITHOUT_AMX
from peer.measure import TRIAL_TOKENS, check_it_runs
from routing.spans import Span
from swarm.errors import BrokenModel
from tests.tiny import COMMON, loaded, random_model, tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_span_runs(family: str, dtype: torch.dtype) -> None:
    for span in (Span(0, 2), Span(2, 4), Span(4, 6)):
        check_it_runs(loaded(tiny_model(family), span, dtype))


@pytest.mark.parametrize("span", [Span(0, 2), Span(2, 6)])
def test_weights_that_are_no_numbers_are_told(span: Span) -> None:
    model = tiny_model("llama")
    model.model.layers[span.start].mlp.down_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(BrokenModel, match=f"layers {span} give nothing that is a number for any of 4 tokens"):
        check_it_runs(loaded(model, span))


@pytest.mark.parametrize("span", [Span(0, 6), Span(5, 6)])
def test_a_head_that_gives_no_numbers_is_told(span: Span) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data[90] = torch.nan
    with pytest.raises(BrokenModel, match=f"layers {span} give nothing that is a number for any of 4 tokens"):
        check_it_runs(loaded(model, span))
    check_it_runs(loaded(model, Span(0, 5)))


def test_a_trial_prefill_runs_as_long_prompts_do() -> None:
    assert max(map(max, (MOST_TOKENS | WITHOUT_AMX).values())) < TRIAL_TOKENS


def test_one_strange_token_is_none_of_the_others_business() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.weight.data[0] = torch.nan
    check_it_runs(loaded(model, Span(0, 6)))


def test_numbers_too_large_for_float16_are_told_with_the_remedy() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data *= 1e8
    with pytest.raises(BrokenModel, match=r"too large for float16 .try --dtype bfloat16"):
        check_it_runs(loaded(model, Span(0, 2), torch.float16))
    check_it_runs(loaded(model, Span(0, 2), torch.bfloat16))


def test_a_config_that_sends_tokens_to_more_experts_than_there_are_is_told() -> None:
    config = CONFIG_MAPPING["mixtral"](**{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 9})
    with pytest.raises(BrokenModel, match=r"layers 0-1 can't take a step .*: the model's config doesn't fit"):
        check_it_runs(loaded(random_model(config), Span(0, 2)))
