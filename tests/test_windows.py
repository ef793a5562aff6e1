"""Layers that attend to a window keep no more than they need, and give the numbers of the uncut model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from peer.attention import Row
from peer.batch import BatchConfig
from peer.cache import KvPool, SessionCache
from peer.engine import Engine, EngineConfig, Job
from peer.families import Way
from peer.hop_effects import SampleAt
from peer.kv import KvSizes, LayerKV, Reach, Rewinds
from peer.model import PackedStep, SpanModel, StepOutput
from peer.outline import outline
from peer.weights import load_span
from routing.spans import Span
from swarm.errors import CacheFull, CannotRewind
from swarm.messages import Sampling
from tests.tiny import COMMON, LAYERS, MemoryCheckpoint

torch.set_num_threads(1)
TOLERANCE = 1e-4  # float32; the shapes of the products differ, so the sums are ordered differently
REACH = Reach(rewind=3, chunk=4)
WINDOW = 6  # far shorter than the texts, and than some of the steps
KEPT = WINDOW + 3 + 4
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere2": ("cohere2", {"head_dim": 16, "sliding_window": WINDOW}),
    "llama4": (  # chunks rather than windows
        "llama4_text",
        {"attention_chunk_size": WINDOW, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 48}
        | {"attn_temperature_tuning": True, "floor_scale": 8},
    ),
}
# of 6 layers, by their papers
WINDOWED = {"mistral": 6, "gemma2": 3, "gemma3": 5, "gpt-oss": 3, "cohere2": 5, "llama4": 5}


@functools.cache
def uncut(family: str) -> PreTrainedModel:
    kind, differs = OWN[family]
    torch.manual_seed(11)
    made = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**{**COMMON, **differs}), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.15) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval()


@functools.cache
def hops(family: str) -> list[SpanModel]:
    checkpoint = MemoryCheckpoint(uncut(family))
    made = [load_span(checkpoint, Span(a, b), torch.float32) for a, b in ((0, 1), (1, 4), (4, LAYERS))]
    checkpoint.close()
    return made


def right(family: str, ids: Sequence[int]) -> torch.Tensor:
    """Logits of the uncut model at every position."""
    with torch.inference_mode():
        return uncut(family)(torch.tensor([list(ids)]), use_cache=False).logits[0]


@dataclass
class Session:
    """One text and its KV at each hop."""

    family: str
    ids: list[int]
    at: int = 0
    caches: list[SessionCache] = field(default_factory=list)

    reach: Reach = REACH

    def __post_init__(self) -> None:
        self.caches = [hop.new_cache(150, reach=self.reach) for hop in hops(self.family)]


def step(sessions: Sequence[Session], counts: Sequence[int]) -> list[torch.Tensor]:
    """Run the next `counts[i]` ids of each session as one packed step. Their logits, session by session."""
    new = [session.ids[session.at : session.at + n] for session, n in zip(sessions, counts, strict=True)]
    hidden, ids = None, torch.tensor([i for row in new for i in row])
    for number, hop in enumerate(hops(sessions[0].family)):
        rows = [Row(s.caches[number], s.at, len(n), logits=len(n)) for s, n in zip(sessions, new, strict=True)]
        for row in rows:
            row.cache.begin(row.position, row.tokens)
        out = hop.forward(PackedStep(hop.span, rows, ids=ids, hidden=hidden))
        for row in rows:
            row.cache.finish(row.position + row.tokens)
        hidden = out.hidden
    for session, n in zip(sessions, new, strict=True):
        session.at += len(n)
    assert out.logits is not None
    return list(out.logits.split([len(n) for n in new]))


def text(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + 7 * i + i * i) % 90 for i in range(length)]


def check(session: Session, logits: torch.Tensor) -> None:
    """The newest of a session's logits against the uncut model."""
    expected = right(session.family, session.ids[: session.at])[-len(logits) :]
    assert (logits - expected).abs().max() < TOLERANCE, f"{session.family} at {session.at}"
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", sorted(OWN))
def test_long_texts_of_many_sessions_are_exact_and_their_memory_is_bounded(family: str) -> None:
    """Steps of one position, of a chunk, and of more than window and chunk together, in any order."""
    sessions = [Session(family, text(seed, 100)) for seed in range(3)]
    for counts in ((20, 1, 9), (1, 1, 30), (4, 19, 1), *((1, 1, 1),) * 9, (3, 30, 2), (25, 1, 4), (2, 3, 1)):
        for session, logits in zip(sessions, step(sessions, counts), strict=True):
            check(session, logits)
    kept = [layer.room for cache in sessions[0].caches for layer in cache.layers]
    assert sorted(kept) == [KEPT] * WINDOWED[family] + [150] * (LAYERS - WINDOWED[family])
    kv = hops(family)[0].kv[0]
    per_position = kv.heads * (kv.key_dim + kv.value_dim) * 4
    held = sum(cache.nbytes for cache in sessions[0].caches)
    assert held == (WINDOWED[family] * KEPT + (LAYERS - WINDOWED[family]) * 150) * per_position


