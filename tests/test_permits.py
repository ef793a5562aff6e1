"""Whom a stranger's word makes us dial: what is remembered of whom we met, and the rule applied to it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from swarm.dialback import DIALS_BURST, PORTS_PER_ASKER, Ports
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


@pytest.mark.parametrize(
    ("host", "asker", "allowed"),
    [
        ("8.8.8.8", "8.8.8.8", True),
        ("8.8.8.8", "8.8.4.4", False),
        ("8.8.8.8", "192.168.1.2", False),
        ("192.168.1.9", "8.8.8.8", False),
        ("127.0.0.1", "8.8.8.8", False),
        ("192.168.1.9", "192.168.1.2", True),
        ("192.168.1.9", "10.0.0.3", False),
        ("192.168.1.9", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "192.168.1.9", False),
        ("::1", "fe80::2", False),
        ("100.64.0.9", "100.64.0.3", True),
        ("::ffff:8.8.8.8", "8.8.8.8", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("2606:4700::1", "2606:4700::2", False),
        ("169.254.169.254", "169.254.0.9", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("ff02::1", "fe80::2", False),
        ("name", "127.0.0.1", False),
    ],
)
def test_only_the_askers_own_places_are_dialled_back(host: str, asker: str, allowed: bool) -> None:
    assert permits().back(asker)(host) is allowed


def test_whoever_comes_through_a_tunnel_has_nothing_of_this_machine_dialled_back() -> None:
    check = permits(("8.8.4.4:7070",)).back("127.0.0.1")
    assert not any(map(check, ("127.0.0.1", "127.0.0.2", "192.168.1.1", "10.0.0.1")))


def test_a_global_ipv6_address_beside_a_local_one_takes_nobody_out_of_the_lan() -> None:
    """Every machine at home has one."""
    made = permits(("192.168.1.4:7070", "[2606:4700::4]:7070"), ada="192.168.1.5:7070")
    made.saw(ADA, "192.168.1.5")
    assert made.by_record(BOB)("192.168.1.6")


def test_what_others_list_is_looked_at_as_it_is_now() -> None:
    lists: dict[PeerId, tuple[str, ...]] = {}
    made = Permits(lambda peer: lists.get(peer, ()), lambda: ())
    made.saw(ADA, "192.168.1.5")
    assert not made.by_record(BOB)("192.168.1.6")
    lists[ADA] = ("nonsense :", "192.168.1.5:7070")
    assert made.by_record(BOB)("192.168.1.6")
    lists[ADA] = ("ada.example.org:7070",)
    assert not made.by_record(BOB)("192.168.1.6")


def test_an_asker_gets_a_few_ports_and_dials_looked_at() -> None:
    ports = Ports()
    allowed = [ports.allow("8.8.8.8", f"8.8.8.8:{port}", float(port)) for port in range(1, 200)]
    assert sum(allowed) == PORTS_PER_ASKER
    assert not ports.allow("8.8.8.9", "8.8.8.9:999", 300.0), "its neighbour in the /24 shares them"
    assert ports.allow("9.9.9.9", "9.9.9.9:999", 300.0)
    assert ports.allow("8.8.8.8", "8.8.8.8:999", 9000.0), "an hour later they are forgotten"
    many = Ports()
    assert sum(many.allow("8.8.8.8", "8.8.8.8:7", 0.0) for _ in range(100)) == DIALS_BURST
    assert all(many.allow("127.0.0.1", f"127.0.0.1:{port}", 0.0) for port in range(1, 100))
    assert not many.allow("8.8.8.8", "nonsense :", 1e6)


def test_every_dial_in_the_program_says_where_it_may_lead() -> None:
    """`link_to` and `allowed` take a permission, `dial` an address that was allowed or that a person gave."""
    root = Path(__file__).parent.parent
    dials = {}
    for path in sorted([*root.glob("swarm/*.py"), *root.glob("peer/*.py"), root / "cli.py"]):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in ("dial", "create_connection", "open_connection", "sock_connect", "connect_ex"):
                    dials.setdefault(f"{path.parent.name}/{path.name}", []).append(ast.unparse(node)[:60])
    assert {name: len(found) for name, found in dials.items()} == {
        "swarm/transport.py": 2,  # what it allowed, and the one place where a socket connects
        "swarm/dialback.py": 1,  # what was allowed
        "swarm/node.py": 1,  # `_dial`, of what a person gave or where somebody was met
        "swarm/joining.py": 1,  # the same by another name
    }, dials
