"""KV memory: a ledger of reservations (no torch) and the tensors behind them.

Invariants: the ledger's reservations never exceed its total; a session never writes more
than it reserved; `SessionCache.length` counts only positions of steps that finished, so a
step that fails half way has changed nothing that anyone will read; a step never attends to a position
that a window has let go.

How memory is made real. The pool's bytes are a line of the peer's budget, the ledger never gives out
more than that, and `KvPool.rehearse` allocates and touches all of it once before the peer says that it
serves. On an accelerator torch's allocator keeps what was rehearsed, so it stays ours. On a CPU it goes
back to the system, and each session becomes real page by page as it is written (`_Arena`): the default budget is
half of what is available, so only a foreign process that eats the other half could come between. One
committed arena instead would need compaction, or refuse sessions for want of a contiguous gap.

Growing. On a CPU a session gets addresses for the peer's whole context when it opens, which cost nothing until they are
written: growing is arithmetic, and closing gives the pages back at once. What is real exceeds what is reserved by a
page at the end of each head at most. On an accelerator, and where the system gives no such addresses, a session that
grows is copied layer by layer. The ledger is called by the asyncio loop, the tensors are touched only by the engine's
thread; so that is asked for by the one (`extend`) and done by the other (`SessionCache.begin`).

Windows. A layer that attends to a window has room for window + R positions (`kv.py`). When a step would not
fit, what it and R need is moved to the front, once in about `chunk` positions: keys stay one run of
memory in their order, which is what the fused attention kernels want, and a decode step pays for the move a small
part of what reading the window costs it. Cutting a session only ever changes its length.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from peer.kv import REACH, KvSizes, LayerKV, Reach, Rewinds
from routing.spans import Span
from swarm.errors import CacheFull, CannotRewind, CapacityError, OutOfStep

if TYPE_CHECKING:
    import torch


IntArray = npt.NDArray[np.int64]
ALIGNED = 64  # bytes: a cache line, and the widest vector
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # 2: addresses count as memory


class KvLedger:
    """Who has reserved how much, in bytes of KV (and journal, where `sizes` counts it). Pure arithmetic.

    A session that runs fewer layers than the claim pays only for those.
    """

    def __init__(self, sizes: KvSizes, claim: Span, total_bytes: int) -> None:
        self.sizes, self.claim, self.total = sizes, claim, total_bytes
        self.used = 0
        self._held: dict[Hashable, tuple[int, Span]] = {}  # key -> positions, over which layers

    @property
    def free_positions(self) -> int:
        """Positions that a new session over the whole claim could reserve."""
        return self.sizes.tokens(self.total - self.used, self.claim)

    def has_room(self, positions: int, span: Span, without: Collection[Hashable] = ()) -> bool:
        """Whether so much could be reserved now; without: if these sessions were let go."""
        return self.used - self._held_by(without) + self.sizes.bytes(positions, span) <= self.total

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def reserved(self, key: Hashable) -> int:
        return self._held[key][0]

    def free_without(self, keys: Collection[Hashable]) -> int:
        """`free_positions` if these sessions were let go."""
        return self.sizes.tokens(self.total - self.used + self._held_by(keys), self.claim)

    def held(self, key: Hashable) -> int:
        """Bytes that this session has reserved; 0 for none."""
        return self._held_by((key,))

    def _held_by(self, keys: Collection[Hashable]) -> int:
        return sum(self.sizes.bytes(*self._held[key]) for key in keys if key in self._held)

    def reserve(self, key: Hashable, positions: int, span: Span | None = None) -> None:
        """Hold `positions` for a new session. Raises CapacityError (nothing changed)."""
        if key in self._held:
            raise ValueError(f"session {key!r} already holds a reservation")
        span = span or self.claim
        self._take(self.sizes.bytes(positions, span), positions)
        self._held[key] = positions, span

    def extend(self, key: Hashable, positions: int) -> None:
        """Hold `positions` in all; fewer than now changes nothing. Raises CapacityError (unchanged)."""
        held, span = self._held[key]
        if positions > held:
            self._take(self.sizes.bytes(positions, span) - self.sizes.bytes(held, span), positions)
            self._held[key] = positions, span

    def free(self, key: Hashable) -> None:
        """Give everything back. A session that holds nothing is no error: closing twice is normal."""
        if key in self._held:
            self.used -= self.sizes.bytes(*self._held.pop(key))

    def _take(self, amount: int, positions: int) -> None:
        if self.used + amount > self.total:
            raise CapacityError(
                f"{positions} KV positions wanted, {self.free_positions} of "
                f"{self.sizes.tokens(self.total, self.claim)} are free ({len(self._held)} sessions)"
            )
        self.used += amount


class _Arena:
    """A run of addresses out of which a session's tensors are cut. Freed with the last of them. Raises OSError where
    the system gives no `size` bytes of addresses (it counts them as memory, or they are far more than it has)."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        import torch

        if not _addresses_are_free():
            raise OSError("addresses cost memory here")
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a huge page is real as a whole when one byte is written
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory, self._dtype, self._used = torch.frombuffer(mapped, dtype=torch.uint8), dtype, 0

    def make(self, *shape: int) -> torch.Tensor:
        start = self._used
        self._used += math.prod(shape) * self._dtype.itemsize
        made = self._memory[start : self._used].view(self._dtype).view(shape)
        self._used += -self._used % ALIGNED
        return made


