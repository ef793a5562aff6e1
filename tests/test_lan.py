"""lan.py with real multicast, on the loopback interface only: nothing of a test leaves the machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zeroconf import Zeroconf
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from swarm import lan as lan_module
from swarm.errors import Unreachable
from swarm.identity import Identity, PeerId
from swarm.lan import SERVICE, Announced, Found, Lan, lan_wanted
from swarm.node import Node
from swarm.permits import anywhere, on_the_lan
from swarm.state import StateDir
from swarm.transport import Transport
from tests.sim.records import descriptor, serving

LOOPBACK = ["127.0.0.1"]
WITHIN_S = 30.0  # far more than needed on a busy machine; only a hang reaches it
ADA, BOB = Identity.from_seed(b"a" * 32).peer_id, Identity.from_seed(b"b" * 32).peer_id


class Ears:
    """What a `Lan` was told, to be waited for."""

    def __init__(self) -> None:
        self.heard: list[Found] = []
        self._news = asyncio.Event()

    def __call__(self, found: Found) -> None:
        self.heard.append(found)
        self._news.set()

    async def until_heard(self, peer: PeerId) -> Found:
        async with asyncio.timeout(WITHIN_S):
            while True:
                for found in self.heard:
                    if found.peer == peer:
                        return found
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def open_lans() -> AsyncIterator[list[Lan]]:
    opened: list[Lan] = []
    yield opened
    for lan in opened:
        await lan.close()


async def listen(
    opened: list[Lan], announced: Announced | None = None, network: str = "main", where: list[str] = LOOPBACK
) -> Ears:
    ears, lan = Ears(), Lan(network, announced, where)
    opened.append(lan)
    await lan.start(ears)
    return ears


# ---------------------------------------------------------------- hearing


async def test_two_peers_hear_each_other_and_not_themselves(open_lans: list[Lan]) -> None:
    ada = await listen(open_lans, Announced(ADA, 7070, ["192.168.1.20", "fd00::20"]))
    bob = await listen(open_lans, Announced(BOB, 7071, ["192.168.1.21"]))
    assert await bob.until_heard(ADA) == Found(ADA, ("192.168.1.20:7070", "[fd00::20]:7070"))
    assert await ada.until_heard(BOB) == Found(BOB, ("192.168.1.21:7071",))
    assert {found.peer for found in bob.heard} == {ADA}


async def test_who_comes_later_hears_of_those_who_are_there(open_lans: list[Lan]) -> None:
    await listen(open_lans, Announced(ADA, 7070, ["192.168.1.20"]))
    first = await listen(open_lans)
    await first.until_heard(ADA)
    late = await listen(open_lans)
    assert (await late.until_heard(ADA)).addresses == ("192.168.1.20:7070",)


async def test_another_network_is_not_heard(open_lans: list[Lan]) -> None:
    await listen(open_lans, Announced(ADA, 7070, ["192.168.1.20"]), network="private")
    await listen(open_lans, Announced(BOB, 7070, ["192.168.1.21"]))
    ears = await listen(open_lans)
    await ears.until_heard(BOB)
    private = await listen(open_lans, network="private")
    assert {found.peer for found in ears.heard} == {BOB}
    assert (await private.until_heard(ADA)).peer == ADA


@pytest.mark.parametrize(
    ("properties", "port", "hosts"),
    [
        ({}, 7070, ["192.168.1.9"]),
        ({"id": "not a peer", "net": "main"}, 7070, ["192.168.1.9"]),
        ({"id": b"\xff\xfe", "net": "main"}, 7070, ["192.168.1.9"]),
        ({"id": ADA, "net": b"\xff"}, 7070, ["192.168.1.9"]),
        ({"id": ADA}, 7070, ["192.168.1.9"]),
        ({"id": ADA, "net": "main"}, 0, ["192.168.1.9"]),
        ({"id": ADA, "net": "main"}, 7070, ["169.254.169.254", "fe80::1", "224.0.0.251", "0.0.0.0"]),
        ({"id": ADA, "net": "main"}, 7070, []),
    ],
)
def test_what_makes_no_sense_is_not_passed_on(properties: dict[str, bytes], port: int, hosts: list[str]) -> None:
    info = AsyncServiceInfo(SERVICE, f"x.{SERVICE}", port=port, properties=properties, parsed_addresses=hosts)
    assert lan_module._read(info, "main") is None


async def test_without_a_network_nobody_is_found_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_lans: list[Lan]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(Zeroconf, "__init__", refuse)
    with caplog.at_level(logging.INFO, "swarm.lan"):
        ears = await listen(open_lans, Announced(ADA, 7070, ["192.168.1.20"]))
    assert ears.heard == [] and "No such device" in caplog.text


@pytest.mark.parametrize("value", ["0", "off", "No", " false "])
def test_an_environment_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SWARM_LAN", value)
    assert not lan_wanted()
    monkeypatch.delenv("SWARM_LAN")
    assert lan_wanted()


# ---------------------------------------------------------------- nodes


@pytest.fixture
async def nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Node]]:
    monkeypatch.setattr("swarm.joining.on_the_lan", anywhere)  # this LAN is this machine
    opened: list[Node] = []
    yield opened
    for node in reversed(opened):
        await node.close()
        await node.transport.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == [], "a node, a transport or a LAN left tasks behind"


async def peer(nodes: list[Node], name: str, announced_as: PeerId | None = None) -> Node:
    """Serving on loopback, and found there by whoever looks."""
    transport = Transport(Identity.ephemeral())
    addresses = await transport.listen("127.0.0.1", 0)
    assert transport.port is not None
    announced = Announced(announced_as or transport.identity.peer_id, transport.port, LOOPBACK)
    made = Node(transport, role="peer", lan=Lan("main", announced, LOOPBACK))
    nodes.append(made)
    await made.start()
    await made.publish(descriptor(name=name, addresses=tuple(addresses)), serving())
    return made


async def client(nodes: list[Node], state: StateDir | None = None) -> Node:
    made = Node(Transport(Identity.ephemeral()), role="client", state=state, lan=Lan("main", None, LOOPBACK))
    nodes.append(made)
    await made.start()
    return made


async def until_listed(node: Node, names: set[str]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while {entry.descriptor.name for entry in node.entries()} != names:
            await node.changed()


async def test_peers_and_a_client_without_an_address_make_one_swarm(nodes: list[Node]) -> None:
    ada, bob = await asyncio.gather(peer(nodes, "ada"), peer(nodes, "bob"))  # both begin alone
    asking = await client(nodes)
    for node in (ada, bob, asking):
        await until_listed(node, {"ada", "bob"})


async def test_what_is_announced_leads_to_nothing_of_this_machine(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.joining.on_the_lan", on_the_lan)
    monkeypatch.setattr("swarm.joining.LAN_PATIENCE_S", 0.6)
    liar = await peer(nodes, "liar")
    with caplog.at_level(logging.INFO, "swarm.node"), pytest.raises(Unreachable, match="this local network"):
        await client(nodes)
    assert "isn't this swarm's" in caplog.text and not liar.transport.links


async def test_an_announced_identity_must_be_proved(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.joining.LAN_PATIENCE_S", 0.6)
    await peer(nodes, "liar", announced_as=ADA)
    with caplog.at_level(logging.INFO, "swarm.node"), pytest.raises(Unreachable, match="this local network"):
        await client(nodes)
    assert f"{ADA[:8]} announces itself on the local network, but" in caplog.text


async def test_where_nobody_is_the_error_says_what_was_tried(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.joining.LAN_PATIENCE_S", 0.05)
    tried = "no address was given, none is remembered, no peer announces itself on this local network"
    with pytest.raises(Unreachable, match=f"{tried}.*--join"):
        await client(nodes)


async def test_a_remembered_peer_that_is_gone_does_not_hide_the_lan(nodes: list[Node], tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    state.remember("main", {"127.0.0.1:1": ADA})
    await peer(nodes, "bob")
    await until_listed(await client(nodes, state), {"bob"})


async def test_a_remembered_peer_that_answers_leaves_the_lan_in_peace(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir.open(tmp_path)
    ada = await peer(nodes, "ada")
    state.remember("main", {f"127.0.0.1:{ada.transport.port}": ada.transport.identity.peer_id})

    def disturbed(*_: object, **__: object) -> AsyncZeroconf:
        raise AssertionError("nobody had to be looked for")

    monkeypatch.setattr("swarm.joining.REMEMBERED_FIRST_S", WITHIN_S)
    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", disturbed)
    await until_listed(await client(nodes, state), {"ada"})
