"""A process for strangers' code and data. Run by path, never imported by the package; `confined.py` is our end.

Invariant: whatever the job does, this process can only answer on stdout or die. It starts with an empty
environment; once the job's libraries are imported it can open no further file or socket, its memory and CPU time
are limited where the platform has such limits, a watchdog that needs no interpreter lock ends it after its
deadline, and it ends when its stdin closes.

The first message out is {"ready": true}; then one answer for each request. {"ends": true} in an answer says that
this process is no longer fit for use and exits.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# what a job's `make(settings)` returns: (fields, blobs) -> (fields, blobs)
Answer = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], Sequence[bytes]]]


def load(settings: dict[str, Any]) -> Answer:
    """Import the job's module and what it needs, and warm it up: afterwards nothing can be imported."""
    sys.path.extend(settings["paths"])  # python -I -S has no site-packages; the parent names what we need
    package = types.ModuleType("swarm")  # without its __init__, which would import everything
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["swarm"] = package
    answer: Answer = importlib.import_module(settings["job"]).make(settings)
    return answer


def confine(memory_bytes: int) -> Callable[[float], None]:
    """Give up what the job doesn't need. Returns what limits the CPU seconds from now on."""
    try:
        import resource
    except ImportError:  # Windows
        return lambda seconds: None
    # no new file descriptor: neither a file nor a socket can be opened any more
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_NOFILE, 3)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # macOS has no RLIMIT_AS that it would accept
            continue

    def limit_cpu(seconds: float) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))

    return limit_cpu


def hear() -> tuple[dict[str, Any], list[bytes]] | None:
    """The next request; None once the parent is gone."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    fields = json.loads(line)
    return fields, [sys.stdin.buffer.read(size) for size in fields.pop("sizes")]


def say(fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    line = json.dumps({**fields, "sizes": [len(blob) for blob in blobs]}).encode()
    for part in (line, b"\n", *blobs):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    settings = json.loads(sys.argv[1])
    answer = load(settings)
    limit_cpu = confine(settings["memory_bytes"])
    say({"ready": True})
    while (request := hear()) is not None:
        fields, blobs = request
        # a little later than the parent, for the case that there is no parent any more
        faulthandler.dump_traceback_later(fields["seconds"] + 1, exit=True)
        limit_cpu(fields["seconds"] + 1)
        said, sent = answer(fields, blobs)
        del request, fields, blobs
        say(said, sent)
        faulthandler.cancel_dump_traceback_later()
        if said.get("ends"):
            return


if __name__ == "__main__":
    main()
