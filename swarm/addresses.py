"""Where peers are: how an address is written, which neighbourhood it belongs to, and whether a stranger may
send us there. Pure: no socket, no lookup.

Three questions are answered here and nowhere else:

    parse_address   what a person or a record wrote
    address_group   with whom an address shares its limits: a stranger has one address or a whole network of them
    may_dial        whether an address that somebody else told us may be dialled from here

Addresses that a person gave (`--join`, mDNS of the own local network) need no permission. All others come from
strangers, and whoever signs a record may write into it what he likes: 127.0.0.1, the router's, a cloud's
metadata service. The tables are those of IANA's special-purpose registries (RFC 6890), spelled out because what
Python's `is_private` and `is_global` mean has changed between its own patch releases.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 (else imported at the first name: too late, once descriptors ran out)
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from swarm.errors import IdentityError, UsageError
from swarm.identity import PEER_ID_CHARACTERS, PeerId, key_bytes, peer_id

DEFAULT_PORT = 7070
MAX_HOST = 255  # characters; DNS names end there (RFC 1035)
GROUP_BITS = {4: 24, 6: 48}  # the smallest network that is routed: what one owner surely has all of

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


# ---------------------------------------------------------------- how it is written


@dataclass(frozen=True)
class Address:
    """Where a peer listens, and who is expected there if that is known."""

    peer: PeerId | None
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        prefix = f"{self.peer}@" if self.peer else ""
        return f"{prefix}{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host`, `host:port`, `[ipv6]:port` or a name, each optionally after `PEERID@`. Raises UsageError."""
    identity, at, place = text.strip().rpartition("@")
    host, port = _split_port(place)
    peer: PeerId | None = None
    if at:
        try:
            peer = peer_id(key_bytes(PeerId(identity)))  # in the one spelling by which it is known
        except IdentityError:
            raise _bad_address(
                text, f"{identity[:120]!r} is not a peer id of {PEER_ID_CHARACTERS} characters"
            ) from None
    if len(host) > MAX_HOST:  # looking at it takes time that grows with the square of its length
        raise _bad_address(text, f"its host has {len(host)} characters, a name has at most {MAX_HOST}")
    if not host or any(character.isspace() or character in "/[]" for character in host):
        raise _bad_address(text, "there is no host in it")
    if not _resolvable(host):
        raise _bad_address(text, "its host is no name that could be looked up")
    if port == "":
        return Address(peer, host, DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or not 0 < int(port) < 1 << 16:
        raise _bad_address(text, f"{port[:120]!r} is not a port from 1 to 65535")
    return Address(peer, host, int(port))


def _resolvable(host: str) -> bool:
    """Whether the resolver takes it at all: what it can't encode, it answers with a ValueError, and hosts come
    from strangers' records."""
    try:
        return host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        return False


def _split_port(place: str) -> tuple[str, str]:
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        return host, rest.removeprefix(":")
    if place.count(":") > 1:  # a bare IPv6 address
        return place, ""
    host, colon, port = place.partition(":")
    return host, port if not colon or port else "missing"


def _bad_address(text: str, why: str) -> UsageError:
    return UsageError(
        f"{text[:120]!r} is not an address ({why}); write for example 192.168.1.20:{DEFAULT_PORT}"
    )


# ---------------------------------------------------------------- where it belongs


class Block(Enum):
    """A kind of place. Those that aren't PUBLIC or NEVER exist once in every network, each time another."""

    PUBLIC = "public"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    TEN = "10.0.0.0/8"
    SEVENTEEN = "172.16.0.0/12"
    NINETEEN = "192.168.0.0/16"
    CARRIER = "100.64.0.0/10"  # carriers' NAT, and overlay networks such as Tailscale's
    UNIQUE_LOCAL = "fc00::/7"
    # for documentation and benchmarks, and in use all the same: by sandboxes, containers and VPNs
    TEST_ONE = "192.0.2.0/24"
    TEST_TWO = "198.51.100.0/24"
    TEST_THREE = "203.0.113.0/24"
    BENCHMARKS = "198.18.0.0/15"
    NEVER = "nothing to dial"


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


# Clouds hand out a machine's credentials there, to whoever on the machine asks.
_METADATA = _networks("169.254.169.254/32", "169.254.170.2/32", "100.100.100.200/32", "fd00:ec2::254/128")
_TABLE: tuple[tuple[Block, tuple[Network, ...]], ...] = (
    (Block.NEVER, _METADATA),
    (Block.LOOPBACK, _networks("127.0.0.0/8", "::1/128")),
    (Block.LINK_LOCAL, _networks("169.254.0.0/16", "fe80::/10")),
    (Block.TEN, _networks("10.0.0.0/8")),
    (Block.SEVENTEEN, _networks("172.16.0.0/12")),
    (Block.NINETEEN, _networks("192.168.0.0/16")),
    (Block.CARRIER, _networks("100.64.0.0/10")),
    (Block.UNIQUE_LOCAL, _networks("fc00::/7")),
    (Block.TEST_ONE, _networks("192.0.2.0/24")),
    (Block.TEST_TWO, _networks("198.51.100.0/24")),
    (Block.TEST_THREE, _networks("203.0.113.0/24")),
    (Block.BENCHMARKS, _networks("198.18.0.0/15")),
    # this network, protocol assignments, 6to4 relays, multicast, reserved, broadcast
    (Block.NEVER, _networks("0.0.0.0/8", "192.0.0.0/24", "192.88.99.0/24", "224.0.0.0/3")),
    (Block.PUBLIC, _networks("0.0.0.0/0", "2000::/3")),
)
# Parts of 2000::/3 that aren't on the internet: Teredo and other assignments, documentation, 6to4.
_NO_IPV6 = _networks("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
# A gateway turns these into the IPv4 address in their last four bytes (RFC 6052, RFC 8215, RFC 4291).
_EMBEDDING = _networks("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0/96", "::/96")


def read_ip(text: str) -> IP | None:
    """The address that is really meant, without its zone: an IPv4 address that is written as an IPv6 one (mapped,
    compatible, NAT64) is that IPv4 address. None for a name."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0].strip("[]"))
    except ValueError:
        return None
    embeds = isinstance(found, ipaddress.IPv6Address) and any(found in one for one in _EMBEDDING)
    if embeds and int(found) > 1:  # :: and ::1 mean themselves
        return ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
    return found


def block_of(host: str) -> Block:
    """NEVER for a name: what it stands for is known only when it has been looked up."""
    ip = read_ip(host)
    if ip is None or any(ip in one for one in _NO_IPV6):
        return Block.NEVER
    return next((block for block, nets in _TABLE if any(ip in net for net in nets)), Block.NEVER)


def is_loopback(host: str) -> bool:
    """Of this machine, as an address or by the one name that everywhere means it."""
    return host == "localhost" or block_of(host) is Block.LOOPBACK


def is_public(host: str) -> bool:
    return block_of(host) is Block.PUBLIC


def address_group(host: str) -> str:
    """With whom `host` shares its limits: its /24 or /48.

    A loopback, link-local or private address is a group of its own: there a whole local network, with many
    people in it, would fit into one /24, and nobody gets such addresses by the dozen for free.
    """
    ip = read_ip(host)
    if ip is None:
        return host.lower()
    if block_of(host) not in (Block.PUBLIC, Block.NEVER):
        return str(ip)
    return str(ipaddress.ip_network(f"{ip}/{GROUP_BITS[ip.version]}", strict=False))


# ---------------------------------------------------------------- whether to go there


def may_dial(
    host: str, *, met_at: str | None = None, at_home: Collection[Block] = (), we_are_public: bool = False
) -> bool:
    """Whether an address that a stranger told may be dialled. host: an IP address, names looked up already.

    met_at: the address from which its owner was connected to us with a proved identity, if ever. at_home: the
    blocks in which our swarm lives, which is where peers were met that also say they are there. we_are_public:
    whether we tell others a public address of ours.

    A public address may be dialled; what lies in a network of its own only from within that network. To be
    there ourselves isn't enough, or anybody could send us to our own router or database: somebody of the swarm
    must be there too. Whoever is public is in nobody's local network but by the very address where its peer was
    met (and a tunnel in front of it makes strangers appear at loopback).
    """
    block = block_of(host)
    if block in (Block.PUBLIC, Block.NEVER):
        return block is Block.PUBLIC
    same_place = met_at is not None and read_ip(met_at) == read_ip(host)
    if we_are_public:
        return same_place and block is not Block.LOOPBACK
    return same_place or block in at_home
