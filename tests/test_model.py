"""Spans against the uncut model of transformers, on tiny random weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING, PretrainedConfig

from peer.cache import SessionCache
from peer.model import PackedStep, Row, SpanModel, check_supported, outline
from peer.weights import load_span
from routing.spans import Span
from swarm.errors import UnsupportedModel
from tests.tiny import TINY, MemoryCheckpoint, tiny_config, tiny_model

torch.set_num_threads(1)
TOLERANCE = 1e-4  # float32; the shapes of the products differ, so the sums are ordered differently


class Chain:
    """A model cut into spans, with a way to run one packed step of several sessions through all of them."""

    def __init__(
        self, model: torch.nn.Module, cuts: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        checkpoint = MemoryCheckpoint(model)
        bounds = [0, *cuts, model.config.num_hidden_layers]
        self.spans = [Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        self.hops = [load_span(checkpoint, span, dtype) for span in self.spans]
        checkpoint.close()

    def open(self, positions: int) -> list[SessionCache]:
        return [hop.new_cache(positions) for hop in self.hops]

    def step(self, sessions: list[tuple[list[SessionCache], int, list[int]]]) -> torch.Tensor:
        """sessions: caches per hop, position, new ids. Logits of every token: [total, vocab]."""
        hidden = None
        ids = torch.tensor([i for _, _, new in sessions for i in new])
        for n, hop in enumerate(self.hops):
            rows = []
            for caches, position, new in sessions:
                caches[n].begin(position, len(new))
                rows.append(Row(caches[n], position, len(new), logits=len(new)))
            out = hop.forward(PackedStep(hop.span, rows, ids=ids if n == 0 else None, hidden=hidden))
            for row in rows:
                row.cache.finish(row.position + row.tokens)
            hidden = out.hidden
        assert out.logits is not None
        return out.logits


def uncut_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("family", sorted(TINY))
def test_three_spans_give_the_logits_of_the_uncut_model(family: str) -> None:
    model = tiny_model(family)
    vocab = model.config.vocab_size
    chain = Chain(model, cuts=[1, 4])
    texts = [[(7 * s + 3 * i + i * i) % vocab for i in range(n)] for s, n in enumerate((23, 9, 14))]
    sessions = [chain.open(40) for _ in texts]

    at = [0, 0, 0]
    for chunk in ((13, 5, 14), (10, 4, 0)):  # prefill in two uneven chunks; the third is done after one
        rows = [(sessions[s], at[s], texts[s][at[s] : at[s] + n]) for s, n in enumerate(chunk) if n]
        logits = chain.step(rows)
        start = 0
        for s, n in enumerate(chunk):
            if n:
                assert_same(logits[start : start + n], uncut_logits(model, texts[s][: at[s] + n])[at[s] :])
                start, at[s] = start + n, at[s] + n

    for _ in range(3):  # decode, greedily
        for s, row in enumerate(last_rows(chain, sessions, texts)):
            assert_same(row, uncut_logits(model, texts[s])[-1])
            texts[s].append(int(row.argmax()))

    texts[0] = texts[0][:11]  # one rewind: the next step starts earlier than the KV's end
    for s, row in enumerate(last_rows(chain, sessions, texts)):
        assert_same(row, uncut_logits(model, texts[s])[-1])


def last_rows(chain: Chain, sessions: list[list[SessionCache]], texts: list[list[int]]) -> list[torch.Tensor]:
    """Feed the last id of each text (what lies before it is in the KV) and read its logits."""
    logits = chain.step([(c, len(text) - 1, text[-1:]) for c, text in zip(sessions, texts, strict=True)])
    return list(logits)
