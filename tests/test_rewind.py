"""Answers that are taken back and changed while they are written, through real hops: with windows and without.

What is right comes from transformers on the same files. The windowed models see 8 positions, and their peers keep
8 + 80 + 8: texts of a few hundred positions are far longer than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.hop import HopConfig
from peer.kv import CREDIT, SPECULATION
from swarm import Completion, Generation
from swarm.driver import SessionDriver
from swarm.effects import Send
from swarm.errors import UsageError
from swarm.messages import Resume
from tests.tiny_swarm import CONTEXT, WITHIN_S, Oracle, Tiny, write_model

WINDOW, CHUNK = 8, 8
KEPT = WINDOW + CREDIT + SPECULATION + CHUNK
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "gpt_oss": {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"sliding_window": WINDOW, "head_dim": 8, "logit_scale": 1.0, "tie_word_embeddings": False},
}
SPANS = {"a": "0:1", "b": "1:2", "c": "2:6"}
WINDOWED_LAYERS = {"mistral": (1, 1, 4), "gemma3_text": (1, 1, 3), "gpt_oss": (1, 0, 2), "cohere2": (1, 1, 3)}
PROMPT = "The quick brown fox jumps over the lazy dog, and nobody minds. "
POSITION = 2 * (8 + 8) * 4  # bytes of a layer's position: two heads, keys and values, float32


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each hop could keep when it was resumed, in the order of all epochs and their chains."""
    noted, plain = list[int](), SessionDriver._perform

    def perform(self: SessionDriver, effect: object) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Resume):
            noted.append(effect.message.have)
        plain(self, effect)

    monkeypatch.setattr(SessionDriver, "_perform", perform)
    return noted