@pytest.mark.parametrize("family", ["mistral", "gpt-oss", "llama4"])
def test_prefill_chunks_longer_than_the_window_are_exact(family: str) -> None:
    """Written in one piece: the first of them sees only its own keys, and not all of those."""
    session = Session(family, text(8, 70), reach=Reach(rewind=3, chunk=20))
    for count in (20, 20, 1, 20, 9):
        check(session, step([session], [count])[0])


@pytest.mark.parametrize("family", sorted(OWN))
def test_a_rewind_within_r_is_exact_and_one_beyond_is_refused_until_all_is_computed_again(family: str) -> None:
    session = Session(family, text(5, 60))
    for _ in range(10):
        step([session], [4])
    session.at -= 4 + REACH.rewind  # what was written last, and what may be taken back before it
    session.ids[session.at :] = text(6, 20)
    check(session, step([session], [3])[0])
    check(session, step([session], [1])[0])

    for _ in range(4):
        step([session], [4])
    before = [cache.length for cache in session.caches]
    session.ids[session.at - 12 :] = text(7, 20)
    for cache in session.caches:
        if any(kv.window for kv in (layer.kv for layer in cache.layers)):
            with pytest.raises(CannotRewind, match=rf"it may start at {cache.oldest} or later, or at 0") as caught:
                cache.begin(session.at - 12, 1)
            assert caught.value.oldest == cache.oldest > session.at - 12
    assert [cache.length for cache in session.caches] == before, "a refused rewind changed something"

    session.at = 0
    for count in (20, 1, 19):
        check(session, step([session], [count])[0])


def test_windows_are_found_in_every_way_that_a_config_says_them() -> None:
    found = {family: [layer.window for hop in hops(family) for layer in hop.kv] for family in OWN}
    w, n = WINDOW, None
    assert found == {
        "mistral": [w, w, w, w, w, w],
        "gemma2": [w, n, w, n, w, n],
        "gemma3": [w, w, w, w, w, n],
        "gpt-oss": [w, n, w, n, w, n],
        "cohere2": [w, w, w, n, w, w],
        "llama4": [w, w, w, n, w, w],
    }


async def test_steps_longer_than_a_chunk_run_in_pieces_and_again_where_a_pass_failed() -> None:
    """No pass moves a window past what a step that may have to run again, or be taken back, sees first."""
    checkpoint = MemoryCheckpoint(uncut("mistral"))
    model = load_span(checkpoint, Span(0, LAYERS), torch.float32)
    checkpoint.close()
    plain, calls = model.forward, list[list[int]]()

    def failing(step: PackedStep) -> StepOutput:
        calls.append([row.tokens for row in step.rows])
        made = plain(step)
        if len(step.rows) > 1:
            raise RuntimeError("out of memory after the last layer")
        return made

    model.forward = failing  # type: ignore[method-assign]
    ids = text(1, 40)
    engine, long, short = Engine(model), *(model.new_cache(60, reach=REACH) for _ in range(2))
    for cache in (long, short):
        for at in range(0, 20, 4):
            cache.begin(at, 4)
            plain(PackedStep(model.span, [Row(cache, at, 4)], ids=torch.tensor(ids[at : at + 4])))
            cache.finish(at + 4)
    ask = [SampleAt(stop, Sampling(), ()) for stop in (40, 30)]
    jobs = [Job(long, model.span, 20, ids=ids[20:40], sample=ask[0])]
    jobs += [Job(short, model.span, 20, ids=ids[20:30], sample=ask[1])]
    futures = [engine.submit(job) for job in jobs]
    engine.start()
    results = await asyncio.gather(*futures)
    await engine.stop()
    expected = right("mistral", ids).argmax(-1)
    assert [result.token for result in results] == [expected[39], expected[29]]
    assert calls[:6] == [[4, 4], [4], [4], [4, 4], [4], [4]] and calls[-2:] == [[4], [4]]


