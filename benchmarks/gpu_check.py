"""Whether a peer on this GPU is right, and how fast: random weights in the shape of Llama 3.1 8B, bfloat16.

It takes less than four minutes. Where there is no CUDA device it says so and exits 0; `--device cpu --shape tiny`
runs the same code anywhere.

    exactness    the first layers with embedding and head: in float32 against transformers' own model over the same
                 weights, and in bfloat16 how far from float32, against how far transformers' own bfloat16 is
    tokens/s     of 1, 8 and 32 sessions through the engine, and of transformers' `generate` with as many rows
    share        weight bytes per token x tokens/s of one session, over the bandwidth at which this device reads

    python -m benchmarks.gpu_check [--device cuda|cpu] [--shape llama-8b|llama-1b|tiny] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import GREEDY_PROMPT, Ours, generate_token_s, random_prompt, read_bytes_per_s
from benchmarks.machine import Targets, report
from benchmarks.models import SHAPES, Both, load
from peer.attention import Row
from peer.model import PackedStep, SpanModel

LAYERS = 4  # for exactness: float32 of all 32 would need twice the memory
SESSIONS = (1, 8, 32)
ROUNDS, TOKENS = 3, 32
MOST_S = 240.0
# float32: sums are ordered differently. bfloat16: two ways to round are about equally far from the truth.
EXACT = {"float32 error": 1e-4, "bfloat16 error / transformers'": 1.5}
# Two texts in one packed step: (tokens of the first, of the second); prompts in two chunks, then single tokens
STEPS = ((17, 5), (12, 9), (1, 1), (1, 1), (1, 1))


@torch.inference_mode()
def our_logits(model: SpanModel, texts: list[list[int]]) -> Tensor:
    """Of every token of both texts, [tokens, vocab], computed by the packed steps of STEPS."""
    caches = [model.new_cache(len(text)) for text in texts]
    at, made = [0, 0], [[], []]  # type: ignore[var-annotated]
    for counts in STEPS:
        rows = [Row(caches[i], at[i], counts[i], logits=counts[i]) for i in range(2)]
        ids = [token for i in range(2) for token in texts[i][at[i] : at[i] + counts[i]]]
        logits = model.forward(PackedStep(model.span, rows, ids=torch.tensor(ids))).logits
        assert logits is not None
        for i, part in enumerate(logits.split(list(counts))):
            made[i].append(part)
            at[i] += counts[i]
            caches[i].finish(at[i])
    return torch.cat([*made[0], *made[1]])


@torch.inference_mode()
def their_logits(model: Any, texts: list[list[int]]) -> Tensor:
    """The same by one forward of transformers over each whole text."""
    return torch.cat([model(torch.tensor([text], device=model.device)).logits[0].float() for text in texts])


def exactness(shape: str, device: str) -> dict[str, float]:
    """float32 error: of the largest logit. bfloat16 errors: norms, over the norm of the right logits."""
    logits: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        both = load(shape, dtype, device, layers=LAYERS)
        generator = torch.Generator().manual_seed(2)
        lengths = [sum(counts[i] for counts in STEPS) for i in range(2)]
        texts = [torch.randint(both.ours.vocab, (n,), generator=generator).tolist() for n in lengths]
        logits[dtype] = our_logits(both.ours, texts), their_logits(both.theirs, texts)
        del both
        _free(device)
    right = logits[torch.float32][1]
    apart = (logits[torch.float32][0] - right).abs().max() / right.abs().max()
    ours, theirs = (float((made - right).norm() / right.norm()) for made in logits[torch.bfloat16])
    return {
        "float32 error": float(apart),
        "bfloat16 error": ours,
        "transformers' bfloat16 error": theirs,
        "bfloat16 error / transformers'": ours / theirs,
    }


async def speed(both: Both, device: str) -> dict[str, float]:
    """Medians over interleaved rounds."""
    ours, prompt = Ours(both.ours, threads=None), random_prompt(both, GREEDY_PROMPT)
    memory = torch.ones(1 << (28 if device != "cpu" else 22), device=device)
    await ours.open(prompt, max(SESSIONS), TOKENS)
    rows: list[dict[str, float]] = []
    for number in range(-1, ROUNDS):  # round -1 warms up
        row = {"read GB/s": read_bytes_per_s(memory) / 1e9}
        for n in SESSIONS:
            theirs_s = await asyncio.to_thread(generate_token_s, both.theirs, prompt, TOKENS, n)
            decoded = await ours.decode(n, TOKENS)
            row |= {f"{n}: tokens/s": n / decoded.token_s, f"{n}: transformers tokens/s": n / theirs_s}
            row[f"{n}: ours / transformers"] = theirs_s / decoded.token_s
            if n == 1:
                read = both.weight_bytes / decoded.token_s
                row["share of read bandwidth"] = read / row["read GB/s"] / 1e9
        if number >= 0:
            rows.append(row)
    await ours.engine.stop()
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def check(shape: str, device: str) -> tuple[dict[str, Any], Targets]:
    started, targets = time.perf_counter(), Targets()
    name = torch.cuda.get_device_name(device) if device != "cpu" else "the CPU"
    print(f"{name}, random weights in the shape of {shape}:", flush=True)
    found = exactness(shape, device)
    for key, value in found.items():
        print(f"  {key:52} {value:10.3g}", flush=True)
    for key, limit in EXACT.items():
        targets.judge(key, found[key], limit, at_most=True)
    both = load(shape, torch.bfloat16, device)
    print(f"  {'layers run without modules':52} {'yes' if both.ours.fused is not None else 'no'}")
    measured = asyncio.run(speed(both, device))
    for key, value in measured.items():
        print(f"  {key:52} {value:10.3f}", flush=True)
    seconds = time.perf_counter() - started
    targets.judge("seconds in all", seconds, MOST_S, at_most=True)
    return {"device": name, "shape": shape, **found, **measured}, targets


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if the numbers are wrong."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--json", action="store_true", help="for uniformity: the last line always is JSON")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here: nothing to check")
        report("gpu_check", {"device": None}, {})
        return 0
    results, targets = check(options.shape, options.device)
    report("gpu_check", results, targets.judged)
    return 0 if all(targets.judged[name]["met"] for name in EXACT) else 1


if __name__ == "__main__":
    sys.exit(main())
