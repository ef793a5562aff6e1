"""The public clients on real swarms of tiny models: prompts, models, options, threads, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from peer.source import ModelSource
from swarm import AsyncClient, Client
from swarm.bundles import Bundles
from swarm.client import join_addresses
from swarm.errors import (
    AmbiguousModel,
    GenerationFailed,
    MessageError,
    NoRoute,
    PromptTooLong,
    UnknownModel,
    Unreachable,
    UsageError,
)
from tests.tiny_swarm import CONTEXT, DEFAULTS, WITHIN_S, Oracle, Tiny, TinySwarm

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "Nobody."},
    {"role": "user", "content": "thé?"},
]


# ---------------------------------------------------------------- prompts


async def test_a_string_is_one_user_message(tiny: Tiny) -> None:
    right = tiny.oracle.greedy(tiny.oracle.chat_ids("Why?"), 24)
    async with tiny.client(chain="one") as client:
        text = await client.generate("Why?", max_tokens=24)
        message = await client.generate([{"role": "user", "content": "Why?"}], max_tokens=24)
    assert list(text.token_ids) == list(message.token_ids) == right
    assert text.usage.prompt_tokens == len(tiny.oracle.chat_ids("Why?"))


async def test_messages_are_rendered_as_apply_chat_template_does(tiny: Tiny) -> None:
    ids = tiny.oracle.chat_ids(CHAT)
    async with tiny.client(chain="one") as client:
        answer = await client.generate(CHAT, max_tokens=24)
    assert answer.usage.prompt_tokens == len(ids)
    assert list(answer.token_ids) == tiny.oracle.greedy(ids, 24)


async def test_special_tokens_are_not_added_twice(tiny: Tiny) -> None:
    """Template and tokenizer both begin with <s>: a chat has one, and so has a raw prompt."""
    assert tiny.oracle.chat_ids("Why?").count(1) == tiny.oracle.raw_ids("Why?").count(1) == 1
    async with tiny.client(chain="one") as client:
        chat = await client.generate("Why?", max_tokens=1)
        raw = await client.generate("Why?", max_tokens=24, raw=True)
    assert chat.usage.prompt_tokens == len(tiny.oracle.chat_ids("Why?"))
    assert raw.usage.prompt_tokens == len(tiny.oracle.raw_ids("Why?"))
    assert list(raw.token_ids) == tiny.oracle.greedy(tiny.oracle.raw_ids("Why?"), 24) and raw.notes == ()


async def test_a_model_without_a_template_behaves_as_raw_and_says_so(tiny: Tiny) -> None:
    oracle = Oracle(tiny.bare)
    async with tiny.client(tiny.mixed, model="bare") as client:
        answer = await client.generate("Why?", max_tokens=24, temperature=0)
        raw = await client.generate("Why?", max_tokens=24, temperature=0, raw=True)
    assert list(answer.token_ids) == list(raw.token_ids) == oracle.greedy(oracle.raw_ids("Why?"), 24)
    assert len(answer.notes) == 1 and "template" in answer.notes[0]
    assert raw.notes == ()


@pytest.mark.parametrize(
    "prompt", [[], [{"role": "user"}], [{"content": "x"}], ["x"], 5, [{"role": 1, "content": ""}]]
)
async def test_a_prompt_that_is_none_is_refused(tiny: Tiny, prompt: Any) -> None:
    async with tiny.client(chain="one") as client:
        with pytest.raises(UsageError):
            await client.generate(prompt, max_tokens=4)
    assert tiny.swarm.held() == {}


async def test_messages_with_raw_are_refused(tiny: Tiny) -> None:
    async with tiny.client(chain="one") as client:
        with pytest.raises(UsageError, match="raw prompt is a string"):
            await client.generate(CHAT, raw=True)


# ---------------------------------------------------------------- sampling, lengths


async def test_what_isnt_given_follows_the_generation_config(tiny: Tiny) -> None:
    async with tiny.client(tiny.mixed, model="bare") as client:
        default = await client.generate("Why?", max_tokens=40, seed=3)
        given = await client.generate("Why?", max_tokens=40, seed=3, **DEFAULTS)
        greedy = await client.generate("Why?", max_tokens=40, seed=3, temperature=0)
        hotter = await client.generate("Why?", max_tokens=40, seed=3, temperature=1.5)
    assert default.token_ids == given.token_ids
    assert len({default.token_ids, greedy.token_ids, hotter.token_ids}) == 3


async def test_a_top_k_of_one_is_greedy(tiny: Tiny) -> None:
    async with tiny.client(chain="one") as client:
        answer = await client.generate("Why?", max_tokens=24, temperature=1.0, top_k=1)
    assert list(answer.token_ids) == tiny.oracle.greedy(tiny.oracle.chat_ids("Why?"), 24)


async def test_a_repetition_penalty_and_a_bias_are_those_of_transformers(tiny: Tiny) -> None:
    prompt = tiny.oracle.chat_ids("Why?")
    ids = torch.tensor([prompt])
    plain = tiny.oracle.greedy(prompt, 24)
    with torch.inference_mode():
        out = tiny.oracle.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
            repetition_penalty=1.8, sequence_bias={(plain[0],): -100.0},
        )  # fmt: skip
    right = out[0, len(prompt) :].tolist()
    async with tiny.client(chain="three") as client:
        answer = await client.generate(
            "Why?", max_tokens=24, temperature=0, repetition_penalty=1.8, logit_bias={plain[0]: -100}
        )
    assert list(answer.token_ids) == right and right != plain


async def test_presence_and_frequency_leave_the_prompt_alone(tiny: Tiny) -> None:
    """Greedy, with transformers' logits and the penalties by hand."""
    ids = tiny.oracle.chat_ids("Why?")
    start, right = len(ids), list[int]()
    with torch.inference_mode():
        for _ in range(16):
            logits = tiny.oracle.model(torch.tensor([ids + right])).logits[0, -1].double()
            for token in set(right):
                logits[token] -= 0.4 + 0.3 * right.count(token)
            right.append(int(logits.argmax()))
    async with tiny.client(chain="three") as client:
        answer = await client.generate(
            "Why?", max_tokens=16, temperature=0, presence_penalty=0.4, frequency_penalty=0.3
        )
    plain = tiny.oracle.greedy(ids[:start], 16)
    assert list(answer.token_ids) == right[: len(answer.token_ids)] and right != plain


