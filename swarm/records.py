"""What a peer says about itself: descriptor, heartbeat and leave, signed by nobody else.

    signed record = 64-byte Ed25519 signature | msgpack map with one-letter keys

Invariant: a record that exists here was read from bytes that its owner signed, and those very
bytes are what is stored and relayed (`registry.py`), hashed and handed to other hops
(`HopRef.descriptor`). A heartbeat names the hash of its descriptor's bytes and so can't be
combined with another one. Keys and their meaning are for ever; a newer version may add some,
which an older one ignores (a heartbeat has room for a peer's network coordinates, which will travel
under COORDINATES). Text in a record is printable: it ends up on terminals.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import msgpack

from routing.spans import Span, Speed
from swarm import codecs, messages
from swarm.codecs import Codec
from swarm.errors import MessageError, UsageError
from swarm.identity import Identity, PeerId, verify

SIGNATURE_BYTES = 64
DOMAIN = b"record"
# Descriptor and heartbeat together stay within MAX_RECORD_BYTES (protocol.md). A heartbeat has no
# text but its state, so that its size is bounded by its fields; the descriptor gets the rest.
MAX_HEARTBEAT_BYTES = 256
MAX_DESCRIPTOR_BYTES = messages.MAX_RECORD_BYTES - MAX_HEARTBEAT_BYTES
MAX_ADDRESSES = 8
MAX_NAME = 32  # characters, as are the next two
MAX_MODEL_NAME = 96
MAX_DEVICE_NAME = 48
MAX_SEQ = (1 << 62) - 1  # far beyond unix milliseconds; leaves room to add without overflow
MAX_LEASE_S = 180.0  # three of the longest heartbeat interval (60 s at 10,000 peers)
MIN_LEASE_S = 1.0  # a shorter one would lapse on the way
# Of a descriptor's SHA-256: nobody else can make one that a heartbeat would fit as well (2**128 tries),
# and 16 bytes less in each heartbeat are 2.7 kB/s per peer and direction among 10,000.
DESCRIPTOR_HASH_BYTES = 16
COORDINATES = "x"  # key of a heartbeat that nothing reads yet: five brief figures, 12 bytes


def _printable(most: int) -> Codec:
    plain = codecs.exact_text(most)

    def read(value: Any) -> str:
        found = str(plain.read(value))
        if not found.isprintable():
            raise MessageError(f"expected printable text, got {found[:80]!r}")
        return sys.intern(found)  # thousands of peers say the same of their model and device

    return Codec(plain.write, read)


def brief(figures: Iterable[float]) -> bytes:
    """Each as the upper half of its float32, rounded: 2 bytes, wrong by at most 0.4%."""
    out = []
    for (bits,) in (struct.unpack(">I", struct.pack(">f", figure)) for figure in figures):
        out.append((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return struct.pack(f">{len(out)}H", *out)


def from_brief(data: bytes) -> tuple[float, ...]:
    """The reverse of `brief`; an odd last byte is dropped."""
    whole = b"".join([data[at : at + 2] + b"\0\0" for at in range(0, len(data) - 1, 2)])
    return struct.unpack(f">{len(whole) // 4}f", whole)


def _read_speed(value: Any) -> Speed:
    if not isinstance(value, bytes) or len(value) < 2 * _SPEED_FIGURES:
        raise MessageError(f"expected the figures of a Speed, got {str(value)[:80]!r}")
    return Speed(*(_figure.read(one) for one in from_brief(value[: 2 * _SPEED_FIGURES])))


def _short(codec: Codec) -> Codec:
    """Whole numbers travel as such: 1 to 5 bytes instead of 5."""
    return Codec(lambda value: int(value) if float(value).is_integer() else float(value), codec.read)


def _read_state(value: Any) -> str:
    for state in STATES:
        if value == state[0]:
            return state
    raise MessageError(f"expected the first letter of one of {STATES}, got {str(value)[:80]!r}")


def _write_state(value: str) -> str:
    return value[0] if value in STATES else value


STATES = ("loading", "serving", "draining")
_SPEED_FIGURES = len(dataclasses.fields(Speed))
_figure = codecs.number(0.0, 1e6)
_speed = Codec(lambda value: brief(dataclasses.astuple(value)), _read_speed)
_state = Codec(_write_state, _read_state)
_descriptor_hash = codecs.octets(DESCRIPTOR_HASH_BYTES, DESCRIPTOR_HASH_BYTES)
_seq = codecs.integer(0, MAX_SEQ)
_lease = _short(codecs.number(MIN_LEASE_S, MAX_LEASE_S))


def _key(key: str, codec: Codec, **default: Any) -> Any:
    """A field that travels under `key` by `codec`."""
    return field(metadata={"key": key, "codec": codec}, **default)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a peer is and serves. Changes rarely; `seq` only grows.

    layers, width, vocab: of the model. context: positions that one session may have here.
    kv_tokens: positions of KV that fit here in all. name and device are for people.
    """

    letter: ClassVar[str] = "d"
    peer: PeerId = _key("p", codecs.peer)
    seq: int = _key("s", _seq)
    addresses: tuple[str, ...] = _key("a", codecs.list_of(_printable(80), MAX_ADDRESSES))
    fingerprint: bytes = _key("f", codecs.digest)
    model: str = _key("m", _printable(MAX_MODEL_NAME))
    layers: int = _key("l", codecs.integer(1, codecs.MAX_LAYERS))
    width: int = _key("w", codecs.integer(1, 1 << 20))
    vocab: int = _key("v", codecs.integer(1, 1 << 24))
    context: int = _key("c", codecs.position)
    span: Span = _key("b", codecs.span)
    numerics: str = _key("n", _printable(40))
    kv_tokens: int = _key("k", codecs.integer(0, 1 << 40))
    tokenizer_hash: bytes = _key("t", codecs.digest)
    name: str = _key("e", _printable(MAX_NAME), default="")
    device: str = _key("h", _printable(MAX_DEVICE_NAME), default="")
    release: str = _key("r", _printable(24), default="")
    features: tuple[str, ...] = _key("g", codecs.list_of(_printable(16), 8), default=())

    @property
    def dtype(self) -> str:
        """In which its hidden states travel, as `numerics` says: device kind/dtype/...; "" if it doesn't."""
        parts = self.numerics.split("/")
        return parts[1] if len(parts) > 1 else ""

    def check(self) -> None:
        if self.span.stop > self.layers:
            raise MessageError(f"a claim of [{self.span.start}, {self.span.stop}) in {self.layers} layers")


