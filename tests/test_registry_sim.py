"""The registry under every fault at once, in virtual time: random histories, one a seed.

A failure names its seed and the command that replays it: `python -m tests.sim --seed N -v`. Any number of
seeds by hand: `python -m tests.sim --seeds N`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import test_registry, test_table
from tests.sim.__main__ import replay_command
from tests.sim.mutations import TOLD, without
from tests.sim.registry_trial import Trial

SEEDS, BLOCK = 40, 8
QUICK_SEED = 1


@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_every_history_ends_in_agreement_and_breaks_no_invariant(start: int) -> None:
    for seed in range(start, start + BLOCK):
        try:
            Trial(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, replay: {replay_command(seed)}: {error!r}") from error


def test_one_seed_gives_one_trace_in_any_process() -> None:
    """Whatever Python hashes strings with."""
    script = f"from tests.sim.registry_trial import Trial; print(Trial({QUICK_SEED}).run().trace)"
    traces = {Trial(QUICK_SEED).run().trace}
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        traces.add(done.stdout.strip())
    assert len(traces) == 1


def test_different_seeds_give_different_traces() -> None:
    assert Trial(QUICK_SEED).run().trace != Trial(QUICK_SEED + 1).run().trace


@pytest.mark.parametrize("rule", sorted(TOLD))
def test_a_rule_that_none_of_these_histories_misses_is_missed_by_the_story_that_is_named(rule: str) -> None:
    (story,) = (getattr(told, TOLD[rule]) for told in (test_registry, test_table) if hasattr(told, TOLD[rule]))
    story()
    with without(rule), pytest.raises((AssertionError, ValueError)):
        story()
