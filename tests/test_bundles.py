"""Whose tokenizer a client uses: one that works, of whichever peer of the model."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import swarm.bundles
from peer import source
from swarm import AsyncClient
from swarm.bundles import MOST_BAD, Bundles
from swarm.chains import LiveModel
from swarm.errors import MessageError, StreamClosed, TemplateFailed, TokenizerFailed, UsageError
from swarm.identity import PeerId
from swarm.tokenizer import TokenizerLimits, TokenizerProcess, bundle_hash
from tests.test_tokenizer_worker import PROMPT, bundle, in_the_normalizer
from tests.tiny_swarm import Tiny

GOOD = bundle()
BAD = in_the_normalizer()
UNREADABLE = {**GOOD, "tokenizer.json": b"{}"}
ENDLESS = {**GOOD, "chat_template.jinja": b"{{ nothing.there }}"}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TokenizerLimits(encode_s=0.5)
    monkeypatch.setattr(swarm.bundles, "TokenizerProcess", functools.partial(TokenizerProcess, limits))


class Handed(Bundles):
    """Peers by name, with what they sign for and, where it differs, what they send."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None))
        self.signed: dict[str, dict[str, bytes]] = {}
        self.sent: dict[str, Exception] = {}
        self.asked: list[str] = []

    def live(self) -> LiveModel:
        entries = tuple(
            SimpleNamespace(
                descriptor=SimpleNamespace(peer=PeerId(name), tokenizer_hash=bundle_hash(files)),
                heartbeat=SimpleNamespace(state="serving"),
            )
            for name, files in self.signed.items()
        )
        return LiveModel("tiny", b"f" * 32, 6, cast(Any, entries))

    async def _files(self, peer: PeerId, wanted: bytes) -> dict[str, bytes]:
        self.asked.append(peer)
        if peer in self.sent:
            raise self.sent[peer]
        return self.signed[peer]


@pytest.fixture
async def handed() -> AsyncIterator[Handed]:
    made = Handed()
    yield made
    await made.aclose()


async def test_a_tokenizer_that_takes_for_ever_is_left_for_another_peers(handed: Handed) -> None:
    handed.signed = {"eve": BAD, "ada": GOOD}
    codec, encoded = await handed.encode(handed.live(), PROMPT, raw=True)
    assert codec.decode(encoded.ids) == PROMPT and handed.asked == ["eve", "ada"]


async def test_the_one_that_failed_is_not_tried_again_while_another_works(handed: Handed) -> None:
    handed.signed = {"eve": BAD, "ada": GOOD}
    await handed.encode(handed.live(), PROMPT, raw=True)
    handed.asked.clear()
    await (await handed.encode(handed.live(), PROMPT, raw=True))[0].aclose()
    assert handed._by_promise(handed.live())[0].descriptor.peer == "ada" and handed.asked == []


async def test_files_that_can_not_be_read_are_left_for_another_peers(handed: Handed) -> None:
    handed.signed = {"eve": UNREADABLE, "ada": GOOD}
    assert (await handed.encode(handed.live(), "hi", raw=True))[1].ids and handed.asked == ["eve", "ada"]


async def test_a_template_that_fails_is_left_for_another_peers(handed: Handed) -> None:
    handed.signed = {"eve": ENDLESS, "ada": GOOD}
    assert (await handed.encode(handed.live(), "hi", raw=False))[1].ids and handed.asked == ["eve", "ada"]


async def test_where_none_works_the_first_fault_is_told_and_none_is_doubted_for_it(handed: Handed) -> None:
    handed.signed = {"eve": ENDLESS, "ada": UNREADABLE}
    with pytest.raises(TemplateFailed, match="undefined"):
        await handed.encode(handed.live(), "hi", raw=False)
    assert handed._doubted == {}, "the prompt may have been at fault"
    assert (await handed.encode(handed.live(), "hi", raw=True))[1].ids


