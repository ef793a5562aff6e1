"""circle.py: whom to dial, and for how long."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from swarm import circle
from swarm.budget import Budget
from swarm.identity import Identity, PeerId
from swarm.messages import Told
from swarm.neighbour import Kind, Neighbour
from swarm.records import Leave, sign_record
from swarm.registry import Registry
from swarm.table import Table
from tests.told import ALICE, LEASE_S, told


def test_old_addresses_are_tried_each_in_its_turn_and_for_ever() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(3))
    for n in range(5):
        registry.remember(f"h{n}:1")
    tried: list[str] = []
    now = 0.0
    while len(tried) < 20:
        now = max(now, registry.deadline)
        registry.tick(now)
        for action in registry.actions():
            assert isinstance(action, circle.ReachAddress)
            tried.append(action.address)
            registry.unreached(action.address, now)
    assert set(tried[:6]) == {f"h{n}:1" for n in range(5)}
    assert min(tried.count(address) for address in set(tried)) >= 3


@pytest.mark.parametrize("alone", [True, False])
def test_one_old_address_a_minute_is_tried_after_two_days_as_on_the_first(alone: bool) -> None:
    """Also while others are alive: that is how two swarms that were cut apart find each other."""
    rng, day_s = random.Random(6), 86_400.0
    made = circle.Circle(ALICE.peer_id, "peer", rng, 0.0)
    for n in range(10):
        made.remember(f"h{n}:1", given=n == 0)
    kept = Table()
    share = Budget(0.0).of_neighbour(0.0)
    linked = [] if alone else [Neighbour(1, Identity.ephemeral().peer_id, Kind.GOSSIP, True, 0.0, share)]
    tried: list[float] = []
    while made.deadline < 2 * day_s:
        now = made.deadline
        for action in made.choose(linked, kept, now):
            assert isinstance(action, circle.ReachAddress)
            tried.append(now)
            made.failed(action.address, now, alone)
    last_hour = sum(at > 2 * day_s - 3600.0 for at in tried)
    each_time = circle.TRIES_ALONE if alone else 1
    assert 45 * each_time <= last_hour <= 75 * each_time
    if not alone:
        assert len(tried) <= 2 * 24 * 75


def test_a_crowd_that_came_and_vanished_takes_no_place_of_those_where_somebody_was() -> None:
    made = circle.Circle(ALICE.peer_id, "peer", random.Random(7), 0.0)
    made.remember("bootstrap:1", given=True)
    made.remember("friend:1", seen=True)
    made.remember("found:1")
    made.reached("found:1", ALICE.peer_id)
    for n in range(2 * circle.MAX_ADDRESSES):
        made.remember(f"crowd{n}:1")
    assert len(made._addresses) == circle.MAX_ADDRESSES
    assert {"bootstrap:1", "friend:1", "found:1"} <= made._addresses.keys()


def test_somebody_left_alone_tries_those_it_met_before_a_crowd_that_it_only_heard_of() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(4))
    friends = [Identity.ephemeral() for _ in range(2)]
    crowd = [Identity.ephemeral() for _ in range(60)]
    for n, one in enumerate([*crowd, *friends]):
        registry.table.accept(told(identity=one, addresses=(f"198.51.{n}.1:7070",)), 0.0)
    for one in friends:
        registry.proved(one.peer_id, "")
    registry.tick(LEASE_S)
    assert len(registry.table.lapsed()) == 62
    tried = [action.peer for action in registry.actions() if isinstance(action, circle.Reach)]
    assert len(tried) == circle.KEPT_NEIGHBOURS
    assert {one.peer_id for one in friends} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_old_addresses_where_somebody_was_get_half_of_the_tries() -> None:
    registry = Registry(ALICE, now=0.0, rng=random.Random(5))
    for n in range(200):
        registry.remember(f"hearsay{n}:1")
    registry.remember("home:1", given=True)
    tried: list[str] = []
    while len(tried) < 30:
        now = registry.deadline
        registry.tick(now)
        for action in registry.actions():
            assert isinstance(action, circle.ReachAddress)
            tried.append(action.address)
            registry.unreached(action.address, now)
    assert 6 <= tried.count("home:1") <= 24
    assert len(set(tried)) == len(tried) - tried.count("home:1") + 1


# ---------------------------------------------------------------- one choice after the other


PEERS = sorted(Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 40))
OWN = ALICE.peer_id


def linked(peers: list[PeerId], *, opened_here: bool = True) -> list[Neighbour]:
    """Neighbours since 1, 2, 3, ... seconds."""
    share = Budget(0.0).of_neighbour(0.0)
    return [Neighbour(n, peer, Kind.GOSSIP, opened_here, float(n), share) for n, peer in enumerate(peers, 1)]


def a_table(count: int, *, own: bool = False) -> Table:
    """Of peers that live for ever."""
    made = Table(check=lambda *_: None)
    identities = [Identity.from_seed(bytes([n]) * 32) for n in range(1, count + 1)]
    for one in [*identities, *([ALICE] if own else [])]:
        made.accept(told(identity=one, addresses=(f"{one.peer_id[:8]}.local:7070",)), 0.0)
    made._held = {peer: dataclasses.replace(held, lapses_at=math.inf) for peer, held in made._held.items()}
    return made


def a_circle(role: circle.Role = "peer", own: PeerId = OWN) -> circle.Circle:
    return circle.Circle(own, role, random.Random(8), 0.0)


def actions_until(
    made: circle.Circle, there: list[Neighbour], table: Table, until: float
) -> list[tuple[float, circle.Action]]:
    """What it wants meanwhile; nothing that it tries is ever reported on."""
    found: list[tuple[float, circle.Action]] = []
    while made.deadline <= until:
        now = made.deadline
        found += [(now, action) for action in made.choose(there, table, now)]
    return found


def test_one_random_peer_a_minute_is_dialled_and_never_a_neighbour_or_oneself() -> None:
    table = a_table(12, own=True)
    there = linked([one.peer for one in table.held() if one.peer != OWN][: circle.KEPT_NEIGHBOURS])
    found = actions_until(a_circle(), there, table, 20 * 60.0)
    dialled = [action.peer for _, action in found if isinstance(action, circle.Reach)]
    assert 15 <= len(dialled) <= 26
    assert set(dialled) == set(table._held) - {one.peer for one in there} - {OWN}


def test_nobody_is_dialled_who_said_goodbye_or_whose_lease_is_over() -> None:
    gone, left, alive = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
    table = Table(check=lambda *_: None)
    table.accept(told(identity=gone), 0.0)
    table.accept(Told(sign_record(left, Leave(left.peer_id, 9, LEASE_S)), 0.0), 10.0)
    table.accept(told(identity=alive), 10.0)
    assert len(table) == 3
    assert a_circle().choose([], table, LEASE_S + 1.0) == [circle.Reach(alive.peer_id)]


def test_a_look_at_the_circle_walks_through_the_table_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is due: a minute after the last look a neighbour, a random dial and an old address are."""
    table, walks = a_table(20), []
    walk = table.held
    monkeypatch.setattr(table, "held", lambda *only: walks.append(only) or walk(*only))
    made = a_circle()
    made.remember("old:1")
    made.choose(linked(PEERS[30:33]), table, 0.0)
    walks.clear()
    found = made.choose(linked(PEERS[30:33]), table, 100.0)
    assert {type(action) for action in found} == {circle.Reach, circle.ReachAddress} and len(walks) == 1


