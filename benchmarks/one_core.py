"""One real registry core among very many peers, whose neighbours are played by what the model of `epidemic.py` says.

The core gets real messages with real signatures: for each heartbeat of 10,000 peers the model says when each of its
neighbours learns of it, and from then on a played neighbour does what a real one would: it offers in batches, answers
when asked, asks for what it doesn't know yet, and compares digests. The core's shell is a plain one: decode, tell the
core, ask it for messages, encode; its CPU time is that of this thread. Sockets and encryption are not in it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.epidemic import Epidemic, Graph
from benchmarks.full_cores import DELAY_S, ENVELOPE_BYTES
from swarm.heads import head_id
from swarm.identity import Identity
from swarm.messages import Ask, Delta, Digest, Message, Offer, Subscribe, Told, decode, encode
from swarm.neighbour import BATCH_S, Kind
from swarm.owner import LEASE_INTERVALS, heartbeat_interval_s
from swarm.packing import pack, unpack
from swarm.records import Heartbeat, Load, record_hash, sign_record
from swarm.registry import DIGEST_S, Drop, Registry, in_parts
from tests.sim.records import descriptor, serving

CHANGED = 0.02  # of all heartbeats: another state or claim; 3 a second among 10,000
DIFFERING = 4  # buckets in which two digests differ, because of changes on their way
PATTERNS = 12  # pieces of news that are modelled; each heartbeat takes one of them
SOURCES = 3  # of a client
FIRST_SEQ = 1_764_000_000_000


@dataclass
class Neighbour:
    """A played one. taken: heads that it has or has asked for. offered: by the core. pending: to be offered with
    the next batch."""

    key: int
    taken: set[bytes] = field(default_factory=set)
    offered: set[bytes] = field(default_factory=set)
    pending: dict[bytes, None] = field(default_factory=dict)


@dataclass
class Beat:
    """A head, and when it was issued."""

    told: Told
    at: float


Pattern = list[tuple[float, float]]  # of each neighbour


class OneCore:
    """graph: of the swarm; the core takes the place of a peer with an ordinary number of neighbours. clients: that
    subscribe at it, for all models."""

    def __init__(self, graph: Graph, seed: int, clients: int = 0) -> None:
        self.rng = random.Random(f"one core {seed}")
        self.peers, self.clients = len(graph), clients
        self.now = 0.0
        self.cpu_s = 0.0
        self.sent = [0, 0]  # bytes, messages
        self.received = [0, 0]
        self.sent_to_clients = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._alarm_at = 0.0
        mean = sum(map(len, graph)) / len(graph)
        self.place = min(range(len(graph)), key=lambda n: abs(len(graph[n]) - mean))
        self.neighbours = [Neighbour(key) for key in range(1, len(graph[self.place]) + 1)]
        self._renewals, self._changes = (self._patterns(graph, renewal) for renewal in (True, False))
        self.interval_s = heartbeat_interval_s(self.peers)
        self._identities = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(self.peers)]
        self._seq = [FIRST_SEQ] * self.peers
        self._about = [b""] * self.peers
        self._beats: dict[bytes, Beat] = {}
        self.core = Registry(
            Identity.from_seed(b"\xff" * 32), now=0.0, rng=random.Random(seed), first_seq=FIRST_SEQ, unix_ms=FIRST_SEQ
        )

    def _patterns(self, graph: Graph, renewal: bool) -> list[Pattern]:
        """When each neighbour of the place asks for a piece of news and has it, without its help."""
        found: list[Pattern] = []
        for n in range(PATTERNS):
            source = self.rng.choice([n for n in range(self.peers) if n != self.place])
            news = Epidemic(graph, random.Random(n), loss=0.0, renewal=renewal, mute=self.place)
            news.spread(source)
            found.append([(min(news.asked_at[k], news.known_at[k]), news.known_at[k]) for k in graph[self.place]])
        return found

    # ------------------------------------------------------------ time

    def begin(self) -> None:
        """A snapshot, ten seconds to settle, and everybody's heartbeats from then on."""
        for one in self.neighbours:
            self._attach(one.key, self._identities[one.key - 1], Kind.GOSSIP)
        self._turn()
        self.core.publish(descriptor(addresses=("45.1.1.1:7070",)), serving(), 0.0)
        first = []
        for n in range(self.peers):
            due = self.rng.uniform(0.0, self.interval_s)
            self._sign_descriptor(n)
            first.append(self._sign(n, due - self.interval_s))
            self._at(due, lambda n=n: self._beat(n))
        teller = self.neighbours[0].key
        for at in range(0, self.peers, 20):
            records = tuple(Told(b.told.head, -b.at, b.told.descriptor) for b in first[at : at + 20])
            self._deliver(teller, Delta(records, complete=at + 20 >= self.peers))
        assert len(self.core.table) == self.peers + 1 and self.core.complete
        for n in range(self.clients):
            key = len(self.neighbours) + 1 + n
            self._attach(key, Identity.ephemeral(), Kind.SUBSCRIBER)
            self._deliver(key, Subscribe(None, snapshot=False))
        self._at(DIGEST_S, self._somebody_compares)
        self.run(10.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            following = min(self._events[0][0] if self._events else end, max(self._alarm_at, self.now + 1e-6), end)
            self.now = following
            if self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            elif self._alarm_at <= self.now:
                self._turn()
            elif self.now >= end:
                return

    def traffic(self, seconds: float) -> dict[str, float]:
        """Bytes a second in each direction, those to clients apart, and the share of a core."""
        self.cpu_s, self.sent, self.received, self.sent_to_clients = 0.0, [0, 0], [0, 0], 0
        self.run(seconds)
        sent, received = (
            (size + count * ENVELOPE_BYTES) / seconds for size, count in (self.sent, self.received)
        )
        return {
            "bytes_per_s": max(sent, received),
            "sent_per_s": sent,
            "received_per_s": received,
            "to_clients_per_s": self.sent_to_clients / seconds,
            "links": float(len(self.neighbours)),
            "clients": float(len(self.core.neighbours) - len(self.neighbours)),
            "cpu_share": self.cpu_s / seconds,
        }

    def _at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), call))

    def _later(self, call: Callable[[], None]) -> None:
        self._at(self.now + self.rng.uniform(*DELAY_S), call)

    # ------------------------------------------------------------ the core and its shell

    def _attach(self, key: int, who: Identity, kind: Kind) -> None:
        self.core.attach(key, who.peer_id, kind, opened_here=kind is Kind.GOSSIP, now=self.now)

    def _deliver(self, key: int, message: Message) -> None:
        data = b"".join(map(bytes, pack(*encode(message))))
        if key <= len(self.neighbours):
            self.received[0] += len(data)
            self.received[1] += 1
        began = time.thread_time()
        for part in in_parts(decode(*unpack(data))):
            self.core.receive(key, part, self.now)
        self.cpu_s += time.thread_time() - began
        self._turn()

    def _turn(self) -> None:
        out: list[tuple[int, Message, int]] = []
        began = time.thread_time()
        self.core.tick(self.now, FIRST_SEQ + int(1000 * self.now))
        while keys := self.core.sendable(self.now):
            for key in keys:
                while (message := self.core.next_message(key, self.now)) is not None:
                    out.append((key, message, sum(map(len, pack(*encode(message))))))
        for action in self.core.actions():
            if isinstance(action, Drop) and action.key > len(self.neighbours):
                self.core.detach(action.key, self.now)
        self._alarm_at = self.core.deadline
        self.cpu_s += time.thread_time() - began
        for key, message, size in out:
            if key > len(self.neighbours):
                self.sent_to_clients += size + ENVELOPE_BYTES
                self._later(lambda key=key, message=message: self._client_hears(key, message))
            else:
                self.sent[0] += size
                self.sent[1] += 1
                one = self.neighbours[key - 1]
                self._later(lambda one=one, message=message: self._neighbour_hears(one, message))

    # ------------------------------------------------------------ records

    def _sign_descriptor(self, n: int) -> None:
        self._seq[n] += 1
        about = descriptor(
            peer=self._identities[n].peer_id,
            seq=self._seq[n],
            addresses=(f"{20 + n // 60000}.{n // 200 % 250}.{n % 200}.1:7070",),
            name=f"peer{n}",
        )
        self._about[n] = sign_record(self._identities[n], about)

    def _sign(self, n: int, at: float) -> Beat:
        self._seq[n] += 1
        load = serving(queue_s=0.25, sessions=2)
        beat = Heartbeat(
            peer=self._identities[n].peer_id,
            seq=self._seq[n],
            descriptor_hash=record_hash(self._about[n]),
            issued_ms=FIRST_SEQ + int(1000 * at),
            lease_s=LEASE_INTERVALS * self.interval_s,
            **{name: getattr(load, name) for name in Load.__dataclass_fields__},
        )
        return Beat(Told(sign_record(self._identities[n], beat), 0.0, self._about[n]), at)

    def _beat(self, n: int) -> None:
        change = self.rng.random() < CHANGED
        if change:
            self._sign_descriptor(n)
        beat = self._sign(n, self.now)
        identifier = head_id(beat.told.head)
        self._beats[identifier] = beat
        pattern = self.rng.choice(self._changes if change else self._renewals)
        for one, (asked_s, known_s) in zip(self.neighbours, pattern, strict=True):
            hears = functools.partial(self._hears_of, one, identifier, known_s - asked_s, change)
            self._at(self.now + asked_s, hears)
        self._at(self.now + self.interval_s, lambda: self._beat(n))

    # ------------------------------------------------------------ neighbours

    def _hears_of(self, one: Neighbour, identifier: bytes, wait_s: float, change: bool) -> None:
        """Not from the core."""
        if identifier not in one.taken:
            one.taken.add(identifier)
            self._at(self.now + wait_s, lambda: self._learns(one, identifier, change))

    def _learns(self, one: Neighbour, identifier: bytes, change: bool) -> None:
        if identifier in one.offered:
            return
        if change:
            self._later(lambda: self._deliver(one.key, Offer((), (identifier,))))
            return
        if not one.pending:
            self._at(self.now + BATCH_S, lambda: self._flush(one))
        one.pending[identifier] = None

    def _flush(self, one: Neighbour) -> None:
        renewals = tuple(one.pending)
        one.pending.clear()
        self._later(lambda: self._deliver(one.key, Offer(renewals, ())))

    def _neighbour_hears(self, one: Neighbour, message: Message) -> None:
        if isinstance(message, Offer):
            one.offered.update(message.renewals, message.changes)
            for identifier in (*message.renewals, *message.changes):
                one.pending.pop(identifier, None)
            heads, full = (
                tuple(i for i in ids if i in self._beats and i not in one.taken)
                for ids in (message.renewals, message.changes)
            )
            one.taken.update(heads, full)
            if heads or full:
                self._later(lambda: self._deliver(one.key, Ask(heads, full)))
        elif isinstance(message, Ask):
            self._answer(one, message)
        elif isinstance(message, Digest):
            self._compare(one, message)

    def _answer(self, one: Neighbour, message: Ask) -> None:
        for ids, full, most in ((message.heads, False, 64), (message.full, True, 16)):
            found = [self._beats[i] for i in ids if i in self._beats]
            for at in range(0, len(found), most):
                told = tuple(
                    Told(b.told.head, self.now - b.at, b.told.descriptor if full else None)
                    for b in found[at : at + most]
                )
                self._later(lambda told=told: self._deliver(one.key, Delta(told)))

    def _somebody_compares(self) -> None:
        one = self.rng.choice(self.neighbours)
        sums, _ = self._other_sums(self.core.table.digests.sums(256))
        self._deliver(one.key, Digest(sums))
        self._at(self.now + self.rng.uniform(0.8, 1.2) * DIGEST_S, self._somebody_compares)

    def _compare(self, one: Neighbour, message: Digest) -> None:
        """It offers what it has where the sums differ, and answers with its own."""
        sums, chosen = self._other_sums(message.sums)
        ids = tuple(self.core.table.get(peer).head_id for peer in self.core.table.digests.within(chosen, len(sums)))  # type: ignore[union-attr]
        self._later(lambda: self._deliver(one.key, Offer((), ids)))
        if not message.answer:
            self._later(lambda: self._deliver(one.key, Digest(sums, answer=True)))

    def _other_sums(self, sums: tuple[bytes, ...]) -> tuple[tuple[bytes, ...], set[int]]:
        chosen = set(self.rng.sample(range(len(sums)), DIFFERING))
        return tuple(bytes(8) if at in chosen else one for at, one in enumerate(sums)), chosen

    # ------------------------------------------------------------ clients

    def _client_hears(self, key: int, message: Message) -> None:
        """It asks here for what it heard of here first."""
        if isinstance(message, Offer):
            heads, full = (
                tuple(i for i in ids if self.rng.random() < 1 / SOURCES)
                for ids in (message.renewals, message.changes)
            )
            if heads or full:
                self._later(lambda: self._deliver(key, Ask(heads, full)))
