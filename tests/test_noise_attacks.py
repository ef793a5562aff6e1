"""The handshake with somebody in between who may change, drop, add, reorder, repeat and replay everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from swarm import noise
from swarm.errors import FramingError, HandshakeError, SwarmError, VersionMismatch
from swarm.identity import Identity, PeerId, peer_id
from swarm.messages import Step
from swarm.noise import CipherState, Handshake, Preamble
from swarm.tensors import RawTensor
from swarm.wire import Closed, Connection, Priority
from tests.wire_pair import connected

ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(range(1, 33)))
STATIC_BYTES = 32


def dialler(seed: int = 7, **options: Any) -> Handshake:
    return Handshake("initiator", ALICE, "main", rng=random.Random(seed).randbytes, **options)


def listener(seed: int = 8, **options: Any) -> Handshake:
    return Handshake("responder", BOB, "main", rng=random.Random(seed).randbytes, **options)


class Recorded:
    """What an undisturbed handshake says: [dialler's first words, listener's answer, dialler's last]."""

    def __init__(self) -> None:
        one, other = dialler(), listener()
        first = one.data_to_send()
        other.receive(first)
        answer = other.data_to_send()
        one.receive(answer)
        last = one.data_to_send()
        other.receive(last)
        assert one.done is not None and other.done is not None
        self.said = [first, answer, last]


SAID = Recorded().said


def outcome(turn: int, data: bytes) -> Handshake:
    """Who hears `data` in place of what is said in `turn`. Nothing but typed errors comes out of it."""
    hearer = dialler() if turn == 1 else listener()
    if turn == 2:
        hearer.receive(SAID[0])
    try:
        hearer.receive(data)
    except SwarmError:
        with pytest.raises(HandshakeError):  # nothing mends it afterwards, not even the right words
            hearer.receive(SAID[turn])
        assert hearer.done is None
    return hearer


def finishes(turn: int, data: bytes) -> bool:
    """Whether anybody takes the handshake for finished: who hears the changed words, or who hears the answer to
    them. A dialler who hears what was meant for a listener is told apart by `turn`."""
    hearer = outcome(turn, data)
    if hearer.done is not None:
        return True
    if turn != 0:
        return False
    other = dialler()  # the listener's answer to a changed first message
    other.data_to_send()
    try:
        other.receive(hearer.data_to_send())
    except SwarmError:
        return False
    return other.done is not None


# ---------------------------------------------------------------- changed on its way


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_any_message_may_change(turn: int, bit: int) -> None:
    for place in range(len(SAID[turn])):
        data = bytearray(SAID[turn])
        data[place] ^= 1 << bit
        assert not finishes(turn, bytes(data)), (turn, place, bit)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_message_cut_short_anywhere_finishes_nothing(turn: int) -> None:
    for length in range(len(SAID[turn])):
        assert outcome(turn, SAID[turn][:length]).done is None, length


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("extra", [b"\0", b"\xff", b"\0\0"])
def test_no_byte_may_be_put_in_or_taken_out(turn: int, extra: bytes) -> None:
    whole = SAID[turn]
    for place in range(len(whole)):
        assert not finishes(turn, whole[:place] + extra + whole[place:]), place
        assert not finishes(turn, whole[:place] + whole[place + len(extra) :]), place


def test_bytes_behind_the_last_message_are_the_first_records_and_fail_as_such() -> None:
    hearer = outcome(2, SAID[2] + b"\0\x20" + bytes(32))
    assert hearer.done is not None and hearer.done.leftover == b"\0\x20" + bytes(32)
    connection = Connection("responder", BOB, "main", rng=random.Random(8).randbytes)
    connection.receive_data(SAID[0], 0.0)
    connection.receive_data(SAID[2] + b"\0\x20" + bytes(32), 0.0)
    closed = connection.events()[-1]
    assert isinstance(closed, Closed) and isinstance(closed.error, FramingError)


def test_a_connection_lost_in_mid_handshake_says_so() -> None:
    for length in (0, 1, 20, len(SAID[0])):
        connection = Connection("responder", BOB, "main", rng=random.Random(8).randbytes)
        connection.receive_data(SAID[0][:length], 0.0)
        connection.lost("the cable was pulled")
        closed = connection.events()[-1]
        assert isinstance(closed, Closed) and isinstance(closed.error, HandshakeError)


# ---------------------------------------------------------------- in another order, or said before


def framed_messages(data: bytes) -> list[bytes]:
    """The preamble, if there is one, and each message with its length."""
    parts = []
    if data.startswith(noise.MAGIC):
        size = 7 + int.from_bytes(data[5:7], "big")
        parts, data = [data[:size]], data[size:]
    while data:
        size = 2 + int.from_bytes(data[:2], "big")
        parts.append(data[:size])
        data = data[size:]
    return parts


PARTS = [part for said in SAID for part in framed_messages(said)]
NAMES = ("preamble 1", "message 1", "preamble 2", "message 2", "message 3")


def test_there_are_five_parts() -> None:
    assert len(PARTS) == len(NAMES) and [len(part) for part in PARTS[1::2]] == [34, 194]


@pytest.mark.parametrize("make", [dialler, listener])
def test_in_any_other_order_the_parts_finish_nothing(make: Callable[[], Handshake]) -> None:
    """Every sequence of up to four of the five parts, whoever said them, to either side."""
    right = {dialler: (2, 3), listener: (0, 1, 4)}[make]  # type: ignore[index]
    finished = []
    for count in (1, 2, 3, 4):
        for order in itertools.product(range(5), repeat=count):
            hearer = make()
            hearer.data_to_send()
            try:
                for part in order:
                    if hearer.done is None:
                        hearer.receive(PARTS[part])
            except SwarmError:
                continue
            if hearer.done is not None:
                finished.append([PARTS[part] for part in order[: len(right)]])
    assert finished and all(order == [PARTS[part] for part in right] for order in finished)


@pytest.mark.parametrize("make", [dialler, listener])
def test_who_hears_its_own_words_finishes_nothing(make: Callable[[], Handshake]) -> None:
    """Reflection: the same identity on both ends of the wire, in the same role."""
    hearer, heard = make(), b""
    hearer.receive(SAID[0] if make is listener else SAID[1][: len(PARTS[2])])
    for _ in range(4):
        heard = hearer.data_to_send() or heard
        try:
            hearer.receive(heard)
        except SwarmError:
            break
    assert hearer.done is None


def test_a_recorded_handshake_convinces_nobody_else() -> None:
    """Replay: another listener has another ephemeral key, even with the same identity and static key."""
    again = listener(seed=99)
    again.receive(SAID[0])
    with pytest.raises(HandshakeError, match="changed on its way"):
        again.receive(SAID[2])
    with pytest.raises(HandshakeError, match="changed on its way"):
        dialler(seed=99).receive(SAID[1])


# ---------------------------------------------------------------- somebody else's proof


class Impostor(Identity):
    """Shows a proof that somebody else made, in whatever way `steal` makes it."""

    def __init__(self, shown: PeerId, steal: Callable[[bytes], bytes]) -> None:
        super().__init__(Identity.from_seed(bytes(32))._key)
        self.peer_id, self._steal = shown, steal

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        assert domain == noise.PROOF_DOMAIN
        return self._steal(payload)


def meet(one: Handshake, other: Handshake) -> tuple[SwarmError | None, SwarmError | None]:
    errors: list[SwarmError | None] = [None, None]
    sides = (one, other)
    for turn in range(6):
        data = sides[turn % 2].data_to_send()
        hearer = 1 - turn % 2
        if data and errors[hearer] is None and sides[hearer].done is None:
            try:
                sides[hearer].receive(data)
            except SwarmError as error:
                errors[hearer] = error
    return errors[0], errors[1]


STOLEN: dict[str, Callable[[bytes], bytes]] = {
    "made for another static key": lambda payload: BOB.sign(
        noise.PROOF_DOMAIN, payload[: -32 - STATIC_BYTES] + bytes(STATIC_BYTES) + payload[-32:]
    ),
    "made for another handshake": lambda payload: BOB.sign(noise.PROOF_DOMAIN, payload[:-32] + bytes(32)),
    "made in the other role": lambda payload: BOB.sign(
        noise.PROOF_DOMAIN, payload.replace(b"responder", b"initiator")
    ),
    "made for another purpose": lambda payload: BOB.sign(b"record", payload),
    "made with another key": lambda payload: ALICE.sign(noise.PROOF_DOMAIN, payload),
    "nothing": lambda _: bytes(64),
}


@pytest.mark.parametrize("steal", STOLEN.values(), ids=STOLEN)
def test_nobody_passes_for_another_with_a_proof(steal: Callable[[bytes], bytes]) -> None:
    impostor = Impostor(BOB.peer_id, steal)
    error, _ = meet(dialler(), Handshake("responder", impostor, "main"))
    assert isinstance(error, HandshakeError) and "doesn't hold the key" in str(error)


def test_a_proof_is_over_role_static_key_and_handshake_hash() -> None:
    """Each is enough alone against some middleman; all three are signed, in the order of the module's header."""
    signed: list[bytes] = []

    def note(payload: bytes) -> bytes:
        signed.append(payload)
        return BOB.sign(noise.PROOF_DOMAIN, payload)

    rng = random.Random(8)
    static = noise.X25519PrivateKey.from_private_bytes(rng.randbytes(32))
    other = Handshake("responder", Impostor(BOB.peer_id, note), "main", rng=random.Random(8).randbytes)
    hashes: list[bytes] = []
    one = dialler()
    other.receive(one.data_to_send())
    inner = one._verified

    def spy(handshake_hash: bytes, theirs: bytes, sealed: bytes) -> PeerId:
        hashes.append(handshake_hash)
        assert theirs == noise.public_bytes(static)
        return inner(handshake_hash, theirs, sealed)

    one._verified = spy  # type: ignore[method-assign]
    one.receive(other.data_to_send())
    assert signed == [b"responder\0" + noise.public_bytes(static) + hashes[0]]


def test_the_impostor_of_these_tests_does_pass_where_the_proof_is_the_right_one() -> None:
    whole = Impostor(BOB.peer_id, lambda payload: BOB.sign(noise.PROOF_DOMAIN, payload))
    assert meet(dialler(), Handshake("responder", whole, "main")) == (None, None)


def test_a_key_of_small_order_as_identity_proves_nothing() -> None:
    """With such a public key some signatures verify for everything: whoever shows one is refused."""
    always_good = b"\x01" + bytes(63)  # S = 0 and R the neutral point, under the neutral point as a key
    for key in (bytes(32), b"\x01" + bytes(31), b"\x01" + bytes(30) + b"\x80", b"\xec" + b"\xff" * 30 + b"\x7f"):
        impostor = Impostor(peer_id(key), lambda _: always_good)
        error, _ = meet(dialler(), Handshake("responder", impostor, "main"))
        assert isinstance(error, HandshakeError) and "doesn't hold the key" in str(error)


# ---------------------------------------------------------------- downgraded


@pytest.mark.parametrize("side", [0, 1])
def test_a_shortened_or_extended_list_of_suites_is_noticed(side: int) -> None:
    """Who offers more than this release knows can't be talked down to it by somebody in between."""
    mine = Preamble(1, "main", noise.SUITES).encode()
    assert SAID[side].startswith(mine)
    for suites in (("Noise_XX_25519_ChaChaPoly_SHA256", *noise.SUITES), (*noise.SUITES, *noise.SUITES)):
        changed = Preamble(1, "main", suites).encode()
        assert not finishes(side, changed + SAID[side][len(mine) :])


def test_no_common_suite_is_refused_with_both_lists() -> None:
    theirs = Preamble(1, "main", ("Noise_XX_25519_ChaChaPoly_SHA256",)).encode()
    with pytest.raises(HandshakeError, match="AESGCM_SHA256 here, Noise_XX_25519_ChaChaPoly_SHA256 there"):
        listener().receive(theirs)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_major_version_is_named_beside_ours_whatever_follows_it(version: int) -> None:
    with pytest.raises(VersionMismatch) as caught:
        listener().receive(noise.MAGIC + bytes([version]) + b"\xff\xff")
    assert (caught.value.ours, caught.value.theirs) == (1, version)
    assert f"protocol 1 here, {version} there" in str(caught.value) and "update" in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"\x05main", b"\x04main", b"\x04main\x02\x01x", b"\x04\xff\xff\xff\xff\x00"])
