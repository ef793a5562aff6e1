"""Twelve peers as real processes over real sockets: cut and healed, killed and started again.

Where this user may make network namespaces each peer is a host of its own, on one of two switches, and the
cut is a cable pulled between these; everywhere the peers have loopback addresses and the cut is in
themselves. Every step waits until each peer lists exactly those that live.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.processes import ROOT, environment

PEERS = 12
WITHIN_S = 150.0  # for one step; at its own pace a pulled cable heals within 60 s
QUICK, REAL = 10.0, 1.0  # how many times faster than life the registry's waits pass


class Network(Protocol):
    port: int  # the same for every peer, before and after a restart

    def host(self, index: int) -> str: ...
    def prefix(self, index: int) -> list[str]: ...
    async def cut(self, peers: list[Peer]) -> None: ...
    async def heal(self, peers: list[Peer]) -> None: ...


class Loopback:
    """127.0.0.2 and on. Even and odd peers are cut apart by telling them."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((self.host(0), 0))
            self.port = int(probe.getsockname()[1])

    def host(self, index: int) -> str:
        return f"127.0.0.{2 + index}"

    def prefix(self, index: int) -> list[str]:
        return []

    async def cut(self, peers: list[Peer]) -> None:
        for peer in peers:
            others = [other.id for other in peers if (other.index - peer.index) % 2]
            await peer.tell("block", *others)

    async def heal(self, peers: list[Peer]) -> None:
        for peer in peers:
            await peer.tell("block")


class Namespaces:
    """A namespace for each peer, and one with two switches that a cable joins: even peers at one, odd at the other."""

    port = 7070
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"swarm{os.getpid()}n{next(self._numbers)}"

    def __enter__(self) -> Namespaces:
        try:
            self._wire()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [self._switches, *map(self._namespace, range(PEERS))]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _wire(self) -> None:
        ip("netns", "add", self._switches)
        for switch in ("even", "odd"):
            ip("-n", self._switches, "link", "add", switch, "type", "bridge")
            ip("-n", self._switches, "link", "set", switch, "up")
        ip("-n", self._switches, "link", "add", "cable", "type", "veth", "peer", "name", "end")
        for end, switch in (("cable", "even"), ("end", "odd")):
            ip("-n", self._switches, "link", "set", end, "master", switch, "up")
        for index in range(PEERS):
            self._plug_in(index, "odd" if index % 2 else "even")

    def _plug_in(self, index: int, switch: str) -> None:
        namespace, port = self._namespace(index), f"port{index}"
        ip("netns", "add", namespace)
        ip("-n", self._switches, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self._switches, "link", "set", port, "master", switch, "up")
        ip("-n", namespace, "addr", "add", f"{self.host(index)}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")

    @property
    def _switches(self) -> str:
        return self.name

    def _namespace(self, index: int) -> str:
        return f"{self.name}p{index}"

    def host(self, index: int) -> str:
        return f"192.168.99.{10 + index}"

    def prefix(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(index)]

    async def cut(self, peers: list[Peer]) -> None:
        ip("-n", self._switches, "link", "set", "cable", "down")

    async def heal(self, peers: list[Peer]) -> None:
        ip("-n", self._switches, "link", "set", "cable", "up")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def may_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"swarm{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


FABRICS: dict[str, Callable[[], contextlib.AbstractContextManager[Network]]] = {
    "loopback": lambda: contextlib.nullcontext(Loopback())
}
if may_make_namespaces():
    FABRICS["namespaces"] = Namespaces


