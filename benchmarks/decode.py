"""How fast a token comes: transformers alone, the swarm with one peer, the swarm with three, on loopback.

The real model (SmolLM2-135M-Instruct) in float32, 128 tokens greedily, five rounds, interleaved in one run:
every round measures each of the three once, and what is compared are medians over rounds. Torch threads are the
physical cores in every process, and waiting is passive, or idle peers would spin. Prints; the engine's own
benchmark sets the bar.

    python -m benchmarks.decode [--rounds N] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

from benchmarks.machine import physical_cores, report
from peer.local import LocalSwarm
from peer.smollm2 import ensure_smollm2
from swarm import AsyncClient
from swarm.generation import Completion
from swarm.state import StateDir

PROMPT = "Tell me the history of the bicycle, from the first wooden ones until today."
SWARMS = {"one peer": ["0:30"], "three peers": ["0:8", "8:21", "21:30"]}


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


class Transformers:
    """`generate` in this process, its first token left out of the time as in the swarm."""

    def __init__(self, file: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        self._model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(**place)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
        )
        self._ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def tokens_per_s(self, tokens: int) -> float:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                self._ids,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        return (len(times) - 1) / (times[-1] - times[0])


async def measure(rounds: int, tokens: int) -> dict[str, Measured]:
    threads, cache = physical_cores(), StateDir.open(None).cache
    alone = Transformers(ensure_smollm2(cache), threads)
    measured = {name: Measured() for name in ("transformers", *SWARMS)}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with _swarms(Path(folder), cache, threads) as clients:
            for number in range(-1, rounds):  # round -1 warms up and isn't counted
                speed = await asyncio.to_thread(alone.tokens_per_s, tokens)
                answers = {
                    name: await clients[name].generate(PROMPT, max_tokens=tokens, temperature=0) for name in SWARMS
                }
                if number < 0:
                    continue
                measured["transformers"].tokens_per_s.append(speed)
                for name, answer in answers.items():
                    measured[name].add(answer)
                print(
                    f"round {number + 1}: " + ", ".join(f"{n} {m.tokens_per_s[-1]:.1f}" for n, m in measured.items()),
                    flush=True,
                )
    return measured


class _swarms:
    """Both swarms at once; only one of them works at a time."""

    def __init__(self, home: Path, cache: Path, threads: int) -> None:
        self._swarms = {}
        self._clients = {}
        for name in SWARMS:
            place = home / name.replace(" ", "-")
            place.mkdir()
            self._swarms[name] = LocalSwarm("smollm2", place, cache, threads=threads)
            self._clients[name] = AsyncClient(self._swarms[name].address, home=place / "client")

    async def __aenter__(self) -> dict[str, AsyncClient]:
        for name, layers in SWARMS.items():
            swarm, client = self._swarms[name], self._clients[name]
            for index, span in enumerate(layers):
                await swarm.start(f"peer{index}", "--layers", span)
                if index == 0:
                    await swarm.connect(client)
            await swarm.serving(client, [f"peer{index}" for index in range(len(layers))])
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()
        for swarm in self._swarms.values():
            await swarm.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: the last line always is JSON")
    options = parser.parse_args()
    measured = asyncio.run(measure(options.rounds, options.tokens))
    results: dict[str, Any] = {name: one.medians() for name, one in measured.items()}
    alone = measured["transformers"].tokens_per_s
    for name in SWARMS:
        ratios = [mine / theirs for mine, theirs in zip(measured[name].tokens_per_s, alone, strict=True)]
        results[name]["ratio_to_transformers"] = round(statistics.median(ratios), 3)
    for name, figures in results.items():
        print(f"{name:14}" + "  ".join(f"{key} {value}" for key, value in figures.items()))
    report("decode", results, {})


if __name__ == "__main__":
    main()
