"""node.py over real transports on loopback. Everything is awaited on an event; nothing sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm import node as node_module
from swarm.addresses import Address, parse_address
from swarm.errors import IdentityError, MessageError, PeerFailed, StreamClosed, Unreachable, UsageError
from swarm.identity import Identity
from swarm.link import Link, Stream
from swarm.messages import Delta, DialBack, DialledBack, GossipHello, ModelSeen, Told
from swarm.node import Node
from swarm.permits import anywhere
from swarm.records import Heartbeat, record_hash, sign_record
from swarm.state import PeerDir, StateDir
from swarm.transport import Transport
from tests.sim.records import FINGERPRINT, descriptor, serving

WITHIN_S = 30.0  # far more than needed on a busy machine; only a hang reaches it


class Swarm:
    """Nodes of one test, closed at its end."""

    def __init__(self) -> None:
        self.open: list[Node] = []

    async def peer(
        self,
        name: str,
        join: Iterable[str] = (),
        *,
        identity: Identity | None = None,
        state: StateDir | None = None,
        peer_dir: PeerDir | None = None,
        port: int = 0,
        **changes: object,
    ) -> Node:
        """Listening on loopback, started, published as serving. `address(node)` says where."""
        made = Node(Transport(identity or Identity.ephemeral()), role="peer", state=state, peer_dir=peer_dir)
        self.open.append(made)
        addresses = await made.transport.listen("127.0.0.1", port)
        await made.start(list(join))
        values = {"name": name, "addresses": tuple(addresses)} | changes
        await made.publish(descriptor(**values), serving())
        return made

    async def client(self, join: Iterable[str] = (), **options: object) -> Node:
        made = Node(Transport(Identity.ephemeral()), role="client", **options)  # type: ignore[arg-type]
        self.open.append(made)
        await made.start(list(join))
        return made

    async def shut(self, node: Node) -> None:
        """Without a word: what its neighbours see when a process dies."""
        self.open.remove(node)
        await node.close()
        await node.transport.close()

    async def aclose(self) -> None:
        for node in reversed(self.open):
            await node.close()
            await node.transport.close()


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    await made.aclose()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == [], "a node or transport left tasks behind"


def address(node: Node) -> str:
    return f"127.0.0.1:{node.transport.port}"


def names(node: Node) -> set[str]:
    return {entry.descriptor.name for entry in node.entries()}


def serving_names(node: Node) -> set[str]:
    return {e.descriptor.name for e in node.entries() if e.heartbeat.state == "serving"}


async def until(node: Node, condition: Callable[[], bool]) -> None:
    """Wait on the table's changes until `condition` holds."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await node.changed()


async def agree(nodes: Iterable[Node], expected: set[str]) -> None:
    for node in nodes:
        await until(node, lambda node=node: serving_names(node) == expected)  # type: ignore[misc]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and leases a tenth as long, so that a death is noticed while a test waits."""
    monkeypatch.setattr("swarm.owner._INTERVALS", ((200, 0.5), (1_000, 20.0), (10_000, 60.0)))
    monkeypatch.setattr("swarm.neighbour.BATCH_S", 0.1)


# ---------------------------------------------------------------- joining


async def test_four_peers_and_a_client_agree(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    others = [await swarm.peer(name, [address(first)]) for name in "bcd"]
    client = await swarm.client([address(others[-1])])
    await agree([first, *others, client], {"a", "b", "c", "d"})
    assert client.known() == 4


async def test_start_returns_with_the_whole_snapshot(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)])
    assert names(client) == {"a", "b"}


async def test_a_peer_that_dies_is_gone_after_its_lease_and_counts_as_known(
    swarm: Swarm, quick: None
) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    client = await swarm.client([address(first)])
    await agree([first, second, client], {"a", "b"})
    await swarm.shut(second)
    await agree([first, client], {"a"})
    assert (client.known(), len(client.entries())) == (2, 1)