@pytest.mark.parametrize("family", ["mistral", "llama4"])
async def test_windows_keep_what_a_rewind_needs_however_a_chunk_is_cut_into_pieces(family: str) -> None:
    """Pieces of 3 of a chunk of 8, then back by as much as is promised from the newest chunk's start."""
    checkpoint = MemoryCheckpoint(uncut(family))
    model = load_span(checkpoint, Span(0, LAYERS), torch.float32)
    checkpoint.close()
    reach, ids = Reach(rewind=5, chunk=8), text(2, 60)
    expected = right(family, ids).argmax(-1)
    engine = Engine(model, EngineConfig(batch=BatchConfig(prefill_tokens=3)))
    engine.start()
    for begin in range(1, 9):  # wherever a chunk begins, and a window is full
        cache = model.new_cache(60, reach=reach)
        back = Rewinds.over(tuple(layer.kv for layer in cache.layers), reach)
        for at, tokens in ((0, begin), (begin, 9), (begin + 9, 16), (begin + 25, 8)):
            back.wrote(at, tokens)
            await engine.submit(Job(cache, model.span, at, ids=ids[at : at + tokens]))
        assert back.oldest == begin + 25 - reach.rewind
        stop = back.oldest + 9
        ask = SampleAt(stop, Sampling(), ())
        result = await engine.submit(Job(cache, model.span, back.oldest, ids=ids[back.oldest : stop], sample=ask))
        assert result.token == expected[stop - 1]
    with pytest.raises(CacheFull):  # told before its first piece has run
        await engine.submit(Job(cache, model.span, stop, ids=[5] * (61 - stop)))
    assert cache.length == stop
    await engine.stop()


# ---------------------------------------------------------------- the store alone


KV = LayerKV(1, 1, 1, window=5)
CHUNKED = LayerKV(1, 1, 1, window=5, chunked=True)
FULL = LayerKV(1, 1, 1)
WIDE = LayerKV(1, 1, 1, window=9)


class Numbered:
    """A cache in which each position's key is a number of its own, and what has to be seen is counted by hand."""

    def __init__(self, layers: Sequence[LayerKV], positions: int, reach: Reach) -> None:
        self.cache = SessionCache(Span(0, len(layers)), layers, positions, dtype=torch.float32, reach=reach)
        self.back = Rewinds.over(tuple(layers), reach)
        self.truth: list[float] = []
        self.written = 0

    def run(self, position: int, tokens: int, finished: bool = True, upto: int | None = None) -> None:
        """upto: the step breaks after so many layers."""
        self.back.wrote(position, tokens)
        self.cache.begin(position, tokens)
        numbers = [float(self.written + i) for i in range(tokens)]
        self.written += tokens
        seen = self.truth[:position] + numbers
        for layer in self.cache.layers[:upto]:
            for a, b in layer.pieces(tokens):
                key = torch.tensor(numbers[a:b])[None, None, :, None]
                keys, values = layer.write(position + a, key, -key)
                first = _first_seen(layer.kv, position + a)
                assert keys[0, 0, :, 0].tolist() == seen[first : position + b]
                assert values[0, 0, :, 0].tolist() == [-number for number in seen[first : position + b]]
        del self.truth[position:]
        if finished:
            self.cache.finish(position + tokens)
            self.truth = seen


