"""table.py: what outranks what, ages, tombstones, room."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from swarm import places, table
from swarm.digests import Models
from swarm.errors import MessageError
from swarm.heads import head_id
from swarm.identity import Identity, PeerId
from swarm.messages import Told
from swarm.records import MAX_LEASE_S, SIGNATURE_BYTES, open_descriptor, record_hash, sign_record
from swarm.table import Table, Verdict
from tests.sim.records import FINGERPRINT
from tests.told import ALICE, LEASE_S, a_descriptor, a_heartbeat, left, told


def test_a_lease_is_what_remains_of_it() -> None:
    held = Table()
    held.accept(told(age_s=10.0), now=100.0)
    (entry,) = held.live(101.0)
    assert (entry.age_s, entry.lease_left_s) == (11.0, 4.0)
    assert held.live(105.0) == ()
    assert held.lapse(105.0) == [ALICE.peer_id]


def test_leases_that_end_together_are_worked_off_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever signs thousands of records can have them all end at one moment."""
    monkeypatch.setattr(table, "LAPSED_AT_ONCE", 2)
    held, signers = Table(), [Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)]
    for signer in signers:
        held.accept(told(identity=signer), now=0.0)
    over = []
    while (due := held.next_lapse) is not None and due <= LEASE_S:
        some = held.lapse(LEASE_S)
        assert 0 < len(some) <= 2 and held.live(LEASE_S) == ()
        over += some
    assert sorted(over) == sorted(signer.peer_id for signer in signers)


def test_heads_that_fade_together_leave_the_digests_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FADED_AT_ONCE", 2)
    held, empty = Table(), Table().digests.sums(1)
    for number in range(1, 6):
        held.accept(told(identity=Identity.from_seed(bytes([number]) * 32)), now=0.0)
    sums = []
    for _ in range(3):
        held.fade(0.9 * LEASE_S)
        sums.append(held.digests.sums(1))
    assert len(set(sums)) == 3 and sums[-1] == empty


def test_a_repeated_heartbeat_stretches_nothing() -> None:
    held = Table()
    held.accept(told(age_s=4.0), now=100.0)
    assert held.accept(told(age_s=0.0), now=104.0) is Verdict.STALE
    assert held.live(111.0) == ()


def test_a_lapsed_record_comes_back_only_by_its_owner() -> None:
    held = Table()
    held.accept(told(seq=10, beat=20), now=0.0)
    held.lapse(LEASE_S)
    for ghost in (told(seq=10, beat=20), told(seq=10, beat=15), told(seq=5, beat=19)):
        assert held.accept(ghost, now=LEASE_S + 1) in (Verdict.STALE, Verdict.ENDED)
    assert held.live(LEASE_S + 1) == ()
    assert held.accept(told(seq=21), now=LEASE_S + 2) is Verdict.CHANGED
    assert len(held.live(LEASE_S + 2)) == 1


def test_a_restarted_peer_outlives_its_old_record() -> None:
    held = Table()
    held.accept(told(seq=30), now=0.0)
    held.accept(told(seq=10, beat=5000, name="old"), now=1.0)
    assert [entry.descriptor.name for entry in held.live(1.0)] == ["laptop"]


def test_a_tombstone_lasts_longer_than_any_lease() -> None:
    held = Table()
    held.accept(told(seq=10), now=0.0)
    held.lapse(LEASE_S)
    held.lapse(LEASE_S + MAX_LEASE_S + 1)
    assert held.accept(told(seq=9), now=LEASE_S + MAX_LEASE_S + 1) is Verdict.ENDED


def test_after_its_tombstone_a_head_that_was_held_here_is_not_taken_again() -> None:
    """A liar keeps recordings for as long as it likes."""
    held = Table()
    beats = [told(seq=10, beat=beat) for beat in range(11, 15)]
    for at, beat in enumerate(beats):
        held.accept(beat, now=float(at))
    later = LEASE_S + table.GONE_S + 60.0
    held.lapse(LEASE_S + 10.0)
    held.lapse(later)
    assert held.lapsed() == ()
    assert [held.accept(beat, now=later) for beat in beats] == [Verdict.STALE] * 4
    assert held.live(later) == ()


