"""How many of those who write at once share a turn: one peer with all layers, sessions over real connections.

Continuous batching pays only if steps meet: each session's next token comes back to the engine through the hop's core,
and those who come a moment later would miss the turn. The peer (its engine in a thread of its own) and all clients are
in this process, so that their work beside the forward pass competes with the peer's more than it would elsewhere.
Every session has a connection and a prompt of its own, greedy.

    python -m benchmarks.many [--model MODEL] [--sessions N] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from peer.threads import quiet_threads

quiet_threads()  # as peers do, before torch is imported

from benchmarks.machine import Targets, report  # noqa: E402
from peer.model import PackedStep, SpanModel, StepOutput  # noqa: E402
from peer.service import PeerOptions, PeerService  # noqa: E402
from peer.source import resolve_model  # noqa: E402
from swarm import AsyncClient  # noqa: E402
from swarm.state import StateDir  # noqa: E402

SHARE = 0.9  # of the sessions that decode at the time, in the mean over tokens


class Counting:
    """A model that notes which sessions have a decode step in each pass."""

    def __init__(self, model: SpanModel) -> None:
        self._model, self.passes = model, list[set[int]]()

    def forward(self, step: PackedStep) -> StepOutput:
        if decoding := {id(row.cache) for row in step.rows if row.tokens == 1}:
            self.passes.append(decoding)
        return self._model.forward(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def shared(passes: list[set[int]]) -> float:
    """Of the sessions that were between their first and their last decode step, what part a token met in its pass; the
    mean over tokens."""
    first = {key: at for at, keys in reversed(list(enumerate(passes))) for key in keys}
    last = {key: at for at, keys in enumerate(passes) for key in keys}
    begun, ended = Counter(first.values()), Counter(last.values())
    decoding, met, tokens = 0, 0.0, 0
    for at, keys in enumerate(passes):
        decoding += begun[at]
        met, tokens = met + len(keys) ** 2 / decoding, tokens + len(keys)
        decoding -= ended[at]
    return met / tokens


async def answer(address: str, home: Path, number: int, tokens: int) -> float:
    """Tokens/s of one session, but for the first token."""
    async with AsyncClient(address, home=home / f"client{number}") as client:
        prompt = f"Tell me a long story about the number {number}."
        done = await client.generate(prompt, max_tokens=tokens, temperature=0)
        return done.timing.tokens_per_s


async def measure(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        home, cache = Path(folder), StateDir.open(None).cache
        layers = f"0:{resolve_model(options.model, cache=cache).layers}"
        peer = PeerService(
            PeerOptions(
                options.model, host="127.0.0.1", port=0, layers=layers, device="cpu", dtype="float32", lan=False,
                context=2048, max_sessions=options.sessions,
            ),
            state=StateDir(home / "peer", cache),
        )  # fmt: skip
        await peer.start()
        try:
            counting = peer.engine.model = Counting(peer.engine.model)  # type: ignore[assignment, arg-type]
            address = f"127.0.0.1:{peer.transport.port}"
            alone = await answer(address, home, 0, options.tokens)
            counting.passes.clear()
            begun = time.perf_counter()
            each = await asyncio.gather(
                *(answer(address, home, number, options.tokens) for number in range(1, options.sessions + 1))
            )
            took = time.perf_counter() - begun
        finally:
            await peer.close()
    sizes = Counter(map(len, counting.passes))
    print("sessions in a turn:", ", ".join(f"{size} x{n}" for size, n in sorted(sizes.items(), reverse=True)))
    return {
        "one session, tokens/s": round(alone, 2),
        "each of all, tokens/s": round(statistics.median(each), 2),
        "all together, tokens/s": round(options.sessions * options.tokens / took, 1),
        "sessions in a token's turn, of those that decode": round(shared(counting.passes), 3),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="anything that `swarm peer` takes (default smollm2)")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="in each answer (default 48)")
    parser.add_argument("--json", action="store_true", help="for uniformity: the last line always is JSON")
    options = parser.parse_args(arguments)
    results, targets = asyncio.run(measure(options)), Targets()
    for name, value in results.items():
        print(f"  {name:52} {value:10.4g}")
    name = "sessions in a token's turn, of those that decode"
    targets.judge(name, results[name], SHARE)
    report("many", results, targets.judged)


if __name__ == "__main__":
    main()
