"""The main job with the real model and real processes: exact text through several hops, and through kills.

One swarm of eight processes serves every test of this module: a chain of three (a, b, c) and one of five
(v, w, x, y, z), so that each layer has two holders and a kill of any one can be repaired. A killed peer is started
again while the next test runs. What is right is what transformers generates, computed here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer.local import LocalSwarm
from swarm import AsyncClient, Completion
from swarm.driver import SessionDriver
from swarm.effects import Send
from swarm.generation import Generation
from swarm.messages import Resume
from swarm.state import StateDir

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROMPTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
TOKENS = 64
KILL_TOKENS = 40
NEAR_TIE = 1e-4  # two best logits closer than this may swap when shapes differ (protocol.md)
THREE = {"a": "0:11", "b": "11:20", "c": "20:30"}
FIVE = {"v": "0:6", "w": "6:12", "x": "12:18", "y": "18:24", "z": "24:30"}
SPANS = THREE | FIVE


def messages_of(prompt: dict[str, Any]) -> Any:
    return prompt.get("messages") or prompt["text"]


# ---------------------------------------------------------------- the independent source


class Oracle:
    """transformers' own reading of the GGUF file that the swarm serves."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        whole = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self.model = whole.eval()
        self._known: dict[str, list[int]] = {}

    def encode(self, prompt: dict[str, Any]) -> list[int]:
        if prompt["raw"]:
            return list(self.tokenizer(prompt["text"]).input_ids)
        chat = prompt.get("messages") or [{"role": "user", "content": prompt["text"]}]
        return list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])

    def generate(self, prompt: dict[str, Any]) -> list[int]:
        """The greedy continuation, TOKENS ids or up to and with an eos."""
        if not self._known:
            prompts = sorted(PROMPTS, key=lambda one: len(self.encode(one)))
            self._generate(prompts[:-1])  # padded to one length: a tenth of the time of one after the other
            self._generate(prompts[-1:])
        return self._known[prompt["name"]]

    def _generate(self, prompts: list[dict[str, Any]]) -> None:
        encoded = [self.encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        eos = self.model.generation_config.eos_token_id
        ids = torch.tensor([[eos] * (longest - len(one)) + one for one in encoded])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in encoded])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=eos
            )
        for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
            self._known[prompt["name"]] = row[: row.index(eos) + 1] if eos in row else row

    def gap_at(self, prompt: dict[str, Any], generated: list[int]) -> float:
        """Between the two best logits for the id that follows `generated`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([self.encode(prompt) + generated])).logits[0, -1]
        best = torch.topk(logits, 2).values
        return float(best[0] - best[1])


def assert_same(oracle: Oracle, prompt: dict[str, Any], ours: list[int], tokens: int = TOKENS) -> None:
    """Token for token; only where two logits tie may the texts part, and that is said."""
    theirs = oracle.generate(prompt)[:tokens]
    if ours == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    gap = oracle.gap_at(prompt, theirs[:at])
    assert gap < NEAR_TIE, (
        f"{prompt['name']!r} differs at token {at} of {tokens}, where the best logits are {gap} apart"
    )
    print(f"{prompt['name']!r}: a tie of {gap:.2e} at token {at} fell the other way")


@pytest.fixture(scope="module")
def oracle(smollm2_file: Path) -> Oracle:
    torch.set_num_threads(2)
    return Oracle(smollm2_file)


# ---------------------------------------------------------------- the swarm


class Eight:
    """The swarm with what tests do to it."""

    def __init__(self, swarm: LocalSwarm, home: Path) -> None:
        self.swarm, self.home = swarm, home
        self.client: AsyncClient = AsyncClient(swarm.address, home=home / "client")

    async def start(self, name: str) -> None:
        await self.swarm.start(name, "--layers", SPANS[name], "--memory", "1GB")

    async def all_serving(self) -> None:
        """`ids`: who has each name now; a killed one's record lives on for a lease, under the same name."""
        entries = await self.swarm.serving(self.client, list(SPANS))
        self.ids = {name: entry.descriptor.peer for name, entry in entries.items()}

    async def revive(self) -> None:
        """Start again whatever was killed, and wait for it."""
        for name in SPANS:
            if self.swarm.peers[name].process.returncode is not None:
                await self.start(name)
        await self.all_serving()

    def using(self, names: Iterable[str]) -> AsyncClient:
        only = [self.ids[name] for name in names]
        return AsyncClient(self.swarm.addresses, home=self.home / "client", only=only)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def eight(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Eight]:
    home = tmp_path_factory.mktemp("swarm")
    async with LocalSwarm("smollm2", home, StateDir.open().cache) as swarm:
        made = Eight(swarm, home)
        await made.start("a")
        await swarm.connect(made.client)
        for name in list(SPANS)[1:]:
            await made.start(name)
        await made.all_serving()
        try:
            yield made
        finally:
            await made.client.aclose()


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("names", [THREE, FIVE], ids=["3 hops", "5 hops"])
async def test_greedy_text_through_a_chain_equals_transformers(
    eight: Eight, oracle: Oracle, names: dict[str, str]
) -> None:
    async with eight.using(names) as client:
        answers = await asyncio.gather(
            *(client.generate(messages_of(p), raw=p["raw"], max_tokens=TOKENS, temperature=0) for p in PROMPTS)
        )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [hop.name for hop in answer.hops] == list(names)
        assert answer.usage.prompt_tokens == len(oracle.encode(prompt)), prompt["name"]
        assert_same(oracle, prompt, list(answer.token_ids))
        assert answer.text == oracle.tokenizer.decode(answer.token_ids, skip_special_tokens=True)