async def read(answer: Generation, tokens: int) -> list[int]:
    """At least so many ids of it."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += (await anext(answer)).token_ids
    return ids


async def rest(answer: Generation) -> Completion:
    async for _ in answer:
        pass
    assert answer.result is not None
    return answer.result


# ---------------------------------------------------------------- with windows


# the others differ in what tests/test_windows.py checks of each
IN_SHORT = ("gpt_oss", "mistral")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=() if kind in IN_SHORT else pytest.mark.long) for kind in sorted(FAMILIES)
    ],
)
def windowed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = request.param
    folder = write_model(
        tmp_path_factory.mktemp("windowed") / kind, seed=6, eos=(3,), kind=kind, shape=FAMILIES[kind]
    )
    swarm = tiny.new_swarm()
    config = HopConfig(prefill_chunk=CHUNK, lease_s=3600.0, grace_after_s=3600.0)
    swarm.start_all(folder, SPANS, config=config)
    yield swarm, Oracle(folder), WINDOWED_LAYERS[kind]
    swarm.close()


async def test_an_edited_answer_is_what_the_model_makes_of_the_edited_text(
    windowed: Any, tiny: Tiny, resumed: list[int]
) -> None:
    """Within R no hop begins anew; far beyond it each one with a window does. The text is right both times."""
    swarm, oracle, windows = windowed
    prompt, no, again = (oracle.raw_ids(text) for text in (PROMPT, " no, wait:", " again!"))
    no, again = no[1:], again[1:]  # without what every text begins with
    async with tiny.client(swarm) as client:
        answer = client.stream(PROMPT, raw=True, max_tokens=220, temperature=0)
        first = await read(answer, 12)
        positions = len(prompt) + 220
        for peer, layers, few in zip(swarm.peers.values(), (1, 1, 4), windows, strict=True):
            (run,) = swarm.call(lambda peer=peer: list(peer.server.runs))
            kept = few * KEPT + (layers - few) * positions
            assert swarm.call(lambda peer=peer, run=run: peer.pool.cache(run).nbytes) == kept * POSITION
            assert swarm.call(lambda peer=peer: peer.pool.ledger.used) == kept * POSITION + positions * 32 * 4

        text = await answer.rewind(8, " no, wait:")
        assert text == oracle.text(first[:8]) + " no, wait:"
        second = await read(answer, 90)
        await answer.rewind(3, " again!", max_tokens=40)
        done = await rest(answer)
    assert [have > 0 for have in resumed] == [False] * 3 + [True] * 3 + [few == 0 for few in windows]
    ids = [*prompt, *first[:8], *no, *second]
    assert oracle.follows(ids, len(ids) - len(second))
    assert list(done.token_ids[: 3 + len(again)]) == first[:3] + again
    assert oracle.follows([*prompt, *done.token_ids], len(prompt) + 3 + len(again))
    assert done.text == oracle.text(done.token_ids) and done.usage.completion_tokens == 40
    assert done.repairs == () and [hop.name for hop in done.hops] == list(SPANS)
    await swarm.emptied()


# ---------------------------------------------------------------- what callers meet


async def test_a_complete_answer_is_rewound_on_a_new_chain(tiny: Tiny) -> None:
    prompt = tiny.oracle.chat_ids("Hello there.")
    async with tiny.client(chain="three") as client:
        answer = client.stream("Hello there.", max_tokens=20)
        done = await rest(answer)
        assert answer.over
        text = await answer.rewind(10, " But then", max_tokens=60)
        assert not answer.over and answer.result is None
        edited = await rest(answer)
    but = tiny.oracle.raw_ids(" But then")[1:]
    assert list(edited.token_ids[: 10 + len(but)]) == [*done.token_ids[:10], *but]
    right = tiny.oracle.greedy([*prompt, *done.token_ids[:10], *but], 50 - len(but))
    assert list(edited.token_ids[10 + len(but) :]) == right
    assert edited.text.startswith(text) and edited.text == tiny.oracle.text(edited.token_ids)
    assert edited.usage.prompt_tokens == len(prompt)
    await tiny.swarm.emptied()


async def test_ids_that_arrived_and_were_not_read_are_void_after_a_rewind(tiny: Tiny) -> None:
    prompt, but = tiny.oracle.chat_ids("Hello there."), tiny.oracle.raw_ids(" But")[1:]
    async with tiny.client(chain="three") as client:
        answer = client.stream("Hello there.", max_tokens=200)
        first = await read(answer, 2)
        assert answer._progress is not None
        driver = answer._progress.driver
        async with asyncio.timeout(WITHIN_S):
            while not driver.arrived:
                await driver.news()
        await answer.rewind(1, " But", max_tokens=30)
        done = await rest(answer)
    right = tiny.oracle.greedy([*prompt, first[0], *but], 29 - len(but))
    assert list(done.token_ids) == [first[0], *but, *right]
    assert done.text == tiny.oracle.text(done.token_ids)
    await tiny.swarm.emptied()


async def test_a_rewound_answer_may_become_longer_than_its_peers_had_reserved(tiny: Tiny) -> None:
    prompt, more = tiny.oracle.chat_ids("Hello there."), tiny.oracle.raw_ids("more")[1:]
    async with tiny.client(chain="three") as client:
        answer = client.stream("Hello there.", max_tokens=80)
        first = await read(answer, 4)
        await answer.rewind(2, "more", max_tokens=120)
        await read(answer, 1)
        reserved = tiny.swarm.call(
            lambda: [
                run.core._reserved for name in "abc" for run in tiny.swarm.peers[name].server.runs.values()
            ]
        )
        assert reserved == [len(prompt) + 120] * 3
        done = await rest(answer)
    assert list(done.token_ids) == first[:2] + more + tiny.oracle.greedy([*prompt, *first[:2], *more], 118 - len(more))
    await tiny.swarm.emptied()


async def test_an_impossible_rewind_is_refused_and_changes_nothing(tiny: Tiny) -> None:
    right = tiny.oracle.greedy(tiny.oracle.chat_ids("Hello there."), 50)
    async with tiny.client(chain="one") as client:
        answer = client.stream("Hello there.", max_tokens=50, stop=["NEVER"])
        with pytest.raises(UsageError, match="hasn't begun"):
            await answer.rewind(0)
        read_ids = await read(answer, 5)
        for tokens, text, most, why in (
            (-1, "", None, "can't keep -1 tokens"),
            (len(read_ids) + 1, "", None, f"of which {len(read_ids)} were read"),
            (3, "never mind, NEVER", None, "stop string"),
            (3, "x" * 60, None, "leave nothing to go on with, max_tokens is 50"),
            (3, "", 3, "leave nothing"),
            (3, "", 2 * CONTEXT, f"the chain's context is {CONTEXT}"),
        ):
            with pytest.raises(UsageError, match=why):
                await answer.rewind(tokens, text, max_tokens=most)
        assert list((await rest(answer)).token_ids) == right
        logged = client.stream("Hello there.", max_tokens=50, logprobs=0)
        await read(logged, 3)
        with pytest.raises(UsageError, match="has no logprobs"):
            await logged.rewind(2, "but")
        await logged.rewind(2)
        again = await rest(logged)
        assert list(again.token_ids) == right and again.logprobs is not None
        assert [one.id for one in again.logprobs] == right
        await logged.aclose()
        left = client.stream("Hello there.", max_tokens=50)
        await read(left, 1)
        await left.aclose()
        with pytest.raises(UsageError, match="it was left"):
            await left.rewind(0)
    await tiny.swarm.emptied()


def test_without_an_event_loop_another_loop_goes_on_after_a_rewind(tiny: Tiny) -> None:
    prompt = tiny.oracle.chat_ids("Hello there.")
    but = tiny.oracle.raw_ids(" But")[1:]
    with tiny.blocking_client(chain="three") as client:
        answer = client.stream("Hello there.", max_tokens=40)
        first = next(answer).token_ids
        answer.rewind(1, " But")
        for _ in answer:
            pass
    assert answer.result is not None
    right = tiny.oracle.greedy([*prompt, first[0], *but], 39 - len(but))
    assert list(answer.result.token_ids) == [first[0], *but, *right]
    tiny.swarm.empty()


# ---------------------------------------------------------------- positions scaled by the session's length

ORIGINAL = 96  # positions: in a longer session all are encoded otherwise
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip


async def test_an_answer_that_outgrows_the_original_context_is_computed_anew(tiny: Tiny, tmp_path: Path) -> None:
    """Its numbers are transformers' own for a text as long as what is reserved, from its first token on."""
    shape = {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "phi3", seed=6, eos=(3,), kind="phi3", shape=shape)
    oracle, swarm = Oracle(folder), tiny.new_swarm()
    prompt, more = oracle.raw_ids("The quick brown fox"), oracle.raw_ids("more")[1:]
    swarm.start_all(folder, {"a": "0:2", "b": "2:6"})
    async with tiny.client(swarm) as client:
        answer = client.stream("The quick brown fox", raw=True, max_tokens=90 - len(prompt), temperature=0)
        first = await read(answer, 20)
        await answer.rewind(10, "more", max_tokens=140)
        done = await rest(answer)
    ids = [*prompt, *done.token_ids]
    assert list(done.token_ids[: 10 + len(more)]) == first[:10] + more
    reserved = len(prompt) + 140
    assert oracle.follows([*prompt, *first] + [5] * (90 - len(prompt) - len(first)), len(prompt), len(prompt) + 20)
    assert oracle.follows(ids + [5] * (reserved - len(ids)), len(prompt) + 10 + len(more), len(ids))
    await swarm.emptied()
    swarm.close()
