"""Nothing that comes from the network becomes code: what Python's audit hook saw, and that it sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audited import MARKER, PICKLED, RUNS_CODE

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_neither_a_peer_nor_a_client_runs_anything_that_the_network_says() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.audited"],
        cwd=ROOT,
        env={**os.environ, "SWARM_LAN": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    refused, again, seen = map(json.loads, done.stdout.strip().splitlines())
    assert refused == again == {"refused": "TemplateFailed"}
    assert seen["named"] == []
    started = [one for one in seen["ran"] if one.startswith("subprocess.Popen") and "confined_worker.py" in one]
    assert len(started) == 4, "two clients, each with a process for its tokenizer and one for its template"
    assert seen["ran"] == started


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("import pickle; from tests.audited import PICKLED; pickle.loads(PICKLED)", "pickle.find_class"),
        ("eval('1 + 1')", "compile"),
        ("exec('1 + 1')", "exec"),
        ("import this_is_no_module_of_anybody", "import"),
        ("import marshal; marshal.loads(marshal.dumps(1))", "marshal.loads"),
    ],
)
def test_the_witness_sees_each_way_to_run_data(program: str, event: str) -> None:
    watched = (
        "import pickle, marshal, os\n"
        "from tests.audited import Witness\n"
        "os.system = print\n"
        "witness = Witness(); witness.begin()\n"
        f"try:\n    {program}\nexcept ImportError:\n    pass\n"
        "witness.end(); import json; print(json.dumps(witness.ran))"
    )
    done = subprocess.run(
        [sys.executable, "-c", watched], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert event in RUNS_CODE
    assert any(one.startswith(event + " ") for one in json.loads(done.stdout.splitlines()[-1]))


def test_the_pickle_among_the_noise_is_one_that_would_run() -> None:
    assert MARKER.encode() in PICKLED and b"system" in PICKLED
