"""A peer's life as its swarm sees it: what it advertises, what a failed start leaves, who may knock.

The peers are real ones in a loop of another thread, on loopback; the model is a tiny one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from peer import service as service_module
from peer.engine import Engine
from peer.service import PeerOptions, PeerService
from routing.placement import Claim
from routing.spans import Span
from swarm import AsyncClient
from swarm.errors import BrokenModel, CapacityError
from swarm.identity import Identity
from swarm.registry import PeerEntry
from swarm.state import StateDir
from tests.tiny_model import write_tiny_model
from tests.tiny_swarm import WITHIN_S, Background, TinySwarm, write_model

PROMPT = "the other one"


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=3)


@pytest.fixture
def swarm(background: Background, model: Path, tmp_path: Path) -> Iterator[TinySwarm]:
    """`ada` serves the whole of the tiny model, and sees who comes and goes."""
    made = TinySwarm(background, tmp_path / "swarm")
    made.start("ada", model, "0:6")
    yield made
    made.close()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "home")


class Alone:
    """A peer beside the swarm's own, with everything it said."""

    def __init__(self, swarm: TinySwarm, state: StateDir, model: Path, **options: object) -> None:
        self.said: list[str] = []
        self.swarm = swarm
        values = {"join": (swarm.address,), "host": "127.0.0.1", "port": 0, "device": "cpu", "threads": 1}
        values |= {"name": "eve", "layers": "0:6"}  # chosen ones are found after a delay
        self.service = PeerService(
            PeerOptions(str(model), **values | options),  # type: ignore[arg-type]
            state=state,
            say=self.said.append,
        )

    def start(self) -> None:
        self.swarm.run(self.service.start())

    def close(self) -> None:
        self.swarm.run(self.service.close())

    def __enter__(self) -> Alone:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def entry(swarm: TinySwarm, name: str = "eve") -> PeerEntry | None:
    """What `ada` knows of a peer that is alive."""
    found = swarm.call(lambda: swarm.peers["ada"].node.entries())
    return next((one for one in found if one.descriptor.name == name), None)


def until(swarm: TinySwarm, condition: Callable[[], bool]) -> None:
    """Wait on the changes of ada's table."""

    async def wait() -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await swarm.peers["ada"].node.changed()

    swarm.run(wait())


def known_names(swarm: TinySwarm) -> set[str]:
    """In the swarm's loop only."""
    return {entry.descriptor.name for entry in swarm.peers["ada"].node.entries()}


def state_of(swarm: TinySwarm, name: str) -> str:
    """In the swarm's loop only."""
    entries = swarm.peers["ada"].node.entries()
    return next((one.heartbeat.state for one in entries if one.descriptor.name == name), "gone")


# ---------------------------------------------------------------- a start that fails


