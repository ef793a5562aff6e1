"""Logits to a token: the same one on whichever peer does it.

Invariant: the result depends on the logits, the sampling parameters and (seed, position) only.
Gumbel-max: `argmax(logits / temperature + g)` with g Gumbel(0, 1) samples the softmax exactly
(Gumbel 1954; Maddison et al., arXiv:1411.0030), and small numeric noise in the logits flips only
near-ties, which an inverse-CDF draw would not promise. The noise comes from Philox keyed by (seed,
position), as raw 64-bit words: a stream that numpy guarantees, on every platform.

Filters run in transformers' order (temperature, top-k, top-p), in float64 on the CPU. Where values
tie at a filter's edge all of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.messages import Sampling

Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float64]


def sample(logits: Logits, sampling: Sampling, position: int, ids: Sequence[int] = ()) -> int:
    """The id at `position`. logits: [vocab], finite. ids: the session's so far, for penalties.

    Greedy (temperature 0) takes the highest logit; ties go to the lowest id.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    filtered = filter_logits(np.asarray(logits, dtype=np.float64), sampling)
    return int(np.argmax(filtered + gumbel_noise(sampling.seed, position, len(filtered))))


def filter_logits(logits: FloatArray, sampling: Sampling) -> FloatArray:
    """Scaled logits, -inf where a filter removed the id."""
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = _keep_from(scaled, float(np.partition(scaled, -sampling.top_k)[-sampling.top_k]))
    if sampling.top_p < 1.0:
        scaled = _keep_from(scaled, _nucleus_edge(scaled, sampling.top_p))
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


def gumbel_noise(seed: int, position: int, count: int) -> FloatArray:
    """Gumbel(0, 1) noise, one value per id, from (seed, position) alone."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)
    uniform = (words >> np.uint64(11)) * 2.0**-53 + 2.0**-54  # open interval: both logs stay finite
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise
