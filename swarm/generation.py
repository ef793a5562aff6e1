"""SHELL of one generation: drives the `session.Session` core over the node's streams.

Three layers, each ignorant of the next: `_HopChannel` is one stream to one hop, `SessionDriver`
carries messages between channels and core and keeps its one timer, `Generation` is what the
caller iterates over. The driver never refers to the `Generation`, so that a caller who just
leaves the loop lets it be collected, which cancels and frees the peers at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from routing.spans import Hop
from swarm.errors import GenerationFailed, PeerFailed, SwarmError
from swarm.identity import PeerId
from swarm.link import Stream
from swarm.messages import NOTHING_SPENT, Likelihoods, Message
from swarm.node import Node
from swarm.race import race
from swarm.session import (
    Ended,
    Failed,
    Grew,
    HopKey,
    Release,
    Repaired,
    RepairStarted,
    Send,
    Session,
)
from swarm.tokenizer import IncrementalText

log = logging.getLogger("swarm.generation")

FAREWELL_S = 1.0  # how long a cancelled generation waits for its `Close`s to be handed over


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ttft_s: from the call to the first token. total_s: to the last.

    stall_s: the longest wait for a token in which a repair took place, 0 without repairs.
    compute_s, queue_s: what the hops reported of it, summed over all tokens but the first.
    """

    ttft_s: float
    total_s: float
    tokens_per_s: float
    stall_s: float
    compute_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class ServedBy:
    """One hop for people: the peer's id and name, and the layers it ran."""

    peer: PeerId
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RepairEvent:
    """The chain was changed. stalled_s is None until the first token after it has come."""

    reason: str
    at_token: int
    before: tuple[ServedBy, ...]
    after: tuple[ServedBy, ...]
    stalled_s: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been chosen. logprob: the natural logarithm of its probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token of the answer, and which it found likeliest, the likeliest first.

    By its own distribution: before any bias, penalty, temperature or filter.
    """

    id: int
    text: str
    logprob: float
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. token_ids includes the end-of-text id where one was generated.

    logprobs: one for each of token_ids if they were asked for, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    hops: tuple[ServedBy, ...]
    repairs: tuple[RepairEvent, ...]
    seed: int
    model: str
    notes: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain now, and the ids that brought it, with their logprobs if these were asked for.
    `final` is set on the last piece only."""

    text: str
    token_ids: tuple[int, ...] = ()
    final: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class _HopChannel:
    """One stream to one hop, opened on the first send, with its outbox and its reader."""

    def __init__(self, key: HopKey, driver: SessionDriver) -> None:
        self.key = key
        self._driver = driver
        self._outbox: deque[Message | None] = deque()  # None: end the stream; bounded by the core
        self._wake = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"hop {key.peer[:8]}/{key.start}")

    def send(self, message: Message | None) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def _run(self) -> None:
        node = self._driver.node
        try:
            stream = (await node.link(self.key.peer)).open_stream()
            try:
                await race(self._write(stream), self._read(stream))
            finally:
                stream.reset("left")  # nothing happens where it ended in order
        except SwarmError as error:
            gone = self.key.peer not in node.transport.links
            reason = error.reason if isinstance(error, PeerFailed) else str(error)
            self._driver.channel_lost(self, reason, gone)
        except Exception as error:
            self._driver.crashed(error)

    async def _write(self, stream: Stream) -> None:
        while True:
            while self._outbox:
                message = self._outbox.popleft()
                if message is None:
                    return await stream.end()
                await stream.send(message)
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, stream: Stream) -> None:
        while True:
            self._driver.received(self.key, await stream.receive())