def test_weights_that_fail_while_they_load_leave_no_claim(
    swarm: TinySwarm, state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim was public by then; a goodbye, not a lease of seconds, takes it back.

    The files are looked at again about when the claim is seen: they are found truncated, or changed.
    """
    spoiled = write_tiny_model(tmp_path / "spoiled")
    gate, seen = threading.Event(), []
    start = Engine.start
    monkeypatch.setattr(Engine, "start", lambda self: (start(self), self.call(gate.wait)))
    eve = Alone(swarm, state, spoiled, layers="0:4")
    starting = in_background(eve.start)
    until(swarm, lambda: "eve" in known_names(swarm))
    claim = entry(swarm)
    seen.append(claim.heartbeat.state if claim else "")
    weights = spoiled / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    gate.set()
    with pytest.raises(BrokenModel, match=r"model\.safetensors (can't be used: it is truncated|was changed since)"):
        starting.result(WITHIN_S)
    assert seen == ["loading"]
    assert entry(swarm) is None


def test_a_peer_whose_weights_are_no_numbers_serves_nobody(
    swarm: TinySwarm, state: StateDir, tmp_path: Path
) -> None:
    spoiled = write_tiny_model(tmp_path / "spoiled")
    tensors = {name: tensor * np.float32("nan") for name, tensor in load_file(spoiled / "model.safetensors").items()}
    save_file(tensors, spoiled / "model.safetensors")
    with pytest.raises(BrokenModel, match="layers 0-3 give nothing that is a number"):
        Alone(swarm, state, spoiled, layers="0:4").start()
    assert entry(swarm) is None


def in_background(work: Callable[[], None]) -> concurrent.futures.Future[None]:
    answer: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def test_a_start_that_is_cancelled_leaves_no_claim(
    swarm: TinySwarm, state: StateDir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    start = Engine.start
    monkeypatch.setattr(Engine, "start", lambda self: (start(self), self.call(gate.wait)))
    eve = Alone(swarm, state, model)

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(eve.service.start())

    starting = swarm.run(begin())
    until(swarm, lambda: "eve" in known_names(swarm))
    swarm.call(starting.cancel)
    until(swarm, lambda: "eve" not in known_names(swarm))  # although a tensor is still being loaded
    gate.set()
    swarm.run(asyncio.wait({starting}, timeout=WITHIN_S))
    assert starting.cancelled()


def test_memory_that_ends_while_loading_is_no_bug(
    swarm: TinySwarm, state: StateDir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr("peer.weights.load_span", full)
    with pytest.raises(CapacityError, match=r"memory ran out while layers 0-5 were loaded .*--memory"):
        Alone(swarm, state, model).start()
    assert entry(swarm) is None


@pytest.mark.parametrize(("stored", "kept"), [(torch.float32, ""), (torch.bfloat16, ", kept in bfloat16 as published")])
def test_what_stays_as_it_was_published_is_said(
    swarm: TinySwarm, state: StateDir, model: Path, tmp_path: Path, stored: torch.dtype, kept: str
) -> None:
    copied = shutil.copytree(model, tmp_path / "published")
    file = copied / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, file)
    with Alone(swarm, state, copied) as eve:
        (line,) = (line for line in eve.said if line.startswith("memory"))
        assert line.endswith(f" of weights per layer{kept}")
        assert {one.dtype for one in eve.service.engine.model.parameters() if one.ndim > 1} == {stored}
    with Alone(swarm, state, copied, dtype="bfloat16") as eve:
        assert not any("kept in" in line for line in eve.said)


def test_a_failed_start_frees_its_identity_and_its_port(
    swarm: TinySwarm, state: StateDir, model: Path
) -> None:
    failing = Alone(swarm, state, model, memory="1MB")
    with pytest.raises(CapacityError):
        failing.start()
    port = failing.service.transport.port
    with Alone(swarm, state, model, port=port) as eve:
        assert eve.service.transport.identity.peer_id == failing.service.transport.identity.peer_id


# ---------------------------------------------------------------- what it claims


def test_in_company_a_claim_is_looked_at_again_though_none_was_known(
    swarm: TinySwarm, state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that begin to serve a model at the same moment know nothing of each other's claims yet."""
    looked: list[Span] = []

    def recheck(layers: int, mine: Claim, *others: object) -> Span:
        looked.append(mine.span)
        return mine.span

    for name in ("LONGEST_DELAY_S", "SPREADING_S"):
        monkeypatch.setattr(service_module, name, 0.01)
    monkeypatch.setattr(service_module, "recheck", recheck)
    with Alone(swarm, state, write_tiny_model(tmp_path / "other"), layers=None) as eve:
        assert looked == [eve.service.span]


# ---------------------------------------------------------------- who it is


def test_two_peers_of_one_home_take_identities_and_ports_of_their_own(
    swarm: TinySwarm, state: StateDir, model: Path
) -> None:
    with (
        Alone(swarm, state, model, port=None, name="one") as one,
        Alone(swarm, state, model, port=None, name="two") as two,
    ):
        ports = [one.service.transport.port, two.service.transport.port]
        assert 7070 <= ports[0] < ports[1]
        assert one.service.transport.identity.peer_id != two.service.transport.identity.peer_id
    assert {path.name for path in (state.home / "peers").iterdir()} == {"0", "1"}


def test_the_next_start_is_the_same_peer_unless_a_new_one_is_wanted(
    swarm: TinySwarm, state: StateDir, model: Path
) -> None:
    ids = []
    for new in (False, False, True):
        with Alone(swarm, state, model, new=new) as eve:
            ids.append(eve.service.transport.identity.peer_id)
    assert ids[0] == ids[1] != ids[2]


def test_what_lending_means_is_said_at_the_first_start_only(
    swarm: TinySwarm, state: StateDir, model: Path
) -> None:
    with Alone(swarm, state, model) as first:
        pass
    with Alone(swarm, state, model) as second:
        pass
    notices = ["\n".join(peer.said).count("anyone who can reach this port") for peer in (first, second)]
    assert notices == [1, 0]


def test_a_peer_that_comes_back_outranks_what_it_was(swarm: TinySwarm, model: Path) -> None:
    swarm.start("eve", model, "0:3")
    old = entry(swarm)
    swarm.crash("eve")
    assert entry(swarm) is not None, "nobody said goodbye"
    swarm.start("eve", model, "3:6")
    until(swarm, lambda: state_of(swarm, "eve") == "serving")
    new = entry(swarm)
    assert old is not None and new is not None
    assert old.peer == new.peer
    assert old.descriptor.seq < new.descriptor.seq
    assert str(new.descriptor.span) == "3-5"


def test_a_goodbye_is_known_before_the_peer_is_gone(swarm: TinySwarm, model: Path) -> None:
    swarm.start("eve", model, "0:3")
    assert entry(swarm) is not None
    swarm.drain("eve")
    assert entry(swarm) is None


def test_names_and_addresses_are_advertised_as_they_were_given(
    swarm: TinySwarm, state: StateDir, model: Path
) -> None:
    announced = ("swarm.example.org:9000", "[2001:db8::7]:7070")
    with Alone(swarm, state, model, name="frida", served_name="mouse", announce=announced):

        async def look() -> tuple[object, ...]:
            async with AsyncClient(swarm.address, home=state.home / "client") as client:
                (shown,) = await client.status("mouse")
            frida = next(peer for peer in shown.peers if peer.descriptor.name == "frida")
            return frida.descriptor.model, frida.descriptor.addresses

        assert swarm.run(look()) == ("mouse", announced)


def test_nobody_is_told_to_dial_everywhere(swarm: TinySwarm, state: StateDir, model: Path) -> None:
    with Alone(swarm, state, model, host="0.0.0.0") as eve:
        shown = entry(swarm)
        assert shown is not None
        assert shown.descriptor.addresses
        assert not any(address.startswith("0.0.0.0") for address in shown.descriptor.addresses)
        assert "0.0.0.0" not in eve.service.address


# ---------------------------------------------------------------- strangers at the port


def tls_hello() -> bytes:
    """A ClientHello as OpenSSL writes it."""
    import ssl

    out = ssl.MemoryBIO()
    session = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname="example.org")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    return out.read()


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0\r\n\r\n",
    "TLS": tls_hello(),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "noise": random.Random(5).randbytes(70_000),
    "our greeting and then nonsense": b"LayerSwarm" + bytes(200),
    "nothing": b"",
}