@dataclass(frozen=True, slots=True)
class Load:
    """The part of a heartbeat that the peer's service knows. queue_s: what a new step waits here."""

    state: str = _key("t", _state, default="loading")
    sessions: int = _key("n", codecs.integer(0, 1 << 20), default=0)
    free_kv_tokens: int = _key("k", codecs.integer(0, 1 << 40), default=0)
    queue_s: float = _key("q", _short(_figure), default=0.0)
    speed: Speed = _key("v", _speed, default=Speed(0.0, 0.0, 0.0, 0.0, 0.0))
    tokens_per_s: float = _key("r", _short(codecs.number(0.0, 1e9)), default=0.0)


@dataclass(frozen=True, slots=True)
class Heartbeat(Load):
    """That a peer is alive, and how loaded: renews `descriptor_hash` and nothing else.

    issued_ms: the owner's wall clock, for people and warnings; no lease depends on it.
    """

    letter: ClassVar[str] = "h"
    peer: PeerId = _key("p", codecs.peer, kw_only=True)
    seq: int = _key("s", _seq, kw_only=True)
    descriptor_hash: bytes = _key("d", _descriptor_hash, kw_only=True)
    issued_ms: int = _key("i", codecs.integer(0, MAX_SEQ), kw_only=True)
    lease_s: float = _key("l", _lease, kw_only=True)


@dataclass(frozen=True, slots=True)
class Leave:
    """The owner has gone. lease_s: until then somebody may hold a heartbeat that looks alive."""

    letter: ClassVar[str] = "b"
    peer: PeerId = _key("p", codecs.peer)
    seq: int = _key("s", _seq)
    lease_s: float = _key("l", _lease)


