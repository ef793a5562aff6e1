"""Peers that lie. Each speaks the protocol as far as it must to be heard, and attacks now and then.

A hostile peer owns its identities and what it signs with them, has all records that it heard, and sends what
it likes: the attacks are the methods of `Hostile` named in ATTACKS. What it can't do is sign for others.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack

from swarm.heads import head_id
from swarm.messages import (
    Ask,
    Delta,
    Digest,
    GossipHello,
    Message,
    Offer,
    Subscribe,
    Told,
)
from swarm.records import (
    DOMAIN,
    MAX_LEASE_S,
    MAX_SEQ,
    SIGNATURE_BYTES,
    Heartbeat,
    Leave,
    record_hash,
    sign_record,
)
from tests.sim.network import WINDOW, End, Host
from tests.sim.records import descriptor

if TYPE_CHECKING:
    from swarm.identity import Identity
    from tests.sim.registry_world import RegistryWorld

ASK_EVERY_S = 0.02  # so that each question gets an answer of its own
KEPT = 400  # records of others, to be used against them
STREAMS = 3  # to honest peers, usually
FLOOD = 1000  # identities
FLOOD_AT_ONCE = 20  # 16 KiB
FLOOD_ADDRESS = "93.184.216"  # one /24, and public: what documentation uses is exempt from the limits
ATTACKS = (
    "forge", "flip_a_bit", "replay", "age_falsely", "come_from_the_future", "send_too_much", "contradict",
    "mix", "say_goodbye_for_others", "send_rubbish", "break_manners", "ask_without_end",
    "offer_without_end", "take_nothing", "crowd",
)  # fmt: skip


class Hostile:
    """A `Shell`. every_s: between attacks, on average."""

    def __init__(self, world: RegistryWorld, host: Host, *, every_s: float, flood: bool) -> None:
        self.world, self.host, self.every_s = world, host, every_s
        self.identity = world.notary.identity(host.name)
        self.counts: Counter[str] = Counter()
        world.hostile.add(self.identity.peer_id)
        self._rng = random.Random(f"hostile {world.seed} {host.name}")
        self._floods = flood
        self._ends: list[End] = []
        self._stolen: list[Told] = []
        self._heard_at: list[float] = []
        self._seq = host.wall_ms()
        self._next_at = 0.0
        host.shell = self

    # ------------------------------------------------------------ the shell of network.py

    def opened(self, end: End) -> None:
        self._ends.append(end)

    def ended(self, end: End) -> None:
        if end in self._ends:
            self._ends.remove(end)

    def received(self, end: End, message: Message) -> None:
        if isinstance(message, Delta):
            for told in message.records:
                self._stolen.append(told)
                self._heard_at.append(self.host.clock())
            del self._stolen[:-KEPT], self._heard_at[:-KEPT]

    def turn(self) -> None:
        now = self.host.clock()
        if now >= self._next_at:
            self._next_at = now + self._rng.uniform(0.5, 1.5) * self.every_s
            self._attack()
        self.host.alarm(self._next_at)

    # ------------------------------------------------------------ what it does

    def _attack(self) -> None:
        if len(self._ends) < STREAMS:
            self._dial()
        self._ends = [end for end in self._ends if end.open]
        if not self._ends:
            return
        name = self._rng.choice(ATTACKS)
        if self._floods and self.counts["flood"] == 0 and self.counts["crowd"] > 0:
            name = "flood"
        self.counts[name] += 1
        self.host.network.note(f"{self.host.name} attacks: {name}")
        getattr(self, f"_{name}")(self._rng.choice(self._ends))

    def _dial(self) -> None:
        honest = [one.host.address for one in self.world.there.values() if not one.client]
        if honest:
            self.host.dial(self._rng.choice(sorted(honest)), self._greet)

    def _greet(self, end: End | None) -> None:
        if end is not None:
            end.send(GossipHello(snapshot=True))
            self._ends.append(end)

    def _tell(self, end: End, *records: Told) -> None:
        end.send(Delta(records))

    def _theirs(self) -> Told | None:
        """A record of somebody else, with the age that it really has."""
        if not self._stolen:
            return None
        at = self._rng.randrange(len(self._stolen))
        return replace(
            self._stolen[at], age_s=self._stolen[at].age_s + self.host.clock() - self._heard_at[at]
        )

    def _own(self, identity: Identity | None = None, **changes: object) -> tuple[bytes, bytes]:
        """A descriptor and a heartbeat that are good, but for what is changed."""
        signer = identity or self.identity
        self._seq += 2
        seq = changes.pop("seq", self._seq)
        lease_s = changes.pop("lease_s", 15.0)
        names = {"addresses": (self.host.address,), "name": self.host.name} | changes
        about = sign_record(signer, descriptor(peer=signer.peer_id, seq=seq, **names))
        return self._beat(signer, about, int(seq) + 1, float(lease_s)), about  # type: ignore[call-overload, arg-type]

    def _beat(self, signer: Identity, about: bytes, seq: int, lease_s: float = 15.0) -> bytes:
        """A heartbeat for this descriptor."""
        beat = Heartbeat(
            peer=signer.peer_id,
            seq=seq,
            descriptor_hash=record_hash(about),
            issued_ms=self.host.wall_ms(),
            lease_s=lease_s,
        )
        return sign_record(signer, beat)

    # ------------------------------------------------------------ attacks

    def _forge(self, end: End) -> None:
        """Somebody else's words under a signature of ours, or under one of nobody."""
        told = self._theirs()
        if told is None:
            return
        values = msgpack.unpackb(told.head[SIGNATURE_BYTES:])
        payload = msgpack.packb(values | {"s": values["s"] + 10}, use_single_float=True)
        good = self._rng.random() < 0.5
        signature = self.identity.sign(DOMAIN, payload) if good else self._rng.randbytes(SIGNATURE_BYTES)
        self._tell(end, replace(told, head=signature + payload))

    def _flip_a_bit(self, end: End) -> None:
        told = self._theirs()
        if told is None:
            return
        which = "descriptor" if told.descriptor is not None and self._rng.random() < 0.5 else "head"
        data = bytearray(getattr(told, which))
        bit = self._rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        self._tell(end, replace(told, **{which: bytes(data)}))

    def _replay(self, end: End) -> None:
        """What was true once, told as if it were now."""
        told = self._theirs()
        if told is not None:
            self._tell(end, replace(told, age_s=self._rng.choice([0.0, told.age_s])))

    def _age_falsely(self, end: End) -> None:
        """Make the living look nearly dead, and the dead look young."""
        for _ in range(5):
            told = self._theirs()
            if told is not None:
                lease_s = msgpack.unpackb(told.head[SIGNATURE_BYTES:])["l"]
                self._tell(end, replace(told, age_s=self._rng.choice([0.0, lease_s - 0.5, 1e6])))

    def _come_from_the_future(self, end: End) -> None:
        seq = self._rng.choice([MAX_SEQ - 1, self.host.wall_ms() + 10**12, self._seq])
        head, about = self._own(seq=seq, lease_s=MAX_LEASE_S)
        self._tell(end, Told(head, 0.0, about))

    def _send_too_much(self, end: End) -> None:
        head, about = self._own()
        huge = {"kind": "delta", "records": [[head, 0, about + bytes(2000)]]}
        many = {"kind": "delta", "records": [[head[:64], 0]] * 200}
        nested: object = 0
        for _ in range(40):
            nested = [nested]
        deep = {"kind": "delta", "records": nested}
        long = {"kind": "offer", "renewals": bytes(17_000), "changes": b""}
        data = msgpack.packb(self._rng.choice([huge, many, deep, long]))
        end.send_bytes(len(data).to_bytes(2, "big") + data)

    def _contradict(self, end: End) -> None:
        """Two descriptors of one number, to two peers, and nothing newer of that identity ever."""
        somebody = self.world.notary.identity(f"{self.host.name} two-faced {self.counts['contradict']}")
        self.world.hostile.add(somebody.peer_id)
        seq = self._seq
        one, other = (
            self._own(somebody, seq=seq, name=name, lease_s=MAX_LEASE_S) for name in ("one", "other")
        )
        others = [there for there in self._ends if there.peer is not end.peer]
        self._tell(end, Told(one[0], 0.0, one[1]))
        self._tell(self._rng.choice(others or [end]), Told(other[0], 0.0, other[1]))

    def _mix(self, end: End) -> None:
        """A heartbeat with a descriptor that isn't its own, or unsigned, or newer than itself."""
        told, (head, about) = self._theirs(), self._own()
        records = [Told(head, 0.0, self._own()[1]), Told(about, 0.0), Told(head, 0.0, head)]
        if told is not None and told.descriptor is not None:
            records.append(Told(head, 0.0, told.descriptor))
        unsigned = bytes(SIGNATURE_BYTES) + about[SIGNATURE_BYTES:]
        records.append(Told(self._beat(self.identity, unsigned, self._seq + 1), 0.0, unsigned))
        records.append(Told(self._beat(self.identity, about, self._seq), 0.0, about))
        self._tell(end, self._rng.choice(records))

    def _say_goodbye_for_others(self, end: End) -> None:
        told = self._theirs()
        if told is not None:
            values = msgpack.unpackb(told.head[SIGNATURE_BYTES:])
            leave = sign_record(
                self.identity, Leave(self.identity.peer_id, min(values["s"] + 5, MAX_SEQ), 15.0)
            )
            payload = msgpack.packb(msgpack.unpackb(leave[SIGNATURE_BYTES:]) | {"p": values["p"]})
            self._tell(end, Told(self.identity.sign(DOMAIN, payload) + payload, 0.0))

    def _send_rubbish(self, end: End) -> None:
        data = self._rng.randbytes(self._rng.randrange(200))
        unknown = msgpack.packb({"kind": "who knows"})
        end.send_bytes(self._rng.choice([b"", data, len(data).to_bytes(2, "big") + data,
                                         len(unknown).to_bytes(2, "big") + unknown]))  # fmt: skip

    def _break_manners(self, end: End) -> None:
        end.send(self._rng.choice([GossipHello(True), Subscribe(), Digest((bytes(8),)), Digest(())]))

    def _ask_without_end(self, end: End) -> None:
        """And differ everywhere."""
        rng = self._rng
        ids = tuple(rng.randbytes(8) for _ in range(900))
        for _ in range(6):
            end.send(rng.choice([Ask(ids, ()), Ask((), ids), Digest((rng.randbytes(8),) * 512)]))

    def _offer_without_end(self, end: End) -> None:
        for _ in range(10):
            end.send(Offer(tuple(self._rng.randbytes(8) for _ in range(900)), ()))

    def _take_nothing(self, end: End) -> None:
        """Ask for what is there until the stream is full, and then for more and more."""
        if not self._stolen:
            return
        end.reading = False
        network, known = self.host.network, head_id(self._stolen[-1].head)
        for n in range(WINDOW + 8):
            network.at(network.now + ASK_EVERY_S * n, end.send, Ask((known,), ()))
        for n in range(6):
            ids = tuple(self._rng.randbytes(8) for _ in range(900))
            network.at(network.now + ASK_EVERY_S * (WINDOW + 8 + n), end.send, Ask(ids, ()))

    def _crowd(self, end: End) -> None:
        """Many streams at once to one peer."""
        for _ in range(40):
            self.host.dial(end.peer.address, self._greet)

    def _flood(self, end: End) -> None:
        """A thousand identities from one address group."""
        records = []
        for n in range(FLOOD):
            identity = self.world.notary.identity(f"{self.host.name} flood {n}")
            self.world.hostile.add(identity.peer_id)
            address = f"{FLOOD_ADDRESS}.{n % 250 + 1}:{7000 + n // 250}"
            head, about = self._own(identity, addresses=(address,), name=f"flood{n}")
            records.append(Told(head, 0.0, about))
        for at in range(0, FLOOD, FLOOD_AT_ONCE):
            self._tell(self._rng.choice(self._ends), *records[at : at + FLOOD_AT_ONCE])
