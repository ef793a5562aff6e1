"""Steps of few tokens in compiled loops: against transformers' modules, float64 by numpy, and torch's own roundings."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import peer
from peer import compiled as module
from peer import kernels
from peer.attention import Row
from peer.cache import SessionCache
from peer.compiled import BFLOAT16, FLOAT32, MOST_TOKENS, NEAR, NUMPY, WIDENED, CompiledRows, compile_span, prepare
from peer.fused import TOLERANCE, Layer, _read
from peer.kv import Reach
from peer.matrix import Matrix
from peer.model import PackedStep, SpanModel
from routing.spans import Span
from tests.tiny import COMMON, loaded, random_model, tiny_config, tiny_model

torch.set_num_threads(1)


def whole(family: str = "llama", dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None) -> SpanModel:
    model = tiny_model(family)
    return loaded(model, Span(0, model.config.num_hidden_layers), dtype, stored)


# ---------------------------------------------------------------- numbers


def test_a_power_of_e_is_right_to_the_last_bits() -> None:
    for x in (-200.0, -87.0, -20.5, -1.0, -1e-6, 0.0, 1e-6, 0.3466, 1.0, 20.5, 88.0):
        made, right = float(kernels._exp(np.float32(x))), math.exp(max(np.float32(x), -87.3))
        assert made == pytest.approx(right, rel=3e-7), x
    assert math.isnan(kernels._exp(np.float32("nan")))
    assert np.isfinite(kernels._exp(np.float32(1000.0)))  # a gate that is closed


def test_numbers_are_rounded_to_bfloat16_as_torch_does() -> None:
    bits = torch.randint(0, 1 << 32, (20_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    ties = torch.arange(0x3F800000, 0x3F900000, 0x8000, dtype=torch.int64)  # half way between two, and on them
    numbers = torch.cat([bits, ties]).to(torch.uint32).view(torch.float32)
    right = numbers.bfloat16().view(torch.uint16).numpy()
    for number, expected in zip(numbers.numpy(), right, strict=True):
        if np.isnan(number):
            assert torch.tensor([int(kernels._rounded(number))], dtype=torch.uint16).view(torch.bfloat16).isnan()
        else:
            assert kernels._rounded(number) == expected, number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 6), (8, 34), (37, 64)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_head_of_any_size_is_the_product_after_the_norm(
    dtype: torch.dtype, rows: int, width: int, threads: int
) -> None:
    """Whole tiles, what is left of them, pairs of tokens and a last one, and threads that get nothing."""
    generator = torch.Generator().manual_seed(rows)
    weight, norm = torch.randn(rows, width, generator=generator).to(dtype), torch.rand(width, generator=generator)
    bias = torch.randn(rows, generator=generator)
    for tokens in range(1, 6):
        x, logits = torch.randn(tokens, width, generator=generator), torch.empty(tokens, rows)
        kernels.run_head(
            NUMPY[dtype], threads, norm.data_ptr(), np.float32(1e-5), weight.data_ptr(), bias.data_ptr(),
            x.numpy(), logits.numpy(),
        )  # fmt: skip
        wide = x.double().numpy()
        normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * norm.double().numpy()
        right = normed @ weight.double().numpy().T + bias.double().numpy()
        assert np.abs(logits.numpy() - right).max() <= 1e-6 * width**0.5 * np.abs(right).max()


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_what_steps_of_any_kind_give_is_what_the_modules_give(family: str, stored: torch.dtype) -> None:
    """Prompts and single tokens of sessions of unlike lengths, together, over parts of the claim, through a window."""
    model = whole(family, stored=stored)
    assert model.fused is not None and model.fused.compiled is not None
    ours, theirs = ([model.new_cache(60, span) for span in 3 * [model.span]] for _ in range(2))
    lengths, generator = [0, 0, 0], torch.Generator().manual_seed(1)
    for turn in ([11, 0, 0], [1, 9, 0], [3, 1, 7], [1, 1, 1], [1, 8, 1], [0, 1, 1], [12, 1, 1], *9 * [[1, 1, 1]]):
        ids = torch.randint(model.vocab, (sum(turn),), generator=generator)
        hidden = made = torch.empty(0)
        for span in (Span(0, 1), Span(1, model.layers_total)):
            rows = [
                [Row(cache, length, n, logits=1) for cache, length, n in zip(caches, lengths, turn, strict=True) if n]
                for caches in (ours, theirs)
            ]
            given = [{"ids": ids}, {"ids": ids}] if span.start == 0 else [{"hidden": made}, {"hidden": hidden}]
            step, other = (PackedStep(span, r, **g) for r, g in zip(rows, given, strict=True))
            assert model.fused.compiled.takes(step)
            mine, right = model.run(step, model.fused), model.run(other)
            made, hidden = mine.hidden, right.hidden
        assert mine.logits is not None and right.logits is not None
        assert torch.allclose(made, hidden, atol=1e-5) and torch.allclose(mine.logits, right.logits, atol=1e-5)
        lengths = [length + n for length, n in zip(lengths, turn, strict=True)]


@pytest.mark.parametrize("window", [None, 100, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_of_many_blocks_of_keys_are_seen_as_the_modules_see_them(window: int | None, dtype: torch.dtype) -> None:
    """From places within a block and at its edges, by one token and by several, in sessions of unlike lengths. float32
    has large scores, so that the largest changes from block to block (bfloat16's rounding would grow with them)."""
    longer = {**COMMON, "max_position_embeddings": 512, "sliding_window": window, "num_attention_heads": 6}
    model = random_model(CONFIG_MAPPING["mistral"](**{**longer, "head_dim": 8}))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 6 if dtype == torch.float32 else 1
    span = loaded(model, Span(0, model.config.num_hidden_layers), dtype)
    assert span.fused is not None and span.fused.compiled is not None
    generator, lengths = torch.Generator().manual_seed(2), [0, 0]
    ours, theirs = ([span.new_cache(400) for _ in lengths] for _ in range(2))
    for turn in ([190, 57], [1, 7], [1, 1], [8, 1], [1, 8], *20 * [[3, 8]]):
        ids, made = torch.randint(span.vocab, (sum(turn),), generator=generator), []
        for caches, way in ((ours, span.fused), (theirs, None)):
            rows = [Row(cache, length, n, n) for cache, length, n in zip(caches, lengths, turn, strict=True)]
            step = PackedStep(span.span, rows, ids=ids)
            assert span.fused.compiled.takes(step) == (max(turn) <= 8)
            made.append(span.run(step, way).logits)
        limit = len(span.span) * TOLERANCE[dtype] * made[1].abs().max()
        assert (made[0] - made[1]).abs().max() <= limit
        lengths = [length + n for length, n in zip(lengths, turn, strict=True)]


@pytest.mark.parametrize(("stored", "dtype"), [FLOAT32, BFLOAT16, WIDENED])
def test_long_steps_and_prompts_far_into_a_text_are_torchs(stored: torch.dtype, dtype: torch.dtype) -> None:
    model = whole(dtype=dtype, stored=stored)
    assert model.fused is not None and model.fused.compiled is not None
    cache, most, near = model.new_cache(2000), MOST_TOKENS[stored, dtype][0], NEAR[dtype]
    for rows, taken in (
        ([(1999, 1)], True),
        (most * [(1999, 1)], True),
        ((most + 1) * [(1999, 1)], False),
        ([(near - 20, 20)], True),
        ([(near - 19, 20)], False),
        ([(1000, 1), (0, 20)], True),
        ([(1000, 1), (near, 20)], False),
    ):
        step = PackedStep(model.span, [Row(cache, position, tokens) for position, tokens in rows])
        assert model.fused.compiled.takes(step) == taken


@pytest.mark.parametrize("amx", [True, False])
def test_of_thick_layers_fewer_tokens_are_compiled(amx: bool) -> None:
    layer = _read(whole(dtype=torch.bfloat16).layers[0], 0)
    thick = dataclasses.replace(layer, down=Matrix(torch.empty(1, 16_000_000, dtype=torch.bfloat16), None))
    assert module._most_tokens(layer, torch.bfloat16, amx=amx) == 24
    assert module._most_tokens(thick, torch.bfloat16, amx=amx) == (4 if amx else 24)


def test_steps_in_which_a_window_moves_are_torchs() -> None:
    model, reach = whole("mistral-window"), Reach(rewind=2, chunk=4)
    assert model.fused is not None and model.fused.compiled is not None
    for tokens, taken in ((4, True), (5, False)):
        step = PackedStep(model.span, [Row(model.new_cache(30, reach=reach), 0, tokens)])
        assert model.fused.compiled.takes(step) == taken


def test_a_session_goes_on_from_what_the_other_way_has_written() -> None:
    model = whole()
    ids, logits = torch.randint(model.vocab, (30,), generator=torch.Generator().manual_seed(4)), []
    for fused in (None, model.fused):
        cache = model.new_cache(30)
        for position, stop, way in ((0, 20, model.fused if fused is None else None), (20, 21, fused), (21, 30, fused)):
            step = PackedStep(model.span, [Row(cache, position, stop - position, logits=1)], ids=ids[position:stop])
            assert model.fused is not None and model.fused.compiled is not None and model.fused.compiled.takes(step)
            output = model.run(step, way)
        logits.append(output.logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


@pytest.mark.parametrize("where", ["q_proj", "v_proj", "up_proj"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_does_not_vanish(where: str, number: float) -> None:
    """Be it only a query that is none, of which attention could make something that is one."""
    model = whole()
    layer = model.layers[1]
    for tokens in (1, 3):
        matrix: Tensor = getattr(layer.mlp if where == "up_proj" else layer.self_attn, where).weight
        kept = matrix[0].clone()
        matrix[0] = number
        rows = [Row(model.new_cache(3), 0, tokens, logits=tokens)]
        output = model.forward(PackedStep(model.span, rows, ids=torch.arange(tokens)))
        matrix[0] = kept
        assert output.logits is not None
        assert not torch.isfinite(output.hidden).any() and not torch.isfinite(output.logits).any()


def test_two_threads_at_once_get_what_each_alone_gets() -> None:
    model, made = whole(), dict[int, list[Tensor]]()

    def decode(seed: int) -> None:
        torch.set_num_threads(1 + seed % 2)
        cache, logits = model.new_cache(40), []
        for position in range(40):
            rows = [Row(cache, position, 1, logits=1)]
            logits.append(own[seed].forward(PackedStep(model.span, rows, ids=torch.tensor([position + seed]))).logits)
        made[seed] = logits

    own = [whole() for _ in range(3)]
    decode(0)
    decode(1)
    decode(2)
    alone, made = made, {}
    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert all(torch.equal(one, other) for one, other in zip(alone[seed], made[seed], strict=True))


def test_others_may_be_let_in_between_two_layers() -> None:
    """With more tokens than the pass that lets them in has, so that it finds its room replaced."""
    model = whole()
    assert model.fused is not None and model.fused.compiled is not None
    ours, theirs = ([model.new_cache(40) for _ in range(2)] for _ in range(2))
    ids, others, let_in = torch.arange(5), torch.arange(40, 60), list[Tensor]()

    def between() -> None:
        step = PackedStep(model.span, [Row(ours[1], 0, 20, 1)], ids=others)
        assert model.fused is not None
        let_in.append(model.run(step, model.fused).logits)

    step = PackedStep(model.span, [Row(ours[0], 0, 5, 1)], ids=ids, between=between)
    assert model.fused.compiled.takes(step)
    made = model.run(step, model.fused).logits
    right = [
        model.run(PackedStep(model.span, [Row(cache, 0, len(part), 1)], ids=part)).logits
        for cache, part in zip(theirs, (ids, others), strict=True)
    ]
    assert len(let_in) == model.layers_total - 1
    assert torch.allclose(made, right[0], atol=1e-5)
    assert all(torch.allclose(logits, right[1], atol=1e-5) for logits in let_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_matrix_may_have_a_bias(dtype: torch.dtype) -> None:
    span = whole("llama-biased", dtype)
    assert span.fused is not None and span.fused.compiled is not None
    made = []
    for way in (span.fused, None):
        step = PackedStep(span.span, [Row(span.new_cache(7), 0, 7, 7)], ids=torch.arange(7))
        assert span.fused.compiled.takes(step)
        made.append(span.run(step, way).logits)
    assert (made[0] - made[1]).abs().max() <= len(span.span) * TOLERANCE[dtype] * made[1].abs().max()


# ---------------------------------------------------------------- whether it can be


def test_matrices_that_lie_otherwise_than_they_are_read_are_torchs() -> None:
    model = whole()
    layers = [_read(layer, index) for index, layer in enumerate(model.layers)]
    assert compile_span(layers, None, torch.float32) is not None
    weight = layers[1].down.weight
    for other in (weight.bfloat16(), weight.t().contiguous().t(), torch.zeros(weight.shape[0], 47)):
        changed = dataclasses.replace(layers[1], down=Matrix(other, None))
        assert compile_span([layers[0], changed, *layers[2:]], None, torch.float32) is None


PARTS = ["qkv", "out", "gate_up", "down", "attention_norm", "mlp_norm", "q_norm", "k_norm", "bias"]


@pytest.mark.parametrize("part", PARTS)
def test_shapes_that_dont_belong_together_are_never_read(part: str) -> None:
    model = whole("qwen3")
    layers = [_read(layer, index) for index, layer in enumerate(model.layers)]
    layer = layers[2]
    assert compile_span(layers, None, torch.float32) is not None
    if part == "bias":
        changed = dataclasses.replace(layer, out=dataclasses.replace(layer.out, bias=torch.zeros(30)))
    else:
        old = getattr(layer, part)
        shorter = dataclasses.replace(old, weight=old.weight[:-2].clone())
        changed = dataclasses.replace(layer, **{part: shorter})
    assert compile_span([*layers[:2], changed, *layers[3:]], None, torch.float32) is None
    assert compile_span(layers, (layer.q_norm, layer.out), torch.float32) is None


@pytest.mark.parametrize("tokens", [1, 30])
def test_heads_of_which_only_a_part_is_rotated_are_left_to_the_modules(tokens: int) -> None:
    model = whole()
    assert model.fused is not None and model.fused.compiled is not None
    whole_table = model.fused._rotary
    model.fused._rotary = lambda x, at: tuple(part[..., :4].contiguous() for part in whole_table(x, at))
    for few in (model.fused.compiled, None):
        model.fused.compiled = few
        step = PackedStep(model.span, [Row(model.new_cache(30), 0, tokens)], ids=torch.zeros(tokens, dtype=torch.long))
        with pytest.raises(ValueError, match="a rotary table of 4 for heads of 8"):
            model.run(step, model.fused)


def test_one_wrong_number_keeps_all_on_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._numbers

    def wrong(layer: Layer) -> list[float]:
        *eps, scaling = right(layer)
        return [*eps, 1.001 * scaling if layer.index == 2 else scaling]

    monkeypatch.setattr(module, "_numbers", wrong)
    model = whole()
    assert model.fused is not None and model.fused.compiled is None


@pytest.mark.parametrize("part", ["norm", "rotate", "gate"])
def test_rows_that_are_wrong_keep_all_on_torchs_operations(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although steps of few tokens, which don't need them, are right."""
    right = getattr(CompiledRows, part)
    monkeypatch.setattr(CompiledRows, part, lambda self, *given: right(self, *given).mul_(1.001))
    model = whole()
    assert model.fused is not None and model.fused.compiled is None


def test_what_the_loops_would_read_or_write_elsewhere_is_refused() -> None:
    model = whole()
    assert model.fused is not None
    narrow = SessionCache(model.span, model.kv, 8, dtype=torch.bfloat16)
    for rows, fault in (
        ([Row(model.new_cache(8), 0, 2)], "3 tokens with places for 2 and rotary positions for 2"),
        ([Row(narrow, 0, 3)], "keys and values that aren't torch.float32"),
        ([Row(model.new_cache(8), 6, 3)], "positions 6 to 8 have no room"),
        ([Row(model.new_cache(8), -1, 3)], "positions -1 to 1 have no room, or see what is gone"),
    ):
        with pytest.raises(ValueError, match=fault):
            model.run(PackedStep(model.span, rows, ids=torch.arange(3)), model.fused)


def test_a_machine_that_can_not_compile_says_so_once_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(peer, "kernels")
    monkeypatch.setitem(sys.modules, "peer.kernels", None)  # as if what it imports weren't installed
    for remembered in (prepare, module._tell):
        remembered.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            models = [whole(), whole(), whole(dtype=torch.bfloat16)]
    finally:
        prepare.cache_clear()
    assert all(model.fused is not None and model.fused.compiled is None for model in models)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("decoding runs on torch's own operations, more slowly: loops can't be compiled here (")
    assert said.endswith("); pip install numba, or let NUMBA_CACHE_DIR name a directory that can be written")


def test_loops_that_were_kept_and_can_not_be_read_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries, kept = [], ["kernels.run_layers-1.py311.nbi", "kernels.run_head-2.py311.1.nbc"]
    for name in [*kept, "another.nbi"]:
        (tmp_path / name).touch()

    def warm(*_: object) -> None:
        tries.append([name for name in kept if (tmp_path / name).exists()])
        if tries[-1]:
            raise EOFError("Ran out of input")

    monkeypatch.setattr(module, "_warm", warm)
    monkeypatch.setattr(kernels, "run_layers", SimpleNamespace(stats=SimpleNamespace(cache_path=tmp_path)))
    prepare.cache_clear()
    try:
        assert prepare(*FLOAT32) is kernels
    finally:
        prepare.cache_clear()
    assert tries == [kept, []] and (tmp_path / "another.nbi").exists()


def test_gates_of_another_kind_are_torchs() -> None:
    config = tiny_config("llama")
    config.hidden_act = "gelu"
    model = random_model(config)
    made = loaded(model, Span(0, config.num_hidden_layers))
    assert made.fused is not None and made.fused.compiled is None