Record: TypeAlias = Descriptor | Heartbeat | Leave
_KINDS: dict[str, type[Record]] = {cls.letter: cls for cls in (Descriptor, Heartbeat, Leave)}
_FIELDS: dict[type[Any], tuple[codecs.Field, ...]] = {
    cls: tuple(
        (f.metadata["key"], f.name, f.metadata["codec"], f.default is dataclasses.MISSING)
        for f in dataclasses.fields(cls)
        if "key" in f.metadata
    )
    for cls in _KINDS.values()
}


def record_hash(signed: bytes) -> bytes:
    """What a heartbeat calls its descriptor: the start of the SHA-256 over the signed bytes."""
    return hashlib.sha256(signed).digest()[:DESCRIPTOR_HASH_BYTES]


def sign_record(identity: Identity, record: Record) -> bytes:
    """The bytes that travel. Raises UsageError when they are too many, MessageError on a bad field."""
    values = {key: codec.write(getattr(record, name)) for key, name, codec, _ in _FIELDS[type(record)]}
    payload: bytes = msgpack.packb({"": record.letter, **values}, use_single_float=True)
    assert record.peer == identity.peer_id, "a record is signed by its owner"
    _read(payload)  # what others would refuse is never sent
    most = MAX_DESCRIPTOR_BYTES if isinstance(record, Descriptor) else MAX_HEARTBEAT_BYTES
    if SIGNATURE_BYTES + len(payload) > most:
        raise UsageError(
            f"a {type(record).__name__} of {SIGNATURE_BYTES + len(payload)} bytes is above the limit of "
            f"{most}; use fewer or shorter addresses and names"
        )
    return identity.sign(DOMAIN, payload) + payload


def fitting(identity: Identity, descriptor: Descriptor) -> Descriptor:
    """The descriptor with as many of its addresses, from the front, as its bytes have room for."""
    while True:
        try:
            sign_record(identity, descriptor)
        except UsageError:
            if len(descriptor.addresses) <= 1:
                raise
            descriptor = replace(descriptor, addresses=descriptor.addresses[:-1])
        else:
            return descriptor


def read_record(signed: bytes) -> Record:
    """Decode without checking the signature: to see whether the check is worth its 0.2 ms.

    Raises MessageError.
    """
    record = _read(signed[SIGNATURE_BYTES:])
    most = MAX_DESCRIPTOR_BYTES if isinstance(record, Descriptor) else MAX_HEARTBEAT_BYTES
    if len(signed) > most:
        raise MessageError(f"a {type(record).__name__} of {len(signed)} bytes is above the limit of {most}")
    return record


def check_signature(record: Record, signed: bytes) -> None:
    """Raises MessageError unless the owner of `record` signed these bytes."""
    if not verify(record.peer, DOMAIN, signed[SIGNATURE_BYTES:], signed[:SIGNATURE_BYTES]):
        raise MessageError(f"a {type(record).__name__} that peer {record.peer[:8]} didn't sign")


def open_record(signed: bytes) -> Record:
    """Decode and verify. Raises MessageError."""
    record = read_record(signed)
    check_signature(record, signed)
    return record


def open_descriptor(signed: bytes) -> Descriptor:
    """Decode and verify a descriptor, such as the one in a `HopRef`. Raises MessageError."""
    record = open_record(signed)
    if not isinstance(record, Descriptor):
        raise MessageError(f"expected a descriptor, got a {type(record).__name__}")
    return record


def _read(payload: bytes) -> Record:
    if len(payload) > messages.MAX_RECORD_BYTES:
        raise MessageError(f"a record of {len(payload)} bytes is above {messages.MAX_RECORD_BYTES}")
    try:
        values = msgpack.unpackb(payload, max_map_len=64, max_array_len=64)
    except ValueError as error:
        raise MessageError(f"a record that isn't msgpack: {str(error)[:80]}") from None
    letter = values.get("") if isinstance(values, dict) else None
    cls = _KINDS.get(letter) if isinstance(letter, str) else None
    if cls is None:
        raise MessageError(f"a record of unknown kind {str(letter)[:40]!r}")
    return _build(cls, values)


def _build(cls: type[Any], values: dict[str, Any]) -> Record:
    made: Record = codecs.build(cls, _FIELDS[cls], values)
    if isinstance(made, Descriptor):
        made.check()
    return made
