"""The handshake and the record encryption, without a socket.

Two parts. `CipherState`, `SymmetricState` and `HandshakeState` are Noise (noiseprotocol.org, revision
34, sections 5 and 7) for the one protocol `Noise_XX_25519_AESGCM_SHA256`. `Handshake` is what LayerSwarm
puts around it: a preamble by which strangers, other versions and other networks are told apart, and a
proof of the Ed25519 identity. `wire.py` drives it and takes the two ciphers that come out.

    dialler  -> preamble, message 1                   (at once: no extra round trip)
    listener -> preamble, message 2 + its proof       (the dialler checks it, then reveals itself)
    dialler  -> message 3 + its proof

    preamble   "LSwm" | u8 major version | u16 length of the body | body       the first three never change
    body       u8 length, network name in UTF-8 | u8 number of suites | each: u8 length, name
    message    u16 length | Noise message
    proof      32 bytes public key | 64 bytes signature over role, static key, handshake hash

Both preambles are the Noise prologue, so nobody in between can change one unnoticed. All integers are
big-endian. Invariant: `done` is set only after the other side has proved its identity for this handshake.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarm.errors import HandshakeError, IdentityError, StrangeProgram, VersionMismatch
from swarm.identity import Identity, PeerId, key_bytes, peer_id, verify

Role = Literal["initiator", "responder"]
Buffer = bytes | bytearray | memoryview

MAJOR_VERSION = 1
MAGIC = b"LSwm"
PROTOCOL = b"Noise_XX_25519_AESGCM_SHA256"
SUITES = (PROTOCOL.decode(),)
TAG_BYTES = 16
REKEY_BYTES = 1 << 30  # far below the 2**36 that AES-GCM allows; old traffic stays safe from a later key
MAX_NONCE = (1 << 64) - 1  # reserved for rekey (Noise 4.2)
MAX_PREAMBLE_BODY = 512  # a name and a few suites
MAX_HANDSHAKE_MESSAGE = 512  # message 2 takes 192 bytes; with the preamble all of it stays under 2 KiB
MAX_NETWORK_NAME = 64  # bytes
PROOF_DOMAIN = b"noise-identity"
PROOF_BYTES = 32 + 64


# ---------------------------------------------------------------- Noise itself


class CipherState:
    """One direction: a key and a counter that is the nonce (Noise 5.1).

    Invariant: no key ever meets a nonce twice. Nobody can name a nonce: the counter is made here, with the key,
    and goes on before it is used, whether or not sealing or opening then works; a later key goes on counting,
    and the last number is kept for making that key.
    """

    def __init__(self, key: bytes, rekey_bytes: int = REKEY_BYTES) -> None:
        self._aead = AESGCM(key)
        self._nonce = 0
        self._bytes = 0  # under this key
        self._rekey_bytes = rekey_bytes

    def encrypt(self, plaintext: Buffer, ad: bytes = b"") -> bytes:
        sealed = self._aead.encrypt(self._next_nonce(), plaintext, ad)
        self._count(len(plaintext))
        return sealed

    def decrypt(self, ciphertext: Buffer, ad: bytes = b"") -> bytes:
        """Raises InvalidTag; the connection can't go on then."""
        plaintext = self._aead.decrypt(self._next_nonce(), ciphertext, ad)
        self._count(len(plaintext))
        return plaintext

    def rekey(self) -> None:
        """Noise 4.2: encrypt zeros under the reserved nonce; the counter goes on."""
        self._aead = AESGCM(self._aead.encrypt(_nonce(MAX_NONCE), bytes(32), b"")[:32])
        self._bytes = 0

    def _next_nonce(self) -> bytes:
        if self._nonce >= MAX_NONCE:  # never an assert: python -O would let it begin again
            raise OverflowError("all nonces of this direction are used up, after 2**64 - 1 records")
        nonce = _nonce(self._nonce)
        self._nonce += 1
        return nonce

    def _count(self, plaintext_bytes: int) -> None:
        # Both ends count the same plaintext, so both change the key after the same record.
        self._bytes += plaintext_bytes
        if self._bytes >= self._rekey_bytes:
            self.rekey()


