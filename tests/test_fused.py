"""Layers without their modules: only where the numbers are the same, and then really without copies."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from peer.attention import Row, StepSlot, _attend_plain
from peer.fused import TOLERANCE, Norm, TorchRows, join
from peer.kv import LayerKV, Reach
from peer.model import PackedStep, SpanModel
from routing.spans import Span
from tests.tiny import COMMON, loaded, random_model, tiny_config, tiny_model

torch.set_num_threads(1)


def whole(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> SpanModel:
    return loaded(model, Span(0, model.config.num_hidden_layers), dtype)


@pytest.mark.parametrize(
    ("family", "taken"),
    [
        ("llama", True),
        ("llama-tied", True),
        ("mistral-window", True),
        ("qwen2", True),  # with biases
        ("qwen3", True),  # with norms over each head
        ("granite", False),  # the same parts, but residuals are scaled
        ("gemma2", False),  # norms add one to their weights
        ("olmo2", False),  # norms after the parts, and over all heads
        ("phi3", False),  # one matrix already
        ("mixtral", False),
        ("gpt2", False),
    ],
)
def test_what_has_the_shape_and_the_numbers_runs_without_modules(family: str, taken: bool) -> None:
    assert (whole(tiny_model(family)).fused is not None) == taken


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sessions", [1, 3])
@pytest.mark.parametrize("way", ["torch", "long", "few"])
def test_sessions_get_what_the_modules_give(
    family: str, dtype: torch.dtype, sessions: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch's operations alone, with compiled ones between the products, and steps of few tokens as a whole."""
    if way == "torch":
        monkeypatch.setattr("peer.compiled.prepare", lambda *_: None)
    monkeypatch.setattr("peer.compiled._most_tokens", lambda *_, **__: 24 if way == "few" else 0)
    model = whole(tiny_model(family), dtype)
    assert model.fused is not None and (model.fused.compiled is None) == (dtype == torch.float16 or way == "torch")
    outputs = []
    for fused in (None, model.fused):
        caches = [model.new_cache(40) for _ in range(sessions)]
        made = []
        for position, tokens in ((0, 20), (20, 3), (23, 1), (24, 1), (25, 1)):
            rows = [Row(cache, position, tokens, logits=1) for cache in caches]
            ids = torch.arange(len(rows) * tokens) * 7 % model.vocab
            made.append(model.run(PackedStep(model.span, rows, ids=ids), fused))
        outputs.append(made)
    for right, ours in zip(*outputs, strict=True):
        last = torch.arange(1, sessions + 1) * (len(right.hidden) // sessions) - 1  # of each row, which has logits
        for one, other in ((right.hidden[last], ours.hidden[last]), (right.logits, ours.logits)):
            # the tolerance of one layer, for the sum of all: roundings add up at most so
            limit = len(model.span) * TOLERANCE[dtype] * one.float().abs().max()
            assert (one.float() - other.float()).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_differ_only_far_from_the_beginning_keep_their_modules(dtype: torch.dtype) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    differs = {"head_dim": 8, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}}
    config = CONFIG_MAPPING["ministral3"](**{**COMMON, **differs, "max_position_embeddings": 1024})
    assert whole(random_model(config), dtype).fused is None  # its queries grow from position 64 on
    config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert whole(random_model(config), dtype).fused is not None


def test_one_wrong_number_keeps_all_on_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.compiled.prepare", lambda *_: None)
    monkeypatch.setattr("peer.fused.TorchRows.norm", lambda _, norm, x, out: out.copy_(1.001 * rms_norm(norm, x)))
    assert whole(tiny_model("llama")).fused is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["gate", "norm", "rotate"])
