"""Where an address belongs and who may send us there. Beside the table, Python's own registry is the second source."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.addresses import Address, Block, address_group, block_of, is_loopback, may_dial, parse_address
from swarm.errors import UsageError
from swarm.identity import Identity

PEER = Identity.from_seed(bytes([1]) * 32).peer_id
# ---------------------------------------------------------------- how it is written


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5", Address(None, "10.0.0.5", 7070)),
        ("10.0.0.5:81", Address(None, "10.0.0.5", 81)),
        ("peer.example.org", Address(None, "peer.example.org", 7070)),
        ("peer.example.org:9000", Address(None, "peer.example.org", 9000)),
        ("[fe80::1]:82", Address(None, "fe80::1", 82)),
        ("[fe80::1]", Address(None, "fe80::1", 7070)),
        ("::1", Address(None, "::1", 7070)),
        (f"{PEER}@10.0.0.5:81", Address(PEER, "10.0.0.5", 81)),
        (f"{PEER}@[::1]:81", Address(PEER, "::1", 81)),
        (f" {PEER}@host ", Address(PEER, "host", 7070)),
        (f"{PEER.upper()}@host", Address(PEER, "host", 7070)),
    ],
)
def test_every_way_to_write_an_address_is_read(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":70",
        "host:",
        "host:x",
        "host:0",
        "host:70000",
        "a b",
        "me@host",
        "http://host",
        "[::1]x:5",
        "@host",
        "host:-1",
        "a" * 64 + ".example.org",
        "a..b",
        "ho\0st",
        "ho\x1b[2Jst",
        "host:" + "9" * 5000,
        "é" * 100_000,
        "a." * 200,
        "x" * 100_000 + "@host",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"192\.168\.1\.20:7070"):
        parse_address(text)


def test_an_identity_has_one_spelling_whichever_of_its_characters_last_bits_say() -> None:
    """52 characters hold 260 bits, an identity 256: another spelling must not become somebody else."""
    same = PEER[:-1] + chr(ord(PEER[-1]) + 1)
    assert parse_address(f"{same}@host") == Address(PEER, "host", 7070)


# ---------------------------------------------------------------- where it belongs


@pytest.mark.parametrize(
    ("host", "block"),
    [
        ("8.8.8.8", Block.PUBLIC),
        ("2606:4700::1", Block.PUBLIC),
        ("127.0.0.1", Block.LOOPBACK),
        ("127.255.255.254", Block.LOOPBACK),
        ("::1", Block.LOOPBACK),
        ("10.1.2.3", Block.TEN),
        ("172.16.0.1", Block.SEVENTEEN),
        ("172.32.0.1", Block.PUBLIC),
        ("192.168.1.1", Block.NINETEEN),
        ("100.64.0.1", Block.CARRIER),
        ("100.128.0.1", Block.PUBLIC),
        ("169.254.1.1", Block.LINK_LOCAL),
        ("fe80::1%eth0", Block.LINK_LOCAL),
        ("fd12::1", Block.UNIQUE_LOCAL),
        ("0.0.0.0", Block.NEVER),
        ("::", Block.NEVER),
        ("224.0.0.1", Block.NEVER),
        ("ff02::1", Block.NEVER),
        ("255.255.255.255", Block.NEVER),
        ("240.0.0.1", Block.NEVER),
        ("192.0.2.1", Block.TEST_ONE),
        ("2001:db8::1", Block.NEVER),
        # where clouds keep a machine's credentials
        ("169.254.169.254", Block.NEVER),
        ("169.254.170.2", Block.NEVER),
        ("100.100.100.200", Block.NEVER),
        ("fd00:ec2::254", Block.NEVER),
        # an IPv4 address in IPv6 clothes is that address: mapped, compatible, NAT64 of two kinds
        ("::ffff:8.8.8.8", Block.PUBLIC),
        ("::ffff:127.0.0.1", Block.LOOPBACK),
        ("::ffff:169.254.169.254", Block.NEVER),
        ("::127.0.0.1", Block.LOOPBACK),
        ("64:ff9b::7f00:1", Block.LOOPBACK),
        ("64:ff9b::808:808", Block.PUBLIC),
        ("64:ff9b:1::a9fe:a9fe", Block.NEVER),
        # tunnels' addresses lead to an IPv4 address of the sender's choice
        ("2002:7f00:1::1", Block.NEVER),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", Block.NEVER),
        # names, and what only some resolvers take for an address
        ("example.org", Block.NEVER),
        ("localhost", Block.NEVER),
        ("127.1", Block.NEVER),
        ("0x7f.0.0.1", Block.NEVER),
        ("2130706433", Block.NEVER),
    ],
)
def test_every_address_has_its_block(host: str, block: Block) -> None:
    assert block_of(host) is block


@settings(max_examples=300)
@given(st.ip_addresses())
def test_nothing_that_python_calls_private_counts_as_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if block_of(str(ip)) is Block.PUBLIC:
        mapped = getattr(ip, "ipv4_mapped", None) or ip
        embedded = int(ip) >> 32 in (0x64FF9B << 64, 0)  # Python knows nothing of NAT64
        assert embedded or (mapped.is_global and not mapped.is_multicast), ip


@settings(max_examples=200)
@given(st.ip_addresses(v=4))
def test_most_of_the_internet_is_public(ip: ipaddress.IPv4Address) -> None:
    special = [ipaddress.ip_network(text) for text in ("192.88.99.0/24", "192.0.0.0/24", "100.100.100.200/32")]
    if ip.is_global and not ip.is_multicast and not any(ip in network for network in special):
        assert block_of(str(ip)) is Block.PUBLIC, ip


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("198.41.0.7", "198.41.0.250", True),
        ("8.8.8.8", "8.8.9.8", False),
        ("::ffff:8.8.8.8", "8.8.8.9", True),
        ("2606:4700:1:2::1", "2606:4700:1:ffff::9", True),
        ("2606:4700:1::1", "2606:4700:2::1", False),
        ("192.168.1.2", "192.168.1.3", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("some-name", "SOME-NAME", True),
    ],
)
def test_a_group_is_the_smallest_routed_network_or_one_local_address(one: str, other: str, same: bool) -> None:
    assert (address_group(one) == address_group(other)) is same


def test_loopback_has_one_name() -> None:
    assert is_loopback("localhost") and is_loopback("::1") and is_loopback("127.3.2.1")
    assert not is_loopback("localhost.example.org") and not is_loopback("8.8.8.8")


# ---------------------------------------------------------------- whether to go there

LAN = {Block.NINETEEN}


@pytest.mark.parametrize(
    ("host", "met_at", "at_home", "we_are_public", "allowed"),
    [
        # the internet
        ("8.8.8.8", None, (), False, True),
        ("8.8.8.8", None, (), True, True),
        ("2606:4700::1", None, LAN, False, True),
        # a stranger's record that points into other people's houses
        ("127.0.0.1", None, (), False, False),
        ("192.168.1.1", None, (), False, False),
        ("10.0.0.1", None, LAN, False, False),
        ("::1", None, LAN, False, False),
        ("fe80::1", None, LAN, False, False),
        ("::ffff:192.168.1.1", None, (), False, False),
        ("64:ff9b::c0a8:101", None, (), False, False),
        # a LAN swarm, a demo on one machine
        ("192.168.1.20", None, LAN, False, True),
        ("192.168.7.20", None, LAN, False, True),
        ("127.0.0.1", None, {Block.LOOPBACK}, False, True),
        ("::1", None, {Block.LOOPBACK}, False, True),
        ("100.64.3.2", None, {Block.CARRIER}, False, True),
        # its owner has proved itself from there
        ("192.168.1.20", "192.168.1.20", (), False, True),
        ("192.168.1.20", "::ffff:192.168.1.20", (), False, True),
        ("192.168.1.1", "192.168.1.20", (), False, False),
        ("127.0.0.1", "127.0.0.1", (), False, True),
        # from the internet, whatever else it says of itself
        ("127.0.0.1", "8.8.8.8", (), False, False),
        # whoever is public has a router and perhaps a tunnel between itself and those who come
        ("192.168.1.20", None, LAN, True, False),
        ("192.168.1.20", "192.168.1.20", LAN, True, True),
        ("127.0.0.1", "127.0.0.1", {Block.LOOPBACK}, True, False),
        # never, even if somebody claims to be there
        ("169.254.169.254", "169.254.169.254", {Block.LINK_LOCAL}, False, False),
        ("0.0.0.0", "0.0.0.0", {Block.LOOPBACK}, False, False),
        ("224.0.0.1", None, LAN, False, False),
        ("example.org", "example.org", LAN, False, False),
    ],
)
def test_a_record_sends_nobody_into_a_network_that_isnt_its_swarms(
    host: str, met_at: str | None, at_home: set[Block], we_are_public: bool, allowed: bool
) -> None:
    assert may_dial(host, met_at=met_at, at_home=at_home, we_are_public=we_are_public) is allowed
