"""The tokenizer's files for whoever asks, which are megabytes for a question of fifty bytes.

All answers share the same bytes, so one that waits costs no memory but its stream; what is bounded is how many wait
for one client and one address group at a time, and for how long.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from swarm.addresses import address_group
from swarm.errors import MessageError
from swarm.flow import Priority
from swarm.link import Link, Stream
from swarm.messages import Files, GetFiles, Message
from swarm.tensors import RawTensor

AT_ONCE = 4  # for one client, which needs one
AT_ONCE_PER_GROUP = 32  # a course of students behind one router that starts together
SEND_S = 60.0  # a client waits for half of that


class Handout:
    """files: by name. tokenizer_hash: what clients know them by."""

    def __init__(self, tokenizer_hash: bytes, files: Mapping[str, bytes]) -> None:
        self._hash = tokenizer_hash
        self._answer = Files({name: RawTensor("uint8", (len(data),), data) for name, data in files.items()})
        self._sending: Counter[str] = Counter()

    async def answer(self, stream: Stream, message: Message) -> None:
        """Raises MessageError, which tells the asker why not."""
        assert isinstance(message, GetFiles)
        if message.tokenizer_hash != self._hash:
            raise MessageError("another model is served here")
        with self._turn(stream.link):
            await stream.send(self._answer, Priority.BULK)
            try:
                async with asyncio.timeout(SEND_S):
                    await stream.end()
            except TimeoutError:
                raise MessageError(f"the files weren't taken within {SEND_S:g} s") from None

    @contextmanager
    def _turn(self, link: Link) -> Iterator[None]:
        limits = {f"client {link.peer}": AT_ONCE, address_group(link.remote[0]): AT_ONCE_PER_GROUP}
        if any(self._sending[name] >= most for name, most in limits.items()):
            raise MessageError(
                f"files are on their way to {AT_ONCE} askers with this identity, or to {AT_ONCE_PER_GROUP} from its "
                "network, already; ask again when they are there, or ask another peer"
            )
        self._sending.update(limits.keys())
        try:
            yield
        finally:
            self._sending.subtract(limits.keys())
            self._sending += Counter()  # forgets those at 0
