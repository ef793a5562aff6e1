"""Benchmarks that nobody runs rot: each runs here on a tiny model, and what it says is right of what it measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import engine, fairness, gpu_check
from benchmarks.machine import Targets
from benchmarks.many import shared
from benchmarks.models import load
from peer.cache import LayerStore

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """What a benchmark sets for the thread that it runs in."""
    yield
    torch.set_num_threads(1)


def told(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """All that was printed, and the JSON of its last line."""
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_the_engines_benchmark_judges_every_target(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(engine, "physical_cores", lambda: 1)
    engine.main(["--model", "tiny", "--dtype", "float32", "--seconds", "0"])
    text, said = told(capsys)
    names = {
        "one session / transformers",
        "16 sessions / one session",
        "16 sessions / transformers",
        "share of read bandwidth",
        "overhead outside the forward",
        "prefill / transformers",
    }
    assert set(said["targets"]) == {f"tiny float32: {name}" for name in names}
    assert text.count("   target ") == len(names)
    found = said["results"]["tiny float32 decode"]
    assert found["one session tokens/s"] > 0 and 0 < found["overhead outside the forward"] < 1


def test_the_benchmark_of_fairness_judges_what_it_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "physical_cores", lambda: 1)
    monkeypatch.setattr(fairness, "STEADY_TOKENS", 5)
    fairness.main(["--model", "tiny", "--prompt", "300", "--sessions", "2"])
    _, said = told(capsys)
    found, (judged,) = said["results"], said["targets"].values()
    assert judged["target"] == 3.0
    assert judged["value"] == pytest.approx(found["token meanwhile, ms"] / found["token before, ms"], rel=1e-3)
    assert found["longest wait meanwhile, ms"] > 0 and found["prompt in company, s"] > 0


def test_a_token_s_company_is_counted_among_those_who_decode_at_the_time() -> None:
    assert shared([{1}, {1, 2}, {1, 2}, {2}]) == 1.0, "who hasn't begun, or is at the end, is missed by nobody"
    assert shared([{1, 2}, {1}, {2}, {1, 2}]) == pytest.approx((2 + 0.5 + 0.5 + 2) / 6)


def test_a_target_is_a_floor_or_a_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    targets = Targets()
    targets.judge("fast", 1.29, 1.3)
    targets.judge("as fast", 1.3, 1.3)
    targets.judge("small", 0.04, 0.05, at_most=True)
    targets.judge("large", 0.06, 0.05, at_most=True)
    assert [one["met"] for one in targets.judged.values()] == [False, True, True, False]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["MISSED", "met", "met", "MISSED"]


def test_both_models_are_over_the_same_weights() -> None:
    both = load("tiny", torch.bfloat16)
    ours, theirs = both.ours.parameters(), both.theirs.parameters()
    assert {one.data_ptr() for one in ours} == {one.data_ptr() for one in theirs}
    unread = both.theirs.get_input_embeddings().weight.nbytes  # untied: one row of it is read, the head is another
    assert both.weight_bytes == sum(one.nbytes for one in both.theirs.parameters()) - unread


def test_in_float32_ours_holds_the_same_weights_in_bfloat16() -> None:
    both = load("tiny", torch.float32)
    ours, theirs = both.ours.shell.get_output_embeddings().weight, both.theirs.get_output_embeddings().weight
    assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.float32) and torch.equal(ours.float(), theirs)
    read = {one for one in both.theirs.parameters() if one is not both.theirs.get_input_embeddings().weight}
    assert both.weight_bytes == sum(one.numel() * (2 if one.ndim > 1 else 4) for one in read)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SESSIONS", (1, 3))
    monkeypatch.setattr(gpu_check, "TOKENS", 3)
    monkeypatch.setattr(gpu_check, "ROUNDS", 1)


@pytest.mark.usefixtures("small")
def test_the_device_check_runs_its_whole_code_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--shape", "tiny"]) == 0
    _, said = told(capsys)
    assert all(said["targets"][name]["met"] for name in gpu_check.EXACT)
    results = said["results"]
    assert results["float32 error"] < 1e-5 and 0 < results["bfloat16 error"] < 0.05
    assert {"1: tokens/s", "3: tokens/s", "share of read bandwidth"} <= set(results)


@pytest.mark.usefixtures("small")
def test_the_device_check_fails_where_the_numbers_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LayerStore.write

    def late(store: LayerStore, position: int, key: torch.Tensor, value: torch.Tensor) -> Any:
        keys, values = right(store, position, key, value)
        return keys, values * (1.0 + 0.001 * position)  # as if what came before had been forgotten a little

    monkeypatch.setattr(LayerStore, "write", late)
    assert gpu_check.main(["--device", "cpu", "--shape", "tiny"]) == 1
    assert told(capsys)[1]["targets"]["float32 error"]["met"] is False


def test_without_a_gpu_the_device_check_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    text, said = told(capsys)
    assert "no CUDA device here" in text and said["results"] == {"device": None}
