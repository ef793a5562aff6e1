"""SHELL of one generation, and what a caller gets of it: `Generation` is what is iterated over.

It reads what a `driver.SessionDriver` collects, and makes text of it. The driver never refers to the `Generation`,
so that a caller who just leaves the loop lets it be collected, which cancels and frees the peers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from routing.spans import Hop
from swarm.driver import SessionDriver
from swarm.effects import Grew, Repaired, RepairStarted
from swarm.errors import GenerationFailed, SwarmError, UsageError
from swarm.identity import PeerId
from swarm.messages import NOTHING_SPENT, Likelihoods
from swarm.tokenizer import TextCodec


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


@dataclass(frozen=True, slots=True)
class Opening:
    """What a generation starts from, once the model is chosen and the prompt encoded.

    driver: of a new session that goes on from these ids and ends before this position. limit: the first
    session's. context: how many of so many positions a chain could hold. logprobs: whether they were asked for.
    """

    driver: Callable[[tuple[int, ...], int], Awaitable[SessionDriver]]
    prompt: tuple[int, ...]
    limit: int
    context: Callable[[int], int]
    codec: TextCodec
    stops: tuple[str, ...]
    logprobs: bool
    model: str
    seed: int
    notes: tuple[str, ...]
    name_of: Callable[[PeerId], str]
    started: float


class Generation:
    """One answer as it is written: an async iterator of `Piece`, cancelled when it is left.

    Left means: no longer referred to. Where a name refers to it, `async with` or `aclose` ends it.
    `hops`, `repairs`, `notes` and `seed` tell about it while it runs; `result` is set once it is done.
    `rewind` changes what it has said and lets it go on from there.
    Raises what went wrong from `__anext__`: NoRoute, PromptTooLong, GenerationFailed, ...
    """

    def __init__(self, open_: Callable[[], Awaitable[Opening]]) -> None:
        self._open = open_
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
        return () if self._progress is None else self._progress.hops

    @property
    def repairs(self) -> tuple[RepairEvent, ...]:
        return () if self._progress is None else tuple(self._progress.repairs)

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._progress is None else self._progress.opening.notes

    @property
    def seed(self) -> int | None:
        return None if self._progress is None else self._progress.opening.seed

    async def __anext__(self) -> Piece:
        if self._over:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> Piece:
        if self._progress is None:
            opening = await self._open()
            self._progress = _Progress(opening, await opening.driver(opening.prompt, opening.limit))
            self._progress.driver.start()
        while True:
            if self._progress.driver.arrived:  # a stranger's text may take milliseconds for each id
                await asyncio.sleep(0)
            piece = self._progress.take()
            if piece is not None:
                break
            if not self._progress.driver.arrived:  # ids that bring no text yet aren't the last ones
                await self._progress.driver.news()
        if piece.final is not None:
            self.result = piece.final
            await self.aclose()
        return piece

    async def rewind(self, tokens: int, text: str = "", *, max_tokens: int | None = None) -> str:
        """Keep the first `tokens` ids of the answer, put `text` behind them, and go on from there.

        Returns the answer's text up to there; the pieces that follow continue it, and `result` is about the whole.
        tokens: counted over the `token_ids` of the pieces that were read. max_tokens: the answer's new bound, what is
        kept and put in included; the old one unless said. What the peers have computed of the kept ids isn't computed
        again, unless the answer was complete already: then its peers have let it go, and a chain is opened anew.
        Raises UsageError (nothing changed), and NoRoute when no chain could hold it.
        """
        if self._progress is None or (self._over and self.result is None):
            raise UsageError("there is no answer to rewind: it hasn't begun, or it was left or failed")
        before = self._progress.driver
        made = await self._progress.rewind(tokens, text, max_tokens)
        self._over, self.result = False, None
        if self._progress.driver is not before:
            await before.farewell()
        return made

    async def aclose(self) -> None:
        """Stop, and free what the peers hold for this generation. Harmless when it is done."""
        if self._over:
            return
        self._over = True
        if self._progress is not None:
            self._progress.driver.cancel()
            await self._progress.driver.farewell()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over and self._progress is not None:
            self._progress.driver.abandon()


class _Progress:
    """What has been read so far, and the pieces made of it."""

    def __init__(self, opening: Opening, driver: SessionDriver) -> None:
        self.repairs: list[RepairEvent] = []
        self.opening, self.driver = opening, driver
        self._limit = opening.limit
        self._text = opening.codec.detokenizer(opening.stops)
        self._ids: list[int] = []
        self._unshown: list[int] = []
        self._logprobs: list[TokenLogprob] = []  # of all ids, or of none
        self._texts: list[str] = []
        self._came = 0  # ids, those that were taken back included
        self._first_s = self._last_s = opening.started
        self._spent = NOTHING_SPENT

    @property
    def hops(self) -> tuple[ServedBy, ...]:
        return served_by(self.opening, self.driver.hops)

    async def rewind(self, tokens: int, text: str, max_tokens: int | None) -> str:
        """As `Generation.rewind`. Raises UsageError and NoRoute, nothing changed."""
        opening, start = self.opening, len(self.opening.prompt)
        if self.driver.crash is not None:
            raise self.driver.crash
        if not 0 <= tokens <= len(self._ids):
            raise UsageError(f"can't keep {tokens} tokens of an answer of which {len(self._ids)} were read")
        if text and opening.logprobs:
            raise UsageError("text that is put in has no logprobs: leave it out, or don't ask for them")
        added = await opening.codec.encode_after(text)
        ids = [*self._ids[:tokens], *added]
        limit = self._limit if max_tokens is None else start + max_tokens
        if start + len(ids) >= limit:
            raise UsageError(f"{len(ids)} tokens leave nothing to go on with, max_tokens is {limit - start}")
        if limit > self._limit and (context := opening.context(limit)) < limit:
            raise UsageError(f"max_tokens can be {context - start} at most: the chain's context is {context}")
        stage = opening.codec.detokenizer(opening.stops)
        made = stage.push(ids)
        if stage.stopped:
            raise UsageError("the text put in brings a stop string about")
        if self.driver.ended:
            self.driver = await opening.driver((*opening.prompt, *ids), limit)
            self.driver.start()
        else:
            self.driver.rewind(start + tokens, added, limit)
        self._ids, self._text, self._texts, self._unshown, self._limit = ids, stage, [made], [], limit
        self._logprobs = self._logprobs[:tokens]
        return made

    def take(self) -> Piece | None:
        """The next piece if there is one now. Raises when the generation failed."""
        while self.driver.repairs:
            self._note_repair(self.driver.repairs.popleft())
        if self.driver.arrived:
            return self._grow(self._next_id())
        if self.driver.crash is not None:
            raise self.driver.crash
        if self.driver.error is not None:
            raise self._with_text(self.driver.error)
        if self.driver.ended:
            raise GenerationFailed("the generation was cancelled", "".join(self._texts), self._ids)
        return None

    def _next_id(self) -> Grew:
        """One id alone, so that the loop has its turn before the next."""
        grew = self.driver.arrived.popleft()
        if len(grew.ids) <= 1:
            return grew
        rest = replace(
            grew,
            ids=grew.ids[1:],
            first_position=grew.first_position + 1,
            spent=NOTHING_SPENT,
            likelihoods=grew.likelihoods[1:],
        )
        self.driver.arrived.appendleft(rest)
        return replace(grew, ids=grew.ids[:1], finish=None, likelihoods=grew.likelihoods[:1])

    def _grow(self, grew: Grew) -> Piece | None:
        now = self.driver.now
        if not self._came:
            self._first_s = now
        else:
            self._spent = self._spent.plus(grew.spent)
        self._last_s = now
        self._came += len(grew.ids)
        self._ids += grew.ids
        self._unshown += grew.ids
        self._logprobs += map(self._logprob, grew.ids, grew.likelihoods)
        text = self._text.push(grew.ids)
        self.driver.read(grew.first_position + len(grew.ids))
        if self._text.stopped:
            return self._last_piece(text, "stop")
        if grew.finish is not None:
            text += self._text.finish()  # may find that a stop string was complete
            return self._last_piece(text, "stop" if self._text.stopped else grew.finish)
        return self._piece(text) if text else None

    def _piece(self, text: str, final: Completion | None = None) -> Piece:
        ids, self._unshown = tuple(self._unshown), []
        self._texts.append(text)
        return Piece(text, ids, final, self._logprobs_of_last(len(ids)))

    def _logprob(self, token: int, said: Likelihoods) -> TokenLogprob:
        spell = self.opening.codec.spell
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
        opening = self.opening
        return Completion(
            text=text,
            token_ids=tuple(self._ids),
            finish_reason=finish,
            usage=Usage(len(opening.prompt), len(self._ids)),
            timing=self._timing(),
            hops=self.hops,
            repairs=tuple(self.repairs),
            seed=opening.seed,
            model=opening.model,
            notes=opening.notes,
            logprobs=tuple(self._logprobs) or None,
        )

    def _timing(self) -> Timing:
        decode_s = self._last_s - self._first_s
        return Timing(
            ttft_s=self._first_s - self.opening.started,
            total_s=self._last_s - self.opening.started,
            tokens_per_s=(self._came - 1) / decode_s if decode_s > 0 else 0.0,
            stall_s=max((repair.stalled_s or 0.0 for repair in self.repairs), default=0.0),
            compute_s=self._spent.compute_s,
            queue_s=self._spent.queue_s,
        )

    def _note_repair(self, news: RepairStarted | Repaired) -> None:
        event = RepairEvent(
            news.reason,
            news.at_token - len(self.opening.prompt),
            served_by(self.opening, news.hops_before),
            served_by(self.opening, news.hops_after),
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
