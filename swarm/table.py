"""The records that one participant holds: what outranks what, and what is still alive.

Theory of operation. Of each peer at most one *head* is held: its newest heartbeat, together with
the descriptor that this names, or its leave. Heads of one peer are totally ordered by `Rank`, and
a head is replaced by a higher one only, so the tables of all who hear the same heads are equal in
whatever order they hear them (a join semilattice). Since a heartbeat's `seq` is above its
descriptor's, a leave outranks everything that was signed before it.

    absent --accept--> held --lease over, or told so--> gone (tombstone) --forgotten--> absent
                         ^--accept (higher rank only)------'

Ages are hearsay, and a liar may tell them too young (to keep a ghost) or too old (to hide the living).
What a participant knows for itself is when it first heard of a head; no head is younger than that.
- An age above an interval is doubted: another neighbour that offers the same head is asked as well, and
  the youngest answer counts. So nobody hides a peer of whom somebody honest tells, not even for a heartbeat.
- Whoever holds a tombstone answers a telling that it outranks with the newest head it ever had, and that
  ends the older one at once (`objection`). So an old heartbeat in a liar's hand, or a whole recording of
  them, brings a dead peer back for one lease after somebody here first heard of its last one, no more.
- Tombstones last GONE_S. After that nobody who held a head takes that very head again (`heard.py`), for about
  an hour among 100 peers.
- What remains: whoever comes GONE_S after the end, meets the liar first and asks nobody who was there, may list
  a ghost for as long as the recording; and a client, who offers nothing, hears no objection. Both find at
  their first dial that nobody is there.

Invariants:
- nothing is held whose owner's signature wasn't checked;
- no peer's rank ever falls while it is held or gone, and it stays gone for longer than any lease,
  so nobody but the owner, with a higher `seq`, brings a peer back;
- a lease is what remains of it here: age told + time here. Nobody's wall clock takes part;
- one owner's heads are taken no faster than `RENEWALS` allow, and identities only where `places.py` has room.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swarm.compact import compacted
from swarm.digests import Digests, Models
from swarm.errors import MessageError
from swarm.heads import (
    Gone,
    Held,
    PeerEntry,
    Rank,
    differs,
    digest_value,
    entry_of,
    head_id,
    is_doubtful,
    rank_of,
    read_head,
)
from swarm.heard import Filter, Recent
from swarm.identity import PeerId
from swarm.messages import Told
from swarm.owner import LEASE_INTERVALS, heartbeat_interval_s
from swarm.places import Places, groups_of
from swarm.records import (
    MAX_LEASE_S,
    Descriptor,
    Heartbeat,
    Leave,
    Record,
    check_signature,
    read_record,
    record_hash,
)

MAX_GONE = 16_384  # tombstones, about 700 bytes each; the oldest go first
LAPSED_AT_ONCE = 128  # two milliseconds' work
FADED_AT_ONCE = 512  # the same
GONE_S = 600.0  # above MAX_LEASE_S, so that what a slow or cut-off peer still tells finds the tombstone
OPINIONS = 8  # on the age of one head, at most
FADED = 0.5  # share of its lease after which a head no longer counts in a digest
FADE_LOOK_S = 1.0  # between looks for such heads: one walks through the table
RENEWALS = 16  # heads of one owner at once (it may change its mind while it joins); one more each half interval
assert GONE_S > 2 * MAX_LEASE_S


class Verdict(enum.Enum):
    STALE = "known, outranked or lapsed"
    ENDED = "outranked by a tombstone: worth an objection"
    INCOMPLETE = "its descriptor isn't held: ask for all of it"
    NO_ROOM = "the table, or its group of addresses, is full, or its owner speaks too often"
    RENEWED = "the same, alive for longer"
    CHANGED = "something that others want to know at once"


@dataclass(slots=True)
class _Pace:
    """How many more heads of one owner may be taken now."""

    left: float
    at: float


class Table:
    """Pure: `now` is seconds on a clock that counts time asleep. check: verifies a record's signature. own: whose
    records always find room."""

    def __init__(
        self, check: Callable[[Record, bytes], None] = check_signature, own: PeerId | None = None
    ) -> None:
        self._check = check
        self._own = own
        self._held: dict[PeerId, Held] = {}
        self._gone: dict[PeerId, Gone] = {}
        self._by_id: dict[bytes, PeerId] = {}
        self._recent = Recent()
        self._once_held = Filter()
        self._paces: dict[PeerId, _Pace] = {}  # of those held
        self._lapses: list[tuple[float, PeerId]] = []  # a heap; outdated pairs are skipped
        self._names: dict[bytes, Counter[str]] = {}  # fingerprint -> what those who serve it call it
        self.places = Places(own)
        self.digests = Digests()
        self._faded: set[PeerId] = set()  # those held that don't count in them
        self._fade_at = 0.0
        self._compacting = 0  # which part of all this is built anew next, 0 for none
        self.version = 0  # grows with every change
        self.models_version = 0  # grows when a model, or a name of one, comes or goes

    # ------------------------------------------------------------ questions

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, peer: PeerId) -> Held | None:
        return self._held.get(peer)

    def by_id(self, identifier: bytes) -> Held | None:
        peer = self._by_id.get(identifier)
        return self._held[peer] if peer is not None else None

    def knows(self, identifier: bytes, now: float) -> bool:
        """Whether asking for this head is needless."""
        return (identifier in self._by_id or identifier in self._recent) and not self.doubts(identifier, now)

    def doubts(self, identifier: bytes, now: float) -> bool:
        """Whether this head was told with an age on which another opinion is worth having."""
        peer = self._by_id.get(identifier) or self._recent.owner_of(identifier)
        return peer is not None and _is_doubted(self._past(peer), identifier, now)

    def has_ended(self, identifier: bytes) -> bool:
        """Whether this head is an older one of somebody who is gone, so that whoever tells of it should know."""
        peer = self._recent.owner_of(identifier)
        gone = self._gone.get(peer) if peer is not None else None
        return gone is not None and gone.head_id != identifier

    def objection(self, peer: PeerId, now: float) -> Told | None:
        """The proof that `peer` has ended, if it has: its newest head, older than its lease."""
        gone = self._gone.get(peer)
        return Told(gone.head_bytes, max(gone.lease_s, now - gone.issued_at)) if gone is not None else None

    def owner_of(self, identifier: bytes) -> PeerId | None:
        """Whose head this is, if it was ever told."""
        return self._by_id.get(identifier) or self._recent.owner_of(identifier)

    def held(self, only: Models | None = None) -> Iterator[Held]:
        return (held for held in self._held.values() if held.matches(only))

    def live(self, now: float, fingerprint: bytes | None = None) -> tuple[PeerEntry, ...]:
        only = None if fingerprint is None else Models((fingerprint,))
        found = (entry_of(held, now) for held in self.held(only))
        return tuple(entry for entry in found if entry is not None)

    def entry(self, peer: PeerId, now: float) -> PeerEntry | None:
        held = self._held.get(peer)
        return entry_of(held, now) if held is not None else None

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """What the peer last said of where it listens, alive or not."""
        found = self._past(peer)
        return found.addresses if found is not None else ()

    def lapsed(self) -> tuple[PeerId, ...]:
        """Peers whose lease ended without a leave, while the tombstone lasts."""
        return tuple(peer for peer, gone in self._gone.items() if not gone.left)

    def went_missing(self, peer: PeerId) -> bool:
        """Whether its lease ended without a leave, and it hasn't come back."""
        gone = self._gone.get(peer)
        return gone is not None and not gone.left

    def known(self, now: float, fingerprint: bytes | None = None) -> int:
        """Peers alive, and those that went missing while the tombstone lasts."""
        alive = sum(
            held.lapses_at > now and held.descriptor is not None
            for held in self._held.values()
            if fingerprint is None or held.fingerprint == fingerprint
        )
        missing = (
            gone
            for gone in self._gone.values()
            if not gone.left
            and now - gone.since < GONE_S
            and (fingerprint is None or gone.fingerprint == fingerprint)
        )
        return alive + sum(1 for _ in missing)

    def models(self) -> dict[bytes, Counter[str]]:
        """fingerprint -> the names under which it is served, and by how many."""
        return self._names

    def told(self, held: Held, now: float, full: bool) -> Told:
        """The head as it goes to somebody else, with the age that it has by now."""
        return Told(held.head_bytes, max(0.0, now - held.issued_at), held.descriptor_bytes if full else None)

    # ------------------------------------------------------------ changes

    def accept(self, told: Told, now: float, head: Heartbeat | Leave | None = None) -> Verdict:
        """Take in what somebody tells. head: `told.head`, if the caller has read it.

        Raises MessageError (table unchanged) if it is forged or malformed.
        """
        identifier = head_id(told.head)
        if self.knows(identifier, now):
            return Verdict.ENDED if self.has_ended(identifier) else Verdict.STALE
        if identifier in self._by_id:
            return self._another_opinion(self._held[self._by_id[identifier]], told.age_s, now)
        head = head or read_head(told.head)
        if self.places.is_turned_away(head.peer, now):
            self._recent.add(identifier, head.peer)
            return Verdict.NO_ROOM
        if self._past(head.peer) is None and identifier in self._once_held:
            self._recent.add(identifier, head.peer)
            return Verdict.STALE
        if told.age_s >= head.lease_s:
            return self._end(head, told, identifier, now)
        descriptor = self._descriptor_of(head, told)
        if isinstance(head, Heartbeat) and descriptor is None:
            return self._without_descriptor(head, identifier, now)
        rank = rank_of(head, told.head, descriptor[0] if descriptor else None)
        if not self._outranks(rank, head, identifier, now):
            self._recent.add(identifier, head.peer)
            return Verdict.ENDED if head.peer in self._gone else Verdict.STALE
        victims = self._victims(head, descriptor, now)
        pace = self._pace(head.peer, now)
        if victims is None or (pace is not None and pace.left < 1):
            self._recent.add(identifier, head.peer)
            return Verdict.NO_ROOM
        self._check(head, told.head)
        if descriptor is not None and not self._holds_descriptor(head.peer, descriptor[1]):
            self._check(*descriptor)
        if pace is not None:
            pace.left -= 1
        for victim in victims:
            self.evict(victim, now)
        return self._store(rank, head, told, identifier, descriptor, now)

    def evict(self, peer: PeerId, now: float) -> None:
        """Let go of somebody who is alive but has no place here."""
        held = self._held.get(peer)
        if held is not None and peer != self._own:
            self._drop(held)
            self.places.turn_away(peer, now)

    def lapse(self, now: float) -> list[PeerId]:
        """Move what isn't alive any more to the tombstones, and forget the oldest of those.

        At most LAPSED_AT_ONCE of them, since thousands may have been told so that they end together; `next_lapse`
        then says that more are due.
        """
        over: list[PeerId] = []
        while self._lapses and self._lapses[0][0] <= now and len(over) < LAPSED_AT_ONCE:
            _, peer = heapq.heappop(self._lapses)
            held = self._held.get(peer)
            if held is not None and held.lapses_at <= now:
                self._bury(held, now)
                over.append(peer)
        self._forget(now)
        return over

    def fade(self, now: float) -> None:
        """Let the digests leave out heads that are past half of their lease.

        Nobody's are who hears every heartbeat, so the sums differ for whoever missed one, while there is still
        time to heal that. At most FADED_AT_ONCE of them in one call.
        """
        if now < self._fade_at:
            return
        old = (
            held.peer
            for held in self._held.values()
            if held.lapses_at - now < FADED * held.head.lease_s and held.peer not in self._faded
        )
        found = list(itertools.islice(old, FADED_AT_ONCE))
        for peer in found:
            self._faded.add(peer)
            self.digests.remove(peer)
        if len(found) < FADED_AT_ONCE:  # else there may be more, for the next call
            self._fade_at = now + FADE_LOOK_S

    @property
    def next_lapse(self) -> float | None:
        return self._lapses[0][0] if self._lapses else None

    # ------------------------------------------------------------ inside: what is told

    def _past(self, peer: PeerId | None) -> Held | Gone | None:
        return (self._held.get(peer) or self._gone.get(peer)) if peer is not None else None

    def _another_opinion(self, held: Held, age_s: float, now: float) -> Verdict:
        """The youngest of them counts, and none is younger than our own knowledge."""
        issued_at = max(held.issued_at, min(now - age_s, held.heard_at))
        opinions = held.opinions - 1 if is_doubtful(age_s, held.head) else 0
        self._replace(
            held,
            replace(
                held, issued_at=issued_at, lapses_at=issued_at + held.head.lease_s, opinions=opinions
            ),
        )
        return Verdict.STALE

    def _end(self, head: Heartbeat | Leave, told: Told, identifier: bytes, now: float) -> Verdict:
        """Somebody says that this head lapsed, so the older ones did long ago. Of strangers nothing is kept."""
        past = self._past(head.peer)
        if past is None:
            return Verdict.STALE
        if isinstance(past, Gone) and past.head_id == identifier:
            self._gone[head.peer] = replace(past, opinions=max(0, past.opinions - 1))
            return Verdict.STALE
        if head.seq <= (past.seq if isinstance(past, Gone) else past.head.seq):
            self._recent.add(identifier, head.peer)
            return Verdict.STALE
        self._check(head, told.head)
        rank = past.rank
        if isinstance(head, Leave) or head.descriptor_hash == rank.hash:
            rank = max(rank, rank_of(head, told.head, None, rank.seq))
        if isinstance(past, Held):
            self._drop(past)
        self._recent.add(identifier, head.peer)
        self._gone[head.peer] = Gone(
            rank=rank,
            seq=head.seq,
            head_bytes=told.head,
            head_id=identifier,
            lease_s=head.lease_s,
            issued_at=now - told.age_s,
            heard_at=now,
            opinions=OPINIONS if isinstance(head, Heartbeat) else 0,
            fingerprint=past.fingerprint,
            addresses=past.addresses,
            left=isinstance(head, Leave),
            since=past.since if isinstance(past, Gone) else now,
        )
        return Verdict.STALE

    def _descriptor_of(self, head: Heartbeat | Leave, told: Told) -> tuple[Descriptor, bytes] | None:
        """The descriptor that a heartbeat names, from what was told or from what is held."""
        if isinstance(head, Leave):
            return None
        if told.descriptor is None:
            held = self._held.get(head.peer)
            if held is None or held.descriptor is None or held.descriptor_bytes is None:
                return None
            if held.rank.hash != head.descriptor_hash:
                return None
            found, data = held.descriptor, held.descriptor_bytes
        else:
            record = read_record(told.descriptor)
            if not isinstance(record, Descriptor) or record.peer != head.peer:
                raise MessageError(f"a heartbeat of {head.peer[:8]} came with something else's record")
            if record_hash(told.descriptor) != head.descriptor_hash:
                raise MessageError(f"a heartbeat of {head.peer[:8]} came with a descriptor it doesn't name")
            found, data = record, told.descriptor
        if head.seq <= found.seq:
            raise MessageError(f"a heartbeat of {head.peer[:8]} isn't newer than its descriptor")
        return found, data

    def _without_descriptor(self, head: Heartbeat, identifier: bytes, now: float) -> Verdict:
        """Such a heartbeat may still be plainly too old: its descriptor's seq is lower than its own."""
        past = self._past(head.peer)
        if isinstance(past, Held) and head.seq <= past.rank.seq:
            self._recent.add(identifier, head.peer)
            return Verdict.STALE
        if isinstance(past, Gone) and head.seq <= past.seq and not _is_doubted(past, identifier, now):
            self._recent.add(identifier, head.peer)
            return Verdict.ENDED
        return Verdict.INCOMPLETE

    def _outranks(self, rank: Rank, head: Heartbeat | Leave, identifier: bytes, now: float) -> bool:
        past = self._past(head.peer)
        if isinstance(past, Gone):
            return (rank > past.rank and head.seq > past.seq) or _is_doubted(past, identifier, now)
        return past is None or rank > past.rank

    def _holds_descriptor(self, peer: PeerId, data: bytes) -> bool:
        held = self._held.get(peer)
        return held is not None and held.descriptor_bytes == data

    def _victims(
        self, head: Heartbeat | Leave, descriptor: tuple[Descriptor, bytes] | None, now: float
    ) -> list[PeerId] | None:
        """Who must make room, None if there is none."""
        held = self._held.get(head.peer)
        same = held is not None and (descriptor is None or descriptor[1] == held.descriptor_bytes)
        if same or head.peer == self._own:
            return []
        groups = groups_of(descriptor[0].addresses) if descriptor is not None else ()
        victims = self.places.victims(head.peer, groups, now)
        if victims is None:
            self.places.turn_away(head.peer, now)
            return None
        return victims

    def _pace(self, peer: PeerId, now: float) -> _Pace | None:
        """How much its owner may say now; None for one who may say what it likes."""
        pace = self._paces.get(peer)
        if pace is None or peer == self._own:
            return None
        every_s = heartbeat_interval_s(len(self._held)) / 2
        pace.left, pace.at = min(RENEWALS, pace.left + (now - pace.at) / every_s), now
        return pace

    # ------------------------------------------------------------ inside: what is held

    def _store(
        self,
        rank: Rank,
        head: Heartbeat | Leave,
        told: Told,
        identifier: bytes,
        descriptor: tuple[Descriptor, bytes] | None,
        now: float,
    ) -> Verdict:
        before = self._held.get(head.peer)
        gone = self._gone.pop(head.peer, None)
        past = before or gone
        made, data = descriptor or (None, None)
        fingerprint = made.fingerprint if made else (past.fingerprint if past else None)
        moved = past is not None and past.fingerprint != fingerprint
        heard_at = gone.heard_at if gone is not None and gone.head_id == identifier else now
        issued_at = min(now - told.age_s, heard_at)
        held = Held(
            rank=rank,
            head=head,
            head_bytes=told.head,
            head_id=identifier,
            descriptor=made,
            descriptor_bytes=data,
            fingerprint=fingerprint,
            addresses=made.addresses if made else (past.addresses if past else ()),
            issued_at=issued_at,
            lapses_at=issued_at + head.lease_s,
            heard_at=heard_at,
            opinions=OPINIONS if is_doubtful(told.age_s, head) else 0,
            model_before=past.fingerprint if past and moved else before.model_before if before else None,
        )
        self._replace(before, held)
        self._recent.add(identifier, head.peer)
        self._once_held.add(identifier)
        return Verdict.CHANGED if before is None or differs(before, held) else Verdict.RENEWED

    def _replace(self, before: Held | None, held: Held) -> None:
        if before is not None:
            self._by_id.pop(before.head_id, None)
        self._held[held.peer] = held
        self._by_id[held.head_id] = held.peer
        if before is None:
            self._paces[held.peer] = _Pace(RENEWALS - 1, held.heard_at)
        if before is None or differs(before, held) or held.peer in self._faded:
            if before is not None:
                self._leave_digests(before)
            self.digests.add(held.peer, held.fingerprint, digest_value(held), held.model_before)
        if before is None or before.rank.hash != held.rank.hash:
            if before is not None:
                self._uncount(before)
            self._count(held)
            self.places.enter(held.peer, groups_of(held.addresses))
        self._push_lapse(held)
        self.version += 1

    def _drop(self, held: Held) -> None:
        del self._held[held.peer]
        del self._paces[held.peer]
        self._by_id.pop(held.head_id, None)
        self._leave_digests(held)
        self.places.leave(held.peer)
        self._uncount(held)
        self._trim_lapses()
        self.version += 1

    def _leave_digests(self, held: Held) -> None:
        if held.peer in self._faded:
            self._faded.discard(held.peer)
        else:
            self.digests.remove(held.peer)

    def _count(self, held: Held) -> None:
        if held.descriptor is None:
            return
        names = self._names.setdefault(held.descriptor.fingerprint, Counter())
        names[held.descriptor.model] += 1
        if names[held.descriptor.model] == 1:
            self.models_version += 1

    def _uncount(self, held: Held) -> None:
        if held.descriptor is None:
            return
        names = self._names[held.descriptor.fingerprint]
        names[held.descriptor.model] -= 1
        if not names[held.descriptor.model]:
            del names[held.descriptor.model]
            self.models_version += 1
        if not names:
            del self._names[held.descriptor.fingerprint]

    def _push_lapse(self, held: Held) -> None:
        heapq.heappush(self._lapses, (held.lapses_at, held.peer))
        self._trim_lapses()

    def _trim_lapses(self) -> None:
        if len(self._lapses) > 4 * len(self._held) + 64:  # mostly outdated pairs: a renewal or an end leaves one
            self._lapses = [(one.lapses_at, one.peer) for one in self._held.values()]
            heapq.heapify(self._lapses)

    def _bury(self, held: Held, now: float) -> None:
        self._drop(held)
        self._gone.pop(held.peer, None)
        self._gone[held.peer] = Gone(
            rank=held.rank,
            seq=held.head.seq,
            head_bytes=held.head_bytes,
            head_id=held.head_id,
            lease_s=held.head.lease_s,
            issued_at=held.issued_at,
            heard_at=held.heard_at,
            opinions=held.opinions,
            fingerprint=held.fingerprint,
            addresses=held.addresses,
            left=isinstance(held.head, Leave),
            since=now,
        )

    def _forget(self, now: float) -> None:
        """The oldest tombstones come first in the dict, since each is put in when it begins."""
        while self._gone:
            peer = next(iter(self._gone))
            if len(self._gone) <= MAX_GONE and now - self._gone[peer].since < GONE_S:
                break
            del self._gone[peer]
            self.places.forget(peer)
        if self._recent.turn(now, LEASE_INTERVALS * heartbeat_interval_s(len(self._held))):
            self._compacting = self._compacting or 1
        if self._compacting:
            self._compact_next()

    def _compact_next(self) -> None:
        """Once a lease, one after the other: a dict or set that was large, or in which much came and went, is larger
        than it need be, and building anew what holds ten thousand takes a millisecond."""
        match self._compacting:
            case 1:
                self._held = compacted(self._held)
            case 2:
                self._gone = compacted(self._gone)
            case 3:
                self._by_id, self._faded = compacted(self._by_id), set(self._faded)
            case 4:
                self._paces = compacted(self._paces)
            case 5:
                self.places.compact()
            case 6:
                self.digests.compact()
        self._compacting = (self._compacting + 1) % 7


def _is_doubted(past: Held | Gone | None, identifier: bytes, now: float) -> bool:
    """Whether this is the newest head of `past`, and another opinion on its age is worth having."""
    if past is None or not past.opinions or past.head_id != identifier:
        return False
    lease_s = past.lease_s if isinstance(past, Gone) else past.head.lease_s
    return now < past.heard_at + lease_s