def test_a_malformed_preamble_is_refused(body: bytes) -> None:
    with pytest.raises(HandshakeError, match="malformed"):
        listener().receive(noise.MAGIC + b"\x01" + len(body).to_bytes(2, "big") + body)


def test_what_a_later_minor_version_adds_to_its_preamble_is_ignored_and_yet_protected() -> None:
    class Later(Preamble):
        def encode(self) -> bytes:
            body = super().encode()[7:] + b"something new"
            return noise.MAGIC + b"\x01" + len(body).to_bytes(2, "big") + body

    one, other = dialler(), listener()
    one._ours = Later(1, "main", noise.SUITES)
    one._out[:] = one._ours.encode() + one._out[len(PARTS[0]) :]
    assert meet(one, other) == (None, None)
    assert one.done is not None and other.done is not None


# ---------------------------------------------------------------- keys and nonces


def test_nobody_can_name_a_nonce() -> None:
    """It is by construction: neither making a cipher nor using it takes one, and there is no way back."""
    import inspect

    for function in (CipherState.__init__, CipherState.encrypt, CipherState.decrypt, CipherState.rekey):
        assert not {name for name in inspect.signature(function).parameters if "nonce" in name or "counter" in name}
    public = {name for name in vars(CipherState) if not name.startswith("_")}
    assert public == {"encrypt", "decrypt", "rekey"}


