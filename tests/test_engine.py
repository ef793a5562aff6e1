"""The engine's thread, on tiny random models: who is told what, and that the text is right."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from peer import engine as engine_module
from peer.attention import Row
from peer.batch import BatchConfig
from peer.cache import KvPool
from peer.engine import Engine, EngineConfig, Job, JobResult, pack
from peer.families import Way
from peer.hop_effects import SampleAt
from peer.kv import KvSizes
from peer.measure import measure_speed, measure_workspace
from peer.model import PackedStep, SpanModel, StepOutput
from peer.pace import LEAST_PIECE
from peer.weights import load_span
from routing.spans import Span
from swarm.errors import BadInput, CacheFull, EngineStopped, OutOfStep, StepFailed
from swarm.messages import Sampling
from tests.tiny import LAYERS, MemoryCheckpoint, tiny_model

torch.set_num_threads(1)
WHOLE = Span(0, LAYERS)
GREEDY = Sampling()


@pytest.fixture(scope="module")
def uncut() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def checkpoint(uncut: PreTrainedModel) -> MemoryCheckpoint:
    made = MemoryCheckpoint(uncut)
    yield made
    made.close()


@pytest.fixture
def model(checkpoint: MemoryCheckpoint) -> SpanModel:
    return load_span(checkpoint, WHOLE, torch.float32)


@pytest.fixture
async def engine(model: SpanModel) -> AsyncIterator[Engine]:
    made = Engine(model, EngineConfig(threads=1))
    made.start()
    yield made
    await made.stop()


async def generate(engine: Engine, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """A session on an engine with the whole model."""
    assert engine.model is not None
    cache = engine.model.new_cache(len(prompt) + count)
    ids, new = list(prompt), list(prompt)
    for _ in range(count):
        ask = SampleAt(len(ids), sampling, tuple(ids))
        result = await engine.submit(Job(cache, WHOLE, len(ids) - len(new), ids=new, sample=ask))
        assert result.token is not None and result.output is None
        ids.append(result.token)
        new = [result.token]
    return ids[len(prompt) :]


def reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + 7 * i + i * i) % 90 for i in range(length)]


async def test_many_sessions_at_once_get_the_text_that_each_gets_alone(
    engine: Engine, uncut: PreTrainedModel
) -> None:
    lengths = (1, 30, 7, 12)
    texts = await asyncio.gather(*(generate(engine, prompt(s, n), 10) for s, n in enumerate(lengths)))
    for seed, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        logits_end = reference(uncut, prompt(seed, length), 10)
        assert text == logits_end
    assert engine.stats.turns < 40 and engine.stats.tokens == sum(lengths) + 4 * 9


async def test_the_same_seed_gives_the_same_text_beside_other_sessions(engine: Engine) -> None:
    sampling = Sampling(temperature=0.8, seed=5)
    alone = await generate(engine, prompt(1, 9), 12, sampling)
    beside, *_ = await asyncio.gather(
        generate(engine, prompt(1, 9), 12, sampling), generate(engine, prompt(2, 20), 12, sampling)
    )
    assert beside == alone
    assert alone != await generate(engine, prompt(1, 9), 12, Sampling(temperature=0.8, seed=6))


async def test_hidden_states_go_on_to_the_next_span(
    engine: Engine, checkpoint: MemoryCheckpoint, uncut: PreTrainedModel
) -> None:
    first, second = Span(0, 2), Span(2, LAYERS)
    ids = prompt(3, 8)
    assert engine.model is not None
    caches = [engine.model.new_cache(8, span) for span in (first, second)]
    hop = await engine.submit(Job(caches[0], first, 0, ids=ids))
    assert hop.token is None and hop.output is not None and hop.output.shape == (8, 32)
    ask = SampleAt(8, GREEDY, tuple(ids))
    end = await engine.submit(Job(caches[1], second, 0, hidden=hop.output, sample=ask))
    assert end.token == reference(uncut, ids, 1)[0]
    assert end.computed_s > 0 and end.waited_s >= 0 and end.packed == 1


async def test_a_step_cuts_the_kv_to_where_it_starts(engine: Engine, uncut: PreTrainedModel) -> None:
    assert engine.model is not None
    cache = engine.model.new_cache(20)
    ids = prompt(4, 12)
    await engine.submit(Job(cache, WHOLE, 0, ids=ids))
    other = [*ids[:5], 77]
    result = await engine.submit(Job(cache, WHOLE, 5, ids=[77], sample=SampleAt(6, GREEDY, ())))
    assert cache.length == 6
    assert result.token == reference(uncut, other, 1)[0]


def wrong_jobs(model: SpanModel) -> list[tuple[Job, type[Exception], str]]:
    part = Span(2, 4)
    hole, full, closed = model.new_cache(8), model.new_cache(3), model.new_cache(8)
    closed.freed = True
    return [
        (Job(hole, WHOLE, 2, ids=[5]), OutOfStep, "hole"),
        (Job(full, WHOLE, 0, ids=[5] * 4), CacheFull, "4 KV positions"),
        (Job(closed, WHOLE, 0, ids=[5]), StepFailed, "closed"),
        (Job(model.new_cache(8), WHOLE, 0, ids=[5, 97]), StepFailed, "from 0 to 96"),
        (Job(model.new_cache(8), WHOLE, 0, ids=[]), StepFailed, "no tokens"),
        (Job(model.new_cache(8), WHOLE, 0, hidden=torch.zeros(1, 32)), StepFailed, "token ids"),
        (Job(model.new_cache(8, part), part, 0, hidden=torch.zeros(1, 31)), StepFailed, r"\[1, 32\]"),
        (Job(model.new_cache(8, part), Span(1, 4), 0, hidden=torch.zeros(1, 32)), StepFailed, "KV 2-3"),
        *((Job(model.new_cache(8, part), part, 0, hidden=one_bad(v)), BadInput, "input has") for v in NOT_FINITE),
    ]


NOT_FINITE = (math.nan, math.inf, -math.inf)


def one_bad(value: float) -> torch.Tensor:
    rows = torch.zeros(3, 32)
    rows[1, 17] = value
    return rows


@pytest.mark.parametrize("case", range(11))
async def test_a_wrong_step_fails_alone(case: int, engine: Engine, uncut: PreTrainedModel) -> None:
    assert engine.model is not None
    job, error, text = wrong_jobs(engine.model)[case]
    good = asyncio.ensure_future(generate(engine, prompt(1, 6), 4))
    with pytest.raises(error, match=text):
        await engine.submit(job)
    assert await good == reference(uncut, prompt(1, 6), 4)
    assert engine.stats.failed == 1 and job.cache.length == 0


async def test_nan_stops_its_session_and_names_the_layers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in is finite, what comes out isn't."""
    span = Span(1, 3)
    assert engine.model is not None
    forward = engine.model.forward

    def poisoned(step: PackedStep) -> StepOutput:
        output = forward(step)
        assert step.hidden is not None
        return dataclasses.replace(output, hidden=output.hidden.where((step.hidden != 7.0), math.nan))

    monkeypatch.setattr(engine.model, "forward", poisoned)
    caches = [engine.model.new_cache(4, span) for _ in range(2)]
    rows = [torch.randn(2, 32), torch.full((2, 32), 7.0)]
    good, bad = await asyncio.gather(
        *(engine.submit(Job(c, span, 0, hidden=r)) for c, r in zip(caches, rows, strict=True)),
        return_exceptions=True,
    )
    assert isinstance(good, JobResult) and good.output is not None and good.output.isfinite().all()
    assert isinstance(bad, StepFailed) and "layers 1-2" in str(bad) and "NaN" in str(bad)
    assert not isinstance(bad, BadInput) and caches[1].length == 0