def test_no_more_are_dialled_than_are_wanted_while_the_dials_are_under_way() -> None:
    found = actions_until(a_circle(), linked(PEERS[30:32]), a_table(20), circle.REACH_TIMEOUT_S - circle.CHECK_S)
    assert len(found) == circle.KEPT_NEIGHBOURS - 2
    assert len({action.peer for _, action in found if isinstance(action, circle.Reach)}) == len(found)


def test_the_oldest_that_was_opened_here_makes_room_when_there_are_too_many() -> None:
    many = circle.KEPT_NEIGHBOURS + circle.SPARE_NEIGHBOURS + 1
    table = a_table(0)
    dropped = [action for _, action in actions_until(a_circle(), linked(PEERS[:many]), table, 70.0)]
    assert dropped == [circle.Drop(1, "making room for another neighbour")]
    assert actions_until(a_circle(), linked(PEERS[: many - 1]), table, 70.0) == []
    assert actions_until(a_circle(), linked(PEERS[:many], opened_here=False), table, 70.0) == []


def test_a_client_lets_go_of_a_source_too_many_at_once() -> None:
    there = linked(PEERS[: circle.KEPT_SOURCES + 1])
    (action,) = a_circle("client").choose(there, a_table(0), 0.0)
    assert isinstance(action, circle.Drop) and action.key == 1
    assert a_circle("client").choose(there[1:], a_table(0), 0.0) == []


def test_a_dial_that_is_never_reported_on_is_forgotten_after_a_while() -> None:
    found = actions_until(a_circle(), [], a_table(1), 100.0)
    assert [at for at, _ in found] == pytest.approx([0.0, 30.0, 60.0, 90.0], abs=circle.CHECK_S)


@pytest.mark.parametrize(("alone", "wait_s"), [(False, circle.RETRY_S), (True, circle.RETRY_ALONE_S)])
def test_a_peer_that_did_not_answer_is_left_in_peace_for_a_while(alone: bool, wait_s: float) -> None:
    made, table = a_circle(), a_table(1)
    (action,) = made.choose([], table, 0.0)
    assert isinstance(action, circle.Reach)
    made.failed(action.peer, 1.0, alone)
    ((at, again),) = actions_until(made, [], table, 1.0 + wait_s + circle.CHECK_S)
    assert again == action and at >= 1.0 + wait_s
    made.failed(action.peer, at, False)
    made.reached(action.peer, action.peer)  # it came by itself
    made.hurry(at)
    assert made.choose([], table, at) == [action]