async def test_only_so_many_bad_tokenizers_are_waited_for(handed: Handed) -> None:
    handed.signed = {f"eve {n}": {**UNREADABLE, "special_tokens_map.json": b"{%s}" % (b" " * n)} for n in range(9)}
    with pytest.raises(MessageError, match="unusable"):
        await handed.encode(handed.live(), "hi", raw=True)
    assert len(handed.asked) == MOST_BAD


async def test_a_peer_that_sends_something_else_spoils_nothing_for_those_that_signed_the_same(
    handed: Handed,
) -> None:
    handed.signed = {"eve": GOOD, "ada": GOOD}
    handed.sent = {"eve": MessageError("sent a tokenizer that isn't the one it signed for")}
    assert (await handed.encode(handed.live(), "hi", raw=True))[1].ids and handed.asked == ["eve", "ada"]
    handed.sent = {name: StreamClosed("gone") for name in handed.signed}
    await handed._codecs.pop(bundle_hash(GOOD)).aclose()
    with pytest.raises(StreamClosed):
        await handed.encode(handed.live(), "hi", raw=True)


async def test_what_most_peers_signed_is_tried_first(handed: Handed) -> None:
    handed.signed = {"eve": BAD, "ada": GOOD, "bob": GOOD}
    await handed.encode(handed.live(), PROMPT, raw=True)
    assert handed.asked == ["ada"]


async def test_a_prompt_that_is_at_fault_is_nobodys_tokenizers_fault(handed: Handed) -> None:
    handed.signed = {"ada": GOOD, "bob": BAD}
    with pytest.raises(UsageError, match="1 to 4096 messages"):
        await handed.encode(handed.live(), [], raw=False)
    assert handed.asked == ["ada"]


async def test_a_process_is_started_early_used_once_and_ended_if_it_never_was(handed: Handed) -> None:
    handed.warm()
    handed.warm()
    assert handed._spare is not None
    spare = await handed._spare
    handed.signed = {"ada": GOOD}
    codec, _ = await handed.encode(handed.live(), "hi", raw=True)
    assert codec._tokenizer is spare and handed._spare is None
    handed.warm()
    assert handed._spare is None, "one is at hand"
    unused = Handed()
    unused.warm()
    assert unused._spare is not None
    process = (await unused._spare)._confined
    await unused.aclose()
    assert process._processes == []


async def test_a_client_is_answered_although_most_peers_hand_out_a_bad_tokenizer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the wire; and the hash of what came is taken in another thread than the event loop's."""
    peers = tiny.new_swarm()
    honest = source.make_bundle

    def poisoned(*args: Any) -> dict[str, bytes]:
        return {**honest(*args), "tokenizer.json": BAD["tokenizer.json"]}

    monkeypatch.setattr(source, "make_bundle", poisoned)
    peers.start_all(tiny.model, {"eve": "0:6", "eva": "0:6"})
    monkeypatch.setattr(source, "make_bundle", honest)
    peers.start_all(tiny.model, {"ada": "0:6"})
    hashing: list[int] = []

    def hashed(files: dict[str, bytes]) -> bytes:
        hashing.append(threading.get_ident())
        return bundle_hash(files)

    monkeypatch.setattr(swarm.bundles, "bundle_hash", hashed)
    async with tiny.client(peers) as client:
        answer = await client.generate(PROMPT, max_tokens=8, raw=True)
    right = tiny.oracle.greedy(tiny.oracle.raw_ids(PROMPT), 8)
    assert list(answer.token_ids) == right and answer.text == tiny.oracle.text(right)
    assert len(hashing) == 2 and threading.get_ident() not in hashing
    async with AsyncClient(peers.address, home=tiny.new_home(), only=("eve",)) as client:
        with pytest.raises(TokenizerFailed, match="took longer"):
            await client.generate(PROMPT, max_tokens=8, raw=True)
    peers.close()
