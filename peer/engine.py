"""The only forward pass of a peer, in its own thread.

Invariants: the asyncio loop never waits for torch and torch never waits for the loop; one thread alone
touches the model and the sessions' tensors; a step's failure is its session's alone.

`submit` hands a job over and returns a future. At each turn the thread asks the scheduler what runs next,
packs it into one forward pass, samples where that was asked for, and sends all of the turn's results to the
loop in one wake-up. Sessions join and leave between turns.

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
from peer.batch import BatchConfig, Scheduler
from peer.cache import SessionCache
from peer.hop import SampleAt
from peer.model import PackedStep, SpanModel, StepOutput
from peer.sampling import likelihoods, sample
from routing.spans import Span, Speed
from swarm.errors import BadInput, EngineStopped, StepFailed, SwarmError
from swarm.messages import Likelihoods

log = logging.getLogger(__name__)
T = TypeVar("T")
Made = tuple[Tensor | None, int | None, Likelihoods | None]  # one job's rows, token, likelihoods
FloatArray = npt.NDArray[np.float64]

SMOOTHING = 0.1  # weight of the newest turn in the running means: about the last twenty count
RECENT_TURNS = 256  # turns that the 99th percentile is taken over
TRIAL_TOKENS = 64  # a trial prefill: enough to be bound by arithmetic, not by weight reading
LEAST_STEP_S = 0.002  # a hop costs two thread hand-overs and a message (about 0.5 ms) and can fail: no hops for nothing
TRIAL_ROUNDS = 10  # most that are needed for a best one
TRIAL_SECONDS = 0.6  # most that trial decode steps take in all, before the last round begins


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

    waited_s: from submit to the turn's start. computed_s: the turn. packed: sessions in that turn.
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
    """step_s, queue_s: running means of a turn and of a job's wait. p99_step_s: over recent turns."""

    waiting: int
    turns: int
    tokens: int
    failed: int
    step_s: float
    queue_s: float
    p99_step_s: float


