"""A peer of the registry alone, as a process of its own: no model, no torch.

    python -m tests.registry_peer NAME HOST PORT PACE [--lan | JOIN ...]

One JSON object a line on its output: first {"id", "address"}, then {"live": [names]} whenever that changes.
On its input: `block ID ...` is a cut between this peer and those (of links as of new dials), `block` heals
it. It ends when its input does, without a word to anybody. PACE divides the waits of the registry and of
the circle of neighbours, so that a test lives through leases without lasting for minutes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

from swarm import asks, circle, neighbour, owner, registry
from swarm.errors import SwarmError
from swarm.identity import PeerId
from swarm.lan import Announced, Lan
from swarm.node import Node
from swarm.state import StateDir
from swarm.transport import Link, Transport
from tests.sim.records import descriptor, serving

PACED = {
    circle: ("CHECK_S", "RETRY_S", "RETRY_ALONE_S", "ROTATE_S", "HEAL_S", "FIRST_HEAL_S"),
    asks: ("ASK_TIMEOUT_S",),
    registry: ("DIGEST_S", "DIGEST_MIN_S"),
    neighbour: ("BATCH_S",),
}


def hurry(pace: float) -> None:
    """Everything that the registry waits for takes 1/pace of its time, and so do leases."""
    for module, names in PACED.items():
        for name in names:
            setattr(module, name, getattr(module, name) / pace)
    owner._INTERVALS = tuple((peers, seconds / pace) for peers, seconds in owner._INTERVALS)  # type: ignore[assignment]


class CutTransport(Transport):
    """One that some peers can't be reached by, as if the cable between were cut."""

    blocked: frozenset[PeerId] = frozenset()

    def block(self, peers: Iterable[PeerId]) -> None:
        self.blocked = frozenset(peers)
        for link in [link for links in self._established.values() for link in links]:
            self._cut(link)

    def established(self, link: Link) -> None:
        """Of dialled and incoming connections alike; a pair may have two of them for a while."""
        super().established(link)
        self._cut(link)

    def _cut(self, link: Link) -> None:
        if link.peer in self.blocked:
            link.close("the cable is cut")


async def be_a_peer(name: str, host: str, port: int, join: list[str]) -> None:
    with StateDir.open().lock_peer() as home:
        transport = CutTransport(home.identity)
        addresses = await transport.listen(host, port)
        announced = Announced(home.identity.peer_id, port, [host])
        lan = Lan("main", announced) if join == ["--lan"] else None
        node = Node(transport, role="peer", state=StateDir.open(), peer_dir=home, lan=lan)
        tell(id=home.identity.peer_id, address=addresses[0])
        await node.start([] if lan else join)
        await node.publish(descriptor(name=name, addresses=tuple(addresses)), serving())
        telling = asyncio.create_task(tell_of_changes(node))
        await obey(transport)
        telling.cancel()


async def tell_of_changes(node: Node) -> None:
    told: list[str] | None = None
    while True:
        now = sorted(entry.descriptor.name for entry in node.entries())
        if now != told:
            tell(live=now)
            told = now
        await node.changed()


async def obey(transport: CutTransport) -> None:
    """Until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode():
        command, *peers = line.split()
        assert command == "block", command
        transport.block(PeerId(peer) for peer in peers)


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    name, host, port, pace, *join = sys.argv[1:]
    hurry(float(pace))
    try:
        asyncio.run(be_a_peer(name, host, int(port), join))
    except SwarmError as error:
        tell(error=str(error))


if __name__ == "__main__":
    main()
