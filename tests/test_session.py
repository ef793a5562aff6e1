"""A client's view of one generation, spoken to by hand and by hops that say anything at any time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routing.spans import Hop, Route, Span
from swarm.effects import Ended, Failed, Grew, HopKey, Repaired, RepairStarted, Send
from swarm.errors import GenerationFailed, LinkFailed, NoRoute, PeerFailed, UsageError
from swarm.identity import PeerId, peer_id
from swarm.messages import (
    Close,
    Credit,
    Draining,
    Extend,
    Extended,
    Fault,
    Message,
    Open,
    Opened,
    Prepare,
    Prepared,
    RefusedMessage,
    Renew,
    Resume,
    Tokens,
    Unknown,
    Unsupported,
    Where,
    WhereIs,
    Working,
)
from swarm.plans import Plan, PlanRequest, Timings
from swarm.session import OVER, Phase, Session
from swarm.session_config import SessionConfig
from swarm.tensors import RawTensor, ids_tensor, read_ids

A, B, C, D = (peer_id(bytes([n]) * 32) for n in range(1, 5))
FRONT, BACK = Span(0, 3), Span(3, 6)
OFFERS = {A: FRONT, B: FRONT, C: BACK, D: BACK}


def config(**fields: Any) -> SessionConfig:
    values: dict[str, Any] = {"session": bytes(16), "prompt": (1, 2, 3), "limit": 40, "reserve": 40}
    return SessionConfig(**{**values, "fingerprint": bytes(32)} | fields)


def planner(request: PlanRequest) -> Plan:
    """A kept hop if there is one, else the first peer that isn't excluded."""
    hops: list[Hop] = []
    for span in (FRONT, BACK):
        kept = [hop for hop in request.kept if hop.span == span]
        new = [Hop(span, p) for p, s in OFFERS.items() if s == span and p not in request.excluded_peers]
        able = [
            hop
            for hop in kept + new
            if not hops or (PeerId(hops[0].peer), PeerId(hop.peer)) not in request.excluded_links
        ]
        if not able:
            raise NoRoute("m", str(span), 0, 4, "wait")
        hops.append(able[0])
    return Plan(Route(tuple(hops), 0.1), {A: b"a"})


class Talk:
    """A session and what it did last."""

    def __init__(self, **fields: Any) -> None:
        self.now = 0.0
        self.session = Session(config(**fields), planner, random.Random(1))
        self.session.start(0.0)
        self.did = self.session.drain()

    def hear(self, peer: PeerId, message: Message) -> list[Any]:
        self.session.receive(HopKey(peer, OFFERS[peer].start), message, self.now)
        self.did = self.session.drain()
        return self.did

    def lose(self, peer: PeerId, **more: Any) -> list[Any]:
        self.session.lost(HopKey(peer, OFFERS[peer].start), "reset", self.now, **more)
        self.did = self.session.drain()
        return self.did

    def rewind(self, position: int, ids: tuple[int, ...], limit: int | None = None) -> list[Any]:
        self.session.rewind(position, ids, self.now, limit)
        self.did = self.session.drain()
        return self.did

    def pass_time(self, seconds: float) -> list[Any]:
        until, did = self.now + seconds, []
        while self.session.deadline is not None and self.session.deadline <= until:
            self.now = max(self.now, self.session.deadline)
            self.session.tick(self.now)
            did += self.session.drain()
        self.now, self.did = until, did
        return did

    def sent(self, kind: type[Message]) -> list[tuple[PeerId, Any]]:
        return [
            (e.key.peer, e.message) for e in self.did if isinstance(e, Send) and isinstance(e.message, kind)
        ]

    def seen(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.did if isinstance(effect, kind)]

    def running(self) -> Talk:
        self.hear(A, Opened(1))
        self.hear(C, Opened(1))
        return self

    def token(self, position: int, *ids: int, peer: PeerId = C, finish: str | None = None) -> list[Any]:
        return self.hear(peer, Tokens(self.session.epoch, position, finish, ids_tensor(ids)))


