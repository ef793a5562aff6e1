"""A peer whose file descriptors an attacker has used up: it neither spins nor dies, on either event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.addresses import Address
from swarm.identity import Identity
from swarm.transport import Transport

pytest.importorskip("resource")
WITHIN_S = 30.0
FLOOD = 64
SPARE = 12  # descriptors that the child may still open

CHILD = """
import asyncio, contextlib, json, resource, socket, sys
sys.path.insert(0, sys.argv[1])
from swarm.addresses import parse_address
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.transport import Transport

def say(**words):
    print(json.dumps(words), flush=True)

async def main():
    transport = Transport(Identity.ephemeral())
    await transport.listen("127.0.0.1", 0)
    with socket.socket() as probe:
        lowest = probe.fileno()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + int(sys.argv[3]), hard))
    tries, full = 0, asyncio.Event()
    honest = transport._out_of_descriptors

    def counted(error):
        nonlocal tries
        tries += 1
        full.set()
        honest(error)

    transport._out_of_descriptors = counted
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(socket.socket())  # as if attackers had them all
    say(port=transport.port, loop=type(asyncio.get_running_loop()).__module__)
    await full.wait()
    before = tries
    for _ in range(2000):
        await asyncio.sleep(0)
    try:
        await transport.dial(parse_address(sys.argv[4]))
        dialled = "linked"
    except SwarmError as error:
        dialled = type(error).__name__
    for sock in held:
        sock.close()
    say(tries=tries - before, dialled=dialled)
    await asyncio.to_thread(sys.stdin.readline)
    say(left=len(asyncio.all_tasks()) > 0, failures=failures)
    await asyncio.to_thread(sys.stdin.readline)
    await transport.close()

failures = []

def watched():
    loop = sys.argv[2] == "uvloop" and __import__("uvloop").new_event_loop() or asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context)))
    return loop

with asyncio.Runner(loop_factory=watched) as runner:
    runner.run(main())
"""


class Child:
    def __init__(self, loop: str, place: str) -> None:
        root = str(Path(__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, root, loop, str(SPARE), place],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def hears(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        said: dict[str, Any] = json.loads(line)
        return said

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def flood() -> Iterator[list[socket.socket]]:
    sockets = [socket.socket() for _ in range(FLOOD)]
    yield sockets
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_flood_that_takes_every_descriptor_is_survived(loop: str, flood: list[socket.socket]) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    ours = Transport(Identity.ephemeral())
    await ours.listen("127.0.0.1", 0)
    child = Child(loop, f"127.0.0.1:{ours.port}")
    try:
        told = await child.hears()
        assert told["loop"].startswith(loop)
        for sock in flood:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", told["port"]))
        full = await child.hears()
        assert full["tries"] < 100, "one try in a while; a loop that spins makes one or more at each of its 2,000 turns"
        assert full["dialled"] == "Unreachable"
        for sock in flood:
            sock.close()
        link = await ours.dial(Address(None, "127.0.0.1", told["port"]))
        await link.ping()
        child.go_on()
        assert await child.hears() == {"left": True, "failures": []}
        child.go_on()
        assert await asyncio.to_thread(child.process.wait, WITHIN_S) == 0
    finally:
        child.process.kill()
        child.process.communicate()
        await ours.close()
