"""How fast one peer's engine is, beside transformers, against what the memory allows.

Everything is measured side by side in one process with equal threads: each round measures each thing once, and what is
compared are medians over rounds of the ratio within a round. The engine runs as it does in a peer (its thread, its
scheduler, sampling, one future per step); what is left out is the network (`benchmarks/decode.py`).

    one session    tokens/s of one session, against `generate` of transformers, both greedy, first token left out
    share          weight bytes per token, as ours holds them, x tokens/s, over the bandwidth at which this machine
                   reads memory just then
    overhead       what of a step is not the forward pass
    16 sessions    tokens/s of all together
    prefill        2,048 tokens in the chunks that a peer with all layers uses, against one forward of transformers

    python -m benchmarks.engine [--model smollm2|llama-1b] [--dtype float32|bfloat16] [--part decode|prefill]
                                [--seconds S] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from peer.threads import quiet_threads

quiet_threads()  # as peers do, before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.machine import Targets, physical_cores, report  # noqa: E402
from benchmarks.models import MODELS, Both, load  # noqa: E402
from peer.engine import Engine, EngineConfig, Job  # noqa: E402
from peer.hop import HopConfig  # noqa: E402
from peer.hop_effects import SampleAt  # noqa: E402
from peer.model import PackedStep, SpanModel, StepOutput  # noqa: E402
from swarm.messages import Sampling  # noqa: E402

DTYPES = ("float32", "bfloat16")
PARTS = ("decode", "prefill")
SESSIONS = 16
GREEDY_PROMPT = 48  # tokens before those that are timed
PREFILL = 2048
GREEDY = Sampling()
READ_BYTES = 1 << 29  # larger than any cache whose whole is ours
TOKENS = {"smollm2": 32, "llama-1b": 6, "tiny": 8}  # of each decode in a round: one to three seconds
LEAST_ROUNDS, MOST_ROUNDS = 2, 9


class Timed:
    """A model whose forward passes are added up: `seconds`."""

    def __init__(self, model: SpanModel) -> None:
        self._model, self.seconds = model, 0.0

    def forward(self, step: PackedStep) -> StepOutput:
        started = time.perf_counter()
        output = self._model.forward(step)
        self.seconds += time.perf_counter() - started
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass(frozen=True, slots=True)
class Decoded:
    """token_s: between two tokens of a session. forward_s: of which the forward pass took so much."""

    token_s: float
    forward_s: float


class Ours:
    """The engine over the whole model."""

    def __init__(self, model: SpanModel, threads: int | None) -> None:
        self._timed = Timed(model)
        self.engine = Engine(self._timed, EngineConfig(threads=threads))  # type: ignore[arg-type]
        self.engine.start()

    async def open(self, prompt: list[int], sessions: int, tokens: int) -> None:
        """Sessions that have read the prompt and have room for so many tokens more."""
        caches = [self._timed.new_cache(len(prompt) + tokens) for _ in range(sessions)]
        self._sessions = [(cache, await self._step(cache, 0, prompt, sample=True)) for cache in caches]
        self._position = len(prompt)

    async def decode(self, sessions: int, tokens: int) -> Decoded:
        """So many tokens in each of so many of the sessions, always from the prompt's end on."""
        self._timed.seconds, started = 0.0, time.perf_counter()
        chosen = self._sessions[:sessions]
        await asyncio.gather(*(self._follow(cache, token, tokens) for cache, token in chosen))
        return Decoded((time.perf_counter() - started) / tokens, self._timed.seconds / tokens)

    async def _follow(self, cache: Any, token: int, tokens: int) -> None:
        for at in range(self._position, self._position + tokens):
            token = await self._step(cache, at, [token], sample=True)

    async def prefill_s(self, prompt: list[int]) -> float:
        cache, chunk = self._timed.new_cache(len(prompt)), HopConfig().whole_chunk
        started = time.perf_counter()
        steps = [
            self._step(cache, at, prompt[at : at + chunk], sample=at + chunk >= len(prompt))
            for at in range(0, len(prompt), chunk)
        ]
        await asyncio.gather(*steps)
        return time.perf_counter() - started

    async def _step(self, cache: Any, position: int, ids: list[int], sample: bool) -> int:
        end = position + len(ids)
        ask = SampleAt(end, GREEDY, ()) if sample else None
        done = await self.engine.submit(Job(cache, self._timed.span, position, ids=ids, sample=ask))
        return -1 if done.token is None else done.token


def generate_token_s(model: Any, prompt: list[int], tokens: int, rows: int = 1) -> float:
    """Seconds between two tokens of transformers' `generate`, greedy, with the prompt in so many rows."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor([prompt] * rows, device=model.device)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Clock()]),
        )
    return (times[-1] - times[0]) / (len(times) - 1)


@torch.inference_mode()
def forward_s(model: Any, prompt: list[int]) -> float:
    """One forward of transformers over the prompt, with KV kept and the last token's logits, as `generate` begins."""
    started = time.perf_counter()
    model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def read_bytes_per_s(memory: Tensor) -> float:
    """memory: larger than the caches. The better of two passes: what else runs only ever takes away."""
    best = min(_timed(lambda: memory.sum().item()) for _ in range(2))  # item: waits for the device
    return memory.nbytes / best


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


Round = Callable[[], Awaitable[dict[str, float]]]