def test_start_opens_every_hop_at_once_with_its_place() -> None:
    talk = Talk()
    (first, a), (last, c) = talk.sent(Open)
    assert (first, last) == (A, C) and a.epoch == c.epoch == 1 and a.reserve == 40
    assert a.previous is None and a.next.peer == C and a.next.start == 3 and a.first.descriptor == b"a"
    assert c.next is None and c.previous.peer == A and c.last.peer == C


def test_all_resume_when_all_have_answered() -> None:
    talk = Talk()
    assert talk.hear(A, Opened(1)) == []
    talk.hear(C, Opened(1))
    (_, a), (_, c) = talk.sent(Resume)
    assert (a.have, a.next_has, a.resume_at) == (0, 0, 2) and read_ids(a.ids) == [1, 2, 3]
    assert (c.have, c.resume_at, c.credit, c.limit) == (0, 2, 3 + 64, 40) and read_ids(c.ids) == [1, 2, 3]


def test_tokens_are_appended_at_the_own_length_only() -> None:
    talk = Talk().running()
    assert talk.token(3, 10) == [Grew((10,), 3, None, talk.seen(Grew)[0].spent)]
    assert talk.token(3, 10) == []
    assert talk.token(3, 10, 11)[0].ids == (11,)
    talk.token(7, 99)
    assert talk.sent(Credit) == [(C, Credit(1, 67, 5))] and talk.session.ids == (1, 2, 3, 10, 11)


def test_tokens_of_another_epoch_or_hop_are_dropped() -> None:
    talk = Talk().running()
    assert talk.token(3, 10, peer=A) == []
    assert talk.hear(C, Tokens(0, 3, None, ids_tensor([10]))) == []


def test_the_last_token_closes_every_hop() -> None:
    talk = Talk().running()
    talk.token(3, 10, finish="stop")
    assert [peer for peer, _ in talk.sent(Close)] == [A, C] and talk.did[-1] == Ended("stop")
    assert talk.session.deadline is None and talk.token(4, 11) == []


def test_credit_follows_the_reader() -> None:
    talk = Talk(credit_window=4).running()
    talk.token(3, 10, 11)
    talk.session.read(4, 0.0)
    assert talk.session.drain() == []
    talk.session.read(5, 0.0)
    talk.did = talk.session.drain()
    assert talk.sent(Credit) == [(C, Credit(1, 9, 5))]


def test_no_deadline_runs_while_nobody_reads() -> None:
    talk = Talk(credit_window=2).running()
    talk.token(3, 10, 11)
    talk.pass_time(100.0)
    assert not talk.sent(Where) and talk.sent(Renew)


def test_a_lost_connection_is_repaired_at_once_keeping_the_others() -> None:
    talk = Talk().running()
    talk.token(3, 10, 11)
    talk.lose(C)
    assert [(p, m.epoch) for p, m in talk.sent(Open)] == [(D, 2)]
    assert [(p, m.epoch) for p, m in talk.sent(Prepare)] == [(A, 2)]
    (started,) = talk.seen(RepairStarted)
    assert started.lost == (C,) and started.hops_after == (Hop(FRONT, A), Hop(BACK, D))
    talk.now = 0.5
    talk.hear(A, Prepared(2, 5))
    talk.hear(D, Opened(2))
    (_, a), (_, d) = talk.sent(Resume)
    assert (a.have, a.next_has, a.resume_at, a.ids_from) == (4, 0, 4, 4)
    assert (d.have, d.ids_from, read_ids(d.ids)) == (0, 0, [1, 2, 3, 10, 11])
    talk.token(5, 12, peer=D)
    (repaired,) = talk.seen(Repaired)
    assert repaired.stalled_s == 0.5 and repaired.at_token == 5 and repaired.epochs == 1


def test_a_hop_whose_windows_let_go_of_too_much_begins_anew_on_the_same_peer() -> None:
    talk = Talk().running()
    talk.token(3, 10, 11, 12, 13)
    talk.rewind(4, (20, 21))
    talk.hear(A, Prepared(2, 6, oldest=2))
    talk.hear(C, Prepared(2, 6, oldest=5))
    (_, a), (_, c) = talk.sent(Resume)
    assert (a.have, a.next_has, a.resume_at) == (4, 0, 4)  # A feeds it from its journal
    assert (c.have, c.ids_from, read_ids(c.ids)) == (0, 0, [1, 2, 3, 10, 20, 21])
    assert not talk.sent(Close) and not talk.seen(RepairStarted) and not talk.session._excluded.failed


