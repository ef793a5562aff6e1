"""How torch's threads wait for work. No torch here: what this sets is read when torch is imported."""

from __future__ import annotations

import os


def quiet_threads() -> None:
    """Threads of an idle peer must not spin, or they starve whoever else works here. The user's own settings stay."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
