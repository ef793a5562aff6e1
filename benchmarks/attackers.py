"""Strangers who connect and never prove an identity: the process that `benchmarks.attack` sets on a peer.

    python -m benchmarks.attackers PORT [--seed N]

For each line `COUNT` on standard input so many connections are made to 127.0.0.1:PORT, MOST_AT_ONCE at a time and
as fast as they come to an end, each from another address of 127.0.0.0/8, which a peer counts as another network.
What became of them is one JSON object on standard output. The kinds, by their share:

    garbage    64 random bytes
    impostor   everything right up to the last message, whose proof is signed by another key: the dearest for a peer,
               which computes three key exchanges, a signature and a verification for it
    silent     not a byte
    trickle    a good first message, a byte a second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter

from swarm.errors import SwarmError
from swarm.identity import Identity, PeerId
from swarm.noise import Handshake

KINDS = {"garbage": 0.4, "impostor": 0.4, "silent": 0.1, "trickle": 0.1}
MOST_AT_ONCE = 600  # several times what a peer's kernel keeps waiting for it
PATIENCE_S = 15.0  # a peer cuts everybody within 5 s
AGAIN_S = 0.2  # a connection that the peer's kernel had no room for is tried again, sooner than TCP itself would


class Impostor:
    """Says that it is somebody, and signs with a key of its own."""

    def __init__(self, claimed: PeerId) -> None:
        self.peer_id = claimed
        self._own = Identity.ephemeral()

    def sign(self, domain: bytes, data: bytes) -> bytes:
        return self._own.sign(domain, data)


class Strangers:
    def __init__(self, port: int, seed: int) -> None:
        self._port, self._rng = port, random.Random(seed)
        self._somebody = Identity.ephemeral().peer_id
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def attack(self, count: int) -> dict[str, object]:
        begun = time.monotonic()
        kinds = self._rng.choices(list(KINDS), list(KINDS.values()), k=count)
        ends: Counter[str] = Counter()
        running: set[asyncio.Task[str]] = set()
        for kind in kinds:
            await self._at_once.acquire()
            task = asyncio.create_task(self._one(kind))
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(lambda done: ends.update([done.result()]))
        await asyncio.gather(*running)
        return {"connections": count, "took_s": round(time.monotonic() - begun, 2), "ends": dict(sorted(ends.items()))}

    async def _one(self, kind: str) -> str:
        """What became of one connection."""
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while sock is None:
                    sock = await self._connected(loop)
                return f"{kind}: {await getattr(self, '_' + kind)(loop, sock)}"
        except TimeoutError:
            return f"{kind}: given up after {PATIENCE_S:g} s"
        except OSError as error:
            return f"{kind}: {type(error).__name__}"
        finally:
            if sock is not None:
                sock.close()
            self._at_once.release()

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> socket.socket | None:
        """None: there was no room in time."""
        sock = socket.socket()
        sock.setblocking(False)
        try:
            sock.bind((self._address(), 0))
            await asyncio.wait_for(loop.sock_connect(sock, ("127.0.0.1", self._port)), AGAIN_S)
        except TimeoutError:
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    async def _garbage(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
        await loop.sock_sendall(sock, self._rng.randbytes(64))
        return await _until_closed(loop, sock)

    async def _silent(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
        return await _until_closed(loop, sock)

    async def _trickle(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
        for byte in self._handshake().data_to_send():
            await loop.sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(1.0)
        return await _until_closed(loop, sock)

    async def _impostor(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
        handshake = self._handshake()
        await loop.sock_sendall(sock, handshake.data_to_send())
        while handshake.done is None:
            heard = await loop.sock_recv(sock, 4096)
            if not heard:
                return "cut before its answer came"
            try:
                handshake.receive(heard)
            except SwarmError as error:
                return type(error).__name__
        await loop.sock_sendall(sock, handshake.data_to_send())
        return f"its proof was refused: {await _until_closed(loop, sock)}"

    def _address(self) -> str:
        numbers = [self._rng.randrange(1, 255) for _ in range(3)]
        return ".".join(map(str, [127, *numbers]))

    def _handshake(self) -> Handshake:
        return Handshake("initiator", Impostor(self._somebody), "main")  # type: ignore[arg-type]


async def _until_closed(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
    while await loop.sock_recv(sock, 4096):
        pass
    return "closed"


async def obey(port: int, seed: int) -> None:
    strangers = Strangers(port, seed)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await strangers.attack(int(line))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(obey(options.port, options.seed))


if __name__ == "__main__":
    main()
