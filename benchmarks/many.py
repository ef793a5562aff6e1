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

SHARE = 0.8  # of the sessions that decode, in the mean of all turns weighed by their tokens


class Counting:
    """A model that notes how many sessions each pass of decode steps has."""

    def __init__(self, model: SpanModel) -> None:
        self._model, self.rows = model, Counter[int]()

    def forward(self, step: PackedStep) -> StepOutput:
        if all(row.tokens == 1 for row in step.rows):
            self.rows[len(step.rows)] += 1
        return self._model.forward(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


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
            counting.rows.clear()
            begun = time.perf_counter()
            each = await asyncio.gather(
                *(answer(address, home, number, options.tokens) for number in range(1, options.sessions + 1))
            )
            took = time.perf_counter() - begun
        finally:
            await peer.close()
    shared = sum(rows * rows * turns for rows, turns in counting.rows.items())
    steps = sum(rows * turns for rows, turns in counting.rows.items())
    print("sessions in a turn:", ", ".join(f"{r} x{n}" for r, n in sorted(counting.rows.items(), reverse=True)))
    return {
        "one session, tokens/s": round(alone, 2),
        "each of all, tokens/s": round(statistics.median(each), 2),
        "all together, tokens/s": round(options.sessions * options.tokens / took, 1),
        "sessions that a token shared its turn with": round(shared / steps, 2),
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
    shared = results["sessions that a token shared its turn with"] / options.sessions
    targets.judge("part of the sessions that a token shared its turn with", shared, SHARE)
    report("many", results, targets.judged)


if __name__ == "__main__":
    main()
