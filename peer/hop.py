"""CORE: one session at one hop: open, step, replay, close. No clock, no socket, no torch.

Theory of operation (protocol.md, "A session is a series of epochs" and "The ring")
    A hop's state is keyed by (client, session, start layer) and lives through many epochs. Within an
    epoch it goes through three stages:

        stage      begins with                      takes
        linking    Open, Prepare (a higher epoch)   nothing: the outgoing link is being made
        prepared   link_up: answered Opened or      nothing: early steps stay unread in their stream
                   Prepared(length)
        running    Resume                           replay steps, then numbered rounds

    Three lengths, `finished <= taken` always, and both are equal when an epoch begins:
        finished   positions whose output is in the journal (last hop: that were computed). Only
                   this is told to the client, and only up to this can the hop feed a successor.
        taken      positions of steps taken, finished or not: what the next step is measured by.
        sent       positions handed to the outgoing link in this epoch (last hop: ids fed to the first).

    The KV is never touched here: every `Compute` names its position, the engine cuts the session's
    cache to it and appends. One `Compute` is out at a time, also across epochs; the answer to one of
    an older epoch is dropped, and its KV is cut by the next.

What comes from the network and can't be right raises MessageError with the state unchanged: it costs
the sender its stream. What is merely old is dropped without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from peer.hop_effects import Compute, Effect, EnsureLink, Free, SampleAt, SendStep, SendTokens, ToClient
from peer.journal import Journal, Rows
from peer.kv import CHUNK, REACH, WHOLE_CHUNK, Rewinds
from routing.spans import Span
from swarm.errors import CacheFull, CannotRewind, CapacityError, MessageError
from swarm.identity import PeerId
from swarm.messages import (
    MAX_IDS_TOLD,
    NOTHING_SPENT,
    Close,
    Credit,
    Draining,
    Extend,
    Extended,
    Fault,
    HopRef,
    Likelihoods,
    Message,
    Open,
    Opened,
    Prepare,
    Prepared,
    RefusedMessage,
    Renew,
    Resume,
    Sampling,
    Spent,
    Step,
    Tokens,
    Unknown,
    Where,
    WhereIs,
    Working,
    likelihood_tensors,
)
from swarm.tensors import ids_tensor, read_ids


@dataclass(frozen=True)
class HopConfig:
    """prefill_chunk: positions per step; larger is faster on a GPU, smaller lets other sessions in
    sooner, and the next hop begin. whole_chunk: where one hop has all of the model, so that no other waits for it.
    lease_s: silence of the client that frees everything (it renews every 5 s).
    grace_after_s: silence after which the room may go to another client: two renewals missed.
    max_waiting_steps: keeps the engine busy while the link delivers, yet bounds the memory.
    retry_after_s: what a client is told that found no room."""

    prefill_chunk: int = CHUNK
    whole_chunk: int = WHOLE_CHUNK
    lease_s: float = 30.0
    grace_after_s: float = 12.0
    max_waiting_steps: int = 4
    working_every_s: float = 1.0
    retry_after_s: float = 2.0


class SessionKey(NamedTuple):
    """What a hop's state and its KV are known by on a peer."""

    client: PeerId
    session: bytes
    start: int


class KvLedger(Protocol):
    """Who holds how many KV positions on this peer. Plain arithmetic, answers at once."""

    def reserve(self, key: SessionKey, positions: int, span: Span) -> object:
        """For the layers of `span` only, which may be fewer than the claim.

        Raises CapacityError, nothing changed."""

    def extend(self, key: SessionKey, positions: int) -> None:
        """To `positions` in all. Raises CapacityError, nothing changed."""

    def keeps(self, held: int, positions: int) -> bool:
        """Whether what a session of `held` positions has computed is right in one that has grown to `positions`."""

    def free(self, key: SessionKey) -> None: ...

    def rewinds(self, span: Span) -> Rewinds:
        """Of a new session over `span`: nothing is written yet."""


