"""Who gets the tokenizer's files, and how many at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peer import handout as handout_module
from peer.handout import AT_ONCE, AT_ONCE_PER_GROUP, Handout
from swarm.errors import MessageError
from swarm.identity import PeerId
from swarm.messages import Files, GetFiles, Message

HASH = bytes(range(32))


class Asker:
    """A stream whose other side takes what it is sent when `taken` is set."""

    def __init__(self, peer: str, host: str) -> None:
        self.link: Any = self
        self.peer, self.remote = PeerId(peer), (host, 1)
        self.got: list[Message] = []
        self.taken = asyncio.Event()

    async def send(self, message: Message, priority: object) -> None:
        self.got.append(message)

    async def end(self) -> None:
        await self.taken.wait()


def asking(desk: Handout, peer: str, host: str, wanted: bytes = HASH) -> tuple[Asker, asyncio.Task[None]]:
    asker = Asker(peer, host)
    return asker, asyncio.create_task(desk.answer(asker, GetFiles(wanted)))  # type: ignore[arg-type]


async def settled(*tasks: asyncio.Task[None]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_all_askers_get_the_same_bytes_and_no_copy() -> None:
    data = b"tokenizer" * 100
    desk = Handout(HASH, {"tokenizer.json": data})
    askers = [asking(desk, f"p{n}", f"8.8.{n}.1")[0] for n in range(5)]
    await settled()
    for asker in askers:
        (files,) = asker.got
        assert isinstance(files, Files) and files.tensors["tokenizer.json"].data is data
        asker.taken.set()
    await settled()


async def test_one_client_and_one_network_get_only_so_many_at_a_time() -> None:
    desk = Handout(HASH, {"f": b"x"})
    mine = [asking(desk, "me", "8.8.8.8") for _ in range(AT_ONCE + 1)]
    await settled()
    with pytest.raises(MessageError, match="ask again when they are there"):
        await mine[-1][1]
    others = [asking(desk, f"sybil{n}", "8.8.8.9") for n in range(AT_ONCE_PER_GROUP)]
    await settled()
    refused = [task for _, task in others if task.done()]
    assert len(refused) == AT_ONCE and all(isinstance(task.exception(), MessageError) for task in refused)
    elsewhere, task = asking(desk, "you", "9.9.9.9")
    await settled()
    assert elsewhere.got and not task.done()
    for asker, _ in (*mine, *others, (elsewhere, task)):
        asker.taken.set()
    await settled()
    assert task.done() and not desk._sending
    again, _ = asking(desk, "me", "8.8.8.8")
    await settled()
    assert again.got
    again.taken.set()
    await settled()


async def test_files_that_nobody_takes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handout_module, "SEND_S", 0.01)
    desk = Handout(HASH, {"f": b"x"})
    _, task = asking(desk, "me", "8.8.8.8")
    with pytest.raises(MessageError, match="weren't taken"):
        await task
    assert not desk._sending


async def test_files_of_another_model_arent_here() -> None:
    desk = Handout(HASH, {"f": b"x"})
    asker, task = asking(desk, "me", "8.8.8.8", bytes(32))
    with pytest.raises(MessageError, match="another model"):
        await task
    assert asker.got == []