class SessionDriver:
    """Carries messages between one `Session` core and its hop channels, and keeps its timer."""

    def __init__(self, session: Session, node: Node) -> None:
        self.node = node
        self.arrived: deque[Grew] = deque()  # bounded by the credit that the reader grants
        self.repairs: deque[RepairStarted | Repaired] = deque()
        self.error: SwarmError | None = None
        self.crash: BaseException | None = None
        self.ended = False
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._channels: dict[HopKey, _HopChannel] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._session.hops

    @property
    def now(self) -> float:
        return self._loop.time()

    def start(self) -> None:
        self._drive(self._session.start)

    def received(self, key: HopKey, message: Message) -> None:
        self._drive(self._session.receive, key, message)

    def channel_lost(self, channel: _HopChannel, reason: str, peer_gone: bool) -> None:
        if self._channels.get(channel.key) is channel:
            del self._channels[channel.key]
            self._drive(functools.partial(self._session.lost, peer_gone=peer_gone), channel.key, reason)

    def crashed(self, error: Exception) -> None:
        """A bug of ours: goes to the caller as it is, never retried, and frees the peers."""
        if self.crash is not None or self.ended:
            log.error("a hop's channel failed after the end", exc_info=error)
            return
        self.crash = error
        self.cancel()

    def read(self, upto: int) -> None:
        self._drive(self._session.read, upto)

    def cancel(self) -> None:
        self._drive(self._session.cancel)

    async def news(self) -> None:
        """Wait until ids, a repair, an error or the end has arrived."""
        await self._news.wait()
        self._news.clear()

    async def farewell(self) -> None:
        """Let the last messages (`Close`) leave, then stop everything."""
        tasks = [channel.task for channel in self._channels.values()] + [
            task for task in self._parting if task is not asyncio.current_task()
        ]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=FAREWELL_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def abandon(self) -> None:
        """Cancel from wherever the garbage collector runs, without waiting."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_and_leave)

    def _cancel_and_leave(self) -> None:
        self.cancel()
        leaving = self._loop.create_task(self.farewell())
        self._parting.add(leaving)  # keeps a reference until it is done
        leaving.add_done_callback(self._parting.discard)

    def _tick(self) -> None:
        self._timer = None
        self._drive(self._session.tick)

    def _drive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Tell the core, do what it wants done, and re-arm the one timer."""
        if self.ended:
            return
        try:
            call(*arguments, self.now)
            for effect in self._session.drain():
                self._perform(effect)
        except Exception as error:
            if self.crash is None:
                self.crashed(error)
            else:  # even ending it failed
                self.ended = True
        self._rearm()
        if self.arrived or self.repairs or self.ended:
            self._news.set()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._session.deadline is not None and not self.ended:
            self._timer = self._loop.call_at(self._session.deadline, self._tick)

    def _perform(self, effect: object) -> None:
        match effect:
            case Send(key, message):
                channel = self._channels.get(key)
                if channel is None:
                    channel = self._channels[key] = _HopChannel(key, self)
                channel.send(message)
            case Release(key):
                self._release(key)
            case Grew():
                self.arrived.append(effect)
            case RepairStarted() | Repaired():
                self.repairs.append(effect)
            case Failed(error):
                self.error = error
                self.ended = True
            case Ended():
                self.ended = True
            case _:
                raise AssertionError(effect)

    def _release(self, key: HopKey) -> None:
        channel = self._channels.pop(key, None)
        if channel is not None:
            channel.send(None)
            self._parting.add(channel.task)
            channel.task.add_done_callback(self._parting.discard)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a generation starts from, once the model is chosen and the prompt encoded."""

    driver: SessionDriver
    text: IncrementalText
    spell: Callable[[int], str]  # one token's text
    prompt_tokens: int
    model: str
    seed: int
    notes: tuple[str, ...]
    name_of: Callable[[PeerId], str]
    started: float


class Generation:
    """One answer as it is written: an async iterator of `Piece`, cancelled when it is left.

    Left means: no longer referred to. Where a name refers to it, `async with` or `aclose` ends it.
    `hops`, `repairs`, `notes` and `seed` tell about it while it runs; `result` is set once it is done.
    Raises what went wrong from `__anext__`: NoRoute, PromptTooLong, GenerationFailed, ...
    """

    def __init__(self, open_: Callable[[], Awaitable[Opening]]) -> None:
        self._open = open_
        self._opening: Opening | None = None
        self._progress: _Progress | None = None
        self.result: Completion | None = None
        self._over = False

    def __aiter__(self) -> Generation:
        return self

    @property
    def over(self) -> bool:
        """No more pieces will come."""
        return self._over

    @property
    def hops(self) -> tuple[ServedBy, ...]:
        return () if self._opening is None else served_by(self._opening, self._opening.driver.hops)

    @property
    def repairs(self) -> tuple[RepairEvent, ...]:
        return () if self._progress is None else tuple(self._progress.repairs)

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._opening is None else self._opening.notes

    @property
    def seed(self) -> int | None:
        return None if self._opening is None else self._opening.seed

    async def __anext__(self) -> Piece:
        if self._over:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> Piece:
        if self._opening is None:
            self._opening = await self._open()
            self._progress = _Progress(self._opening)
            self._opening.driver.start()
        assert self._progress is not None
        while True:
            piece = self._progress.take()
            if piece is not None:
                break
            await self._opening.driver.news()
        if piece.final is not None:
            self.result = piece.final
            await self.aclose()
        return piece

    async def aclose(self) -> None:
        """Stop, and free what the peers hold for this generation. Harmless when it is done."""
        if self._over:
            return
        self._over = True
        if self._opening is not None:
            self._opening.driver.cancel()
            await self._opening.driver.farewell()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over and self._opening is not None:
            self._opening.driver.abandon()


class _Progress:
    """What has been read so far, and the pieces made of it."""

    def __init__(self, opening: Opening) -> None:
        self.repairs: list[RepairEvent] = []
        self._opening = opening
        self._driver = opening.driver
        self._ids: list[int] = []
        self._unshown: list[int] = []
        self._logprobs: list[TokenLogprob] = []  # of all ids, or of none
        self._texts: list[str] = []
        self._first_s = self._last_s = opening.started
        self._finish: str | None = None
        self._spent = NOTHING_SPENT

    def take(self) -> Piece | None:
        """The next piece if there is one now. Raises when the generation failed."""
        while self._driver.repairs:
            self._note_repair(self._driver.repairs.popleft())
        while self._driver.arrived:
            piece = self._grow(self._driver.arrived.popleft())
            if piece is not None:
                return piece
        if self._driver.crash is not None:
            raise self._driver.crash
        if self._driver.error is not None:
            raise self._with_text(self._driver.error)
        if self._driver.ended:
            raise GenerationFailed("the generation was cancelled", "".join(self._texts), self._ids)
        return None

    def _grow(self, grew: Grew) -> Piece | None:
        now = self._driver.now
        if not self._ids:
            self._first_s = now
        else:
            self._spent = self._spent.plus(grew.spent)
        self._last_s = now
        self._ids += grew.ids
        self._unshown += grew.ids
        self._logprobs += map(self._logprob, grew.ids, grew.likelihoods)
        text = self._opening.text.push(grew.ids)
        self._driver.read(grew.first_position + len(grew.ids))
        if self._opening.text.stopped:
            return self._last_piece(text, "stop")
        if grew.finish is not None:
            text += self._opening.text.finish()  # may find that a stop string was complete
            return self._last_piece(text, "stop" if self._opening.text.stopped else grew.finish)
        return self._piece(text) if text else None

    def _piece(self, text: str, final: Completion | None = None) -> Piece:
        ids, self._unshown = tuple(self._unshown), []
        self._texts.append(text)
        return Piece(text, ids, final, self._logprobs_of_last(len(ids)))

    def _logprob(self, token: int, said: Likelihoods) -> TokenLogprob:
        spell = self._opening.spell
        top = tuple(Alternative(other, spell(other), logprob) for other, logprob in said.top)
        return TokenLogprob(token, spell(token), said.chosen, top)

    def _logprobs_of_last(self, count: int) -> tuple[TokenLogprob, ...] | None:
        start = len(self._logprobs) - count
        return tuple(self._logprobs[start:]) if self._logprobs and count else None

    def _last_piece(self, text: str, finish: str) -> Piece:
        self._texts.append(text)
        completion = self._completion("".join(self._texts), finish)
        self._texts.pop()
        return self._piece(text, completion)

    def _completion(self, text: str, finish: str) -> Completion:
        opening = self._opening
        return Completion(
            text=text,
            token_ids=tuple(self._ids),
            finish_reason=finish,
            usage=Usage(opening.prompt_tokens, len(self._ids)),
            timing=self._timing(),
            hops=served_by(opening, self._driver.hops),
            repairs=tuple(self.repairs),
            seed=opening.seed,
            model=opening.model,
            notes=opening.notes,
            logprobs=tuple(self._logprobs) or None,
        )

    def _timing(self) -> Timing:
        decode_s = self._last_s - self._first_s
        return Timing(
            ttft_s=self._first_s - self._opening.started,
            total_s=self._last_s - self._opening.started,
            tokens_per_s=(len(self._ids) - 1) / decode_s if decode_s > 0 else 0.0,
            stall_s=max((repair.stalled_s or 0.0 for repair in self.repairs), default=0.0),
            compute_s=self._spent.compute_s,
            queue_s=self._spent.queue_s,
        )

    def _note_repair(self, news: RepairStarted | Repaired) -> None:
        event = RepairEvent(
            news.reason,
            news.at_token - self._opening.prompt_tokens,
            served_by(self._opening, news.hops_before),
            served_by(self._opening, news.hops_after),
            news.stalled_s if isinstance(news, Repaired) else None,
        )
        if self.repairs and self.repairs[-1].stalled_s is None:
            self.repairs[-1] = event
        else:
            self.repairs.append(event)

    def _with_text(self, error: SwarmError) -> SwarmError:
        if isinstance(error, GenerationFailed):
            return GenerationFailed(error.reason, "".join(self._texts), self._ids)
        return error


def served_by(opening: Opening, hops: Sequence[Hop]) -> tuple[ServedBy, ...]:
    return tuple(
        ServedBy(PeerId(hop.peer), opening.name_of(PeerId(hop.peer)), hop.span.start, hop.span.stop)
        for hop in hops
    )
