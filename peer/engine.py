"""The only forward pass of a peer, in its own thread.

Invariants: the asyncio loop never waits for torch and torch never waits for the loop; one thread alone
touches the model and the sessions' tensors; a step's failure is its session's alone.

`submit` hands a job over and returns a future. At each turn the thread asks the scheduler what runs next, and how much
of each prompt (`batch.py`, `pace.py`), packs it into one forward pass, samples where that was asked for, and sends
all of the turn's results to the loop in one wake-up. Sessions join and leave between turns. A job that runs in pieces
is answered once, when all of it has run.

A pass of prompts alone may be long, since it lets others in: between two of its layers whoever decodes, or has a short
prompt, gets a turn of their own (`_openings`). So a long one holds up a decode step for one layer, not for all.

What can go wrong with a step, and who is told: a step that doesn't fit the KV or the model fails before the
pass; torch's own errors (out of memory, mostly) make each step of the turn run once more alone, so that the
guilty one is found; NaN and Inf fail the sessions whose rows have them. Anything else is our bug: it is
logged, fails the turn's jobs as the exception it is, and the engine goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peer.attention import Row
from peer.batch import BatchConfig, Piece, Scheduler
from peer.cache import SessionCache
from peer.hop_effects import SampleAt
from peer.model import PackedStep, SpanModel, StepOutput
from peer.pace import DECODE_TOKENS
from peer.sampling import likelihoods, sample
from routing.spans import Span
from swarm.errors import BadInput, EngineStopped, StepFailed, SwarmError
from swarm.messages import Likelihoods

log = logging.getLogger(__name__)
T = TypeVar("T")
Made = tuple[Tensor | None, int | None, Likelihoods | None]  # one job's rows, token, likelihoods

SMOOTHING = 0.1  # weight of the newest turn in the running means: about the last twenty count
RECENT_TURNS = 256  # turns that the 99th percentile is taken over


@dataclass(eq=False)
class Job:
    """One session's step on this hop. ids: [n] for a span with layer 0, else hidden: [n, width].

    The KV is cut to `position` first. sample: the step ends at the last known id, on the last span.
    cache: covers `span`, and stands for the session in the queue.
    """

    cache: SessionCache
    span: Span
    position: int
    ids: Sequence[int] | None = None
    hidden: Tensor | None = None
    sample: SampleAt | None = None

    @property
    def tokens(self) -> int:
        data = self.ids if self.hidden is None else self.hidden
        return 0 if data is None else len(data)


@dataclass(frozen=True, slots=True)
class JobResult:
    """output: [n, width] on the CPU in the model's dtype, None on a last span. token: if one was sampled;
    likelihoods: if they were asked for too.

    computed_s: the turns that it ran in. waited_s: the rest of the time since it was submitted. packed: sessions
    in the last of those turns.
    """

    output: Tensor | None
    token: int | None
    waited_s: float
    computed_s: float
    packed: int
    likelihoods: Likelihoods | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """threads: torch's threads within an operation (None: torch decides)."""

    threads: int | None = None
    batch: BatchConfig = field(default_factory=BatchConfig)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """step_s, queue_s: running means of a turn and of a job's wait. p99_step_s: over recent turns.

    Since the start, in seconds: turns_s of all turns, forward_s of the model's part of them, lingered_s waiting for
    sessions whose next step was due (in no turn).
    """

    waiting: int
    turns: int
    tokens: int
    failed: int
    step_s: float
    queue_s: float
    p99_step_s: float
    turns_s: float
    forward_s: float
    lingered_s: float


@dataclass(eq=False, slots=True)
class _Entry:
    """A job in the queue, with whom to tell. Has what `batch.Waiting` asks for.

    rows: the output so far of a job that runs in pieces. computed_s: of its turns.
    """

    job: Job
    future: asyncio.Future[JobResult]
    loop: asyncio.AbstractEventLoop
    submitted: float
    key: Hashable
    span: Span
    tokens: int
    chunk: int | None
    rows: list[Tensor] = field(default_factory=list)
    computed_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Part:
    """What runs of an entry in this turn: `job` covers the piece's tokens only."""

    piece: Piece[_Entry]
    job: Job

    @property
    def entry(self) -> _Entry:
        return self.piece.job


