"""Work that goes on together until the first of it ends, such as both directions of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def race(*works: Coroutine[Any, Any, object]) -> None:
    """Run all at once; when the first ends, cancel the others, wait for them, and raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # in the order given, so that two that end together give one answer
            if task in done:
                task.result()
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