FaultKind = Literal["step", "input", "room"]
Join = Callable[[Sequence[Rows]], Rows]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A step that was taken and waits for the engine, or is in it."""

    round: int | None
    position: int
    count: int
    sample: bool
    ids: tuple[int, ...] | None
    payload: Rows | None
    spent: Spent = NOTHING_SPENT  # by the hops before


class Hop:
    """One (client, session, start) on this peer.

    join: makes one run of rows from several (`torch.cat`), so that a replay of many one-token
    steps travels and computes in chunks; without it the journal's pieces are sent one by one.
    """

    def __init__(
        self,
        me: PeerId,
        client: PeerId,
        session: bytes,
        start: int,
        config: HopConfig,
        ledger: KvLedger,
        join: Join | None = None,
    ) -> None:
        self.me = me
        self.key = SessionKey(client, session, start)
        self._config, self._ledger, self._join = config, ledger, join
        self._effects: deque[Effect] = deque()
        self._reserved = 0  # positions; 0: nothing is held
        self._heard: float | None = None  # when the client last spoke
        self._client_gone = False
        # the epoch
        self._epoch = -1
        self._chain: Open | Prepare | None = None
        self._answered = False
        self._link_down = False
        self._resumed = False
        self._halted = False  # the engine failed in this epoch
        self._resume_at = 0
        self._sent = 0
        self._next_round = 0
        # the work
        self._journal = Journal()
        self._rewinds = Rewinds(None, REACH)
        self._taken = 0
        self._waiting: deque[_Waiting] = deque()
        self._job: Compute | None = None
        self._step: _Waiting | None = None  # what the job is for
        self._jobs = 0
        self._working_at: float | None = None
        # first and last hop
        self._ids: list[int] = []
        # last hop
        self._credit = 0
        self._limit = 0
        self._released = 0  # ids before this position were given to the client
        self._given_from = 0  # those before it were the client's own when it resumed
        self._stop_ids: frozenset[int] = frozenset()
        self._sampling = Sampling()
        self._likely: dict[int, Likelihoods] = {}  # of ids drawn since Resume, by position, if they are wanted
        self._spent = NOTHING_SPENT  # on the newest id
        self._finish: Literal["stop", "length"] | None = None

    # ------------------------------------------------------------------------ seen from outside

    @property
    def finished(self) -> bool:
        """Holds nothing (any more). Late calls are harmless."""
        return self._reserved == 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def idle_since(self) -> float | None:
        """When the client was last heard; a peer short of room evicts the longest silent first."""
        return self._heard

    def in_grace(self, now: float) -> bool:
        """Whether another client's need for the room comes first."""
        silent = self._heard is not None and now >= self._heard + self._config.grace_after_s
        return silent or self._client_gone

    @property
    def deadline(self) -> float | None:
        if self.finished or self._heard is None:
            return None
        lease = self._heard + self._config.lease_s
        return lease if self._working_at is None else min(lease, self._working_at)

    def drain(self) -> list[Effect]:
        effects = list(self._effects)
        self._effects.clear()
        return effects

    # ------------------------------------------------------------------------ the client

    def receive(self, message: Message, now: float) -> None:
        """A control message of the client's. Raises MessageError, state unchanged."""
        self._heard, self._client_gone = now, False
        match message:
            case Open():
                self._open(message)
            case Prepare():
                self._prepare(message)
            case Resume():
                self._resume(message, now)
            case Credit():
                self._take_credit(message, now)
            case Where():
                self._tell(self._where(message.ask))
            case Extend():
                self._extend(message)
            case Close():
                if message.epoch >= self._epoch:
                    self._free()
            case Renew():
                if self.finished:
                    self._tell(Unknown(message.epoch))
            case _:
                raise MessageError(f"{message.kind} is not for a hop")

    def client_gone(self, now: float) -> None:
        """The client's stream broke: its room may go to others until it speaks again."""
        self._client_gone = True

    def evict(self, now: float) -> None:
        """Another client gets the room."""
        self._tell(Unknown(max(self._epoch, 0)))
        self._free()

    def leave(self, within_s: float) -> None:
        """This peer wants to go: tell the client."""
        self._tell(Draining(max(self._epoch, 0), within_s))

    def _open(self, message: Open) -> None:
        if message.epoch <= self._epoch:
            return
        self._check_place(message)
        try:
            self._hold(message)
        except CapacityError as error:
            self._tell(RefusedMessage(message.epoch, str(error), self._config.retry_after_s))
            self._free()
            return
        self._journal = Journal()
        self._rewinds = self._ledger.rewinds(message.span)
        self._ids = []
        self._begin(message)

    def _hold(self, message: Open) -> None:
        """Reserve, keeping a reservation that fits. Raises CapacityError."""
        fits = self._chain is not None and self._chain.span == message.span
        if self._reserved and not (fits and message.reserve <= self._reserved):
            self._reserved = 0
            self._ledger.free(self.key)
        if not self._reserved:
            self._ledger.reserve(self.key, message.reserve, message.span)
            self._reserved = message.reserve

    def _prepare(self, message: Prepare) -> None:
        if message.epoch <= self._epoch:
            return
        self._check_place(message)
        if self.finished or self._chain is None or message.span != self._chain.span:
            self._tell(Unknown(message.epoch))
            return
        self._begin(message)

    def _check_place(self, message: Open | Prepare) -> None:
        """Raises MessageError when the chain contradicts itself."""
        good = (
            message.span.start == self.key.start
            and message.is_first == (self.key.start == 0)
            and (message.first.peer == self.me or not message.is_first)
            and (message.last.peer == self.me or not message.is_last)
            and (message.next is None or message.next.start == message.span.stop)
        )
        if not good or (isinstance(message, Open) and message.reserve < 1):
            raise MessageError(f"{message.kind} places this hop ({message.span}) in an impossible chain")

    def _begin(self, message: Open | Prepare) -> None:
        """Into the next epoch: everything in flight is void, what is finished stays."""
        self._epoch, self._chain = message.epoch, message
        self._answered = self._resumed = self._link_down = self._halted = False
        self._next_round = 0
        self._waiting.clear()
        self._taken = self._journal.length
        to = self._target
        if to is None:
            self._answer()
        else:
            self._effects.append(EnsureLink(self._epoch, to))

    @property
    def _target(self) -> HopRef | None:
        """Where this hop's output goes: the next hop, or round the ring; None: to itself."""
        assert self._chain is not None
        if self._chain.next is not None:
            return self._chain.next
        return None if self._chain.is_first else self._chain.first

    def _answer(self) -> None:
        self._answered = True
        if isinstance(self._chain, Open):
            self._tell(Opened(self._epoch))
        else:
            self._tell(Prepared(self._epoch, self._journal.length, self._rewinds.oldest))

    def _resume(self, message: Resume, now: float) -> None:
        if message.epoch != self._epoch or self._resumed or self.finished:
            return
        at_an_end = self._is_first or self._is_last
        ids = read_ids(message.ids) if message.ids is not None and at_an_end else []
        sampling = message.complete_sampling()
        self._check_resume(message, ids)
        self._journal.cut(message.have)
        self._taken = message.have
        self._resume_at = message.resume_at
        self._sent = message.next_has
        self._resumed = True
        del self._ids[message.ids_from :]
        self._ids += ids
        if self._is_last:
            self._released = self._given_from = self._sent = len(self._ids)
            self._credit, self._limit, self._finish = message.credit, message.limit, None
            self._stop_ids = frozenset(message.stop_ids)
            self._sampling = sampling
            self._likely = {}
        else:
            self._send_owed()
        self._next_job(now)

    def _check_resume(self, message: Resume, ids: list[int]) -> None:
        known = message.ids_from + len(ids)
        good = (
            self._answered
            and message.have <= min(self._journal.length, message.resume_at)
            and self._rewinds.allows(message.have)
            and message.next_has <= message.resume_at < self._reserved
        )
        if self._is_first or self._is_last:
            good = good and message.ids_from <= len(self._ids)
            good = good and message.resume_at < known <= self._reserved
        if not good:
            raise MessageError(
                f"resume at {message.resume_at} from {message.have} doesn't fit "
                f"a hop with {self._journal.length} of {self._reserved} positions, cut at 0 or from "
                f"{self._rewinds.oldest} on"
            )

    @property
    def _is_first(self) -> bool:
        return self._chain is not None and self._chain.is_first

    @property
    def _is_last(self) -> bool:
        return self._chain is not None and self._chain.is_last

    def _take_credit(self, message: Credit, now: float) -> None:
        if message.epoch != self._epoch or not self._resumed or not self._is_last:
            return
        if message.have < self._released:  # the client missed some: those first
            self._give_tokens(max(message.have, self._given_from))
        self._credit = max(self._credit, message.upto)
        self._release()
        self._next_job(now)

    def _extend(self, message: Extend) -> None:
        if self.finished:
            self._tell(Unknown(message.epoch))
            return
        anew = message.positions > self._reserved and not self._ledger.keeps(self._reserved, message.positions)
        if anew and self._resumed:
            raise MessageError(
                f"growing from {self._reserved} to {message.positions} positions changes how this model encodes all "
                "of them: ask for it before the session is resumed"
            )
        try:
            if message.positions > self._reserved:
                self._ledger.extend(self.key, message.positions)
                self._reserved = message.positions
        except CapacityError as error:
            self._tell(RefusedMessage(message.epoch, str(error), self._config.retry_after_s))
            return
        if anew:
            self._compute_anew()
        self._tell(Extended(message.epoch, self._reserved))

    def _compute_anew(self) -> None:
        """What was computed is void: this hop is fed from position 0, as one that was lost."""
        assert self._chain is not None
        self._journal, self._taken = Journal(), 0
        self._rewinds = self._ledger.rewinds(self._chain.span)
        if self._answered and isinstance(self._chain, Prepare):
            self._answer()  # again: there is nothing to keep any more

    def _where(self, ask: int) -> Message:
        if self.finished:
            return Unknown(max(self._epoch, 0))
        return WhereIs(
            epoch=self._epoch,
            resumed=self._resumed,
            round=self._next_round - 1,
            length=self._taken,
            in_engine=self._job is not None,
            finished=self._journal.length,
            sent=self._sent,
            known=len(self._ids),
            waiting=not self._answered or self._link_down,
            ask=ask,
        )

    def _tell(self, message: Message) -> None:
        self._effects.append(ToClient(message))

    def _free(self) -> None:
        if self._reserved:
            self._reserved = 0
            self._ledger.free(self.key)
        self._resumed = False
        self._journal = Journal()
        self._ids = []
        self._waiting.clear()
        self._working_at = None
        self._effects.append(Free())

    # ------------------------------------------------------------------------ the links

    def link_up(self, epoch: int, now: float) -> None:
        if epoch == self._epoch and not self._answered and not self.finished:
            self._answer()

    def link_down(self, epoch: int, reason: str, now: float) -> None:
        """The outgoing link of `epoch` couldn't be made, or broke."""
        if epoch != self._epoch or self._link_down or self.finished:
            return
        self._link_down = True
        to = self._target
        assert to is not None, "a hop that feeds itself has no link"
        self._tell(Fault(epoch, "link", reason, to.peer))

    def accepts(self, epoch: int) -> Literal["now", "later", "never"]:
        """Whether to read a step from a link stream of `epoch`: early ones stay unread."""
        if self.finished or epoch < self._epoch:
            return "never"
        full = len(self._waiting) >= self._config.max_waiting_steps
        return "now" if epoch == self._epoch and self._resumed and not full else "later"

    def takes_from(self, sender: PeerId, first: bool) -> bool:
        """Whether this epoch's chain has `sender` before this hop; first: as its last hop, which feeds the first."""
        if self._chain is None:
            return False
        if first:
            return self._is_first and self._chain.last.peer == sender
        return self._chain.previous is not None and self._chain.previous.peer == sender

    def bad_input(self, sender: PeerId, epoch: int, reason: str, now: float) -> None:
        """What `sender` sent for `epoch` can't be right. Only from where this epoch's input comes it is of interest."""
        if epoch == self._epoch and self._resumed and not self._halted and sender == self._source:
            self._fault(reason, "input")

    def receive_step(self, sender: PeerId, epoch: int, step: Step, payload: Rows, now: float) -> None:
        """step: the header. payload: its hidden rows [n, width]. Raises MessageError."""
        previous = self._chain.previous if self._chain is not None else None
        if epoch != self._epoch or not self._resumed or self._halted:
            return
        if previous is None or previous.peer != sender:
            return
        if not len(payload):
            raise MessageError("a step without positions")
        if not self._takes(step, len(payload)):
            return
        if step.position + len(payload) > self._reserved:
            self._fault(str(CacheFull(step.position + len(payload), self._reserved)), "room")
            return
        if step.round is not None:
            self._next_round += 1
        self._taken = step.position + len(payload)
        self._waiting.append(
            _Waiting(step.round, step.position, len(payload), step.sample, None, payload, step.spent)
        )
        self._next_job(now)

    def _takes(self, step: Step, count: int) -> bool:
        """Exactly the next round at a position that leaves no hole; replay only at the very end."""
        if step.round is None:
            return step.position == self._taken and step.position + count <= self._resume_at
        return step.round == self._next_round and step.position <= self._taken

    def receive_tokens(
        self, sender: PeerId, epoch: int, first_position: int, ids: Sequence[int], now: float
    ) -> None:
        """First hop: what the last hop drew. Only what comes exactly at the end is new."""
        if epoch != self._epoch or not self._resumed or not self._is_first or self._is_last or self._halted:
            return
        assert self._chain is not None
        if sender != self._chain.last.peer or first_position > len(self._ids):
            return
        if first_position + len(ids) > self._reserved:
            self._fault(str(CacheFull(first_position + len(ids), self._reserved)), "room")
            return
        self._ids += ids[len(self._ids) - first_position :]
        self._next_job(now)

    # ------------------------------------------------------------------------ the engine

    def _next_job(self, now: float) -> None:
        """Hand the engine the next step, if it has none of this session's and there is one."""
        if self._job is not None or not self._resumed or self._halted:
            return
        step = self._next_of_ids() if self._is_first else self._next_of_queue()
        if step is None:
            return
        if not self._rewinds.allows(step.position):
            self._fault(str(CannotRewind(step.position, self._rewinds.oldest)), "input")
            return
        self._rewinds.wrote(step.position, step.count)
        self._journal.cut(step.position)
        assert step.position == self._journal.length, "a step that was taken left a hole"
        self._jobs += 1
        self._step = step
        self._job = Compute(
            self._epoch,
            self._jobs,
            self._chain.span if self._chain else Span(0, 1),
            step.position,
            step.ids,
            step.payload,
            self._sample_at(step),
        )
        self._working_at = now + self._config.working_every_s
        self._effects.append(self._job)

    def _next_of_queue(self) -> _Waiting | None:
        return self._waiting.popleft() if self._waiting else None

    def _next_of_ids(self) -> _Waiting | None:
        """First hop: replay up to where the ring resumes, then rounds up to the last known id."""
        upto = len(self._ids) if not self._is_last else self._released
        if self._finish is not None or self._taken >= upto:
            return None
        position, replay = self._taken, self._taken < self._resume_at
        whole = self._is_last and not self._rewinds.lets_go
        most = self._config.whole_chunk if whole else self._config.prefill_chunk
        stop = min(position + most, self._resume_at if replay else upto)
        if stop > self._reserved:
            self._fault(str(CacheFull(stop, self._reserved)), "room")
            return None
        number = None if replay else self._next_round
        if not replay:
            self._next_round += 1
        self._taken = stop
        sample = not replay and stop == upto
        return _Waiting(number, position, stop - position, sample, tuple(self._ids[position:stop]), None)

    def _sample_at(self, step: _Waiting) -> SampleAt | None:
        if not (step.sample and self._is_last):
            return None
        at = step.position + step.count
        return SampleAt(at, self._sampling, tuple(self._ids[:at]))

    def computed(
        self,
        job: Compute,
        output: Rows | None,
        token: int | None,
        now: float,
        spent: Spent = NOTHING_SPENT,
        likelihoods: Likelihoods | None = None,
    ) -> None:
        """output: [n, width], None on the last hop. token: the id drawn, if one was asked for, and its
        likelihoods, if the sampling wants them. spent: on this step here."""
        step = self._answered_job(job)
        if step is not None:
            spent = step.spent.plus(spent)
            self._journal.append(step.count, None if self._is_last else output)
            if self._is_last:
                self._drawn(job, token, spent, likelihoods)
            elif step.round is None:
                self._send_owed()
            else:
                assert output is not None
                self._send(step.round, step.position, step.sample, output, spent)
        self._next_job(now)

    def failed(self, job: Compute, reason: str, now: float, what: FaultKind = "step") -> None:
        """The engine couldn't run it; its KV is cut by whatever comes next."""
        if self._answered_job(job) is not None:
            self._fault(reason, what)
        self._next_job(now)

    def _answered_job(self, job: Compute) -> _Waiting | None:
        """The step that this answers, None if it belongs to an epoch that is over."""
        if self._job is None or job.job != self._job.job:
            return None
        step, self._job, self._step, self._working_at = self._step, None, None, None
        return step if job.epoch == self._epoch and self._resumed else None

    @property
    def _source(self) -> PeerId | None:
        """Whose messages are this hop's input; None: the client's ids alone, or its own."""
        if self._chain is None:
            return None
        if self._chain.previous is not None:
            return self._chain.previous.peer
        return None if self._is_last else self._chain.last.peer

    def _fault(self, reason: str, what: FaultKind = "step") -> None:
        """Stop this epoch here; the client decides how to go on."""
        self._halted = True
        self._waiting.clear()
        self._taken = self._journal.length
        self._tell(Fault(self._epoch, what, reason, None if what == "step" else self._source))

    def _send_owed(self) -> None:
        """Replay to the next hop what the journal has and this epoch still owes it."""
        stop = min(self._journal.length, self._resume_at)
        most = self._config.prefill_chunk
        for position, pieces in self._journal.read(self._sent, stop, most):
            if self._join is not None:
                pieces = [pieces[0] if len(pieces) == 1 else self._join(pieces)]
            for rows in pieces:
                self._send(None, position, False, rows)
                position += len(rows)

    def _send(
        self, number: int | None, position: int, sample: bool, rows: Rows, spent: Spent = NOTHING_SPENT
    ) -> None:
        to = self._target
        assert to is not None and not self._is_last
        if self._link_down:
            return
        self._sent = position + len(rows)
        self._effects.append(SendStep(self._epoch, to, number, position, sample, rows, spent))

    # ------------------------------------------------------------------------ the last hop

    def _drawn(
        self, job: Compute, token: int | None, spent: Spent, likelihoods: Likelihoods | None
    ) -> None:
        if job.sample is None:
            return
        assert token is not None, "the engine drew nothing though it was asked to"
        del self._ids[job.sample.position :]
        self._ids.append(token)
        if likelihoods is not None:
            self._likely[job.sample.position] = likelihoods
        self._spent = spent
        if token in self._stop_ids:
            self._finish = "stop"
        elif len(self._ids) >= self._limit:
            self._finish = "length"
        self._release()

    def _release(self) -> None:
        """Give what credit allows to the client, and round the ring unless it is the end."""
        upto = min(len(self._ids), self._credit)
        if upto <= self._released:
            return
        start, self._released = self._released, upto
        self._give_tokens(start)
        if self._finish is not None and upto == len(self._ids):
            return
        to = self._target
        if to is not None and not self._link_down:
            self._effects.append(SendTokens(self._epoch, to, start, tuple(self._ids[start:upto])))
            self._sent = upto

    def _give_tokens(self, start: int) -> None:
        """As many as one message may have; a client that missed more asks again behind them."""
        stop = min(self._released, start + MAX_IDS_TOLD)
        ids = self._ids[start:stop]
        finish = self._finish if stop == len(self._ids) else None
        spent, self._spent = self._spent, NOTHING_SPENT
        likely = [self._likely[at] for at in range(start, stop) if at in self._likely]
        tensors = likelihood_tensors(likely) if len(likely) == len(ids) else {}
        self._tell(Tokens(self._epoch, start, finish, ids_tensor(ids), spent, **tensors))

    # ------------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        if self.finished or self._heard is None:
            return
        if now >= self._heard + self._config.lease_s:
            self.evict(now)
        elif self._working_at is not None and now >= self._working_at:
            self._working_at = now + self._config.working_every_s
            self._tell(Working(self._epoch, self._journal.length))
