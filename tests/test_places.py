"""places.py: groups of addresses, and who goes."""

from __future__ import annotations

import random

import pytest

from swarm import places
from swarm.identity import PeerId
from swarm.places import Places, group_of, groups_of


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("45.9.9.7:7070", "45.9.9.0/24"),
        ("45.9.9.7", "45.9.9.0/24"),
        ("[2606:4700:1:2::3]:7070", "2606:4700:1::/48"),
        ("2606:4700:1:2::3", "2606:4700:1::/48"),
        ("[::ffff:45.9.9.7]:1", "45.9.9.0/24"),
        ("[2002:2d09:0907::1]:1", "45.9.9.0/24"),  # 6to4 of 45.9.9.7
        ("192.168.1.2:7070", None),
        ("10.1.2.3:7070", None),
        ("127.0.0.1:7070", None),
        ("169.254.1.1:7070", None),
        ("100.64.3.4:7070", None),
        ("[fe80::1%eth0]:7070", None),
        ("[fd00::1]:7070", None),
        ("[::1]:7070", None),
        ("laptop:7070", None),
        ("laptop.local:7070", None),
        ("a.b.example.org:7070", "*.example.org"),
        ("Example.ORG.:7070", "*.example.org"),
    ],
)
def test_the_group_of_an_address(address: str, group: str | None) -> None:
    assert group_of(address) == group


def test_a_peer_counts_once_in_each_group_of_its_addresses() -> None:
    addresses = ("45.9.9.7:1", "45.9.9.8:1", "192.168.1.1:1", "[2606:4700:1::3]:1")
    assert groups_of(addresses) == ("2606:4700:1::/48", "45.9.9.0/24")


def enter(there: Places, peer: str, *groups: str, now: float = 0.0) -> bool:
    victims = there.victims(PeerId(peer), groups, now)
    if victims is None:
        return False
    for victim in victims:
        there.leave(victim)
    there.enter(PeerId(peer), groups)
    return True


def test_every_group_that_a_peer_claims_must_have_room() -> None:
    there = Places()
    for n in range(64):
        assert enter(there, f"a{n}", "g")
    assert not enter(there, "b", "h", "g")
    assert enter(there, "b", "h")
    there.leave(PeerId("a0"))
    assert enter(there, "c", "h", "g")


def test_whoever_was_seen_in_one_group_has_no_right_in_another() -> None:
    """Somebody with an address of its own claims a stranger's group as well."""
    there = Places()
    for n in range(64):
        enter(there, f"a{n}", "46.1.1.0/24")
    there.proved(PeerId("b"), "45.9.9.7")
    assert not enter(there, "b", "45.9.9.0/24", "46.1.1.0/24")


def test_one_goes_where_one_makes_room_in_both_groups() -> None:
    """The newest of the first group is also in the second, though not the newest there, and neither has room."""
    there = Places()
    for n in range(62):
        enter(there, f"a{n}", "45.9.9.0/24")
        enter(there, f"b{n}", "46.1.1.0/24")
    enter(there, "a62", "45.9.9.0/24")
    enter(there, "both", "45.9.9.0/24", "46.1.1.0/24")
    enter(there, "b62", "46.1.1.0/24")
    for host in ("45.9.9.7", "46.1.1.7"):
        there.proved(PeerId("new"), host)
    assert there.victims(PeerId("new"), ("45.9.9.0/24", "46.1.1.0/24"), 0.0) == [PeerId("both")]


def test_whoever_was_seen_the_longest_ago_is_a_claim_like_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_PROVED", 1)
    monkeypatch.setattr(places, "MAX_PEERS", 1)
    there = Places()
    there.proved(PeerId("old"), "45.9.9.7")
    assert enter(there, "old", "45.9.9.0/24")
    assert not enter(there, "claim", "46.1.1.0/24")
    there.proved(PeerId("new"), "46.1.1.7")
    assert enter(there, "new", "46.1.1.0/24") and len(there) == 1


def test_whoever_was_turned_away_is_looked_at_again_after_a_while_or_once_it_found_room() -> None:
    there = Places()
    there.turn_away(PeerId("a"), 0.0)
    there.turn_away(PeerId("b"), 0.0)
    assert there.is_turned_away(PeerId("a"), places.TURNED_AWAY_S - 1.0)
    assert not there.is_turned_away(PeerId("a"), places.TURNED_AWAY_S)
    assert enter(there, "b", "45.9.9.0/24")
    assert not there.is_turned_away(PeerId("b"), 1.0)


def test_whoever_moves_makes_room_where_it_was() -> None:
    there = Places()
    for n in range(64):
        enter(there, f"a{n}", "45.9.9.0/24")
    assert enter(there, "a0", "46.1.1.0/24")
    assert [enter(there, name, "45.9.9.0/24") for name in ("b", "c")] == [True, False]


def test_whose_table_it_is_goes_for_nobody() -> None:
    there = Places(PeerId("own"))
    for name in (*(f"a{n}" for n in range(63)), "own"):
        enter(there, name, "45.9.9.0/24")
    there.proved(PeerId("new"), "45.9.9.7")
    assert there.victims(PeerId("new"), ("45.9.9.0/24",), 0.0) == ["a62"]
    assert not there.is_contested(PeerId("own"))


def test_a_group_full_of_peers_that_were_seen_takes_nobody() -> None:
    there = Places()
    for n in range(65):
        there.proved(PeerId(f"a{n}"), "45.9.9.7")
    assert [enter(there, f"a{n}", "45.9.9.0/24") for n in range(65)] == [True] * 64 + [False]


def test_a_suspect_is_one_that_nobody_saw_in_a_group_without_room() -> None:
    there, rng = Places(), random.Random(1)
    for n in range(64):
        enter(there, f"a{n}", "45.9.9.0/24")
        enter(there, f"b{n % 10}", "46.1.1.0/24")
    assert there.suspect(rng, 0.0) is None
    there.proved(PeerId("a7"), "45.9.9.7")
    assert not enter(there, "honest", "45.9.9.0/24", now=10.0)
    named = {there.suspect(rng, 20.0) for _ in range(2000)}
    assert named == {f"a{n}" for n in range(64) if n != 7}
    assert there.is_contested(PeerId("a8")) and not there.is_contested(PeerId("a7"))
    assert there.suspect(rng, 10.0 + places.CONTESTED_S) is None


def test_what_is_remembered_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_PROVED", "MAX_CONTESTED", "MAX_TURNED_AWAY"):
        monkeypatch.setattr(places, name, 5)
    monkeypatch.setattr(places, "MAX_PER_GROUP", 0)
    there = Places()
    for n in range(50):
        there.proved(PeerId(f"p{n}"), f"45.{n}.1.1")
        there.turn_away(PeerId(f"p{n}"), 0.0)
        assert not enter(there, f"q{n}", f"46.{n}.1.0/24")
    assert (len(there._proved), len(there._away), len(there._contested)) == (5, 5, 5)


def test_one_peer_seen_at_many_places_is_remembered_at_a_few() -> None:
    there = Places()
    for n in range(50):
        there.proved(PeerId("p"), f"45.{n}.1.1")
    assert len(there._proved[PeerId("p")]) == places.MAX_GROUPS_PROVED


def test_names_of_one_domain_have_more_room_than_addresses_of_one_network() -> None:
    there = Places()
    assert sum(enter(there, f"a{n}", "*.example.org") for n in range(300)) == places.MAX_PER_DOMAIN == 256
