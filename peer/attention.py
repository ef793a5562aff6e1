"""Attention over a packed row: the only place where tokens meet.

All new tokens of a step form one row [1, tokens, width] with a position id each. One function, registered
with transformers, splits the row by session, writes the keys and values into each session's cache and attends
there. What it needs of the step it finds at the module itself (`StepSlot`), because some families don't hand
keyword arguments down.

No mask function is registered: transformers then skips building masks altogether, which they are not
needed for here (`_preprocess_mask_arguments`: "other custom attention without equivalent mask creation").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from peer.cache import SessionCache

ATTENTION = "layerswarm"


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one session. logits: of how many of its last tokens logits are wanted (last span)."""

    cache: SessionCache
    position: int
    tokens: int
    logits: int = 0


@dataclass(slots=True)
class StepSlot:
    """The step that runs now, where the attention function and the wrappers find it."""

    rows: Sequence[Row] = ()
    hidden_in: Tensor | None = None
    hidden_out: Tensor | None = None
    wanted: Tensor | None = None  # indices of the tokens whose logits are wanted
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.rows, self.hidden_in, self.hidden_out, self.wanted = (), None, None, None
        self.masks.clear()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend per session, over its cache and its new tokens.

    query: [1, heads, total, dim], key and value: [1, kv_heads, total, dim] -> [1, total, heads, value_dim].
    sliding_window: a token sees so many positions, itself included. softcap: arXiv:2408.00118.
    s_aux: [heads] attention sinks, arXiv:2309.17453.
    """
    slot: StepSlot = module.step_slot  # type: ignore[assignment]
    index: int = module.layer_idx  # type: ignore[assignment]
    attend = _attend_plain if softcap is None and s_aux is None else _attend_special
    assert attention_mask is None, "a mask was built although none is registered for us"
    pieces, start = [], 0
    for row in slot.rows:
        tokens, cache = row.tokens, row.cache
        stop, end = start + tokens, row.position + tokens
        if len(slot.rows) == 1:
            q, k, v = query, key, value
        else:
            q, k, v = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        layer = index - cache.span.start
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, row.position : end] = k
        values[:, :, row.position : end] = v
        seen = max(0, row.position + 1 - sliding_window) if sliding_window else 0
        pieces.append(
            attend(
                slot, q, keys[:, :, seen:end], values[:, :, seen:end], scaling, sliding_window, softcap, s_aux
            )
        )
        start = stop
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out, None


def _attend_plain(
    slot: StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    *_special: Any,
) -> Tensor:
    """query: [1, heads, n, dim]; keys: [1, kv_heads, m, dim], the last n of which are the query's own."""
    _, heads, n, dim = query.shape
    kv_heads, m = keys.shape[1], keys.shape[2]
    if n == 1:  # one token sees all keys: its grouped heads become the "length", and no key is repeated
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, 1, heads, -1)
    if n == m and not (window and m > window):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
    else:
        mask = _mask(slot, n, m, window, query)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads
        )
    return out.transpose(1, 2)


def _attend_special(
    slot: StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Written out, for what no fused kernel does."""
    _, heads, n, dim = query.shape
    kv_heads, m = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    scale = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(kv_heads, group * n, dim)
    scores = torch.matmul(grouped, keys[0].transpose(1, 2)).view(kv_heads, group, n, m) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if n > 1:
        scores = scores + _mask(slot, n, m, window, query)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :m]
    out = torch.matmul(weights.reshape(kv_heads, group * n, m), values[0])
    return out.view(1, heads, n, -1).transpose(1, 2)


def _mask(slot: StepSlot, n: int, m: int, window: int | None, like: Tensor) -> Tensor:
    """Additive [n, m]: query i is at key m - n + i and sees `window` keys, itself included. Made once a step."""
    made = slot.masks.get((n, m, window or 0))
    if made is None:
        at = torch.arange(m - n, m, device=like.device)[:, None]
        keys = torch.arange(m, device=like.device)[None, :]
        hidden = keys > at
        if window:
            hidden |= keys <= at - window
        made = torch.zeros(n, m, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        slot.masks[n, m, window or 0] = made
    return made


AttentionInterface.register(ATTENTION, packed_attention)