async def test_the_prompts_are_what_they_are_said_to_be(oracle: Oracle) -> None:
    lengths = {p["name"]: len(oracle.encode(p)) for p in PROMPTS}
    assert len(PROMPTS) == 10
    assert lengths["one token"] == 1
    assert lengths["over a thousand tokens"] > 1000


async def test_a_seed_gives_the_same_text_through_different_chains(eight: Eight) -> None:
    options = {"max_tokens": 32, "temperature": 0.8, "seed": 20_261_130}
    async with eight.using(THREE) as three, eight.using(FIVE) as five:
        first, second = await asyncio.gather(
            three.generate("Tell me a story.", **options), five.generate("Tell me a story.", **options)
        )
        other = await three.generate("Tell me a story.", max_tokens=32, temperature=0.8, seed=1)
    assert len(first.hops) == 3 and len(second.hops) == 5
    assert first.token_ids == second.token_ids
    assert other.token_ids != first.token_ids


# ---------------------------------------------------------------- kills


@dataclass(frozen=True)
class Kill:
    """When and what. hops: indices in the chain of three. at: tokens seen before the kill, 0: during prefill."""

    hops: tuple[int, ...]
    at: int
    how: str = "kill"  # or "freeze"
    joining: bool = False  # while another peer starts up

    def __str__(self) -> str:
        where = "+".join(("first", "middle", "last")[hop] for hop in self.hops)
        when = "during prefill" if self.at == 0 else f"after token {self.at}"
        return f"{self.how} {where} {when}{' while one joins' if self.joining else ''}"


PLAIN = [
    Kill((0,), at=5),
    Kill((1,), at=0),
    Kill((2,), at=9),
    Kill((1,), at=7, joining=True),
    Kill((0, 2), at=12),
    Kill((1,), at=6, how="freeze"),
]
LONG = [
    *(Kill((hop,), at=at) for hop in range(3) for at in (0, 1, 17, 33)),
    *(Kill((hop,), at=11, joining=True) for hop in range(3)),
    *(Kill(pair, at=at) for pair in ((0, 1), (1, 2), (0, 2)) for at in (0, 8)),
    *(Kill((hop,), at=10, how="freeze") for hop in range(3)),
]
assert len(PLAIN) == 6 and len(LONG) == 24
BY_NAME = {prompt["name"]: prompt for prompt in PROMPTS}


