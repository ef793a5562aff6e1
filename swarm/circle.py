"""Whom to be neighbours with: enough of them, slowly changing, and always somebody tried anew.

Gossip spreads over kept connections; which ones is decided here, at random, so that no group of
peers stays apart from the rest: a few neighbours are kept, one more is dialled at random each
minute and an old one let go, and of the addresses that this swarm ever had, and that nobody alive
answers for, one is tried each minute for ever (two groups that were cut apart find each other so).

Pure: randomness is passed in, time is an argument, and the answer is what to do: `Reach`,
`ReachAddress`, `Drop`. Failures are reported back by the shell and only make somebody wait.
"""

from __future__ import annotations

import enum
import functools
import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm.identity import PeerId
from swarm.neighbour import Kind, Neighbour
from swarm.records import Heartbeat
from swarm.table import Table

KEPT_NEIGHBOURS = 8  # a random graph of this degree is connected with near certainty at 10,000
KEPT_SOURCES = 3  # of a client: one may die and one may lag
SPARE_NEIGHBOURS = 4  # above the kept ones before an old one is let go
MAX_NEIGHBOURS = 32  # accepted; whoever comes then gets a snapshot and is sent on
MAX_NEIGHBOURS_OF_GROUP = 8  # accepted from one group of addresses (places.py), so that nobody surrounds us
MAX_SUBSCRIBERS = 256  # clients; each costs a stream and its share of every change
MAX_SUBSCRIBERS_OF_GROUP = 64
CHECK_S = 2.0  # between looks at the circle
REACH_TIMEOUT_S = 30.0  # an attempt that the shell never reports on is forgotten
RETRY_S = 15.0  # before a peer that didn't answer is tried again
RETRY_ALONE_S = 2.0  # the same for somebody without any neighbour
ROTATE_S = 60.0  # between random dials
HEAL_S = 60.0  # between tries of an old address
FIRST_HEAL_S = 5.0  # the same at first for somebody without any neighbour; doubles up to HEAL_S
TRIES_ALONE = 3  # old addresses tried at once by somebody without any neighbour
MAX_ADDRESSES = 64  # old addresses held, each tried about once an hour; see `_Worth` for which go first


@dataclass(frozen=True)
class Reach:
    """Open a stream to this peer at the addresses that the table has."""

    peer: PeerId


@dataclass(frozen=True)
class ReachAddress:
    """Find out who is at this address now, and open a stream."""

    address: str


@dataclass(frozen=True)
class Drop:
    """End the stream `key`."""

    key: int
    reason: str


Action: TypeAlias = Reach | ReachAddress | Drop
Role: TypeAlias = Literal["peer", "client"]


class _Worth(enum.IntEnum):
    """Why an address is kept. When there are too many, the oldest of the least worth goes: so a crowd of
    identities that only came to vanish can't make anybody forget the way back into the swarm."""

    HEARSAY = 0
    SEEN = 1  # somebody was there
    GIVEN = 2  # by the user


@dataclass(slots=True)
class _Place:
    """An address of this swarm. peer: who was there last."""

    peer: PeerId | None
    worth: _Worth
    tried_at: float = -math.inf


@dataclass
class _Look:
    """At the table at one instant. Ten thousand peers are walked through once for it, and only if somebody asks."""

    table: Table
    now: float

    @functools.cached_property
    def alive(self) -> list[PeerId]:
        held = self.table.held()
        return [one.peer for one in held if one.lapses_at > self.now and isinstance(one.head, Heartbeat)]


