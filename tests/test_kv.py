"""What sessions cost and how far back they go, against counting one position after the other."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peer.cache import KvLedger
from peer.kv import CHUNK, CREDIT, SPECULATION, KvSizes, LayerKV, Reach, Rewinds
from routing.spans import Span
from swarm.errors import CapacityError

KINDS = [
    LayerKV(2, 4, 4),
    LayerKV(1, 8, 3, window=5),
    LayerKV(1, 2, 2, window=11),
    LayerKV(3, 2, 2, window=4, chunked=True),
]
layers = st.lists(st.sampled_from(KINDS), min_size=1, max_size=7)
reaches = st.builds(Reach, rewind=st.integers(0, 6), chunk=st.integers(1, 6))


@functools.lru_cache(maxsize=10_000)
def counted(sizes: KvSizes, positions: int, span: Span) -> int:
    """One position after the other: each is stored on its own, and at the end only so many are left."""
    total = 0
    for layer in span:
        kv = sizes.layers[layer - sizes.start]
        kept: list[int] = []
        for position in range(positions):
            kept.append(position)
            if kv.window is not None:
                kept = kept[-(kv.window + sizes.reach.rewind + sizes.reach.chunk) :]
        total += len(kept) * kv.heads * (kv.key_dim + kv.value_dim) * sizes.item_bytes
    return total + positions * sizes.row_bytes


def fitting(sizes: KvSizes, room: int, span: Span) -> int:
    """Open sessions of full context while there is room, then the longest one that still fits."""
    tokens, whole = 0, counted(sizes, sizes.context, span)
    while whole <= room:
        tokens, room = tokens + sizes.context, room - whole
    return tokens + max(n for n in range(sizes.context + 1) if counted(sizes, n, span) <= room)


@st.composite
def spans_of_sizes(draw: st.DrawFn) -> tuple[KvSizes, Span]:
    made = tuple(draw(layers))
    start = draw(st.integers(0, 3))
    item, row, context = draw(st.sampled_from((2, 4))), draw(st.sampled_from((0, 64))), draw(st.integers(1, 40))
    sizes = KvSizes(made, item, context, start, row, draw(reaches))
    a = draw(st.integers(0, len(made) - 1))
    return sizes, Span(start + a, start + draw(st.integers(a + 1, len(made))))


@given(spans_of_sizes(), st.integers(0, 60))
def test_a_session_costs_what_its_layers_keep(case: tuple[KvSizes, Span], positions: int) -> None:
    sizes, span = case
    assert sizes.bytes(positions, span) == counted(sizes, positions, span)


@given(spans_of_sizes(), st.integers(0, 20_000), st.integers(0, 130))
def test_tokens_are_those_of_whole_sessions_and_one_more(case: tuple[KvSizes, Span], room: int, tokens: int) -> None:
    sizes, span = case
    assert sizes.tokens(room, span) == fitting(sizes, room, span)
    assert sizes.tokens(sizes.bytes_for(tokens, span), span) >= tokens
    if tokens <= sizes.context:  # what is advertised decides whether a session is sent here
        assert (sizes.tokens(room, span) >= tokens) == (counted(sizes, tokens, span) <= room)


class AnyLedger(RuleBasedStateMachine):
    """Sessions come, grow and go; the ledger is compared with the sum over all that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = KvSizes(tuple(KINDS), 2, context=30, start=2, row_bytes=10, reach=Reach(2, 3))
        self.claim, self.total = Span(2, 6), 9000
        self.ledger = KvLedger(self.sizes, self.claim, self.total)
        self.open: dict[int, tuple[int, Span]] = {}
        self.keys = 0

    @property
    def used(self) -> int:
        return sum(counted(self.sizes, positions, span) for positions, span in self.open.values())

    @rule(positions=st.integers(1, 40), start=st.integers(2, 5), length=st.integers(1, 4))
    def reserve(self, positions: int, start: int, length: int) -> None:
        span, self.keys = Span(start, min(6, start + length)), self.keys + 1
        fits = self.used + counted(self.sizes, positions, span) <= self.total
        assert self.ledger.has_room(positions, span) == fits
        try:
            self.ledger.reserve(self.keys, positions, span)
        except CapacityError:
            assert not fits
        else:
            assert fits
            self.open[self.keys] = positions, span

    @precondition(lambda self: self.open)
    @rule(data=st.data(), positions=st.integers(1, 60))
    def extend(self, data: st.DataObject, positions: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        held, span = self.open[key]
        more = counted(self.sizes, max(held, positions), span) - counted(self.sizes, held, span)
        fits = self.used + more <= self.total
        try:
            self.ledger.extend(key, positions)
        except CapacityError:
            assert not fits
        else:
            assert fits
            self.open[key] = max(held, positions), span

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[key]
        self.ledger.free(key)
        self.ledger.free(key)  # twice is no error

    @invariant()
    def the_sum_is_right(self) -> None:
        assert self.ledger.used == self.used <= self.total
        assert self.ledger.free_positions == fitting(self.sizes, self.total - self.used, self.claim)
        some = sorted(self.open)[::2]
        left = self.total - self.used + sum(counted(self.sizes, *self.open[key]) for key in some)
        assert self.ledger.free_without(some) == fitting(self.sizes, left, self.claim)


TestAnyLedger = AnyLedger.TestCase
TestAnyLedger.settings = settings(max_examples=50, stateful_step_count=25)


def test_the_windows_of_a_long_context_cost_a_small_part_of_it() -> None:
    """Gemma 3's pattern: five layers in six see 1024 positions of 32,768."""
    local, full = LayerKV(4, 256, 256, window=1024), LayerKV(4, 256, 256)
    layer = tuple(full if i % 6 == 5 else local for i in range(12))
    sizes = KvSizes(layer, item_bytes=2, context=32_768)
    position = 4 * (256 + 256) * 2
    kept = 1024 + 64 + 16 + 256  # window + credit + speculation + one chunk
    assert (CREDIT, SPECULATION, CHUNK) == (64, 16, 256)
    assert sizes.bytes(32_768, Span(0, 12)) == (2 * 32_768 + 10 * kept) * position
    assert sizes.bytes(500, Span(0, 12)) == 12 * 500 * position


def test_a_session_that_was_never_longer_than_window_and_r_goes_back_anywhere() -> None:
    back = Rewinds.over((KINDS[1], KINDS[2]), Reach(rewind=3, chunk=4))  # the shortest keeps 5 + 7
    for position in range(12):
        back.wrote(position, 1)
    assert back.oldest == 0 and back.allows(1)
    back.wrote(12, 1)
    assert back.oldest == 9 and back.allows(0) and not back.allows(8)
    back.wrote(0, 5)  # from the beginning: everything is there again
    assert back.oldest == 0


def test_without_windows_nothing_is_ever_let_go() -> None:
    back = Rewinds.over((KINDS[0],) * 3, Reach())
    back.wrote(0, 2000)
    back.wrote(2000, 1)
    assert back.oldest == 0


def test_what_the_engine_holds_counts_as_written() -> None:
    """A step that is handed out may be dropped by a repair, but it has moved the windows."""
    back = Rewinds.over((KINDS[1],), Reach(rewind=2, chunk=4))
    back.wrote(0, 4)
    back.wrote(4, 4)
    back.wrote(8, 4)
    assert back.oldest == 6  # the step at 8 may be cut, and two more
    back.wrote(6, 4)
    assert back.oldest == 6