def test_every_use_takes_the_next_nonce_even_one_that_fails() -> None:
    cipher = CipherState(bytes(32), rekey_bytes=100)
    used: list[bytes] = []
    inner = cipher._next_nonce

    def spy() -> bytes:
        used.append(inner())
        return used[-1]

    cipher._next_nonce = spy  # type: ignore[method-assign]
    for _ in range(20):
        cipher.encrypt(b"x" * 30)  # changes the key five times on the way
        with pytest.raises(Exception):  # noqa: B017 - whatever the library raises
            cipher.decrypt(bytes(40))
        with pytest.raises(TypeError):
            cipher.encrypt("no bytes")  # type: ignore[arg-type]
    assert used == [bytes(4) + number.to_bytes(8, "big") for number in range(60)]


def test_the_last_nonce_is_refused_for_ever() -> None:
    cipher = CipherState(bytes(32))
    cipher._nonce = noise.MAX_NONCE - 1
    cipher.encrypt(b"the last one")
    for _ in range(3):
        with pytest.raises(OverflowError, match="used up"):
            cipher.encrypt(b"one more")
        with pytest.raises(OverflowError, match="used up"):
            cipher.decrypt(bytes(32))


def test_the_key_changes_when_a_gibibyte_has_passed_and_not_before() -> None:
    assert noise.REKEY_BYTES == 1024**3
    for passed, size, changes in (
        (1024**3 - 65_519 - 1, 65_519, False),
        (1024**3 - 65_519, 65_519, True),
        (1024**3 - 1, 1, True),
        (1024**3 - 1, 0, False),
    ):
        cipher = CipherState(bytes(32))
        cipher._bytes, before = passed, cipher._aead
        cipher.encrypt(bytes(size))
        assert (cipher._aead is not before) is changes, (passed, size)
        assert cipher._bytes == (0 if changes else passed + size)