def _addresses_are_free() -> bool:
    """Not where the system counts them as memory, nor where a process may have only so many: what one session took
    for its whole context would be lacking elsewhere."""
    if os.name != "posix":
        return False
    import resource

    limits = (getattr(resource, name, None) for name in ("RLIMIT_AS", "RLIMIT_DATA"))
    if any(limit is not None and resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return OVERCOMMIT.read_text().strip() != "2"
    except OSError:  # no Linux
        return True


class LayerStore:
    """One layer's keys and values of one session: its positions from `base` on.

    keys: [1, heads, room, key_dim], values: [1, heads, room, value_dim].
    """

    __slots__ = ("_reach", "base", "keys", "kv", "room", "values")

    def __init__(self, kv: LayerKV, positions: int, reach: Reach, make: Callable[..., torch.Tensor]) -> None:
        self.kv, self._reach = kv, reach
        self.base, self.room = 0, kv.stored(positions, reach)
        self.keys = make(1, kv.heads, self.room, kv.key_dim)
        self.values = make(1, kv.heads, self.room, kv.value_dim)

    @property
    def oldest(self) -> int:
        """The first position at which a step finds all that it attends to."""
        return self.base + self.kv.window - 1 if self.base and self.kv.window else 0

    def pieces(self, tokens: int) -> Iterable[tuple[int, int]]:
        """How many of a step's tokens `write` takes at once: [start, stop) of each piece."""
        return ((0, tokens),) if self.kv.window is None else self._reach.pieces(tokens)

    def write(self, position: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new positions, and give back all that they attend to, their own included.

        key: [1, heads, n, key_dim], value: [1, heads, n, value_dim] -> the same with m >= n positions, the last n
        of which are the new ones and the first is what the first of those sees first. Views: read before the
        next `write`.
        """
        first, stop = self.kv.first_seen(position), position + key.shape[2]
        self.make_room(position, key.shape[2])
        begin, end = position - self.base, stop - self.base
        self.keys[:, :, begin:end] = key
        self.values[:, :, begin:end] = value
        return self.keys[:, :, first - self.base : end], self.values[:, :, first - self.base : end]

    def make_room(self, position: int, tokens: int) -> None:
        """For so many new positions, at most a chunk, which then are written without letting go of anything."""
        first = self.kv.first_seen(position)
        assert first >= self.base, f"position {first} is attended to, but what lies before {self.base} is gone"
        if position + tokens - self.base > self.room:
            self._slide(position)

    def _slide(self, position: int) -> None:
        """Let go of all but what a step at `position`, or at one `rewind` before it, attends to."""
        assert self.kv.window is not None, "only windows let go of anything"
        kept = self.kv.window + self._reach.rewind
        by = position - kept - self.base
        for side in (self.keys, self.values):
            for at in range(0, kept, self._reach.chunk):  # the two runs overlap, so through a small copy
                stop = min(at + self._reach.chunk, kept)
                side[:, :, at:stop] = side[:, :, at + by : stop + by].clone()
        self.base += by

    def grow(self, positions: int, length: int) -> None:
        """Room for `positions` in all; those before `length` are kept."""
        import torch

        room, held = self.kv.stored(positions, self._reach), length - self.base
        if room <= self.room:
            return
        with torch.inference_mode(False):  # a step that is let in begins within another's pass; windows move in any
            keys, values = _with_room(self.keys, room), _with_room(self.values, room)
            keys[:, :, :held], values[:, :, :held] = self.keys[:, :, :held], self.values[:, :, :held]
        self.room, self.keys, self.values = room, keys, values


def _with_room(tensor: torch.Tensor, room: int) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape[:2], room, tensor.shape[3]))


class SessionCache:
    """One session's keys and values over `span`. Used by the engine's thread only, but for `grow_to`.

    layers[i]: what layer span.start + i keeps. chunk: of the windows' `Reach`, None where nothing has a window.
    most: positions that it may grow to without being copied, where that costs nothing; by default those reserved.
    """

    __slots__ = ("__weakref__", "_known", "_reach", "_room", "chunk", "freed", "layers", "length", "reserved", "span")

    def __init__(
        self,
        span: Span,
        layers: Sequence[LayerKV],
        reserved: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        reach: Reach = REACH,
        most: int | None = None,
    ) -> None:
        import torch

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        assert len(layers) == len(span)
        make: Callable[..., torch.Tensor] = empty
        self.span, self.reserved, self._reach = span, reserved, reach
        self.length, self._room, self.freed = 0, reserved, False
        self._known: IntArray | None = None
        if most is not None and torch.device(device).type == "cpu":
            size = sum(kv.elements * kv.stored(most, reach) * dtype.itemsize + 2 * ALIGNED for kv in layers)
            with contextlib.suppress(OSError):
                make, self._room = _Arena(size, dtype).make, max(reserved, most)
        self.layers = [LayerStore(kv, self._room, reach, make) for kv in layers]
        self.chunk = reach.chunk if any(kv.window is not None for kv in layers) else None

    def places(self, span: Span, position: int, tokens: int) -> IntArray:
        """Where the layers of `span`, a part of this one's, have new positions that are written next, no more than a
        `Reach`'s chunk: int64 [layers, tokens, 5], as `kernels.run_layers` says. On a CPU. Raises ValueError for what
        would be read or written outside of them."""
        part = slice(span.start - self.span.start, span.stop - self.span.start)
        made = np.empty((len(span), tokens, 5), np.int64)
        made[:, :, :3] = self._stores()[part, None]
        made[:, :, 3], made[:, :, 4] = 0, np.arange(position, position + tokens)
        if self.chunk is not None:
            for layer, rows in zip(self.layers[part], made, strict=True):
                if layer.kv.window is None:
                    continue
                layer.make_room(position, tokens)
                rows[:, 3] = [layer.kv.first_seen(p) - layer.base for p in range(position, position + tokens)]
                rows[:, 4] -= layer.base
        if (made[:, -1, 4] >= made[:, -1, 2]).any() or (made[:, 0, 3:] < 0).any():
            raise ValueError(f"positions {position} to {position + tokens - 1} have no room, or see what is gone")
        return made

    def _stores(self) -> IntArray:
        """Of each layer: the addresses of its keys and of its values, and its room."""
        if self._known is None:
            known = [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.room) for layer in self.layers]
            self._known = np.array(known, np.int64)
        return self._known

    @property
    def oldest(self) -> int:
        """A step may start here or later, or at 0: before it the windows have let go."""
        return max(layer.oldest for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on. O(1). Raises OutOfStep when it holds fewer, and CannotRewind."""
        self._check_start(length)
        self.length = length
        if length == 0:
            for layer in self.layers:
                layer.base = 0

    def check(self, position: int, tokens: int) -> None:
        """Raises OutOfStep, CannotRewind or CacheFull (KV unchanged) if a step can't start here."""
        self._check_start(position)
        if position + tokens > self.reserved:
            raise CacheFull(position + tokens, self.reserved)

    def _check_start(self, position: int) -> None:
        if position > self.length:
            raise OutOfStep(position, self.length)
        if 0 < position < self.oldest:
            raise CannotRewind(position, self.oldest)

    def begin(self, position: int, tokens: int) -> None:
        """Cut to `position` and make room for `tokens` more. Raises as `check` does (KV unchanged).

        Where the next chunk runs in pieces, all of it is named at the first: windows let go of what is older than
        that, and no more, which is what `Rewinds` counts on.
        """
        self.check(position, tokens)
        self.truncate(position)
        if position + tokens > self._room:
            for layer in self.layers:
                layer.grow(self.reserved, self.length)
            self._room, self._known = self.reserved, None
        if self.chunk is not None:
            for layer in self.layers:
                if layer.kv.window is not None:
                    layer.make_room(position, min(tokens, self.chunk))

    def finish(self, length: int) -> None:
        """The step's layers are all written: positions up to `length` count from now on."""
        self.length = length

    def grow_to(self, positions: int) -> None:
        """The reservation is larger now; the next step that needs the room takes it."""
        self.reserved = max(self.reserved, positions)

    def touch(self) -> None:
        """Make the memory real: every byte is written."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes that steps may write: of the room that there is, what is reserved."""
        return sum(
            min(layer.room, layer.kv.stored(self.reserved, self._reach)) * layer.kv.elements * layer.keys.itemsize
            for layer in self.layers
        )


class KvPool:
    """The ledger with the tensors behind it, for the claim `span`.

    sizes: of sessions over any part of the claim. total_bytes: what the peer hands out in all.
    """

    def __init__(
        self,
        sizes: KvSizes,
        span: Span,
        total_bytes: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sizes, self.span, self.dtype, self.device = sizes, span, dtype, device
        self.ledger = KvLedger(sizes, span, total_bytes)
        self._caches: dict[Hashable, SessionCache] = {}
        self.on_free: Callable[[SessionCache], None] = lambda _: None  # its steps aren't wanted any more

    @property
    def free_positions(self) -> int:
        return self.ledger.free_positions

    def has_room(self, positions: int, span: Span, without: Collection[Hashable] = ()) -> bool:
        """Whether a session of so many positions over `span` could be reserved now, or without these."""
        return self.ledger.has_room(positions, span, without)

    def rewinds(self, span: Span) -> Rewinds:
        """To follow how far back a session over `span` can be cut."""
        return Rewinds.over(self.sizes.over(span), self.sizes.reach)

    def keeps(self, held: int, positions: int) -> bool:
        """Whether a session that grows from `held` positions to `positions` keeps what it has computed."""
        return self.sizes.encode_alike(held, positions)

    def rehearse(self) -> None:
        """Take and touch all of the pool's memory once. Raises CapacityError if it isn't there."""
        import torch

        total = self.ledger.total
        try:
            torch.empty(total, dtype=torch.uint8, device=self.device).zero_()
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"the KV cache of {self.free_positions} positions needs {total / 2**20:.0f} MiB and they can't be had "
                f"({str(error).splitlines()[0]}); lower --context, --max-sessions or --memory"
            ) from error

    def reserve(self, key: Hashable, positions: int, span: Span | None = None) -> SessionCache:
        """A new session's cache over `span` (the claim by default). Raises CapacityError, nothing changed."""
        span = span or self.span
        if not self.span.covers(span):
            raise ValueError(f"layers {span} are not within the claim {self.span}")
        self.ledger.reserve(key, positions, span)
        try:
            cache = SessionCache(
                span,
                self.sizes.over(span),
                positions,
                dtype=self.dtype,
                device=self.device,
                reach=self.sizes.reach,
                most=max(positions, self.sizes.context),
            )
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
            self.on_free(cache)