def test_a_repair_takes_hops_back_by_the_same_rule() -> None:
    """C drew ids that this client never got: everybody is ahead of it."""
    talk = Talk().running()
    talk.token(3, 10)
    talk.lose(C)
    talk.hear(A, Prepared(2, 40, oldest=30))
    talk.hear(D, Opened(2))
    (_, a), _ = talk.sent(Resume)
    assert (a.have, a.next_has, a.resume_at, read_ids(a.ids)) == (0, 0, 3, [1, 2, 3, 10])


def test_hops_that_reserved_less_are_asked_for_more_and_waited_for() -> None:
    talk = Talk().running()
    talk.token(3, 10, 11)
    reserved = talk.session._config.reserve
    talk.rewind(4, (20,), reserved + 30)
    assert [(peer, m.positions) for peer, m in talk.sent(Extend)] == [(A, reserved + 30), (C, reserved + 30)]
    talk.hear(A, Prepared(2, 5))
    talk.hear(C, Prepared(2, 5))
    talk.hear(C, Extended(2, reserved + 30))
    assert not talk.sent(Resume)
    talk.hear(A, Extended(2, reserved + 30))
    assert [m.limit for _, m in talk.sent(Resume)] == [0, reserved + 30]
    talk.rewind(4, (20,))
    assert not talk.sent(Extend)  # everybody holds it by now


def test_a_hop_that_can_not_reserve_more_is_closed_and_not_blamed() -> None:
    talk = Talk().running()
    reserved = talk.session._config.reserve
    talk.rewind(2, (20,), reserved + 30)
    talk.hear(A, Prepared(2, 5))
    talk.hear(C, RefusedMessage(2, "full", 1.0))
    assert [peer for peer, _ in talk.sent(Close)] == [C]
    assert [(peer, m.reserve) for peer, m in talk.sent(Open)] == [(D, reserved + 30)]
    assert C not in talk.session._excluded.failed


def test_an_impossible_rewind_changes_nothing() -> None:
    talk = Talk().running()
    for position, ids, limit in ((9, (), None), (-1, (5,), None), (0, (), None), (2, (5,), 3), (3, (1,) * 500, None)):
        with pytest.raises(UsageError, match="can't rewind to"):
            talk.rewind(position, ids, limit)
    assert talk.session.ids == (1, 2, 3) and talk.session.epoch == 1


def test_a_hop_that_never_answered_its_open_is_opened_again() -> None:
    talk = Talk()
    talk.hear(A, Opened(1))
    talk.lose(C)
    talk.hear(D, RefusedMessage(2, "full", 1.0))
    assert [peer for peer, _ in talk.sent(Prepare)] == [A] or not talk.sent(Prepare)
    talk = Talk()
    talk.lose(C)  # A hasn't answered
    assert [peer for peer, _ in talk.sent(Open)] == [A, D] and not talk.sent(Prepare)


def test_unknown_reopens_without_blame() -> None:
    talk = Talk().running()
    talk.hear(C, Unknown(1))
    assert [peer for peer, _ in talk.sent(Open)] == [C] and talk.seen(RepairStarted)[0].lost == ()


def test_a_peer_that_was_started_again_and_still_loads_is_not_blamed() -> None:
    talk = Talk()
    talk.hear(C, Unsupported("open"))
    assert [peer for peer, _ in talk.sent(Open)] == [A, D] and talk.seen(RepairStarted)[0].lost == ()
    assert C not in talk.session._excluded.failed


