"""How downloads, hashing and loading look in a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Task, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from peer.checkpoint import Progress

SMALL = 1_000_000  # bytes of which a line isn't worth reading


@contextlib.contextmanager
def terminal_progress(console: Console | None = None) -> Iterator[Progress]:
    """Bars on a terminal; elsewhere one line when something begins that takes a while. All on stderr.

    A thing of unknown length is shown until another begins.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in told and not 0 < total < SMALL:
                told.add(what)
                size = f" ({total / 1e6:,.0f} MB)" if total else ""
                print(f"{what}{size} ...", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Size(), _Speed())
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        unknown: set[str] = set()

        def bar(what: str, done: int, total: int) -> None:
            for ended in unknown - {what}:
                bars.remove_task(tasks.pop(ended))
            unknown.intersection_update({what})
            begins = what not in tasks
            if begins:
                tasks[what] = bars.add_task(what, total=total or None)
            if not total:
                unknown.add(what)
            visible = not total or done < total
            bars.update(tasks[what], completed=done, total=total or None, visible=visible, refresh=begins)

        yield bar


class _Size(DownloadColumn):
    """Nothing of what has no known length."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class _Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()