async def test_a_leave_is_known_at_once_and_the_peer_isnt_missed(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    client = await swarm.client([address(first)])
    await agree([first, second, client], {"a", "b"})
    await second.leave()
    await swarm.shut(second)
    await agree([first, client], {"a"})
    assert client.known() == 1


async def test_the_swarm_outlives_its_first_address(swarm: Swarm, quick: None) -> None:
    first = await swarm.peer("a")
    others = [await swarm.peer(name, [address(first)]) for name in "bc"]
    client = await swarm.client([address(first)])
    await agree([*others, client], {"a", "b", "c"})
    await swarm.shut(first)
    await agree([*others, client], {"b", "c"})
    newcomer = await swarm.peer("d", [address(others[0])])
    await agree([*others, newcomer, client], {"b", "c", "d"})


async def test_a_changed_load_reaches_a_client(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    client = await swarm.client([address(first)])
    first.heartbeat(serving(state="draining", sessions=3))
    await until(client, lambda: [e.heartbeat.sessions for e in client.entries()] == [3])
    assert client.entries()[0].heartbeat.state == "draining"


async def test_a_client_can_listen_to_one_model_only(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)], fingerprint=b"g" * 32)
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)], only=(FINGERPRINT,))
    assert names(client) == {"a"}
    everything = await swarm.client([address(first)])
    assert [e.descriptor.name for e in everything.entries(b"g" * 32)] == ["b"]


async def test_a_client_follows_the_swarm_when_its_only_source_dies(swarm: Swarm, quick: None) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)])
    await swarm.shut(first)
    third = await swarm.peer("c", [address(second)])
    await agree([client, third], {"b", "c"})


# ---------------------------------------------------------------- what can go wrong at the start


