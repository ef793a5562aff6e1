"""The handshake against published vectors, a second implementation, and a meddler in between."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarm import noise
from swarm.errors import HandshakeError, IdentityError, StrangeProgram, SwarmError, VersionMismatch
from swarm.identity import Identity
from swarm.noise import CipherState, Handshake, HandshakeState

VECTORS = json.loads((Path(__file__).parent / "vectors" / "noise_xx.json").read_text())["vectors"]
ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(range(1, 33)))


def private(hexadecimal: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(hexadecimal))


def both_states(vector: dict[str, Any]) -> tuple[HandshakeState, HandshakeState]:
    prologue = bytes.fromhex(vector["prologue"])
    return (
        HandshakeState(
            "initiator", prologue, private(vector["init_static"]), private(vector["init_ephemeral"])
        ),
        HandshakeState(
            "responder", prologue, private(vector["resp_static"]), private(vector["resp_ephemeral"])
        ),
    )


def run(
    dialler: Handshake, listener: Handshake, change: Any = lambda turn, data: data
) -> tuple[SwarmError | None, SwarmError | None]:
    """Carry bytes between both until silence; `change` sits in between. Returns each side's error."""
    errors: list[SwarmError | None] = [None, None]
    sides = (dialler, listener)
    for turn in range(6):
        data = change(turn, sides[turn % 2].data_to_send())
        other = (turn + 1) % 2
        if data and errors[other] is None and sides[other].done is None:
            try:
                sides[other].receive(data)
            except SwarmError as error:
                errors[other] = error
    return errors[0], errors[1]


def pair(**dialler_options: Any) -> tuple[Handshake, Handshake]:
    rng = random.Random(7).randbytes
    return (
        Handshake("initiator", ALICE, "main", rng=rng, **dialler_options),
        Handshake("responder", BOB, "main", rng=rng),
    )


@pytest.mark.parametrize("vector", VECTORS, ids=["cacophony", "flynn"])
def test_published_vectors_are_met_byte_for_byte(vector: dict[str, Any]) -> None:
    sides = both_states(vector)
    messages = vector["messages"]
    for number, message in enumerate(messages[:3]):
        writer, reader = sides[number % 2], sides[1 - number % 2]
        payload = bytes.fromhex(message["payload"])
        sent = writer.write_keys() + writer.write_payload(payload)
        assert sent.hex() == message["ciphertext"]
        assert reader.read_payload(reader.read_keys(sent)) == payload
        assert writer.hash == reader.hash
        if number == 1 and "hash_after_second_message" in vector:
            assert writer.hash.hex() == vector["hash_after_second_message"]
    ciphers = sides[0].split(), sides[1].split()
    for number, message in enumerate(messages[3:], start=3):
        (sender, _), (_, receiver) = ciphers[number % 2], ciphers[1 - number % 2]
        payload = bytes.fromhex(message["payload"])
        sealed = sender.encrypt(payload)
        assert sealed.hex() == message["ciphertext"]
        assert receiver.decrypt(sealed) == payload


@pytest.mark.parametrize("role", ["initiator", "responder"])
def test_the_noiseprotocol_package_talks_to_it_in_either_role(role: noise.Role) -> None:
    from noise.connection import Keypair, NoiseConnection  # type: ignore[import-not-found]

    other = NoiseConnection.from_name(b"Noise_XX_25519_AESGCM_SHA256")
    other.set_as_initiator() if role == "responder" else other.set_as_responder()
    other.set_prologue(b"between us")
    other.set_keypair_from_private_bytes(Keypair.STATIC, bytes(range(32)))
    other.start_handshake()
    ours = HandshakeState(role, b"between us", X25519PrivateKey.generate(), X25519PrivateKey.generate())
    for number in range(3):
        payload = bytes([number]) * 10
        if (number % 2 == 0) == (role == "initiator"):
            assert other.read_message(ours.write_keys() + ours.write_payload(payload)) == payload
        else:
            assert ours.read_payload(ours.read_keys(bytes(other.write_message(payload)))) == payload
    assert ours.hash == other.get_handshake_hash()
    sender, receiver = ours.split()
    for text in (b"first", b"second"):
        assert other.decrypt(sender.encrypt(text)) == text
        assert receiver.decrypt(other.encrypt(text)) == text
    sender.rekey()
    other.rekey_inbound_cipher()
    assert other.decrypt(sender.encrypt(b"after the rekey")) == b"after the rekey"