def test_after_its_tombstone_an_owner_without_state_and_with_a_wrong_clock_is_taken_at_once() -> None:
    held = Table()
    held.accept(told(seq=1000), now=0.0)
    later = LEASE_S + table.GONE_S + 60.0
    held.lapse(LEASE_S)
    assert held.accept(told(seq=5), now=LEASE_S + 1.0) is Verdict.ENDED
    held.lapse(later)
    assert held.accept(told(seq=7), now=later) is Verdict.CHANGED


def test_what_is_remembered_of_a_peer_goes_with_its_tombstone() -> None:
    held = Table()
    held.places.proved(ALICE.peer_id, "45.9.9.7")
    held.accept(told(seq=10), now=0.0)
    held.lapse(LEASE_S)
    assert held.places.is_proved(ALICE.peer_id)
    held.lapse(LEASE_S + table.GONE_S)
    assert not held.places.is_proved(ALICE.peer_id)


def test_a_table_that_everybody_left_takes_no_more_than_an_empty_one() -> None:
    held = Table(check=lambda *_: None)
    for n in range(300):
        held.accept(told(identity=Identity.from_seed(n.to_bytes(32, "big"))), now=0.0)
    while held.lapse(LEASE_S):  # some at a time
        pass
    assert len(held.lapsed()) == 300
    for minutes in range(1, 30):
        held.lapse(LEASE_S + 60.0 * minutes)
    assert not held.digests._there and not held._lapses
    emptied = (held._gone, held._held, held._by_id, held._paces, held.places._groups, held.places._members)
    assert all(sys.getsizeof(one) == sys.getsizeof({}) for one in emptied)


def test_a_table_in_which_everybody_came_and_went_takes_no_more_than_one_that_was_just_filled() -> None:
    """Half of all are replaced each lease, for long, so that there always are tombstones."""
    everybody = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(1100)]
    held, fresh = Table(check=lambda *_: None), Table(check=lambda *_: None)
    for turn in range(20):
        for who in everybody[50 * turn : 50 * turn + 100]:
            held.accept(told(seq=1, beat=2 + turn, identity=who), now=LEASE_S * turn)
        held.lapse(LEASE_S * (turn + 0.5))
    for who in everybody[950:1050]:
        fresh.accept(told(seq=1, beat=30, identity=who), now=LEASE_S * 20)
        held.accept(told(seq=1, beat=30, identity=who), now=LEASE_S * 20)
    for n in range(10):
        assert held.lapse(LEASE_S * (20.5 + n / 30)) == [] and held.lapsed()
    assert len(held) == len(fresh) == 100
    for name in ("_held", "_by_id", "_paces"):
        assert sys.getsizeof(getattr(held, name)) <= sys.getsizeof(getattr(fresh, name)), name
    assert sys.getsizeof(held.places._groups) <= sys.getsizeof(fresh.places._groups)
    assert room_of(held.digests._there) <= room_of(fresh.digests._there)


def room_of(of: dict[int, dict[PeerId, tuple[object, ...]]]) -> int:
    return sys.getsizeof(of) + sum(map(sys.getsizeof, of.values()))


def test_heads_need_no_asking_for_a_lease_and_are_forgotten_after_two() -> None:
    held = Table()
    first = told(seq=10, beat=11)
    held.accept(first, now=0.0)
    for beat in range(12, 112):
        now = 5.0 * (beat - 11)
        held.accept(told(seq=10, beat=beat), now=now)
        held.lapse(now)
        if now <= LEASE_S:
            assert held.knows(head_id(first.head), now)
    assert not held.knows(head_id(first.head), 500.0)
    assert len(held._recent) <= 2 * LEASE_S / 5.0 + 2


def test_of_equal_numbers_the_larger_hash_wins_in_any_order() -> None:
    one, other = told(seq=5, name="one"), told(seq=5, name="other")
    winners = set()
    for order in ((one, other), (other, one)):
        held = Table()
        for each in order:
            held.accept(each, now=0.0)
        winners.add(held.live(0.0)[0].descriptor.name)
    assert one.descriptor is not None and other.descriptor is not None
    larger = max(one.descriptor, other.descriptor, key=record_hash)
    assert winners == {open_descriptor(larger).name}


def test_a_leave_ends_a_record_and_stays_until_its_lease_would_have_ended() -> None:
    held = Table()
    held.accept(told(seq=10, beat=20), now=0.0)
    assert held.accept(left(21), now=1.0) is Verdict.CHANGED
    assert held.live(1.0) == ()
    assert held.accept(told(seq=10, beat=19), now=2.0) is Verdict.STALE
    assert ALICE.peer_id in held
    held.lapse(1.0 + LEASE_S)
    assert ALICE.peer_id not in held
    assert held.accept(told(seq=10, beat=20), now=20.0) is Verdict.ENDED


def test_a_leave_that_comes_first_stops_what_comes_after_it() -> None:
    held = Table()
    held.accept(left(21), now=0.0)
    assert held.accept(told(seq=10, beat=20), now=0.0) is Verdict.STALE
    assert held.accept(told(seq=22), now=0.0) is Verdict.CHANGED


def test_a_heartbeat_alone_renews_only_the_descriptor_it_names() -> None:
    held = Table()
    held.accept(told(seq=10, beat=11), now=0.0)
    renewal = dataclasses.replace(told(seq=10, beat=12), descriptor=None)
    other = dataclasses.replace(told(seq=12, beat=13), descriptor=None)
    assert held.accept(other, now=1.0) is Verdict.INCOMPLETE
    assert held.accept(renewal, now=1.0) is Verdict.RENEWED
    assert held.live(1.0)[0].heartbeat.seq == 12


def test_a_heartbeat_cannot_be_combined_with_another_descriptor() -> None:
    mixed = Told(told(seq=10).head, 0.0, told(seq=11).descriptor)
    someone_elses = Told(told(seq=10).head, 0.0, told(identity=Identity.ephemeral()).descriptor)
    not_newer = told(seq=10, beat=10)
    a_heartbeat_instead = Told(told().head, 0.0, told().head)
    for bad in (mixed, someone_elses, not_newer, a_heartbeat_instead, Told(told().descriptor or b"", 0.0)):
        held = Table()
        with pytest.raises(MessageError):
            held.accept(bad, now=0.0)
        assert held.live(0.0) == () and ALICE.peer_id not in held


def test_a_descriptor_that_nobody_signed_is_not_held_even_if_a_heartbeat_names_it() -> None:
    unsigned = bytes(SIGNATURE_BYTES) + sign_record(ALICE, a_descriptor())[SIGNATURE_BYTES:]
    held = Table()
    with pytest.raises(MessageError, match=r"Descriptor that peer .* didn't sign"):
        held.accept(Told(sign_record(ALICE, a_heartbeat(unsigned, 2)), 0.0, unsigned), now=0.0)
    assert ALICE.peer_id not in held

def test_a_forged_record_does_not_touch_a_good_one() -> None:
    held = Table()
    held.accept(told(seq=10), now=0.0)
    good = told(seq=20)
    for bad in (
        dataclasses.replace(good, head=b"\0" * SIGNATURE_BYTES + good.head[SIGNATURE_BYTES:]),
        dataclasses.replace(good, head=good.head[:-1]),
    ):
        with pytest.raises(MessageError):
            held.accept(bad, now=1.0)
    assert held.live(1.0)[0].descriptor.seq == 10


def test_an_already_lapsed_record_is_not_taken_and_does_not_block_a_fresh_one() -> None:
    held = Table()
    assert held.accept(told(seq=10, age_s=LEASE_S), now=0.0) is Verdict.STALE
    assert held.accept(told(seq=10, age_s=1.0), now=0.0) is Verdict.CHANGED


