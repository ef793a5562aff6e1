"""What a person sees of downloads, hashing and loading."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from peer.progress import terminal_progress


def _screen() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, width=80, color_system=None), written


def test_what_has_no_known_length_ends_when_another_thing_begins() -> None:
    console, written = _screen()
    with terminal_progress(console) as progress:
        progress("reading a header", 0, 0)
        progress("loading", 500_000, 2_000_000)
        seen = written.getvalue().rpartition("reading a header")
        assert seen[1] and "loading" in seen[2]
        written.truncate(0)
        progress("measuring", 0, 0)
        frame = written.getvalue()
    assert "reading a header" not in frame
    assert "0.5/2.0 MB" in frame and "measuring" in frame


def test_what_has_no_known_length_shows_no_bytes() -> None:
    console, written = _screen()
    with terminal_progress(console) as progress:
        progress("starting torch", 0, 0)
    assert "starting torch" in written.getvalue()
    assert "0/?" not in written.getvalue() and "bytes" not in written.getvalue()


def test_without_a_terminal_each_thing_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal_progress() as progress:
        for done in (0, 1, 2):
            progress("loading layers 0-3", done, 81_000_000)
        progress("fetching a config", 0, 800)
        progress("trying them", 0, 0)
    assert capsys.readouterr().err == "loading layers 0-3 (81 MB) ...\ntrying them ...\n"