class Peer:
    """One process. name: what it is called in the registry, with how often it was started."""

    def __init__(self, index: int, runs: int, process: asyncio.subprocess.Process) -> None:
        self.index, self.runs, self.process = index, runs, process
        self.id = self.address = ""
        self.live: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"peer{self.index}.{self.runs}"

    async def next_line(self) -> None:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, f"{self.name} ended"
        facts = json.loads(line)
        assert "error" not in facts, facts
        self.id, self.address = facts.get("id", self.id), facts.get("address", self.address)
        self.live = frozenset(facts.get("live", self.live))

    async def lists(self, names: Collection[str]) -> None:
        while self.live != frozenset(names):
            await self.next_line()

    async def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words).encode() + b"\n")
        await self.process.stdin.drain()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Swarm:
    """peers: those that run, by index."""

    def __init__(self, network: Network, home: Path, pace: float) -> None:
        self.peers: dict[int, Peer] = {}
        self._network, self._home, self._pace = network, home, pace
        self._runs: dict[int, int] = {}

    async def start(self, index: int, join: Collection[str] = ()) -> Peer:
        """The same index again is the same identity, which remembers whom it knew."""
        runs = self._runs[index] = self._runs.get(index, 0) + 1
        program = [sys.executable, "-m", "tests.registry_peer", f"peer{index}.{runs}"]
        process = await asyncio.create_subprocess_exec(
            *self._network.prefix(index), *program, self._network.host(index), str(self._network.port),
            str(self._pace), *join,
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(self._home / str(index)),
        )  # fmt: skip
        peer = self.peers[index] = Peer(index, runs, process)
        await peer.next_line()
        return peer

    async def kill(self, index: int) -> None:
        await self.peers.pop(index).kill()

    async def agree(self) -> None:
        """Everybody lists everybody, and nobody else."""
        await self._all_list(list(self.peers.values()))

    async def cut(self) -> None:
        """The even peers and the odd ones each list their own side."""
        await self._network.cut(list(self.peers.values()))
        for side in (0, 1):
            await self._all_list([peer for peer in self.peers.values() if peer.index % 2 == side])

    async def heal(self) -> None:
        await self._network.heal(list(self.peers.values()))
        await self.agree()

    async def _all_list(self, peers: list[Peer]) -> None:
        names = [peer.name for peer in peers]
        try:
            async with asyncio.timeout(WITHIN_S):
                await asyncio.gather(*(peer.lists(names) for peer in peers))
        except TimeoutError:
            wrong = {peer.name: sorted(peer.live ^ set(names)) for peer in peers}
            raise AssertionError(f"after {WITHIN_S:g} s these lists differ by: {wrong}") from None

    async def aclose(self) -> None:
        await asyncio.gather(*(peer.kill() for peer in self.peers.values()))


@pytest.fixture
def network(fabric: str) -> Iterator[Network]:
    with FABRICS[fabric]() as made:
        yield made


@pytest.fixture
async def swarm(network: Network, pace: float, tmp_path: Path) -> AsyncIterator[Swarm]:
    made = Swarm(network, tmp_path, pace)
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("fabric", "pace"),
    [
        *((fabric, QUICK) for fabric in list(FABRICS)[-1:]),
        *(pytest.param(fabric, REAL, marks=pytest.mark.long) for fabric in FABRICS),
        *(pytest.param(fabric, QUICK, marks=pytest.mark.long) for fabric in list(FABRICS)[:-1]),
    ],
)
@pytest.mark.timeout(900)
async def test_twelve_peers_agree_through_deaths_restarts_and_a_cut(swarm: Swarm) -> None:
    first = await swarm.start(0)
    await asyncio.gather(*(swarm.start(index, [first.address]) for index in range(1, PEERS)))
    await swarm.agree()

    await swarm.kill(0)  # the address that everybody was given
    await swarm.agree()
    await swarm.start(0)  # no address is given: it is found where it was
    await swarm.agree()

    for index in (1, 4, 7):
        await swarm.kill(index)
    await asyncio.gather(*map(swarm.start, (1, 4, 7)))  # at once, while the others still list what they were
    await swarm.agree()

    await swarm.cut()
    await swarm.kill(2)
    await swarm.start(2)  # on its own side of the cut
    await swarm.heal()


if "namespaces" in FABRICS:  # elsewhere tests/test_lan.py does it within one process

    async def test_machines_of_one_lan_find_each_other_without_an_address(tmp_path: Path) -> None:
        """By multicast over real switches. One begins alone; who comes later hears of it, and it of them."""
        with Namespaces() as network:
            swarm = Swarm(network, tmp_path, QUICK)
            try:
                for index in (0, 1, 2):
                    await swarm.start(index, ["--lan"])
                await swarm.agree()
            finally:
                await swarm.aclose()