@pytest.mark.parametrize("kill", PLAIN, ids=str)
async def test_an_answer_survives(eight: Eight, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, kill: Kill) -> None:
    await survive(eight, oracle, monkeypatch, kill)


@pytest.mark.long
@pytest.mark.parametrize("kill", LONG, ids=str)
async def test_an_answer_survives_whatever_dies(
    eight: Eight, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, kill: Kill
) -> None:
    await survive(eight, oracle, monkeypatch, kill)


async def survive(eight: Eight, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, kill: Kill) -> None:
    await eight.revive()
    prompt = BY_NAME["over a thousand tokens" if kill.at == 0 else "a plain question"]
    async with eight.using(SPANS) as client, asyncio.timeout(120):
        fix_chain([eight.ids[name] for name in THREE], monkeypatch)
        generation = client.stream(messages_of(prompt), max_tokens=KILL_TOKENS, temperature=0)
        if kill.joining:
            await eight.swarm.start("late", "--layers", "11:20", "--memory", "1GB")
        answer, victims = await killed_on_the_way(eight, generation, monkeypatch, kill)
    await after_the_end(eight, kill, victims)
    assert_same(oracle, prompt, list(answer.token_ids), KILL_TOKENS)
    assert answer.repairs, "nothing was repaired"
    assert [i for ids in PIECES.pop(id(generation)) for i in ids] == list(answer.token_ids)
    repair = answer.repairs[0]
    assert set(victims) <= {hop.name for hop in repair.before}
    assert not set(victims) & {hop.name for hop in answer.hops}
    during = range(1) if kill.at == 0 else range(kill.at, kill.at + 20)  # the swarm may be ahead of the reader
    assert repair.at_token in during, answer.repairs
    assert repair.stalled_s is not None


def fix_chain(peers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is the chain of these, so that the kill hits the hop that the test names."""
    plain = AsyncClient._planner

    def planner(self: AsyncClient, *arguments: Any) -> Any:
        plan = plain(self, *arguments)

        def first_of_these(request: Any) -> Any:
            if not request.fresh:
                return plan(request)
            before, self._only = self._only, frozenset(peers)
            try:
                return plan(request)
            finally:
                self._only = before

        return first_of_these

    monkeypatch.setattr(AsyncClient, "_planner", planner)


async def killed_on_the_way(
    eight: Eight, generation: Generation, monkeypatch: pytest.MonkeyPatch, kill: Kill
) -> tuple[Completion, list[str]]:
    names = [list(THREE)[hop] for hop in kill.hops]
    act: Callable[[], None] = lambda: strike(eight, names, kill.how)  # noqa: E731
    if kill.at == 0:
        at_resume(monkeypatch, act)
    seen = 0
    async for piece in generation:
        before, seen = seen, seen + len(piece.token_ids)
        PIECES.setdefault(id(generation), []).append(piece.token_ids)
        if kill.at and before < kill.at <= seen:
            act()
    assert generation.result is not None
    return generation.result, names


PIECES: dict[int, list[tuple[int, ...]]] = {}  # of each generation, as they came


def strike(eight: Eight, names: list[str], how: str) -> None:
    for name in names:
        peer = eight.swarm.peers[name]
        peer.kill() if how == "kill" else peer.freeze()


def at_resume(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Strike as soon as the chain has been told to resume: then the prefill runs."""
    plain, done = SessionDriver._perform, []

    def perform(self: SessionDriver, effect: Any) -> None:
        plain(self, effect)
        if isinstance(effect, Send) and isinstance(effect.message, Resume) and not done:
            done.append(True)
            self._loop.call_later(0.3, act)  # a chunk takes about that long: the prompt has five

    monkeypatch.setattr(SessionDriver, "_perform", perform)


async def after_the_end(eight: Eight, kill: Kill, names: list[str]) -> None:
    """A frozen process is of no more use, and the extra one has done its part; all of them are gone on return."""
    gone = [eight.swarm.peers[name] for name in names]
    if kill.joining:
        gone.append(eight.swarm.peers.pop("late"))
    for peer in gone:
        if peer.process.returncode is None:
            peer.kill()
        await peer.process.wait()
