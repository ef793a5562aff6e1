"""One session at one hop, spoken to by hand and by a network that loses, doubles and reorders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peer import hop as hop_module
from peer.hop import Hop, HopConfig, SessionKey
from peer.hop_effects import Compute, EnsureLink, Free, SendStep, SendTokens, ToClient
from peer.journal import Journal
from peer.kv import LayerKV, Reach, Rewinds
from routing.spans import Span
from swarm.errors import CapacityError, MessageError
from swarm.identity import PeerId, peer_id
from swarm.messages import (
    NOTHING_SPENT,
    Close,
    Credit,
    Extend,
    Extended,
    Fault,
    HopRef,
    Likelihoods,
    Open,
    Opened,
    Prepare,
    Prepared,
    Renew,
    Resume,
    Sampling,
    Step,
    Tokens,
    Unknown,
    Where,
    WhereIs,
    Working,
)
from swarm.tensors import RawTensor, floats_tensor, ids_tensor, read_ids

CLIENT, FIRST, MIDDLE, LAST = (peer_id(bytes([n]) * 32) for n in range(1, 5))
SESSION = bytes(16)
REFS = {0: HopRef(FIRST, 0, b""), 2: HopRef(MIDDLE, 2, b""), 4: HopRef(LAST, 4, b"")}


REACH = Reach(rewind=2, chunk=4)


class Ledger:
    def __init__(self, capacity: int = 1000) -> None:
        self.capacity, self.held = capacity, dict[SessionKey, int]()
        self.window: int | None = None
        self.original: int | None = None

    def reserve(self, key: SessionKey, positions: int, span: Span) -> None:
        assert key not in self.held
        if positions > self.capacity:
            raise CapacityError(f"{positions} wanted")
        self.held[key] = positions

    def extend(self, key: SessionKey, positions: int) -> None:
        if positions > self.capacity:
            raise CapacityError(f"{positions} wanted")
        self.held[key] = positions

    def keeps(self, held: int, positions: int) -> bool:
        return self.original is None or held > self.original or positions <= self.original

    def free(self, key: SessionKey) -> None:
        del self.held[key]

    def rewinds(self, span: Span) -> Rewinds:
        return Rewinds.over((LayerKV(1, 1, 1, self.window),), REACH)


def place(start: int, epoch: int, stop: int | None = None) -> dict[str, Any]:
    return {
        "session": SESSION,
        "epoch": epoch,
        "span": Span(start, start + 2 if stop is None else stop),
        "previous": REFS.get(start - 2),
        "next": REFS.get(start + 2),
        "first": REFS[0],
        "last": REFS[4],
    }


def open_(start: int, epoch: int, reserve: int = 100) -> Open:
    return Open(**place(start, epoch), fingerprint=bytes(32), reserve=reserve)


class Bench:
    """A hop, its ledger, and what it said, by kind."""

    def __init__(self, start: int, capacity: int = 1000, **config: Any) -> None:
        self.me = {0: FIRST, 2: MIDDLE, 4: LAST}[start]
        self.start, self.ledger, self.now = start, Ledger(capacity), 0.0
        self.hop = Hop(self.me, CLIENT, SESSION, start, HopConfig(prefill_chunk=4, **config), self.ledger)

    def say(self, message: Any) -> list[Any]:
        self.hop.receive(message, self.now)
        return self.hop.drain()

    def opened(self, epoch: int = 1) -> Bench:
        self.say(open_(self.start, epoch))
        self.hop.link_up(epoch, self.now)
        self.hop.drain()
        return self

    def resumed(self, epoch: int = 1, ids: tuple[int, ...] = (7, 8, 9), **fields: Any) -> list[Any]:
        values: dict[str, Any] = {"have": 0, "next_has": 0, "resume_at": len(ids) - 1, "credit": 50}
        values |= {"limit": 60, "ids": ids_tensor(ids)} | fields
        return self.say(Resume(epoch, **values))

    def compute(
        self, effects: list[Any], token: int | None = None, likely: Likelihoods | None = None
    ) -> list[Any]:
        """Answer the one Compute among `effects`; output row = 10 x input."""
        (job,) = [effect for effect in effects if isinstance(effect, Compute)]
        rows = list(job.ids if job.ids is not None else job.payload)
        output = None if self.start == 4 else [10 * row for row in rows]
        self.hop.computed(job, output, token, self.now, likelihoods=likely)
        return self.hop.drain()

    def step(
        self, round_: int | None, position: int, rows: list[int], epoch: int = 1, sample: bool = False
    ) -> list[Any]:
        sender = {2: FIRST, 4: MIDDLE}[self.start]
        self.hop.receive_step(
            sender, epoch, Step(epoch=epoch, round=round_, position=position, sample=sample), rows, self.now
        )
        return self.hop.drain()


def told(effects: list[Any]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, ToClient)]


@pytest.mark.parametrize(("stop", "window", "sizes"), [(6, None, [10, 10, 4]), (2, None, [4]), (6, 3, [4] * 6)])
def test_a_hop_of_the_whole_model_takes_more_of_a_prompt_at_once(
    stop: int, window: int | None, sizes: list[int]
) -> None:
    """No other hop waits for it. Where windows let go of what lies behind them, a step stays short."""
    bench = Bench(0, whole_chunk=10)
    bench.ledger.window = window
    alone = {"previous": None, "next": None, "last": REFS[0]} if stop == 6 else {}
    bench.say(Open(**{**place(0, 1, stop), **alone}, fingerprint=bytes(32), reserve=100))
    bench.hop.link_up(1, 0.0)
    bench.hop.drain()
    effects, seen = bench.resumed(ids=tuple(range(24)), resume_at=0), list[int]()
    while jobs := [effect for effect in effects if isinstance(effect, Compute)][: len(sizes) - len(seen)]:
        seen.append(len(jobs[0].ids or ()))
        bench.hop.computed(jobs[0], None if stop == 6 else list(jobs[0].ids or ()), 5 if jobs[0].sample else None, 0.0)
        effects = bench.hop.drain()
    assert seen == sizes


def test_an_open_is_answered_when_room_and_link_stand() -> None:
    bench = Bench(2)
    assert bench.say(open_(2, 1)) == [EnsureLink(1, REFS[4])]
    assert list(bench.ledger.held.values()) == [100]
    bench.hop.link_up(1, 0.0)
    assert told(bench.hop.drain()) == [Opened(1)]


def test_an_open_without_room_is_refused_at_once_and_holds_nothing() -> None:
    bench = Bench(2, capacity=50)
    effects = bench.say(open_(2, 1))
    (refused,) = told(effects)
    assert refused.kind == "refused" and refused.retry_after_s > 0
    assert effects[-1] == Free() and bench.hop.finished and not bench.ledger.held


def test_the_last_hop_links_to_the_first() -> None:
    assert Bench(4).say(open_(4, 1)) == [EnsureLink(1, REFS[0])]


def test_an_older_or_equal_open_changes_nothing() -> None:
    bench = Bench(2).opened(epoch=5)
    assert bench.say(open_(2, 5)) == [] and bench.say(open_(2, 4, reserve=200)) == []
    assert bench.hop.epoch == 5 and list(bench.ledger.held.values()) == [100]


def test_an_older_close_changes_nothing_and_an_equal_one_frees() -> None:
    bench = Bench(2).opened(epoch=5)
    assert bench.say(Close(4)) == [] and not bench.hop.finished
    assert bench.say(Close(5)) == [Free()] and not bench.ledger.held


def test_prepare_of_what_is_not_held_is_unknown() -> None:
    assert told(Bench(2).say(Prepare(**place(2, 1)))) == [Unknown(1)]


def test_prepare_with_another_span_is_unknown_and_leaves_the_state_alone() -> None:
    bench = Bench(2).opened()
    message = Prepare(**{**place(2, 2), "span": Span(2, 3), "next": HopRef(LAST, 3, b"")})
    assert told(bench.say(message)) == [Unknown(2)]
    assert bench.hop.epoch == 1


def test_prepared_tells_what_the_journal_has_without_waiting_for_the_engine() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=10)
    effects = bench.step(None, 0, [1, 2, 3])
    bench.step(None, 3, [4, 5])
    effects = bench.compute(effects)  # the second goes into the engine now
    assert bench.say(Prepare(**place(2, 2))) == [EnsureLink(2, REFS[4])]
    bench.hop.link_up(2, 0.0)
    assert told(bench.hop.drain()) == [Prepared(2, 3)]
    assert [
        e for e in bench.compute(effects) if not isinstance(e, Compute)
    ] == []  # of an older epoch: dropped
    bench.resumed(2, have=3, next_has=3, resume_at=10)
    (job,) = [e for e in bench.step(None, 3, [4, 5], epoch=2) if isinstance(e, Compute)]
    assert job.position == 3  # where the engine cuts what the dropped job left


def windowed(upto: int) -> Bench:
    """A hop whose layers see 3 positions and keep 3 + 6, with `upto` positions computed, one at a time."""
    bench = Bench(2)
    bench.ledger.window = 3
    bench.opened().resumed(resume_at=0, ids=(7,))
    for number in range(upto):
        bench.compute(bench.step(number, number, [number]))
    return bench


def prepared(bench: Bench, epoch: int) -> Prepared:
    bench.say(Prepare(**place(2, epoch)))
    bench.hop.link_up(epoch, 0.0)
    (answer,) = told(bench.hop.drain())
    assert isinstance(answer, Prepared)
    return answer


def test_prepared_tells_how_far_back_windows_let_it_go() -> None:
    assert prepared(windowed(9), 2) == Prepared(2, 9, oldest=0)  # all that there is fits into window + R
    assert prepared(windowed(10), 2) == Prepared(2, 10, oldest=9 - 2)


def test_a_step_in_the_engine_counts_for_how_far_back_it_may_go() -> None:
    bench = windowed(9)
    bench.step(9, 9, [1, 2])
    assert prepared(bench, 2) == Prepared(2, 9, oldest=7)


def test_a_hop_is_resumed_within_its_windows_or_from_the_beginning() -> None:
    bench = windowed(12)
    assert prepared(bench, 2) == Prepared(2, 12, oldest=9)
    with pytest.raises(MessageError, match="cut at 0 or from 9 on"):
        bench.resumed(2, have=8, next_has=8, resume_at=8)
    assert bench.resumed(2, have=9, next_has=9, resume_at=9) == []  # and nothing had changed
    assert prepared(bench, 3) == Prepared(3, 9, oldest=9)
    sent = bench.resumed(3, have=0, next_has=4, resume_at=9)
    for position in range(0, 9, 3):
        rows = [position, position + 1, position + 2]
        sent += bench.compute(bench.step(None, position, rows, epoch=3))
    assert [(step.position, len(step.payload)) for step in sent if isinstance(step, SendStep)] == [(4, 2), (6, 3)]
    assert prepared(bench, 4) == Prepared(4, 9, oldest=0)


def test_a_round_that_starts_before_the_windows_stops_the_epoch() -> None:
    bench = windowed(12)
    (fault,) = told(bench.step(12, 5, [1]))
    assert isinstance(fault, Fault) and "it may start at 9 or later" in fault.reason
    assert (fault.what, fault.other) == ("input", FIRST)


def test_no_step_is_taken_before_resume() -> None:
    bench = Bench(2).opened()
    assert bench.hop.accepts(1) == "later" and bench.step(0, 0, [1]) == []
    bench.resumed(resume_at=0, ids=(7,))
    assert bench.hop.accepts(1) == "now"
    assert (bench.hop.accepts(0), bench.hop.accepts(2)) == ("never", "later")


def test_steps_wait_unread_while_the_queue_is_full() -> None:
    bench = Bench(2, max_waiting_steps=2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    for number in range(3):
        bench.step(number, number, [number])
    assert bench.hop.accepts(1) == "later"


def test_only_the_next_round_is_taken() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    assert bench.step(1, 0, [1]) == []
    assert len(bench.step(0, 0, [1])) == 1
    assert bench.step(0, 0, [1]) == [] and bench.hop._taken == 1
    bench.step(1, 1, [2])
    assert bench.hop._taken == 2  # the first isn't finished yet
    bench.step(2, 9, [3])
    assert bench.hop._taken == 2  # that would leave a hole


def test_a_step_from_somebody_else_is_dropped() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    bench.hop.receive_step(LAST, 1, Step(epoch=1, round=0, position=0), [1], 0.0)
    assert bench.hop.drain() == []


def test_replay_goes_from_the_journal_and_then_as_it_is_computed() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=6)
    bench.compute(bench.step(None, 0, [1, 2, 3]))
    bench.say(Prepare(**place(2, 2)))
    bench.hop.link_up(2, 0.0)
    bench.hop.drain()
    sent = bench.resumed(2, have=3, next_has=1, resume_at=6)
    assert sent == [SendStep(2, REFS[4], None, 1, False, [20, 30], NOTHING_SPENT)]
    sent = bench.compute(bench.step(None, 3, [4, 5, 6], epoch=2))
    assert sent == [SendStep(2, REFS[4], None, 3, False, [40, 50, 60], NOTHING_SPENT)]


def test_replay_is_joined_and_cut_into_chunks() -> None:
    bench = Bench(2)
    bench.hop._join = lambda pieces: [row for piece in pieces for row in piece]
    bench.opened().resumed(resume_at=0, ids=(7,))
    for number in range(6):
        bench.compute(bench.step(number, number, [number]))
    bench.say(Prepare(**place(2, 2)))
    bench.hop.link_up(2, 0.0)
    bench.hop.drain()
    sent = bench.resumed(2, have=6, next_has=0, resume_at=6)
    assert [(step.position, step.payload) for step in sent] == [(0, [0, 10, 20, 30]), (4, [40, 50])]


def test_the_first_hop_replays_in_chunks_and_then_counts_rounds() -> None:
    bench = Bench(0).opened()
    effects = bench.resumed(ids=tuple(range(7)))
    seen = []
    for _ in range(3):
        (job,) = [e for e in effects if isinstance(e, Compute)]
        effects = bench.compute(effects)
        seen += [(job.ids, step.round, step.sample) for step in effects if isinstance(step, SendStep)]
    assert seen == [((0, 1, 2, 3), None, False), ((4, 5), None, False), ((6,), 0, True)]
    bench.hop.receive_tokens(LAST, 1, 7, [70], 0.0)
    (job,) = bench.hop.drain()
    assert (job.position, job.ids) == (7, (70,))


def test_the_first_hop_drops_tokens_that_are_old_doubled_or_from_others() -> None:
    bench = Bench(0).opened()
    bench.compute(bench.resumed(ids=(7,)))
    bench.hop.receive_tokens(LAST, 0, 1, [70], 0.0)
    bench.hop.receive_tokens(MIDDLE, 1, 1, [71], 0.0)
    bench.hop.receive_tokens(LAST, 1, 2, [72], 0.0)
    assert bench.hop.drain() == []
    bench.hop.receive_tokens(LAST, 1, 1, [73], 0.0)
    bench.hop.receive_tokens(LAST, 1, 1, [73], 0.0)
    (job,) = bench.hop.drain()
    assert job.ids == (73,) and bench.hop._ids == [7, 73]


def last_hop(**resume: Any) -> Bench:
    bench = Bench(4).opened()
    bench.resumed(ids=(7, 8, 9), have=0, resume_at=2, next_has=2, **resume)
    bench.compute(bench.step(None, 0, [1, 2]))
    return bench


def drawn(
    bench: Bench, round_: int, position: int, token: int, likely: Likelihoods | None = None
) -> list[Any]:
    return bench.compute(bench.step(round_, position, [3], sample=True), token, likely)


def test_the_last_hop_samples_only_flagged_steps_and_tells_client_and_first() -> None:
    bench = last_hop()
    (job,) = bench.step(0, 2, [3], sample=True)
    assert job.sample.position == 3 and job.sample.ids == (7, 8, 9)
    effects = bench.compute([job], 55)
    assert effects == [
        ToClient(Tokens(1, 3, None, ids_tensor([55]))),
        SendTokens(1, REFS[0], 3, (55,)),
    ]


def test_a_token_beyond_the_credit_waits_for_it() -> None:
    bench = last_hop(credit=3)
    assert drawn(bench, 0, 2, 55) == []
    effects = bench.say(Credit(1, 4, 3))
    assert [type(effect) for effect in effects] == [ToClient, SendTokens]


def test_a_client_that_missed_tokens_gets_them_again() -> None:
    bench = last_hop()
    drawn(bench, 0, 2, 55)
    drawn(bench, 1, 3, 56)
    (tokens,) = told(bench.say(Credit(1, 50, 3)))
    assert tokens.first_position == 3 and read_ids(tokens.ids) == [55, 56]


def test_a_client_isnt_told_again_what_it_brought_itself() -> None:
    """However often it asks from the beginning: a prompt is long, and saying it costs time."""
    bench = last_hop()
    drawn(bench, 0, 2, 55)
    (tokens,) = told(bench.say(Credit(1, 50, 0)))
    assert tokens.first_position == 3 and read_ids(tokens.ids) == [55]


def test_tokens_come_again_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_module, "MAX_IDS_TOLD", 2)
    bench = last_hop(limit=6)
    for number in range(3):
        drawn(bench, number, 2 + number, 55 + number)
    (first,) = told(bench.say(Credit(1, 50, 3)))
    (second,) = told(bench.say(Credit(1, 50, 5)))
    assert (first.first_position, read_ids(first.ids), first.finish) == (3, [55, 56], None)
    assert (second.first_position, read_ids(second.ids), second.finish) == (5, [57], "length")


def test_tokens_that_are_asked_for_again_come_with_their_likelihoods() -> None:
    said = [Likelihoods(-0.5, ((55, -0.5), (9, -1.25))), Likelihoods(-2.0, ((7, -0.25), (8, -1.75)))]
    bench = last_hop(sampling=Sampling(logprobs=2))
    drawn(bench, 0, 2, 55, said[0])
    (tokens,) = told(drawn(bench, 1, 3, 56, said[1]))
    assert tokens.likelihoods() == (said[1],)
    (tokens,) = told(bench.say(Credit(1, 50, 3)))
    assert tokens.likelihoods() == tuple(said)


def test_a_resume_with_half_a_bias_costs_the_stream() -> None:
    bench = Bench(4).opened()
    for ids, bias in (([1], [1.0, 2.0]), ([1], [float("nan")]), ([1], [101.0]), ([-1], [1.0])):
        with pytest.raises(MessageError):
            bench.resumed(bias_ids=RawTensor("int32", (len(ids),), np.array(ids, "<i4").tobytes()),
                          bias=floats_tensor(bias))  # fmt: skip
    assert bench.hop.accepts(1) == "later"


@pytest.mark.parametrize(("resume", "finish"), [({"stop_ids": (55,)}, "stop"), ({"limit": 4}, "length")])
def test_the_end_is_told_to_the_client_and_not_fed_to_the_first(resume: dict[str, Any], finish: str) -> None:
    (effect,) = drawn(last_hop(**resume), 0, 2, 55)
    assert effect.message.finish == finish


def test_an_impossible_resume_costs_the_stream_and_changes_nothing() -> None:
    bench = Bench(2).opened()
    for bad in ({"have": 1}, {"next_has": 9}, {"resume_at": 100}):
        with pytest.raises(MessageError):
            bench.resumed(**bad)
    assert bench.hop.accepts(1) == "later"


def test_a_chain_that_contradicts_itself_costs_the_stream() -> None:
    with pytest.raises(MessageError):
        Bench(2).say(Open(**{**place(2, 1), "previous": None}, fingerprint=bytes(32), reserve=9))
    with pytest.raises(MessageError):
        Bench(2).say(Open(**{**place(2, 1), "span": Span(2, 3)}, fingerprint=bytes(32), reserve=9))


def test_a_broken_link_is_a_fault_of_this_epoch_only() -> None:
    bench = Bench(2).opened()
    bench.hop.link_down(0, "reset", 0.0)
    assert bench.hop.drain() == []
    bench.hop.link_down(1, "reset", 0.0)
    assert told(bench.hop.drain()) == [Fault(1, "link", "reset", LAST)]


def test_an_engine_failure_is_a_fault_of_the_step_and_stops_the_epoch() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    (job,) = bench.step(0, 0, [1])
    bench.hop.failed(job, "not finite", 0.0)
    assert told(bench.hop.drain()) == [Fault(1, "step", "not finite")]
    assert bench.step(1, 1, [2]) == []


def test_a_step_beyond_the_reservation_is_a_fault_not_a_crash() -> None:
    bench = Bench(2)
    bench.say(open_(2, 1, reserve=3))
    bench.hop.link_up(1, 0.0)
    bench.resumed(resume_at=0, ids=(7,))
    (fault,) = told(bench.step(0, 0, [1, 2, 3, 4]))
    assert "4 KV positions" in fault.reason
    assert (fault.what, fault.other) == ("room", FIRST), "not this hop's own"


def test_tokens_beyond_the_reservation_are_no_fault_of_the_first_hops() -> None:
    bench = Bench(0)
    bench.say(open_(0, 1, reserve=5))
    bench.hop.link_up(1, 0.0)
    bench.resumed(resume_at=2)
    bench.hop.receive_tokens(LAST, 1, 3, [70, 71, 72], 0.0)
    (fault,) = [one for one in told(bench.hop.drain()) if isinstance(one, Fault)]
    assert (fault.what, fault.other) == ("room", LAST)


def test_a_client_that_overran_its_reservation_alone_accuses_nobody() -> None:
    """One hop is the whole chain, and generation ends behind what it reserved."""
    bench = Bench(0)
    alone = {"next": None, "first": REFS[0], "last": REFS[0]}
    bench.say(Open(**place(0, 1) | alone, fingerprint=bytes(32), reserve=3))
    effects = bench.resumed(ids=(7, 8), resume_at=1, limit=50)
    for token in (70, 71, 72):
        job = next(effect for effect in effects if isinstance(effect, Compute))
        bench.hop.computed(job, None, token if job.sample else None, 0.0)
        effects = bench.hop.drain()
        if faults := [one for one in told(effects) if isinstance(one, Fault)]:
            break
    assert [(fault.what, fault.other) for fault in faults] == [("room", None)]


@pytest.mark.parametrize(
    ("start", "sender", "epoch", "accused"),
    [(2, FIRST, 1, FIRST), (0, LAST, 1, LAST), (2, LAST, 1, None), (2, FIRST, 2, None), (4, FIRST, 1, None)],
)
def test_nonsense_is_told_with_its_sender_if_it_came_from_where_input_comes(
    start: int, sender: PeerId, epoch: int, accused: PeerId | None
) -> None:
    bench = Bench(start).opened()
    bench.resumed()
    bench.hop.bad_input(sender, epoch, "NaN", 0.0)
    faults = [one for one in told(bench.hop.drain()) if isinstance(one, Fault)]
    assert faults == ([Fault(1, "input", "NaN", accused)] if accused else [])
    bench.hop.bad_input(sender, epoch, "NaN", 0.0)
    assert told(bench.hop.drain()) == [], "once is enough"


def test_a_working_hop_says_so_each_second() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    bench.step(0, 0, [1])
    assert bench.hop.deadline == 1.0
    bench.hop.tick(1.0)
    assert told(bench.hop.drain()) == [Working(1, 0)] and bench.hop.deadline == 2.0


def test_silence_of_the_client_frees_the_hop_after_its_lease() -> None:
    bench = Bench(2).opened()
    bench.now = 5.0
    bench.say(Renew(1))
    assert bench.hop.deadline == 35.0 and not bench.hop.in_grace(16.0) and bench.hop.in_grace(17.0)
    bench.hop.tick(34.9)
    assert not bench.hop.finished
    bench.hop.tick(35.0)
    assert bench.hop.finished and not bench.ledger.held


def test_a_client_whose_stream_broke_is_in_grace_until_it_speaks() -> None:
    bench = Bench(2).opened()
    bench.hop.client_gone(1.0)
    assert bench.hop.in_grace(1.0)
    bench.say(Renew(1))
    assert not bench.hop.in_grace(1.0)


def test_extend_grows_the_reservation_or_is_refused_unchanged() -> None:
    bench = Bench(2, capacity=150).opened()
    assert told(bench.say(Extend(1, 120)))[0].positions == 120
    assert told(bench.say(Extend(1, 200)))[0].kind == "refused"
    assert list(bench.ledger.held.values()) == [120]


@pytest.mark.parametrize(("original", "void"), [(110, {120}), (100, {101}), (90, set()), (120, set())])
def test_growth_that_changes_how_positions_are_encoded_makes_all_that_was_computed_void(
    original: int, void: set[int]
) -> None:
    bench = Bench(2).opened()
    bench.ledger.original = original
    bench.resumed(resume_at=4, ids=())
    bench.compute(bench.step(None, 0, [1, 2, 3, 4]))
    for epoch, (positions, first) in enumerate([(101, "prepare"), (120, "extend")], start=2):
        before = 4 if epoch == 2 or 101 not in void else 0
        left = 0 if positions in void else before
        said: list[Any] = []
        if first == "prepare":  # and the link stands before it grows
            bench.say(Prepare(**place(2, epoch)))
            bench.hop.link_up(epoch, 0.0)
            said = told(bench.hop.drain())
            assert said == [Prepared(epoch, before, 0)]
            again = told(bench.say(Extend(epoch, positions)))
            assert again == [Prepared(epoch, 0, 0)] * (positions in void) + [Extended(epoch, positions)]
        else:
            bench.say(Prepare(**place(2, epoch)))
            assert told(bench.say(Extend(epoch, positions))) == [Extended(epoch, positions)]
            bench.hop.link_up(epoch, 0.0)
            assert told(bench.hop.drain()) == [Prepared(epoch, left, 0)]


def test_a_session_that_runs_grows_only_where_that_changes_nothing_of_what_it_has() -> None:
    bench = Bench(2).opened()
    bench.ledger.original = 110
    bench.resumed(resume_at=4, ids=())
    assert told(bench.say(Extend(1, 110)))[0].positions == 110
    with pytest.raises(MessageError, match=r"from 110 to 111 positions changes how .* before the session is resumed"):
        bench.say(Extend(1, 111))
    assert list(bench.ledger.held.values()) == [110]


def test_where_is_answered_with_true_figures() -> None:
    bench = Bench(2).opened()
    bench.resumed(resume_at=0, ids=(7,))
    bench.compute(bench.step(0, 0, [1]))
    bench.step(1, 1, [2])
    (answer,) = told(bench.say(Where(1, ask=9)))
    assert answer == WhereIs(1, True, 1, 2, True, 1, 1, 0, False, 9)


def test_a_journal_cuts_inside_a_piece_and_reads_in_groups() -> None:
    journal = Journal()
    for start in (0, 3, 6):
        journal.append(3, list(range(start, start + 3)))
    journal.cut(8)
    groups = [(at, [row for piece in pieces for row in piece]) for at, pieces in journal.read(1, 8, 4)]
    assert groups == [(1, [1, 2, 3, 4]), (5, [5, 6, 7])]


class HopMachine(RuleBasedStateMachine):
    """A middle hop between honest neighbours and an honest client, over a network that isn't.

    Every message may be lost, doubled, or arrive after any later one. A row stands for all ids up to
    its position, so that the KV shows at once what is wrong, missing or of an older text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.hop = Hop(MIDDLE, CLIENT, SESSION, 2, HopConfig(prefill_chunk=3), self.ledger)
        self.gone = 0  # KV before it is let go of
        self.ids = [0, 1, 2, 3]
        self.rewound_to: int | None = None
        self.epoch, self.opened, self.resumed = 0, False, False
        self.texts: dict[int, list[int]] = {}
        self.network: list[Any] = []  # messages, and (epoch, Step, rows)
        self.kv: list[int] = []
        self.job: Compute | None = None
        self.fresh = 100
        self.sent_to = 0

    @initialize(window=st.sampled_from((None, 1, 3)))
    def layers_see(self, window: int | None) -> None:
        self.ledger.window = window

    def row(self, epoch: int, position: int) -> int:
        return hash(tuple(self.texts[epoch][: position + 1]))

    def drain(self) -> None:
        for effect in self.hop.drain():
            match effect:
                case ToClient(message):
                    self._client_hears(message)
                case Compute():
                    assert self.job is None, "two steps in the engine"
                    self.job = effect
                case SendStep():
                    self._next_hop_gets(effect)
                case EnsureLink(epoch):
                    self.network.insert(0, epoch)
                case Free():
                    self.opened = False

    def _client_hears(self, message: Any) -> None:
        if message.epoch != self.epoch or self.resumed:
            return
        if isinstance(message, Opened):
            self.opened = True
            self._resume(0)
        elif isinstance(message, Prepared) and self.opened:
            self._resume(message.length, message.oldest)
        elif isinstance(message, Unknown):
            self.opened = False

    def _resume(self, length: int, oldest: int = 0) -> None:
        self.resumed = True
        at = len(self.ids) - 1
        at = at if self.rewound_to is None else min(at, self.rewound_to)
        have, next_has = min(length, at), at // 2
        have = have if have >= oldest else 0
        self.sent_to = next_has
        self.network.append(Resume(self.epoch, have, next_has, at))
        steps: list[tuple[int | None, int, int]] = []
        for position in range(have, at, 3):
            steps.append((None, position, min(position + 3, at)))
        starts = range(at, len(self.ids), 2)
        steps += [(n, position, min(position + 2, len(self.ids))) for n, position in enumerate(starts)]
        for round_, start, stop in steps:
            rows = [self.row(self.epoch, position) for position in range(start, stop)]
            step = Step(epoch=self.epoch, round=round_, position=start, sample=stop == len(self.ids))
            self.network.append((self.epoch, step, rows))

    def _next_hop_gets(self, step: SendStep) -> None:
        assert step.epoch == self.hop.epoch
        expected = [-self.row(step.epoch, step.position + n) for n in range(len(step.payload))]
        assert list(step.payload) == expected
        if step.epoch == self.epoch:
            if step.round is None:
                assert step.position == self.sent_to, "replay left a hole or doubled"
            self.sent_to = step.position + len(step.payload)
            if step.sample:
                self.ids.append(self.fresh)
                self.texts[self.epoch] = list(self.ids)
                self.fresh += 1
                self.rewound_to = None

    def _windows_move(self, position: int, count: int) -> None:
        """They let go of all that they may, at once."""
        window = self.ledger.window
        if window is None:
            return
        self.gone = 0 if position == 0 else self.gone
        assert max(0, position - window + 1) >= self.gone, "a window has let go of what this step sees"
        if position + count > window + REACH.positions:
            self.gone = max(self.gone, position - REACH.rewind - window + 1)

    @rule(reopen=st.booleans())
    def client_starts_an_epoch(self, reopen: bool) -> None:
        self.epoch += 1
        self.resumed = False
        self.texts[self.epoch] = list(self.ids)
        if reopen or not self.opened:
            self.opened = False
            self.network.append(open_(2, self.epoch))
        else:
            self.network.append(Prepare(**place(2, self.epoch)))

    @rule(share=st.floats(0, 1), more=st.integers(0, 3))
    def client_rewinds(self, share: float, more: int) -> None:
        position = max(1, int(share * len(self.ids)))
        self.ids = self.ids[:position] + list(range(self.fresh, self.fresh + more))
        self.fresh += more
        self.rewound_to = position if self.rewound_to is None else min(position, self.rewound_to)
        self.client_starts_an_epoch(False)

    @rule(turns=st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=6))
    def some_things_arrive(self, turns: list[tuple[int, bool]]) -> None:
        """Mostly the oldest first, so that things get done; sometimes any, and it may come again."""
        for which, again in turns:
            if self.network:
                index = 0 if which < 80 else which % len(self.network)
                message = self.network[index] if again and which >= 60 else self.network.pop(index)
                self._arrives(message)
                self.drain()

    def _arrives(self, message: Any) -> None:
        if isinstance(message, int):
            self.hop.link_up(message, 0.0)
        elif isinstance(message, tuple):
            epoch, step, rows = message
            if self.hop.accepts(epoch) == "now":
                self.hop.receive_step(FIRST, epoch, step, rows, 0.0)
        else:
            self.hop.receive(message, 0.0)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 99))
    def something_is_lost(self, which: int) -> None:
        self.network.pop(which % len(self.network))

    @precondition(lambda self: self.job is not None)
    @rule(fails=st.integers(0, 9))
    def the_engine_answers(self, fails: int) -> None:
        job, self.job = self.job, None
        assert job is not None and job.payload is not None
        assert job.position <= len(self.kv), "a hole in the KV"
        self._windows_move(job.position, len(job.payload))
        self.kv[job.position :] = list(job.payload)
        if job.epoch == self.hop.epoch:
            expected = [self.row(job.epoch, position) for position in range(len(self.kv))]
            assert self.kv == expected
        if fails == 0:
            self.hop.failed(job, "not finite", 0.0)
        else:
            self.hop.computed(job, [-row for row in list(job.payload)], None, 0.0)
        self.drain()

    @rule(back=st.integers(0, 3))
    def the_link_breaks(self, back: int) -> None:
        if self.hop.epoch > 0:
            self.hop.link_down(self.hop.epoch - back, "reset", 0.0)
            self.drain()

    @rule()
    def an_old_close_arrives(self) -> None:
        self.hop.receive(Close(max(0, self.hop.epoch - 1)), 0.0)
        self.drain()

    @invariant()
    def the_figures_agree(self) -> None:
        assert self.hop._journal.length <= self.hop._taken
        assert bool(self.ledger.held) != self.hop.finished


HopMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestHopMachine = HopMachine.TestCase
