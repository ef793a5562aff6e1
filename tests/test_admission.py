"""Shares of one peer: who gives up what for whom. Pure; whole peers: tests/test_attacks.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from peer.admission import AdmissionConfig, Holding, OpenRate, sessions_to_let_go
from swarm.buckets import MAX_BUCKETS, BucketTable
from swarm.identity import PeerId


def held(*sessions: str, amount: int = 1) -> list[Holding[str]]:
    """`group/client` each, in the order of opening; the key says which it is."""
    made = []
    for number, text in enumerate(sessions):
        group, _, client = text.partition("/")
        made.append(Holding(f"{text}#{number}", PeerId(client), group, amount))
    return made


@pytest.mark.parametrize(
    ("sessions", "newcomer", "gone"),
    [
        # one network holds all: its newest goes
        (["x/a", "x/a", "x/a"], "h/me", ["x/a#2"]),
        # with an identity for each session it is still one network
        (["x/a", "x/b", "x/c"], "h/me", ["x/c#2"]),
        # of the largest network the largest client, and of that the newest
        (["x/a", "x/b", "x/b", "y/c"], "h/me", ["x/b#2"]),
        # within a network the same between clients
        (["x/a", "x/a", "x/a"], "x/me", ["x/a#2"]),
        (["x/a", "x/b", "x/c"], "x/me", []),
        # nobody gives up a first session, and nothing goes back and forth
        (["x/a", "y/b"], "h/me", []),
        (["x/a", "x/a", "h/me"], "h/me", []),
        (["x/a", "x/a", "x/a", "h/me"], "h/me", ["x/a#2"]),
        # whoever has most takes from nobody
        (["x/a", "x/a", "y/b"], "x/a", []),
        (["x/a", "x/b", "y/d"], "x/c", []),
        # a client that comes from two networks is still one client
        (["x/a", "x/b", "y/b"], "x/c", ["x/b#1"]),
    ],
)
def test_whoever_holds_most_gives_up_its_newest(sessions: list[str], newcomer: str, gone: list[str]) -> None:
    group, _, client = newcomer.partition("/")
    assert sessions_to_let_go(held(*sessions), PeerId(client), group, 1, 1) == gone


def test_sessions_of_any_size_make_room_and_none_goes_in_vain() -> None:
    big = held("x/a", "x/a", "x/a", "x/a", amount=100)
    assert sessions_to_let_go(big, PeerId("me"), "h", 150, 140) == ["x/a#3", "x/a#2"]
    assert sessions_to_let_go(big, PeerId("me"), "h", 250, 240) == [], "it would have more than they then"
    assert sessions_to_let_go(big, PeerId("me"), "h", 10, 0) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_flood_never_takes_a_first_session_and_every_newcomer_gets_one(seed: int) -> None:
    """16 places, a flooder with many identities in three networks, five honest users of a network each."""
    rng, places = random.Random(seed), 16
    holding: list[Holding[str]] = []
    for number in range(600):
        if rng.random() < 0.9:
            group, client = f"x{rng.randrange(3)}", f"evil{number}"
        else:
            group = client = f"h{rng.randrange(5)}"
        if len(holding) >= places:
            gone = sessions_to_let_go(holding, PeerId(client), group, 1, 1)
            holding = [one for one in holding if one.key not in gone]
        before = Counter(one.group for one in holding)
        if len(holding) < places:
            holding.append(Holding(str(number), PeerId(client), group, 1))
        elif group.startswith("h"):
            assert before[group] >= 1, f"seed {seed}: an honest newcomer found no room"
        if rng.random() < 0.05 and holding:
            holding.pop(rng.randrange(len(holding)))
    assert len(holding) <= places


def test_a_client_and_its_network_begin_only_so_many_epochs() -> None:
    config = AdmissionConfig(opens_per_s=10.0, opens_burst=20.0, group_shares=2)
    rate = OpenRate(config)
    assert sum(rate.take(PeerId("a"), "x", 0.0) for _ in range(100)) == 20
    assert sum(rate.take(PeerId(f"sybil{n}"), "x", 0.0) for n in range(100)) == 20
    assert rate.take(PeerId("b"), "y", 0.0)
    assert rate.take(PeerId("a"), "x", 1.0)


def test_a_table_of_buckets_is_bounded_and_the_busy_ones_are_kept() -> None:
    table = BucketTable(rate=0.001, burst=1.0)
    assert table.take("busy", 0.0)
    for number in range(2 * MAX_BUCKETS):
        table.take(str(number), 0.0)
        assert not table.take("busy", 0.0)
    assert len(table) == MAX_BUCKETS
