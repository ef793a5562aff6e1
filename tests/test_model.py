"""Spans against the uncut model of transformers, on tiny random weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from peer.attention import Row
from peer.model import PackedStep, from_raw, to_raw
from routing.spans import Span
from tests.chain import Chain, uncut_logits
from tests.tiny import tiny_model

torch.set_num_threads(1)
TOLERANCE = 1e-4  # float32; the shapes of the products differ, so the sums are ordered differently


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


# ---------------------------------------------------------------- views of a claim


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def gemma3() -> PreTrainedModel:
    return tiny_model("gemma3")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_claim_serves_any_part_of_itself(family: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)
    claim = Chain(model, cuts=[]).hops[0]
    ids = [(5 * i + 2) % 97 for i in range(15)]
    for cuts in ([2], [1, 3, 5], [5]):
        bounds = [0, *cuts, claim.layers_total]
        hidden = None
        for start, stop in pairwise(bounds):
            cache = claim.new_cache(15, Span(start, stop))
            row = Row(cache, 0, 15, logits=15 * (stop == claim.layers_total))
            out = claim.forward(PackedStep(Span(start, stop), [row], ids=torch.tensor(ids), hidden=hidden))
            hidden = out.hidden
        assert_same(out.logits, uncut_logits(model, ids))


def test_a_session_over_fewer_layers_runs_beside_one_over_all(llama: PreTrainedModel) -> None:
    claim = Chain(llama, cuts=[2]).hops[1]  # layers 2-5
    hidden = torch.randn(4, claim.width)
    part = Span(3, 5)
    alone = claim.forward(PackedStep(part, [Row(claim.new_cache(4, part), 0, 4)], hidden=hidden)).hidden
    rows = [Row(claim.new_cache(4, part), 0, 4), Row(claim.new_cache(4), 0, 4)]  # the second holds KV for all
    both = claim.forward(PackedStep(part, rows, hidden=torch.cat([hidden, hidden]))).hidden
    assert torch.allclose(both[:4], alone, atol=1e-5)
    assert torch.allclose(both[4:], alone, atol=1e-5)


def test_only_the_wanted_tokens_go_through_the_head(llama: PreTrainedModel) -> None:
    claim = Chain(llama, cuts=[]).hops[0]
    ids = torch.arange(10)
    rows = [Row(claim.new_cache(6), 0, 6, logits=1), Row(claim.new_cache(4), 0, 4, logits=0)]
    out = claim.forward(PackedStep(claim.span, rows, ids=ids))
    assert out.logits is not None and out.logits.shape == (1, 97)
    assert (out.logits[0] - uncut_logits(llama, ids[:6].tolist())[-1]).abs().max() < TOLERANCE
    none = claim.forward(PackedStep(claim.span, [Row(claim.new_cache(4), 0, 4)], ids=ids[:4]))
    assert none.logits is None


def test_computed_buffers_equal_those_of_transformers(gemma3: PreTrainedModel) -> None:
    hop = Chain(gemma3, cuts=[3]).hops[1]
    ours = dict(hop.shell.named_buffers())
    theirs = dict(gemma3.named_buffers())
    assert set(ours) == {name for name in theirs if "embed" not in name}  # layer 0 isn't here
    for name, buffer in ours.items():
        assert torch.equal(buffer, theirs[name]), name


def test_a_middle_span_holds_nothing_but_its_layers(llama: PreTrainedModel) -> None:
    hop = Chain(llama, cuts=[2, 4]).hops[1]
    layers = llama.model.layers[2:4]
    assert sum(p.numel() for p in hop.parameters()) == sum(p.numel() for p in layers.parameters())


def test_layers_beyond_the_claim_are_our_own_mistake(llama: PreTrainedModel) -> None:
    hop = Chain(llama, cuts=[2, 4]).hops[1]
    with pytest.raises(ValueError, match="not within the claim"):
        hop.forward(PackedStep(Span(1, 3), [Row(hop.new_cache(1), 0, 1)], hidden=torch.zeros(1, hop.width)))


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_stays_within_its_rounding(
    dtype: torch.dtype, mantissa_bits: int, llama: PreTrainedModel
) -> None:
    # Each of ~10 roundings per layer errs by 2**-bits of a value; over 6 layers they add up like a random walk,
    # to sqrt(60) of it, and the largest of some thousand logits lies within 4 standard deviations.
    chain = Chain(llama, cuts=[1, 4], dtype=dtype)
    ids = [(7 * i) % 97 for i in range(12)]
    logits, exact = chain.step([(chain.open(12), 0, ids)]), uncut_logits(llama, ids)
    assert (logits - exact).abs().max() < 4 * 60**0.5 * 2.0**-mantissa_bits * exact.std()


# ---------------------------------------------------------------- on the wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_survive_the_wire_bit_for_bit(dtype: torch.dtype) -> None:
    sent = torch.randn(3, 5).to(dtype)
    raw = to_raw(sent)
    assert (raw.dtype, raw.shape) == (str(dtype).removeprefix("torch."), (3, 5))
    assert torch.equal(from_raw(raw), sent)
    assert from_raw(to_raw(sent[:0])).shape == (0, 5)
