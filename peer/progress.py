"""How downloads, hashing and loading look in a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from peer.checkpoint import Progress


@contextlib.contextmanager
def terminal_progress() -> Iterator[Progress]:
    """Bars on a terminal; elsewhere one line when something begins that takes a while. All on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in told:
                told.add(what)
                size = f" ({total / 1e6:,.0f} MB)" if total else ""
                print(f"{what}{size} ...", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None, visible=not total or done < total)

        yield bar