@dataclass(eq=False, slots=True)
class _Entry:
    """A job in the queue, with whom to tell. Has what `batch.Waiting` asks for."""

    job: Job
    future: asyncio.Future[JobResult]
    loop: asyncio.AbstractEventLoop
    submitted: float
    key: Hashable = None
    span: Span = Span(0, 1)
    tokens: int = 0


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
        self._turns = self._tokens = self._failed = 0
        self._step_s = self._queue_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_TURNS)

    # ---- called from the loop

    def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> asyncio.Future[JobResult]:
        """Queue a step. The future fails with OutOfStep, CacheFull, StepFailed or EngineStopped.

        Raises EngineStopped, or CapacityError when absurdly many steps wait.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[JobResult] = loop.create_future()
        entry = _Entry(job, future, loop, self._clock(), job.cache, job.span, job.tokens)
        with self._wake:
            if self._stopping:
                raise EngineStopped
            self._scheduler.add(entry)
            self._wake.notify()
        return future

    def drop(self, cache: SessionCache) -> None:
        """Cancel a session's waiting steps; one that runs already ends, and nobody hears of it."""
        with self._wake:
            dropped = self._scheduler.drop(cache)
        for entry in dropped:
            entry.future.cancel()

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

    @property
    def stats(self) -> EngineStats:
        recent = sorted(self._recent)
        p99 = recent[int(0.99 * (len(recent) - 1))] if recent else 0.0
        return EngineStats(
            len(self._scheduler), self._turns, self._tokens, self._failed, self._step_s, self._queue_s, p99
        )

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
        while True:
            with self._wake:
                while not (self._stopping or self._calls or len(self._scheduler)):
                    self._wake.wait()
                over = self._stopping and not (self._draining and len(self._scheduler))
                call = self._calls.popleft() if self._calls else None
                entries = [] if call or over else self._scheduler.next(self._most_rows)
            if call is not None:
                call()
            elif over:
                break
            else:
                self._turn(entries)

    @property
    def _most_rows(self) -> int | None:
        """One, where a token's place in the batch would change its numbers."""
        return None if self.model is None or self.model.packs else 1

    def _abandon(self) -> None:
        with self._wake:
            left = []
            while len(self._scheduler):
                left += self._scheduler.next()
        _deliver([(entry, EngineStopped()) for entry in left])

    def _turn(self, entries: list[_Entry]) -> None:
        started = self._clock()
        outcomes: list[Outcome] = []
        try:
            ready = [entry for entry in entries if self._begin(entry, outcomes)]
            if ready:
                self._run(ready, started, outcomes)
        except Exception as error:
            log.exception("a bug in the engine failed %d steps", len(entries))
            told = {id(entry) for entry, _ in outcomes}
            outcomes += [(entry, error) for entry in entries if id(entry) not in told]
        self._account(entries, outcomes, started)
        _deliver(outcomes)

    def _begin(self, entry: _Entry, outcomes: list[Outcome]) -> bool:
        """Check the job and cut its KV. False: it has failed, and nothing was changed."""
        if entry.future.cancelled():
            return False
        try:
            self._check(entry.job)
            _check_finite(entry.job)
            entry.job.cache.begin(entry.job.position, entry.job.tokens)
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

    def _run(self, entries: list[_Entry], started: float, outcomes: list[Outcome]) -> None:
        """One pass over all, or if torch fails, one over each."""
        assert self.model is not None
        try:
            output = self.model.forward(pack([entry.job for entry in entries]))
            results = self._read([entry.job for entry in entries], output)
        except RuntimeError as error:
            if len(entries) > 1:
                log.warning("a packed step of %d failed (%s); each runs alone", len(entries), _line(error))
                for entry in entries:
                    if self._begin(entry, outcomes):  # cut again: what the failed pass wrote is void
                        self._run([entry], started, outcomes)
            else:
                outcomes.append((entries[0], StepFailed(str(entries[0].job.span), _line(error))))
            return
        took = self._clock() - started
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, Exception):
                outcomes.append((entry, result))
                continue
            entry.job.cache.finish(entry.job.position + entry.job.tokens)
            rows, token, likely = result
            waited = started - entry.submitted
            outcomes.append((entry, JobResult(rows, token, waited, took, len(entries), likely)))

    def _read(self, jobs: list[Job], output: StepOutput) -> list[Made | Exception]:
        """Each job's part of the pass. Here the CPU waits for the device."""
        assert self.model is not None
        is_last = jobs[0].span.stop == self.model.layers_total
        finite = torch.isfinite(output.hidden).all(-1).tolist()
        hidden = None if is_last else output.hidden.cpu()
        logits = None if output.logits is None else output.logits.cpu().numpy()
        results: list[Made | Exception] = []
        start, sampled = 0, 0
        for job in jobs:
            stop = start + job.tokens
            row = None
            if logits is not None and job.sample is not None:
                row, sampled = logits[sampled], sampled + 1
            if not all(finite[start:stop]) or (row is not None and not np.isfinite(row).all()):
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

    def _account(self, entries: list[_Entry], outcomes: list[Outcome], started: float) -> None:
        done = [entry for entry, outcome in outcomes if isinstance(outcome, JobResult)]
        self._failed += len(outcomes) - len(done)
        if not done:
            return
        took = self._clock() - started
        waited = sum(started - entry.submitted for entry in done) / len(done)
        weight = SMOOTHING if self._turns else 1.0
        self._step_s += weight * (took - self._step_s)
        self._queue_s += weight * (waited - self._queue_s)
        self._turns += 1
        self._tokens += sum(entry.tokens for entry in done)
        self._recent.append(took)


def _draw(logits: npt.NDArray[np.float32], ask: SampleAt) -> tuple[int, Likelihoods | None]:
    token = sample(logits, ask.sampling, ask.position, ask.ids)
    wanted = ask.sampling.logprobs
    return token, None if wanted is None else likelihoods(logits, token, wanted)


def _check_finite(job: Job) -> None:
    """Raises BadInput. Looked at before the step, for afterwards it would look like our own fault."""
    if job.hidden is not None and not bool(torch.isfinite(job.hidden).all()):
        raise BadInput(str(job.span), "the input has NaN or Inf")


def pack(jobs: Sequence[Job]) -> PackedStep:
    """Jobs over the same layers as one step."""
    rows = [Row(job.cache, job.position, job.tokens, int(job.sample is not None)) for job in jobs]
    span = jobs[0].span
    if span.start == 0:
        ids = jobs[0].ids if len(jobs) == 1 else [i for job in jobs for i in job.ids or ()]
        return PackedStep(span, rows, ids=torch.as_tensor(ids, dtype=torch.long))
    parts = [job.hidden for job in jobs if job.hidden is not None]
    return PackedStep(span, rows, hidden=parts[0] if len(parts) == 1 else torch.cat(parts))


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