def test_both_sides_learn_who_the_other_is() -> None:
    dialler, listener = pair(expected=BOB.peer_id)
    assert run(dialler, listener) == (None, None)
    assert dialler.done is not None and listener.done is not None
    assert (dialler.done.peer, listener.done.peer) == (BOB.peer_id, ALICE.peer_id)
    assert listener.done.receiver.decrypt(dialler.done.sender.encrypt(b"hello")) == b"hello"
    assert dialler.done.receiver.decrypt(listener.done.sender.encrypt(b"hi")) == b"hi"


def test_a_handshake_survives_byte_by_byte_delivery_and_keeps_what_follows_it() -> None:
    dialler, listener = pair()
    for byte in dialler.data_to_send():
        listener.receive(bytes([byte]))
    for byte in listener.data_to_send():
        dialler.receive(bytes([byte]))
    listener.receive(dialler.data_to_send() + b"first record")
    assert listener.done is not None and listener.done.leftover == b"first record"


def test_every_flipped_byte_of_every_message_is_refused() -> None:
    lengths = []
    run(*pair(), change=lambda turn, data: (lengths.append(len(data)), data)[1])
    for turn, length in enumerate(lengths[:3]):
        for place in range(length):

            def flip(at: int, data: bytes, turn: int = turn, place: int = place) -> bytes:
                if at != turn:
                    return data
                return data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]

            dialler, listener = pair()
            run(dialler, listener, flip)
            # A flip in the last message can't reach the dialler, but the listener never trusts it.
            assert listener.done is None, (turn, place)


def test_a_dialler_that_finds_another_peer_never_reveals_itself() -> None:
    stranger = Identity.from_seed(bytes(32))
    dialler, listener = pair(expected=stranger.peer_id)
    error, _ = run(dialler, listener)
    assert isinstance(error, IdentityError)
    assert stranger.peer_id in str(error) and BOB.peer_id in str(error)
    assert dialler.data_to_send() == b"" and listener.done is None


def test_a_callers_own_check_runs_before_the_dialler_reveals_itself() -> None:
    def refuse(peer: str) -> None:
        raise IdentityError(f"not {peer}")

    dialler, listener = pair(check=refuse)
    error, _ = run(dialler, listener)
    assert isinstance(error, IdentityError) and listener.done is None


@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1)])
def test_different_major_versions_refuse_each_other_on_both_sides(mine: int, theirs: int) -> None:
    errors = run(
        Handshake("initiator", ALICE, "main", version=mine),
        Handshake("responder", BOB, "main", version=theirs),
    )
    for error, (ours, there) in zip(errors, ((mine, theirs), (theirs, mine)), strict=True):
        assert isinstance(error, VersionMismatch)
        assert (error.ours, error.theirs) == (ours, there)
        assert "update" in str(error)


def test_another_network_is_refused_on_both_sides_with_both_names() -> None:
    errors = run(Handshake("initiator", ALICE, "main"), Handshake("responder", BOB, "lab"))
    for error in errors:
        assert isinstance(error, HandshakeError)
        assert "'main'" in str(error) and "'lab'" in str(error)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 64, b"SSH-2.0-x\r\n", b"L!"]
)
def test_a_strange_program_is_told_apart_at_its_first_bytes_and_gets_no_answer(data: bytes) -> None:
    listener = Handshake("responder", BOB, "main")
    with pytest.raises(StrangeProgram):
        listener.receive(data)
    assert listener.data_to_send() == b""


