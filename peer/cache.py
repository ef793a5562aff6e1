"""KV memory: a ledger of reservations (no torch) and the tensors behind them.

Invariants: the ledger's reservations never exceed its total; a session's tensors never hold more
positions than it reserved; `SessionCache.length` counts only positions of steps that finished, so a
step that fails half way has changed nothing that anyone will read.

How memory is made real. The pool's bytes are a line of the peer's budget, the ledger never gives out
more than that, and `KvPool.rehearse` allocates and touches all of it once before the peer says that it
serves. On an accelerator torch's allocator keeps what was rehearsed, so it stays ours. On a CPU it goes
back to the system, and each session's memory is taken in one piece when it opens: the default budget is
half of what is available, so only a foreign process that eats the other half could come between. One
committed arena instead would need compaction, or refuse sessions for want of a contiguous gap.

The ledger is called by the asyncio loop, the tensors are touched only by the engine's thread; growing is
therefore asked for by the one (`extend`) and done by the other (`SessionCache.begin`), layer by
layer, so that a growing session costs one layer's copy and disturbs no neighbour.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from routing.spans import Span
from swarm.errors import CacheFull, CapacityError, OutOfStep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer stores per position: `heads` keys of `key_dim` and values of `value_dim` elements."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class KvLedger:
    """Who has reserved how much, in positions × layers. Pure arithmetic.

    A session that runs fewer layers than the claim pays only for those.
    """

    def __init__(self, positions: int, layers: int) -> None:
        self.layers = layers
        self.total = positions * layers
        self.used = 0
        self._held: dict[Hashable, tuple[int, int]] = {}  # key -> positions, layers

    @property
    def free_positions(self) -> int:
        """Positions that a new session over the whole claim could reserve."""
        return (self.total - self.used) // self.layers

    def has_room(self, positions: int, layers: int, without: Collection[Hashable] = ()) -> bool:
        """Whether so much could be reserved now; without: if these sessions were let go."""
        return self.used - self._held_by(without) + positions * layers <= self.total

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def reserved(self, key: Hashable) -> int:
        return self._held[key][0]

    def free_without(self, keys: Collection[Hashable]) -> int:
        """`free_positions` if these sessions were let go."""
        return (self.total - self.used + self._held_by(keys)) // self.layers

    def _held_by(self, keys: Collection[Hashable]) -> int:
        return sum(positions * layers for positions, layers in (self._held.get(key, (0, 0)) for key in keys))

    def reserve(self, key: Hashable, positions: int, layers: int | None = None) -> None:
        """Hold `positions` for a new session. Raises CapacityError (nothing changed)."""
        if key in self._held:
            raise ValueError(f"session {key!r} already holds a reservation")
        layers = self.layers if layers is None else layers
        self._take(positions * layers, positions)
        self._held[key] = positions, layers

    def extend(self, key: Hashable, positions: int) -> None:
        """Hold `positions` in all; fewer than now changes nothing. Raises CapacityError (unchanged)."""
        held, layers = self._held[key]
        if positions > held:
            self._take((positions - held) * layers, positions)
            self._held[key] = positions, layers

    def free(self, key: Hashable) -> None:
        """Give everything back. A session that holds nothing is no error: closing twice is normal."""
        positions, layers = self._held.pop(key, (0, 0))
        self.used -= positions * layers

    def _take(self, amount: int, positions: int) -> None:
        if self.used + amount > self.total:
            raise CapacityError(
                f"{positions} KV positions wanted, {self.free_positions} of "
                f"{self.total // self.layers} are free ({len(self._held)} sessions)"
            )
        self.used += amount


class SessionCache:
    """One session's keys and values over `span`. Used by the engine's thread only, but for `grow_to`.

    keys[i]: [1, heads, room, key_dim], values[i]: [1, heads, room, value_dim]; i counts from span.start.
    """

    __slots__ = ("_layers", "_make", "freed", "keys", "length", "reserved", "room", "span", "values")

    def __init__(
        self,
        span: Span,
        layers: Sequence[LayerKV],
        reserved: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        import torch

        assert len(layers) == len(span)
        self.span, self._layers, self.reserved = span, tuple(layers), reserved
        self._make = lambda *shape: torch.empty(shape, dtype=dtype, device=device)
        self.length, self.room, self.freed = 0, reserved, False
        self.keys = [self._make(1, kv.heads, reserved, kv.key_dim) for kv in self._layers]
        self.values = [self._make(1, kv.heads, reserved, kv.value_dim) for kv in self._layers]

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on. O(1). Raises OutOfStep when it holds fewer."""
        if length > self.length:
            raise OutOfStep(length, self.length)
        self.length = length

    def check(self, position: int, tokens: int) -> None:
        """Raises OutOfStep or CacheFull (KV unchanged) if a step can't start here."""
        if position > self.length:
            raise OutOfStep(position, self.length)
        if position + tokens > self.reserved:
            raise CacheFull(position + tokens, self.reserved)

    def begin(self, position: int, tokens: int) -> None:
        """Cut to `position` and make room for `tokens` more. Raises as `check` does (KV unchanged)."""
        self.check(position, tokens)
        self.length = position
        if position + tokens > self.room:
            self._grow()

    def finish(self, length: int) -> None:
        """The step's layers are all written: positions up to `length` count from now on."""
        self.length = length

    def append(self, layer: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write new positions of one layer. key: [heads, n, key_dim], value: [heads, n, value_dim]."""
        stop = position + key.shape[1]
        self.keys[layer][0, :, position:stop] = key
        self.values[layer][0, :, position:stop] = value

    def grow_to(self, positions: int) -> None:
        """The reservation is larger now; the next step that needs the room takes it."""
        self.reserved = max(self.reserved, positions)

    def _grow(self) -> None:
        for i, kv in enumerate(self._layers):
            for side, width in ((self.keys, kv.key_dim), (self.values, kv.value_dim)):
                larger = self._make(1, kv.heads, self.reserved, width)
                larger[:, :, : self.length] = side[i][:, :, : self.length]
                side[i] = larger
        self.room = self.reserved

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class KvPool:
    """The ledger with the tensors behind it, for the claim `span`.

    layers: one LayerKV per layer of the claim. positions: how many the peer hands out in all.
    """

    def __init__(
        self,
        span: Span,
        layers: Sequence[LayerKV],
        positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.span, self.layers = span, tuple(layers)
        self.dtype, self.device = dtype, device
        self.ledger = KvLedger(positions, len(span))
        self._caches: dict[Hashable, SessionCache] = {}

    @property
    def free_positions(self) -> int:
        return self.ledger.free_positions

    def has_room(self, positions: int, span: Span, without: Collection[Hashable] = ()) -> bool:
        """Whether a session of so many positions over `span` could be reserved now, or without these."""
        return self.ledger.has_room(positions, len(span), without)

    def rehearse(self) -> None:
        """Take and touch all of the pool's memory once. Raises CapacityError if it isn't there."""
        import torch

        positions = self.ledger.free_positions
        try:
            whole = SessionCache(self.span, self.layers, positions, dtype=self.dtype, device=self.device)
            for tensor in (*whole.keys, *whole.values):
                tensor.zero_()
        except (RuntimeError, MemoryError) as error:
            size = (
                positions * sum(kv.elements for kv in self.layers) * torch.empty(0, dtype=self.dtype).itemsize
            )
            raise CapacityError(
                f"the KV cache of {positions} positions needs {size / 2**20:.0f} MiB and they can't be had "
                f"({str(error).splitlines()[0]}); lower --context, --max-sessions or --memory"
            ) from error

    def reserve(self, key: Hashable, positions: int, span: Span | None = None) -> SessionCache:
        """A new session's cache over `span` (the claim by default). Raises CapacityError, nothing changed."""
        span = span or self.span
        if not self.span.covers(span):
            raise ValueError(f"layers {span} are not within the claim {self.span}")
        self.ledger.reserve(key, positions, len(span))
        layers = self.layers[span.start - self.span.start : span.stop - self.span.start]
        try:
            cache = SessionCache(span, layers, positions, dtype=self.dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:
            self.ledger.free(key)
            raise CapacityError(f"no memory for {positions} KV positions ({error})") from error
        self._caches[key] = cache
        return cache

    def cache(self, key: Hashable) -> SessionCache:
        return self._caches[key]

    def extend(self, key: Hashable, positions: int) -> None:
        """`positions` in all for this session. Raises CapacityError, nothing changed."""
        self.ledger.extend(key, positions)
        self._caches[key].grow_to(positions)

    def free(self, key: Hashable) -> None:
        """Give the memory back; a step in flight keeps its tensors until it ends. Twice is no error."""
        self.ledger.free(key)
        cache = self._caches.pop(key, None)
        if cache is not None:
            cache.freed = True


def bytes_per_position(layers: Sequence[LayerKV], item_bytes: int) -> int:
    """KV bytes of one position over these layers."""
    return sum(kv.elements for kv in layers) * item_bytes
