"""What people see in a terminal and what programs read, compared with what was worked out by hand."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from routing.spans import Span
from swarm.chains import live_models, model_status
from swarm.display import (
    chain_line,
    completion_json,
    coverage_bar,
    duration,
    span_bar,
    status_json,
    status_view,
)
from swarm.generation import Completion, RepairEvent, ServedBy, Timing, Usage
from swarm.identity import PeerId
from tests.test_chains import entry


def shown(view: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("span", "layers", "bar"),
    [
        (Span(0, 6), 6, "██████"),
        (Span(2, 4), 6, "··██··"),
        (Span(5, 6), 6, "·····█"),
        (Span(0, 2), 80, "█" + "·" * 39),
        (Span(1, 3), 80, "██" + "·" * 38),
        (Span(79, 80), 80, "·" * 39 + "█"),
        (Span(0, 1), 1, "█"),
    ],
)
def test_a_span_is_a_bar_over_the_layers(span: Span, layers: int, bar: str) -> None:
    assert span_bar(span, layers) == bar


def test_coverage_shows_the_weakest_layer_of_each_cell() -> None:
    assert coverage_bar([0, 1, 9, 10, 123]) == "019++"
    assert coverage_bar([2, 0] + [3] * 78) == "0" + "3" * 39
    assert coverage_bar([1] * 41 + [0]) == "1" * 39 + "0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0004, "0.4 ms"), (0.0123, "12 ms"), (0.5, "500 ms"), (2.34, "2.3 s"), (150, "2 min")],
)
def test_durations_have_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_chain_is_one_line_with_both_ends_of_each_span() -> None:
    hops = [ServedBy(PeerId("p"), "ada", 0, 12), ServedBy(PeerId("q"), "bob", 12, 13)]
    assert chain_line(hops) == "ada 0-11 → bob 12"


def test_status_names_the_chain_or_the_gap() -> None:
    (model,) = live_models([entry("ada", 0, 4), entry("bob", 4, 6, sessions=2)])
    text = shown(status_view([model_status(model, {PeerId("ada"): 0.02}, known=2)]))
    assert "chain ok  ada 0-3 → bob 4-5" in text and "coverage  111111" in text
    assert "████··" in text and "20 ms" in text and "2 open" in text
    (model,) = live_models([entry("ada", 0, 4)])
    text = shown(status_view([model_status(model, {}, known=2)]))
    assert "no chain   no live peer serves layers 4-5 of tiny (1 of 2 known peers alive)" in text
    assert "swarm peer MODEL" in shown(status_view([]))


def test_a_clock_that_is_off_is_shown_and_only_then() -> None:
    entries = [entry(name, issued_ms=1_000_000) for name in ("ada", "bob", "cleo")]
    (model,) = live_models(entries)
    assert "clock" not in shown(status_view([model_status(model, {}, known=3)]))
    (model,) = live_models([*entries, entry("dan", issued_ms=1_000_000 - 8_580_000)])
    status = model_status(model, {}, known=4)
    assert "clock      dan's is 2 h 23 min behind the others'" in shown(status_view([status]))
    (said,) = json.loads(status_json([status]))["models"]
    assert {peer["name"]: peer["clock_error_s"] for peer in said["peers"]}["dan"] == -8580.0


def test_names_of_strangers_are_no_markup() -> None:
    (model,) = live_models([entry("p", name="[/red] [bold]x", device="[link=a]y[/]", model="[/z]")])
    text = shown(status_view([model_status(model, {}, known=1)]))
    assert "[/red] [bold]x" in text and "[link=a]y[/]" in text and "[/z]" in text


def test_status_for_programs_says_the_same() -> None:
    (model,) = live_models([entry("ada", 0, 4), entry("bob", 4, 6)])
    (said,) = json.loads(status_json([model_status(model, {}, known=2)]))["models"]
    assert said["name"] == "tiny" and said["layers"] == 6 and said["coverage"] == [1] * 6
    assert said["chain"] == [{"peer": "ada", "start": 0, "stop": 4}, {"peer": "bob", "start": 4, "stop": 6}]
    assert [peer["span"] for peer in said["peers"]] == [[0, 4], [4, 6]]
    assert said["problem"] is None


def test_a_completion_for_programs_has_all_of_it() -> None:
    hops = (ServedBy(PeerId("p"), "ada", 0, 6),)
    completion = Completion(
        text="né", token_ids=(5, 6), finish_reason="stop", usage=Usage(3, 2),
        timing=Timing(ttft_s=0.5, total_s=1.0, tokens_per_s=2.0, stall_s=0.25, compute_s=0.1, queue_s=0.2),
        hops=hops, repairs=(RepairEvent("died", 1, hops, hops, 0.25),), seed=9, model="tiny", notes=("cut",),
    )  # fmt: skip
    text = completion_json(completion)
    assert "né" in text and "\n" not in text
    assert json.loads(text) == {
        "text": "né", "token_ids": [5, 6], "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "timing": {
            "ttft_s": 0.5, "total_s": 1.0, "tokens_per_s": 2.0, "stall_s": 0.25, "compute_s": 0.1, "queue_s": 0.2,
        },
        "hops": [{"peer": "p", "name": "ada", "start": 0, "stop": 6}],
        "repairs": 1, "seed": 9, "model": "tiny", "notes": ["cut"],
    }  # fmt: skip