def dialled(swarm: TinySwarm) -> socket.socket:
    return socket.create_connection(("127.0.0.1", swarm.peers["ada"].transport.port), timeout=WITHIN_S)


def answers(swarm: TinySwarm, state: StateDir) -> bool:
    async def ask() -> int:
        async with AsyncClient(swarm.address, home=state.home / "client") as client:
            return len((await client.generate(PROMPT, max_tokens=5)).token_ids)

    return swarm.run(ask()) > 0


@pytest.mark.parametrize("who", STRANGERS)
def test_a_strange_program_is_shrugged_off(
    swarm: TinySwarm, state: StateDir, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), dialled(swarm) as stranger:
        try:
            stranger.sendall(STRANGERS[who])
            stranger.shutdown(socket.SHUT_WR)
            told = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
        except ConnectionError:
            told = b""
        assert len(told) < 4096
        assert answers(swarm, state)
    assert caplog.records == []
    assert all(link.peer for link in swarm.call(lambda: list(swarm.peers["ada"].transport._sockets)))


def test_a_stranger_that_says_one_byte_and_waits_is_in_nobodys_way(swarm: TinySwarm, state: StateDir) -> None:
    waiting = [dialled(swarm) for _ in range(100)]  # more than may be in a handshake at once
    try:
        for one in waiting:
            one.sendall(b"L")
        assert answers(swarm, state)
    finally:
        for one in waiting:
            one.close()


