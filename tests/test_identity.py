"""Keys that are nobody's, by the arithmetic of the curve (RFC 8032, section 5.1)."""

from __future__ import annotations

import pytest

from swarm.identity import _SMALL_ORDER, Identity, peer_id, verify

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]
NEUTRAL: Point = (0, 1)


def add(a: Point, b: Point) -> Point:
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def decode(key: bytes) -> list[Point]:
    """Both points that have this y, whichever the sign bit means; the encoding may exceed P."""
    y = int.from_bytes(key, "little") % (1 << 255) % P
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    assert (x * x - square) % P == 0, "a point of the curve"
    return [(x, y), (-x % P, y)]


def test_the_keys_that_are_refused_are_those_of_small_order() -> None:
    for key in _SMALL_ORDER:
        for point in decode(key):
            eightfold = point
            for _ in range(3):
                eightfold = add(eightfold, eightfold)
            assert eightfold == NEUTRAL, key.hex()


def test_all_points_of_small_order_are_among_them() -> None:
    """Eight there are; they are the multiples of one of order 8, and a y may also be written as y + P."""
    one = decode(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"))[0]
    points, at = set(), NEUTRAL
    for _ in range(8):
        points.add(at)
        at = add(at, one)
    assert len(points) == 8 and at == NEUTRAL
    written = {y + more for _, y in points for more in (0, P) if y + more < 1 << 255}
    assert {y.to_bytes(32, "little") for y in written} == set(_SMALL_ORDER)


@pytest.mark.parametrize("sign", [0, 0x80])
def test_a_key_that_is_nobodys_signs_nothing(sign: int) -> None:
    signatures = [key[:31] + bytes([key[31] | top]) + bytes(32) for key in _SMALL_ORDER for top in (0, 0x80)]
    for key in _SMALL_ORDER:
        shown = peer_id(key[:31] + bytes([key[31] | sign]))
        for number in range(16):  # with the order's chance such a signature fits a message by luck
            assert not any(verify(shown, b"record", bytes([number]), signature) for signature in signatures)


def test_an_ordinary_key_does_sign() -> None:
    alice = Identity.from_seed(bytes(32))
    assert verify(alice.peer_id, b"record", b"text", alice.sign(b"record", b"text"))
    assert not verify(alice.peer_id, b"other", b"text", alice.sign(b"record", b"text"))
