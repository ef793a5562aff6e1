"""Who is who: an Ed25519 key pair, and the PeerId that is its public key.

A PeerId is written as 52 lower-case base32 characters, so that it can be pasted in front of an
address. Signatures are made over a domain and a payload, so that bytes signed for one purpose
are never valid for another.
"""

from __future__ import annotations

import base64
import functools
from typing import NewType

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import IdentityError

PeerId = NewType("PeerId", str)
PEER_ID_CHARACTERS = 52  # 32 bytes in base32 without padding
# base32 costs 5-10 us, and a registry of 10,000 reads the same keys again with every heartbeat
REMEMBERED = 1 << 15


@functools.lru_cache(REMEMBERED)
def peer_id(public_key: bytes) -> PeerId:
    """The PeerId of a raw 32-byte public key."""
    return PeerId(base64.b32encode(public_key).decode().rstrip("=").lower())


@functools.lru_cache(REMEMBERED)
def key_bytes(peer: PeerId) -> bytes:
    """The raw 32-byte public key of a PeerId. Raises IdentityError."""
    try:
        raw = base64.b32decode(peer.upper() + "====")
    except ValueError:
        raw = b""
    if len(raw) != 32 or len(peer) != PEER_ID_CHARACTERS:
        raise IdentityError(f"{peer[:60]!r} is not a peer id (52 characters a-z, 2-7)")
    return raw


def _framed(domain: bytes, payload: bytes) -> bytes:
    assert len(domain) < 256
    return b"layerswarm" + bytes([len(domain)]) + domain + payload


class Identity:
    """A private key. Only `swarm/state.py` writes one to disk."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id(key.public_key().public_bytes_raw())

    @classmethod
    def ephemeral(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """From the raw 32-byte private key."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def seed(self) -> bytes:
        return self._key.private_bytes_raw()

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        """64-byte Ed25519 signature (RFC 8032)."""
        return self._key.sign(_framed(domain, payload))


# Public keys of small order, their highest bit (a sign) aside. Under them one signature is good for every
# message, so they belong to nobody; RFC 8032 doesn't ask to refuse them and OpenSSL doesn't.
_SMALL_ORDER = frozenset(
    bytes.fromhex(key)
    for key in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


def verify(peer: PeerId, domain: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `payload` for `domain`. Never true of a key that is nobody's."""
    try:
        key = key_bytes(peer)
        if key[:31] + bytes([key[31] & 0x7F]) in _SMALL_ORDER:
            return False
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _framed(domain, payload))
    except (InvalidSignature, IdentityError, ValueError):
        return False
    return True
