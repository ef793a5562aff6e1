"""Work that a peer leaves to a process of its own, because it takes more memory than a peer may keep, or
starts programs that must not outlive it.

`run_child` is the parent's side, `work_as_child` the child's: `python -m MODULE ARGUMENTS`. The child reports
over its standard output, one JSON object a line, and ends itself when its standard input closes: a parent
that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.checkpoint import Progress
from swarm.errors import BrokenModel, CapacityError, ModelError, UnsupportedModel

_ERRORS: dict[str, type[ModelError | CapacityError]] = {
    kind.__name__: kind for kind in (ModelError, BrokenModel, UnsupportedModel, CapacityError)
}


def run_child(module: str, arguments: Sequence[str], progress: Progress, what: str) -> None:
    """Run `python -m module arguments` to its end. Raises what the child raised: ModelError or CapacityError.

    what: that for which the work is done, in the error of a child that ended without a word.
    """
    environment = dict(os.environ)
    package_root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    )
    assert child.stdin and child.stdout
    failure: tuple[str, str] | None = None
    try:
        for line in child.stdout:
            told = json.loads(line)
            if "error" in told:
                failure = (told["error"], told["text"])
            else:
                progress(told["what"], told["done"], told["total"])
    finally:
        child.stdin.close()  # tells an unfinished child to stop
        child.stdout.close()
        status = child.wait()
    if failure is not None:
        raise _ERRORS[failure[0]](failure[1])
    if status != 0:
        raise ModelError(f"preparing {what} failed (see above, exit status {status}); start it again")


# ---------------------------------------------------------------- the child process


def work_as_child(
    work: Callable[[], None], explain: Callable[[OSError], str], stop: Callable[[], None]
) -> int:
    """Do `work` and return the exit status. stop: ends what else was started, before this process ends.

    explain: the text for what the disk did wrong.
    """
    threading.Thread(target=_stop_with_parent, args=(stop,), daemon=True).start()
    try:
        work()
    except (ModelError, CapacityError) as error:
        _tell({"error": type(error).__name__, "text": str(error)})
        return 1
    except OSError as error:
        _tell({"error": "ModelError", "text": explain(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def report(what: str, done: int, total: int) -> None:
    """A child's `Progress`."""
    _tell({"what": what, "done": done, "total": total})


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _stop_with_parent(stop: Callable[[], None]) -> None:
    while os.read(0, 1):  # unbuffered: a thread inside sys.stdin would break the interpreter's end
        pass
    stop()
    os._exit(1)