def test_where_the_ring_resumes_stays_below_a_rewind_until_a_token_comes() -> None:
    talk = Talk().running()
    talk.token(3, 10, 11, 12, 13)
    talk.session.rewind(4, (20, 21), 0.0)
    talk.lose(C)
    talk.hear(A, Prepared(3, 7))
    talk.hear(D, Opened(3))
    (_, a), _ = talk.sent(Resume)
    assert (a.have, a.resume_at, read_ids(a.ids)) == (4, 4, [20, 21])
    talk.token(6, 22, peer=D)
    talk.lose(D)
    assert talk.session._rewound_to is None


def test_a_stream_that_breaks_alone_is_only_suspicious() -> None:
    talk = Talk().running()
    talk.lose(C, peer_gone=False)
    assert [peer for peer, _ in talk.sent(Prepare)] == [A, C]
    talk.lose(C, peer_gone=False)
    assert [peer for peer, _ in talk.sent(Open)] == [D]


def where(talk: Talk, peer: PeerId, ask: int, **fields: Any) -> list[Any]:
    values: dict[str, Any] = {"epoch": talk.session.epoch, "resumed": True, "round": 0, "length": 3}
    values |= {"in_engine": False, "finished": 3, "sent": 3, "known": 3, "ask": ask}
    return talk.hear(peer, WhereIs(**values | fields))


def overdue(talk: Talk) -> int:
    """Let the deadline pass and the first question go out; its number."""
    talk.pass_time(2.0)
    return int(talk.sent(Where)[-1][1].ask)


def test_who_does_not_answer_has_failed() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    ask = overdue(talk)
    where(talk, A, ask)
    talk.pass_time(1.0)
    where(talk, A, ask + 1)
    talk.pass_time(2.0)
    assert talk.seen(RepairStarted)[0].lost == (C,)


def test_the_stall_is_as_long_as_the_reader_waited_not_only_since_it_was_noticed() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    ask = overdue(talk)  # 2 s
    where(talk, A, ask)
    talk.pass_time(1.0)
    where(talk, A, ask + 1)
    talk.pass_time(2.0)  # C is found silent
    talk.pass_time(0.5)
    talk.hear(A, Prepared(2, 4))
    talk.hear(D, Opened(2))
    talk.token(4, 11, peer=D)
    (repaired,) = talk.seen(Repaired)
    assert repaired.stalled_s == 2.0 + 1.0 + 2.0 + 0.5


def test_two_equal_answers_of_a_busy_engine_mean_stuck() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    ask = overdue(talk)
    for number in (ask, ask + 1):
        where(talk, A, number, length=4, finished=4, sent=4, known=4)
        where(talk, C, number, in_engine=True, length=4, sent=4, known=4)
        if number == ask:
            talk.pass_time(1.0)
    assert talk.seen(RepairStarted)[0].lost == (C,)


def test_sent_but_not_received_blames_the_link_and_neither_peer() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    ask = overdue(talk)
    for number in (ask, ask + 1):
        where(talk, A, number, length=4, finished=4, sent=4, known=4)
        where(talk, C, number, sent=4, known=4)
        if number == ask:
            talk.pass_time(1.0)
    (started,) = talk.seen(RepairStarted)
    assert started.lost == () and "link" in started.reason
    assert [peer for peer, _ in talk.sent(Prepare)] == [A, C]
    talk.hear(A, Fault(2, "link", "reset", C))
    assert (A, C) in talk.session._excluded.links


@pytest.mark.parametrize(
    ("ids", "likely"),
    [
        (b"\xff\xff\xff\xff", {}),
        (b"\x00\x00\x01\x00", {}),
        (b"\x07\x00\x00\x00", {"logprobs": RawTensor("float32", (3,), bytes(12)), "top_ids": ids_tensor([1])}),
    ],
    ids=["negative", "beyond the vocabulary", "likelihoods that don't fit"],
)
def test_a_last_hop_that_draws_nonsense_is_blamed_and_no_crash(ids: bytes, likely: dict[str, RawTensor]) -> None:
    talk = Talk(vocab=1 << 15).running()
    talk.hear(C, Tokens(1, 3, None, RawTensor("int32", (1,), ids), **likely))
    assert talk.seen(RepairStarted)[0].lost == (C,) and talk.session.ids == (1, 2, 3)


