"""Sampling against transformers' own processors, and against the softmax itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peer.sampling import filter_logits, gumbel_noise, likelihoods, sample, shift_logits
from swarm.messages import Sampling

torch.set_num_threads(1)
CASES = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.5, top_k=40, top_p=0.9),
    Sampling(temperature=2.0, top_p=0.0),
    Sampling(temperature=1.0, top_k=10_000, top_p=0.999),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.5, top_k=60, top_p=0.95, min_p=0.02),
]


def processors(sampling: Sampling) -> LogitsProcessorList:
    """As generate() would put them together."""
    made = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        made.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        made.append(MinPLogitsWarper(sampling.min_p))
    return made


@pytest.mark.parametrize("sampling", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_filters_equal_those_of_transformers(sampling: Sampling, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0.0, 3.0, 300)
    ours = filter_logits(logits, sampling)
    theirs = processors(sampling)(torch.zeros(1, 0, dtype=torch.long), torch.from_numpy(logits)[None])[
        0
    ].numpy()
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    kept = np.isfinite(ours)
    assert np.allclose(ours[kept], theirs[kept])


SHIFTS = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7),
    Sampling(logit_bias=((3, 5.0), (299, -100.0))),
    Sampling(repetition_penalty=1.2, logit_bias=((7, -2.5), (8, 2.5), (9, 0.25))),
]


@pytest.mark.parametrize("sampling", SHIFTS)
@pytest.mark.parametrize("seed", range(5))
def test_bias_and_repetition_penalty_equal_those_of_transformers(sampling: Sampling, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, ids = rng.normal(0.0, 3.0, 300), [7, 8, *rng.integers(0, 300, 40).tolist()]
    made = LogitsProcessorList()  # in the order of transformers' own _get_logits_processor
    if sampling.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    made.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    theirs = made(torch.tensor([ids]), torch.from_numpy(logits.astype(np.float32))[None])[0].numpy()
    assert np.allclose(shift_logits(logits.copy(), sampling, ids), theirs, atol=1e-5)
    assert sample(logits, sampling, 40, ids) == int(theirs.argmax())


@pytest.mark.parametrize("seed", range(20))
def test_everything_at_once_is_drawn_from_what_transformers_leaves(seed: int) -> None:
    """Bias, penalty and filters in transformers' order; the id is the one that the noise picks from the result."""
    rng = np.random.default_rng(seed)
    logits, ids = rng.normal(0.0, 3.0, 300), rng.integers(0, 300, 40).tolist()
    bias = tuple((int(token), float(rng.normal(0.0, 5.0))) for token in rng.permutation(300)[:10])
    sampling = Sampling(
        temperature=float(rng.uniform(0.3, 2.0)), top_k=int(rng.integers(2, 60)), top_p=float(rng.uniform(0.3, 1.0)),
        min_p=float(rng.uniform(0.0, 0.2)), repetition_penalty=float(rng.uniform(0.6, 1.6)), seed=seed, logit_bias=bias,
    )  # fmt: skip
    made = LogitsProcessorList([SequenceBiasLogitsProcessor({(token,): value for token, value in bias})])
    made.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    made += processors(sampling)
    theirs = made(torch.tensor([ids]), torch.from_numpy(logits)[None])[0].numpy()
    for position in range(40, 60):
        right = int(np.argmax(theirs + gumbel_noise(seed, position, 300)))
        assert sample(logits, sampling, position, ids) == right


def test_presence_and_frequency_count_what_the_answer_has() -> None:
    # By hand, from OpenAI's definition: logit - count * frequency - (count > 0) * presence.
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, answer_from=3)
    ids = [0, 1, 1, 2, 4, 4, 4]  # the prompt is 0, 1, 1
    shifted = shift_logits(np.array([1.0, 1.0, 1.0, 1.0, 1.0]), sampling, ids)
    assert shifted.tolist() == [1.0, 1.0, 0.25, 1.0, -0.25]


def test_the_logits_given_stay_as_they_were() -> None:
    logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert sample(logits, Sampling(logit_bias=((0, 50.0),), repetition_penalty=2.0), 3, [0, 1, 2]) == 0
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    logits = np.array([1.0, 2.0, 3.0])
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((3, 9.0), (1 << 24, 9.0)))
    assert shift_logits(logits.copy(), sampling, [3, 70_000]).tolist() == logits.tolist()