def test_the_table_and_its_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_PEERS", 3)
    monkeypatch.setattr(table, "MAX_GONE", 2)
    held = Table()
    many = [told(identity=Identity.from_seed(bytes([n]) * 32)) for n in range(5)]
    verdicts = [held.accept(one, now=0.0) for one in many]
    assert verdicts == [Verdict.CHANGED] * 3 + [Verdict.NO_ROOM] * 2
    assert len(held.lapse(LEASE_S)) == 3
    assert len(held.lapsed()) == 2


def test_known_peers_count_those_that_went_missing_but_not_those_that_left() -> None:
    held = Table()
    bob = Identity.ephemeral()
    held.accept(told(seq=1), now=0.0)
    held.accept(told(seq=1, identity=bob), now=0.0)
    assert held.known(0.0) == 2
    held.lapse(LEASE_S)
    assert (len(held.live(LEASE_S)), held.known(LEASE_S)) == (0, 2)
    held.accept(told(seq=5), now=LEASE_S)
    held.accept(left(7), now=LEASE_S)
    held.lapse(3 * LEASE_S)
    assert held.known(3 * LEASE_S) == 1
    assert held.known(3 * LEASE_S, b"g" * 32) == 0
    assert held.known(LEASE_S + table.GONE_S + 1) == 0


def test_the_heap_of_lapses_stays_small_under_renewals() -> None:
    held = Table()
    for beat in range(2, 1000):
        held.accept(told(seq=1, beat=beat), now=5.0 * beat)
    assert len(held._lapses) < 100


def test_the_heap_of_lapses_shrinks_when_those_who_renewed_are_let_go() -> None:
    """Two heads of each of 100, none of whose leases is over."""
    held = Table(check=lambda *_: None)
    everybody = [somebody(n) for n in range(100)]
    for beat in (2, 3):
        for who in everybody:
            held.accept(told(seq=1, beat=beat, identity=who), now=float(beat))
    assert len(held._lapses) == 200
    for who in everybody:
        held.evict(who.peer_id, 4.0)
        assert len(held._lapses) <= 4 * len(held) + 64


def test_a_peer_that_serves_another_model_concerns_those_who_listen_to_the_first() -> None:
    """By `concerns`, and in the bucket of a digest where it may still be in theirs."""
    held = Table()
    held.accept(told(seq=1), now=0.0)
    one, other = Models((FINGERPRINT,)), Models((b"g" * 32,))
    held.accept(told(seq=5, fingerprint=b"g" * 32), now=1.0)
    held.accept(told(seq=5, beat=7, fingerprint=b"g" * 32), now=2.0)  # and renews it
    (now,) = held.held()
    assert not now.matches(one) and now.concerns(one)
    assert now.matches(other) and now.concerns(other) and not now.concerns(Models((b"h" * 32,)))
    assert list(held.digests.within(range(64), 64, one)) == [now.peer]
    assert held.digests.sums(1, one) == (bytes(8),)


# ---------------------------------------------------------------- ages are hearsay


def test_an_age_that_is_told_too_old_is_corrected_by_whoever_tells_a_younger_one() -> None:
    held = Table()
    held.accept(told(age_s=14.9), now=100.0)
    assert held.doubts(head_id(told().head), 100.0)
    held.accept(told(age_s=1.0), now=100.05)
    (entry,) = held.live(114.0)
    assert entry.lease_left_s == pytest.approx(0.05)
    assert not held.doubts(head_id(told().head), 100.05)


def test_a_peer_that_was_told_dead_lives_on_with_the_first_honest_word() -> None:
    held = Table()
    held.accept(told(seq=10, beat=11), now=100.0)
    assert held.accept(told(seq=10, beat=12, age_s=99.0), now=104.0) is Verdict.STALE
    assert held.live(104.0) == ()
    assert held.accept(told(seq=10, beat=12, age_s=0.2), now=104.3) is Verdict.CHANGED
    assert [entry.age_s for entry in held.live(104.3)] == [pytest.approx(0.3)]


def test_no_head_is_younger_than_what_is_known_of_it_here() -> None:
    """Whatever anybody says, it is over one lease after it was first heard of."""
    held = Table()
    held.accept(told(age_s=14.0), now=100.0)
    for now in (105.0, 110.0, 114.9):
        held.accept(told(age_s=0.0), now=now)
    assert held.live(115.0) == ()
    held.lapse(115.0)
    assert held.accept(told(age_s=0.0), now=115.1) is Verdict.STALE
    assert held.live(115.1) == ()


def test_a_head_that_was_told_dead_first_is_no_younger_than_that_telling() -> None:
    held = Table()
    held.accept(told(seq=10, beat=11), now=100.0)
    held.accept(told(seq=10, beat=12, age_s=99.0), now=104.0)
    assert held.accept(told(seq=10, beat=12, age_s=0.0), now=112.0) is Verdict.CHANGED
    assert [entry.lease_left_s for entry in held.live(112.0)] == [pytest.approx(104.0 + LEASE_S - 112.0)]


def test_opinions_on_one_head_are_bounded() -> None:
    held = Table()
    held.accept(told(age_s=14.0), now=100.0)
    for _ in range(table.OPINIONS):
        assert held.doubts(head_id(told().head), 100.0)
        held.accept(told(age_s=14.5), now=100.0)
    assert not held.doubts(head_id(told().head), 100.0)


def test_the_proof_of_an_end_buries_every_older_head() -> None:
    """A recording of heartbeats 11 to 19 is played to somebody who wasn't there; the tombstone has 19."""
    remembers, newcomer = Table(), Table()
    remembers.accept(told(seq=10, beat=19), now=0.0)
    remembers.lapse(LEASE_S)
    assert newcomer.accept(told(seq=10, beat=11), now=20.0) is Verdict.CHANGED
    assert remembers.accept(told(seq=10, beat=11), now=20.1) is Verdict.ENDED
    proof = remembers.objection(ALICE.peer_id, 20.1)
    assert proof is not None and proof.age_s >= LEASE_S
    newcomer.accept(proof, now=20.2)
    for beat in range(11, 19):
        newcomer.accept(told(seq=10, beat=beat), now=20.3)
        assert newcomer.live(20.3) == ()
    newcomer.accept(told(seq=10, beat=19), now=21.0)  # the last one may be true, for a lease since it was heard of
    assert len(newcomer.live(35.0)) == 1 and newcomer.live(35.2) == ()
    assert newcomer.accept(told(seq=30), now=36.0) is Verdict.CHANGED


def test_the_proof_of_an_end_buries_what_came_before_it_under_other_descriptors_too() -> None:
    """Its owner changed its mind twice; the newcomer has the first descriptor, the proof names the third."""
    newcomer = Table()
    newcomer.accept(told(seq=10, beat=19), now=0.0)
    newcomer.accept(dataclasses.replace(told(seq=30, beat=39, age_s=99.0), descriptor=None), now=1.0)
    for older in (told(seq=10, beat=25), told(seq=20, beat=29), told(seq=30, beat=38)):
        assert newcomer.accept(older, now=2.0) is Verdict.ENDED
    assert newcomer.live(2.0) == ()
    assert newcomer.accept(told(seq=40), now=3.0) is Verdict.CHANGED


def test_a_leave_is_proof_of_an_end_too() -> None:
    remembers, newcomer = Table(), Table()
    remembers.accept(told(seq=10, beat=19), now=0.0)
    remembers.accept(left(20), now=1.0)
    remembers.lapse(1.0 + LEASE_S)
    newcomer.accept(told(seq=10, beat=19), now=20.0)
    proof = remembers.objection(ALICE.peer_id, 20.0)
    assert proof is not None
    newcomer.accept(proof, now=20.1)
    assert newcomer.live(20.1) == () and newcomer.known(20.1) == 0


def test_a_forged_proof_of_an_end_ends_nobody() -> None:
    held = Table()
    held.accept(told(seq=10, beat=11), now=0.0)
    head = told(seq=10, beat=12).head
    with pytest.raises(MessageError, match="didn't sign"):
        held.accept(Told(head[:40] + bytes(24) + head[SIGNATURE_BYTES:], LEASE_S), now=1.0)
    assert len(held.live(1.0)) == 1