async def test_a_bug_in_drawing_an_id_fails_its_session_alone(
    engine: Engine, uncut: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = engine_module._draw

    def broken(row: Any, ask: SampleAt) -> Any:
        if ask.sampling.seed == 666:
            raise IndexError("of no array")
        return draw(row, ask)

    monkeypatch.setattr(engine_module, "_draw", broken)
    good, bad = await asyncio.gather(
        generate(engine, prompt(1, 6), 6),
        generate(engine, prompt(1, 6), 6, Sampling(temperature=0.5, seed=666)),
        return_exceptions=True,
    )
    assert good == reference(uncut, prompt(1, 6), 6)
    assert isinstance(bad, IndexError) and "couldn't be drawn" in caplog.text


class Faulty(SpanModel):
    """A model that fails as told. Wraps a real one."""

    def __init__(self, real: SpanModel) -> None:
        self.__dict__.update(real.__dict__)
        self.fault: Exception | None = None
        self.poison = 13  # a token id that makes torch fail
        self.calls: list[int] = []

    def forward(self, step: PackedStep) -> StepOutput:
        self.calls.append(len(step.rows))
        if self.fault is not None:
            raise self.fault
        if step.ids is not None and self.poison in step.ids.tolist():
            raise RuntimeError("out of memory, as it were\nwith a second line")
        return super().forward(step)


async def both_at_once(engine: Engine, first: Job, second: Job) -> list[JobResult | BaseException]:
    """Two jobs in one turn: the thread starts when both wait."""
    futures = [engine.submit(first), engine.submit(second)]
    engine.start()
    return await asyncio.gather(*futures, return_exceptions=True)


async def test_when_torch_fails_each_step_runs_once_more_alone(model: SpanModel) -> None:
    faulty = Faulty(model)
    engine = Engine(faulty)
    good, bad = await both_at_once(
        engine,
        Job(model.new_cache(4), WHOLE, 0, ids=[5, 6]),
        Job(model.new_cache(4), WHOLE, 0, ids=[5, faulty.poison]),
    )
    await engine.stop()
    assert isinstance(good, JobResult) and good.packed == 1
    assert isinstance(bad, StepFailed) and bad.reason == "out of memory, as it were"
    assert faulty.calls == [2, 1, 1]


async def test_our_own_bug_reaches_who_asked_and_the_log_and_the_engine_goes_on(
    model: SpanModel, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(model)
    faulty.fault = AssertionError("a bug")
    engine = Engine(faulty)
    jobs = [Job(model.new_cache(4), WHOLE, 0, ids=[5]) for _ in range(2)]
    outcomes = await both_at_once(engine, *jobs)
    assert all(isinstance(outcome, AssertionError) for outcome in outcomes)
    assert "a bug" in caplog.text
    faulty.fault = None
    assert (await engine.submit(jobs[0])).packed == 1
    await engine.stop()


async def test_stopping_fails_what_waits_and_draining_finishes_it(model: SpanModel) -> None:
    for drain, kind in ((False, EngineStopped), (True, JobResult)):
        engine = Engine(model)
        waiting = engine.submit(Job(model.new_cache(4), WHOLE, 0, ids=[5]))
        engine._stopping, engine._draining = True, drain
        engine.start()
        await engine.stop(drain)
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(outcome, kind)
        with pytest.raises(EngineStopped):
            engine.submit(Job(model.new_cache(4), WHOLE, 0, ids=[5]))


async def test_a_dropped_session_leaves_the_queue(model: SpanModel) -> None:
    faulty = Faulty(model)
    engine = Engine(faulty)
    kept, gone = (Job(model.new_cache(4), WHOLE, 0, ids=[5]) for _ in range(2))
    futures = [engine.submit(kept), engine.submit(gone)]
    engine.drop(gone.cache)
    engine.start()
    await futures[0]
    await engine.stop(drain=True)
    assert futures[1].cancelled() and faulty.calls == [1]


async def test_a_step_that_runs_in_pieces_is_answered_once_with_all_of_its_rows(
    model: SpanModel, uncut: PreTrainedModel
) -> None:
    engine = Engine(model, EngineConfig(threads=1, batch=BatchConfig(prefill_tokens=10, long_tokens=10)))
    engine.start()
    ids, first, second = prompt(3, 34), Span(0, 2), Span(2, LAYERS)
    whole, cache = model.new_cache(34, first), model.new_cache(34, second)
    hop = await engine.submit(Job(whole, first, 0, ids=ids))
    assert hop.output is not None and hop.output.shape == (34, 32) and engine.stats.turns == 4
    alone = model.forward(PackedStep(first, [Row(model.new_cache(34, first), 0, 34)], ids=torch.tensor(ids)))
    assert torch.allclose(hop.output, alone.hidden, atol=1e-5)
    end = await engine.submit(Job(cache, second, 0, hidden=hop.output, sample=SampleAt(34, GREEDY, tuple(ids))))
    assert end.token == reference(uncut, ids, 1)[0] and end.output is None
    assert engine.stats.turns == 8 and engine.stats.tokens == 68 and cache.length == 34
    assert end.computed_s > 0
    await engine.stop()


async def test_an_id_is_drawn_after_the_last_piece_only(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, positions = engine_module._draw, list[int]()

    def noting(row: Any, ask: SampleAt) -> Any:
        positions.append(ask.position)
        return draw(row, ask)

    monkeypatch.setattr(engine_module, "_draw", noting)
    engine = Engine(model, EngineConfig(threads=1, batch=BatchConfig(prefill_tokens=10, long_tokens=10)))
    engine.start()
    await generate(engine, prompt(3, 34), 2)
    await engine.stop()
    assert positions == [34, 35] and engine.stats.turns == 5


async def test_sessions_decode_beside_a_prompt_in_pieces(model: SpanModel, uncut: PreTrainedModel) -> None:
    """Everybody's text is right, and a decode step never waits for the whole of the prompt."""
    sizes: list[list[tuple[int, int]]] = []  # tokens, and how many the session may have
    decode, loop = asyncio.Event(), asyncio.get_running_loop()

    class Noting(Faulty):
        def forward(self, step: PackedStep) -> StepOutput:
            sizes.append([(row.tokens, row.cache.reserved) for row in step.rows])
            if sum(turn.count((1, 45)) for turn in sizes) >= 12:  # each has begun, and none is near its end
                loop.call_soon_threadsafe(decode.set)
            return SpanModel.forward(self, step)

    engine = Engine(Noting(model))
    engine.start()
    decoding = [asyncio.create_task(generate(engine, prompt(s, 5), 40)) for s in range(3)]
    await decode.wait()
    begin, long = len(sizes), prompt(9, 120)
    assert await generate(engine, long, 2) == reference(uncut, long, 2)
    assert [await task for task in decoding] == [reference(uncut, prompt(s, 5), 40) for s in range(3)]
    await engine.stop()
    pieces = [n for turn in sizes[begin:] for n, room in turn if room == 122]
    assert sum(pieces) == 121 and len(pieces) > 1 and pieces[0] == LEAST_PIECE


class Opened(Faulty):
    """A model in whose first long pass something is done before each of its layers but the first: `meanwhile`, in the
    loop, given the layer's number."""

    def __init__(self, real: SpanModel, meanwhile: Callable[[int], Awaitable[object]]) -> None:
        super().__init__(real)
        self.poison = -1
        self.layers_begun = list[int]()  # of each pass of prompts that could be interrupted
        self._loop, self._meanwhile = asyncio.get_running_loop(), meanwhile

    def forward(self, step: PackedStep) -> StepOutput:
        between = step.between
        if between is None:
            return super().forward(step)
        self.layers_begun.append(1)

        def noting() -> None:
            if len(self.layers_begun) == 1:
                asyncio.run_coroutine_threadsafe(self._meanwhile(self.layers_begun[0]), self._loop).result()
            between()
            self.layers_begun[-1] += 1

        return super().forward(dataclasses.replace(step, between=noting))


async def test_a_long_pass_lets_in_who_decodes_or_has_a_short_prompt(model: SpanModel, uncut: PreTrainedModel) -> None:
    """And neither changes the other's text, nor does the time count twice."""
    now, ended, beside = 0.0, list[list[int]](), list[asyncio.Task[None]]()

    async def text(ids: list[int], count: int) -> None:
        assert await generate(engine, ids, count) == reference(uncut, ids, count)

    async def meanwhile(layer: int) -> None:
        if layer > 1:
            return
        beside.extend(asyncio.create_task(text(prompt(3, tokens), 3)) for tokens in (1, 20))
        await asyncio.sleep(0)  # both have submitted their first step

    class Timed(Opened):
        def forward(self, step: PackedStep) -> StepOutput:
            nonlocal now
            now += 1.0
            output = super().forward(step)
            ended.append([row.tokens for row in step.rows])
            return output

    timed = Timed(model, meanwhile)
    engine = Engine(timed, EngineConfig(batch=BatchConfig(prefill_tokens=30)), clock=lambda: now)
    engine.start()
    await text(prompt(9, 110), 1)
    await asyncio.gather(*beside)
    await engine.stop()
    let_in = [tokens for step in ended[: ended.index([110])] for tokens in step]
    assert 1 in let_in and sum(tokens for tokens in let_in if tokens > 1) == 20 and timed.layers_begun[0] == LAYERS
    assert engine.stats.turns_s == engine.stats.forward_s == engine.stats.turns == now


async def test_a_pass_that_nobody_waits_for_ends_at_the_next_layer(model: SpanModel) -> None:
    async def drop(layer: int) -> None:
        if layer == 1:  # whoever is let in before makes no difference
            beside.append(engine.submit(Job(model.new_cache(4), WHOLE, 0, ids=[5])))
        if layer == 2:
            engine.drop(cache)

    async def stop(layer: int) -> None:
        engine._stopping = layer == 2

    beside = list[asyncio.Future[JobResult]]()
    for meanwhile, kind in ((drop, asyncio.CancelledError), (stop, EngineStopped)):
        opened, cache = Opened(model, meanwhile), model.new_cache(60)
        engine = Engine(opened)
        engine.start()
        (outcome,) = await asyncio.gather(
            engine.submit(Job(cache, WHOLE, 0, ids=[5] * 50)), return_exceptions=True
        )
        assert isinstance(outcome, kind) and cache.length == 0
        if meanwhile is drop:  # and the engine goes on
            assert (await engine.submit(Job(model.new_cache(4), WHOLE, 0, ids=[5]))).packed == 1
        await engine.stop()
        assert opened.layers_begun == [2]
    assert (await beside[0]).packed == 1


async def test_a_failure_in_a_later_piece_fails_the_step_and_the_rest_is_not_run(model: SpanModel) -> None:
    faulty = Faulty(model)
    engine = Engine(faulty, EngineConfig(batch=BatchConfig(prefill_tokens=10, long_tokens=10)))
    engine.start()
    cache = model.new_cache(60)
    with pytest.raises(StepFailed, match="out of memory"):
        await engine.submit(Job(cache, WHOLE, 0, ids=[5] * 15 + [faulty.poison] + [5] * 30))
    assert faulty.calls == [1, 1] and cache.length == 10 and engine.stats.failed == 1
    with pytest.raises(CacheFull):  # told before the first piece has run
        await engine.submit(Job(cache, WHOLE, 10, ids=[5] * 51))
    assert faulty.calls == [1, 1] and cache.length == 10
    await engine.stop(drain=True)
    assert faulty.calls == [1, 1] and engine.stats.failed == 2 and engine.stats.waiting == 0


async def test_a_session_that_is_dropped_while_it_runs_is_not_run_to_its_end(model: SpanModel) -> None:
    engine = Engine(model, EngineConfig(batch=BatchConfig(prefill_tokens=10, long_tokens=10)))
    cache, calls, loop = model.new_cache(60), list[int](), asyncio.get_running_loop()
    begun = asyncio.Event()

    class Slow(Faulty):
        def forward(self, step: PackedStep) -> StepOutput:
            calls.append(step.rows[0].tokens)
            asyncio.run_coroutine_threadsafe(drop(), loop).result()
            return SpanModel.forward(self, step)

    async def drop() -> None:
        engine.drop(cache)
        begun.set()

    engine.model = Slow(model)
    engine.start()
    running = engine.submit(Job(cache, WHOLE, 0, ids=[5] * 50))
    await begun.wait()
    await engine.stop(drain=True)
    assert running.cancelled() and calls == [10] and engine.stats.waiting == 0


async def test_a_piece_that_ends_while_its_session_is_dropped_is_not_put_back(
    model: SpanModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread doesn't get to see a session that is gone, with a step that isn't cancelled yet."""
    seen = list[bool]()

    class Watched(asyncio.Future[JobResult]):
        def cancel(self, msg: object = None) -> bool:
            other = threading.Thread(target=lambda: seen.append(engine._wake.acquire(blocking=False)))
            other.start()
            other.join()
            return super().cancel(msg)

    engine, cache = Engine(model), model.new_cache(60)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_future", Watched, raising=False)
    running = engine.submit(Job(cache, WHOLE, 0, ids=[5] * 50))
    engine.drop(cache)
    assert running.cancelled() and seen == [False]


async def test_a_closed_session_s_memory_is_free_while_the_engine_has_nothing_to_do(model: SpanModel) -> None:
    engine = Engine(model)
    engine.start()
    cache = model.new_cache(60)
    await engine.submit(Job(cache, WHOLE, 0, ids=[5] * 20))
    engine.drop(cache)
    held = weakref.ref(cache)
    del cache
    async with asyncio.timeout(30.0):
        while held() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)  # the engine leaves the turn a moment after its answer; no event says so
    await engine.stop()


async def test_the_forward_pass_is_told_apart_from_the_rest_of_a_turn(
    model: SpanModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a clock that moves only in the model and while an id is drawn."""
    draw = engine_module._draw
    now = 0.0

    class Timed(Faulty):
        def forward(self, step: PackedStep) -> StepOutput:
            nonlocal now
            now += 2.0
            return SpanModel.forward(self, step)

    def slow(row: Any, ask: SampleAt) -> Any:
        nonlocal now
        now += 0.5
        return draw(row, ask)

    monkeypatch.setattr(engine_module, "_draw", slow)
    caplog.set_level("INFO")
    engine = Engine(Timed(model), clock=lambda: now)
    engine.start()
    await generate(engine, prompt(1, 4), 5)
    await engine.stop()
    stats = engine.stats
    assert (stats.turns, stats.forward_s, stats.turns_s, stats.lingered_s) == (5, 10.0, 12.5, 0.0)
    assert "8 tokens in 5 turns of 2500.0 ms, 80.0 % of it in the forward pass" in caplog.text


async def test_a_model_whose_positions_depend_on_the_batch_runs_alone(model: SpanModel) -> None:
    faulty = Faulty(model)
    faulty.way = Way.ALONE
    engine = Engine(faulty, EngineConfig(batch=BatchConfig(rows=8)))
    await both_at_once(engine, *(Job(model.new_cache(4), WHOLE, 0, ids=[5]) for _ in range(2)))
    await engine.stop()
    assert faulty.calls == [1, 1]


async def test_functions_run_in_the_engines_thread_and_their_errors_come_back(engine: Engine) -> None:
    import threading

    assert await engine.call(lambda: threading.current_thread().name) == "engine"
    with pytest.raises(ZeroDivisionError):
        await engine.call(lambda: 1 // 0)


async def test_a_session_may_grow_between_steps(engine: Engine, uncut: PreTrainedModel) -> None:
    assert engine.model is not None
    sizes = KvSizes(tuple(engine.model.kv), item_bytes=4, context=64)
    pool = KvPool(sizes, WHOLE, sizes.bytes(64, WHOLE), dtype=torch.float32)
    cache, ids = pool.reserve("a", 6), prompt(6, 6)
    await engine.submit(Job(cache, WHOLE, 0, ids=ids))
    pool.extend("a", 20)
    result = await engine.submit(Job(cache, WHOLE, 6, ids=[9], sample=SampleAt(7, GREEDY, ())))
    assert result.token == reference(uncut, [*ids, 9], 1)[0]


def test_speed_is_fitted_to_what_steps_take(model: SpanModel) -> None:
    """With a clock that advances by a known law, the law comes back out."""
    cost = {"step": 0.010, "layer": 0.002, "embed": 0.001, "head": 0.005, "token": 0.0001}
    now = 0.0

    class Timed(Faulty):
        def forward(self, step: PackedStep) -> StepOutput:
            nonlocal now
            tokens, span = step.rows[0].tokens, step.span
            now += cost["step"] + cost["layer"] * len(span)
            now += cost["embed"] * (span.start == 0) + cost["head"] * (span.stop == LAYERS)
            now += cost["token"] * (tokens - 1) * len(span)
            self.poison = -1
            return super().forward(step)

    speed = measure_speed(Timed(model), clock=lambda: now)
    assert speed.step_s == pytest.approx(0.010) and speed.layer_s == pytest.approx(0.002)
    assert speed.embed_s == pytest.approx(0.001) and speed.head_s == pytest.approx(0.005)
    whole_prefill = 0.010 + 0.002 * LAYERS + 0.006 + 0.0001 * 127 * LAYERS
    assert speed.prefill_layer_s == pytest.approx(whole_prefill / 128 / LAYERS)


@pytest.mark.parametrize("span", [Span(0, 1), Span(2, 3), Span(4, 6)])
def test_speed_of_small_claims_is_positive_and_finite(span: Span, checkpoint: MemoryCheckpoint) -> None:
    speed = measure_speed(load_span(checkpoint, span, torch.float32))
    figures = dataclasses.astuple(speed)
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert speed.step_s + speed.layer_s > 0 and speed.prefill_layer_s > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
def test_workspace_is_measured_by_a_real_step(model: SpanModel) -> None:
    measured = measure_workspace(model, 64)
    assert measured is None or 0 <= measured < 64 << 20


def test_packing_joins_what_arrives_in_pieces(model: SpanModel) -> None:
    part = Span(2, 4)
    jobs = [Job(model.new_cache(3, part), part, 0, hidden=torch.full((n, 32), float(n))) for n in (1, 2)]
    step = pack(jobs)
    assert step.hidden is not None and step.hidden[:, 0].tolist() == [1.0, 2.0, 2.0]
    assert [row.tokens for row in step.rows] == [1, 2] and step.ids is None
