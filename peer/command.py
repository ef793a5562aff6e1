"""What `swarm peer` runs: a `PeerService` with signals, progress and a terminal, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from peer.local import EXIT_WITH_STDIN
from peer.progress import terminal_progress
from peer.service import DRAIN_S, PeerOptions, PeerService
from peer.threads import quiet_threads
from swarm.display import count

CLOSE_S = 2.0  # for sockets and threads after an interrupted start; then the process ends anyway
INTERRUPTED = 130  # exit code


def serve(options: PeerOptions, run: Callable[[Coroutine[Any, Any, int]], int]) -> int:
    """Be a peer until told to stop; returns the exit code. Raises SwarmError if it can't start."""
    options.check()
    quiet_threads()
    if os.environ.get(EXIT_WITH_STDIN):
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    return run(_serve_until_told(options))


def _exit_with_stdin() -> None:
    """Whoever started us holds the other end; when it is gone, so are we."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(0)


async def _serve_until_told(options: PeerOptions) -> int:
    told = asyncio.Event()
    with _signals(told):
        service = await _started(options, told)
        gc.freeze()  # what stays is looked through no more: torch alone would hold the loop for a quarter of a second
        _announce(service)
        await told.wait()
        _say(_leaving(service.server.sessions))
        await service.drain(DRAIN_S)
    return 0


async def _started(options: PeerOptions, told: asyncio.Event) -> PeerService:
    """Bars are shown only meanwhile. Ends the process when it is told to stop before it serves."""
    with terminal_progress() as progress:
        service = PeerService(options, say=_say, progress=progress)
        starting = asyncio.create_task(service.start())
        stopping = asyncio.create_task(told.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done() and not (told.is_set() and starting.exception()):
            starting.result()
            return service
        starting.cancel()
        await asyncio.wait({starting}, timeout=CLOSE_S)
    _say("stopped before it served")
    os._exit(INTERRUPTED)  # a thread may be amid a download or an import, and can't be told to stop


def _leaving(sessions: int) -> str:
    if not sessions:
        return "leaving: nobody is served now"
    return (
        f"leaving: no new sessions; {count(sessions, 'open one')} may take {DRAIN_S:.0f} s to move to other peers; "
        "Ctrl-C again to exit at once"
    )


def _announce(service: PeerService) -> None:
    _say("serving until Ctrl-C; another machine joins with:")
    print(f"swarm peer {service.model} --join {service.address}", flush=True)


def _say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one piece: another thread shows progress


@contextlib.contextmanager
def _signals(told: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM: the first asks to leave, the second leaves, whatever the loop is doing."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        loop.call_soon_threadsafe(told.set)  # works on Windows too

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
