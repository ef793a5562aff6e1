"""How fast one peer's engine is, beside transformers, against what the memory allows.

Everything is measured side by side in one process with equal threads: each round measures each thing once, and what is
compared are medians over rounds of the ratio within a round. The engine runs as it does in a peer (its thread, its
scheduler, sampling, one future per step); what is left out is the network (`benchmarks/decode.py`).

    one session    tokens/s of one session, against `generate` of transformers, both greedy, first token left out
    share          weight bytes per token x tokens/s, over the bandwidth at which this machine reads memory just then
    overhead       what of a step is not the forward pass
    16 sessions    tokens/s of all together
    prefill        2,048 tokens in the chunks that a peer uses, against one forward of transformers

    python -m benchmarks.engine [--model smollm2|llama-1b] [--dtype float32|bfloat16] [--part decode|prefill]
                                [--rounds N] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer.threads import quiet_threads

quiet_threads()  # as peers do, before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.machine import Targets, physical_cores, report  # noqa: E402
from benchmarks.models import MODELS, Both, load  # noqa: E402
from peer.engine import Engine, EngineConfig, Job  # noqa: E402
from peer.hop import HopConfig, SampleAt  # noqa: E402
from peer.model import PackedStep, SpanModel, StepOutput  # noqa: E402
from swarm.messages import Sampling  # noqa: E402

DTYPES = ("float32", "bfloat16")
PARTS = ("decode", "prefill")
SESSIONS = 16
PROMPT = 48  # tokens before those that are timed
PREFILL = 2048
GREEDY = Sampling()
READ_BYTES = 1 << 29  # larger than any cache whose whole is ours
# rounds and decode tokens a round that fit in about a minute with loading: a token of the larger one takes seconds / 4
PACE = {("smollm2", "decode"): (7, 32), ("smollm2", "prefill"): (3, 0)}
PACE |= {("llama-1b", "decode"): (5, 8), ("llama-1b", "prefill"): (2, 0)}


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

    def __init__(self, model: SpanModel, threads: int) -> None:
        self._timed = Timed(model)
        self.engine = Engine(self._timed, EngineConfig(threads=threads))  # type: ignore[arg-type]
        self.engine.start()

    async def decode(self, prompt: list[int], sessions: int, tokens: int) -> Decoded:
        """So many tokens in each of so many sessions, after a prompt that isn't timed."""
        caches = [self._timed.new_cache(len(prompt) + tokens + 1) for _ in range(sessions)]
        first = [await self._step(cache, 0, prompt, sample=True) for cache in caches]
        self._timed.seconds, started = 0.0, time.perf_counter()
        pairs = zip(caches, first, strict=True)
        await asyncio.gather(*(self._follow(cache, len(prompt), token, tokens) for cache, token in pairs))
        return Decoded((time.perf_counter() - started) / tokens, self._timed.seconds / tokens)

    async def _follow(self, cache: Any, position: int, token: int, tokens: int) -> None:
        for at in range(position, position + tokens):
            token = await self._step(cache, at, [token], sample=True)

    async def prefill_s(self, prompt: list[int]) -> float:
        cache, chunk = self._timed.new_cache(len(prompt)), HopConfig().prefill_chunk
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


def generate_token_s(model: Any, prompt: list[int], tokens: int) -> float:
    """Seconds between two tokens of transformers' `generate`."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor([prompt])
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
    best = min(_timed(lambda: memory.sum()) for _ in range(2))
    return memory.nbytes / best


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


async def decode(both: Both, ours: Ours, rounds: int, tokens: int) -> list[dict[str, float]]:
    """One dict per round, the first of which (it warms up) isn't there."""
    prompt, memory = _prompt(both, PROMPT), torch.ones(READ_BYTES // 4)
    measured: list[dict[str, float]] = []
    for number in range(-1, rounds):
        theirs_s = await asyncio.to_thread(_with_threads, lambda: generate_token_s(both.theirs, prompt, tokens))
        one = await ours.decode(prompt, 1, tokens)
        read = await asyncio.to_thread(_with_threads, lambda: read_bytes_per_s(memory))
        many = await ours.decode(prompt, SESSIONS, max(4, tokens // 4))
        if number >= 0:
            measured.append(
                {
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
            )
    return measured


async def prefill(both: Both, ours: Ours, rounds: int, _: int) -> list[dict[str, float]]:
    prompt = _prompt(both, PREFILL)
    measured: list[dict[str, float]] = []
    await ours.prefill_s(prompt[:512])
    await asyncio.to_thread(_with_threads, lambda: forward_s(both.theirs, prompt[:512]))
    for _number in range(rounds):
        theirs_s = await asyncio.to_thread(_with_threads, lambda: forward_s(both.theirs, prompt))
        ours_s = await ours.prefill_s(prompt)
        measured.append(
            {
                "transformers tokens/s": PREFILL / theirs_s,
                "prefill tokens/s": PREFILL / ours_s,
                "prefill / transformers": theirs_s / ours_s,
            }
        )
    return measured


def _with_threads(function: Callable[[], float]) -> float:
    torch.set_num_threads(physical_cores())  # counts for the thread that says it
    return function()


def _prompt(both: Both, tokens: int) -> list[int]:
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
                rounds, tokens = PACE[name, part]
                measure = {"decode": decode, "prefill": prefill}[part]
                rows = await measure(both, ours, options.rounds or rounds, options.tokens or tokens)
                found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                what = f"{name} {dtype}"
                results[f"{what} {part}"] = {key: round(value, 4) for key, value in found.items()}
                fused = "" if both.ours.fused is not None else ", not fused"
                print(f"{what}, {part}, {threads} threads, medians of {len(rows)} rounds{fused}:", flush=True)
                for key, value in found.items():
                    spread = f"{min(row[key] for row in rows):.3f} to {max(row[key] for row in rows):.3f}"
                    print(f"  {key:52} {value:7.3f}   ({spread})")
                judge(targets, what, dtype, found)
            await ours.engine.stop()
            del both, ours
    return results, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="both by default; may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="both by default; may be repeated")
    parser.add_argument("--part", choices=PARTS, action="append", help="both by default; may be repeated")
    parser.add_argument("--rounds", type=int, help="for each part (by default, so many as take about a minute)")
    parser.add_argument("--tokens", type=int, help="in each round of decode")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    options.model, options.dtype = options.model or MODELS, options.dtype or DTYPES
    options.part = options.part or PARTS
    results, targets = asyncio.run(run(options))
    report("engine", results, targets.judged)


if __name__ == "__main__":
    main()
