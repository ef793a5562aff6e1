"""Logits to a token: the same one on whichever peer does it.

Invariant: the result depends on the logits, the ids so far, the sampling parameters and (seed, position) only.
Gumbel-max: `argmax(logits / temperature + g)` with g Gumbel(0, 1) samples the softmax exactly
(Gumbel 1954; Maddison et al., arXiv:1411.0030), and small numeric noise in the logits flips only
near-ties, which an inverse-CDF draw would not promise. The noise comes from Philox keyed by (seed,
position), as raw 64-bit words: a stream that numpy guarantees, on every platform.

What was asked for is applied in transformers' order, in float64 on the CPU: bias, repetition penalty, presence and
frequency penalty; then, unless greedy, temperature, top-k, top-p, min-p. Where values tie at a filter's edge
all of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.messages import Likelihoods, Sampling

Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float64]


COLDEST = 1e-200  # float32's largest logit over less than that is beyond float64


def sample(logits: Logits, sampling: Sampling, position: int, ids: Sequence[int] = ()) -> int:
    """The id at `position`. logits: [vocab], finite, unchanged. ids: the session's so far, for penalties.

    Greedy (temperature 0) takes the highest logit; ties go to the lowest id.
    """
    if _shifts(sampling):
        logits = shift_logits(np.array(logits, dtype=np.float64), sampling, ids)
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    filtered = filter_logits(np.asarray(logits, dtype=np.float64), sampling)
    kept = np.flatnonzero(np.isfinite(filtered))
    noise = gumbel_noise(sampling.seed, position, len(filtered), kept)
    return int(kept[np.argmax(filtered[kept] + noise)])


def _shifts(sampling: Sampling) -> bool:
    off = sampling.repetition_penalty == 1.0 and sampling.presence_penalty == sampling.frequency_penalty == 0.0
    return bool(sampling.logit_bias) or not off


def shift_logits(logits: FloatArray, sampling: Sampling, ids: Sequence[int]) -> FloatArray:
    """Bias and penalties, in place. logits: [vocab]. ids outside of the vocabulary don't count.

    repetition: a positive logit of an id that occurred is divided, a negative one multiplied (arXiv:1909.05858).
    presence and frequency: once, and once per occurrence in the answer, subtracted (OpenAI's definition).
    """
    for token, bias in sampling.logit_bias:
        if token < len(logits):
            logits[token] += bias
    seen = np.asarray(ids, dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        known = _within(np.unique(seen), len(logits))
        values = logits[known]
        factor = sampling.repetition_penalty
        logits[known] = np.where(values < 0, values * factor, values / factor)
    answer, counts = np.unique(_within(seen[sampling.answer_from :], len(logits)), return_counts=True)
    logits[answer] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return logits


def _within(ids: npt.NDArray[np.int64], vocabulary: int) -> npt.NDArray[np.int64]:
    return ids[(ids >= 0) & (ids < vocabulary)]


def filter_logits(logits: FloatArray, sampling: Sampling) -> FloatArray:
    """Scaled logits, -inf where a filter removed the id."""
    if sampling.temperature < COLDEST:  # the nearer to greedy, the more may get to -inf, but never the highest
        logits = logits - logits.max()
    with np.errstate(over="ignore"):
        scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = _keep_from(scaled, float(np.partition(scaled, -sampling.top_k)[-sampling.top_k]))
    if sampling.top_p < 1.0:
        scaled = _keep_from(scaled, _nucleus_edge(scaled, sampling.top_p))
    if sampling.min_p > 0.0:  # a probability below min_p times the highest (arXiv:2407.01082)
        scaled = _keep_from(scaled, float(scaled.max()) + float(np.log(sampling.min_p)))
    return scaled


def _keep_from(logits: FloatArray, lowest: float) -> FloatArray:
    return np.where(logits >= lowest, logits, -np.inf)


def _nucleus_edge(logits: FloatArray, top_p: float) -> float:
    """The lowest logit that stays when ids of the least total probability <= 1 - top_p go."""
    ascending = np.sort(logits[np.isfinite(logits)])
    weights = np.exp(ascending - ascending[-1])
    removed = np.cumsum(weights) <= (1.0 - top_p) * weights.sum()
    removed[-1] = False  # at least one stays
    return float(ascending[int(np.count_nonzero(removed))])


def gumbel_noise(
    seed: int, position: int, count: int, kept: npt.NDArray[np.int64] | None = None
) -> FloatArray:
    """Gumbel(0, 1) noise from (seed, position) alone, one value for each of `count` ids, or for the `kept` of them."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)
    if kept is not None:
        words = words[kept]
    uniform = (words >> np.uint64(11)) * 2.0**-53 + 2.0**-54  # open interval: both logs stay finite
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise


def likelihoods(logits: Logits, token: int, count: int) -> Likelihoods:
    """log softmax of the model's own logits [vocab], of `token` and of the `count` likeliest (ties: the lowest ids)."""
    values = np.asarray(logits, dtype=np.float64)
    highest = float(values.max())
    total = highest + float(np.log(np.exp(values - highest).sum()))
    count = min(count, len(values))
    edge = np.partition(values, -count)[-count] if count else np.inf
    candidates = np.flatnonzero(values >= edge)
    order = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    # rounding may leave a sure thing a hair above 1
    return Likelihoods(
        min(0.0, float(values[token]) - total), tuple((int(i), min(0.0, float(values[i]) - total)) for i in order)
    )
