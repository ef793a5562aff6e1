"""A registry world for told stories: cores, shells, network and invariants as in the histories that seeds draw.

What is left out is the weather, unless it is asked for, and clocks of their own: everybody's is the world's,
so that a story may speak to a core by hand. Signatures are Ed25519's, since some are made by hand too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import msgpack

from swarm.messages import Message, decode, encode
from swarm.packing import pack, unpack
from swarm.registry import Registry
from tests.sim.network import CALM, Host, Network
from tests.sim.registry_world import Participant, RegistryWorld

TURN_S = 0.005  # a shell answers together what comes within that
SWEEP_S = 4.0  # between looks at everything


def size(message: Message) -> int:
    """In bytes, as it travels."""
    return len(msgpack.packb(encode(message)[0]))


def through_the_wire(message: Message) -> Message:
    """What arrives: packed, measured and unpacked as the wire does it."""
    return decode(*unpack(b"".join(map(bytes, pack(*encode(message))))))


class World(RegistryWorld):
    """delay_s: one way. Whoever speaks to a core by hand (`world[name]`) wakes its shell by that."""

    def __init__(self, seed: int, *, delay_s: float = 0.02) -> None:
        super().__init__(seed, replace(CALM, delay_s=(delay_s, delay_s)), keys="ed25519", turn_s=TURN_S)
        self.invariants.sweep_s = SWEEP_S
        self.network.__class__ = OneClock

    def __getitem__(self, name: str) -> Registry:
        self.there[name].host.mark()
        return super().__getitem__(name)

    def start(
        self, name: str, at: str | None = None, *, first_seq: int | None = None, **published: object
    ) -> Participant:
        """A peer that is published, and a neighbour of `at`. In place of one that has ended: a restart."""
        made = self.add(name, first_seq=first_seq)
        made.publish(**published)
        if at is not None:
            self.connect(name, at)
        return made

    def client(self, name: str, at: str, *, only: Collection[bytes] | None = None) -> Participant:
        """`messages` are those that reach it."""
        made = self.add(name, client=True, only=only)
        self.listen((name,))
        self.connect(name, at)
        return made

    def listen(self, names: Iterable[str]) -> None:
        """Keep what arrives there from now on."""
        for name in names:
            self.there[name].arrived = []

    def arrived(self, *names: str) -> list[Message]:
        """There, or wherever somebody listens."""
        listeners = [self.there[name] for name in names] if names else list(self.there.values())
        return [message for one in listeners for message in one.arrived or ()]

    def sources(self, name: str) -> list[str]:
        """Whom it is connected with."""
        return [self.name_of(peer) for peer in sorted(self.there[name].linked())]

    @property
    def sent_bytes(self) -> int:
        return sum(host.sent_bytes for host in self.network.hosts.values())


class OneClock(Network):
    """Everybody's clock shows the virtual time."""

    def add(self, name: str, address: str, *, wall_error_s: float = 0.0) -> Host:
        host = super().add(name, address, wall_error_s=wall_error_s)
        host.clock_s = 0.0
        return host
