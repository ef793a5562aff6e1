"""CORE: a client's view of one generation: ids so far, the chain that makes them, its repair.

Theory of operation (protocol.md, "A session is a series of epochs", "Deadlines and blame")
    The ids are the one truth. Opening, repairing and rewinding are the same act: plan a chain, start
    the next epoch on it, and hear nothing of older ones any more.

        phase      meaning                                   leaves for
        new        nothing was sent                          opening, waiting, failed, cancelled
        opening    Open / Prepare sent, answers awaited      resuming; opening or waiting on trouble
        resuming   Resume sent, first token awaited          running, done; opening or waiting on trouble
        running    tokens come round by round                done; opening or waiting on trouble
        waiting    no plan now, or not yet: a pause          opening, failed, cancelled
        done, failed, cancelled                              nothing: every hop was told to close

    A repair is an `opening` that keeps hops. It begins with the first trouble and ends with the next
    new token, however many epochs that takes; what bounds it is counted over the whole of it.

Trouble, and what it costs (the three kinds are never mixed):
    PeerFailed    its connection is gone, it doesn't answer, it is stuck: kept out of plans for a while
    LinkFailed    two peers, both alive, can't reach each other: the same chain again, and only when
                  the pair fails twice is the pair kept out
    Refused       full or leaving: avoided for as long as it asked, never blamed
    our own bugs  ordinary exceptions: they propagate

A rewind, or a repair after ids were lost, takes hops back. One whose attention windows have let go of too much for
that is fed from position 0 again, by its predecessor's journal or from the ids: as if it had been lost, on the
same peer, and nobody is blamed.

Invariant: `ids` only ever grow at their end by what the last hop of the present epoch says, and are cut
only by `rewind`; every state that a hop may hold of positions that were rewound is cut by the bound
on where the ring resumes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from routing.spans import Hop
from swarm.deadline import Deadline
from swarm.effects import Effect, Ended, Failed, Grew, HopKey, Release, Send
from swarm.errors import (
    GenerationFailed,
    LinkFailed,
    MessageError,
    NoRoute,
    PeerFailed,
    Refused,
    StepRejected,
    SwarmError,
    UsageError,
)
from swarm.exclusions import Exclusions
from swarm.identity import PeerId
from swarm.inquiry import Blame, Inquiry, Verdict, verdict
from swarm.messages import (
    Close,
    Credit,
    Draining,
    Extend,
    Extended,
    Fault,
    Likelihoods,
    Message,
    Open,
    Opened,
    Prepare,
    Prepared,
    RefusedMessage,
    Renew,
    Tokens,
    Unknown,
    Unsupported,
    Where,
    WhereIs,
    Working,
)
from swarm.openings import Epoch
from swarm.plans import Plan, Planner, PlanRequest, Timings
from swarm.repair import Chance, Repair, pause_s
from swarm.session_config import SessionConfig
from swarm.tensors import read_ids

ASK_AGAIN_S = 1.0  # a verdict needs two equal answers this far apart


class Phase(Enum):
    NEW = "new"
    OPENING = "opening"
    RESUMING = "resuming"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_TROUBLE = {Phase.OPENING, Phase.WAITING, Phase.FAILED, Phase.CANCELLED}
TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.NEW: _TROUBLE,
    Phase.OPENING: _TROUBLE | {Phase.RESUMING},
    Phase.RESUMING: _TROUBLE | {Phase.RUNNING, Phase.DONE},
    Phase.RUNNING: _TROUBLE | {Phase.DONE},
    Phase.WAITING: _TROUBLE,
    Phase.DONE: set(),
    Phase.FAILED: set(),
    Phase.CANCELLED: set(),
}
OVER = {Phase.DONE, Phase.FAILED, Phase.CANCELLED}


# ------------------------------------------------------------------------------ parts of the state


@dataclass
class _Held:
    """What the client knows of one hop. opened: it answered its latest `Open`. length, oldest: as `Prepared` has
    them: what can be kept of it lies between them. reserved: positions that it is known to hold."""

    hop: Hop
    opened: bool = False
    answered: bool = False  # in the present epoch
    length: int = 0
    oldest: int = 0
    reserved: int = 0

    def kept(self, upto: int) -> int:
        """How many of its first `upto` positions need not be computed again."""
        have = min(self.length, upto)
        return have if have >= self.oldest else 0


class Session:
    """One generation. Call `start`, then feed it; `drain` after every call, wake it at `deadline`.

    plan: makes a chain or raises NoRoute; called synchronously. rng: for the jitter of pauses.
    """

    def __init__(
        self, config: SessionConfig, plan: Planner, rng: Chance, timings: Timings | None = None
    ) -> None:
        if not config.prompt:
            raise UsageError("a generation needs at least one prompt token")
        if not len(config.prompt) < config.limit <= config.reserve:
            raise UsageError(
                f"{len(config.prompt)} prompt tokens, limit {config.limit} and {config.reserve} reserved "
                "positions leave nothing to generate"
            )
        self._config, self._plan, self._rng = config, plan, rng
        self._timings = timings or Timings()
        self._effects: deque[Effect] = deque()
        self.phase = Phase.NEW
        self._online = True
        # the truth
        self._ids = list(config.prompt)
        self._rewound_to: int | None = None  # lowest, since the last token
        self._read_upto = len(config.prompt)
        # the epoch
        self._epoch = 0
        self._plan_now: Plan | None = None
        self._held: dict[HopKey, _Held] = {}
        self._granted = 0
        self._opened_at = 0.0
        self._owed_since: float | None = None  # when the ring got to make the next token
        self._chunks = 0  # of the replay that the first token waits for
        # clocks: None when not running
        self._overdue = Deadline()
        self._wake_at: float | None = None
        self._renew_at: float | None = None
        self._asks = 0
        self._inquiry: Inquiry | None = None
        # trouble
        self._repair: Repair | None = None
        self._excluded = Exclusions(config.exclusion_s)
        self._rejected_by: set[PeerId] = set()
        self._accused_by: dict[PeerId, set[PeerId]] = {}  # hops that say others sent them nonsense, and whom
        self._lost_offline: dict[HopKey, tuple[str, bool]] = {}

    # ------------------------------------------------------------------------ seen from outside

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and everything generated."""
        return tuple(self._ids)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The chain that is planned or running."""
        return self._route

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def deadline(self) -> float | None:
        if self.phase in OVER or not self._online:
            return None
        inquiry = None if self._inquiry is None else self._inquiry.next_at
        times = [self._overdue.at, self._wake_at, self._renew_at, inquiry]
        return min((at for at in times if at is not None), default=None)

    def drain(self) -> list[Effect]:
        effects = list(self._effects)
        self._effects.clear()
        return effects

    # ------------------------------------------------------------------------ the caller

    def start(self, now: float) -> None:
        """Plan and open. Without a route at all: Failed(NoRoute), nothing was sent."""
        assert self.phase is Phase.NEW, "a session starts once"
        self._renew_at = now + self._config.renew_every_s
        try:
            plan = self._plan(PlanRequest((), frozenset(), frozenset(), True, self._config.reserve))
        except NoRoute as error:
            self._fail(error)
            return
        self._begin(plan, now)

    def read(self, upto: int, now: float) -> None:
        """The reader has taken the ids before position `upto`: the swarm may go on."""
        self._read_upto = max(self._read_upto, min(upto, len(self._ids)))
        wanted = self._read_upto + self._config.credit_window
        if self.phase not in (Phase.RESUMING, Phase.RUNNING) or wanted <= self._granted:
            return
        blocked = len(self._ids) >= self._granted
        if blocked or wanted - self._granted >= self._config.credit_window // 2:
            self._granted = wanted
            self._send_credit()
            if blocked:
                self._owe(now)

    def cancel(self, now: float) -> None:
        """Stop, and free what the hops hold."""
        if self.phase not in OVER:
            self._end(Phase.CANCELLED, "cancelled")

    def rewind(self, position: int, new_ids: tuple[int, ...], now: float, limit: int | None = None) -> None:
        """Forget the ids from `position` on, put `new_ids` there, and go on from them.

        limit: generation ends before this position instead; hops that reserved fewer are asked for more.
        Raises UsageError, nothing changed.
        """
        known, limit = position + len(new_ids), self._config.limit if limit is None else limit
        if self.phase in OVER:
            raise UsageError("this generation is over")
        if not 0 <= position <= len(self._ids) or not 1 <= known < limit:
            raise UsageError(
                f"can't rewind to {position} of {len(self._ids)} ids and go on from {known} before {limit}"
            )
        self._config = dataclasses.replace(self._config, limit=limit, reserve=max(limit, self._config.reserve))
        self._ids[position:] = new_ids
        self._rewound_to = position if self._rewound_to is None else min(position, self._rewound_to)
        self._read_upto = known
        self._rejected_by.clear()
        if self.phase is not Phase.NEW:
            self._plan_again(now)

    def online(self, is_online: bool, now: float) -> None:
        """Offline, no deadline runs and nobody is blamed."""
        if is_online == self._online or self.phase in OVER:
            return
        self._online = is_online
        self._inquiry = None
        if not is_online:
            return
        lost, self._lost_offline = self._lost_offline, {}
        self._renew_at = now
        if self._repair is not None:
            self._repair.patient_since = now
        if self.phase is Phase.WAITING:
            self._wake_at = now
        elif lost:
            self._trouble(SwarmError("this client was offline"), now)
        else:
            self._arm_opening(now) if self.phase is Phase.OPENING else self._owe(now)
            if self.phase in (Phase.RESUMING, Phase.RUNNING):
                self._send_credit()

    # ------------------------------------------------------------------------ planning an epoch

    def _plan_again(self, now: float, patient: bool = False) -> None:
        """Plan around what is known to be bad; failing that, as if nothing were.

        patient: the pause that a plan with bad parts asks for is over.
        """
        if not self._online:
            self._wait(None, now)
            return
        self._excluded.forget_expired(now)
        bad, links = self._excluded.bad_peers(), self._excluded.bad_links()
        try:
            self._begin(self._plan(self._request(bad, links)), now)
            return
        except NoRoute as error:
            no_route = error
        if not bad and not links:
            self._no_route(no_route, now)
            return
        try:
            plan = self._plan(self._request(frozenset(), frozenset()))
        except NoRoute as error:
            self._no_route(error, now)
            return
        if patient:
            self._begin(plan, now)
        else:
            self._wait(self._pause_s(), now)

    def _request(self, bad: frozenset[PeerId], links: frozenset[tuple[PeerId, PeerId]]) -> PlanRequest:
        kept = tuple(held.hop for key, held in self._held.items() if key.peer not in bad)
        return PlanRequest(kept, bad, links, False, self._config.reserve)

    def _no_route(self, error: NoRoute, now: float) -> None:
        """A gap that opened on the way may close again: the registry learns, peers come back."""
        if self._repairing(str(error), now).no_route(error, now, self._config):
            self._fail(error)
        else:
            self._wait(self._pause_s(), now)

    def _pause_s(self) -> float:
        return pause_s(self._repair.attempts if self._repair is not None else 0, self._rng)

    def _wait(self, pause_s: float | None, now: float) -> None:
        self._enter(Phase.WAITING)
        self._inquiry = None
        self._overdue.stop()
        self._wake_at = None if pause_s is None else now + pause_s

    # ------------------------------------------------------------------------ starting an epoch

    def _begin(self, plan: Plan, now: float) -> None:
        """Open what is new or never answered its Open, prepare the rest and have it reserve what it lacks, close
        what is left over."""
        self._enter(Phase.OPENING)
        self._epoch += 1
        self._plan_now = plan
        self._inquiry = self._wake_at = None
        self._opened_at = now
        self._overdue.new_epoch()
        if self._repair is not None:
            self._effects.append(self._repair.started(self._route))
        epoch = Epoch(self._epoch, plan, self._config)
        chain = dict(zip(self._keys, self._route, strict=True))
        for key in [key for key in self._held if key not in chain]:
            self._close(key)
        for index, (key, hop) in enumerate(chain.items()):
            held = self._held.get(key)
            if held is None or held.hop != hop:
                held = self._held[key] = _Held(hop)
            held.answered = False
            if held.opened:
                self._send(key, epoch.prepare(index))
                if held.reserved < self._config.reserve:
                    self._send(key, Extend(self._epoch, self._config.reserve))
            else:
                held.length = held.oldest = 0
                self._send(key, epoch.open(index))
        self._arm_opening(now)

    def _arm_opening(self, now: float) -> None:
        assert self._plan_now is not None
        self._arm(self._timings.p99("open", self._plan_now.open_s), now)

    def _answered(self, key: HopKey, now: float, length: int = 0, oldest: int = 0) -> None:
        if self.phase is not Phase.OPENING:
            return
        held = self._held[key]
        held.answered, held.length, held.oldest = True, length, oldest
        self._resume_if_all_stand(now)

    def _extended(self, key: HopKey, positions: int, now: float) -> None:
        self._held[key].reserved = positions
        if self.phase is Phase.OPENING:
            self._resume_if_all_stand(now)

    def _resume_if_all_stand(self, now: float) -> None:
        hops = [self._held[key] for key in self._keys]
        if all(held.answered and held.reserved >= self._config.reserve for held in hops):
            self._timings.saw("open", now - self._opened_at)
            self._resume(now)

    @property
    def _route(self) -> tuple[Hop, ...]:
        return () if self._plan_now is None else self._plan_now.route.hops

    @property
    def _keys(self) -> list[HopKey]:
        return [HopKey(PeerId(hop.peer), hop.span.start) for hop in self._route]

    def _resume(self, now: float) -> None:
        """Everybody is prepared: cut all to what is sure, and let the ring start."""
        self._enter(Phase.RESUMING)
        self._inquiry = None
        resume_at = len(self._ids) - 1
        if self._rewound_to is not None:
            resume_at = min(resume_at, self._rewound_to)
        has = [self._held[key].kept(resume_at) for key in self._keys]
        self._granted = self._read_upto + self._config.credit_window
        assert self._plan_now is not None
        epoch = Epoch(self._epoch, self._plan_now, self._config)
        for index, key in enumerate(self._keys):
            self._send(key, epoch.resume(index, has, resume_at, self._ids, self._granted))
        chunk = self._config.chunk
        self._chunks = -(-(resume_at - min(has)) // chunk) + -(-(len(self._ids) - resume_at) // chunk)
        self._owe(now)

    # ------------------------------------------------------------------------ what hops say

    def receive(self, key: HopKey, message: Message, now: float) -> None:
        held = self._held.get(key)
        if held is None or self.phase in OVER:
            return
        if isinstance(message, WhereIs):
            self._where_is(key, message, now)
        elif isinstance(message, Draining):
            self._draining(key, message, now)
        elif isinstance(message, Unsupported):
            self._unsupported(key, message, now)
        elif getattr(message, "epoch", None) == self._epoch and self.phase is not Phase.WAITING:
            self._receive_now(key, held, message, now)

    def _receive_now(self, key: HopKey, held: _Held, message: Message, now: float) -> None:
        """A message of the present epoch."""
        match message:
            case Opened():
                held.opened, held.reserved = True, self._config.reserve
                self._answered(key, now)
            case Prepared():
                if held.opened:
                    self._answered(key, now, message.length, message.oldest)
            case Extended():
                self._extended(key, message.positions, now)
            case Tokens():
                self._take_tokens(key, message, now)
            case Working():
                self._working(key, message, now)
            case RefusedMessage():
                self._refused(key, message, now)
            case Unknown():
                held.opened = False
                self._trouble(SwarmError(f"peer {key.peer[:8]} no longer holds this session"), now)
            case Fault():
                self._fault(key, message, now)
            case _:
                pass  # a newer minor version's

    def _take_tokens(self, key: HopKey, message: Tokens, now: float) -> None:
        """Append at our own length only; ask again for what was missed."""
        if self.phase not in (Phase.RESUMING, Phase.RUNNING) or key != self._keys[-1]:
            return
        known = len(self._ids)
        if message.first_position > known:
            self._send_credit()
            return
        new = slice(known - message.first_position, self._config.limit - message.first_position)
        try:
            ids, likelihoods = self._drawn(message)
        except MessageError as error:
            self._peer_fault(key.peer, str(error), now)
            return
        ids, likelihoods = ids[new], likelihoods[new]
        if not ids:
            return
        self._ids += ids
        self._rewound_to = None
        self._rejected_by.clear()
        self._note_time(now)
        self._effects.append(Grew(tuple(ids), known, message.finish, message.spent, likelihoods))
        if self._repair is not None:
            self._effects.append(self._repair.ended(self._route, now))
            self._repair = None
        if message.finish is not None:
            self._end(Phase.DONE, message.finish)
            return
        self._enter(Phase.RUNNING)
        self._owe(now)

    def _drawn(self, message: Tokens) -> tuple[list[int], tuple[Likelihoods, ...]]:
        """Raises MessageError for what no honest hop says."""
        assert message.ids is not None
        ids, vocab = read_ids(message.ids), self._config.vocab
        if vocab is not None and ids and max(ids) >= vocab:
            raise MessageError(f"it drew token id {max(ids)}, beyond the vocabulary of {vocab}")
        return ids, message.likelihoods()

    def _note_time(self, now: float) -> None:
        if self._owed_since is not None:
            kind = "step" if self.phase is Phase.RUNNING else "chunk"
            steps = 1 if kind == "step" else max(1, self._chunks)
            self._timings.saw(kind, (now - self._owed_since) / steps)

    def _send_credit(self) -> None:
        self._send(self._keys[-1], Credit(self._epoch, self._granted, len(self._ids)))

    # ------------------------------------------------------------------------ deadlines

    def _arm(self, expected_s: float, now: float) -> None:
        wait = max(self._config.min_deadline_s, self._config.deadline_factor * expected_s)
        if self._repair is not None:
            wait *= self._repair.slack
        self._overdue.begin(wait, now)

    def _owe(self, now: float) -> None:
        """From now on the next token is owed, if there is credit for it."""
        owed = self.phase in (Phase.RESUMING, Phase.RUNNING) and len(self._ids) < self._granted
        self._owed_since = now if owed else None
        self._progress(now)

    def _progress(self, now: float) -> None:
        """The ring is shown to move: a whole deadline again for what is owed."""
        self._inquiry = None
        self._overdue.progress(now)
        if self._owed_since is None:
            self._overdue.stop()
            return
        assert self._plan_now is not None
        step_s = self._plan_now.step_s
        step_s = self._timings.p99("step", self._plan_now.route.step_s if step_s is None else step_s)
        chunks = self._chunks if self.phase is Phase.RESUMING else 0
        self._arm(step_s + chunks * self._timings.p99("chunk", self._plan_now.chunk_s), now)

    def _working(self, key: HopKey, message: Working, now: float) -> None:
        if self.phase is not Phase.OPENING:
            self._overdue.still_working(key, message.length, self._config.min_deadline_s, now)

    def tick(self, now: float) -> None:
        if self.phase in OVER or not self._online:
            return
        if self._renew_at is not None and now >= self._renew_at:
            self._renew_at = now + self._config.renew_every_s
            for key in self._held:
                self._send(key, Renew(self._epoch))
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self._plan_again(now, patient=True)
        if self._inquiry is not None and now >= self._inquiry.next_at:
            self._continue_inquiry(self._inquiry, now)
        elif self._overdue.at is not None and now >= self._overdue.at:
            self._overdue.stop()
            self._start_inquiry(now)

    # ------------------------------------------------------------------------ who is to blame

    def _start_inquiry(self, now: float) -> None:
        if self.phase in (Phase.RESUMING, Phase.RUNNING):
            self._send_credit()  # perhaps only the token was lost
        self._inquiry = Inquiry(self._keys, self._asks + 1, now + ASK_AGAIN_S)
        self._ask()

    def _ask(self) -> None:
        self._asks += 1
        for key in self._keys:
            self._send(key, Where(self._epoch, self._asks))

    def _where_is(self, key: HopKey, message: WhereIs, now: float) -> None:
        if self._inquiry is not None and self._inquiry.hear(key, message):
            self._judge(self._inquiry, now)

    def _continue_inquiry(self, inquiry: Inquiry, now: float) -> None:
        if inquiry.again:
            self._judge(inquiry, now)
        else:
            inquiry.again = True
            inquiry.next_at = now + self._config.where_patience_s
            self._ask()

    def _judge(self, inquiry: Inquiry, now: float) -> None:
        self._inquiry = None
        silent = inquiry.silent()
        if silent:
            for key in silent:
                self._blame(key.peer, "it doesn't answer", now)
            self._trouble(PeerFailed(silent[0].peer, "it doesn't answer"), now)
        elif not inquiry.moved():
            self._execute(verdict(inquiry.answers(), self._epoch, self.phase is Phase.OPENING), now)
        elif self.phase is Phase.OPENING:
            self._arm_opening(now)
        else:
            self._progress(now)

    def _execute(self, judged: Verdict, now: float) -> None:
        key, after = self._keys[judged.at], self._keys[(judged.at + 1) % len(self._keys)]
        match judged.blame:
            case Blame.STREAM:
                self._stream_fault(key, judged.reason, now)
            case Blame.LINK:
                self._link_fault(key.peer, after.peer, judged.reason, now)
            case Blame.PEER:
                self._peer_fault(key.peer, judged.reason, now)
            case Blame.ENGINE:
                self._blame(key.peer, judged.reason, now)
                self._repairing(judged.reason, now).wait_longer()
                self._trouble(PeerFailed(key.peer, judged.reason), now)

    def _blame(self, peer: PeerId, reason: str, now: float) -> None:
        """Keep this peer out of plans for a while, and give up what it holds."""
        self._excluded.peer_failed(peer, now)
        self._repairing(str(PeerFailed(peer, reason)), now).lose(peer)
        for key in [key for key in self._held if key.peer == peer]:
            self._close(key)

    def _peer_fault(self, peer: PeerId, reason: str, now: float) -> None:
        self._blame(peer, reason, now)
        self._trouble(PeerFailed(peer, reason), now)

    def _link_fault(self, a: PeerId, b: PeerId, reason: str, now: float) -> None:
        self._excluded.link_failed(a, b, now)
        self._trouble(LinkFailed(a, b, reason), now)

    def _stream_fault(self, key: HopKey, reason: str, now: float) -> None:
        """The stream to a hop failed though its peer lives: a fresh one, and blame only if that fails too."""
        if self._excluded.stream_failed(key.peer, now):
            self._blame(key.peer, reason, now)
        self._effects.append(Release(key))
        self._trouble(PeerFailed(key.peer, reason), now)

    # ------------------------------------------------------------------------ trouble

    def lost(self, key: HopKey, reason: str, now: float, *, peer_gone: bool = True) -> None:
        """The stream to a hop ended without our doing, or couldn't be made.

        peer_gone: the connection to the peer is gone, not just this stream.
        """
        if key not in self._held or self.phase in OVER:
            return
        if not self._online:
            self._lost_offline[key] = (reason, peer_gone)
        elif peer_gone:
            self._blame(key.peer, reason, now)
            self._trouble_unless_waiting(PeerFailed(key.peer, reason), now)
        elif self.phase is not Phase.WAITING:
            self._stream_fault(key, reason, now)

    def _trouble_unless_waiting(self, error: SwarmError, now: float) -> None:
        if self.phase is not Phase.WAITING:
            self._trouble(error, now)

    def _draining(self, key: HopKey, message: Draining, now: float) -> None:
        """A peer that leaves: repair away from it while it still serves, if somebody else can."""
        self._excluded.forget_expired(now)
        if key.peer in self._excluded.avoided:
            return
        self._excluded.avoid(key.peer, max(self._config.refused_s, message.within_s), now)
        try:
            self._plan(self._request(self._excluded.bad_peers(), self._excluded.bad_links()))
        except NoRoute:
            self._excluded.avoid(key.peer, self._config.refused_s, now)  # nobody yet: it will say so again
            return
        self._trouble_unless_waiting(Refused(key.peer, "it is leaving the swarm"), now)

    def _refused(self, key: HopKey, message: RefusedMessage, now: float) -> None:
        if self.phase is not Phase.OPENING:
            return
        error = Refused(key.peer, message.reason, message.retry_after_s)
        pause = message.retry_after_s or self._config.refused_s
        self._excluded.avoid(key.peer, min(pause, self._config.exclusion_s), now)
        if self._held[key].opened:  # it can't give more, but still holds what it gave
            self._close(key)
        else:
            del self._held[key]
            self._effects.append(Release(key))
        if self._repairing(str(error), now).refused():
            self._start_over(error, now)
        else:
            self._trouble(error, now)

    def _unsupported(self, key: HopKey, message: Unsupported, now: float) -> None:
        """A peer that was started again and loads, while its last claim still stands: not its fault."""
        if message.what in (Open.kind, Prepare.kind):
            self._refused(key, RefusedMessage(self._epoch, "it doesn't serve yet"), now)

    def _start_over(self, error: SwarmError, now: float) -> None:
        """Hold nothing while waiting, so that whoever else waits can go on."""
        for key in list(self._held):
            self._close(key)
        if not self._give_up(error, now):
            self._wait(self._pause_s() + self._rng.random() * self._config.refused_s / 2, now)

    def _fault(self, key: HopKey, message: Fault, now: float) -> None:
        if message.what == "link":
            other = message.other or key.peer
            self._link_fault(key.peer, other, message.reason, now)
            return
        if message.what == "input":
            self._bad_input(key, message, now)
            return
        sender = self._before(key)
        if message.what == "room" and sender is not None:  # either may have made it up: it is between them
            self._link_fault(sender, key.peer, message.reason, now)
            return
        self._rejected_by.add(key.peer)
        if len(self._rejected_by) >= 2:
            self._fail(StepRejected(message.reason))
            return
        self._peer_fault(key.peer, message.reason, now)

    def _bad_input(self, key: HopKey, message: Fault, now: float) -> None:
        """A hop says that the one before it sent what can't be right. An honest one checks what it sends, so that
        one is to blame; but whoever says so of a second peer, or of one that isn't before it, is itself."""
        sender = self._before(key)
        accused = self._accused_by.setdefault(key.peer, set())
        accused.add(message.other or key.peer)
        reason = message.reason
        guilty = message.other if message.other == sender is not None and len(accused) == 1 else None
        if guilty is None:
            guilty, reason = key.peer, f"it says others sent it nonsense: {reason}"
        self._peer_fault(guilty, reason, now)

    def _before(self, key: HopKey) -> PeerId | None:
        """Who feeds this hop in the present chain: the one before it, or the last one; None: it itself."""
        keys = self._keys
        if key not in keys or len(keys) == 1:
            return None
        return keys[keys.index(key) - 1].peer

    def _trouble(self, error: SwarmError, now: float) -> None:
        """Give up this epoch and go on with the next, at once or after a pause."""
        if self._give_up(error, now):
            return
        assert self._repair is not None
        if self._repair.is_hasty:
            self._plan_again(now)
        else:
            self._wait(self._pause_s(), now)

    def _give_up(self, error: SwarmError, now: float) -> bool:
        """Count this trouble; whether that was one too many."""
        repair = self._repairing(str(error), now)
        if self.phase in (Phase.RESUMING, Phase.RUNNING) and len(self._ids) >= self._granted:
            repair.begin_anew(now)
        if not repair.failed(error, now, self._config):
            return False
        generated = self._ids[len(self._config.prompt) :]
        tried = f"no chain made a token in {repair.attempts} attempts, try again later; the last one: {error}"
        self._fail(GenerationFailed(tried, token_ids=generated))
        return True

    def _repairing(self, reason: str, now: float) -> Repair:
        """The repair under way; begun for this reason if there is none."""
        if self._repair is None:
            owed = self._owed_since if self.phase in (Phase.RESUMING, Phase.RUNNING) else None
            since = now if owed is None else owed
            self._repair = Repair(reason, since, self._route, len(self._ids), patient_since=now)
        return self._repair

    # ------------------------------------------------------------------------ ends

    def _fail(self, error: SwarmError) -> None:
        self._effects.append(Failed(error))
        self._end(Phase.FAILED, "failed")

    def _end(self, phase: Phase, finish: Literal["stop", "length", "cancelled", "failed"] | str) -> None:
        self._enter(phase)
        for key in list(self._held):
            self._close(key)
        self._overdue.stop()
        self._wake_at = self._renew_at = self._inquiry = None
        self._effects.append(Ended(finish))

    def _close(self, key: HopKey) -> None:
        del self._held[key]
        self._send(key, Close(self._epoch))
        self._effects.append(Release(key))

    def _send(self, key: HopKey, message: Message) -> None:
        self._effects.append(Send(key, message))

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase] or phase is self.phase, (self.phase, phase)
        self.phase = phase
