"""audience.py: what clients may cost one of their sources."""

from __future__ import annotations

import random

import pytest

from swarm import audience, circle
from swarm.audience import Audience, price
from swarm.digests import Models
from swarm.identity import Identity
from swarm.messages import Ask, Delta, ModelList, Subscribe
from swarm.registry import Drop, Kind, Registry
from swarm.table import Table
from tests.sim.records import FINGERPRINT
from tests.sim.scenario import World, size
from tests.test_registry_hostile import somebody
from tests.told import told

OTHER = b"g" * 32


def table_of(peers: int, others: int = 0) -> Table:
    made = Table(check=lambda *_: None)
    for n in range(peers + others):
        made.accept(told(identity=somebody(n), fingerprint=FINGERPRINT if n < peers else OTHER), 0.0)
    return made


def audience_of(table: Table) -> Audience:
    return Audience(table, {}, None, random.Random(0), 0.0)


def test_what_a_client_costs_is_what_its_models_say() -> None:
    """A head of 210 bytes a third of the time, and its identifier of 8 always; 100 peers beat 20 times a second."""
    made = table_of(60, 40)
    assert price(made, None) == pytest.approx(20 * (8 + 70))
    assert price(made, Models((OTHER,))) == pytest.approx(8 * (8 + 70))
    assert price(made, Models((b"?" * 32,))) == price(made, Models()) == 0.0


def test_a_swarm_of_ten_serves_as_many_clients_as_it_has_streams_for() -> None:
    there = audience_of(table_of(10))
    assert there.has_room([None] * (circle.MAX_SUBSCRIBERS - 1), None)


def test_clients_are_taken_as_far_as_the_bytes_go_and_a_few_whatever_they_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = audience_of(table_of(10, 10))
    each = price(there._table, None)
    monkeypatch.setattr(audience, "BYTES_PER_S", 9.5 * each)
    assert [there.has_room([None] * n, None) for n in (8, 9)] == [True, False]
    assert there.has_room([None] * 9, Models((OTHER,)))
    assert there.has_room([None] * 40, Models()) is False
    monkeypatch.setattr(audience, "BYTES_PER_S", 0.0)
    assert [there.has_room([None] * n, None) for n in (audience.ALWAYS - 1, audience.ALWAYS)] == [True, False]


def test_clients_that_are_too_many_for_one_source_find_others_and_know_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audience, "ALWAYS", 3)
    monkeypatch.setattr(audience, "BYTES_PER_S", 0.0)
    world = World(61)
    names = world.peers(6)
    world.run(20.0)
    clients = [f"c{n}" for n in range(5)]
    for name in clients:
        world.client(name, "p0")
    world.run(20.0)
    listeners = {
        name: sum(one.kind is Kind.SUBSCRIBER for one in world[name].neighbours) for name in names
    }
    assert max(listeners.values()) <= 3 and sum(listeners.values()) >= 5
    assert all(world.listed(name) == set(names) for name in clients)


def test_a_client_is_sent_on_when_the_swarm_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(62)
    names = world.peers(6)
    world.run(20.0)
    for n in range(audience.ALWAYS + 1):
        world.client(f"c{n}", "p0")
        world.run(0.1)
    assert sum(one.kind is Kind.SUBSCRIBER for one in world["p0"].neighbours) == audience.ALWAYS + 1
    monkeypatch.setattr(audience, "BYTES_PER_S", 0.0)
    world.run(30.0)
    assert all(
        sum(one.kind is Kind.SUBSCRIBER for one in world[name].neighbours) <= audience.ALWAYS for name in names
    )
    newest = world.there[f"c{audience.ALWAYS}"]
    assert all(there.peer != newest.peer for there in world["p0"].neighbours)
    assert world.listed(newest.name) == set(names)


def source(peers: int) -> tuple[Registry, list[bytes]]:
    """One that holds so many, with one client, and the identifiers of their heads."""
    registry = Registry(Identity.from_seed(b"v" * 32), now=0.0, rng=random.Random(0), check=lambda *_: None)
    for n in range(peers):
        registry.table.accept(told(identity=somebody(n)), 0.0)
    registry.attach(1, Identity.ephemeral().peer_id, Kind.SUBSCRIBER, opened_here=False, now=0.0)
    return registry, [held.head_id for held in registry.table.held()]


