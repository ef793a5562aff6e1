"""What an identity and its network may cost: the books alone, and two connections that keep them. Virtual time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.addresses import Address
from swarm.errors import Flooded, StreamClosed
from swarm.flow import DATA, END, PING, RESET, WINDOW, Priority
from swarm.identity import Identity, PeerId
from swarm.link import Stream
from swarm.messages import Message, Step, Where
from swarm.quotas import DEFAULT_QUOTAS, MAX_ACCOUNTS, STREAM_BYTES, Account, Accounts, Quotas
from swarm.tensors import RawTensor
from swarm.transport import Transport
from swarm.wire import LAST, TOO_MANY, TOO_MUCH_HELD, Closed, MessageReceived, StreamReset
from tests.wire_pair import ALICE, Pair, connected, framed

SMALL = Quotas(control_per_s=10.0, control_burst=20.0, wasted_per_s=1000.0, wasted_burst=4000.0, strikes=5.0)


def account(accounts: Accounts, peer: str = "ada", group: str = "8.8.8.0/24", now: float = 0.0) -> Account:
    return Account(accounts, PeerId(peer), group, now)


# ---------------------------------------------------------------- the books


def test_an_identity_has_its_quota_and_a_group_four_times_that() -> None:
    accounts = Accounts(SMALL)
    sent = {}
    for peer in "abcdefgh":
        one = account(accounts, peer)
        sent[peer] = sum(one.control(0.0, answer=False) for _ in range(100))
    assert [sent[peer] for peer in "abcd"] == [20, 20, 20, 20]
    assert [sent[peer] for peer in "efgh"] == [0, 0, 0, 0], "an identity more must not be a quota more"
    assert account(accounts, "z", "9.9.9.0/24").control(0.0, answer=False)


def test_a_quota_is_for_all_connections_of_an_identity_and_outlives_them() -> None:
    accounts = Accounts(SMALL)
    for number in range(30):
        one = account(accounts, now=0.001 * number)
        assert one.control(0.001 * number, answer=False) is (number < 20)
        one.close()
    assert account(accounts, now=2.0).control(2.0, answer=False)


def test_answers_cost_less() -> None:
    one = account(Accounts(SMALL))
    allowed = sum(one.control(0.0, answer=True) for _ in range(1000))
    assert allowed == pytest.approx(20 * SMALL.answers, abs=1)


def test_books_are_bounded_and_those_in_use_are_kept() -> None:
    accounts = Accounts(SMALL)
    kept = account(accounts, "kept", "kept")
    assert sum(kept.control(0.0, answer=False) for _ in range(100)) == 20
    for number in range(2 * MAX_ACCOUNTS):
        account(accounts, f"p{number}", f"g{number}").close()
    assert len(accounts) <= MAX_ACCOUNTS + 2
    assert not account(accounts, "kept", "kept").control(0.0, answer=False)


def test_memory_is_an_only_users_until_another_group_wants_some() -> None:
    accounts = Accounts(replace(SMALL, held_bytes=1000))
    flooder, honest = account(accounts, "x", "x"), account(accounts, "h", "h")
    assert flooder.hold(1000)
    assert not flooder.hold(1), "more than there is"
    flooder.hold(-1)
    assert honest.hold(400), "its share is 500, though nothing is free"
    assert not flooder.hold(1), "it has more than its share now"
    flooder.hold(-700)
    assert flooder.hold(100)
    flooder.close()
    honest.close()
    assert accounts.held == 0


def test_the_loops_time_is_an_only_users_until_another_identity_is_connected() -> None:
    accounts = Accounts(DEFAULT_QUOTAS)
    busy, now = account(accounts, "x", "x"), 0.0
    for _ in range(100):
        now += 0.1
        assert busy.worked(now, 0.1) == 0.0
    other = account(accounts, "h", "h", now)
    waited = []
    for _ in range(200):
        wait_s = busy.worked(now, 0.003)
        waited.append(wait_s)
        now += 0.003 + wait_s
        assert other.worked(now, 0.0001) == 0.0
    share = 0.003 * 100 / (0.003 * 100 + sum(waited[100:]))
    assert share == pytest.approx(DEFAULT_QUOTAS.loop_share, rel=0.05)
    other.close()
    assert busy.worked(now, 0.1) == 0.0


def test_wasted_bytes_count_for_the_identity_and_for_its_group() -> None:
    accounts = Accounts(SMALL)
    wasted = {}
    for peer in "abcdef":
        one = account(accounts, peer)
        wasted[peer] = sum(one.wasted(0.0, 1000) for _ in range(100))
    assert [wasted[peer] for peer in "abcd"] == [4, 4, 4, 4]
    assert [wasted[peer] for peer in "ef"] == [0, 0]
    assert account(accounts, "z", "9.9.9.0/24").wasted(0.0, 4000)


def test_many_identities_of_a_group_never_have_more_than_half_of_the_loop() -> None:
    """Each stays within its own share, and all together take four fifths of the time."""
    accounts, now = Accounts(DEFAULT_QUOTAS), 0.0
    many = [account(accounts, peer, "x") for peer in "abcd"]
    other, waits = account(accounts, "h", "h"), [0.0]
    for _ in range(200):
        for one in many:
            now += 0.0025
            waits.append(one.worked(now, 0.002))
    assert max(waits) > 0.1
    assert other.worked(now, 0.002) == 0.0


# ---------------------------------------------------------------- at a connection


def counted(quotas: Quotas = SMALL) -> tuple[Pair, Accounts]:
    """b keeps books of what a sends."""
    pair, accounts = connected(), Accounts(quotas)
    pair.b._account = Account(accounts, ALICE.peer_id, "8.8.8.0/24", 0.0)
    return pair, accounts


def closed_with(pair: Pair) -> Closed | None:
    found = pair.events(pair.b, Closed)
    return found[0] if found else None


def test_control_messages_within_the_quota_are_answered_for_ever() -> None:
    pair, _ = counted()
    stream = pair.a.open_stream()
    for number in range(300):
        pair.now = number / SMALL.control_per_s
        pair.a.send(stream, Where(number))
        pair.carry(pair.a, pair.b)
        pair.b.data_to_send()
        assert len(pair.messages(pair.b)) == 1
        pair.take(pair.b)
    assert closed_with(pair) is None


@pytest.mark.parametrize("priority", list(Priority))
def test_a_flood_of_control_messages_costs_its_stream_whatever_priority_they_claim(priority: Priority) -> None:
    pair, _ = counted()
    other = pair.a.open_stream()
    pair.a.send(other, Where(0))
    pair.run()
    for number in range(25):
        pair.forge(DATA, LAST | priority << 1, 3, framed({"kind": "where", "epoch": number}))
    (reset,) = pair.events(pair.b, StreamReset)
    assert (reset.stream, TOO_MANY in reset.reason) == (3, True)
    assert closed_with(pair) is None
    pair.now = 10.0  # the other stream goes on
    pair.a.send(other, Where(1))
    pair.carry(pair.a, pair.b)
    assert [event.message for event in pair.events(pair.b, MessageReceived) if event.stream == other][-1] == Where(1)


def flood_of_messages(pair: Pair) -> None:
    for number in range(1, 200, 2):
        pair.forge(DATA, LAST, number, framed({"kind": "where", "epoch": 1}))


def flood_on_dead_streams(pair: Pair) -> None:
    pair.forge(RESET, 0, 1, b"over")
    for _ in range(100):
        pair.forge(DATA, LAST | Priority.BULK << 1, 1, bytes(1000))


@pytest.mark.parametrize(
    "flood",
    [
        flood_of_messages,
        flood_on_dead_streams,
        lambda pair: [pair.forge(PING, 0, 0, bytes(8)) for _ in range(100)],
        lambda pair: [pair.forge(77, 0, 0, b"") for _ in range(100)],
        lambda pair: [pair.forge(WINDOW, 0, 1, struct.pack(">I", 1)) for _ in range(100)],
        lambda pair: [pair.forge(END, 0, number, b"") for number in range(1, 200, 2)],
        lambda pair: [pair.forge(RESET, 0, number, b"") for number in range(1, 200, 2)],
    ],
    ids=["messages", "dead streams", "pings", "unknown frames", "windows", "ends", "resets"],
)
def test_whoever_goes_on_flooding_loses_the_connection_and_is_told_why(flood: Callable[[Pair], object]) -> None:
    pair, accounts = counted()
    flood(pair)
    closed = closed_with(pair)
    assert closed is not None and isinstance(closed.error, Flooded)
    pair.run()
    (told,) = pair.events(pair.a, Closed)
    assert "again and again" in told.reason
    assert accounts.held == 0


def test_pings_over_the_quota_arent_answered() -> None:
    pair, _ = counted(replace(SMALL, strikes=1000.0))
    pair.b.data_to_send()
    for _ in range(200):
        pair.forge(PING, 0, 0, bytes(8))
    assert len(pair.b._urgent) == SMALL.control_burst


def test_steps_are_no_control_messages() -> None:
    pair, _ = counted()
    stream = pair.a.open_stream()
    for position in range(200):
        step = Step({"hidden": RawTensor("uint8", (8,), bytes(8))}, epoch=1, position=position)
        pair.a.send(stream, step, Priority.DECODE)
        pair.run()
        pair.take(pair.b)
    assert closed_with(pair) is None and not pair.events(pair.b, StreamReset)


def test_what_is_held_for_a_network_beyond_its_share_costs_the_stream() -> None:
    pair, accounts = counted(replace(SMALL, held_bytes=300_000))
    Account(accounts, PeerId("other"), "9.9.9.0/24", 0.0).hold(1)
    tensor = RawTensor("uint8", (100_000,), bytes(100_000))
    for stream in (pair.a.open_stream(), pair.a.open_stream(), pair.a.open_stream(), pair.a.open_stream()):
        pair.a.send(stream, Step({"hidden": tensor}, epoch=1, position=0), Priority.PREFILL)
    pair.run()
    resets = pair.events(pair.b, StreamReset)
    assert resets and all(reset.reason == TOO_MUCH_HELD for reset in resets)
    assert accounts.held <= 300_000 and len(pair.messages(pair.b)) == 4 - len(resets)
    assert closed_with(pair) is None


def test_an_open_stream_counts_too() -> None:
    pair, accounts = counted()
    stream = pair.a.open_stream()
    pair.a.send(stream, Where(1))
    pair.run()
    assert accounts.held >= STREAM_BYTES
    pair.a.reset(stream, "done")
    pair.run()
    assert accounts.held == 0


def test_streams_beyond_the_share_arent_opened() -> None:
    pair, accounts = counted(replace(SMALL, held_bytes=10 * STREAM_BYTES, control_burst=1000.0))
    for number in range(1, 60, 2):
        pair.forge(DATA, Priority.BULK << 1, number, b"\x10\x00")
    assert 5 <= pair.b.streams <= 10
    assert accounts.held <= 10 * STREAM_BYTES


# ---------------------------------------------------------------- over sockets


async def test_a_flood_closes_the_connection_and_strikes_its_network() -> None:
    server = Transport(Identity.ephemeral(), quotas=replace(SMALL, strikes=2.0))
    client = Transport(Identity.ephemeral())
    struck: list[str] = []
    server._door.strike = lambda host, now: struck.append(host) or 1.0  # type: ignore[method-assign, func-returns-value]

    async def listen(stream: Stream, first: Message) -> None:
        while True:
            await stream.receive()

    server.handle(Where, listen)
    await server.listen("127.0.0.1", 0)
    async with asyncio.timeout(30):
        link = await client.dial(Address(None, "127.0.0.1", server.port or 0))
        while link.closed_reason is None:
            try:
                stream = link.open_stream()
                for _ in range(50):
                    stream.send_nowait(Where(1))
            except StreamClosed:
                pass
            await asyncio.sleep(0)
        assert "again and again" in link.closed_reason
        await link.gone.wait()
    assert struck == ["127.0.0.1"]
    await client.close()
    await server.close()


async def test_whoever_takes_more_than_its_share_of_the_loop_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = Transport(Identity.ephemeral()), Transport(Identity.ephemeral())
    waits: list[float] = []

    def worked(self: Account, now: float, seconds: float) -> float:
        waits.append(0.001 if len(waits) < 5 else 0.0)
        return waits[-1]

    monkeypatch.setattr(Account, "worked", worked)
    heard = asyncio.Event()

    async def listen(stream: Stream, first: Message) -> None:
        heard.set()

    server.handle(Where, listen)
    await server.listen("127.0.0.1", 0)
    async with asyncio.timeout(30):
        link = await client.dial(Address(None, "127.0.0.1", server.port or 0))
        await link.open_stream().send(Where(1))
        await heard.wait()
        await link.ping()
    assert len(waits) > 5
    await client.close()
    await server.close()
