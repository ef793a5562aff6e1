"""A model cut into spans, for tests that compare them with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from peer.attention import Row
from peer.cache import SessionCache
from peer.checkpoint import Checkpoint
from peer.model import PackedStep, SpanModel
from peer.weights import load_span
from routing.spans import Span
from tests.tiny import MemoryCheckpoint


class Chain:
    """The spans of a model, loaded from files, with a way to run a step of several sessions through all of them."""

    def __init__(
        self, model: torch.nn.Module, cuts: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        checkpoint = MemoryCheckpoint(model)
        self.hops = load_cut(checkpoint, cuts, dtype)
        checkpoint.close()

    @classmethod
    def of(cls, checkpoint: Checkpoint, cuts: Sequence[int]) -> Chain:
        """From files that are there already."""
        made = cls.__new__(cls)
        made.hops = load_cut(checkpoint, cuts, torch.float32)
        return made

    def open(self, positions: int) -> list[SessionCache]:
        return [hop.new_cache(positions) for hop in self.hops]

    def step(self, sessions: Sequence[tuple[list[SessionCache], int, list[int]]]) -> torch.Tensor:
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


def load_cut(checkpoint: Checkpoint, cuts: Sequence[int], dtype: torch.dtype) -> list[SpanModel]:
    bounds = [0, *cuts, checkpoint.config.num_hidden_layers]
    return [load_span(checkpoint, Span(a, b), dtype) for a, b in pairwise(bounds)]


def uncut_logits(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """What transformers' own forward gives for a text, without a cache: [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float()
