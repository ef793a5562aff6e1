"""Records for simulations: plausible ones, and a notary who knows what each owner really signed, and when.

Most worlds sign with a keyed hash, since an Ed25519 signature takes 0.06 ms to make and 0.15 ms to check:
it is as unforgeable as far as the world goes, where nobody knows another one's key. The rest use Ed25519.
In both a signature that was found good is remembered for the whole world, as each core does for itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from routing.spans import Span, Speed
from swarm.errors import MessageError
from swarm.identity import Identity, PeerId, peer_id
from swarm.records import DOMAIN, SIGNATURE_BYTES, Descriptor, Load, Record, check_signature

FINGERPRINT = b"f" * 32
Keys = Literal["ed25519", "hash"]


def descriptor(**changes: object) -> Descriptor:
    """A plausible one; `peer` and `seq` are filled in when it is published."""
    values: dict[str, object] = {
        "peer": Identity.from_seed(b"\0" * 32).peer_id,
        "seq": 0,
        "addresses": ("192.0.2.1:7070",),
        "fingerprint": FINGERPRINT,
        "model": "smollm2-135m",
        "layers": 30,
        "width": 576,
        "vocab": 49152,
        "context": 2048,
        "span": Span(0, 12),
        "numerics": "cpu/float32/none/-",
        "kv_tokens": 4096,
        "tokenizer_hash": b"t" * 32,
        "name": "laptop",
        "device": "CPU",
        "release": "0.1.0",
        "features": (),
    }
    return Descriptor(**(values | changes))  # type: ignore[arg-type]


def serving(**changes: object) -> Load:
    return dataclasses.replace(
        Load("serving", 0, 4096, 0.0, Speed(0.001, 0.002, 0.0, 0.001, 0.0005), 20.0),
        **changes,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Signed:
    """What the notary knows of a record. at: virtual time. order: of an owner's records one after the other.

    standing: protocol.md's order of one peer's heads, read from the bytes without the core's help. A leave
    stands where a descriptor of its seq would; of equal numbers the larger hash wins.
    """

    owner: PeerId
    kind: str
    order: int
    at: float
    values: dict[str, Any]


class _Noted(Identity):
    """An identity whose signatures are noted. secret: the 32-byte key."""

    def __init__(self, secret: bytes, keys: Keys, note: Callable[[PeerId, bytes], None]) -> None:
        self._note, self._hash_key = note, None
        if keys == "ed25519":
            super().__init__(Ed25519PrivateKey.from_private_bytes(secret))
        else:
            self._hash_key = secret
            self.peer_id = peer_id(hashlib.blake2b(secret, digest_size=32).digest())

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        key = self._hash_key
        signature = super().sign(domain, payload) if key is None else _keyed(key, payload)
        if domain == DOMAIN:
            self._note(self.peer_id, signature + payload)
        return signature


class Notary:
    """now: the virtual time."""

    def __init__(self, keys: Keys, now: Callable[[], float]) -> None:
        self.keys, self._now = keys, now
        self.signed: dict[bytes, Signed] = {}
        self._secrets: dict[PeerId, bytes] = {}
        self._good: set[bytes] = set()

    def identity(self, name: str) -> Identity:
        """The same for the same name."""
        secret = hashlib.blake2b(name.encode(), digest_size=32).digest()
        made = _Noted(secret, self.keys, self._note)
        self._secrets[made.peer_id] = secret
        return made

    def check(self, record: Record, signed: bytes) -> None:
        """What a registry is given to check signatures with. Raises MessageError."""
        if signed in self._good:
            return
        if self.keys == "ed25519":
            check_signature(record, signed)
        else:
            secret = self._secrets.get(record.peer, b"nobody")
            if _keyed(secret, signed[SIGNATURE_BYTES:]) != signed[:SIGNATURE_BYTES]:
                raise MessageError(f"a {type(record).__name__} that peer {record.peer[:8]} didn't sign")
        self._good.add(signed)

    def _note(self, owner: PeerId, signed: bytes) -> None:
        values = msgpack.unpackb(signed[SIGNATURE_BYTES:])
        self.signed[signed] = Signed(owner, values[""], len(self.signed), self._now(), values)


def _keyed(secret: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=secret).digest()