async def decode(both: Both, ours: Ours) -> Round:
    prompt, memory, tokens = random_prompt(both, GREEDY_PROMPT), torch.ones(READ_BYTES // 4), TOKENS[both.name]
    await ours.open(prompt, SESSIONS, tokens)

    async def measure() -> dict[str, float]:
        theirs_s = await _beside(lambda: generate_token_s(both.theirs, prompt, tokens))
        one = await ours.decode(1, tokens)
        read = await _beside(lambda: read_bytes_per_s(memory))
        many = await ours.decode(SESSIONS, max(3, tokens // 4))
        return {
            "transformers tokens/s": 1 / theirs_s,
            "one session tokens/s": 1 / one.token_s,
            "16 sessions tokens/s": SESSIONS / many.token_s,
            "read GB/s": read / 1e9,
            "one session / transformers": theirs_s / one.token_s,
            "share of read bandwidth": both.weight_bytes / one.token_s / read,
            "overhead outside the forward": 1 - one.forward_s / one.token_s,
            "16 sessions / one session": SESSIONS * one.token_s / many.token_s,
            "16 sessions / transformers": SESSIONS * theirs_s / many.token_s,
            "overhead with 16 sessions": 1 - many.forward_s / many.token_s,
        }

    return measure


async def prefill(both: Both, ours: Ours) -> Round:
    prompt = random_prompt(both, PREFILL)

    async def measure() -> dict[str, float]:
        theirs_s = await _beside(lambda: forward_s(both.theirs, prompt))
        ours_s = await ours.prefill_s(prompt)
        return {
            "transformers tokens/s": PREFILL / theirs_s,
            "prefill tokens/s": PREFILL / ours_s,
            "prefill / transformers": theirs_s / ours_s,
        }

    await ours.prefill_s(prompt[:512])
    await _beside(lambda: forward_s(both.theirs, prompt[:512]))
    return measure


async def rounds(measure: Round, seconds: float) -> list[dict[str, float]]:
    """As many rounds as fit, after one that warms up (where each takes long, that one counts too)."""
    begun = time.perf_counter()
    found = [await measure()]
    if time.perf_counter() - begun < seconds / 5:
        found.clear()
    while len(found) < LEAST_ROUNDS or (time.perf_counter() - begun < seconds and len(found) < MOST_ROUNDS):
        found.append(await measure())
        print("  " + "  ".join(f"{value:.2f}" for value in found[-1].values()), flush=True)
    return found


async def _beside(function: Callable[[], float]) -> float:
    """In a thread of its own: the loop goes on, as beside the engine."""
    return await asyncio.to_thread(_with_threads, function)


def _with_threads(function: Callable[[], float]) -> float:
    torch.set_num_threads(physical_cores())  # counts for the thread that says it
    return function()


def random_prompt(both: Both, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, both.ours.vocab, (tokens,), generator=generator).tolist()


def judge(targets: Targets, what: str, dtype: str, found: dict[str, float]) -> None:
    floors = {
        "one session / transformers": 1.3,
        "16 sessions / one session": 4.5,
        "16 sessions / transformers": 6.0,
        "prefill / transformers": 1.0,
    }
    if dtype == "float32":
        floors["share of read bandwidth"] = 0.75
    for name, floor in floors.items():
        if name in found:
            targets.judge(f"{what}: {name}", found[name], floor)
    name = "overhead outside the forward"
    if name in found:
        targets.judge(f"{what}: {name}", found[name], 0.05, at_most=True)


async def run(options: argparse.Namespace) -> tuple[dict[str, Any], Targets]:
    results: dict[str, Any] = {}
    targets, threads = Targets(), physical_cores()
    torch.set_num_threads(threads)
    for name in options.model:
        for dtype in options.dtype:
            both = load(name, getattr(torch, dtype))
            ours = Ours(both.ours, threads)
            for part in options.part:
                measure = await {"decode": decode, "prefill": prefill}[part](both, ours)
                rows = await rounds(measure, options.seconds)
                found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                what = f"{name} {dtype}"
                results[f"{what} {part}"] = {key: round(value, 4) for key, value in found.items()}
                fused = "" if both.ours.fused is not None else ", not fused"
                print(f"{what}, {part}, {threads} threads, medians of {len(rows)} rounds{fused}:", flush=True)
                for key, value in found.items():
                    spread = f"{min(row[key] for row in rows):.3f} to {max(row[key] for row in rows):.3f}"
                    print(f"  {key:52} {value:10.4g}   ({spread})")
                judge(targets, what, dtype, found)
            await ours.engine.stop()
            del both, ours
    return results, targets


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--model", choices=(*MODELS, "tiny"), action="append", help="the first two by default; may be repeated"
    )
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="both by default; may be repeated")
    parser.add_argument("--part", choices=PARTS, action="append", help="both by default; may be repeated")
    parser.add_argument("--seconds", type=float, default=40.0, help="for the rounds of each part (default 40)")
    parser.add_argument("--json", action="store_true", help="for uniformity: the last line always is JSON")
    options = parser.parse_args(arguments)
    options.model, options.dtype = options.model or MODELS, options.dtype or DTYPES
    options.part = options.part or PARTS
    results, targets = asyncio.run(run(options))
    report("engine", results, targets.judged)


if __name__ == "__main__":
    main()
