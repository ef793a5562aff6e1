"""What a long prompt does to those who are decoding: the slowest of them before and meanwhile.

One engine in this process, its torch threads the physical cores, float32. Four sessions decode; then a prompt of 4,000
tokens arrives in the chunks in which a first hop sends it. What the prompt itself takes, alone and in company, is
printed beside. (What a step costs beside the forward pass is in the engine's own benchmark.)

    python -m benchmarks.fairness [--model NAME] [--prompt N] [--sessions N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

from peer.threads import quiet_threads

quiet_threads()  # as peers do, before torch is imported

import torch  # noqa: E402

from benchmarks.machine import Targets, physical_cores, report  # noqa: E402
from benchmarks.models import MODELS, load  # noqa: E402
from peer.cache import SessionCache  # noqa: E402
from peer.engine import Engine, EngineConfig, Job  # noqa: E402
from peer.hop import HopConfig  # noqa: E402
from peer.hop_effects import SampleAt  # noqa: E402
from swarm.messages import Sampling  # noqa: E402

START = 64  # tokens that those who decode begin with
WARM_TOKENS, STEADY_TOKENS = 8, 40
SLOWER_AT_MOST = 3.0


class Ticks(list[float]):
    """When each token of a session came."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def tick(self) -> None:
        self.append(time.perf_counter())
        self._more.set()

    async def reach(self, count: int) -> None:
        while len(self) < count:
            self._more.clear()
            await self._more.wait()


class Sessions:
    """Sessions on an engine that holds the whole model, by hand: no hop, no network."""

    def __init__(self, engine: Engine) -> None:
        assert engine.model is not None
        self.engine, self.model = engine, engine.model

    def ids(self, seed: int, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.model.vocab, (count,), generator=generator).tolist()

    async def prefill(self, ids: Sequence[int], room: int) -> tuple[SessionCache, int]:
        """In a first hop's chunks. Its KV and the first token."""
        cache, size, token = self.model.new_cache(len(ids) + room), HopConfig().prefill_chunk, None
        for at in range(0, len(ids), size):
            stop = min(at + size, len(ids))
            ask = SampleAt(stop, Sampling(), ()) if stop == len(ids) else None
            made = await self.engine.submit(Job(cache, self.model.span, at, ids=ids[at:stop], sample=ask))
            token = made.token
        assert token is not None
        return cache, token

    async def decode(self, seed: int, ticks: Ticks, room: int) -> None:
        """Until cancelled, or the room is full."""
        cache, token = await self.prefill(self.ids(seed, START), room)
        try:
            for position in range(START, START + room):
                ask = SampleAt(position + 1, Sampling(), ())
                made = await self.engine.submit(Job(cache, self.model.span, position, ids=[token], sample=ask))
                assert made.token is not None
                token = made.token
                ticks.tick()
        finally:
            self.engine.drop(cache)

    async def prompt_s(self, tokens: int) -> float:
        started = time.perf_counter()
        cache, _ = await self.prefill(self.ids(99, tokens), 1)
        self.engine.drop(cache)
        return time.perf_counter() - started


def per_token_s(times: Sequence[Sequence[float]], start: float, stop: float) -> float:
    """Of the slowest session."""
    return max((stop - start) / max(1, sum(start < at <= stop for at in ends)) for ends in times)


def longest_s(times: Sequence[Sequence[float]], start: float, stop: float) -> float:
    gaps = [b - a for ends in times for a, b in pairwise(ends) if start < b <= stop]
    return max(gaps, default=0.0)


async def fairness(sessions: Sessions, prompt: int, decoders: int) -> dict[str, float]:
    alone_s = await sessions.prompt_s(prompt)
    times, room = [Ticks() for _ in range(decoders)], WARM_TOKENS + STEADY_TOKENS + prompt
    tasks = [asyncio.create_task(sessions.decode(seed, ticks, room)) for seed, ticks in enumerate(times)]
    for ticks in times:
        await ticks.reach(WARM_TOKENS + STEADY_TOKENS)
    begin, start = times[0][WARM_TOKENS], time.perf_counter()
    before_s = per_token_s(times, begin, start)
    company_s = await sessions.prompt_s(prompt)
    stop = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "prompt alone, s": round(alone_s, 2),
        "prompt in company, s": round(company_s, 2),
        "token before, ms": round(1000 * before_s, 1),
        "token meanwhile, ms": round(1000 * per_token_s(times, start, stop), 1),
        "longest wait meanwhile, ms": round(1000 * longest_s(times, start, stop), 1),
    }


async def measure(options: argparse.Namespace) -> dict[str, float]:
    engine = Engine(load(options.model, torch.float32).ours, EngineConfig(threads=physical_cores()))
    engine.start()
    sessions = Sessions(engine)
    await sessions.prompt_s(START)  # brings in the weights
    try:
        return await fairness(sessions, options.prompt, options.sessions)
    finally:
        await engine.stop()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*MODELS, "tiny"), default=MODELS[0])
    parser.add_argument("--prompt", type=int, default=4000, help="tokens (default 4000)")
    parser.add_argument("--sessions", type=int, default=4, help="that decode (default 4)")
    parser.add_argument("--json", action="store_true", help="for uniformity: the last line always is JSON")
    results, targets = asyncio.run(measure(parser.parse_args(arguments))), Targets()
    for name, value in results.items():
        print(f"  {name:52} {value:10.4g}")
    slower = results["token meanwhile, ms"] / results["token before, ms"]
    targets.judge("times slower beside the prompt", slower, SLOWER_AT_MOST, at_most=True)
    report("fairness", results, targets.judged)


if __name__ == "__main__":
    main()
