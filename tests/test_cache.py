"""KV memory against arithmetic written out by hand."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from peer import cache as cache_module
from peer.cache import ALIGNED, KvLedger, KvPool, SessionCache
from peer.kv import KvSizes, LayerKV, Reach
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


def pointers(cache: SessionCache) -> list[int]:
    return [side.data_ptr() for layer in cache.layers for side in (layer.keys, layer.values)]


def large_pool(context: int = 1 << 16) -> KvPool:
    """Of sessions that hold up to 4 x 2 x 256 x 2**16 floats, half a gigabyte each."""
    kv = (LayerKV(heads=2, key_dim=128, value_dim=128),) * 4
    sizes = KvSizes(kv, item_bytes=4, context=context, start=3)
    return KvPool(sizes, CLAIM, sizes.bytes(context, CLAIM), dtype=torch.float32)


@pytest.mark.skipif(not cache_module._addresses_are_free(), reason="where addresses cost memory, what grows is copied")
def test_a_long_session_grows_without_a_copy_and_costs_what_it_has_written() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    pool, before = large_pool(), resident()
    cache = pool.reserve("a", 64)
    whole, where = pool.sizes.bytes(pool.sizes.context, CLAIM), pointers(cache)
    for stop in (64, 4096, 8192):
        pool.extend("a", stop)
        start = cache.length
        cache.begin(start, stop - start)
        for layer in cache.layers:
            layer.write(start, *(torch.full((), value).expand(1, 2, stop - start, 128) for value in (1.0, 2.0)))
        cache.finish(stop)
        assert pointers(cache) == where
    written = pool.sizes.bytes(8192, CLAIM)
    assert resident() - before > 0.9 * written  # they are real
    assert resident() - before < 1.1 * written + (8 << 20) < 0.3 * whole
    assert all((layer.keys[0, :, :8192] == 1.0).all() for layer in cache.layers)
    with pytest.raises(CacheFull):  # addresses are no reservation
        cache.begin(8192, 1)
    pool.free("a")
    del cache, layer
    assert resident() - before < 0.1 * written + (8 << 20)  # gone at once


def test_where_addresses_are_refused_a_session_has_what_it_reserved_and_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(cache_module.mmap, "mmap", refused)
    pool = make_pool(100)
    cache = pool.reserve("a", 5)
    assert cache.layers[0].room == 5
    fill(cache, 0, 5)
    where = pointers(cache)
    pool.extend("a", 40)
    fill(cache, 5, 12)
    assert pointers(cache) != where and cache.layers[3].room == 40
    assert torch.equal(cache.layers[3].keys[0, 1, :12, 2], torch.arange(12.0) + 3000)


@pytest.mark.parametrize("why", ["overcommit", "RLIMIT_AS", "RLIMIT_DATA"])
def test_where_addresses_are_counted_a_session_takes_those_that_it_reserved(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a few sessions of a large context would leave none for anything else."""
    resource = pytest.importorskip("resource")
    if why == "overcommit":
        (tmp_path / "overcommit_memory").write_text("2\n")
        monkeypatch.setattr(cache_module, "OVERCOMMIT", tmp_path / "overcommit_memory")
    else:
        limited, free = getattr(resource, why), (resource.RLIM_INFINITY,) * 2
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, 1 << 40) if which == limited else free)
    cache = make_pool(100).reserve("a", 5)
    assert cache.layers[0].room == 5 and cache.layers[0].keys.untyped_storage().nbytes() < 5 * POSITION


def test_layers_of_one_arena_share_nothing() -> None:
    kinds = (LayerKV(1, 3, 5), LayerKV(2, 1, 7, window=4), LayerKV(3, 2, 2))  # of the last, keys and values are one
    sizes = KvSizes(kinds, item_bytes=2, context=1001)
    cache = KvPool(sizes, Span(0, 3), sizes.bytes(1001, Span(0, 3)), dtype=torch.bfloat16).reserve("a", 7)
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    for number, side in enumerate(sides):
        assert side.data_ptr() % ALIGNED == 0 or side is sides[-1]
        side.fill_(number)
    assert all((side == number).all() for number, side in enumerate(sides))


@pytest.mark.parametrize("kv", [LayerKV(2, 3, 3), LayerKV(2, 3, 3, window=4), LayerKV(2, 3, 3, window=4, chunked=True)])
@pytest.mark.parametrize("reserved", [6, 40])
def test_places_say_where_each_position_is_and_what_it_sees(kv: LayerKV, reserved: int) -> None:
    """To the end of what was reserved, after growing, where windows move, and of several tokens at once."""
    sizes = KvSizes((LayerKV(1, 2, 2), kv), item_bytes=4, context=60, reach=Reach(rewind=2, chunk=4))
    pool = KvPool(sizes, Span(0, 2), 10**6, dtype=torch.float32)
    caches = [
        pool.reserve("a", reserved),
        SessionCache(Span(0, 2), sizes.layers, 6, dtype=torch.float32, reach=sizes.reach),
    ]
    position = 0
    for tokens in (1, 3, 1, 1, 2, 3, 3, 1, 4, 4, 1, 1, 1, 2):
        if position == 6:
            pool.extend("a", 40)
            caches[1].grow_to(40)
        for cache in caches:
            cache.begin(position, tokens)
            layer, places = cache.layers[1], cache.places(Span(1, 2), position, tokens)
            assert places.shape == (1, tokens, 5)
            for p, (keys, values, room, first, at) in zip(range(position, position + tokens), places[0], strict=True):
                assert (keys, values) == (layer.keys.data_ptr(), layer.values.data_ptr())
                assert layer.keys.shape == layer.values.shape == (1, 2, room, 3)
                layer.keys[0, :, at], layer.values[0, :, at] = p, -p
                sees = [q for q in range(p + 1) if kv.first_seen(p) <= q]
                assert layer.keys[0, 1, first : at + 1, 2].tolist() == sees
                assert (-layer.values[0, 0, first : at + 1, 0]).tolist() == sees
            cache.finish(position + tokens)
        position += tokens


def test_a_window_moves_also_where_the_session_has_grown_within_another_ones_pass() -> None:
    """In which torch makes tensors that may not be changed outside of it."""
    kv, reach = LayerKV(2, 3, 3, window=4), Reach(rewind=2, chunk=4)
    cache = SessionCache(Span(0, 1), (kv,), 6, dtype=torch.float32, reach=reach)
    for position in range(30):
        with torch.inference_mode(position == 6):
            if position == 6:
                cache.grow_to(30)
            cache.begin(position, 1)
            keys, _ = cache.layers[0].write(position, *(torch.full((1, 2, 1, 3), float(position)) for _ in range(2)))
        assert keys[0, 0, :, 0].tolist() == list(range(kv.first_seen(position), position + 1))
        cache.finish(position + 1)


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
    cache = SessionCache(CLAIM, SIZES.over(CLAIM), 10, dtype=torch.float32)
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert taken == SIZES.bytes(10, CLAIM) == 10 * POSITION


def test_a_pool_larger_than_the_machine_is_told_before_it_serves() -> None:
    pool = make_pool(1 << 44)
    with pytest.raises(CapacityError, match="lower --context"):
        pool.rehearse()
    make_pool(64).rehearse()
