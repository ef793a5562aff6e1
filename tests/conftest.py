"""What several test modules share: the real model, out of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout, downloaded once on a machine.

    Where that is impossible (no network, no disk) the tests that need it are skipped with the reason.
    """
    from peer.smollm2 import ensure_smollm2
    from swarm.errors import CapacityError, ModelError
    from swarm.state import StateDir

    try:
        return ensure_smollm2(StateDir.open().cache)
    except (ModelError, CapacityError) as error:
        pytest.skip(f"smollm2 is not here: {error}")