async def test_nobody_at_the_address_is_said_with_the_address(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    nobody = address(first)
    await swarm.shut(first)
    for start in (swarm.client([nobody]), swarm.peer("b", [nobody])):
        with pytest.raises(Unreachable, match=f"{nobody} .*refused") as raised:
            await start
        assert raised.value.address == nobody


async def test_one_answering_address_of_several_is_enough(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    gone = await swarm.peer("b")
    dead = address(gone)
    await swarm.shut(gone)
    client = await swarm.client([dead, address(first)])
    assert names(client) == {"a"}
    with pytest.raises(Unreachable, match=f"{dead}, {dead}"):
        await swarm.client([dead, dead])


async def test_somebody_else_at_the_address_is_no_success(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    other = Identity.ephemeral().peer_id
    with pytest.raises(IdentityError):
        await swarm.client([f"{other}@{address(first)}"])
    client = await swarm.client([f"{first.transport.identity.peer_id}@{address(first)}"])
    assert names(client) == {"a"}


async def test_an_address_that_is_none_is_refused_before_anything_is_dialled(swarm: Swarm) -> None:
    with pytest.raises(UsageError, match="not an address"):
        await swarm.client(["half a mile north"])


async def test_a_client_without_any_address_is_told_what_to_give(swarm: Swarm, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="--join"):
        await swarm.client([], state=StateDir.open(tmp_path))


async def test_a_client_has_no_place_at_a_client(swarm: Swarm) -> None:
    """Dialled by nobody: even over a connection that exists, it answers no greeting."""
    first = await swarm.peer("a")
    client = await swarm.client([address(first)])
    link = first.transport.links[client.transport.identity.peer_id]
    stream = link.open_stream()
    await stream.send(GossipHello(snapshot=True))
    async with asyncio.timeout(WITHIN_S):
        answer = await stream.receive()
    assert answer.kind == "unsupported"
    stream.reset("done")


# ---------------------------------------------------------------- remembering


async def test_remembered_peers_serve_the_next_start(swarm: Swarm, tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    client = await swarm.client([address(first)], state=state)
    await swarm.shut(client)
    assert address(first) in state.remembered("main")
    again = await swarm.client([], state=state)
    assert names(again) == {"a"}


async def test_remembered_peers_that_are_gone_are_named_to_a_client(swarm: Swarm, tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    gone = address(first)
    await swarm.shut(first)
    state.remember("main", {gone: Identity.ephemeral().peer_id})
    with pytest.raises(Unreachable, match=f"{gone}.*--join"):
        await swarm.client([], state=state)


async def test_a_peer_whose_remembered_peers_are_gone_starts_alone(swarm: Swarm, tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    gone = address(first)
    await swarm.shut(first)
    state.remember("main", {gone: Identity.ephemeral().peer_id})
    second = await swarm.peer("b", state=state)
    assert second.alone and names(second) == {"b"}


async def test_a_peer_alone_goes_on_trying_remembered_addresses(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.circle.FIRST_HEAL_S", 0.05)
    monkeypatch.setattr("swarm.circle.CHECK_S", 0.05)
    state = StateDir.open(tmp_path)
    identity = Identity.ephemeral()
    first = await swarm.peer("a", identity=identity)
    port = first.transport.port
    await swarm.shut(first)
    state.remember("main", {f"127.0.0.1:{port}": identity.peer_id})
    second = await swarm.peer("b", state=state)
    assert second.alone
    back = await swarm.peer("a", identity=identity, port=port or 0)
    await agree([second, back], {"a", "b"})


async def test_a_remembered_peer_of_this_machine_may_have_changed_ports(swarm: Swarm, tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    state.remember("main", {address(first): Identity.ephemeral().peer_id})
    client = await swarm.client([], state=state)
    assert names(client) == {"a"}


async def test_a_restart_outranks_the_past(swarm: Swarm, tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    with state.lock_peer() as home:
        second = await swarm.peer("b", [address(first)], identity=home.identity, peer_dir=home)
        await agree([first, second], {"a", "b"})
        await swarm.shut(second)
    with state.lock_peer() as home:
        again = await swarm.peer("b2", [address(first)], identity=home.identity, peer_dir=home)
        await agree([first, again], {"a", "b2"})
    assert not again.second_instance


async def test_seq_on_disk_stays_above_what_was_signed(swarm: Swarm, tmp_path: Path) -> None:
    with StateDir.open(tmp_path).lock_peer() as home:
        peer = await swarm.peer("a", identity=home.identity, peer_dir=home)
        assert peer.registry._owner is not None
        peer.registry._owner.seq += node_module.SEQ_BLOCK
        peer.heartbeat(serving(state="draining"))
        assert int((home.path / "seq").read_text()) > peer.registry.seq


async def test_a_peer_whose_address_to_join_is_dead_joins_through_those_it_remembers(
    swarm: Swarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateDir.open(tmp_path)
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    known = await swarm.peer("c", [address(first)], state=state)
    await agree([first, second, known], {"a", "b", "c"})
    await swarm.shut(known)
    dead = address(first)
    await swarm.shut(first)
    with caplog.at_level(logging.WARNING):
        again = await swarm.peer("c", [dead], state=state)
        client = await swarm.client([dead], state=state)
    assert {"b", "c"} <= names(again) and {"b", "c"} <= names(client)
    assert caplog.text.count(f"{dead} ") == 2 and "remembered" in caplog.text


async def test_a_swarm_whose_first_address_died_is_whole_again_after_all_were_restarted(
    swarm: Swarm, tmp_path: Path
) -> None:
    """All down, each started again with nothing but what it wrote down; the first address never comes back."""
    first = await swarm.peer("a")
    homes = [StateDir.open(tmp_path / name) for name in "bcd"]
    ids = [Identity.ephemeral() for _ in homes]
    peers = [
        await swarm.peer(name, [address(first)], state=home, identity=identity)
        for name, home, identity in zip("bcd", homes, ids, strict=True)
    ]
    await agree([first, *peers], {"a", "b", "c", "d"})
    ports = [peer.transport.port or 0 for peer in peers]
    for node in [first, *peers]:
        await swarm.shut(node)
    again = [
        await swarm.peer(name, state=home, identity=identity, port=port)
        for name, home, identity, port in zip("bcd", homes, ids, ports, strict=True)
    ]
    await agree(again, {"b", "c", "d"})


async def test_a_name_is_looked_up_again_at_each_try(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic name that stands for nobody at first, and for a peer later."""
    monkeypatch.setattr("swarm.circle.FIRST_HEAL_S", 0.05)
    monkeypatch.setattr("swarm.circle.CHECK_S", 0.05)
    loop = asyncio.get_running_loop()
    real, looked_up = loop.getaddrinfo, asyncio.Event()
    there = False

    async def lookup(host: object, *args: Any, **kwargs: Any) -> Any:
        if host != "swarm.example":
            return await real(host, *args, **kwargs)  # type: ignore[arg-type]
        looked_up.set()
        if not there:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return await real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    first = await swarm.peer("a")
    second = await swarm.peer("b")
    place = f"swarm.example:{first.transport.port}"
    second._told[place] = anywhere  # as `start` does with what a person gives
    second.registry.remember(place, given=True)
    async with asyncio.timeout(WITHIN_S):
        await looked_up.wait()
        assert names(second) == {"b"}
        there = True
        await agree([first, second], {"a", "b"})


async def test_an_address_that_may_not_be_dialled_is_not_remembered_for_the_next_start(
    swarm: Swarm,
) -> None:
    """Then it would be dialled without asking whose word it was."""
    first = await swarm.peer("a")
    evil = await swarm.peer("evil", [address(first)], addresses=("10.1.2.3:22",))
    honest = await swarm.peer("b", [address(first)])
    await until(first, lambda: {"a", "b", "evil"} == names(first))
    first._permits.saw(evil.transport.identity.peer_id, "8.8.8.8")  # on this machine, it would be believed
    remembered = first._worth_remembering()
    assert address(honest) in remembered and "10.1.2.3:22" not in remembered


async def test_a_disk_that_takes_nothing_ends_nobodys_gossip(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Full, or descriptors ran out: the next numbers can't be reserved when the old ones are used up."""
    with StateDir.open(tmp_path).lock_peer() as peer_dir:
        first = await swarm.peer("a", peer_dir=peer_dir)

        def full(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(PeerDir, "reserve_seq", full)
        first._seq_end = 0
        first.heartbeat(serving())
        second = await swarm.peer("b", [address(first)])
        await agree([first, second], {"a", "b"})
        assert "can't write down how far this peer has counted" in caplog.text
        await swarm.shut(first)


# ---------------------------------------------------------------- models


async def test_a_client_lists_the_models_and_hears_of_the_one_it_wants(swarm: Swarm) -> None:
    first = await swarm.peer("a", model="one")
    second = await swarm.peer("b", [address(first)], fingerprint=b"g" * 32, model="other")
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)], only=())
    assert {model.names for model in client.models()} == {("one",), ("other",)}
    assert names(client) == set()
    async with asyncio.timeout(WITHIN_S):
        await client.want((b"g" * 32,))
    assert names(client) == {"b"}
    async with asyncio.timeout(WITHIN_S):
        await client.want(None)
    assert names(client) == {"a", "b"}


async def test_a_client_follows_what_it_is_told_to_as_models_come(swarm: Swarm) -> None:
    first = await swarm.peer("a", model="one")

    def follow(models: tuple[ModelSeen, ...]) -> list[bytes]:
        return [model.fingerprint for model in models if "other" in model.names]

    client = await swarm.client([address(first)], follow=follow)
    assert names(client) == set()
    second = await swarm.peer("b", [address(first)], fingerprint=b"g" * 32, model="other")
    await agree([first, second], {"a", "b"})
    await until(client, lambda: names(client) == {"b"})


async def test_a_name_that_no_list_has_room_for_is_found_when_it_is_asked_for(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.listing.MAX_MODELS_TOLD", 1)
    first = await swarm.peer("a", model="one")
    second = await swarm.peer("b", [address(first)], model="one")
    third = await swarm.peer("c", [address(first)], fingerprint=b"g" * 32, model="rare")
    await agree([first, second, third], {"a", "b", "c"})
    client = await swarm.client([address(first)], only=())
    assert [model.name for model in client.models()] == ["one"]
    await client.seek("rare")
    assert [model.name for model in client.models()] == ["rare"]


# ---------------------------------------------------------------- clocks


async def test_a_wrong_clock_costs_a_warning_and_nothing_else(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.registry.CLOCK_CHECK_S", 0.0)
    others = [await swarm.peer("a")]
    for name in "bc":
        others.append(await swarm.peer(name, [address(others[0])]))
    monkeypatch.setattr("swarm.node.wall_ms", lambda: int(time.time() * 1000) - 2 * 3_600_000)
    with caplog.at_level(logging.WARNING):
        wrong = await swarm.peer("d", [address(one) for one in others])
        await agree([*others, wrong], {"a", "b", "c", "d"})
        await until(wrong, lambda: wrong.registry.clock_error_s != 0.0)
    assert wrong.registry.clock_error_s == pytest.approx(-7200.0, abs=30.0)
    assert caplog.text.count("the clock of this machine") == 1
    assert re.search(r"is (2 h 0 min|1 h 59 min) behind those of 3 neighbours", caplog.text)
    assert all(other.registry.clock_error_s == 0.0 for other in others)


# ---------------------------------------------------------------- reaching others


async def test_a_client_links_to_a_peer_by_its_record(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)])
    link = await client.link(second.transport.identity.peer_id)
    assert link.peer == second.transport.identity.peer_id


async def test_a_peer_is_reached_where_it_was_reached_even_if_it_advertises_nonsense(swarm: Swarm) -> None:
    first = await swarm.peer("a", addresses=("not an address at all",))
    client = await swarm.client([address(first)])
    link = client.transport.links[first.transport.identity.peer_id]
    link.close("test")
    async with asyncio.timeout(WITHIN_S):
        await link.closed.wait()
    again = await client.link(first.transport.identity.peer_id)
    assert again.peer == first.transport.identity.peer_id


async def test_an_unknown_or_vanished_peer_is_peer_failed(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    client = await swarm.client([address(first)])
    gone = second.transport.identity.peer_id
    await client.link(gone)
    lost = asyncio.Event()
    client.transport.on_link_lost.append(lambda link: lost.set() if link.peer == gone else None)
    await swarm.shut(second)
    with pytest.raises(PeerFailed, match="nobody here knows"):
        await client.link(Identity.ephemeral().peer_id)
    async with asyncio.timeout(WITHIN_S):
        await lost.wait()
    with pytest.raises(PeerFailed, match="refused"):
        await client.link(gone)


async def test_measuring_gives_a_round_trip_or_none_for_each(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    client = await swarm.client([address(first)])
    stranger = Identity.ephemeral().peer_id
    peer = first.transport.identity.peer_id
    found = await client.measure([peer, stranger, peer], timeout_s=WITHIN_S)
    assert list(found) == [peer, stranger]
    assert found[peer] is not None and found[peer] > 0.0
    assert found[stranger] is None


# ---------------------------------------------------------------- dialling back


async def test_a_peer_alone_serves_at_once(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    assert serving_names(first) == {"a"} and not first.confirmed_addresses


async def test_a_newcomers_address_is_dialled_back_before_it_serves(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    assert serving_names(second) == {"a"}
    await agree([first, second], {"a", "b"})
    assert second.confirmed_addresses == {address(second)}


async def test_a_peer_that_nobody_can_dial_never_serves_and_is_told_why(
    swarm: Swarm, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    first = await swarm.peer("a")
    closed = await swarm.peer("x")
    dead = address(closed)
    await swarm.shut(closed)
    with caplog.at_level(logging.WARNING):
        second = await swarm.peer("b", [address(first)], addresses=(dead,))
        async with asyncio.timeout(WITHIN_S):
            while "no peer can connect" not in caplog.text:
                await first.changed()
    assert "--announce" in caplog.text
    assert serving_names(first) == {"a"} and not second.serving_allowed


async def test_a_peer_that_moves_is_dialled_back_at_its_new_address(swarm: Swarm) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    moved = await second.transport.listen("127.0.0.2", 0)
    made = await second.publish(descriptor(name="b", addresses=tuple(moved)))
    assert made.addresses == tuple(moved)

    def advertised() -> list[tuple[str, ...]]:
        return [entry.descriptor.addresses for entry in first.entries() if entry.descriptor.name == "b"]

    await until(first, lambda: advertised() == [tuple(moved)])
    await until(second, lambda: second.confirmed_addresses == set(moved))
    await agree([first, second], {"a", "b"})


async def test_a_peer_that_nobody_reaches_any_more_says_so_until_it_is_reached_again(
    swarm: Swarm, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    closed = await swarm.peer("x")
    dead = address(closed)
    await swarm.shut(closed)
    with caplog.at_level(logging.WARNING):
        await second.publish(descriptor(name="b", addresses=(dead,)))
        await agree([first], {"a"})
        async with asyncio.timeout(WITHIN_S):
            while "no peer can connect" not in caplog.text:
                await first.changed()
        assert not second.serving_allowed and dead in caplog.text
        await second.publish(descriptor(name="b", addresses=(address(second),)))
        await agree([first, second], {"a", "b"})
    assert caplog.text.count("no peer can connect") == 1
    assert "can connect to this peer again" in caplog.text


async def test_reachability_is_looked_at_again_and_one_miss_is_no_verdict(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is closed from outside after it was confirmed: the first look that fails changes nothing yet."""
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})
    asked = 0

    async def nobody(*_: object) -> set[str]:
        nonlocal asked
        asked += 1
        allowed.append(second.serving_allowed)
        return set()

    allowed: list[bool] = []
    monkeypatch.setattr(second._reach_us, "_dialled_back", nobody)
    monkeypatch.setattr("swarm.dialback.CONFIRM_S", 0.01)
    second._reach_us._due_at = 0.0  # ten minutes have passed
    second._reach_us.look()
    await agree([first], {"a"})
    assert allowed[:2] == [True, True] and not second.serving_allowed


async def test_nobody_is_made_to_dial_a_third_party(swarm: Swarm) -> None:
    """Loopback asks for a public address: not dialled, not reached."""
    first = await swarm.peer("a")
    second = await swarm.peer("b", [address(first)])
    await agree([first, second], {"a", "b"})  # its own question was answered
    link = await second.link(first.transport.identity.peer_id)
    dialled: list[str] = []
    real = first.transport.dial

    async def watched(place: Address, *args: object, **kwargs: object) -> Link:
        dialled.append(place.host)
        return await real(place, *args, **kwargs)  # type: ignore[arg-type]

    first.transport.dial = watched  # type: ignore[method-assign]
    stream = link.open_stream()
    await stream.send(DialBack(("8.8.8.8:53", "224.0.0.1:1", "0.0.0.0:1", "nonsense :", address(second))))
    async with asyncio.timeout(WITHIN_S):
        answer = await stream.receive()
    stream.reset("done")
    assert answer == DialledBack((address(second),))
    assert dialled == ["127.0.0.1"]


# ---------------------------------------------------------------- hostile neighbours


async def hostile(swarm: Swarm, victim: Node) -> tuple[Stream, Identity]:
    """A neighbour that speaks the protocol by hand."""
    made = Node(Transport(Identity.ephemeral()), role="client")
    swarm.open.append(made)
    link = await made.transport.dial(parse_address(address(victim)))
    stream = link.open_stream()
    await stream.send(GossipHello(snapshot=False))
    return stream, made.transport.identity


async def test_a_forged_record_costs_the_stream_and_reaches_nobody(swarm: Swarm) -> None:
    victim = await swarm.peer("a")
    stream, identity = await hostile(swarm, victim)
    mine = sign_record(identity, descriptor(peer=identity.peer_id, name="evil"))
    beat = Heartbeat(
        peer=identity.peer_id, seq=9, descriptor_hash=record_hash(mine), issued_ms=0, lease_s=15.0
    )
    good = sign_record(identity, beat)
    await stream.send(Delta((Told(good[:-1] + bytes([good[-1] ^ 1]), 0.0, mine),)))
    with pytest.raises(StreamClosed):
        async with asyncio.timeout(WITHIN_S):
            while True:
                await stream.receive()
    assert names(victim) == {"a"}
    assert stream.link.closed_reason is None


async def test_an_impossible_descriptor_is_refused_where_it_is_published(swarm: Swarm) -> None:
    peer = await swarm.peer("a")
    with pytest.raises(MessageError):
        await peer.publish(dataclasses.replace(descriptor(), model="\x1b[2J"))
    assert names(peer) == {"a"}


async def test_a_second_instance_of_an_identity_is_told_so(
    swarm: Swarm, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.owner.OWN_ECHO_S", 0.0)
    monkeypatch.setattr("swarm.owner.JUMP_INTERVAL_S", 0.1)
    first = await swarm.peer("a")
    identity = Identity.ephemeral()
    with caplog.at_level(logging.WARNING):
        one = await swarm.peer("b", [address(first)], identity=identity)
        two = await swarm.peer("b", [address(first)], identity=identity)
        await until(first, lambda: one.second_instance or two.second_instance)
    assert "--new" in caplog.text


def test_the_clock_counts_in_seconds_and_never_goes_back() -> None:
    readings = [node_module.clock() for _ in range(100)]
    assert readings == sorted(readings)