class _Forsaken(Exception):
    """Nobody wants to know any more what comes of this pass."""


Outcome = tuple[_Entry, JobResult | BaseException]


class Engine:
    """`start`, then `submit` from the loop; `stop` once. clock: monotonic seconds."""

    def __init__(
        self,
        model: SpanModel | None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.config, self._clock = model, config or EngineConfig(), clock
        self._scheduler: Scheduler[_Entry] = Scheduler(self.config.batch)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._draining = False
        self._running: list[_Entry] = []  # in the turn that runs now
        self._is_let_in = False  # that turn, between two layers of another one
        self._let_in_s = 0.0  # what such turns took
        self._turns = self._tokens = self._failed = 0
        self._step_s = self._queue_s = 0.0
        self._turns_s = self._forward_s = self._lingered_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_TURNS)

    # ---- called from the loop

    def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> asyncio.Future[JobResult]:
        """Queue a step. The future fails with OutOfStep, CacheFull, StepFailed or EngineStopped, and is cancelled
        where the session is dropped.

        Raises EngineStopped, or CapacityError when absurdly many steps wait.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[JobResult] = loop.create_future()
        now = self._clock()
        entry = _Entry(job, future, loop, now, job.cache, job.span, job.tokens, job.cache.chunk)
        with self._wake:
            if self._stopping:
                raise EngineStopped
            self._scheduler.add(entry, now)
            if not self._scheduler.pace.awaited:  # else the turn waits for others too
                self._wake.notify()
        return future

    def drop(self, cache: SessionCache) -> None:
        """Cancel a session's steps; a piece that runs already ends, and nobody hears of it."""
        with self._wake:
            dropped = self._scheduler.drop(cache)
            dropped += [entry for entry in self._running if entry.key is cache]
            for entry in dropped:  # at once: a piece that ends now must not be put back, and keep the session's memory
                entry.future.cancel()
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in the engine's thread, between turns (loading, trial steps)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                outcome: Any = function()
            except BaseException as error:  # it reaches whoever awaits
                outcome = error
            _call_soon(loop, _settle, future, outcome)

        with self._wake:
            if self._stopping:
                raise EngineStopped
            self._calls.append(run)
            self._wake.notify()
        return future

    async def stop(self, drain: bool = False) -> None:
        """Take no more steps. drain: finish those that wait, else they fail with EngineStopped."""
        with self._wake:
            self._stopping, self._draining = True, drain
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        stats = self.stats
        if stats.turns_s:
            log.info(
                "the engine ran %d tokens in %d turns of %.1f ms, %.1f %% of it in the forward pass; "
                "besides, it waited %.1f s for sessions that were due",
                stats.tokens, stats.turns, 1000 * stats.turns_s / stats.turns, 100 * stats.forward_s / stats.turns_s,
                stats.lingered_s,
            )  # fmt: skip

    @property
    def stats(self) -> EngineStats:
        recent = sorted(self._recent)
        p99 = recent[int(0.99 * (len(recent) - 1))] if recent else 0.0
        return EngineStats(
            len(self._scheduler), self._turns, self._tokens, self._failed, self._step_s, self._queue_s, p99,
            self._turns_s, self._forward_s, self._lingered_s,
        )  # fmt: skip

    # ---- the engine's thread

    def _loop(self) -> None:
        try:
            self._work()
        except BaseException:
            log.exception("the engine's thread ended; nothing is computed any more")
        finally:
            self._stopping = True
            self._abandon()

    def _work(self) -> None:
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)  # counts for the thread that says it
        while self._once():
            pass

    def _once(self) -> bool:
        """One call or one turn, as soon as there is one; False at the end. Nothing of it is kept alive."""
        with self._wake:
            while not (self._stopping or self._calls) and (wait_s := self._wait_s()) != 0.0:
                self._wait(wait_s)
            over = self._stopping and not (self._draining and len(self._scheduler))
            call = self._calls.popleft() if self._calls else None
            turn = [] if call or over else self._next()
            self._running = [piece.job for piece in turn]
        if call is not None:
            call()
        elif over:
            return False
        else:
            self._turn(turn)
        return True

    def _next(self) -> list[Piece[_Entry]]:
        long = self.model is not None and self.model.takes_long
        return self._scheduler.next(self._clock(), self._most_rows, long=long)

    def _wait_s(self) -> float | None:
        """Until the next turn should begin; None: until something comes."""
        now = self._clock()
        begin = self._scheduler.begin_at(now, self._most_rows)
        return None if begin is None else max(0.0, begin - now)

    def _wait(self, seconds: float | None) -> None:
        started = self._clock()
        self._wake.wait(seconds)
        if seconds is not None:
            self._lingered_s += self._clock() - started

    @property
    def _most_rows(self) -> int | None:
        """One, where a token's place in the batch would change its numbers."""
        return None if self.model is None or self.model.packs else 1

    def _abandon(self) -> None:
        with self._wake:
            left = self._scheduler.clear()
        _deliver([(entry, EngineStopped()) for entry in left])

    def _own_clock(self) -> float:
        """Stands still for a turn while others are let in."""
        return self._clock() - self._let_in_s

    def _turn(self, turn: list[Piece[_Entry]]) -> None:
        started = self._own_clock()
        outcomes: list[Outcome] = []
        parts = [_Part(piece, _cut(piece)) for piece in turn]
        try:
            ready = [part for part in parts if self._begin(part, outcomes)]
            if ready:
                self._run(ready, started, outcomes)
        except Exception as error:
            log.exception("a bug in the engine failed %d steps", len(turn))
            told = {id(entry) for entry, _ in outcomes}
            outcomes += [(part.entry, error) for part in parts if id(part.entry) not in told]
        self._account(turn, outcomes, started)
        _deliver(outcomes)

    def _begin(self, part: _Part, outcomes: list[Outcome]) -> bool:
        """Check the job and cut its KV. False: it has failed, and nothing was changed."""
        entry, piece = part.entry, part.piece
        if entry.future.cancelled():
            return False
        try:
            if piece.start == 0:
                self._check(entry.job)
                _check_finite(entry.job)
                entry.job.cache.check(entry.job.position, entry.tokens)
            rest = entry.tokens - piece.start
            if entry.chunk is not None:  # windows make way for the whole chunk, whatever its pieces are
                rest = min(rest, entry.chunk - piece.start % entry.chunk)
            entry.job.cache.begin(part.job.position, rest)
        except SwarmError as error:
            outcomes.append((entry, error))
            return False
        return True

    def _check(self, job: Job) -> None:
        model, layers = self.model, str(job.span)
        assert model is not None, "a step before the model was loaded"
        if job.cache.freed:
            raise StepFailed(layers, "the session is closed")
        if not (model.span.covers(job.span) and job.cache.span.covers(job.span)):
            raise StepFailed(layers, f"the claim is {model.span} and the session's KV {job.cache.span}")
        if job.tokens == 0:
            raise StepFailed(layers, "it has no tokens")
        if job.span.start == 0:
            if job.ids is None or not (min(job.ids) >= 0 and max(job.ids) < model.vocab):
                raise StepFailed(layers, f"it needs token ids from 0 to {model.vocab - 1}")
        elif job.hidden is None or job.hidden.shape != (job.tokens, model.width):
            shape = None if job.hidden is None else list(job.hidden.shape)
            raise StepFailed(layers, f"it needs hidden states [{job.tokens}, {model.width}], got {shape}")

    def _run(self, parts: list[_Part], started: float, outcomes: list[Outcome]) -> None:
        """One pass over all, or if torch fails, one over each."""
        assert self.model is not None
        jobs = [part.job for part in parts]
        try:
            begun = self._own_clock()
            output = self.model.forward(pack(jobs, self._openings(parts)))
            if self.model.device.type != "cpu":
                _synchronize(self.model.device)
            self._forward_s += self._own_clock() - begun
            results = self._read(jobs, output)
        except _Forsaken:
            return
        except EngineStopped as stopped:
            outcomes += [(part.entry, stopped) for part in parts]
            return
        except RuntimeError as error:
            if len(parts) > 1:
                log.warning("a packed step of %d failed (%s); each runs alone", len(parts), _line(error))
                for part in parts:
                    if self._begin(part, outcomes):  # cut again: what the failed pass wrote is void
                        self._run([part], started, outcomes)
            else:
                outcomes.append((parts[0].entry, StepFailed(str(jobs[0].span), _line(error))))
            return
        took = self._own_clock() - started
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                outcomes.append((part.entry, result))
            else:
                part.job.cache.finish(part.job.position + part.job.tokens)
                self._ran(part, result, took, len(parts), outcomes)

    def _openings(self, parts: list[_Part]) -> Callable[[], None] | None:
        """What this pass does between two layers; None where it is one that is let in, or others are in it already."""
        assert self.model is not None
        if self._is_let_in or not self.model.pauses or any(p.entry.tokens <= DECODE_TOKENS for p in parts):
            return None
        busy, spare, started = {part.entry.key for part in parts}, sum(p.job.tokens for p in parts), self._clock()

        def opening() -> None:
            nonlocal spare
            if self._stopping and not self._draining:
                raise EngineStopped
            if all(part.entry.future.cancelled() for part in parts):
                raise _Forsaken
            with self._wake:
                now = self._clock()
                turn = self._scheduler.urgent(busy, spare, now)
                if not turn:
                    return
                self._scheduler.pace.held_up(started, now)
                self._running += [piece.job for piece in turn]
            spare -= sum(piece.tokens for piece in turn if piece.job.tokens > DECODE_TOKENS)
            self._let_in(turn)

        return opening

    def _let_in(self, turn: list[Piece[_Entry]]) -> None:
        begun, self._is_let_in = self._clock(), True
        try:
            self._turn(turn)
        finally:
            self._is_let_in = False
            self._let_in_s += self._clock() - begun

    def _ran(self, part: _Part, made: Made, took: float, packed: int, outcomes: list[Outcome]) -> None:
        """Answer the job if that was all of it, else put the rest back."""
        entry, (rows, token, likely) = part.entry, made
        entry.computed_s += took
        if rows is not None:
            entry.rows.append(rows)
        if not part.piece.is_last:
            return
        output = None if not entry.rows else entry.rows[0] if len(entry.rows) == 1 else torch.cat(entry.rows)
        waited = max(0.0, self._clock() - entry.submitted - entry.computed_s)
        outcomes.append((entry, JobResult(output, token, waited, entry.computed_s, packed, likely)))

    def _read(self, jobs: list[Job], output: StepOutput) -> list[Made | Exception]:
        """Each job's part of the pass. Here the CPU waits for the device."""
        assert self.model is not None
        is_last = jobs[0].span.stop == self.model.layers_total
        finite = None
        if not is_last or any(job.tokens > 1 or job.sample is None for job in jobs):
            finite = torch.isfinite(output.hidden).all(-1).tolist()  # else a token's logits tell of it
        hidden = None if is_last else output.hidden.cpu()
        logits = None if output.logits is None else output.logits.cpu().numpy()
        results: list[Made | Exception] = []
        start, sampled = 0, 0
        for job in jobs:
            stop = start + job.tokens
            row = None
            if logits is not None and job.sample is not None:
                row, sampled = logits[sampled], sampled + 1
            if (finite is not None and not all(finite[start:stop])) or (row is not None and not np.isfinite(row).all()):
                results.append(StepFailed(str(job.span), "the output has NaN or Inf"))
            else:
                token, likely = None, None
                if row is not None and job.sample is not None:
                    try:
                        token, likely = _draw(row, job.sample)
                    except Exception as error:  # a bug of ours, and this session's alone
                        log.exception("an id couldn't be drawn with %s", job.sample.sampling)
                        results.append(error)
                        start = stop
                        continue
                rows = None if hidden is None else hidden[start:stop]
                results.append((rows if rows is None or len(jobs) == 1 else rows.clone(), token, likely))
            start = stop
        return results

    def _account(self, turn: list[Piece[_Entry]], outcomes: list[Outcome], started: float) -> None:
        now, took = self._clock(), self._own_clock() - started
        over = {id(entry) for entry, _ in outcomes}
        with self._wake:
            ended = {id(piece.job) for piece in turn}
            self._running = [entry for entry in self._running if id(entry) not in ended]
            self._scheduler.ended(turn, now - took, now)
            for piece in turn:
                if not (piece.is_last or id(piece.job) in over or piece.job.future.cancelled()):
                    self._scheduler.put_back(piece, now)
        done = [outcome for _, outcome in outcomes if isinstance(outcome, JobResult)]
        self._failed += len(outcomes) - len(done)
        failed = {id(entry) for entry, outcome in outcomes if not isinstance(outcome, JobResult)}
        ran = [piece.tokens for piece in turn if id(piece.job) not in failed]
        if not ran:
            return
        weight = SMOOTHING if self._turns else 1.0
        self._step_s += weight * (took - self._step_s)
        if done:
            waited = sum(result.waited_s for result in done) / len(done)
            self._queue_s += (weight if self._queue_s else 1.0) * (waited - self._queue_s)
        self._turns += 1
        self._turns_s += took
        self._tokens += sum(ran)
        self._recent.append(took)


