"""What the README shows is run as it stands, against a real swarm of a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiny_swarm import Tiny

README = Path(__file__).resolve().parent.parent / "README.md"
ADDRESS = "192.168.1.20:7070"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_library_example_prints_an_answer(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in python_blocks() if "from swarm import Client" in block]
    assert ADDRESS in block
    monkeypatch.setenv("SWARM_HOME", str(tiny.new_home()))
    exec(compile(block.replace(ADDRESS, tiny.swarm.address), str(README), "exec"), {"__name__": "__main__"})
    right = tiny.oracle.greedy(tiny.oracle.chat_ids("Why is the sky blue?"), 100)
    assert capsys.readouterr().out == tiny.oracle.text(right)
