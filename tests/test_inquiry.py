"""Who is to blame when nothing moves: the rules of protocol.md, "Deadlines and blame", on hand-made answers."""

from __future__ import annotations

import dataclasses

import pytest

from swarm.effects import HopKey
from swarm.identity import PeerId
from swarm.inquiry import Blame, Inquiry, Verdict, verdict
from swarm.messages import WhereIs

EPOCH = 3
KEYS = [HopKey(PeerId(bytes([number]) * 32), 10 * number) for number in range(3)]


def hop(**changed: object) -> WhereIs:
    """A hop that took, ran and sent ten positions, and told the first one of ten ids."""
    rests = WhereIs(
        epoch=EPOCH,
        resumed=True,
        round=4,
        length=10,
        in_engine=False,
        finished=10,
        sent=10,
        known=10,
        ask=2,
    )
    return dataclasses.replace(rests, **changed)


BLAMED = {
    "never heard of the epoch": ([hop(), hop(epoch=2), hop()], Blame.STREAM, 1),
    "stuck in the engine": ([hop(), hop(), hop(in_engine=True)], Blame.ENGINE, 2),
    "sent and not received": ([hop(sent=11), hop(), hop()], Blame.LINK, 0),
    "the last one's ids not received by the first": ([hop(known=9), hop(), hop()], Blame.LINK, 2),
    "waits for a connection": ([hop(), hop(waiting=True), hop()], Blame.LINK, 1),
    "never heard Resume": ([hop(), hop(resumed=False), hop()], Blame.STREAM, 1),
    "took a step and doesn't run it": ([hop(), hop(finished=9), hop()], Blame.PEER, 1),
    "nothing to see: its tokens were lost": ([hop(), hop(), hop()], Blame.STREAM, 2),
}


@pytest.mark.parametrize("case", BLAMED)
def test_two_equal_answers_say_who_is_to_blame(case):
    where, blame, at = BLAMED[case]
    judged = verdict(where, EPOCH, opening=False)
    assert (judged.blame, judged.at) == (blame, at)


def test_an_older_epoch_counts_before_a_stuck_engine_and_that_before_a_lost_step():
    where = [hop(sent=11), hop(in_engine=True), hop(epoch=2)]
    assert verdict(where, EPOCH, opening=False).blame is Blame.STREAM
    assert verdict([*where[:2], hop()], EPOCH, opening=False).blame is Blame.ENGINE


def test_while_a_chain_opens_a_busy_engine_and_a_missing_resume_are_nobodys_fault():
    """The engine still runs the epoch before, and Resume hasn't been sent."""
    where = [hop(), hop(in_engine=True, resumed=False), hop()]
    assert verdict(where, EPOCH, opening=True) == Verdict(Blame.STREAM, 2, "its answers don't arrive")


def test_a_hop_of_a_chain_of_one_is_its_own_next():
    assert verdict([hop(known=9)], EPOCH, opening=False) == Verdict(Blame.LINK, 0, "nothing gets through")


def test_nobody_is_judged_before_everybody_answered_twice():
    inquiry = Inquiry(KEYS, ask=1, next_at=0.0)
    for key in KEYS:
        assert not inquiry.hear(key, hop(ask=1))
    assert not inquiry.hear(KEYS[0], hop(ask=2)) and not inquiry.hear(KEYS[1], hop(ask=2))
    assert inquiry.moved() and not inquiry.silent()
    assert inquiry.hear(KEYS[2], hop(ask=2))
    assert not inquiry.moved() and inquiry.answers() == [hop(), hop(), hop()]


def test_answers_that_differ_show_that_the_ring_moves():
    inquiry = Inquiry(KEYS, ask=1, next_at=0.0)
    for key in KEYS:
        inquiry.hear(key, hop(ask=1))
        inquiry.hear(key, hop(ask=2, length=11))
    assert inquiry.moved()


def test_a_late_first_answer_isnt_taken_for_the_second():
    inquiry = Inquiry(KEYS, ask=1, next_at=0.0)
    for key in KEYS:
        inquiry.hear(key, hop(ask=1))
        inquiry.hear(key, hop(ask=1))
    assert inquiry.moved()


def test_who_never_answered_and_who_isnt_in_the_chain():
    inquiry = Inquiry(KEYS[:2], ask=1, next_at=0.0)
    inquiry.hear(KEYS[1], hop(ask=2))
    inquiry.hear(KEYS[2], hop(ask=2))
    assert inquiry.silent() == [KEYS[0]]
