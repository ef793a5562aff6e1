"""KV memory against arithmetic written out by hand."""

from __future__ import annotations

import pytest
import torch

from peer.cache import KvLedger, KvPool, SessionCache
from peer.kv import KvSizes, LayerKV
from routing.spans import Span
from swarm.errors import CacheFull, CapacityError, OutOfStep

KV = LayerKV(heads=2, key_dim=4, value_dim=3)


CLAIM = Span(3, 7)
SIZES = KvSizes((KV,) * 4, item_bytes=4, context=100, start=3)
POSITION = 4 * 2 * (4 + 3) * 4  # bytes: layers, heads, key and value, float32


def make_pool(positions: int = 100) -> KvPool:
    return KvPool(SIZES, CLAIM, positions * POSITION, dtype=torch.float32)


def fill(cache: SessionCache, start: int, stop: int) -> None:
    """Write positions, each with its own number, into every layer."""
    cache.begin(start, stop - start)
    numbers = torch.arange(start, stop, dtype=torch.float32)
    for layer in range(len(cache.span)):
        key = numbers[None, None, :, None].expand(1, 2, -1, 4) + 1000 * layer
        cache.layers[layer].write(start, key, -key[..., :3])
    cache.finish(stop)


def test_the_ledger_never_gives_out_more_than_there_is() -> None:
    ledger = KvLedger(SIZES, CLAIM, 100 * POSITION)
    ledger.reserve("a", 60)
    with pytest.raises(CapacityError, match="50 KV positions wanted, 40 of 100 are free"):
        ledger.reserve("b", 50)
    ledger.reserve("b", 40)
    assert ledger.free_positions == 0
    ledger.free("a")
    ledger.free("a")  # closing twice is normal
    assert ledger.free_positions == 60 and len(ledger) == 1


def test_a_session_over_fewer_layers_pays_for_those_only() -> None:
    ledger = KvLedger(SIZES, CLAIM, 100 * POSITION)
    ledger.reserve("half", 100, Span(4, 6))
    assert ledger.free_positions == 50
    ledger.reserve("whole", 50)
    assert ledger.free_positions == 0


def test_an_extension_that_does_not_fit_changes_nothing() -> None:
    pool = make_pool(100)
    cache = pool.reserve("a", 60)
    pool.reserve("b", 30)
    with pytest.raises(CapacityError):
        pool.extend("a", 71)
    assert (cache.reserved, pool.ledger.reserved("a"), pool.free_positions) == (60, 60, 10)
    pool.extend("a", 20)  # fewer than now is no extension
    assert cache.reserved == 60


def test_a_step_beyond_the_reservation_is_refused_and_the_kv_unchanged() -> None:
    cache = make_pool().reserve("a", 10)
    fill(cache, 0, 8)
    with pytest.raises(CacheFull):
        cache.begin(8, 3)
    with pytest.raises(OutOfStep):
        cache.begin(9, 1)
    with pytest.raises(OutOfStep):
        cache.truncate(9)
    assert cache.length == 8


def test_a_growing_session_keeps_what_it_has_and_disturbs_no_neighbour() -> None:
    pool = make_pool(100)
    first, second = pool.reserve("a", 5), pool.reserve("b", 5)
    fill(first, 0, 5)
    fill(second, 0, 5)
    neighbour = [layer.keys.data_ptr() for layer in second.layers]
    pool.extend("a", 40)
    fill(first, 5, 12)
    for layer in range(4):
        expected = torch.arange(12.0) + 1000 * layer
        assert torch.equal(first.layers[layer].keys[0, 1, :12, 2], expected)
        assert torch.equal(first.layers[layer].values[0, 0, :12, 1], -expected)
    assert [layer.keys.data_ptr() for layer in second.layers] == neighbour


def test_a_rewound_session_writes_over_what_was_there() -> None:
    cache = make_pool().reserve("a", 10)
    fill(cache, 0, 8)
    cache.truncate(3)
    assert cache.length == 3
    fill(cache, 2, 5)
    assert cache.length == 5 and cache.layers[0].keys[0, 0, :5, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_step_that_failed_half_way_leaves_the_length_at_its_start() -> None:
    cache = make_pool().reserve("a", 10)
    fill(cache, 0, 4)
    cache.begin(4, 2)
    cache.layers[0].write(4, torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 3))  # the first layer only, then nothing
    assert cache.length == 4


def test_a_part_of_the_claim_gets_a_cache_for_its_own_layers() -> None:
    pool = make_pool(100)
    cache = pool.reserve("a", 100, Span(4, 6))
    assert len(cache.layers) == 2 and pool.free_positions == 50
    with pytest.raises(ValueError, match="not within the claim"):
        pool.reserve("b", 1, Span(2, 4))


def test_freeing_gives_everything_back_a_thousand_times_over() -> None:
    pool = make_pool(100)
    for _ in range(1000):
        cache = pool.reserve("a", 100)
        pool.free("a")
        assert cache.freed
    assert pool.free_positions == 100 and len(pool.ledger) == 0


def test_bytes_are_what_the_tensors_take() -> None:
    cache = make_pool().reserve("a", 10)
    assert cache.nbytes == SIZES.bytes(10, CLAIM) == 10 * POSITION


def test_a_pool_larger_than_the_machine_is_told_before_it_serves() -> None:
    pool = make_pool(1 << 44)
    with pytest.raises(CapacityError, match="lower --context"):
        pool.rehearse()
    make_pool(64).rehearse()
