"""How torch's threads wait is set before torch is there, and what the user has set stays."""

from __future__ import annotations

import os

import pytest

from peer.threads import SPIN_ROUNDS, quiet_threads

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ("PASSIVE", str(SPIN_ROUNDS))),
        ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ("PASSIVE", None)),
    ],
)
def test_what_is_set_already_stays(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: tuple[str, str | None]
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    quiet_threads()
    assert tuple(os.environ.get(name) for name in NAMES) == after
