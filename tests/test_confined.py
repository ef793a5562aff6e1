"""confined.py: what a process may answer that a stranger has taken over, and that it ends in time whatever it does."""

from __future__ import annotations

import json
import threading
from io import BytesIO
from pathlib import Path

import pytest

from swarm.confined import MAX_BLOBS, MAX_HEADER_BYTES, Confined, Job, Limits, Said, read_answer
from swarm.errors import TemplateFailed

# Gives itself back the time that the process would end itself after, and then waits without using any.
STUBBORN = """
import faulthandler, time

def make(settings):
    def answer(fields, blobs):
        faulthandler.cancel_dump_traceback_later()
        time.sleep(1000.0)
    return answer
"""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]\n",
        b"{\n",
        b'{"sizes": 3}\n',
        b'{"sizes": [-1]}\n',
        b'{"sizes": [true]}\n',
        b'{"sizes": [1.0]}\nx',
        b'{"sizes": [5]}\nxxxx',
        b'{"sizes": [6, 5]}\n' + b"x" * 11,
        b'{"sizes": [1000000000000000000]}\nx',
        json.dumps({"sizes": [0] * (MAX_BLOBS + 1)}).encode() + b"\n",
        json.dumps({"x": "a" * MAX_HEADER_BYTES}).encode() + b"\n",
        b'{"x": ' + b"[" * 100_000 + b"\n",
    ],
    ids=lambda data: str(data[:24]),
)
def test_an_answer_that_is_none_is_refused_before_memory_is_taken_for_it(data: bytes) -> None:
    assert read_answer(BytesIO(data), 10) is None


def test_an_answer_of_the_size_that_is_allowed_is_read() -> None:
    answer = read_answer(BytesIO(b'{"a": 1, "sizes": [4, 0, 6]}\nxxxxyyyyyy'), 10)
    assert answer == Said({"a": 1}, (b"xxxx", b"", b"yyyyyy"))


def test_a_process_that_gives_itself_more_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stubborn").mkdir()
    (tmp_path / "stubborn" / "__init__.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(tmp_path)
    process = Confined(Job("stubborn", ("stubborn",), TemplateFailed), Limits(1 << 30, 10))
    process.start()
    given_up = threading.Event()
    (running,) = process._processes

    def give_up() -> None:
        given_up.set()
        running.kill()

    patience = threading.Timer(30.0, give_up)
    patience.start()
    with pytest.raises(TemplateFailed, match=r"took longer than 0\.2 s"):
        process.ask(Said({}), 0.2)
    patience.cancel()
    process.close()
    assert not given_up.is_set(), "nobody else ended it"
