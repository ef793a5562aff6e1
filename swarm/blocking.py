"""SHELL and public API: `Client`, the twin of `AsyncClient` for programs without an event loop.

It keeps an event loop in a thread of its own, begun with the first call, and every method asks that loop and
waits. Invariant: whatever way a call ends (an answer, an error, Ctrl-C, `close` in another thread), nothing that
it began goes on in the loop, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from swarm.chains import ModelStatus
from swarm.client import CLOSED, AsyncClient
from swarm.errors import UsageError
from swarm.generation import Completion, Generation, Piece, RepairEvent, ServedBy
from swarm.options import Options
from swarm.prompts import Prompt
from swarm.registry import PeerEntry

T = TypeVar("T")


class Client:
    """`AsyncClient` for programs without an event loop: the same methods, blocking. Safe to use from threads.

        with Client("192.168.1.20:7070") as client:
            for piece in client.stream("Why is the sky blue?", max_tokens=100):
                print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        model: str | None = None,
        only: Collection[str] = (),
        network: str = "main",
        home: Path | None = None,
    ) -> None:
        self._async = AsyncClient(address, model=model, only=only, network=network, home=home)
        self._lock = threading.Lock()  # around what decides whether there is a loop to ask
        self._loop: asyncio.AbstractEventLoop | None = None  # until the first call
        self._thread: threading.Thread | None = None
        self.closed = False

    def __enter__(self) -> Client:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        self._call(self._async.connect())

    def close(self) -> None:
        """End whatever still runs, in whichever thread it is waited for. Harmless when repeated."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _finish(self) -> None:
        await self._async.aclose()
        await asyncio.get_running_loop().shutdown_default_executor()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """As `AsyncClient.stream`, for a plain `for` loop."""
        return Stream(self, self._async.stream(prompt, **options))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        return self._call(self._async.generate(prompt, **options))

    def generate_many(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> tuple[Completion, ...]:
        return self._call(self._async.generate_many(prompt, n, **options))

    def peers(self) -> tuple[PeerEntry, ...]:
        return self._call(self._peers())

    async def _peers(self) -> tuple[PeerEntry, ...]:
        return self._async.peers()

    def status(self, model: str | None = None) -> tuple[ModelStatus, ...]:
        return self._call(self._async.status(model))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self.closed:
                work.close()
                raise UsageError(CLOSED)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="swarm client", daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self.closed:
                raise UsageError(CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise


class Stream:
    """One answer as it is written, for a plain `for` loop; leaving the loop cancels it.

    It tells the same as `Generation`: `hops`, `repairs`, `notes`, `seed`, and `result` once it is done; and it can be
    rewound, after which another loop goes on.
    """

    def __init__(self, client: Client, generation: Generation) -> None:
        self._client = client
        self._generation = generation

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._generation.over:
            raise StopIteration
        try:
            return self._client._call(self._next())
        except StopAsyncIteration:
            raise StopIteration from None

    async def _next(self) -> Piece:
        return await self._generation.__anext__()

    @property
    def result(self) -> Completion | None:
        return self._generation.result

    @property
    def hops(self) -> tuple[ServedBy, ...]:
        return self._generation.hops

    @property
    def repairs(self) -> tuple[RepairEvent, ...]:
        return self._generation.repairs

    @property
    def notes(self) -> tuple[str, ...]:
        return self._generation.notes

    @property
    def seed(self) -> int | None:
        return self._generation.seed

    def rewind(self, tokens: int, text: str = "", *, max_tokens: int | None = None) -> str:
        """As `Generation.rewind`."""
        return self._client._call(self._generation.rewind(tokens, text, max_tokens=max_tokens))

    def close(self) -> None:
        """Stop, and free what the peers hold for it. Harmless when it is over."""
        if not (self._generation.over or self._client.closed):
            self._client._call(self._generation.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