class Circle:
    def __init__(self, own: PeerId | None, role: Role, rng: random.Random, now: float) -> None:
        self._own, self._rng = own, rng
        self._role = role
        self._keep = KEPT_NEIGHBOURS if role == "peer" else KEPT_SOURCES
        self._addresses: dict[str, _Place] = {}
        self._reaching: dict[PeerId | str, float] = {}  # -> since
        self._failed: dict[PeerId | str, float] = {}  # -> when to try again
        self._check_at = now
        self._rotate_at = now + ROTATE_S * rng.uniform(0.5, 1.0)
        self._linked = False
        self._heal_s = FIRST_HEAL_S
        self._heal_at = now + FIRST_HEAL_S * rng.uniform(0.5, 1.0)

    @property
    def deadline(self) -> float:
        return self._check_at

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._addresses)

    def hurry(self, now: float) -> None:
        """Something happened that may call for new neighbours."""
        self._check_at = min(self._check_at, now)

    def remember(
        self, address: str, peer: PeerId | None = None, *, seen: bool = False, given: bool = False
    ) -> None:
        """Try `address` from time to time. seen: somebody was there. given: by the user."""
        place = _Place(peer, _Worth.GIVEN if given else _Worth.SEEN if seen else _Worth.HEARSAY)
        before = self._addresses.pop(address, None)
        if before is not None:
            place.worth, place.tried_at = max(place.worth, before.worth), before.tried_at
        self._addresses[address] = place
        if len(self._addresses) > MAX_ADDRESSES:
            del self._addresses[self._least_worth()]

    def reached(self, target: PeerId | str, peer: PeerId) -> None:
        """The attempt succeeded, and `peer` is who was there."""
        self._reaching.pop(target, None)
        self._failed.pop(peer, None)
        if target in self._addresses:
            place = self._addresses[target]
            place.peer, place.worth = peer, max(place.worth, _Worth.SEEN)

    def failed(self, target: PeerId | str, now: float, alone: bool) -> None:
        self._reaching.pop(target, None)
        self._failed[target] = now + (RETRY_ALONE_S if alone else RETRY_S)

    def choose(self, neighbours: Collection[Neighbour], table: Table, now: float) -> list[Action]:
        """What to do about the circle. [] before `deadline`."""
        if now < self._check_at:
            return []
        self._check_at = now + CHECK_S
        self._forget(now)
        kept = [one for one in neighbours if one.kind is not Kind.SUBSCRIBER and not one.visitor]
        linked = {one.peer for one in kept}
        look = _Look(table, now)
        actions: list[Action] = [*self._duplicates(kept), *self._fill(linked, look)]
        if self._role == "client" and len(linked) > self._keep:  # each costs somebody its share of every change
            actions.append(_oldest(kept))
        actions += self._rotate(kept, linked, look)
        actions += self._heal(linked, look)
        return actions

    # ------------------------------------------------------------ inside

    def _forget(self, now: float) -> None:
        self._reaching = {t: at for t, at in self._reaching.items() if now - at < REACH_TIMEOUT_S}
        self._failed = {t: at for t, at in self._failed.items() if at > now}

    def _free(self, peers: Iterable[PeerId], linked: set[PeerId]) -> list[PeerId]:
        busy = linked | {self._own} | self._reaching.keys() | self._failed.keys()
        return sorted(peer for peer in peers if peer not in busy)

    def _reach(self, peers: list[PeerId], now: float) -> list[Action]:
        self._reaching.update(dict.fromkeys(peers, now))
        return [Reach(peer) for peer in peers]

    def _fill(self, linked: set[PeerId], look: _Look) -> list[Action]:
        """Up to the number kept, from those alive; with nobody left at all, from those that were: half of them
        such as we have met, so that a crowd that nobody met doesn't stand in the way."""
        missing = self._keep - len(linked) - len(self._reaching)
        if missing <= 0:
            return []
        free = self._free(look.alive, linked)
        seen: list[PeerId] = []
        if not free and not linked:
            free = self._free(look.table.lapsed(), linked)
            seen = [peer for peer in free if look.table.places.is_proved(peer)]
        chosen = self._rng.sample(seen, min(len(seen), (missing + 1) // 2))
        others = sorted(set(free) - set(chosen))
        chosen += self._rng.sample(others, min(missing - len(chosen), len(others)))
        return self._reach(chosen, look.now)

    def _rotate(self, kept: list[Neighbour], linked: set[PeerId], look: _Look) -> list[Action]:
        """One random dial, and the oldest that was opened here makes room when there are too many."""
        now = look.now
        if now < self._rotate_at:
            return []
        self._rotate_at = now + ROTATE_S * self._rng.uniform(0.8, 1.2)
        actions: list[Action] = []
        if len(linked) > self._keep + SPARE_NEIGHBOURS and any(one.opened_here for one in kept):
            actions.append(_oldest(kept))
        suspect = look.table.places.suspect(self._rng, now)  # who may hold a place that isn't its own
        free = self._free([suspect] if suspect is not None else look.alive, linked)
        return actions + (self._reach([self._rng.choice(free)], now) if free else [])

    def _heal(self, linked: set[PeerId], look: _Look) -> list[Action]:
        """Try an old address that nobody alive answers for, each in its turn; without neighbours, a few. Every
        other one, on average, is one where somebody was."""
        now = look.now
        if bool(linked) != self._linked:
            self._linked = bool(linked)
            self._heal_s = HEAL_S if linked else FIRST_HEAL_S
            self._heal_at = now + self._heal_s * self._rng.uniform(0.5, 1.0)
        if now < self._heal_at:
            return []
        self._heal_at = now + self._heal_s * self._rng.uniform(0.8, 1.2)
        self._heal_s = min(HEAL_S, 2 * self._heal_s)
        alive = {*look.alive, *linked, self._own}
        quiet = [
            one for one, place in self._addresses.items() if place.peer is None or place.peer not in alive
        ]
        free = [one for one in quiet if one not in self._reaching]
        self._rng.shuffle(free)
        free.sort(key=lambda one: self._addresses[one].tried_at)
        actions: list[Action] = []
        for _ in range(min(1 if linked else TRIES_ALONE, len(free))):
            seen = (one for one in free if self._addresses[one].worth > _Worth.HEARSAY)
            one = next(seen, free[0]) if self._rng.random() < 0.5 else free[0]
            free.remove(one)
            self._reaching[one] = self._addresses[one].tried_at = now
            actions.append(ReachAddress(one))
        return actions

    def _least_worth(self) -> str:
        """The oldest of the least worth."""
        for worth in _Worth:
            for address, place in self._addresses.items():
                if place.worth is worth:
                    return address
        raise AssertionError("no address has a worth")

    def _duplicates(self, kept: list[Neighbour]) -> list[Action]:
        """Of two streams with one peer the one that the higher PeerId opened goes, and it ends it."""
        actions: list[Action] = []
        first: dict[PeerId, Neighbour] = {}
        for one in sorted(kept, key=lambda one: (-one.since, one.key)):
            other = first.setdefault(one.peer, one)
            if other is one:
                continue
            if one.opened_here == other.opened_here:
                actions.append(Drop(one.key, "a newer stream took its place"))
            elif self._own is not None and self._own > one.peer:
                ours = one if one.opened_here else other
                actions.append(Drop(ours.key, "one stream is enough"))
        return actions


def _oldest(kept: Iterable[Neighbour]) -> Drop:
    """Of those that were opened here."""
    old = min((one for one in kept if one.opened_here), key=lambda one: one.since)
    return Drop(old.key, "making room for another neighbour")