def _cut(piece: Piece[_Entry]) -> Job:
    """The piece as a job of its own."""
    job = piece.job.job
    if piece.start == 0 and piece.is_last:
        return job
    part = slice(piece.start, piece.stop)
    return Job(
        job.cache,
        job.span,
        job.position + piece.start,
        None if job.ids is None else job.ids[part],
        None if job.hidden is None else job.hidden[part],
        job.sample if piece.is_last else None,
    )


def _synchronize(device: torch.device) -> None:
    """So that the forward pass's own time is known; reading its results would wait all the same."""
    module = getattr(torch, device.type, None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()


def _draw(logits: npt.NDArray[np.float32], ask: SampleAt) -> tuple[int, Likelihoods | None]:
    token = sample(logits, ask.sampling, ask.position, ask.ids)
    wanted = ask.sampling.logprobs
    return token, None if wanted is None else likelihoods(logits, token, wanted)


def _check_finite(job: Job) -> None:
    """Raises BadInput. Looked at before the step, for afterwards it would look like our own fault."""
    if job.hidden is not None and not bool(torch.isfinite(job.hidden).all()):
        raise BadInput(str(job.span), "the input has NaN or Inf")


def pack(jobs: Sequence[Job], between: Callable[[], None] | None = None) -> PackedStep:
    """Jobs over the same layers as one step. between: as `PackedStep` has it."""
    rows = [Row(job.cache, job.position, job.tokens, int(job.sample is not None)) for job in jobs]
    span = jobs[0].span
    if span.start == 0:
        ids = jobs[0].ids if len(jobs) == 1 else [i for job in jobs for i in job.ids or ()]
        return PackedStep(span, rows, ids=torch.as_tensor(ids, dtype=torch.long), between=between)
    parts = [job.hidden for job in jobs if job.hidden is not None]
    return PackedStep(span, rows, hidden=parts[0] if len(parts) == 1 else torch.cat(parts), between=between)


def _deliver(outcomes: list[Outcome]) -> None:
    """One wake-up per loop for a whole turn."""
    loops: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for entry, outcome in outcomes:
        loops.setdefault(entry.loop, []).append((entry, outcome))
    for loop, theirs in loops.items():
        _call_soon(loop, _settle_all, theirs)


def _settle_all(outcomes: list[Outcome]) -> None:
    for entry, outcome in outcomes:
        _settle(entry.future, outcome)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return  # cancelled meanwhile
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        log.debug("a result came after its loop was closed")


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