def _first_seen(kv: LayerKV, position: int) -> int:
    seen = [p for p in range(position + 1) if kv.window is None or (
        p // kv.window == position // kv.window if kv.chunked else position - p < kv.window
    )]  # fmt: skip
    return seen[0]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([KV, CHUNKED, FULL, WIDE]), min_size=1, max_size=4),
    st.builds(Reach, rewind=st.integers(0, 5), chunk=st.integers(1, 5)),
    st.data(),
)
def test_a_step_sees_what_it_must_wherever_a_session_is_cut(
    layers: list[LayerKV], reach: Reach, data: st.DataObject
) -> None:
    """Steps of any length, some broken off, at any place that `Rewinds` allows."""
    made = Numbered(layers, 80, reach)
    for _ in range(data.draw(st.integers(1, 25))):
        length = len(made.truth)
        allowed = [p for p in range(length + 1) if made.back.allows(p)]
        position = data.draw(st.sampled_from(allowed[-12:] + allowed[:1]))
        tokens = data.draw(st.integers(1, max(1, min(12, 80 - position))))
        if position + tokens > 80:
            continue
        broken = data.draw(st.booleans())
        made.run(position, tokens, finished=not broken, upto=data.draw(st.integers(0, 4)) if broken else None)


def test_keys_stay_one_run_of_memory_and_are_moved_once_in_a_chunk() -> None:
    made = Numbered([KV], 500, Reach(rewind=8, chunk=32))
    moves, base = 0, 0
    for position in range(400):
        made.run(position, 1)
        moves, base = moves + (made.cache.layers[0].base != base), made.cache.layers[0].base
    assert moves <= 400 // 32
    assert made.cache.nbytes == 2 * 4 * (5 + 8 + 32)


def test_a_session_grows_from_less_than_its_windows_to_more() -> None:
    sizes = KvSizes((KV, FULL), 4, context=300, reach=Reach(rewind=3, chunk=4))
    pool = KvPool(sizes, Span(0, 2), 10_000, dtype=torch.float32)
    made = Numbered((KV, FULL), 8, sizes.reach)
    made.cache = pool.reserve("a", 8)
    made.run(0, 8)
    for positions in (11, 60, 200):
        before = pool.ledger.used
        pool.extend("a", positions)
        assert pool.ledger.used - before == sizes.bytes(positions, Span(0, 2)) - before
        while made.cache.length < positions:
            made.run(made.cache.length, min(3, positions - made.cache.length))
        assert made.cache.nbytes == pool.ledger.used == 2 * 4 * (min(positions, 12) + positions)


def test_a_step_that_a_window_is_too_short_for_is_our_own_mistake() -> None:
    made = Numbered([KV], 40, Reach(rewind=0, chunk=2))
    for position in range(0, 30, 2):
        made.run(position, 2)
    with pytest.raises(AssertionError, match="position 16 is attended to, but what lies before 23 is gone"):
        made.cache.layers[0].write(20, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))




@pytest.mark.parametrize(
    ("kind", "differs", "way", "windows"),
    [
        ("llama", {"sliding_window": 6}, Way.PACKED, [None] * 6),  # named by a config, heeded by no code
        ("qwen2", {"sliding_window": 6, "use_sliding_window": False}, Way.PACKED, [None] * 6),
        (
            "qwen2",
            {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 4},
            Way.PACKED,
            [None] * 4 + [6] * 2,
        ),
        ("phimoe", {"sliding_window": 6, "num_local_experts": 4}, Way.PACKED, [6] * 6),  # in its masks alone
        ("olmoe", {"sliding_window": 6, "num_experts": 4}, Way.OWN_CACHE, [None] * 6),  # not in its masks
    ],
)
def test_a_window_counts_where_the_masks_of_the_family_have_it(
    kind: str, differs: dict[str, Any], way: Way, windows: list[int | None]
) -> None:
    plan = outline(CONFIG_MAPPING[kind](**{**COMMON, **differs}))
    assert (plan.way, [kv.window for kv in plan.kv]) == (way, windows)