def test_clients_are_told_no_more_bytes_than_there_are_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And get all of it in the end."""
    monkeypatch.setattr(audience, "RESERVE", 30_000.0)
    monkeypatch.setattr(audience, "BYTES_PER_S", 10_000.0)
    registry, ids = source(60)
    registry.receive(1, Subscribe(None, snapshot=False), 0.0)
    told_bytes, got, now = 0, 0, 0.0
    while now < 10.0:
        if got % 60 == 0:
            registry.receive(1, Ask((), tuple(ids)), now)
        for _, message in registry.drain(now):
            if isinstance(message, Delta):
                told_bytes += size(message)
                got += len(message.records)
        assert told_bytes <= 30_000 + 10_000 * now + 16_384, now
        now = max(now + 0.01, min(registry.deadline, now + 1.0))
        registry.tick(now)
    assert told_bytes > 0.8 * (30_000 + 10_000 * 10)


def test_who_waits_for_bytes_is_told_as_soon_as_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience, "RESERVE", 1000.0)
    monkeypatch.setattr(audience, "BYTES_PER_S", 1000.0)
    registry, ids = source(60)
    registry.receive(1, Subscribe(None, snapshot=False), 0.0)
    registry.receive(1, Ask((), tuple(ids)), 0.0)
    (first,) = [message for _, message in registry.drain(0.0) if isinstance(message, Delta)]  # on credit
    registry.tick(0.0)
    due = registry.deadline
    while not any(isinstance(message, Delta) for _, message in registry.drain(due)):
        registry.tick(due)
        due = registry.deadline
    assert due == pytest.approx((size(first) - 1000) / 1000, rel=0.05)


def test_a_client_without_a_snapshot_to_spare_is_given_a_few_records_and_sent_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audience, "RESERVE", 20_000.0)
    registry, _ = source(60)
    registry.attach(2, Identity.ephemeral().peer_id, Kind.SUBSCRIBER, opened_here=False, now=0.0)
    got = {1: 0, 2: 0}
    for key in got:  # 42 kB each
        registry.receive(key, Subscribe(None), 0.0)
        for to, message in registry.drain(0.0):
            got[to] += len(message.records) if isinstance(message, Delta) else 0
    for later in range(1, 10):
        for to, message in registry.drain(float(later)):
            got[to] += len(message.records) if isinstance(message, Delta) else 0
    assert got == {1: 60, 2: 16}
    assert [action.key for action in registry.actions() if isinstance(action, Drop)] == [2]


def test_a_client_that_is_being_sent_on_takes_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are bytes for one and a half that want everything: the second goes, a third that wants little stays."""
    registry, _ = source(60)
    monkeypatch.setattr(audience, "ALWAYS", 0)
    monkeypatch.setattr(audience, "BYTES_PER_S", 1.5 * price(registry.table, None))
    for key, only in ((1, None), (2, None), (3, (OTHER,))):
        if key > 1:
            registry.attach(key, Identity.ephemeral().peer_id, Kind.SUBSCRIBER, opened_here=False, now=0.0)
        registry.receive(key, Subscribe(only, snapshot=False), 0.0)
    assert [one.visitor for one in registry.neighbours] == [False, True, False]


def test_however_fast_models_come_they_are_listed_once_a_second() -> None:
    registry, _ = source(3)
    registry.receive(1, Subscribe((), snapshot=False), 0.0)
    registry.drain(0.0)
    lists: list[tuple[float, int]] = []
    for tenth in range(25):
        now = 5.0 + tenth / 10
        registry.table.accept(told(identity=somebody(100 + tenth), fingerprint=bytes([tenth]) * 32), now)
        registry.tick(now)
        lists += [(now, len(m.models)) for _, m in registry.drain(now) if isinstance(m, ModelList)]
    assert lists == [(5.0, 2), (6.0, 12), (7.0, 22)]
    assert registry.deadline <= 8.0
    registry.tick(8.0)
    assert [len(m.models) for _, m in registry.drain(8.0) if isinstance(m, ModelList)] == [26]
