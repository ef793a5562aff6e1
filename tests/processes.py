"""Commands of `swarm` run to their end as processes, for tests of what a person sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(home: Path, cache: Path | None = None) -> dict[str, str]:
    """State of its own for every test, the model from the common cache."""
    ours = ("SWARM_JOIN", "SWARM_HOME", "SWARM_CACHE")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    kept["SWARM_HOME"] = str(home)
    if cache is not None:
        kept["SWARM_CACHE"] = str(cache)
    return kept


def command(
    *arguments: str, home: Path, cache: Path | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run `swarm ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(home, cache),
    )