# ---------------------------------------------------------------- a machine that moves


def test_a_peer_whose_machine_gets_another_address_tells_the_swarm(
    swarm: TinySwarm, state: StateDir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another Wi-Fi; it listens everywhere, and 127.0.0.9 stands for the new place."""
    hosts = ["127.0.0.1"]
    monkeypatch.setattr(service_module, "own_hosts", lambda: list(hosts))
    monkeypatch.setattr(service_module, "FIGURES_S", 0.02)

    def there() -> tuple[str, ...]:
        entries = swarm.peers["ada"].node.entries()
        found = [e for e in entries if e.descriptor.name == "eve" and e.heartbeat.state == "serving"]
        return found[0].descriptor.addresses if found else ()

    with Alone(swarm, state, model, host=None) as eve:
        port = eve.service.transport.port
        until(swarm, lambda: there() == (f"127.0.0.1:{port}",))
        hosts[:] = ["127.0.0.9"]
        until(swarm, lambda: there() == (f"127.0.0.9:{port}",))
        until(swarm, lambda: eve.service.node.confirmed_addresses == {f"127.0.0.9:{port}"})
    assert any(f"127.0.0.9:{port}" in line for line in eve.said)


# ---------------------------------------------------------------- options, before anything else


def test_what_a_peer_runs_on_is_checked_when_it_is_made(state: StateDir, model: Path) -> None:
    from swarm.errors import UsageError

    with pytest.raises(UsageError, match="--layers"):
        PeerService(PeerOptions(str(model), layers="x"), state=state)
    assert not state.home.exists()
    assert service_module.DRAIN_S < 30.0  # what the issue promises for the whole of leaving


def test_a_peer_is_found_on_its_networks_unless_that_is_left_out(
    state: StateDir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `--no-lan`, by `SWARM_LAN=0`, or by a host that nobody there can dial."""
    monkeypatch.setattr(service_module, "own_hosts", lambda: ["192.168.1.20", "45.9.9.7", "127.0.0.1"])

    def announced(**options: object) -> list[str] | None:
        service = PeerService(PeerOptions(str(model), **options), state=state)  # type: ignore[arg-type]
        service.transport = SimpleNamespace(identity=Identity.ephemeral(), port=7070)  # type: ignore[assignment]
        lan = service._lan()
        assert lan is None or lan._announced is not None
        return None if lan is None or lan._announced is None else list(lan._announced.hosts)

    monkeypatch.setenv("SWARM_LAN", "1")
    assert announced() == announced(host="0.0.0.0") == ["192.168.1.20", "45.9.9.7"]
    assert announced(host="192.168.1.21") == ["192.168.1.21"]
    assert announced(lan=False) is None and announced(host="127.0.0.1") is None
    monkeypatch.setenv("SWARM_LAN", "0")
    assert announced() is None