@pytest.mark.parametrize("count", [0, 1, 5, 20, 300])
def test_likelihoods_are_the_log_softmax_of_torch(count: int) -> None:
    logits = np.random.default_rng(7).normal(0.0, 4.0, 300).astype(np.float32)
    right = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    said = likelihoods(logits, 11, count)
    top = right.topk(count)
    assert said.chosen == pytest.approx(right[11].item(), abs=1e-12)
    assert [token for token, _ in said.top] == top.indices.tolist()
    assert [value for _, value in said.top] == pytest.approx(top.values.tolist(), abs=1e-12)


def test_of_equally_likely_ids_the_lowest_are_told() -> None:
    said = likelihoods(np.array([0.0, 5.0, 5.0, 5.0], dtype=np.float32), 3, 2)
    assert [token for token, _ in said.top] == [1, 2]


def test_a_sure_thing_is_not_more_than_sure() -> None:
    assert likelihoods(np.array([0.0, 1000.0], dtype=np.float32), 1, 1).chosen == 0.0


def test_greedy_takes_the_lowest_id_of_equal_ones() -> None:
    assert sample(np.array([0.0, 2.0, 1.0, 2.0], dtype=np.float32), Sampling(), position=3) == 1


def test_top_k_of_one_is_greedy_whatever_the_seed() -> None:
    logits = np.random.default_rng(1).normal(size=100).astype(np.float32)
    picks = {sample(logits, Sampling(temperature=1.5, top_k=1, seed=s), 7) for s in range(20)}
    assert picks == {int(logits.argmax())}


def test_seed_and_position_alone_decide() -> None:
    logits = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    sampling = Sampling(temperature=1.0, seed=11)
    assert sample(logits, sampling, 5) == sample(logits.copy(), sampling, 5, ids=[1, 2, 3])
    assert len({sample(logits, sampling, p) for p in range(50)}) > 20
    assert len({sample(logits, Sampling(temperature=1.0, seed=s), 5) for s in range(50)}) > 20


def test_the_noise_is_the_same_in_every_release() -> None:
    # From Philox4x64-10's definition (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
    # computed here in plain integers: key (seed, position), counter 1 for the first four words.
    def philox(counter: list[int], key: list[int]) -> list[int]:
        mask = (1 << 64) - 1
        for i in range(10):
            if i:
                key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
            high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 1 << 64)
            high1, low1 = divmod(0xCA5A826395121157 * counter[2], 1 << 64)
            counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        return counter

    words = philox([1, 0, 0, 0], [42, 7]) + philox([2, 0, 0, 0], [42, 7])
    expected = [-math.log(-math.log((word >> 11) * 2.0**-53 + 2.0**-54)) for word in words]
    assert np.allclose(gumbel_noise(42, 7, 8), expected, rtol=1e-12)


def test_the_largest_seed_and_position_work() -> None:
    assert np.isfinite(gumbel_noise((1 << 63) - 1, 1 << 24, 10)).all()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_k=6, seed=4)]
)
def test_gumbel_max_samples_the_softmax(sampling: Sampling) -> None:
    logits = np.random.default_rng(5).normal(0.0, 1.0, 12)
    filtered = filter_logits(logits, sampling)
    probabilities = np.exp(filtered - filtered.max())
    probabilities /= probabilities.sum()
    draws = 20_000
    counts = np.bincount([sample(logits, sampling, p) for p in range(draws)], minlength=12)
    assert not counts[probabilities == 0].any()
    kept = probabilities > 0
    expected = draws * probabilities[kept]
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    # The 99.9th percentile of chi-square, by Wilson and Hilferty (1931).
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-200, 1e-30])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.5}, {"top_p": 0.0}, {"top_k": 3}, {"min_p": 0.1}, {"min_p": 1.0}])
@pytest.mark.parametrize("largest", [1.0, 3e38, -3e38])
def test_the_coldest_temperatures_are_greedy(temperature: float, others: dict[str, float], largest: float) -> None:
    """Anybody may ask for them; a division that overflows must not end in no id at all."""
    logits = np.linspace(-3e38, largest, 50, dtype=np.float32)
    logits[17] = max(1.1 * largest, 2.0)
    assert sample(logits, Sampling(temperature=temperature, seed=3, **others), 5) == int(np.argmax(logits))