def test_ends_of_strangers_are_not_kept() -> None:
    held = Table()
    for n in range(50):
        stranger = Identity.from_seed(bytes([n]) * 32)
        held.accept(told(identity=stranger, age_s=LEASE_S), now=0.0)
    assert len(held._gone) == 0


# ---------------------------------------------------------------- what one owner may say


def test_one_owner_is_heard_no_faster_than_a_peer_has_reason_to_speak() -> None:
    held = Table()
    beats = 0
    for n in range(600):  # ten a second for a minute
        verdict = held.accept(told(seq=1, beat=n + 2), now=n / 10)
        beats += verdict is not Verdict.NO_ROOM
    assert beats <= table.RENEWALS + 60 / 2.5  # one more in each half interval
    assert held.accept(told(seq=1, beat=700), now=65.0) is Verdict.RENEWED


def test_what_was_verified_once_is_not_verified_again() -> None:
    """Issue 5: verified bytes are known by their hash. Two signatures of a newcomer, one of each renewal."""
    checks: list[object] = []
    held = Table(check=lambda record, signed: checks.append(signed))

    def verified(one: Told, now: float) -> int:
        checks.clear()
        held.accept(one, now)
        return len(checks)

    first, renewal = told(seq=1, beat=2), told(seq=1, beat=3)
    assert verified(first, 0.0) == 2
    assert verified(first, 1.0) == verified(dataclasses.replace(first, age_s=0.5), 1.0) == 0
    assert verified(renewal, 2.0) == 1  # it came with the same descriptor
    assert verified(first, 3.0) == verified(told(seq=1, beat=2), 3.0) == 0  # outranked
    assert verified(dataclasses.replace(told(seq=1, beat=4), descriptor=None), 4.0) == 1
    assert verified(told(seq=7), 5.0) == 2


def test_forgeries_dont_use_up_what_their_victim_may_say() -> None:
    held = Table()
    held.accept(told(seq=1), now=0.0)
    for beat in range(3, 60):
        bad = told(seq=1, beat=beat)
        with pytest.raises(MessageError):
            held.accept(Told(bytes(SIGNATURE_BYTES) + bad.head[SIGNATURE_BYTES:], 0.0), now=1.0)
    assert held.accept(told(seq=1, beat=100), now=1.0) is Verdict.RENEWED


# ---------------------------------------------------------------- room