def test_large_biases_hide_no_fault(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tenth in rows: what roundings of queries and keys move is allowed, and no more."""
    monkeypatch.setattr("peer.compiled.prepare", lambda *_: None)
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(0.0, 30.0)
        layer.self_attn.q_proj.bias.data.normal_(0.0, 5.0)
    right = getattr(TorchRows, fault)
    monkeypatch.setattr(TorchRows, fault, lambda self, *given: right(self, *given).mul_(1.1))
    assert whole(model, dtype).fused is None


@pytest.mark.parametrize("multiplier", [0.6, 8**-0.5])
def test_scores_are_scaled_as_the_model_says(multiplier: float) -> None:
    """Granite's numbers, of which all but the attention's are one. Scaled by the heads' width it would be refused."""
    ones = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
    config = CONFIG_MAPPING["granite"](**{**COMMON, **ones, "attention_multiplier": multiplier})
    assert whole(random_model(config)).fused is not None


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_queries_that_are_taken_a_few_at_a_time_see_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = whole(tiny_model(family)), []
    assert model.fused is not None
    model.fused.compiled = None
    for queries in (256, 3):
        monkeypatch.setattr("peer.attention.QUERIES", queries)
        cache = model.new_cache(40)
        for position, tokens in ((0, 9), (9, 20), (29, 11)):
            ids = torch.arange(position, position + tokens) % model.vocab
            output = model.forward(PackedStep(model.span, [Row(cache, position, tokens, logits=tokens)], ids=ids))
            made.append(output.logits)
    for one, other in zip(made[:3], made[3:], strict=True):
        assert one is not None and other is not None and torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_goes_on_only_with_tokens_whose_logits_are_wanted(family: str, dtype: torch.dtype) -> None:
    """None, some or all of each row's, in pieces of a window's chunk too; keys and values of the others are there."""
    model = whole(tiny_model(family), dtype)
    assert model.fused is not None
    model.fused.compiled = None
    ours, theirs = ([model.new_cache(70, reach=Reach(rewind=2, chunk=8)) for _ in range(3)] for _ in range(2))
    lengths, generator = [0, 0, 0], torch.Generator().manual_seed(6)
    for turn in (
        [(9, 0), (5, 5), (1, 1)],
        [(20, 1), (3, 0), (17, 9)],
        [(1, 1), (30, 2), (8, 0)],
        [(2, 0), (1, 0), (6, 0)],
        [(1, 1)] * 3,
    ):
        ids = torch.randint(model.vocab, (sum(tokens for tokens, _ in turn),), generator=generator)
        made = []
        for caches, way in ((ours, model.fused), (theirs, None)):
            rows = [Row(cache, length, *n) for cache, length, n in zip(caches, lengths, turn, strict=True)]
            for row in rows:
                row.cache.begin(row.position, row.tokens)
            made.append(model.run(PackedStep(model.span, rows, ids=ids), way).logits)
            for row in rows:
                row.cache.finish(row.position + row.tokens)
        lengths = [length + tokens for length, (tokens, _) in zip(lengths, turn, strict=True)]
        if made[1] is None:
            assert made[0] is None
            continue
        limit = len(model.span) * TOLERANCE[dtype] * made[1].abs().max()
        assert made[0] is not None and (made[0] - made[1]).abs().max() <= limit


@pytest.mark.parametrize("window", [None, 5])
def test_a_long_pass_holds_one_mask_for_all_its_slices_and_sessions(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan of its memory has it: so many queries, and the longest text that there is."""
    monkeypatch.setattr("peer.attention.QUERIES", 4)
    slot, kv = StepSlot(), LayerKV(2, 8, 8, window)
    for n, m in ((13, 20), (4, 9), (15, 30), (2, 3)):
        query, keys, values = torch.randn(1, 2, n, 8), torch.randn(1, 2, m, 8), torch.randn(1, 2, m, 8)
        back = torch.arange(m - n, m)[:, None] - torch.arange(m)
        unseen = (back < 0) | (back >= (window or m))
        scores = (query @ keys.transpose(2, 3) / 8**0.5).masked_fill(unseen, -torch.inf)
        right = (scores.softmax(-1) @ values).transpose(1, 2)
        assert torch.allclose(_attend_plain(slot, query, keys, values, None, kv), right, atol=1e-5)
    assert [mask.shape for mask in slot.masks.values()] == [(4, 30)]


def test_what_comes_in_is_not_written_to() -> None:
    """Layers add to their input in place; what they are given may be in a journal."""
    model = loaded(tiny_model("llama"), Span(2, 4))
    for tokens in (1, 3):
        hidden = torch.randn(tokens, model.width)
        before = hidden.clone()
        model.forward(PackedStep(model.span, [Row(model.new_cache(3), 0, tokens)], hidden=hidden))
        assert torch.equal(hidden, before)


def test_a_norm_that_may_divide_by_zero_stays_with_the_modules() -> None:
    config = tiny_config("llama")
    config.rms_norm_eps = 0.0
    assert whole(random_model(config)).fused is None


def rms_norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def test_one_matrix_is_the_memory_of_its_parts() -> None:
    model = whole(tiny_model("llama"))
    attention = model.layers[0].self_attn
    joined = join([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert joined is not None and joined.data_ptr() == attention.q_proj.weight.data_ptr()
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(joined, torch.cat(parts))
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    taken = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert taken == sum(parameter.nbytes for parameter in model.parameters())


def test_tensors_apart_are_not_joined() -> None:
    piece = torch.arange(12.0).view(6, 2)
    assert torch.equal(join([piece[:2], piece[2:6]]), piece)  # type: ignore[arg-type]
    assert join([piece[:2], piece[3:]]) is None
    assert join([piece[2:4], piece[:2]]) is None
    assert join([piece[:2], piece[2:].clone()]) is None
    assert join([piece[:, :1], piece[:, 1:]]) is None


def test_a_claim_from_the_middle_has_neither_embedding_nor_head() -> None:
    model = tiny_model("llama")
    part = loaded(model, Span(2, 4))
    assert part.fused is not None
    hidden = torch.randn(3, part.width)
    right = part.run(PackedStep(part.span, [Row(part.new_cache(3), 0, 3)], hidden=hidden))
    ours = part.forward(PackedStep(part.span, [Row(part.new_cache(3), 0, 3)], hidden=hidden))
    assert torch.allclose(ours.hidden, right.hidden, atol=1e-5)
