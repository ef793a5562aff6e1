"""How much of a prompt runs beside those who decode, and whose next step is worth waiting for. No torch, no clock.

The aim: while prompts arrive, a token takes those who decode at most three times as long as it does alone; where
nobody decodes, prompts have the engine to themselves.

A turn's cost is measured, never assumed. What a turn of r decode steps takes is kept by r from turns without
prompts; what a turn takes beyond that is the prompt's. So the cost of a token of each prompt is known, which
grows as the text gets longer (every token attends to all before it), and a long text costs more than a short
one even for a handful of tokens. Each turn of decode steps earns the prompts `share` times its own
duration, and a piece of a prompt is charged what it took: the mean is kept even where the single turn isn't. Debts are
forgiven beyond `DEEPEST_DEBT` turns' earnings, which bounds how long a prompt stands aside.

A turn reads all of the weights, however few its tokens. Where a session's next step is about to arrive, a turn
that begins without it reads them once more for that session alone. So each session's rhythm is learnt (how long
after a step its next one comes), and a turn waits for those that are due within a small part of its own duration.
Prompts that are in debt wait for whoever is due next, however long that is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from routing.spans import Span

DECODE_TOKENS = 8  # a step of at most so many tokens is a decode step: one, or a few speculated ones
LEAST_PIECE = 16  # tokens: below, most of a piece's time is what any piece costs, whatever its length
GROWTH = 4  # a piece is at most so many times the largest one of that prompt that was measured
DEEPEST_DEBT = 32  # turns' earnings: a prompt gets a piece at least each 33rd turn, even after a hiccup of the machine
LEARN_EVERY = 32  # turns with a prompt in a row before one without, or a decode step's own cost would be out of date
LEAST_EXTRA = 0.1  # of a turn: what a piece is charged at least, where noise hides its cost
ABSENT_S = 1.0  # after its last step a session counts as decoding for so long, or for ABSENT_GAPS of its own pauses
ABSENT_GAPS = 4
FORGOTTEN_S = 10.0  # a prompt's price is kept for so long between its chunks
SMOOTHING = 0.25


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """share: seconds of prompts for each second of decode steps, while there are any; 1.3 leaves room below a
    factor of three for what prompts cost beside the forward pass. linger: the part of a turn for which those who
    are due are waited for (0: never)."""

    share: float = 1.3
    linger: float = 0.25


@dataclass(slots=True)
class _Session:
    """gap_s, gap_deviation_s: from a step's end to the next one's arrival (None: not seen yet), smoothed as in
    RFC 6298. arrived: of the step that waits or runs; None while it is away. ended: of its last step."""

    span: Span
    decodes: bool = False
    arrived: float | None = None
    ended: float | None = None
    gap_s: float | None = None
    gap_deviation_s: float = 0.0
    price_s: float | None = None  # of a token of its prompt, beside others
    largest: int = 0  # piece of its prompt that was measured

    def saw_gap(self, gap_s: float) -> None:
        if self.gap_s is None:
            self.gap_s, self.gap_deviation_s = gap_s, gap_s / 2
        else:
            self.gap_deviation_s += (abs(gap_s - self.gap_s) - self.gap_deviation_s) / 4
            self.gap_s += (gap_s - self.gap_s) / 8

    @property
    def due(self) -> float | None:
        """When its next step should have come."""
        if self.ended is None or self.gap_s is None or self.arrived is not None or not self.decodes:
            return None
        return self.ended + self.gap_s + 2 * self.gap_deviation_s

    def is_decoding(self, now: float) -> bool:
        if not self.decodes or self.arrived is not None or self.ended is None:
            return self.decodes
        return now < self.ended + max(ABSENT_S, ABSENT_GAPS * (self.gap_s or 0.0))

    def is_forgotten(self, now: float) -> bool:
        away = self.arrived is None and self.ended is not None
        return away and not self.is_decoding(now) and now >= (self.ended or 0.0) + FORGOTTEN_S


class Pace:
    """Told of every step that arrives and every turn that ends; asked before each turn. Seconds on one clock."""

    def __init__(self, config: PaceConfig | None = None) -> None:
        self.config = config or PaceConfig()
        self._sessions: dict[Hashable, _Session] = {}
        self._decode_s: dict[int, float] = {}  # decode steps in a turn without prompts -> what it takes
        self._credit_s = 0.0
        self._price_s: float | None = None  # the newest one of any prompt, from which another one begins
        self._mixed = 0  # turns of decode steps with a prompt since the last one without
        self._ended = float("-inf")  # of the last turn
        self._held_up = float("-inf")  # until when it is counted how long prompts alone held up those who decode
        self.awaited: set[Hashable] = set()  # what `begin_at` waits for

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._sessions)

    # ---- what happened

    def arrived(self, key: Hashable, span: Span, tokens: int, now: float) -> None:
        self.awaited.discard(key)
        session = self._sessions.setdefault(key, _Session(span))
        session.span = span
        decodes = tokens <= DECODE_TOKENS
        if decodes and session.decodes and session.ended is not None and session.arrived is None:
            session.saw_gap(min(now - session.ended, FORGOTTEN_S))  # a person's pause is no rhythm
        session.decodes = decodes
        if session.arrived is None:
            session.arrived = now

    def gone(self, key: Hashable) -> None:
        """The session is closed."""
        self.awaited.discard(key)
        self._sessions.pop(key, None)

    def ran(
        self, decoders: Sequence[Hashable], prompts: Sequence[tuple[Hashable, int]], started: float, now: float
    ) -> None:
        """A turn ended: of these sessions' decode steps and so many tokens of these prompts."""
        took = now - started
        if not prompts:
            self._learn_decode(len(decoders), took)
        else:
            self._charge(len(decoders), prompts, started, now)
        if decoders:
            self._mixed = self._mixed + 1 if prompts else 0
        for key in (*decoders, *(key for key, _ in prompts)):
            session = self._sessions.get(key)
            if session is not None:
                session.arrived, session.ended = None, now
        self._ended = now
        for key in [key for key, session in self._sessions.items() if session.is_forgotten(now)]:
            del self._sessions[key]

    def _learn_decode(self, decoders: int, took: float) -> None:
        known = self._decode_s.get(decoders)
        if known is None:
            self._decode_s[decoders] = took
        else:  # faster is believed at once: what else runs on the machine only ever adds
            self._decode_s[decoders] += (1.0 if took < known else SMOOTHING) * (took - known)
        self._earn(decoders, 0.0)

    def _charge(
        self, decoders: int, prompts: Sequence[tuple[Hashable, int]], started: float, now: float
    ) -> None:
        took, alone = now - started, self._alone_s(decoders) or 0.0
        extra = max(took - alone, LEAST_EXTRA * took)
        tokens = sum(count for _, count in prompts)
        if alone:
            for key, _ in prompts:
                self._price(key, tokens, extra / tokens)
        if decoders:
            self._earn(decoders, extra)
        else:
            self.held_up(started, now)

    def held_up(self, started: float, now: float) -> None:
        """Prompts alone had the engine from `started` on, and those who came meanwhile had to wait."""
        since, self._held_up = max(started, self._held_up), now
        arrivals = [s.arrived for s in self._sessions.values() if s.decodes and s.arrived is not None]
        waited = max((now - max(since, arrived) for arrived in arrivals), default=0.0)
        self._spend(waited, self._alone_s(len(arrivals)) or 0.0)

    def _price(self, key: Hashable, tokens: int, price_s: float) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        known = session.price_s
        session.price_s = price_s if known is None else known + 0.5 * (price_s - known)
        session.largest = max(session.largest, tokens)
        self._price_s = session.price_s

    def _earn(self, decoders: int, spent_s: float) -> None:
        """A turn of decode steps is over, in which prompts took `spent_s`."""
        earned = self.config.share * (self._alone_s(decoders) or 0.0)
        self._credit_s = min(earned, max(self._credit_s - spent_s, -DEEPEST_DEBT * earned) + earned)

    def _spend(self, seconds: float, alone_s: float) -> None:
        self._credit_s = max(self._credit_s - seconds, -DEEPEST_DEBT * self.config.share * alone_s)

    def _alone_s(self, decoders: int) -> float | None:
        """What so many decode steps take, from the nearest number that was seen, rather fewer than more."""
        if not self._decode_s:
            return None
        fewer = [rows for rows in self._decode_s if rows <= decoders]
        return self._decode_s[max(fewer) if fewer else min(self._decode_s)]

    # ---- what to do

    def has_company(self, now: float) -> bool:
        """Whether anybody decodes: a step waits, or is about to come."""
        return any(session.is_decoding(now) for session in self._sessions.values())

    def piece(self, key: Hashable, decoders: int) -> int:
        """Tokens of this prompt to run now, beside so many decode steps (0: while those who decode are away).

        0 where it stands aside for this turn; never without decode steps.
        """
        alone = self._alone_s(decoders)
        if decoders:
            if alone is None or self._mixed >= LEARN_EVERY or self._credit_s <= 0.0:
                return 0
            affordable = self._credit_s
        else:  # it delays whoever comes meanwhile by all of its turn
            affordable = self.config.share * (self._alone_s(self._decoding) or 0.0) - (alone or 0.0)
        session = self._sessions.get(key)
        price_s, largest = self._price_s, LEAST_PIECE
        if session is not None and session.price_s is not None:
            price_s, largest = session.price_s, session.largest
        if price_s is None:
            return LEAST_PIECE
        return max(LEAST_PIECE, min(int(affordable / price_s), GROWTH * largest))

    @property
    def _decoding(self) -> int:
        return sum(session.decodes for session in self._sessions.values())

    def begin_at(self, span: Span, decoders: int, since: float, now: float) -> float:
        """When a turn over `span`, which could begin now with so many decode steps, should begin.

        since: when its first step could have begun.
        """
        self.awaited.clear()
        if not decoders and self._credit_s <= 0.0:  # prompts alone stand aside too, as long as somebody is due
            expected = [s.due for s in self._sessions.values() if s.due is not None and s.due > now]
            return min(expected, default=now)
        missing = [(key, s.due) for key, s in self._sessions.items() if s.due is not None and s.span == span]
        alone = self._alone_s(decoders + len(missing)) if missing else None
        if alone is None:
            return now
        latest = max(since, self._ended) + self.config.linger * alone
        due = {key: at for key, at in missing if now < at <= latest}
        self.awaited.update(due)
        return max(due.values(), default=now)