def test_a_finished_handshake_gives_ciphers_that_change_their_keys_at_a_gibibyte() -> None:
    done = outcome(2, SAID[2]).done
    assert done is not None
    for cipher in (done.sender, done.receiver):
        assert cipher._rekey_bytes == 1024**3 and cipher._nonce == 0 and cipher._bytes == 0


def step(size: int, position: int = 0) -> Step:
    data = random.Random(position).randbytes(size)
    return Step({"hidden": RawTensor("uint8", (size,), data)}, epoch=1, position=position)


def test_keys_change_in_the_middle_of_a_transfer_in_both_directions() -> None:
    pair = connected()
    ciphers = [pair.a._sender, pair.a._receiver, pair.b._sender, pair.b._receiver]
    before = [cipher._aead for cipher in ciphers]
    for cipher in ciphers:
        cipher._rekey_bytes = 100_000  # of a message of 900,000: nine times in one message
    there, back = pair.a.open_stream(), pair.b.open_stream()
    for round_number in range(3):
        pair.a.send(there, step(900_000, round_number), Priority.BULK)
        pair.b.send(back, step(900_000, round_number), Priority.BULK)
        pair.run()
        pair.take(pair.a), pair.take(pair.b)
    assert all(cipher._aead is not old for cipher, old in zip(ciphers, before, strict=True))
    assert not pair.events(pair.a, Closed) and not pair.events(pair.b, Closed)


def test_what_passes_before_and_after_a_change_of_keys_is_the_same_text() -> None:
    pair = connected()
    for cipher in (pair.a._sender, pair.b._receiver):
        cipher._rekey_bytes = 50_000
    stream = pair.a.open_stream()
    for position in range(10):
        pair.a.send(stream, step(20_000, position), Priority.DECODE)
    got = pair.run().messages(pair.b)
    expected = [random.Random(position).randbytes(20_000) for position in range(10)]
    assert [bytes(one.tensors["hidden"].data) for one in got] == expected  # type: ignore[attr-defined]


def test_a_side_that_changes_its_key_alone_is_cut() -> None:
    pair = connected()
    pair.a._sender.rekey()
    stream = pair.a.open_stream()
    pair.a.send(stream, step(100), Priority.DECODE)
    pair.run()
    (closed,) = pair.events(pair.b, Closed)
    assert isinstance(closed.error, FramingError)



