"""How torch's threads wait for work. No torch here: what this sets is read when torch is imported."""

from __future__ import annotations

import os

# Within a decode step one product follows the other after about 0.1 ms; a thread that is put to sleep and woken for
# each cost a tenth of a token. So many rounds of GNU OpenMP's waiting loop are under a millisecond.
SPIN_ROUNDS = 10_000


def quiet_threads() -> None:
    """Threads of an idle peer must not spin, or they starve whoever else works here. The user's own settings stay."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