def test_whoever_holds_a_contested_place_is_dialled_first() -> None:
    table = a_table(12)
    there = linked([one.peer for one in table.held()][: circle.KEPT_NEIGHBOURS])
    suspect = max(table._held.keys() - {one.peer for one in there})
    table.places.suspect = lambda *_: suspect  # type: ignore[method-assign]
    found = [action for _, action in actions_until(a_circle(), there, table, 70.0)]
    assert found == [circle.Reach(suspect)]


def test_an_old_address_is_left_alone_while_whoever_was_there_is_alive() -> None:
    made, table = a_circle(), a_table(9)
    there = linked([one.peer for one in table.held()])
    made.remember("alive.local:1", there[0].peer)
    made.remember("gone.local:1", Identity.from_seed(b"g" * 32).peer_id)
    found = [action for _, action in actions_until(made, there, table, 600.0)]
    assert {one.address for one in found if isinstance(one, circle.ReachAddress)} == {"gone.local:1"}


def tries_alone(made: circle.Circle, until: float) -> list[tuple[float, str]]:
    """When it tries which old address, with nobody there, and where every try fails at once."""
    found = []
    while made.deadline <= until:
        now = made.deadline
        for action in made.choose([], a_table(0), now):
            assert isinstance(action, circle.ReachAddress)
            found.append((now, action.address))
            made.failed(action.address, now, True)
    return found


def test_somebody_alone_tries_an_old_address_soon_and_then_more_and_more_rarely() -> None:
    """After 5, 10, 20, 40 s and then each minute, give or take a fifth and a look; anew when it is alone again."""
    made = a_circle()
    made.remember("old:1")
    times = [at for at, _ in tries_alone(made, 400.0)]
    assert times[0] <= circle.FIRST_HEAL_S + circle.CHECK_S
    for gap, usual in zip(itertools.pairwise(times), (5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0), strict=False):
        assert 0.8 * usual <= gap[1] - gap[0] <= 1.2 * usual + circle.CHECK_S
    actions_until(made, linked(PEERS[: circle.KEPT_NEIGHBOURS]), a_table(0), 500.0)
    again = tries_alone(made, 520.0)
    assert again and again[0][0] <= 500.0 + circle.FIRST_HEAL_S + 2 * circle.CHECK_S


def test_an_old_address_is_not_tried_again_while_a_try_is_under_way() -> None:
    made = a_circle()
    made.remember("old:1")
    times = [at for at, _ in actions_until(made, [], a_table(0), 300.0)]
    assert len(times) > 3 and all(b - a >= circle.REACH_TIMEOUT_S for a, b in itertools.pairwise(times))


def test_an_address_that_is_heard_of_again_keeps_its_turn_and_its_worth() -> None:
    made = a_circle()
    made.remember("friend:1", seen=True)
    for _ in range(2):
        for n in range(circle.MAX_ADDRESSES):
            made.remember("friend:1")
            made.remember(f"crowd{n}:1")
    assert "friend:1" in made.addresses
    fresh = a_circle()
    for n in range(12):
        fresh.remember(f"old{n}:1")
    tried: list[str] = []
    while len(tried) < 12:
        for _, address in tries_alone(fresh, fresh.deadline):
            tried.append(address)
            fresh.remember(address)
    assert len(set(tried)) == len(tried)


def test_somebody_in_a_hurry_does_not_wait_for_the_next_look() -> None:
    made = a_circle()
    made.choose([], a_table(0), 0.0)
    assert made.deadline == circle.CHECK_S
    made.hurry(0.5)
    assert made.deadline == 0.5
    made.hurry(9.0)
    assert made.deadline == 0.5


@pytest.mark.parametrize("higher", [True, False])
def test_of_two_streams_with_one_peer_the_higher_one_ends_that_which_it_opened(higher: bool) -> None:
    own, other = (PEERS[1], PEERS[0]) if higher else (PEERS[0], PEERS[1])
    share = Budget(0.0).of_neighbour(0.0)
    two = [Neighbour(key, other, Kind.GOSSIP, key == 7, float(key), share) for key in (6, 7)]
    assert [one.key for one in a_circle(own=own)._duplicates(two)] == ([7] if higher else [])


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("opened_here", [True, False])
def test_of_two_streams_opened_by_one_side_the_newer_stays(opened_here: bool, higher: bool) -> None:
    own, other = (PEERS[1], PEERS[0]) if higher else (PEERS[0], PEERS[1])
    share = Budget(0.0).of_neighbour(0.0)
    two = [Neighbour(key, other, Kind.GOSSIP, opened_here, float(key), share) for key in (6, 7)]
    assert [one.key for one in a_circle(own=own)._duplicates(two)] == [6]
