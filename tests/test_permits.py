"""Whom a stranger's word makes us dial: what is remembered of whom we met, and the rule applied to it."""

from __future__ import annotations

import pytest

from swarm.dialback import DIALS_BURST, PORTS_PER_ASKER, Ports, same_place
from swarm.identity import PeerId
from swarm.permits import DIALS_FOR_OTHERS_BURST, MAX_MET, Permits, on_the_lan

ADA, BOB, EVE = PeerId("ada"), PeerId("bob"), PeerId("eve")


def permits(own: tuple[str, ...] = (), **listed: str) -> Permits:
    return Permits(lambda peer: (listed[peer],) if peer in listed else (), lambda: own)


def test_nobody_was_met_so_only_the_internet_is_dialled() -> None:
    check = permits().by_record(EVE)
    assert check("8.8.8.8")
    assert not any(map(check, ("127.0.0.1", "192.168.1.1", "10.0.0.1", "fe80::1", "169.254.169.254", "0.0.0.0")))


def test_in_a_lan_swarm_its_own_block_is_dialled_and_no_other() -> None:
    made = permits(ada="192.168.1.5:7070")
    made.saw(ADA, "192.168.1.5")
    check = made.by_record(BOB)
    assert check("192.168.1.6") and not check("10.0.0.6") and not check("127.0.0.1")


def test_a_demo_on_one_machine_dials_loopback() -> None:
    made = permits(ada="127.0.0.1:7070")
    made.saw(ADA, "127.0.0.1")
    assert made.by_record(BOB)("127.0.0.1") and not made.by_record(BOB)("192.168.1.6")


def test_a_peer_of_this_machine_that_is_on_the_lan_leads_into_the_lan_and_not_to_loopback() -> None:
    made = permits(ada="192.168.1.5:7070")
    made.saw(ADA, "127.0.0.1")
    assert made.by_record(BOB)("192.168.1.6") and not made.by_record(BOB)("127.0.0.1")


def test_whoever_comes_from_the_internet_makes_no_local_place_ours_whatever_it_lists() -> None:
    made = permits(eve="127.0.0.1:6379")
    made.saw(EVE, "8.8.8.8")
    assert not made.by_record(EVE)("127.0.0.1") and not made.by_record(EVE)("192.168.1.1")


@pytest.mark.parametrize("own", ["8.8.4.4:7070", "peer.example.org:7070"])
def test_a_public_peer_dials_local_addresses_only_where_their_peer_was_met(own: str) -> None:
    made = permits((own,), ada="192.168.1.5:7070", eve="127.0.0.1:6379")
    made.saw(ADA, "192.168.1.5")
    made.saw(EVE, "127.0.0.1")  # through a tunnel
    assert made.by_record(ADA)("192.168.1.5") and not made.by_record(BOB)("192.168.1.6")
    assert not made.by_record(EVE)("127.0.0.1")


def test_a_client_on_the_internet_sends_no_hop_into_our_network() -> None:
    made = permits(ada="192.168.1.5:7070")
    made.saw(ADA, "192.168.1.5")
    assert not made.for_client(BOB, "8.8.8.8")("192.168.1.6")
    assert made.for_client(BOB, "192.168.1.9")("192.168.1.6") and made.for_client(BOB, "8.8.8.8")("9.9.9.9")


def test_clients_of_one_network_make_us_dial_only_so_many_unknown_addresses() -> None:
    made = permits()
    assert sum(made.may_dial_for("8.8.8.0/24", 8, 0.0) for _ in range(100)) == DIALS_FOR_OTHERS_BURST // 8
    assert made.may_dial_for("9.9.9.0/24", 8, 0.0)


def test_those_met_are_bounded() -> None:
    made = permits(ada="192.168.1.5:1")
    made.saw(ADA, "192.168.1.5")
    for number in range(MAX_MET):
        made.saw(PeerId(f"p{number}"), "8.8.8.8")
    assert not made.by_record(BOB)("192.168.1.6")


def test_the_local_network_leads_to_its_hosts_and_not_to_our_own_services() -> None:
    assert on_the_lan("192.168.1.6") and not on_the_lan("127.0.0.1") and not on_the_lan("169.254.169.254")


@pytest.mark.parametrize("remote", ["192.168.1.9", "10.0.0.1", "fe80::2"])
def test_nobody_on_the_lan_has_our_own_services_dialled(remote: str) -> None:
    assert not same_place("127.0.0.1", remote) and not same_place("::1", remote)
    assert not same_place("169.254.169.254", remote) and same_place("127.0.0.1", "127.0.0.1")


def test_an_asker_gets_a_few_ports_and_dials_looked_at() -> None:
    ports = Ports()
    allowed = [ports.allow("8.8.8.8", f"8.8.8.8:{port}", float(port)) for port in range(1, 200)]
    assert sum(allowed) == PORTS_PER_ASKER
    assert not ports.allow("8.8.8.9", "8.8.8.9:999", 300.0), "its neighbour in the /24 shares them"
    assert ports.allow("9.9.9.9", "9.9.9.9:999", 300.0)
    assert ports.allow("8.8.8.8", "8.8.8.8:999", 9000.0), "an hour later they are forgotten"
    assert sum(Ports().allow("8.8.8.8", "8.8.8.8:7", 0.0) for _ in range(1)) == 1
    many = Ports()
    assert sum(many.allow("8.8.8.8", "8.8.8.8:7", 0.0) for _ in range(100)) == DIALS_BURST
    assert all(many.allow("127.0.0.1", f"127.0.0.1:{port}", 0.0) for port in range(1, 100))
    assert not many.allow("8.8.8.8", "nonsense :", 1e6)
