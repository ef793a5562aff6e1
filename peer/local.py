"""Several real peers as processes of their own on this machine: for the demo, the tests and the benchmarks.

Each process holds the other end of a pipe as its standard input and ends when that closes, so that
none outlives this process even if it is itself killed. Each has a home of its own inside `home`; they
share `cache`, where models are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from swarm import AsyncClient
from swarm.errors import SwarmError, Unreachable
from swarm.registry import PeerEntry

READY_TIMEOUT_S = 100.0  # five processes import torch on two cores in about 25 s
STOP_TIMEOUT_S = 5.0
RETRY_S = 0.2  # how often a process that isn't listening yet is tried again
EXIT_WITH_STDIN = "SWARM_EXIT_WITH_STDIN"  # set for peers that must not outlive who started them
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class LocalPeer:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def address(self) -> str | None:
        """PEERID@host:port, once it serves."""
        told = re.findall(r"--join (\S+@\S+)", self.said())
        return told[-1] if told else None

    def last_line(self) -> str:
        lines = self.said().strip().splitlines()
        return lines[-1] if lines else "(it said nothing)"

    def kill(self) -> None:
        """SIGKILL: no farewell."""
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP: it stays, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)


class LocalSwarm:
    """An async context: leaving it stops every process."""

    def __init__(self, model: str, home: Path, cache: Path, *, threads: int = 1) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.peers: dict[str, LocalPeer] = {}
        self._model, self.home, self._cache, self._threads = model, home, cache, threads
        self._starts = 0

    async def __aenter__(self) -> LocalSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    async def start(self, name: str, *options: str) -> LocalPeer:
        """Start a peer; the first is the one that others join. A name may be used again after a kill."""
        self._starts += 1
        joins = [part for address in self.addresses for part in ("--join", address)]
        where = joins if self.peers else ["--port", self.address.rpartition(":")[2]]
        command = [sys.executable, "-m", "cli", "peer", self._model, "--host", "127.0.0.1", "--device", "cpu"]
        command += ["--threads", str(self._threads), "--name", name, *where, *options]
        log = self.home / f"{self._starts}-{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment(f"peer-{self._starts}") | {EXIT_WITH_STDIN: "1"},
                start_new_session=True,  # Ctrl-C is for us; we tell them
            )
        peer = self.peers[name] = LocalPeer(name, process, log)
        return peer

    @property
    def addresses(self) -> list[str]:
        """Of every peer that runs and has said where; before any has, the first one's place."""
        running = [peer for peer in self.peers.values() if peer.process.returncode is None]
        return [address for peer in running if (address := peer.address) is not None] or [self.address]

    def environment(self, home: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key != "SWARM_JOIN"}
        return kept | {"SWARM_HOME": str(self.home / home), "SWARM_CACHE": str(self._cache)}

    async def connect(self, client: AsyncClient) -> None:
        """Connect as soon as the first peer listens. Raises SwarmError when it ended instead."""
        while True:
            self._check_alive()
            try:
                await client.connect()
                return
            except Unreachable:
                await asyncio.sleep(RETRY_S)

    async def serving(self, client: AsyncClient, names: Collection[str]) -> dict[str, PeerEntry]:
        """Wait until all of these serve and `client` knows it. Raises SwarmError when one ended instead."""
        while True:
            found = {
                entry.descriptor.name: entry
                for entry in client.peers()
                if entry.heartbeat.state == "serving" and self._runs_now(entry)
            }
            if found.keys() >= set(names):
                return found
            self._check_alive(names)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.changed(), 1.0)

    def _runs_now(self, entry: PeerEntry) -> bool:
        """A killed peer stays in the registry for a lease; what counts is the process that has its name now."""
        peer = self.peers.get(entry.descriptor.name)
        return peer is not None and entry.descriptor.peer in peer.said()

    def _check_alive(self, names: Collection[str] | None = None) -> None:
        for name in self.peers if names is None else names:
            peer = self.peers[name]
            if peer.process.returncode is not None:
                raise SwarmError(f"peer {name} ended with exit code {peer.process.returncode}: {peer.last_line()}")

    def last_words(self) -> str:
        return "; ".join(f"{peer.name}: {peer.last_line()}" for peer in self.peers.values())

    async def stop(self) -> None:
        """Closing a peer's standard input ends it; what lingers is killed."""
        peers = list(self.peers.values())
        for peer in peers:
            if peer.process.stdin is not None:
                peer.process.stdin.close()
        waits = [asyncio.create_task(peer.process.wait()) for peer in peers]
        if waits:
            await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        for peer in peers:
            if peer.process.returncode is None:
                peer.process.kill()
        await asyncio.gather(*waits)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
