"""How fast a token comes: transformers alone, the swarm with one peer, the swarm with three, on loopback.

Greedy, over rounds interleaved in one run: every round measures each of the three once, and what is compared are
medians over rounds. Torch threads are the physical cores in every process. SmolLM2-135M-Instruct, in float32 unless
another dtype is named, or random weights in the shape of Llama 3.2 1B, published in bfloat16 and computed in it unless
another is named, which every process holds for itself (10 GB in all, 13 in float32).

    python -m benchmarks.decode [--model smollm2|llama-1b] [--dtype float32|bfloat16] [--rounds N] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# before torch: it sets how its threads wait
from benchmarks.engine import GREEDY_PROMPT, generate_token_s, random_prompt  # isort: skip
import torch

from benchmarks.machine import Targets, physical_cores, report
from benchmarks.models import MODELS, load, save_random
from peer.local import LocalSwarm
from peer.source import resolve_model
from swarm import AsyncClient
from swarm.generation import Completion
from swarm.state import StateDir

PROMPT = "Tell me the history of the bicycle, from the first wooden ones until today."
DTYPES = {"smollm2": "float32", "llama-1b": "bfloat16"}
TOKENS = {"smollm2": 128, "llama-1b": 24}
SPANS = {
    "smollm2": {"one peer": ["0:30"], "three peers": ["0:8", "8:21", "21:30"]},
    "llama-1b": {"one peer": ["0:16"], "three peers": ["0:6", "6:12", "12:16"]},
}
TARGET = 1.0  # three peers on loopback, over transformers in one process


@dataclass
class Measured:
    """Medians over rounds. Seconds per token are over all tokens but the first."""

    tokens_per_s: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    network_ms: list[float] = field(default_factory=list)

    def add(self, done: Completion) -> None:
        steps = len(done.token_ids) - 1
        token_ms = 1000 / done.timing.tokens_per_s
        compute_ms = 1000 * done.timing.compute_s / steps
        queue_ms = 1000 * done.timing.queue_s / steps
        self.tokens_per_s.append(done.timing.tokens_per_s)
        self.compute_ms.append(compute_ms)
        self.queue_ms.append(queue_ms)
        self.network_ms.append(token_ms - compute_ms - queue_ms)

    def medians(self) -> dict[str, float]:
        named = {"tokens_per_s": self.tokens_per_s, "compute_ms": self.compute_ms}
        named |= {"queue_ms": self.queue_ms, "network_ms": self.network_ms}
        return {name: round(statistics.median(values), 3) for name, values in named.items() if values}


async def measure(name: str, dtype: str, rounds: int, tokens: int) -> dict[str, Measured]:
    threads, cache = physical_cores(), StateDir.open(None).cache
    both = load(name, getattr(torch, dtype))
    prompt = random_prompt(both, GREEDY_PROMPT)

    def alone() -> float:
        torch.set_num_threads(threads)  # counts for the thread that says it
        return 1 / generate_token_s(both.theirs, prompt, tokens)

    measured = {kind: Measured() for kind in ("transformers", *SPANS[name])}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        home = Path(folder)
        model = await asyncio.to_thread(_checkpoint, name, home / "model", cache)
        swarms = {kind: LocalSwarm(model, _made(home / kind[:3]), cache, threads=threads) for kind in SPANS[name]}
        async with _swarms(swarms, SPANS[name], dtype) as clients:
            for number in range(-1, rounds):  # round -1 warms up and isn't counted
                speed = await asyncio.to_thread(alone)
                answers = {
                    kind: await client.generate(PROMPT, max_tokens=tokens, temperature=0)
                    for kind, client in clients.items()
                }
                if number < 0:
                    continue
                measured["transformers"].tokens_per_s.append(speed)
                for kind, answer in answers.items():
                    measured[kind].add(answer)
                last = ", ".join(f"{kind} {m.tokens_per_s[-1]:.1f}" for kind, m in measured.items())
                print(f"round {number + 1}: {last}", flush=True)
    return measured


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _checkpoint(name: str, folder: Path, cache: Path) -> str:
    """What peers are told to serve: the real model by its name, a random one with the real one's tokenizer."""
    if name == "smollm2":
        return name
    save_random(name, _made(folder))
    for file, content in resolve_model("smollm2", cache=cache).tokenizer_files().items():
        if not (folder / file).exists():
            (folder / file).write_bytes(content)
    return str(folder)


class _swarms:
    """All of them at once; only one of them works at a time."""

    def __init__(self, swarms: Mapping[str, LocalSwarm], spans: Mapping[str, list[str]], dtype: str) -> None:
        self._swarms, self._spans, self._dtype = swarms, spans, dtype
        self._clients: dict[str, AsyncClient] = {}

    async def __aenter__(self) -> dict[str, AsyncClient]:
        for kind, spans in self._spans.items():
            swarm = self._swarms[kind]
            client = self._clients[kind] = AsyncClient(swarm.address, home=swarm.home / "client")
            for index, span in enumerate(spans):
                options = ("--layers", span, "--dtype", self._dtype, "--context", "2048", "--max-sessions", "2")
                await swarm.start(f"peer{index}", *options)
                if index == 0:
                    await swarm.connect(client)
            await swarm.serving(client, [f"peer{index}" for index in range(len(spans))])
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()
        for swarm in self._swarms.values():
            await swarm.stop()


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--dtype", choices=sorted(set(DTYPES.values())), help="what peers and transformers compute in")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="in each answer (by default 128, and 24 of llama-1b)")
    parser.add_argument("--json", action="store_true", help="for uniformity: the last line always is JSON")
    options = parser.parse_args()
    tokens = options.tokens or TOKENS[options.model]
    dtype = options.dtype or DTYPES[options.model]
    measured = asyncio.run(measure(options.model, dtype, options.rounds, tokens))
    results: dict[str, Any] = {name: one.medians() for name, one in measured.items()}
    alone = measured["transformers"].tokens_per_s
    for kind in SPANS[options.model]:
        ratios = [mine / theirs for mine, theirs in zip(measured[kind].tokens_per_s, alone, strict=True)]
        results[kind]["ratio_to_transformers"] = round(statistics.median(ratios), 3)
    for name, figures in results.items():
        print(f"{name:14}" + "  ".join(f"{key} {value}" for key, value in figures.items()))
    targets = Targets()
    name = f"{options.model} {dtype}: three peers / transformers"
    targets.judge(name, results["three peers"]["ratio_to_transformers"], TARGET)
    report("decode", {f"{options.model} {dtype}": results}, targets.judged)


if __name__ == "__main__":
    main()