async def test_logprobs_are_those_of_transformers_model(tiny: Tiny) -> None:
    async with tiny.client(chain="three") as client:
        pieces = [piece async for piece in client.stream("Why?", max_tokens=12, temperature=1.3, seed=2, logprobs=4)]
        none = await client.generate("Why?", max_tokens=3)
    answer = pieces[-1].final
    assert answer is not None and answer.logprobs is not None and none.logprobs is None
    ids = tiny.oracle.chat_ids("Why?") + list(answer.token_ids)
    with torch.inference_mode():
        logits = tiny.oracle.model(torch.tensor([ids])).logits[0].double()
    right = torch.log_softmax(logits, -1)[-len(answer.token_ids) - 1 : -1]
    for row, said in zip(right, answer.logprobs, strict=True):
        top = row.topk(4)
        assert said.logprob == pytest.approx(row[said.id].item(), abs=1e-4)
        assert [one.id for one in said.top] == top.indices.tolist()
        assert [one.logprob for one in said.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert said.text == tiny.oracle.tokenizer.decode([said.id])
    assert [one.id for one in answer.logprobs] == list(answer.token_ids)
    assert [one for piece in pieces for one in piece.logprobs or ()] == list(answer.logprobs)


async def test_several_answers_are_those_of_their_seeds(tiny: Tiny) -> None:
    options = {"max_tokens": 12, "temperature": 1.0}
    async with tiny.client(chain="three") as client:
        many = await client.generate_many("Why?", 3, seed=40, **options)
        alone = [await client.generate("Why?", seed=seed, **options) for seed in (40, 41, 42)]
    assert [one.token_ids for one in many] == [one.token_ids for one in alone]
    assert [one.seed for one in many] == [40, 41, 42]
    assert len({one.token_ids for one in many}) == 3
    assert tiny.swarm.held() == {}


async def test_when_one_of_several_answers_fails_its_error_is_raised(tiny: Tiny) -> None:
    async with tiny.client(chain="one") as client:
        with pytest.raises(PromptTooLong):
            await client.generate_many("a" * (CONTEXT + 5), 3)
    assert tiny.swarm.held() == {}


async def test_a_bias_of_an_id_that_the_model_lacks_is_refused(tiny: Tiny) -> None:
    vocabulary = tiny.oracle.model.config.vocab_size
    async with tiny.client(chain="one") as client:
        with pytest.raises(UsageError, match=f"the id {vocabulary}, the model's go from 0 to {vocabulary - 1}"):
            await client.generate("Why?", logit_bias={vocabulary: 1.0})


async def test_max_tokens_beyond_the_context_is_cut_with_a_note(tiny: Tiny) -> None:
    prompt = "a" * (CONTEXT - 60)
    length = len(tiny.oracle.chat_ids(prompt))
    async with tiny.client(chain="one") as client:
        answer = await client.generate(prompt, max_tokens=500)
        default = await client.generate(prompt)
    left = CONTEXT - length
    assert answer.usage.completion_tokens == left and answer.finish_reason == "length"
    assert list(answer.token_ids) == tiny.oracle.greedy(tiny.oracle.chat_ids(prompt), left)
    assert answer.notes == (f"max_tokens was cut from 500 to {left}: the chain's context is {CONTEXT}",)
    assert default.notes == (f"max_tokens was cut from 512 to {left}: the chain's context is {CONTEXT}",)


async def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sent(tiny: Tiny) -> None:
    prompt = "a" * (CONTEXT + 5)
    length = len(tiny.oracle.chat_ids(prompt))
    turns = tiny.swarm.peers["one"].engine.stats.turns
    async with tiny.client(chain="one") as client:
        with pytest.raises(PromptTooLong) as caught:
            await client.generate(prompt)
    assert (caught.value.tokens, caught.value.context) == (length, CONTEXT)
    assert f"shorten it by at least {length - CONTEXT + 1} tokens" in str(caught.value)
    assert tiny.swarm.held() == {} and tiny.swarm.peers["one"].engine.stats.turns == turns


async def test_the_chain_with_the_longest_context_counts(tiny: Tiny) -> None:
    peers = tiny.new_swarm()
    peers.start_all(tiny.model, {"short": "0:6"}, context=64)
    peers.start_all(tiny.model, {"long": "0:6"}, context=128)
    async with tiny.client(peers) as client:
        answer = await client.generate("a" * 80, max_tokens=500)
        assert [hop.name for hop in answer.hops] == ["long"]
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 128
        with pytest.raises(PromptTooLong, match="context is 128"):
            await client.generate("a" * 200)
    peers.close()


# ---------------------------------------------------------------- models


async def test_several_live_models_must_be_told_apart(tiny: Tiny) -> None:
    async with tiny.client(tiny.mixed) as client:
        with pytest.raises(AmbiguousModel) as caught:
            await client.generate("Why?")
        assert caught.value.choices == ("bare", "tiny")
        assert (await client.generate("Why?", max_tokens=4, model="tiny")).model == "tiny"
        with pytest.raises(UnknownModel, match=r"no peer serves 'gpt'; this swarm serves bare, tiny"):
            await client.generate("Why?", model="gpt")
        assert [status.name for status in await client.status()] == ["bare", "tiny"]
        assert [status.name for status in await client.status("bare")] == ["bare"]
    assert tiny.mixed.held() == {}


async def test_a_client_hears_of_the_models_that_it_uses_and_of_all_once_it_asks(tiny: Tiny) -> None:
    async with tiny.client(tiny.mixed) as client:
        assert client.peers() == ()  # two models, none named
        await client.generate("Why?", max_tokens=2, model="tiny")
        assert {entry.descriptor.model for entry in client.peers()} == {"tiny"}
        await client.generate("Why?", max_tokens=2, model="bare")
        assert {entry.descriptor.model for entry in client.peers()} == {"tiny", "bare"}
    async with tiny.client(tiny.mixed, model="bare") as client:
        assert {entry.descriptor.model for entry in client.peers()} == {"bare"}
        await client.status()
        assert {entry.descriptor.model for entry in client.peers()} == {"tiny", "bare"}


async def test_one_name_for_two_models_is_listed_with_their_hashes(tiny: Tiny) -> None:
    peers = tiny.new_swarm()
    peers.start_all(tiny.model, {"p": "0:6"}, served_name="same")
    peers.start_all(tiny.bare, {"q": "0:6"}, served_name="same")
    hashes = [peers.peers[name].source.fingerprint.hex()[:8] for name in "pq"]
    async with tiny.client(peers, model="same") as client:
        with pytest.raises(AmbiguousModel) as caught:
            await client.generate("Why?")
        assert set(caught.value.choices) == {f"same@{one}" for one in hashes}
        answer = await client.generate("Why?", max_tokens=8, model=f"same@{hashes[0]}")
    assert [hop.name for hop in answer.hops] == ["p"]
    peers.close()


async def test_a_gap_is_told_with_the_layers_that_nobody_serves(tiny: Tiny) -> None:
    peers = tiny.new_swarm()
    peers.start_all(tiny.model, {"left": "0:2", "right": "4:6"})
    async with tiny.client(peers) as client:
        with pytest.raises(NoRoute, match=r"layers 2-3 of tiny \(2 of 2 known .* --layers 2:4") as caught:
            await client.generate("Why?")
        (status,) = await client.status()
    assert status.problem == str(caught.value) and status.coverage == (1, 1, 0, 0, 1, 1)
    assert peers.held() == {}
    peers.close()


async def test_status_shows_every_peer_with_its_round_trip(tiny: Tiny) -> None:
    async with tiny.client() as client:
        (status,) = await client.status("tiny")
        assert len(client.peers()) == 9
    assert {peer.descriptor.name for peer in status.peers} == set(tiny.swarm.peers)
    assert status.coverage == (3,) * 6 and status.route is not None
    assert all(peer.rtt_s is not None and peer.rtt_s > 0 for peer in status.peers)


async def test_generations_that_begin_together_fetch_the_tokenizer_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    fetch = Bundles._files

    async def counted(self: Bundles, peer: Any, wanted: bytes) -> dict[str, bytes]:
        fetched.append(peer)
        return await fetch(self, peer, wanted)

    monkeypatch.setattr(Bundles, "_files", counted)
    async with tiny.client(chain="one") as client:
        await asyncio.gather(*(client.generate("Why?", max_tokens=2) for _ in range(4)))
    assert len(fetched) == 1


async def test_a_tokenizer_that_isnt_the_signed_one_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ModelSource.tokenizer_files
    monkeypatch.setattr(ModelSource, "tokenizer_files", lambda source: {**honest(source), "model.json": b"{}"})
    peers = tiny.new_swarm()
    peers.start_all(tiny.model, {"liar": "0:6"})
    async with tiny.client(peers) as client:
        with pytest.raises(MessageError, match="isn't the one it signed for"):
            await client.generate("Why?")
    peers.close()


# ---------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 2.5}, {"max_tokens": True}, {"max_tokens": "9"},
        {"temperature": -0.1}, {"temperature": 101}, {"temperature": float("nan")}, {"temperature": "hot"},
        {"top_k": -1}, {"top_k": 1 << 40}, {"top_k": 0.5},
        {"top_p": 0}, {"top_p": 1.1}, {"top_p": float("nan")}, {"seed": -1}, {"seed": 1 << 63}, {"seed": 1.0},
        {"stop": ""}, {"stop": ["a", ""]}, {"stop": ["x"] * 17}, {"stop": 5}, {"stop": [5]}, {"stop": [None]},
    ],
    ids=str,
)  # fmt: skip
async def test_an_impossible_option_is_told_before_anybody_is_dialled(options: dict[str, Any]) -> None:
    client = AsyncClient("127.0.0.1:1")
    name = list(options)[-1]
    with pytest.raises(UsageError, match=name):
        client.stream("Why?", **options)
    with pytest.raises(UsageError, match=name):
        await client.generate("Why?", **options)
    with pytest.raises(TypeError):
        client.stream("Why?", temprature=1)  # type: ignore[call-arg]


