"""Who comes in, in virtual time: strangers with their limits, connections inside with theirs."""

from __future__ import annotations

import random

import pytest

from swarm.addresses import address_group
from swarm.door import (
    HANDSHAKE_BURST,
    HANDSHAKES_PER_S,
    LINKS_PER_PEER,
    MAX_PENDING,
    PENDING_PER_GROUP,
    Door,
)
from swarm.identity import PeerId


def public(group: int, host: int = 1) -> str:
    """An address of the internet; each `group` is another /24."""
    return f"8.{group // 250 + 1}.{group % 250}.{host}"


def door(most_links: int = 1000, busy: frozenset[str] | set[str] = frozenset()) -> Door[str]:
    return Door(lambda key: key in busy, most_links, 0.0)


def inside(one: Door[str], key: str, host: str, peer: str = "") -> list[str]:
    assert one.knock(key, host, 0.0) == []
    return one.proved(key, PeerId(peer or key))


# ---------------------------------------------------------------- strangers


def test_a_group_has_four_pending_and_pushes_out_its_own_oldest() -> None:
    one = door()
    for number in range(PENDING_PER_GROUP):
        assert one.knock(f"a{number}", public(1, number), 0.0) == []
    assert one.knock("b", public(2), 0.0) == []
    assert one.knock("a-more", public(1, 99), 0.0) == ["a0"]
    assert one.knock("a-still-more", public(1, 98), 0.0) == ["a1"]
    assert one.pending == PENDING_PER_GROUP + 1


def test_all_together_are_sixty_four_and_the_most_crowded_group_pays() -> None:
    """An attacker with many networks fills the table; an honest stranger of another one comes in and stays."""
    one = door()
    for number in range(MAX_PENDING):
        assert one.knock(f"x{number}", public(number % 32, number), 0.0) == []
    assert one.knock("honest", public(200), 0.0) == ["x0"]
    for number in range(500):
        dropped = one.knock(f"y{number}", public(number % 32, number % 200), 0.0)
        assert "honest" not in dropped and len(dropped) == 1
    assert one.pending == MAX_PENDING


def test_with_a_network_for_each_connection_the_oldest_goes() -> None:
    one = door()
    for number in range(MAX_PENDING):
        one.knock(f"x{number}", public(number), 0.0)
    assert one.knock("y", public(400), 0.0) == ["x0"]


def test_this_machine_is_exempt_from_the_limit_by_group_only() -> None:
    one = door()
    for number in range(MAX_PENDING):
        assert one.knock(f"a{number}", "127.0.0.1", 0.0) == []
    assert one.knock("b", public(1), 0.0) == ["a0"]
    assert one.knock("c", "127.0.0.1", 0.0) == ["a1"]


def test_hosts_of_a_lan_dont_share_their_limit() -> None:
    one = door()
    for number in range(40):
        assert one.knock(f"a{number}", f"192.168.1.{number}", 0.0) == []
    for number in range(PENDING_PER_GROUP - 1):
        assert one.knock(f"b{number}", "192.168.1.7", 0.0) == []
    assert one.knock("b-more", "192.168.1.7", 0.0) == ["a7"]


def test_handshakes_begin_at_a_bounded_pace() -> None:
    one, now, begun = door(), 0.0, 0
    for _ in range(400):
        for number in range(10):
            one.knock(f"{now}-{number}", public(number), now)
        begun += len(one.turns(now))
        now += 0.01
    assert HANDSHAKES_PER_S * 4 * 0.9 < begun <= HANDSHAKE_BURST + HANDSHAKES_PER_S * now


def test_a_turn_is_due_when_it_says() -> None:
    one = door()
    assert one.next_turn_at(0.0) is None
    for number in range(int(HANDSHAKE_BURST) + 1):
        one.knock(str(number), public(number), 0.0)
    assert len(one.turns(0.0)) == HANDSHAKE_BURST
    at = one.next_turn_at(0.0)
    assert at == pytest.approx(1 / HANDSHAKES_PER_S)
    assert one.turns(at - 0.001) == [] and len(one.turns(at)) == 1
    assert one.next_turn_at(at) is None


