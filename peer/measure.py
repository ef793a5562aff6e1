"""What a loaded span really takes, by steps of its own: seconds for the planner, bytes for the memory's plan.

Run in the engine's thread (`Engine.call`), before the peer serves. The steps are real ones over sessions outside of
any pool; nothing of them stays.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peer.attention import Row
from peer.capacity import OUT_OF_MEMORY
from peer.model import PackedStep, SpanModel
from routing.spans import Span, Speed
from swarm.errors import BrokenModel

FloatArray = npt.NDArray[np.float64]

TRIAL_ROWS = 4  # sessions of a token each, so that one that is strange spoils no other
TRIAL_TOKENS = 128  # a trial prefill: enough to be bound by arithmetic, and to run as the passes of long prompts do
LEAST_STEP_S = 0.002  # a hop costs two thread hand-overs and a message (about 0.5 ms) and can fail: no hops for nothing
TRIAL_ROUNDS = 10  # most that are needed for a best one
TRIAL_SECONDS = 0.6  # most that trial decode steps take in all, before the last round begins


def measure_speed(model: SpanModel, clock: Callable[[], float] = time.perf_counter) -> Speed:
    """What decode and prefill really take here.

    Decode steps over several sub-spans of the claim are timed in turn, the best of each counts (what else
    runs on the machine only ever adds), and `Speed`'s formula is fitted to them by least squares. What a
    claim can't tell apart (one layer's time from a step's own) is shared out.
    """
    prefill_s = _prefill_s(model, clock)  # first: it also brings in the weights
    spans = _trial_spans(model.span)
    steps = [_trial_step(model, span) for span in spans]
    best, begun, rounds = [float("inf")] * len(spans), clock(), 0
    while rounds < 2 or (rounds < TRIAL_ROUNDS and clock() - begun < TRIAL_SECONDS):
        best = [min(b, _timed(model, step, clock)) for b, step in zip(best, steps, strict=True)]
        rounds += 1
    features = [[1.0, len(s), s.start == 0, s.stop == model.layers_total] for s in spans]
    step_s, layer_s, embed_s, head_s = _fit_non_negative(np.array(features, dtype=np.float64), np.array(best))
    return Speed(
        max(step_s, LEAST_STEP_S), layer_s, embed_s, head_s, prefill_s / TRIAL_TOKENS / len(model.span)
    )


def _fit_non_negative(features: FloatArray, seconds: FloatArray) -> list[float]:
    """Least squares; a share that comes out negative is noise, so it is 0 and the others are fitted again."""
    kept = list(range(features.shape[1]))
    while True:
        fitted = np.linalg.lstsq(features[:, kept], seconds, rcond=None)[0]
        worst = int(np.argmin(fitted))
        if fitted[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    shares = dict(zip(kept, fitted, strict=True))
    return [max(0.0, float(shares.get(column, 0.0))) for column in range(features.shape[1])]


def _trial_spans(claim: Span) -> list[Span]:
    a, b = claim.start, claim.stop
    middle = (a + b) // 2
    cuts = [(a, b), (a, a + 1), (b - 1, b), (a, middle), (middle, b), (a + 1, b - 1)]
    return list(dict.fromkeys(Span(x, y) for x, y in cuts if x < y))


def _trial_step(model: SpanModel, span: Span, tokens: int = 1) -> PackedStep:
    is_last = span.stop == model.layers_total
    row = Row(model.new_cache(tokens, span), 0, tokens, logits=int(is_last))
    return PackedStep(span, [row], **_trial_input(model, tokens, span))


def _prefill_s(model: SpanModel, clock: Callable[[], float]) -> float:
    step = _trial_step(model, model.span, TRIAL_TOKENS)
    _timed(model, step, clock)
    return min(_timed(model, step, clock) for _ in range(2))


def _trial_input(model: SpanModel, tokens: int, span: Span) -> dict[str, Tensor]:
    if span.start == 0:
        return {"ids": torch.zeros(tokens, dtype=torch.long)}
    return {"hidden": torch.zeros(tokens, model.width, dtype=model.dtype)}


def check_it_runs(model: SpanModel) -> None:
    """Raises BrokenModel if the span can't take a step, or gives no numbers for any of several tokens: a config that
    doesn't fit its weights, weights that are damaged, or numbers too large for the dtype. Better now than to clients.

    Of a last span the logits count: without them the last layer doesn't go on.
    """
    is_last = model.span.stop == model.layers_total
    rows = [Row(model.new_cache(1), 0, 1, logits=int(is_last)) for _ in range(TRIAL_ROWS)]
    if model.span.start == 0:
        inputs = {"ids": torch.linspace(0, model.vocab - 1, TRIAL_ROWS).long()}
    else:
        made = torch.randn(TRIAL_ROWS, model.width, generator=torch.Generator().manual_seed(0))
        inputs = {"hidden": made.to(model.dtype)}
    try:
        output = model.forward(PackedStep(model.span, rows, **inputs))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if re.search(OUT_OF_MEMORY, str(error)):
            raise
        fault = " ".join(str(error).split())[:160]
        raise BrokenModel(
            f"layers {model.span} can't take a step ({fault}): the model's config doesn't fit its weights; "
            "fetch both again"
        ) from error
    numbers = output.hidden if output.logits is None else output.logits
    if not torch.isfinite(numbers).all(dim=-1).any():
        dtype = str(model.dtype).removeprefix("torch.")
        wider = f", or its numbers are too large for {dtype} (try --dtype bfloat16)" * (model.dtype == torch.float16)
        raise BrokenModel(
            f"layers {model.span} give nothing that is a number for any of {TRIAL_ROWS} tokens: a weight file or "
            f"config.json is damaged{wider}; fetch them again"
        )


def _timed(model: SpanModel, step: PackedStep, clock: Callable[[], float]) -> float:
    started = clock()
    output = model.forward(step)
    output.hidden[-1, :1].cpu()  # waits for the device
    return clock() - started


def measure_workspace(model: SpanModel, tokens: int) -> int | None:
    """Bytes that a prefill chunk needs beyond weights and KV, by a real one. None: can't be told here."""
    step = _trial_step(model, model.span, tokens)
    cache = step.rows[0].cache
    cache.touch()  # its pages are KV, not workspace
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        model.forward(step)
        torch.cuda.synchronize(model.device)
        return torch.cuda.max_memory_allocated(model.device) - before
    before, code_before = _reset_peak(), _memory_line("RssFile")
    model.forward(step)
    peak, code_after = _memory_line("VmHWM"), _memory_line("RssFile")
    if before is None or peak is None or code_before is None or code_after is None:
        return None
    # libraries' code that this step was the first to touch (up to 10 MiB were seen) is no workspace
    return max(0, peak - before - (code_after - code_before))


def _reset_peak() -> int | None:
    """Linux: make the process's peak what it holds now, and say how much that is."""
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError:
        return None
    return _memory_line("VmRSS")


def _memory_line(name: str) -> int | None:
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
    except (OSError, StopIteration):
        return None
