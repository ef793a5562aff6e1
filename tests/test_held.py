"""Matrices published in bfloat16 where a peer computes in float32: which stay so, what they cost, and the numbers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from peer import held, matrix
from peer.attention import Row
from peer.compiled import BFLOAT16, FLOAT32
from peer.matrix import Matrix, WideningLinear, widen_as_read
from peer.model import PackedStep, SpanModel
from peer.weights import load_span, span_prices
from routing.spans import Span
from tests.tiny import COMMON, LAYERS, FolderCheckpoint, MemoryCheckpoint, random_model, rounded, tiny_model

torch.set_num_threads(1)
WHOLE = Span(0, LAYERS)


@pytest.fixture(params=["llama", "llama-tied", "qwen2", "qwen3", "mistral-window", "llama-biased"])
def published(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, MemoryCheckpoint]]:
    """transformers' own model in float32, and the checkpoint in bfloat16 that has the same numbers."""
    made = tiny_model(request.param)
    checkpoint = MemoryCheckpoint(rounded(made), torch.bfloat16)
    yield made, checkpoint
    checkpoint.close()


def matrices(model: SpanModel) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim > 1]


# ---------------------------------------------------------------- which, and what they cost


def test_matrices_stay_as_they_are_published_and_cost_half(
    published: tuple[PreTrainedModel, MemoryCheckpoint],
) -> None:
    theirs, checkpoint = published
    prices = span_prices(checkpoint, torch.float32)
    assert prices.weight_dtype == torch.bfloat16
    for span in (WHOLE, Span(0, 2), Span(2, 5), Span(4, LAYERS)):
        model = load_span(checkpoint, span, torch.float32)
        assert model.dtype == torch.float32 and {one.dtype for one in matrices(model)} == {torch.bfloat16}
        assert prices(span) == sum(one.nbytes for one in model.parameters())
    numbers = {id(p): p for p in theirs.parameters()}.values()
    assert prices(WHOLE) == sum(p.numel() * (2 if p.ndim > 1 else 4) for p in numbers)


@pytest.mark.parametrize("family", ["granite", "olmo2", "gemma2", "mixtral", "gpt2", "gpt-neox", "phi3"])
def test_families_that_no_loop_runs_are_widened_as_they_are_loaded(family: str) -> None:
    """granite has the parts of a Llama, but not its numbers: only the small model shows that."""
    checkpoint = MemoryCheckpoint(tiny_model(family), torch.bfloat16)
    assert span_prices(checkpoint, torch.float32).weight_dtype == torch.float32
    model = load_span(checkpoint, WHOLE, torch.float32)
    checkpoint.close()
    assert {one.dtype for one in matrices(model)} == {torch.float32}


@pytest.mark.parametrize(("context", "kept"), [(8192, torch.bfloat16), (262144, torch.float32)])
def test_a_family_is_tried_up_to_the_end_of_its_context(context: int, kept: torch.dtype) -> None:
    """Ministral 3's queries grow from position 16,384 on, which only its modules know."""
    scaling = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    scaling |= {"original_max_position_embeddings": 16384}
    differs = {"head_dim": 8, "rope_parameters": scaling, "max_position_embeddings": context}
    checkpoint = MemoryCheckpoint(random_model(CONFIG_MAPPING["ministral3"](**{**COMMON, **differs})), torch.bfloat16)
    assert span_prices(checkpoint, torch.float32).weight_dtype == kept
    fused = load_span(checkpoint, WHOLE, torch.float32).fused
    assert (fused is not None) == (kept == torch.bfloat16)
    checkpoint.close()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [100.0, 300.0, 1000.0])
def test_large_biases_of_keys_are_no_reason_to_leave_the_loops(size: float, stored: torch.dtype) -> None:
    """As Qwen 2.5 has them: scores are so large that float32's rounding of them moves what is seen."""
    wide = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model(CONFIG_MAPPING["qwen2"](**{**COMMON, **wide, "max_position_embeddings": 32768}))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(0.0, size)
        layer.self_attn.q_proj.bias.data.normal_(0.0, 20.0)
    checkpoint = MemoryCheckpoint(model, stored)
    fused = load_span(checkpoint, WHOLE, torch.float32).fused
    checkpoint.close()
    assert fused is not None and fused.compiled is not None


@pytest.mark.parametrize(
    ("stored", "dtype", "device"),
    [
        (torch.float32, torch.float32, "cpu"),
        (torch.float16, torch.float32, "cpu"),  # which bfloat16 can't hold
        (torch.float32, torch.bfloat16, "cpu"),
        (torch.bfloat16, torch.bfloat16, "cpu"),
        (torch.bfloat16, torch.float16, "cpu"),
        (torch.bfloat16, torch.float32, "cuda"),
    ],
)
def test_all_else_is_held_as_it_is_computed_with(stored: torch.dtype, dtype: torch.dtype, device: str) -> None:
    checkpoint = MemoryCheckpoint(tiny_model("llama"), stored)
    assert span_prices(checkpoint, dtype, device).weight_dtype == dtype
    checkpoint.close()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.down_proj.weight"])
def test_one_matrix_that_comes_in_float32_keeps_all_in_it(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].float()}, file)
    checkpoint = FolderCheckpoint(tmp_path, model.config)
    assert span_prices(checkpoint, torch.float32).weight_dtype == torch.float32
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].float()}, file)  # that is no matrix
    assert span_prices(FolderCheckpoint(tmp_path, model.config), torch.float32).weight_dtype == torch.bfloat16