def test_stated_sizes_beyond_the_bounds_are_refused_before_they_arrive() -> None:
    preamble = noise.Preamble(1, "main", noise.SUITES).encode()
    with pytest.raises(HandshakeError, match="a preamble of 65535 bytes"):
        Handshake("responder", BOB, "main").receive(preamble[:5] + b"\xff\xff")
    with pytest.raises(HandshakeError, match="a handshake message of 65535 bytes"):
        Handshake("responder", BOB, "main").receive(preamble + b"\xff\xff")


def test_a_message_that_is_too_short_for_its_keys_is_refused() -> None:
    preamble = noise.Preamble(1, "main", noise.SUITES).encode()
    with pytest.raises(HandshakeError, match="1 bytes too short"):
        Handshake("responder", BOB, "main").receive(preamble + b"\0\x1f" + bytes(31))


def test_a_payload_that_nobody_asked_for_is_refused() -> None:
    preamble = noise.Preamble(1, "main", noise.SUITES).encode()
    with pytest.raises(HandshakeError, match="carries a payload"):
        Handshake("responder", BOB, "main").receive(preamble + b"\0\x21" + bytes(33))


@pytest.mark.parametrize("size", [32, 95, 97])
def test_a_proof_of_another_size_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Handshake("responder", BOB, "main")
    monkeypatch.setattr(listener, "_identity", Talkative(size))
    error, _ = run(Handshake("initiator", ALICE, "main"), listener)
    assert isinstance(error, HandshakeError) and f"an identity proof of {size} bytes" in str(error)


class Talkative:
    """Proves itself with as many bytes as it is told to."""

    peer_id = BOB.peer_id

    def __init__(self, size: int) -> None:
        self._size = size

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        return bytes(max(self._size - 32, 0))


def test_a_handshake_that_failed_takes_nothing_more() -> None:
    listener = Handshake("responder", BOB, "main")
    for _ in range(2):
        with pytest.raises(HandshakeError):
            listener.receive(b"GET /")
    with pytest.raises(HandshakeError, match="failed before"):
        listener.receive(b"")


def test_nonces_that_are_used_up_are_refused() -> None:
    cipher = CipherState(bytes(32))
    cipher._nonce = noise.MAX_NONCE
    with pytest.raises(OverflowError, match="used up"):
        cipher.encrypt(b"")


def test_a_key_of_small_order_is_refused() -> None:
    preamble = noise.Preamble(1, "main", noise.SUITES).encode()
    with pytest.raises(HandshakeError, match="no key"):
        Handshake("responder", BOB, "main").receive(preamble + b"\0\x20" + bytes(32))


def test_a_proof_signed_for_another_handshake_is_worthless() -> None:
    """A middleman who relays the proof of a real peer inside its own handshake."""

    class Relay(Identity):
        def sign(self, domain: bytes, payload: bytes) -> bytes:
            return BOB.sign(domain, payload[:-32] + bytes(32))

    middleman = Relay.from_seed(bytes(32))
    middleman.peer_id = BOB.peer_id
    error, _ = run(Handshake("initiator", ALICE, "main"), Handshake("responder", middleman, "main"))
    assert isinstance(error, HandshakeError) and "doesn't hold the key" in str(error)


def test_both_ends_change_the_key_after_the_same_record() -> None:
    sender, receiver = CipherState(bytes(32), rekey_bytes=100), CipherState(bytes(32), rekey_bytes=100)
    without = CipherState(bytes(32))
    for number in range(20):
        sealed = sender.encrypt(b"x" * 30)
        assert receiver.decrypt(sealed) == b"x" * 30
        assert (sealed == without.encrypt(b"x" * 30)) is (number < 4)  # 4 records of 30 bytes, then a new key


def test_a_changed_or_repeated_record_is_not_decrypted() -> None:
    sender, receiver = CipherState(bytes(32)), CipherState(bytes(32))
    sealed = sender.encrypt(b"one")
    assert receiver.decrypt(sealed) == b"one"
    with pytest.raises(InvalidTag):
        receiver.decrypt(sealed)