@pytest.mark.parametrize("seed", range(5))
def test_an_honest_stranger_has_its_turn_at_once_whatever_others_do(seed: int) -> None:
    """16 hostile networks knock a thousand times a second and never go on."""
    rng, one, now, waits, asked = random.Random(seed), door(), 0.0, [], {}
    for tick in range(2000):
        now = tick / 1000
        for dropped in one.knock(f"x{tick}", public(rng.randrange(16), rng.randrange(250)), now):
            assert dropped not in asked, f"seed {seed}: an honest stranger was pushed out"
        if tick % 50 == 0:
            key = f"honest{tick}"
            asked[key] = now
            for dropped in one.knock(key, public(100 + tick // 50), now):
                assert dropped not in asked, f"seed {seed}: an honest stranger was pushed out"
        for key in one.turns(now):
            if key in asked:
                waits.append(now - asked.pop(key))
                one.gone(key)
    assert len(waits) >= 39, f"seed {seed}"
    assert max(waits) <= 0.02, f"seed {seed}: {max(waits)} s"


# ---------------------------------------------------------------- those inside


def test_an_identity_holds_four_connections_and_the_newest_stay() -> None:
    one = door()
    for number in range(LINKS_PER_PEER):
        assert inside(one, f"a{number}", public(number), "ada") == []
    assert inside(one, "a-new", public(9), "ada") == ["a0"]
    assert inside(one, "b", public(9), "bob") == []
    assert one.inside == LINKS_PER_PEER + 1


def test_idle_connections_of_the_most_crowded_group_make_room_first() -> None:
    busy = {"x0", "x1"}
    one = door(most_links=5, busy=busy)
    for number in range(4):
        assert inside(one, f"x{number}", public(1, number)) == []
    assert inside(one, "lonely", public(2)) == []
    assert inside(one, "a", public(3)) == ["x2"]
    assert inside(one, "b", public(4)) == ["x3"]


def test_where_all_are_busy_the_crowded_group_pays_and_an_only_user_may_have_all() -> None:
    keys = {f"x{n}" for n in range(5)} | {"a", "b", "x-more"}
    one = door(most_links=5, busy=keys)
    for number in range(5):
        assert inside(one, f"x{number}", public(1, number)) == []  # nobody else wants any
    assert inside(one, "x-more", public(1, 77)) == ["x-more"]  # its own group has the most
    assert inside(one, "a", public(2)) == ["x4"]
    assert inside(one, "b", public(3)) == ["x3"]
    assert one.inside == 5


def test_nobody_busy_is_closed_for_somebody_of_an_equally_small_group() -> None:
    one = door(most_links=3, busy={"a", "b", "c", "d"})
    for number, key in enumerate("abc"):
        assert inside(one, key, public(number)) == []
    assert inside(one, "d", public(9)) == ["d"]
    one.gone("a")
    assert inside(one, "d", public(9)) == []


def test_where_descriptors_ran_out_somebody_idle_makes_room() -> None:
    one = door(busy={"a"})
    assert one.make_room() is None
    inside(one, "a", public(1))
    assert one.make_room() is None
    inside(one, "b", public(2))
    assert one.make_room() == "b"


# ---------------------------------------------------------------- penalties


def test_whoever_was_thrown_out_waits_and_its_neighbours_in_other_networks_dont() -> None:
    one = door()
    lasts = one.strike(public(1, 5), 10.0)
    assert lasts == 1.0
    assert one.knock("same", public(1, 6), 10.5) == ["same"]
    assert one.knock("other", public(2), 10.5) == []
    assert one.knock("later", public(1, 6), 11.1) == []
    assert one.strike(public(1, 7), 12.0) == 2.0
    assert address_group(public(1, 5)) == address_group(public(1, 7))


def test_this_machine_is_never_shut_out() -> None:
    one = door()
    assert one.strike("127.0.0.1", 0.0) == 0.0
    assert one.knock("a", "127.0.0.1", 0.0) == []
