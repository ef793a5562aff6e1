"""Attention over a packed row: the only place where tokens meet.

All new tokens of a step form one row [1, tokens, width] with a position id each. One function, registered
with transformers, splits the row by session, writes the keys and values into each session's cache and attends
there. What it needs of the step it finds at the module itself (`StepSlot`), because some families don't hand
keyword arguments down.

No mask function is registered: transformers then skips building masks altogether, which they are not
needed for here (`_preprocess_mask_arguments`: "other custom attention without equivalent mask creation").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from peer.cache import SessionCache
from peer.kv import LayerKV

ATTENTION = "layerswarm"
QUERIES = 256  # that a mask is made for at once: it has a row of the whole text's length for each


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one session. logits: of how many of its last tokens logits are wanted (last span)."""

    cache: SessionCache
    position: int
    tokens: int
    logits: int = 0


# Queries, keys and values of new tokens -> the queries and keys to go on with.
Watch: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class StepSlot:
    """The step that runs now, where the attention function and the wrappers find it."""

    rows: Sequence[Row] = ()
    hidden_in: Tensor | None = None
    hidden_out: Tensor | None = None
    wanted: Tensor | None = None  # indices of the tokens whose logits are wanted
    masks: dict[tuple[int | None, ...], Tensor] = field(default_factory=dict)
    watch: Watch | None = None  # of a trial: told what attention gets

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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend per session, over its cache and its new tokens.

    query: [1, heads, total, dim], key and value: [1, kv_heads, total, dim] -> [1, total, heads, value_dim].
    What a token sees is what its layer's store gives: one definition of its window, whatever the module says.
    softcap: arXiv:2408.00118. s_aux: [heads] attention sinks, arXiv:2309.17453.
    """
    assert attention_mask is None, "a mask was built although none is registered for us"
    slot: StepSlot = module.step_slot  # type: ignore[assignment]
    index: int = module.layer_idx  # type: ignore[assignment]
    return attend_rows(slot, index, query, key, value, scaling, softcap, s_aux), None


def attend_rows(
    slot: StepSlot,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    asking: Sequence[int] | None = None,
) -> Tensor:
    """`packed_attention` of the model's layer `index`.

    asking: how many of each row's tokens, its last ones, have a query (None: all have).
    """
    if slot.watch is not None:
        query, key = slot.watch(query, key, value)
    attend = _attend_plain if softcap is None and s_aux is None else _attend_special
    outputs, start, asked = list[Tensor](), 0, 0
    for row, queries in zip(slot.rows, asking or [row.tokens for row in slot.rows], strict=True):
        layer, first = row.cache.layers[index - row.cache.span.start], row.tokens - queries
        for a, b in layer.pieces(row.tokens):
            part = slice(start + a, start + b)
            keys, values = layer.write(row.position + a, key[:, :, part], value[:, :, part])
            if first < b:
                begin = max(a, first)
                unseen = layer.kv.first_seen(row.position + begin) - layer.kv.first_seen(row.position + a)
                keys, values = keys[:, :, unseen:], values[:, :, unseen:]
                some = query[:, :, asked : asked + b - begin]
                outputs.append(attend(slot, some, keys, values, scaling, layer.kv, softcap, s_aux))
                asked += b - begin
        start += row.tokens
    if not outputs:
        return query.transpose(1, 2)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_plain(
    slot: StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    kv: LayerKV,
    *_special: Any,
) -> Tensor:
    """query: [1, heads, n, dim]; keys: [1, kv_heads, m, dim], the last n of which are the query's own."""
    _, heads, n, dim = query.shape
    kv_heads, m = keys.shape[1], keys.shape[2]
    if n == 1:  # one token sees all keys: its grouped heads become the "length", and no key is repeated
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, 1, heads, -1)
    if n == m and (kv.window is None or m <= kv.window):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
    else:
        outputs = []
        for start in reversed(range(0, n, QUERIES)):  # the largest mask first
            stop = min(start + QUERIES, n)
            seen = m - n + stop  # no key behind the last query
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, start:stop],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    attn_mask=_mask(slot, stop - start, seen, kv, query),
                    scale=scaling,
                    enable_gqa=heads != kv_heads,
                )
            )
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1], dim=2)
    return out.transpose(1, 2)


def _attend_special(
    slot: StepSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    kv: LayerKV,
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
        scores = scores + _mask(slot, n, m, kv, query)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :m]
    out = torch.matmul(weights.reshape(kv_heads, group * n, m), values[0])
    return out.view(1, heads, n, -1).transpose(1, 2)


def _mask(slot: StepSlot, n: int, m: int, kv: LayerKV, like: Tensor) -> Tensor:
    """Additive [n, m]: query i is at key m - n + i and sees what `kv` says; key 0 is what query 0 sees first.

    Made once a step, and where only the distance counts, cut from the end of the largest: a long pass has one, not one
    for each of its slices and sessions. Kernels elsewhere than on a CPU want it aligned, so there are several.
    """
    exact = kv.chunked or like.device.type != "cpu"
    kind = (kv.window, n, m) if exact else (kv.window,)
    made = slot.masks.pop(kind, None)
    if made is None or made.shape[0] < n or made.shape[1] < m:
        rows, columns = (n, m) if made is None else (max(n, made.shape[0]), max(m, made.shape[1]))
        del made  # before there is another
        made = _make_mask(rows, columns, kv, like)
    slot.masks[kind] = made
    return made[made.shape[0] - n :, made.shape[1] - m :]


def _make_mask(n: int, m: int, kv: LayerKV, like: Tensor) -> Tensor:
    at = torch.arange(m - n, m, device=like.device)[:, None]
    keys = torch.arange(m, device=like.device)[None, :]
    hidden = keys > at
    if kv.window is not None:
        hidden |= keys < at - at % kv.window if kv.chunked else keys <= at - kv.window
    return torch.zeros(n, m, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


AttentionInterface.register(ATTENTION, packed_attention)
