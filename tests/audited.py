"""A swarm and its client under normal and hostile traffic, with Python's audit hook as a witness (PEP 578).

Run as `python -m tests.audited`; prints, as JSON, which ways to run code were taken once everything had been used
once, and whatever was done with a name that came from the network. `test_audited.py` says what may be among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "marker_of_the_network"
WITHIN_S = 100.0  # each of the two passes; ten seconds, on a quiet machine
AT_ONCE = 20  # messages, each on a stream of its own
# every event of the interpreter that turns data into code, or starts something
RUNS_CODE = (
    "pickle.find_class", "marshal.loads", "marshal.load", "compile", "exec", "import", "code.__new__",
    "function.__new__", "ctypes.dlopen", "ctypes.dlsym", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
    "os.fork", "subprocess.Popen",
)  # fmt: skip


class Witness:
    """What happened between `begin` and `end`."""

    def __init__(self) -> None:
        self._recording = False
        self.ran: list[str] = []
        self.named: list[str] = []
        sys.addaudithook(self._hook)

    def begin(self) -> None:
        self._recording = True

    def end(self) -> None:
        self._recording = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._recording:
            return
        said = f"{event} {shown(args)}"[:2000]
        if event in RUNS_CODE:
            self.ran.append(said)
        if MARKER in said:
            self.named.append(said)


def shown(value: object) -> str:
    """Texts and numbers as they are, of all else its type: what the hook is called in the midst of may hold locks that
    the object's own __repr__ would wait for."""
    if value is None or isinstance(value, str | bytes | bytearray | int | float):
        return repr(value)
    if isinstance(value, tuple | list | set | frozenset):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return shown(list(value.items()))
    return type(value).__name__


class Evil:
    """Its pickle would call a function of a module that the network names."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"echo {MARKER}",)


PICKLED = pickle.dumps(Evil())


def noise() -> list[bytes]:
    """What strangers say who speak no protocol of ours."""
    hello = f"GET /{MARKER} HTTP/1.1\r\n\r\n".encode()
    return [PICKLED, hello, b"\0" * 400, os.urandom(400), len(PICKLED).to_bytes(2, "big") + PICKLED]


async def loud(port: int, data: bytes) -> None:
    with socket.socket() as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        with contextlib.suppress(OSError):
            await loop.sock_sendall(sock, data)
            async with asyncio.timeout(10.0):
                while await loop.sock_recv(sock, 4096):
                    pass


async def hostile(peers: Any, messages: list[Any], plain: Callable[[], Any]) -> None:
    from swarm.errors import SwarmError
    from swarm.flow import Priority
    from swarm.messages import REGISTERED
    from swarm.tensors import RawTensor
    from tests.stranger import Stranger

    port = peers.peers["one"].transport.port
    await asyncio.gather(*(loud(port, data) for data in noise()))
    stranger = Stranger(peers)

    async def said(message: Any) -> None:
        with contextlib.suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(5.0):  # one that nobody takes is waited for no longer
                (await stranger.say("one", message)).reset("said")

    for at in range(0, len(messages), AT_ONCE):
        await asyncio.gather(*map(said, messages[at : at + AT_ONCE]))
    tensors = {"hidden": RawTensor("uint8", (len(PICKLED),), PICKLED), MARKER: RawTensor("uint8", (1,), b"x")}

    async def named(kind: str) -> None:
        said = {"kind": kind, "module": MARKER, "class": MARKER, "__reduce__": [MARKER], "data": PICKLED}
        with contextlib.suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(1.0):  # some are no nonsense, and then nothing ends the stream
                await stranger.end_of_raw("one", said, tensors, Priority.CONTROL)

    kinds = [*(one.kind for one in REGISTERED.values()), MARKER, "__import__", "os.system"]
    await asyncio.gather(*map(named, kinds))
    await stranger.transport.close()
    await plain()


async def main() -> None:
    witness = Witness()
    from peer import source
    from swarm.errors import SwarmError
    from tests.fuzz import values
    from tests.tiny_swarm import Tiny

    messages = values.examples(values.any_message, 200)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Tiny(Path(folder))
        honest = source.make_bundle

        def poisoned(*args: Any) -> dict[str, bytes]:
            template = f"{{% import '{MARKER}' as x %}}{{{{ cycler.__init__.__globals__.{MARKER} }}}}"
            return {**honest(*args), "chat_template.jinja": template.encode()}

        peers, liars = tiny.new_swarm(), tiny.new_swarm()
        peers.start_all(tiny.model, {"one": "0:6"})
        source.make_bundle = poisoned
        liars.start_all(tiny.model, {"liar": "0:6"})
        source.make_bundle = honest

        async def plain() -> None:
            async with tiny.client(peers) as client:
                await client.generate("Why?", max_tokens=12, temperature=0.7, seed=1, stop=["never"])
            async with tiny.client(liars) as client:
                try:
                    await client.generate("Why?", max_tokens=12)
                except SwarmError as error:
                    print(json.dumps({"refused": type(error).__name__}), flush=True)

        async with asyncio.timeout(WITHIN_S):
            await hostile(peers, messages, plain)  # so that all that is imported at its first use has been
        witness.begin()
        async with asyncio.timeout(WITHIN_S):
            await hostile(peers, messages, plain)
        witness.end()
        tiny.close()
    print(json.dumps({"ran": witness.ran, "named": witness.named}), flush=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(2 * WITHIN_S + 50.0, exit=True)  # whatever it is that hangs
    asyncio.run(main())
