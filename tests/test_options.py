"""What a generation may be asked for, checked before anybody is asked."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import UsageError
from swarm.options import Wanted, seeds_of
from swarm.tokenizer import SamplingDefaults

NAN = float("nan")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("max_tokens", 0, "must be at least 1, got 0"),
        ("max_tokens", 2.5, "is a whole number, got 2.5"),
        ("max_tokens", True, "is a whole number"),
        ("temperature", -0.1, "between 0 \\(greedy\\) and 100"),
        ("temperature", NAN, "between 0"),
        ("temperature", "hot", "is a number, got 'hot'"),
        ("top_k", -1, "between 0 \\(off\\)"),
        ("top_p", 0.0, "above 0 and be at most 1"),
        ("top_p", 1.01, "above 0 and be at most 1"),
        ("min_p", 1.5, "between 0 \\(off\\) and 1"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("presence_penalty", 101, "between -100 and 100"),
        ("frequency_penalty", NAN, "between -100 and 100"),
        ("logprobs", 21, "and 20"),
        ("logprobs", 1.0, "whole number"),
        ("seed", 1 << 63, "2\\*\\*63 - 1"),
        ("logit_bias", [1], "maps at most 1024 token ids"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "maps at most 1024 token ids"),
        ("logit_bias", {-1: 1.0}, "got the id -1"),
        ("logit_bias", {"5": 1.0}, "got the id '5'"),
        ("logit_bias", {5: 100.5}, "logit_bias of 5 must lie between -100 and 100"),
        ("stop", "", "stop"),
    ],
)
def test_what_is_out_of_bounds_is_named(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"{option}.*{said}|{said}"):
        Wanted(**{option: value})


def test_an_option_that_does_not_exist_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        Wanted(tempreature=1.0)  # type: ignore[call-arg]


def test_the_limits_themselves_are_allowed() -> None:
    Wanted(temperature=100, top_p=1, min_p=1.0, logprobs=20, seed=(1 << 63) - 1, logit_bias={0: -100, 9: 100.0})


def test_what_is_given_goes_before_the_model_s_defaults() -> None:
    defaults = SamplingDefaults(0.6, 50, 0.9, 0.05, 1.1)
    silent = Wanted(seed=1).sampling(defaults, 100, 7)
    assert (silent.temperature, silent.top_k, silent.top_p, silent.min_p) == (0.6, 50, 0.9, 0.05)
    assert (silent.repetition_penalty, silent.answer_from, silent.seed) == (1.1, 7, 1)
    off = Wanted(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1).sampling(defaults, 100, 7)
    assert (off.temperature, off.top_k, off.top_p, off.min_p, off.repetition_penalty) == (0, 0, 1, 0, 1)


def test_each_of_several_answers_has_a_seed_of_its_own() -> None:
    assert seeds_of(5, 3) == [5, 6, 7]
    assert seeds_of((1 << 63) - 1, 2) == [(1 << 63) - 1, 0]
    assert len(set(seeds_of(None, 10))) == 10
    for wrong in (0, 65, 1.5):
        with pytest.raises(UsageError, match="between 1 and 64"):
            seeds_of(None, wrong)  # type: ignore[arg-type]