async def test_an_overlong_stop_string_is_refused(tiny: Tiny) -> None:
    async with tiny.client(chain="one") as client:
        with pytest.raises(UsageError, match="256 characters"):
            await client.generate("Why?", stop="x" * 257)
    assert tiny.swarm.held() == {}


async def test_nobody_at_the_address_is_told_with_it(tiny: Tiny) -> None:
    client = AsyncClient("127.0.0.1:1", home=tiny.new_home())
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 "):
        await client.generate("Why?")
    with pytest.raises(Unreachable):
        async with client:
            pass
    await client.aclose()


async def test_an_address_that_is_none_is_a_usage_error(tiny: Tiny) -> None:
    with pytest.raises(UsageError):
        await AsyncClient("127.0.0.1:99999", home=tiny.new_home()).connect()


async def test_without_an_address_a_remembered_peer_will_do(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_JOIN", raising=False)
    home = tiny.new_home()
    with pytest.raises(Unreachable, match="no address was given, none is remembered"):
        await AsyncClient(home=home).connect()
    async with AsyncClient(tiny.swarm.address, home=home, only=["one"]) as client:
        first = await client.generate("Why?", max_tokens=8)
    async with AsyncClient(home=home, only=["one"]) as client:
        assert (await client.generate("Why?", max_tokens=8)).token_ids == first.token_ids


def test_addresses_come_from_the_environment_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_JOIN", "a:1, b:2 c")
    assert join_addresses(None) == ("a:1", "b:2", "c")
    assert join_addresses("x") == ("x",) and join_addresses(["x", "y"]) == ("x", "y")
    monkeypatch.delenv("SWARM_JOIN")
    assert join_addresses(None) == ()


async def test_a_closed_client_says_so(tiny: Tiny) -> None:
    client = tiny.client(chain="one")
    async with client:
        pass
    await client.aclose()
    for use in (client.connect, client.status, client.changed, lambda: client.generate("Why?")):
        with pytest.raises(UsageError, match="this client is closed"):
            await use()


# ---------------------------------------------------------------- the blocking twin


@pytest.fixture
def nothing_left(tiny: Tiny) -> Iterator[None]:
    """Threads as before, no session and no connection of the test's clients at any peer."""
    before = set(threading.enumerate())
    links = tiny.swarm.call(lambda: clients_at(tiny.swarm))
    yield
    pool = tiny.swarm.loop._default_executor  # type: ignore[attr-defined]  # the peers', which grows as they need it
    left = {thread.name for thread in set(threading.enumerate()) - before - pool._threads}
    assert not left, f"threads left: {left}"
    tiny.swarm.empty()
    tiny.swarm.run(tiny.swarm._until(lambda: clients_at(tiny.swarm) <= links))


def clients_at(swarm: TinySwarm) -> int:
    """Connections to peers from somebody who is no peer."""
    peers = {peer.transport.identity.peer_id for peer in swarm.peers.values()}
    return sum(one not in peers for peer in swarm.peers.values() for one in peer.transport.links)


@pytest.mark.usefixtures("nothing_left")
def test_the_blocking_client_streams_the_same(tiny: Tiny) -> None:
    right = tiny.oracle.greedy(tiny.oracle.chat_ids("Hello"), 32)
    with tiny.blocking_client(chain="three") as client:
        answer = client.stream("Hello", max_tokens=32, seed=4)
        pieces = list(answer)
        result = pieces[-1].final
        assert result is not None and answer.result is result
        assert (list(result.token_ids), "".join(piece.text for piece in pieces)) == (right, result.text)
        assert ([hop.name for hop in answer.hops], answer.seed) == (["a", "b", "c"], 4)
        assert (answer.notes, answer.repairs) == ((), ())
        assert list(answer) == []
        assert list(client.generate("Hello", max_tokens=32).token_ids) == right
        assert len(client.peers()) == 9 and client.status("tiny")[0].problem is None


@pytest.mark.usefixtures("nothing_left")
def test_leaving_a_blocking_loop_frees_the_peers_at_once(tiny: Tiny) -> None:
    with tiny.blocking_client(chain="three") as client:
        for piece in client.stream("Hello", max_tokens=400):
            assert tiny.swarm.held() and piece.final is None
            break
        tiny.swarm.empty()
        with pytest.raises(ZeroDivisionError):
            for _ in client.stream("Hello", max_tokens=400):
                raise ZeroDivisionError
        tiny.swarm.empty()
        with client.stream("Hello", max_tokens=400) as answer:
            next(answer)
        tiny.swarm.empty()
        answer.close()
        assert list(answer) == []


@pytest.mark.usefixtures("nothing_left")
def test_one_blocking_client_serves_several_threads(tiny: Tiny) -> None:
    prompts = ["a", "Hello there.", "thé", "x" * 60] * 3
    right = [tiny.oracle.greedy(tiny.oracle.chat_ids(prompt), 16) for prompt in prompts[:4]] * 3
    client = tiny.blocking_client(chain="three")
    with ThreadPoolExecutor(6) as threads:  # none has connected yet
        works = [threads.submit(client.generate, prompt, max_tokens=16) for prompt in prompts]
        assert [list(work.result(WITHIN_S).token_ids) for work in works] == right
    client.close()


@pytest.mark.usefixtures("nothing_left")
def test_closing_a_blocking_client_ends_what_other_threads_wait_for(tiny: Tiny) -> None:
    client = tiny.blocking_client(chain="three")
    answer = client.stream("Hello", max_tokens=400)
    next(answer)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.generate, "Hello", max_tokens=400) for _ in range(2)]
        tiny.swarm.run(tiny.swarm._until(lambda: len(tiny.swarm.peers["c"].server.runs) == 3))
        client.close()
        for work in waiting:
            assert isinstance(work.exception(WITHIN_S), GenerationFailed | UsageError)
    client.close()
    answer.close()
    with pytest.raises(UsageError, match="this client is closed"):
        client.generate("Hello")
    with pytest.raises(UsageError, match="this client is closed"):
        next(client.stream("Hello"))


@pytest.mark.usefixtures("nothing_left")
def test_a_blocking_client_that_was_never_used_or_never_connected_closes(tiny: Tiny) -> None:
    tiny.blocking_client().close()
    with pytest.raises(Unreachable), Client("127.0.0.1:1", home=tiny.new_home()):
        pass
    client = tiny.blocking_client()
    with pytest.raises(UsageError, match="max_tokens"):
        client.stream("Hello", max_tokens=0)


async def test_many_generations_leave_no_task_and_no_stream_behind(tiny: Tiny) -> None:
    async with tiny.client(chain="three") as client:
        await client.generate("warm", max_tokens=2)
        tasks = len(asyncio.all_tasks())
        for _ in range(3):
            await asyncio.gather(*(client.generate("Hello", max_tokens=6) for _ in range(6)))
        assert len(asyncio.all_tasks()) == tasks
        assert client._transport is not None
        own = list(client._transport.links.values())
        async with asyncio.timeout(WITHIN_S):  # the peers' last word on a stream may still be on its way
            while sum(len(link._streams) for link in own) > 3:  # the registry's subscriptions
                await client.changed()
    await tiny.swarm.emptied()
    gc.collect()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
