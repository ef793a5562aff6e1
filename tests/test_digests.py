"""digests.py: sums that are kept equal those that are counted afresh."""

from __future__ import annotations

import random

import pytest

from swarm.digests import MAX_MODELS_SUMMED, Digests, check_buckets, differing
from swarm.errors import MessageError
from swarm.identity import PeerId, key_bytes, peer_id


def afresh(
    there: dict[PeerId, tuple[bytes, int]], buckets: int, only: frozenset[bytes] | None
) -> tuple[bytes, ...]:
    sums = [0] * buckets
    for peer, (model, value) in there.items():
        if only is None or model in only:
            sums[int.from_bytes(key_bytes(peer)[:4], "big") % buckets] += value
    return tuple((total % 2**64).to_bytes(8, "big") for total in sums)


def test_sums_follow_every_coming_and_going() -> None:
    rng = random.Random(7)
    models = [bytes([n]) * 32 for n in range(MAX_MODELS_SUMMED + 4)]
    kept, there = Digests(), {}
    for step in range(3000):
        if there and rng.random() < 0.4:
            peer = rng.choice(list(there))
            kept.remove(peer)
            del there[peer]
        else:
            peer = peer_id(rng.randbytes(32))
            there[peer] = (rng.choice(models), rng.getrandbits(64))
            kept.add(peer, *there[peer])
        if step % 50 == 0:
            buckets = rng.choice([1, 64, 256, 512])
            only = rng.choice([None, frozenset(rng.sample(models, 3)), frozenset()])
            assert kept.sums(buckets, only) == afresh(there, buckets, only), f"step {step}"
            assert len(kept._of) <= MAX_MODELS_SUMMED


def test_only_the_first_digest_about_a_model_walks_through_all_that_is_held() -> None:
    rng = random.Random(9)
    kept = Digests()
    for _ in range(50):
        kept.add(peer_id(rng.randbytes(32)), rng.choice([b"m", b"n"]), rng.getrandbits(64))
    first = kept.sums(64, frozenset({b"m"}))
    kept._there.clear()
    assert kept.sums(64, frozenset({b"m"})) == first != kept.sums(64, frozenset({b"n"}))


def test_whoever_is_missing_on_one_side_is_in_a_bucket_that_differs() -> None:
    rng = random.Random(8)
    one, other = Digests(), Digests()
    peers = [peer_id(rng.randbytes(32)) for _ in range(300)]
    for peer in peers:
        one.add(peer, b"m", rng.getrandbits(64))
    for peer in peers[3:]:
        other.add(peer, b"m", one._there[int.from_bytes(key_bytes(peer)[:4], "big") % 512][peer][1])
    chosen = differing(one.sums(64), other.sums(64))
    assert 1 <= len(chosen) <= 3
    found = set(one.within(chosen, 64))
    assert set(peers[:3]) <= found and len(found) < 60
    assert not set(one.within(chosen, 64, frozenset({b"n"})))


@pytest.mark.parametrize("buckets", [0, 3, 500, 1024])
def test_a_number_of_buckets_that_nobody_uses_is_refused(buckets: int) -> None:
    with pytest.raises(MessageError, match="buckets"):
        check_buckets(buckets)