def somebody(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def test_a_thousand_identities_of_one_group_take_64_places_and_no_more_verifications() -> None:
    checks: list[object] = []
    held = Table(check=lambda record, signed: checks.append(record))
    for n in range(1000):
        held.accept(told(identity=somebody(n), addresses=(f"45.9.9.{n % 250}:{7000 + n}",)), now=0.0)
    assert len(held.live(0.0)) == places.MAX_PER_GROUP
    assert len(checks) == 2 * places.MAX_PER_GROUP
    assert held.accept(told(addresses=("46.9.9.1:7070",)), now=0.0) is Verdict.CHANGED


def test_a_lan_may_be_as_large_as_it_likes() -> None:
    held = Table()
    for n in range(200):
        held.accept(told(identity=somebody(n), addresses=(f"192.168.1.{n}:7070",)), now=0.0)
    assert len(held.live(0.0)) == 200


def test_whoever_was_seen_takes_the_place_of_a_claim_and_keeps_its_own() -> None:
    held = Table()
    for n in range(64):
        held.accept(told(identity=somebody(n), addresses=(f"45.9.9.{n}:7070",)), now=0.0)
    assert held.accept(told(addresses=("45.9.9.200:7070",)), now=0.0) is Verdict.NO_ROOM
    held.places.proved(ALICE.peer_id, "45.9.9.200")
    assert held.accept(told(seq=3, addresses=("45.9.9.200:7070",)), now=0.0) is Verdict.CHANGED
    assert len(held) == 64 and somebody(63).peer_id not in held  # the newest claim went
    late = told(identity=somebody(99), addresses=("45.9.9.99:7070",))
    assert held.accept(late, now=0.0) is Verdict.NO_ROOM


def test_a_peer_that_moves_into_a_full_group_is_let_go() -> None:
    held = Table()
    for n in range(64):
        held.accept(told(identity=somebody(n), addresses=(f"45.9.9.{n}:7070",)), now=0.0)
    held.accept(told(addresses=("46.1.1.1:7070",)), now=0.0)
    assert held.accept(told(seq=5, addresses=("45.9.9.9:7070",)), now=1.0) is Verdict.NO_ROOM
    assert len(held.live(1.0)) == 65  # with what it said before, until that lapses


def test_a_full_table_makes_room_for_public_and_for_seen_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_PEERS", 4)
    held = Table(own=ALICE.peer_id)
    held.accept(told(addresses=("10.0.0.1:1",)), now=0.0)
    for n in range(3):
        held.accept(told(identity=somebody(n), addresses=(f"10.0.0.{n}:7070",)), now=0.0)
    assert held.accept(told(identity=somebody(3), addresses=("10.0.0.3:1",)), now=0.0) is Verdict.NO_ROOM
    for n in range(4, 7):
        public = told(identity=somebody(n), addresses=(f"45.{n}.9.1:7070",))
        assert held.accept(public, now=0.0) is Verdict.CHANGED
    public = told(identity=somebody(7), addresses=("45.7.9.1:7070",))
    assert held.accept(public, now=0.0) is Verdict.NO_ROOM
    held.places.proved(somebody(8).peer_id, "10.0.0.8")
    assert held.accept(told(identity=somebody(8), addresses=("10.0.0.8:1",)), now=0.0) is Verdict.CHANGED
    assert ALICE.peer_id in held and len(held) == 4


def test_models_are_counted_by_name() -> None:
    held = Table()
    for n, model in enumerate(("a", "a", "b")):
        held.accept(told(identity=somebody(n), model=model), now=0.0)
    held.accept(told(identity=somebody(9), model="c", fingerprint=b"g" * 32), now=0.0)
    assert held.models() == {FINGERPRINT: {"a": 2, "b": 1}, b"g" * 32: {"c": 1}}
    version = held.models_version
    held.accept(told(identity=somebody(9), seq=9, model="c", fingerprint=FINGERPRINT), now=0.0)
    assert held.models() == {FINGERPRINT: {"a": 2, "b": 1, "c": 1}} and held.models_version > version
    held.lapse(LEASE_S)
    assert held.models() == {}


# ---------------------------------------------------------------- digests


def sums(held: Table, now: float) -> tuple[bytes, ...]:
    held.fade(now)
    return held.digests.sums(64)


def test_a_renewal_changes_no_digest_until_somebody_has_missed_the_next_ones() -> None:
    behind, up_to_date = Table(), Table()
    for one in (behind, up_to_date):
        one.accept(told(seq=10, beat=11), now=0.0)
    up_to_date.accept(told(seq=10, beat=12), now=5.0)
    assert sums(behind, 6.0) == sums(up_to_date, 6.0)
    assert sums(behind, 8.0) != sums(up_to_date, 8.0)
    behind.accept(told(seq=10, beat=12, age_s=4.0), now=9.0)
    assert sums(behind, 10.0) == sums(up_to_date, 10.0)
    for one in (behind, up_to_date):
        assert one.lapse(20.0) == [ALICE.peer_id]
    assert sums(behind, 21.0) == sums(up_to_date, 21.0) == sums(Table(), 21.0)


def test_a_missed_change_of_state_is_seen_in_a_digest() -> None:
    data = sign_record(ALICE, a_descriptor(seq=10))
    serving, draining = (
        Told(sign_record(ALICE, a_heartbeat(data, beat, state=state)), 0.0, data)
        for beat, state in ((11, "serving"), (12, "draining"))
    )
    one, other = Table(), Table()
    one.accept(serving, now=0.0)
    other.accept(draining, now=0.0)
    assert sums(one, 1.0) != sums(other, 1.0)
    one.accept(draining, now=1.0)
    assert sums(one, 2.0) == sums(other, 2.0)
