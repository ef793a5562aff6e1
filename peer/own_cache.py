"""A session's KV behind transformers' cache interface, for families whose attention isn't ours to compute.

Invariant: what such a family keeps lies in the same `SessionCache` as that of all others: reserved in the
same ledger, cut by the same `truncate`, over the same sub-span. Only the loop differs: these run one session
after the other, because the masks that transformers builds know of one sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from peer.attention import Row


class _Length(CacheLayerMixin):
    """What is asked of a layer other than to store: how much there is. The same for all layers of a row."""

    is_sliding = False

    def __init__(self, position: int | Tensor) -> None:
        super().__init__()
        self._position: Any = position

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def lazy_initialization(self, *_: Any) -> None: ...

    def get_seq_length(self) -> int:
        return self._position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._position + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """One row's keys and values for the length of one step. layers: of the whole model."""

    def __init__(self, row: Row, layers: int) -> None:
        super().__init__(layers=[_Length(row.position)] * layers)
        self._row = row

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [1, heads, n, dim] of the row's new tokens, and return all up to them."""
        row = self._row
        return row.cache.layers[layer_idx - row.cache.span.start].write(row.position, key_states, value_states)


class PlacesCache(Cache):
    """Stores nothing. For families that count positions in their cache: index in the row + length = position.

    positions: [1, tokens] of a packed row.
    """

    def __init__(self, positions: Tensor, layers: int) -> None:
        length = positions[0] - torch.arange(positions.shape[1], device=positions.device)
        super().__init__(layers=[_Length(length)] * layers)
