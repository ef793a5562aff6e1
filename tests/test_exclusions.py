"""What a session keeps out of its plans, and for how long."""

from swarm.exclusions import Exclusions
from swarm.identity import PeerId

A, B = PeerId(b"a" * 32), PeerId(b"b" * 32)


def test_a_peer_that_failed_stays_out_until_its_time_is_over():
    excluded = Exclusions(60.0)
    excluded.peer_failed(A, 100.0)
    excluded.forget_expired(159.9)
    assert excluded.bad_peers() == {A}
    excluded.forget_expired(160.0)
    assert not excluded.bad_peers()


def test_a_peer_that_is_full_is_avoided_as_long_as_it_asks():
    excluded = Exclusions(60.0)
    excluded.avoid(A, 5.0, 100.0)
    assert excluded.bad_peers() == {A} and not excluded.failed
    excluded.forget_expired(105.0)
    assert not excluded.bad_peers()


def test_a_pair_is_kept_out_the_second_time_and_only_in_its_direction():
    excluded = Exclusions(60.0)
    excluded.link_failed(A, B, 100.0)
    excluded.link_failed(B, A, 101.0)
    assert not excluded.bad_links()
    excluded.link_failed(A, B, 159.0)
    assert excluded.bad_links() == {(A, B)} and not excluded.bad_peers()
    excluded.forget_expired(219.0)
    assert not excluded.bad_links()


def test_faults_that_are_far_apart_are_each_a_first_one():
    excluded = Exclusions(60.0)
    excluded.link_failed(A, B, 100.0)
    excluded.link_failed(A, B, 160.0)
    assert not excluded.bad_links()
    assert not excluded.stream_failed(A, 100.0)
    assert not excluded.stream_failed(A, 160.0)
    assert excluded.stream_failed(A, 161.0)