def test_nonsense_is_blamed_on_its_sender_and_not_on_whoever_found_it() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    talk.hear(C, Fault(1, "input", "the input has NaN or Inf", A))
    (started,) = talk.seen(RepairStarted)
    assert started.lost == (A,) and C not in talk.session._excluded.failed


@pytest.mark.parametrize("accused", [None, C, D])
def test_whoever_accuses_somebody_that_isnt_before_it_is_blamed_itself(accused: PeerId | None) -> None:
    talk = Talk().running()
    talk.token(3, 10)
    talk.hear(C, Fault(1, "input", "the input has NaN or Inf", accused))
    assert talk.seen(RepairStarted)[0].lost == (C,)


def test_whoever_accuses_a_second_peer_is_blamed_itself() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    talk.session._accused_by[C] = {D}
    talk.hear(C, Fault(1, "input", "the input has NaN or Inf", A))
    assert talk.seen(RepairStarted)[0].lost == (C,)


@pytest.mark.parametrize(("teller", "pair"), [(C, (A, C)), (A, (C, A))])
def test_a_reservation_that_was_overrun_blames_neither_of_the_two(
    teller: PeerId, pair: tuple[PeerId, PeerId]
) -> None:
    talk = Talk().running()
    talk.token(3, 10)
    talk.hear(teller, Fault(1, "room", "the step needs 99 KV positions", None))
    assert talk.seen(RepairStarted)[0].lost == () and not talk.session._excluded.failed
    assert pair in talk.session._excluded.link_faults


def test_answers_that_differ_show_progress_and_blame_nobody() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    ask = overdue(talk)
    where(talk, A, ask)
    where(talk, C, ask, finished=1)
    talk.pass_time(1.0)
    where(talk, A, ask + 1)
    where(talk, C, ask + 1, finished=2)
    assert talk.session.phase is Phase.RUNNING and talk.session._overdue.at == talk.now + 2.0


def test_working_extends_a_deadline_at_most_five_fold() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    for _ in range(30):
        talk.pass_time(1.0)
        if talk.sent(Where):
            break
        talk.hear(C, Working(1, 3))
    assert talk.now == 10.0


def test_deadlines_follow_what_was_measured() -> None:
    timings = Timings()
    for _ in range(19):
        timings.saw("step", 5.0)
    assert timings.p99("step", 0.1) == 0.1
    timings.saw("step", 3.0)
    assert timings.p99("step", 0.1) == 5.0


def test_a_peer_that_leaves_is_left_without_blame_if_another_can_serve() -> None:
    talk = Talk().running()
    talk.hear(C, Draining(1, 25.0))
    assert [peer for peer, _ in talk.sent(Open)] == [D] and [peer for peer, _ in talk.sent(Close)] == [C]
    talk.hear(D, Draining(2, 25.0))
    assert not talk.did  # nobody else: stay as long as it serves


def test_a_peer_that_leaves_is_left_once_somebody_has_come_who_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OFFERS, D)
    talk = Talk().running()
    talk.hear(C, Draining(1, 25.0))
    assert not talk.did
    monkeypatch.undo()
    talk.now += 6.0
    talk.hear(C, Draining(1, 19.0))
    assert [peer for peer, _ in talk.sent(Open)] == [D]


def test_repairs_that_make_no_token_are_bounded() -> None:
    talk = Talk().running()
    talk.token(3, 10)
    for _ in range(200):
        for peer in (A, B, C, D):
            talk.lose(peer)
        talk.pass_time(5.0)
        if talk.session.phase in OVER:
            break
    assert talk.session.phase is Phase.FAILED
    assert talk.now < 120.0


def test_the_error_keeps_the_ids_so_far() -> None:
    talk = Talk(max_attempts=2).running()
    talk.token(3, 10)
    talk.lose(A)
    talk.lose(B)
    (failed,) = talk.seen(Failed)
    assert isinstance(failed.error, GenerationFailed) and failed.error.token_ids == (10,)


def test_a_prompt_that_leaves_nothing_to_generate_is_a_usage_error() -> None:
    for fields in ({"prompt": ()}, {"limit": 3}, {"reserve": 39}):
        with pytest.raises(UsageError):
            Session(config(**fields), planner, random.Random(1))


