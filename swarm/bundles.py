"""SHELL: the tokenizers that a client has fetched from peers, and from whom it takes one.

Invariant: the files are those whose hash a peer of the model signed; and one peer's bad tokenizer costs a generation
the limits of `tokenizer.py`, no more: the next one tried is another, with another hash. Hashing, reading and
encoding happen in threads and processes of their own, never on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO

from swarm.chains import LiveModel
from swarm.errors import MessageError, NoRoute, SwarmError, TemplateFailed, TokenizerFailed, Unreachable
from swarm.identity import PeerId
from swarm.link import Link
from swarm.messages import Files, GetFiles
from swarm.packing import Buffer
from swarm.prompts import Prompt
from swarm.registry import PeerEntry
from swarm.tokenizer import MAX_FILE_BYTES, EncodedPrompt, TextCodec, TokenizerProcess, bundle_hash

FILES_TIMEOUT_S = 30.0    # a big tokenizer over a slow line
COPIED_AT_ONCE = 1 << 20  # bytes; half a millisecond
MAX_FILES_BYTES = sum(MAX_FILE_BYTES.values()) + (1 << 20)  # each at its own limit, and what we don't read
MOST_ASKED_FOR_FILES = 8  # peers that are asked for the tokenizer, one after the other; all but the dead have it
MOST_CODECS = 8           # tokenizers kept, each with its processes; the oldest goes first
MOST_BAD = 4              # tokenizers that fail one prompt, before it is given up: each may take all of its time
MOST_DOUBTED = 64         # hashes of tokenizers that failed, so that those are tried last

# What a stranger's files can be blamed for, rather than the prompt or the network.
AT_FAULT = (MessageError, TokenizerFailed, TemplateFailed)


class Bundles:
    """The tokenizers of one client."""

    def __init__(self, link_to: Callable[[PeerId], Awaitable[Link]]) -> None:
        """link_to: a connection to a peer; raises SwarmError."""
        self._link_to = link_to
        self._codecs: dict[bytes, TextCodec] = {}
        self._doubted: dict[bytes, None] = {}  # the oldest first
        self._fetching = asyncio.Lock()  # generations that begin together fetch once
        self._spare: asyncio.Task[TokenizerProcess] | None = None

    def warm(self) -> None:
        """Start a process for a tokenizer while there is still other work to wait for, if one will be needed."""
        if not self._codecs and self._spare is None:
            self._spare = asyncio.create_task(_started())

    async def encode(self, live: LiveModel, prompt: Prompt, raw: bool) -> tuple[TextCodec, EncodedPrompt]:
        """The prompt's ids, and the tokenizer that made them: a peer's that works.

        Raises UsageError when the prompt is at fault; MessageError, TokenizerFailed, TemplateFailed when all that
        were tried are; whatever fetching raises when there is none to try.
        """
        bad: dict[bytes, SwarmError] = {}
        while True:
            wanted, codec = await self._codec(live, bad)
            try:
                encoded = await codec.encode_prompt(prompt, raw=raw)
            except AT_FAULT as error:
                bad[wanted] = error
                continue
            for one in bad:  # of those that fail where none does better, the prompt may be to blame
                self._doubt(one)
            return codec, encoded

    async def aclose(self) -> None:
        if self._spare is not None:
            (await self._spare).close()
        async with self._fetching:
            for codec in self._codecs.values():
                await codec.aclose()
            self._codecs.clear()

    async def _codec(self, live: LiveModel, bad: dict[bytes, SwarmError]) -> tuple[bytes, TextCodec]:
        """A tokenizer of the model that isn't among those that failed, and its hash; `bad` grows by those that can't
        be read. Raises the first failure when no other is left, or too many failed."""
        async with self._fetching:
            problem, asked = next(iter(bad.values()), None), 0
            for entry in self._by_promise(live):
                wanted = entry.descriptor.tokenizer_hash
                if wanted in bad:
                    continue
                if len(bad) == MOST_BAD or asked == MOST_ASKED_FOR_FILES:
                    break
                if wanted in self._codecs:
                    return wanted, self._codecs[wanted]
                asked += 1
                try:
                    files = await self._files(entry.descriptor.peer, wanted)
                except SwarmError as error:  # another peer may have the same files
                    problem = problem or error
                    continue
                try:
                    return wanted, await self._read(files, wanted)
                except AT_FAULT as error:
                    bad[wanted] = error
                    problem = problem or error
            raise problem or NoRoute(live.name, "0", 0, 0, "no peer is left that could send the tokenizer")

    def _by_promise(self, live: LiveModel) -> Sequence[PeerEntry]:
        """Those whose tokenizer is at hand and hasn't failed, then those that most peers signed, then serving ones."""
        signed = Counter(entry.descriptor.tokenizer_hash for entry in live.entries)

        def promise(entry: PeerEntry) -> tuple[bool, bool, int, bool]:
            one = entry.descriptor.tokenizer_hash
            return one in self._doubted, one not in self._codecs, -signed[one], entry.heartbeat.state != "serving"

        return sorted(live.entries, key=promise)

    def _doubt(self, one: bytes) -> None:
        self._doubted.pop(one, None)
        self._doubted[one] = None
        if len(self._doubted) > MOST_DOUBTED:
            del self._doubted[next(iter(self._doubted))]

    async def _read(self, files: dict[str, bytes], wanted: bytes) -> TextCodec:
        spare, self._spare = self._spare, None
        process = TokenizerProcess() if spare is None else await spare
        codec = await asyncio.to_thread(_read, files, process)
        if len(self._codecs) >= MOST_CODECS:
            await self._codecs.pop(next(iter(self._codecs))).aclose()
        self._codecs[wanted] = codec
        return codec

    async def _files(self, peer: PeerId, wanted: bytes) -> dict[str, bytes]:
        link = await self._link_to(peer)
        stream = link.open_stream()
        stream.max_message_bytes = MAX_FILES_BYTES
        try:
            async with asyncio.timeout(FILES_TIMEOUT_S):
                await stream.send(GetFiles(wanted))
                answer = await stream.receive()
        except TimeoutError:
            raise Unreachable(peer[:8], f"no tokenizer within {FILES_TIMEOUT_S:.0f} s") from None
        finally:
            stream.reset("done")
        if not isinstance(answer, Files):
            raise MessageError(f"peer {peer[:8]} answered {type(answer).__name__} instead of the tokenizer")
        return await asyncio.to_thread(_checked, answer, peer, wanted)


async def _started() -> TokenizerProcess:
    process = TokenizerProcess()
    with contextlib.suppress(TokenizerFailed):  # said again where it is needed
        await asyncio.to_thread(process.start)
    return process


def _checked(answer: Files, peer: PeerId, wanted: bytes) -> dict[str, bytes]:
    files = {name: _copied(tensor.data) for name, tensor in answer.tensors.items()}
    if bundle_hash(files) != wanted:
        raise MessageError(f"peer {peer[:8]} sent a tokenizer that isn't the one it signed for")
    return files


def _copied(data: Buffer) -> bytes:
    """In pieces: 64 MiB at once would keep Python's lock from the event loop for 30 ms."""
    view, whole = memoryview(data), BytesIO()
    for at in range(0, len(view), COPIED_AT_ONCE):
        whole.write(view[at : at + COPIED_AT_ONCE])
    return whole.getvalue()


def _read(files: dict[str, bytes], process: TokenizerProcess) -> TextCodec:
    codec = TextCodec.from_files(files, tokenizer=process)
    with contextlib.suppress(TemplateFailed):  # said again where it is needed
        codec.start_rendering()
    return codec