def test_where_no_loop_can_be_compiled_all_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = MemoryCheckpoint(tiny_model("llama"), torch.bfloat16)
    monkeypatch.setattr(held, "prepare", lambda *_: None)
    assert span_prices(checkpoint, torch.float32).weight_dtype == torch.float32
    checkpoint.close()


@pytest.mark.parametrize(
    ("family", "compiles"), [("llama", True), ("granite", True), ("gpt2", False), ("mixtral", False)]
)
def test_loops_are_compiled_before_memory_is_counted_and_only_for_layers_like_llamas(
    family: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[torch.dtype, torch.dtype]]()
    monkeypatch.setattr(held, "prepare", lambda *dtypes: asked.append(dtypes))
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "cuda")):
        checkpoint = MemoryCheckpoint(tiny_model(family))
        span_prices(checkpoint, dtype, device)
        checkpoint.close()
    assert asked == ([FLOAT32, BFLOAT16] if compiles else [])


# ---------------------------------------------------------------- the numbers


def run(model: SpanModel, ids: Tensor, steps: Sequence[int], fused: bool = True) -> Tensor:
    """Logits of all tokens, in steps of so many."""
    cache, position, logits = model.new_cache(len(ids)), 0, []
    for tokens in steps:
        step = PackedStep(model.span, [Row(cache, position, tokens, tokens)], ids=ids[position : position + tokens])
        logits.append(model.run(step, model.fused if fused else None).logits)
        position += tokens
    assert position == len(ids) and None not in logits
    return torch.cat(logits)


def test_the_numbers_are_those_of_transformers_in_float32(
    published: tuple[PreTrainedModel, MemoryCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of compiled loops, of long steps by pieces that don't divide the matrices, and of the modules."""
    monkeypatch.setattr(matrix, "PIECE_ROWS", 5)
    theirs, checkpoint = published
    model = load_span(checkpoint, WHOLE, torch.float32)
    assert model.fused is not None and model.fused.compiled is not None
    ids = torch.randint(model.vocab, (120,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        right = theirs(ids[None]).logits[0]
    limit = 1e-5 * right.abs().max()
    for steps in ([120], [70, *10 * [1], 40], [20, 1, 9, 90], 30 * [4]):
        assert (run(model, ids, steps) - right).abs().max() <= limit, steps
        assert (run(model, ids, steps, fused=False) - right).abs().max() <= limit, steps


def test_the_last_layer_of_a_widened_prompt_goes_on_with_what_is_wanted() -> None:
    """None in the first piece, one in the second: keys and values of the others are there."""
    theirs = rounded(tiny_model("qwen3"))
    checkpoint = MemoryCheckpoint(theirs, torch.bfloat16)
    model = load_span(checkpoint, WHOLE, torch.float32)
    checkpoint.close()
    ids, cache = torch.arange(90) % model.vocab, model.new_cache(90)
    with torch.inference_mode():
        right = theirs(ids[None]).logits[0]
    for position, tokens, wanted in ((0, 70, 0), (70, 19, 1), (89, 1, 1)):
        step = PackedStep(model.span, [Row(cache, position, tokens, wanted)], ids=ids[position : position + tokens])
        logits = model.forward(step).logits
        if wanted:
            assert logits is not None and logits.shape == (1, model.vocab)
            assert (logits[0] - right[position + tokens - 1]).abs().max() <= 1e-5 * right.abs().max()


def test_a_model_whose_layers_dont_match_after_all_is_right_and_says_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = rounded(tiny_model("llama"))
    checkpoint = MemoryCheckpoint(theirs, torch.bfloat16)
    assert span_prices(checkpoint, torch.float32).weight_dtype == torch.bfloat16
    monkeypatch.setattr("peer.model.fuse", lambda _: None)
    with caplog.at_level(logging.WARNING):
        model = load_span(checkpoint, WHOLE, torch.float32)
    checkpoint.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "layers 0-5 run slowly: their matrices are widened for every token; try --dtype bfloat16"
    ids = torch.arange(30)
    with torch.inference_mode():
        right = theirs(ids[None]).logits[0]
    assert (run(model, ids, [20, 1, 9]) - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 7, 13])
def test_a_product_by_pieces_is_the_product(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(rows, 40, generator=generator).bfloat16(), torch.randn(9, 40, generator=generator)
    added, before = torch.randn(rows, generator=generator) if bias else None, torch.randn(9, rows, generator=generator)
    right = x.double() @ weight.double().t() + (0 if added is None else added.double())
    for limit, number in (("PIECE_ROWS", 6), ("PIECE_BYTES", 6 * 40 * 4), ("PIECE_BYTES", 1)):
        monkeypatch.setattr(matrix, limit, number)
        out, sums = torch.empty(9, rows), before.clone()
        assert Matrix(weight, added).into(x, out) is out and torch.allclose(out.double(), right, atol=1e-5)
        assert Matrix(weight, added).added_to(sums, x) is sums
        assert torch.allclose(sums.double(), before.double() + right, atol=1e-5)


def test_only_what_is_narrower_and_known_is_read_otherwise() -> None:
    class Scaled(nn.Embedding):
        pass

    made = nn.ModuleDict({"wide": nn.Linear(2, 2), "narrow": nn.Linear(2, 2).bfloat16(), "scaled": Scaled(2, 2)})
    made["scaled"].bfloat16()
    widen_as_read(made, torch.float32)
    assert [type(one) for one in made.values()] == [nn.Linear, WideningLinear, Scaled]
    widen_as_read(made, torch.bfloat16)
    assert type(made["wide"]) is nn.Linear  # routers are wider than the rest