def test_our_own_bug_in_a_planner_is_never_blamed_on_a_peer() -> None:
    def broken(request: PlanRequest) -> Plan:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Session(config(), broken, random.Random(1)).start(0.0)


class SessionMachine(RuleBasedStateMachine):
    """Hops that answer, lie about lengths they may have, repeat themselves, come late, or vanish.

    Tokens of the present epoch are right (their ids are the position's), those of older ones wrong.
    """

    @initialize(seed=st.integers(0, 999), window=st.sampled_from([1, 5, 64]))
    def begin(self, seed: int, window: int) -> None:
        self.now, self.seed = 0.0, 1
        self.session = Session(config(credit_window=window), planner, random.Random(seed))
        self.text = [1, 2, 3]
        self.opens: dict[HopKey, int] = {}  # latest Open's epoch, of what isn't closed
        self.answered: set[HopKey] = set()
        self.lengths: dict[tuple[HopKey, int], int] = {}
        self.said: list[tuple[HopKey, Message]] = []
        self.ended = False
        self.limit = 40
        self.asked_to_grow: dict[HopKey, tuple[int, int]] = {}
        self.low: int | None = None
        self.call(self.session.start)

    def call(self, act: Any, *arguments: Any, **more: Any) -> None:
        match arguments:
            case (key, RefusedMessage(epoch=epoch)):  # who refused to open holds nothing; to grow: what it held
                now = self.session.phase is Phase.OPENING and epoch == self.session.epoch
                if now and key not in self.answered:
                    self.opens.pop(key, None)
        act(*arguments, self.now, **more)
        for effect in self.session.drain():
            assert not self.ended, f"{effect} after the end"
            match effect:
                case Send(key, message):
                    self._sent(key, message)
                case Grew(ids, first, _):
                    assert first == len(self.text)
                    self.text += ids
                    self.low = None
                case Ended():
                    self.ended = True

    def _sent(self, key: HopKey, message: Any) -> None:
        assert message.epoch <= self.session.epoch
        match message:
            case Open():
                self.opens[key] = message.epoch
                self.answered.discard(key)
            case Prepare():
                assert key in self.answered, "prepared though its latest Open isn't answered"
            case Extend():
                assert message.positions >= self.limit
                self.asked_to_grow[key] = message.epoch, message.positions
            case Close():
                assert key in self.opens
                del self.opens[key]
            case Resume():
                length, oldest = self.lengths.get((key, message.epoch), (0, 0))
                have = min(length, message.resume_at)
                assert message.have == (have if have >= oldest else 0)
                assert message.resume_at <= len(self.text) - 1
                assert self.low is None or message.resume_at <= self.low
                assert self.asked_to_grow.get(key, (0, 0))[0] != message.epoch, "resumed before it could grow"
            case _:
                assert key in self.opens, f"{message.kind} to a hop that isn't held"

    def hear(self, key: HopKey, message: Message) -> None:
        self.said.append((key, message))
        self.call(self.session.receive, key, message)

    def key(self, which: int) -> HopKey:
        keys = sorted(self.opens) or [HopKey(A, 0)]
        return keys[which % len(keys)]

    @rule(which=st.integers(0, 3), length=st.integers(0, 40), back=st.integers(0, 40))
    def a_hop_answers(self, which: int, length: int, back: int) -> None:
        key, epoch = self.key(which), self.session.epoch
        if self.opens.get(key) == epoch:
            self.answered.add(key)
            self.hear(key, Opened(epoch))
        elif key in self.answered:
            self.lengths.setdefault((key, epoch), (length, max(0, length - back)))
            if self.asked_to_grow.get(key, (0, 0))[0] == epoch:
                self.hear(key, Extended(*self.asked_to_grow.pop(key)))
            self.hear(key, Prepared(epoch, *self.lengths[key, epoch]))

    @rule()
    def all_answer(self) -> None:
        for which in range(len(self.opens)):
            self.a_hop_answers(which, 3, 2)

    @rule(back=st.integers(0, 3), count=st.integers(1, 3), finish=st.integers(0, 20))
    def tokens_come(self, back: int, count: int, finish: int) -> None:
        first = max(1, len(self.text) - back)
        old = self.text[first:]
        ids = old + [1000 + first + len(old) + n for n in range(count)]
        if first + len(ids) < self.limit:
            end = "stop" if finish == 0 else None
            last = self.session.hops[-1]
            key = HopKey(PeerId(last.peer), last.span.start)
            self.hear(key, Tokens(self.session.epoch, first, end, ids_tensor(ids)))

    @precondition(lambda self: self.session.epoch > 1)
    @rule(back=st.integers(1, 3))
    def old_tokens_come(self, back: int) -> None:
        last = self.session.hops[-1]
        key = HopKey(PeerId(last.peer), last.span.start)
        epoch = max(0, self.session.epoch - back)
        self.call(self.session.receive, key, Tokens(epoch, len(self.text), None, ids_tensor([9999])))

    @precondition(lambda self: self.said)
    @rule(which=st.integers(0, 999))
    def something_is_heard_again(self, which: int) -> None:
        key, message = self.said[-1 - which % len(self.said)]
        if not isinstance(message, Opened) or self.opens.get(key) == message.epoch:
            self.call(self.session.receive, key, message)

    @rule(which=st.integers(0, 3), kind=st.integers(0, 7))
    def trouble_comes(self, which: int, kind: int) -> None:
        key, epoch = self.key(which), self.session.epoch
        messages = [
            Unknown(epoch),
            RefusedMessage(epoch, "full", 1.0),
            Fault(epoch, "link", "reset", D),
            Fault(epoch, "step", "not finite"),
            Fault(epoch, "input", "not finite", D),
            Fault(epoch, "room", "too long", None),
            Draining(epoch, 5.0),
            Working(epoch, 2),
        ]
        self.hear(key, messages[kind])

    @rule(which=st.integers(0, 3), gone=st.booleans())
    def a_stream_is_lost(self, which: int, gone: bool) -> None:
        self.call(self.session.lost, self.key(which), "reset", peer_gone=gone)

    @rule(answers=st.booleans(), busy=st.booleans())
    def time_passes(self, answers: bool, busy: bool) -> None:
        at = self.session.deadline
        if at is None:
            return
        self.now = max(self.now, at)
        self.call(self.session.tick)
        if answers and self.session._inquiry is not None:
            for key in list(self.session._keys):
                figures = (3, busy, 3, 3, 3)
                answer = WhereIs(self.session.epoch, True, 0, *figures, False, self.session._asks)
                self.call(self.session.receive, key, answer)

    @rule(upto=st.integers(0, 40))
    def the_reader_reads(self, upto: int) -> None:
        self.call(self.session.read, min(upto, len(self.text)))

    @precondition(lambda self: self.session.phase not in OVER)
    @rule(share=st.floats(0, 1), more=st.integers(0, 2), longer=st.sampled_from((0, 0, 7)))
    def the_text_is_rewound(self, share: float, more: int, longer: int) -> None:
        position = max(1, int(share * len(self.text)))
        self.seed += 1
        new = tuple(range(2000 + self.seed, 2000 + self.seed + more))
        self.text[position:] = new
        self.low = position if self.low is None else min(self.low, position)
        self.limit += longer
        self.call(self.session.rewind, position, new, limit=self.limit)

    @rule(is_online=st.booleans())
    def the_network_changes(self, is_online: bool) -> None:
        self.call(self.session.online, is_online)

    @invariant()
    def what_is_known_is_what_was_told(self) -> None:
        if hasattr(self, "session"):
            assert list(self.session.ids) == self.text and 9999 not in self.text
            assert self.ended == (self.session.phase in OVER)
            if self.ended:
                assert not self.opens, "a hop was never told to close"
            elif self.session._online:
                assert self.session.deadline is not None


SessionMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestSessionMachine = SessionMachine.TestCase


def test_errors_of_peers_and_links_are_different_types() -> None:
    assert not issubclass(PeerFailed, LinkFailed) and not issubclass(LinkFailed, PeerFailed)