# ---------------------------------------------------------------- trial steps


def measure_speed(model: SpanModel, clock: Callable[[], float] = time.perf_counter) -> Speed:
    """What decode and prefill really take here. Run it in the engine's thread (`Engine.call`).

    Decode steps over several sub-spans of the claim are timed in turn, the best of each counts (what else
    runs on the machine only ever adds), and `Speed`'s formula is fitted to them by least squares. What a
    claim can't tell apart (one layer's time from a step's own) is shared out.
    """
    prefill_s = _prefill_s(model, clock)  # first: it also brings in the weights
    spans = _trial_spans(model.span)
    steps = [_trial_step(model, span) for span in spans]
    best, begun, rounds = [float("inf")] * len(spans), clock(), 0
    while rounds < 2 or (rounds < TRIAL_ROUNDS and clock() - begun < TRIAL_SECONDS):
        best = [min(b, _timed(model, step, clock)) for b, step in zip(best, steps, strict=True)]
        rounds += 1
    features = [[1.0, len(s), s.start == 0, s.stop == model.layers_total] for s in spans]
    step_s, layer_s, embed_s, head_s = _fit_non_negative(np.array(features, dtype=np.float64), np.array(best))
    return Speed(
        max(step_s, LEAST_STEP_S), layer_s, embed_s, head_s, prefill_s / TRIAL_TOKENS / len(model.span)
    )


def _fit_non_negative(features: FloatArray, seconds: FloatArray) -> list[float]:
    """Least squares; a share that comes out negative is noise, so it is 0 and the others are fitted again."""
    kept = list(range(features.shape[1]))
    while True:
        fitted = np.linalg.lstsq(features[:, kept], seconds, rcond=None)[0]
        worst = int(np.argmin(fitted))
        if fitted[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    shares = dict(zip(kept, fitted, strict=True))
    return [max(0.0, float(shares.get(column, 0.0))) for column in range(features.shape[1])]


def _trial_spans(claim: Span) -> list[Span]:
    a, b = claim.start, claim.stop
    middle = (a + b) // 2
    cuts = [(a, b), (a, a + 1), (b - 1, b), (a, middle), (middle, b), (a + 1, b - 1)]
    return list(dict.fromkeys(Span(x, y) for x, y in cuts if x < y))


def _trial_step(model: SpanModel, span: Span, tokens: int = 1) -> PackedStep:
    is_last = span.stop == model.layers_total
    row = Row(model.new_cache(tokens, span), 0, tokens, logits=int(is_last))
    return PackedStep(span, [row], **_trial_input(model, tokens, span))


def _prefill_s(model: SpanModel, clock: Callable[[], float]) -> float:
    step = _trial_step(model, model.span, TRIAL_TOKENS)
    _timed(model, step, clock)
    return min(_timed(model, step, clock) for _ in range(2))


def _trial_input(model: SpanModel, tokens: int, span: Span) -> dict[str, Tensor]:
    if span.start == 0:
        return {"ids": torch.zeros(tokens, dtype=torch.long)}
    return {"hidden": torch.zeros(tokens, model.width, dtype=model.dtype)}


def _timed(model: SpanModel, step: PackedStep, clock: Callable[[], float]) -> float:
    started = clock()
    output = model.forward(step)
    output.hidden[-1, :1].cpu()  # waits for the device
    return clock() - started


def measure_workspace(model: SpanModel, tokens: int) -> int | None:
    """Bytes that a prefill chunk needs beyond weights and KV, by a real one. None: can't be told here."""
    step = _trial_step(model, model.span, tokens)
    cache = step.rows[0].cache
    cache.touch()  # its pages are KV, not workspace
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        model.forward(step)
        torch.cuda.synchronize(model.device)
        return torch.cuda.max_memory_allocated(model.device) - before
    before, code_before = _reset_peak(), _memory_line("RssFile")
    model.forward(step)
    peak, code_after = _memory_line("VmHWM"), _memory_line("RssFile")
    if before is None or peak is None or code_before is None or code_after is None:
        return None
    # libraries' code that this step was the first to touch (up to 10 MiB were seen) is no workspace
    return max(0, peak - before - (code_after - code_before))


def _reset_peak() -> int | None:
    """Linux: make the process's peak what it holds now, and say how much that is."""
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError:
        return None
    return _memory_line("VmRSS")


def _memory_line(name: str) -> int | None:
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
    except (OSError, StopIteration):
        return None
