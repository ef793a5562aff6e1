"""What one identity, and one neighbourhood, may cost a connection's receiver. Pure; `now` in seconds.

An identity costs nothing to make, so every limit counts twice: for the identity, and for its address group
(`addresses.address_group`), which may have GROUP_SHARES times as much. What is counted:

    control messages   and frames without a message; steps, tokens, records and files aren't among them
    held bytes         received and not yet taken, and what an open stream costs
    wasted bytes       for streams that are over
    the loop's time    spent on reading what it sends

The first and the third are for people's programs to keep and for floods to break: over quota a message costs its
stream, and whoever goes on loses the connection and is refused for a growing time (`buckets.Penalties`). The
second costs the stream. The fourth isn't anybody's fault: whoever is over its share is read a little later. Nothing of
the kind stops an only user of an idle machine: the shares of memory and time count only where others want some.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarm.buckets import Bucket
from swarm.identity import PeerId

STREAM_BYTES = 8 << 10  # held for an open stream: its state, its task, its place in the loop
MAX_ACCOUNTS = 4096  # remembered, connected or not; those unused the longest go first


@dataclass(frozen=True)
class Quotas:
    """For one identity; a group has group_shares times as much.

    control_per_s, control_burst: a session takes 6 a second at 200 tokens/s (credit for each 32, a renewal), a
    neighbour's gossip a few; so this is for some fifty sessions at one peer, and costs a few percent of the loop.
    answers: how many of the same on streams that this side opened count as one; an answer for each token may come.
    wasted_per_s, wasted_burst: a stream that is reset may have a window (1 MiB) on its way.
    strikes: so many offences at once, and one a second, before the connection is closed.
    held_bytes: of all connections together. One alone may have `Limits.held_bytes`; where several hold some, each
    group has an equal share.
    loop_share: of the event loop's time, where others are connected: 175 MB/s of hidden states.
    """

    control_per_s: float = 500.0
    control_burst: float = 2000.0
    answers: int = 10
    wasted_per_s: float = float(1 << 20)
    wasted_burst: float = float(16 << 20)
    strikes: float = 32.0
    held_bytes: int = 512 << 20
    loop_share: float = 0.25
    loop_burst_s: float = 0.25
    group_shares: int = 4


DEFAULT_QUOTAS = Quotas()


class _Books:
    """What an identity or a group has used."""

    def __init__(self, quotas: Quotas, shares: int, now: float) -> None:
        self.control = Bucket(shares * quotas.control_per_s, shares * quotas.control_burst, now)
        self.wasted = Bucket(shares * quotas.wasted_per_s, shares * quotas.wasted_burst, now)
        self.loop = Bucket(min(0.5, shares * quotas.loop_share), quotas.loop_burst_s, now)
        self.links = 0


class Account:
    """One connection's view of its identity's and its group's books."""

    def __init__(self, accounts: Accounts, peer: PeerId, group: str, now: float) -> None:
        self._accounts, self._peer, self._group = accounts, peer, group
        self._books = accounts.open_books(peer, group, now)
        self._strikes = Bucket(1.0, accounts.quotas.strikes, now)
        self._held = 0

    def control(self, now: float, answer: bool) -> bool:
        """A control message, or a frame without one. False: too many. answer: on a stream that we opened."""
        amount = 1.0 / self._accounts.quotas.answers if answer else 1.0
        own, group = self._books
        return own.control.take(now, amount) and group.control.take(now, amount)

    def wasted(self, now: float, size: int) -> bool:
        """Bytes for a stream that is over. False: too many."""
        own, group = self._books
        return own.wasted.take(now, size) and group.wasted.take(now, size)

    def strike(self, now: float) -> bool:
        """An offence. False: that was one too many."""
        return self._strikes.take(now)

    def hold(self, change: int) -> bool:
        """Bytes more or less that are held. False: its group has more than its share, and others want some."""
        self._held += change
        return self._accounts.hold(self._group, change)

    def worked(self, now: float, seconds: float) -> float:
        """So much of the loop's time went into what it sent. Returns for how many seconds to let it wait."""
        for books in self._books:
            books.loop.spend(now, seconds)
        if not self._accounts.shared:
            return 0.0
        return max(0.0, *(books.loop.ready_at(now, 0.0) - now for books in self._books))

    def close(self) -> None:
        """The connection is over; what it used is remembered."""
        self.hold(-self._held)
        self._accounts.close_books(self._books)


class Accounts:
    """All books of a transport."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._books: OrderedDict[str, _Books] = OrderedDict()  # by identity, and by group
        self._held: dict[str, int] = {}  # bytes by group, only those that hold some
        self._total = 0
        self._connected = 0  # identities

    def __len__(self) -> int:
        return len(self._books)

    @property
    def held(self) -> int:
        return self._total

    @property
    def shared(self) -> bool:
        """Whether more than one identity is connected."""
        return self._connected > 1

    def open_books(self, peer: PeerId, group: str, now: float) -> tuple[_Books, _Books]:
        found = self._open(f"peer {peer}", 1, now), self._open(f"group {group}", self.quotas.group_shares, now)
        self._connected += found[0].links == 1
        while len(self._books) > MAX_ACCOUNTS:
            unused = next((key for key, books in self._books.items() if not books.links), None)
            if unused is None:  # as many as there are connections
                break
            del self._books[unused]
        return found

    def close_books(self, books: tuple[_Books, _Books]) -> None:
        for one in books:
            one.links -= 1
        self._connected -= books[0].links == 0

    def hold(self, group: str, change: int) -> bool:
        self._total += change
        left = self._held.get(group, 0) + change
        if left:
            self._held[group] = left
        else:
            self._held.pop(group, None)
        return self._total <= self.quotas.held_bytes or left <= self.quotas.held_bytes // max(1, len(self._held))

    def _open(self, key: str, shares: int, now: float) -> _Books:
        books = self._books.pop(key, None) or _Books(self.quotas, shares, now)
        self._books[key] = books
        books.links += 1
        return books