_nonce: Callable[[int], bytes] = struct.Struct(">4xQ").pack  # AESGCM's layout in Noise 12.4


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs (Noise 4.3)."""
    secret = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(secret, b"\x01", "sha256")
    return first, hmac.digest(secret, first + b"\x02", "sha256")


class SymmetricState:
    """Chaining key, handshake hash, and a cipher once there is a key (Noise 5.2)."""

    def __init__(self) -> None:
        self.hash = PROTOCOL.ljust(32, b"\0")
        self._chaining_key = self.hash
        self._cipher: CipherState | None = None

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, material)
        self._cipher = CipherState(key)

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        sealed = plaintext if self._cipher is None else self._cipher.encrypt(plaintext, self.hash)
        self.mix_hash(sealed)
        return sealed

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plain = ciphertext if self._cipher is None else self._cipher.decrypt(ciphertext, self.hash)
        self.mix_hash(ciphertext)
        return plain

    def split(self) -> tuple[CipherState, CipherState]:
        """The initiator's sending cipher, and the responder's."""
        first, second = _hkdf(self._chaining_key, b"")
        return CipherState(first), CipherState(second)


# XX (Noise 7.5): each message's tokens.
_PATTERN: tuple[tuple[str, ...], ...] = (("e",), ("e", "ee", "s", "es"), ("s", "se"))


class HandshakeState:
    """XX for one side (Noise 5.3). Each message is written or read as its keys first, then its payload.

    In between, `hash` covers all keys so far: that is what an identity proof in the payload signs.
    Reading raises HandshakeError; the state is of no more use then.
    """

    def __init__(
        self, role: Role, prologue: bytes, static: X25519PrivateKey, ephemeral: X25519PrivateKey
    ) -> None:
        self._initiator = role == "initiator"
        self._static, self._ephemeral = static, ephemeral
        self._remote_ephemeral: X25519PublicKey | None = None
        self._message = 0
        self.remote_static: bytes | None = None
        self._symmetric = SymmetricState()
        self._symmetric.mix_hash(prologue)

    @property
    def hash(self) -> bytes:
        return self._symmetric.hash

    def write_keys(self) -> bytes:
        out = b""
        for token in self._next_tokens():
            if token == "e":
                out += public_bytes(self._ephemeral)
                self._symmetric.mix_hash(public_bytes(self._ephemeral))
            elif token == "s":
                out += self._symmetric.encrypt_and_hash(public_bytes(self._static))
            else:
                self._mix(token)
        return out

    def write_payload(self, payload: bytes) -> bytes:
        return self._symmetric.encrypt_and_hash(payload)

    def read_keys(self, message: bytes) -> bytes:
        """Returns what is left of the message: its payload, still sealed."""
        for token in self._next_tokens():
            if token == "e":
                raw, message = _cut(message, 32)
                self._remote_ephemeral = X25519PublicKey.from_public_bytes(raw)
                self._symmetric.mix_hash(raw)
            elif token == "s":
                sealed, message = _cut(message, 32 + TAG_BYTES)
                self.remote_static = self._open(sealed)
            else:
                self._mix(token)
        return message

    def read_payload(self, sealed: bytes) -> bytes:
        return self._open(sealed)

    def split(self) -> tuple[CipherState, CipherState]:
        """(for sending, for receiving), once all three messages are through."""
        assert self._message == len(_PATTERN)
        first, second = self._symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def _next_tokens(self) -> tuple[str, ...]:
        tokens = _PATTERN[self._message]
        self._message += 1
        return tokens

    def _open(self, sealed: bytes) -> bytes:
        try:
            return self._symmetric.decrypt_and_hash(sealed)
        except InvalidTag:
            raise HandshakeError("a handshake message was changed on its way") from None

    def _mix(self, token: str) -> None:
        """`es` is the initiator's ephemeral with the responder's static key, and so on."""
        first, second = token[0], token[1]
        mine, theirs = (first, second) if self._initiator else (second, first)
        private = self._ephemeral if mine == "e" else self._static
        try:
            self._symmetric.mix_key(private.exchange(self._remote_key(theirs)))
        except ValueError:  # a point of small order
            raise HandshakeError("the other side sent a key that is no key") from None

    def _remote_key(self, which: str) -> X25519PublicKey:
        if which == "e":
            assert self._remote_ephemeral is not None
            return self._remote_ephemeral
        assert self.remote_static is not None
        return X25519PublicKey.from_public_bytes(self.remote_static)


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _cut(message: bytes, size: int) -> tuple[bytes, bytes]:
    if len(message) < size:
        raise HandshakeError(f"a handshake message is {size - len(message)} bytes too short")
    return message[:size], message[size:]


# ---------------------------------------------------------------- what LayerSwarm puts around it


@dataclass(frozen=True)
class Secured:
    """A finished handshake. leftover: bytes that came after it and belong to the first records."""

    peer: PeerId
    sender: CipherState
    receiver: CipherState
    leftover: bytes


@dataclass(frozen=True)
class Preamble:
    version: int
    network: str
    suites: tuple[str, ...]

    def encode(self) -> bytes:
        body = _short(self.network) + bytes([len(self.suites)]) + b"".join(map(_short, self.suites))
        return MAGIC + struct.pack(">BH", self.version, len(body)) + body


def _short(text: str) -> bytes:
    return bytes([len(text.encode())]) + text.encode()


def _read_body(body: bytes) -> tuple[str, tuple[str, ...]]:
    """Network name and suites. What follows them is for later minor versions."""

    def short(at: int) -> tuple[str, int]:
        end = at + 1 + body[at]
        if end > len(body):
            raise IndexError
        return body[at + 1 : end].decode(), end

    try:
        network, at = short(0)
        count, at = body[at], at + 1
        suites = []
        for _ in range(count):
            suite, at = short(at)
            suites.append(suite)
    except (IndexError, UnicodeDecodeError):
        raise HandshakeError("the other side's preamble is malformed") from None
    return network, tuple(suites)


class Handshake:
    """One side of a connection being set up. Pure: bytes in, bytes out.

    `receive` raises HandshakeError, VersionMismatch or IdentityError (and whatever `check` raises);
    what `data_to_send` returns afterwards should still be sent before closing, so that the other side
    learns the reason too; it takes nothing more. check: called with the proved identity, by a dialler before
    it reveals its own.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        network: str,
        *,
        expected: PeerId | None = None,
        check: Callable[[PeerId], None] | None = None,
        static: X25519PrivateKey | None = None,
        version: int = MAJOR_VERSION,
        rng: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._role: Role = role
        self._identity = identity
        self._expected, self._check = expected, check
        self._static = static or X25519PrivateKey.from_private_bytes(rng(32))
        self._ephemeral = X25519PrivateKey.from_private_bytes(rng(32))
        self._ours = Preamble(version, network, SUITES)
        self._noise: HandshakeState | None = None  # None: their preamble isn't here yet
        self._buffer = bytearray()
        self._out = bytearray()
        self._replied = False
        self._failed = False
        self.done: Secured | None = None
        if role == "initiator":
            # Message 1 is the bare ephemeral key, so it can leave before the prologue is known.
            self._out += self._ours.encode() + _framed(public_bytes(self._ephemeral))

    def data_to_send(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive(self, data: Buffer) -> None:
        assert self.done is None, "the handshake is over"
        if self._failed:
            raise HandshakeError("this handshake has failed before")
        self._failed = True  # until this call has come through
        self._buffer += data
        if self._noise is not None or self._read_preamble():
            while self.done is None and (message := self._next_message()) is not None:
                self._read_message(message)
        self._failed = False

    def _read_preamble(self) -> bool:
        head = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(head):
            raise StrangeProgram(f"the other side doesn't speak LayerSwarm (it began with {head!r})")
        if len(self._buffer) < len(MAGIC) + 3:
            return False
        version, size = struct.unpack_from(">BH", self._buffer, len(MAGIC))
        self._reply_preamble()
        if version != self._ours.version:
            raise VersionMismatch(self._ours.version, version)
        if size > MAX_PREAMBLE_BODY:
            raise HandshakeError(f"a preamble of {size} bytes, {MAX_PREAMBLE_BODY} are allowed")
        start, end = len(MAGIC) + 3, len(MAGIC) + 3 + size
        if len(self._buffer) < end:
            return False
        self._agree(*_read_body(bytes(self._buffer[start:end])))
        self._begin_noise(bytes(self._buffer[:end]))
        del self._buffer[:end]
        return True

    def _reply_preamble(self) -> None:
        if self._role == "responder" and not self._replied:
            self._replied = True
            self._out += self._ours.encode()

    def _agree(self, network: str, suites: tuple[str, ...]) -> None:
        if network != self._ours.network:
            raise HandshakeError(
                f"this is network {self._ours.network!r}, the other side is in {network!r}; "
                "join a peer of your own network"
            )
        if not set(suites) & set(SUITES):
            raise HandshakeError(
                f"no common cipher suite: {', '.join(SUITES)} here, {', '.join(suites)} there"
            )

    def _begin_noise(self, theirs: bytes) -> None:
        ours = self._ours.encode()
        prologue = ours + theirs if self._role == "initiator" else theirs + ours
        self._noise = HandshakeState(self._role, prologue, self._static, self._ephemeral)
        if self._role == "initiator":
            self._noise.write_keys()  # left in the constructor
            self._noise.write_payload(b"")

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        size = int.from_bytes(self._buffer[:2], "big")
        if size > MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError(f"a handshake message of {size} bytes, {MAX_HANDSHAKE_MESSAGE} are allowed")
        if len(self._buffer) < 2 + size:
            return None
        message = bytes(self._buffer[2 : 2 + size])
        del self._buffer[: 2 + size]
        return message

    def _read_message(self, message: bytes) -> None:
        noise = self._noise
        assert noise is not None
        sealed = noise.read_keys(message)
        if noise.remote_static is None:  # message 1
            if noise.read_payload(sealed):
                raise HandshakeError("the first handshake message carries a payload")
            self._write_message()
            return
        peer = self._verified(noise.hash, noise.remote_static, sealed)
        if self._role == "initiator":
            self._write_message()
        sender, receiver = noise.split()
        self.done = Secured(peer, sender, receiver, bytes(self._buffer))

    def _write_message(self) -> None:
        noise = self._noise
        assert noise is not None
        keys = noise.write_keys()
        proof = self._identity.sign(PROOF_DOMAIN, _claim(self._role, public_bytes(self._static), noise.hash))
        self._out += _framed(keys + noise.write_payload(key_bytes(self._identity.peer_id) + proof))

    def _verified(self, handshake_hash: bytes, static: bytes, sealed: bytes) -> PeerId:
        noise = self._noise
        assert noise is not None
        proof = noise.read_payload(sealed)
        if len(proof) != PROOF_BYTES:
            raise HandshakeError(f"an identity proof of {len(proof)} bytes, it takes {PROOF_BYTES}")
        peer = peer_id(proof[:32])
        role: Role = "responder" if self._role == "initiator" else "initiator"
        if not verify(peer, PROOF_DOMAIN, _claim(role, static, handshake_hash), proof[32:]):
            raise HandshakeError(f"the other side doesn't hold the key of {peer}")
        if self._expected is not None and peer != self._expected:
            raise IdentityError(
                f"expected peer {self._expected} there, found {peer}; check the address, or leave out the id"
            )
        if self._check is not None:
            self._check(peer)
        return peer


def _claim(role: Role, static: bytes, handshake_hash: bytes) -> bytes:
    return role.encode() + b"\0" + static + handshake_hash


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message
