"""A serving peer met by hand: what it refuses, and what it says while it leaves. Whole generations: test_generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from peer import server as server_module
from routing.spans import Span
from swarm.addresses import parse_address
from swarm.errors import StreamClosed
from swarm.identity import Identity
from swarm.link import Link
from swarm.messages import Draining, Extend, Extended, HopRef, Open, Opened, RefusedMessage
from swarm.transport import Transport
from tests.tiny_swarm import WITHIN_S, Background, TinySwarm, write_model

SESSION = bytes(range(16))


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinySwarm]:
    """`ada` serves layers 0 to 3 of 6."""
    folder: Path = tmp_path_factory.mktemp("server")
    background = Background()
    made = TinySwarm(background, folder / "home")
    made.start("ada", write_model(folder / "model", seed=3), "0:4")
    yield made
    made.close()
    background.close()


@pytest.fixture
async def link(peers: TinySwarm) -> AsyncIterator[Link]:
    transport = Transport(Identity.ephemeral())
    async with asyncio.timeout(WITHIN_S):
        yield await transport.dial(parse_address(peers.address))
    await transport.close()


def open_message(peers: TinySwarm, epoch: int, stop: int, reserve: int = 16, session: bytes = SESSION) -> Open:
    """From layer 0 to `stop`, with another hop on the same peer behind it."""
    ada = peers.peers["ada"]
    me = HopRef(ada.transport.identity.peer_id, 0, ada.node.descriptor_bytes)
    behind = HopRef(me.peer, stop, me.descriptor)
    return Open(
        session, epoch, Span(0, stop), None, behind, me, behind, fingerprint=ada.source.fingerprint, reserve=reserve
    )


@pytest.mark.parametrize(
    ("stop", "reserve", "why"), [(5, 16, "layers 0-4 aren't served here, 0-3 are"), (3, 100_000, "beyond the context")]
)
async def test_a_session_that_opens_anew_is_held_to_the_same_bounds(
    peers: TinySwarm, link: Link, caplog: pytest.LogCaptureFixture, stop: int, reserve: int, why: str
) -> None:
    stream = link.open_stream()
    await stream.send(open_message(peers, 1, 3))
    assert await stream.receive() == Opened(1)
    with caplog.at_level(logging.ERROR):
        await stream.send(open_message(peers, 2, stop, reserve))
        with pytest.raises(StreamClosed, match=why):
            await stream.receive()
    assert caplog.records == []
    assert peers.held() == {"ada": 1}, "its lease runs on"
    peers.evict("ada")


async def test_a_session_grows_up_to_the_context_and_no_farther(peers: TinySwarm, link: Link) -> None:
    stream = link.open_stream()
    await stream.send(open_message(peers, 1, 3))
    assert await stream.receive() == Opened(1)
    context = peers.peers["ada"].plan.context
    await stream.send(Extend(1, context))
    assert await stream.receive() == Extended(1, context)
    await stream.send(Extend(1, context + 1))
    refused = await stream.receive()
    assert isinstance(refused, RefusedMessage) and f"beyond the context of {context}" in refused.reason
    (run,) = peers.call(lambda: list(peers.peers["ada"].server.runs))
    assert peers.call(lambda: peers.peers["ada"].pool.ledger.reserved(run)) == context
    peers.evict("ada")


async def test_a_session_s_way_to_the_next_hop_ends_with_it(peers: TinySwarm, link: Link) -> None:
    def outbound() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks(peers.loop) if task.get_name().startswith("outbound")]

    stream = link.open_stream()
    await stream.send(open_message(peers, 1, 3))
    assert await stream.receive() == Opened(1)
    ways = peers.call(outbound)
    assert len(ways) == 1 and not ways[0].done()
    peers.evict("ada")
    ended = asyncio.run_coroutine_threadsafe(asyncio.wait(ways, timeout=WITHIN_S), peers.loop)
    await asyncio.wrap_future(ended)
    assert peers.call(outbound) == []


async def test_a_silent_session_is_not_let_go_for_one_that_would_not_fit_even_so(peers: TinySwarm, link: Link) -> None:
    ledger = peers.peers["ada"].pool.ledger
    silent, other = link.open_stream(), link.open_stream()
    await silent.send(open_message(peers, 1, 3))
    assert await silent.receive() == Opened(1)
    silent.reset("asleep")
    peers.call(lambda: ledger.reserve("somebody", ledger.free_positions - 4))
    await other.send(open_message(peers, 1, 3, reserve=100, session=bytes(16)))
    assert isinstance(await other.receive(), RefusedMessage)
    assert peers.held() == {"ada": 1}
    peers.call(lambda: ledger.free("somebody"))
    peers.evict("ada")


async def test_a_leaving_peer_says_so_again_while_a_session_stays(
    peers: TinySwarm, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TELL_AGAIN_S", 0.01)
    stream = link.open_stream()
    await stream.send(open_message(peers, 1, 3))
    assert await stream.receive() == Opened(1)
    server = peers.peers["ada"].server
    draining = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.drain(WITHIN_S), peers.loop))
    told = [await stream.receive() for _ in range(3)]
    assert all(isinstance(one, Draining) for one in told)
    peers.evict("ada")
    await draining
    server.draining = False
