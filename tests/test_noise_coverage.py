"""The handshake decides who may come in: no branch of it goes without a test that takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_branch_of_the_handshake_is_taken_by_its_own_tests(tmp_path: Path) -> None:
    measured = tmp_path / "measured"
    coverage = [sys.executable, "-m", "coverage"]
    run = ["run", "--branch", "--include=swarm/noise.py", f"--data-file={measured}", "-m", "pytest", "-q"]
    tests = ["-n", "0", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "pytest"), "tests/test_noise.py"]
    done = subprocess.run([*coverage, *run, *tests], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = tmp_path / "report.json"
    command = [*coverage, "json", f"--data-file={measured}", "-o", str(report)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (file,) = json.loads(report.read_text())["files"].values()
    assert (file["missing_lines"], file["missing_branches"]) == ([], [])
    assert file["summary"]["num_branches"] > 50, "else nothing was measured"
