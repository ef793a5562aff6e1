"""Whatever a hostile client or hop says, the stream it says it on dies with a reason and nobody else notices.

Each attack runs while an honest client's answer is written by the same peers; at the end its text is compared with
transformers'. The table of fields is made from the messages themselves, so that a new field is attacked too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from peer.server import HopRun
from routing.spans import Span
from swarm import codecs, messages
from swarm.addresses import Address
from swarm.buckets import BucketTable
from swarm.errors import MessageError, StreamClosed, Unreachable
from swarm.flow import DATA, Priority
from swarm.generation import Generation
from swarm.identity import Identity, PeerId
from swarm.link import Link, Stream
from swarm.messages import (
    Close,
    Credit,
    Draining,
    Extend,
    Extended,
    Fault,
    HopRef,
    Message,
    Opened,
    Prepare,
    Prepared,
    RefusedMessage,
    Renew,
    Resume,
    Sampling,
    Step,
    StepsLink,
    Tokens,
    TokensLink,
    Unknown,
    Unsupported,
    Where,
    WhereIs,
    Working,
    encode,
)
from swarm.packing import pack
from swarm.records import open_descriptor, sign_record
from swarm.tensors import RawTensor, ids_tensor
from tests.stranger import Stranger, hidden, open_message, ref, within
from tests.tiny_swarm import CONTEXT, PATIENT, Tiny, TinySwarm

NOBODY = Identity.from_seed(bytes(32)).peer_id
SESSION = bytes(16)


LONGEST = 160


@functools.cache
def text_of(tiny: Tiny) -> list[int]:
    return tiny.oracle.greedy(tiny.oracle.chat_ids("Hello"), LONGEST)


@asynccontextmanager
async def honest(tiny: Tiny, chain: str = "three", tokens: int = 80) -> AsyncIterator[Generation]:
    """An answer that is being written meanwhile, checked at the end: its text, and that it was never repaired."""
    right = text_of(tiny)[:tokens]
    async with tiny.client(chain=chain) as client:
        answer = client.stream("Hello", max_tokens=tokens)
        await within(anext(answer))
        yield answer
        async for _ in answer:
            pass
        assert answer.result is not None
        assert list(answer.result.token_ids) == right and answer.repairs == ()


async def goes_on(answer: Generation) -> None:
    """The honest answer gets its next piece, unless it is done already."""
    if not answer.over:
        await within(anext(answer))


@pytest.fixture
async def stranger(tiny: Tiny) -> AsyncIterator[Stranger]:
    """With its connections to a, b and c, which must all be there at the end: no attack costs more than its stream."""
    made = Stranger(tiny.swarm)
    links = {name: await made.link(name) for name in "abc"}
    yield made
    assert [name for name, link in links.items() if link.closed_reason is not None] == []
    await made.close()
    for name in ("a", "b", "c", "one"):
        tiny.swarm.evict(name)  # what it had opened itself
    await tiny.swarm.emptied()


# ---------------------------------------------------------------- each field of each message

GOOD = {
    "open": lambda peers: open_message(peers, "a", SESSION),
    "prepare": lambda peers: Prepare(SESSION, 1, Span(0, 2), None, None, ref(peers, "a"), ref(peers, "a")),
    "resume": lambda peers: Resume(1, 0, 0, 0, ids=ids_tensor([1]), sampling=Sampling()),
    "credit": lambda peers: Credit(1, 9, 0),
    "where": lambda peers: Where(1),
    "renew": lambda peers: Renew(1),
    "extend": lambda peers: Extend(1, 9),
    "close": lambda peers: Close(1),
    "steps-link": lambda peers: StepsLink(NOBODY, SESSION, 2, 1),
    "tokens-link": lambda peers: TokensLink(NOBODY, SESSION, 0, 1),
    "step": lambda peers: Step(hidden(1), 1, 0, 0),
    "tokens": lambda peers: Tokens(1, 0, ids=ids_tensor([1])),
    "get-files": lambda peers: messages.GetFiles(bytes(32)),
    "dial-back": lambda peers: messages.DialBack(("127.0.0.1:1",)),
    "gossip-hello": lambda peers: messages.GossipHello(True),
    "subscribe": lambda peers: messages.Subscribe(None),
    "offer": lambda peers: messages.Offer((), ()),
    "ask": lambda peers: messages.Ask((), ()),
    "delta": lambda peers: messages.Delta(()),
    "digest": lambda peers: messages.Digest((bytes(8),)),
}
WRONG: tuple[Any, ...] = (
    None, True, -1, 1 << 40, 1 << 63, 1.5, 1e300, math.nan, "", "x" * 600, b"", bytes(7), bytes(3000), [], [-1], [5, 3],
    [[]], {}, {"peer": b""},
)  # fmt: skip


def wrong_maps(good: Message) -> Iterator[tuple[str, dict[str, Any], dict[str, RawTensor]]]:
    """(field, map, tensors): the message with one field missing or replaced by what it can't be."""
    values, tensors = encode(good)
    for field in [name for name in values if name != "kind"]:
        changed: list[dict[str, Any]] = [{k: v for k, v in values.items() if k != field}]
        changed += [{**values, field: wrong} for wrong in WRONG]
        for one in changed:
            try:
                messages.decode(one, tensors)
            except MessageError:
                yield field, one, tensors


def test_every_kind_that_a_peer_takes_is_in_the_table() -> None:
    """The rest are answers, which nobody asked a stranger for, or open nothing."""
    answers = {
        "opened", "prepared", "refused", "unknown", "whereis", "working", "extended", "fault", "drain", "files",
        "dialled-back", "unsupported", "model-list",
    }  # fmt: skip
    assert set(GOOD) | answers == set(messages.REGISTERED) and not set(GOOD) & answers


async def test_each_wrong_field_of_each_message_costs_its_stream_and_nothing_else(
    tiny: Tiny, stranger: Stranger
) -> None:
    attacks = 0
    async with honest(tiny, tokens=LONGEST) as answer:
        for kind, make in GOOD.items():
            for field, values, tensors in wrong_maps(make(tiny.swarm)):
                reason = await stranger.end_of_raw("a", values, tensors, Priority.PREFILL)
                name = type(make(tiny.swarm)).__name__
                assert f"{name}.{field}" in reason, f"{kind}.{field} = {values.get(field)!r}: {reason}"
                attacks += 1
            await goes_on(answer)
    assert attacks > 300


# ---------------------------------------------------------------- what is well-formed and wrong

Attack = Callable[[Stranger, PeerId, bytes], Any]
"""The stranger, the honest client and its running session -> what happened."""


def session(number: int) -> bytes:
    return number.to_bytes(16, "big")


def opening(name: str, expected: str, number: int, **changes: Callable[[TinySwarm], Any]) -> tuple[str, Attack]:
    """An `Open` with these fields, of which the reason or the refusal must say `expected`."""

    async def attack(stranger: Stranger, client: PeerId, running: bytes) -> str:
        values = {field: make(stranger.peers) for field, make in changes.items()}
        stream = await stranger.say(name, open_message(stranger.peers, name, session(number), **values))
        try:
            answer = await within(stream.receive())
        except StreamClosed as closed:
            return closed.reason
        assert isinstance(answer, RefusedMessage), answer
        return answer.reason

    return expected, attack


def resuming(expected: str, number: int, *said: Message) -> tuple[str, Attack]:
    """Behind a good `Open` of the whole model, which is on one peer."""

    async def attack(stranger: Stranger, client: PeerId, running: bytes) -> str:
        stream = await stranger.say("one", open_message(stranger.peers, "one", session(number)))
        assert isinstance(await within(stream.receive()), Opened)
        for message in said:
            await stream.send(message)
        return await stranger.why_ended(stream)

    return expected, attack


def to_others(expected: str, name: str, make: Callable[[PeerId, bytes], list[Message]]) -> tuple[str, Attack]:
    """On a stream of its own, about the session of somebody else."""

    async def attack(stranger: Stranger, client: PeerId, running: bytes) -> str:
        return await stranger.end(name, *make(client, running))

    return expected, attack


def stepping(expected: str, number: int, step: Step, epoch: int = 1) -> tuple[str, Attack]:
    """To a hop that is told to take steps from the stranger."""

    async def attack(stranger: Stranger, client: PeerId, running: bytes) -> str:
        control = await stranger.chained(session(number))
        reason = await stranger.end("b", *stranger.steps(session(number), step, epoch=epoch))
        control.reset("done")
        return reason

    return expected, attack


def drawing(expected: str, number: int, *said: Message) -> tuple[str, Attack]:
    """To a first hop that is told to take tokens from the stranger."""

    async def attack(stranger: Stranger, client: PeerId, running: bytes) -> str:
        control = await stranger.last(session(number))
        reason = await stranger.end("a", stranger.tokens_link(session(number)), *said)
        control.reset("done")
        return reason

    return expected, attack


def ids(*values: int) -> RawTensor:
    return ids_tensor(values)


def typed(dtype: str, *shape: int) -> RawTensor:
    return RawTensor(dtype, shape, bytes(math.prod(shape) * {"int32": 4, "int64": 8, "float32": 4}[dtype]))


def resume(**changes: Any) -> Resume:
    return dataclasses.replace(Resume(1, 0, 0, 0, ids=ids(1), credit=9, limit=9), **changes)


def liar(peers: TinySwarm) -> HopRef:
    """A descriptor that somebody else signed."""
    return HopRef(NOBODY, 2, ref(peers, "b").descriptor)


def of_other_type(peers: TinySwarm) -> HopRef:
    """It serves what b serves, but takes other numbers."""
    signer = Identity.from_seed(bytes([1]) * 32)
    served = open_descriptor(ref(peers, "b").descriptor)
    mine = dataclasses.replace(served, peer=signer.peer_id, numerics="cuda/bfloat16/none/0")
    return HopRef(signer.peer_id, 2, sign_record(signer, mine))


def other_start(name: str, start: int) -> Callable[[TinySwarm], HopRef]:
    return lambda peers: ref(peers, name, start)


LONG = 1 << 23
LAST_SEED = (1 << 63) - 1
WELL_FORMED: dict[str, tuple[str, Attack]] = {
    "open: another model": opening("a", "another model", 10, fingerprint=lambda peers: bytes(32)),
    "open: layers of others": opening("b", "aren't served here", 11, span=lambda peers: Span(0, 6)),
    "open: more layers than there are": opening("a", "aren't served here", 12, span=lambda peers: Span(0, 4000)),
    "open: more than the context": opening("a", "beyond the context", 13, reserve=lambda peers: CONTEXT + 1),
    "open: no positions": opening("a", "impossible chain", 14, reserve=lambda peers: 0),
    "open: first, with another before it": opening("a", "impossible chain", 15, previous=other_start("b", 2)),
    "open: in the middle, as the first": opening("b", "impossible chain", 16),
    "open: last, but another is": opening("a", "impossible chain", 17, last=other_start("c", 4)),
    "open: first, but another is": opening("a", "impossible chain", 18, first=other_start("b", 2)),
    "open: a gap behind it": opening("a", "impossible chain", 19, next=other_start("c", 4), last=other_start("c", 4)),
    "open: next by a descriptor of another": opening("a", "isn't signed by that peer", 20, next=liar, last=liar),
    "open: next without a descriptor": opening(
        "a", "isn't msgpack", 21, next=lambda peers: HopRef(NOBODY, 2, b""), last=lambda peers: HopRef(NOBODY, 2, b"")
    ),
    "open: next doesn't serve that layer": opening(
        "a", "doesn't serve layer 2", 22, next=other_start("c", 2), last=other_start("c", 2)
    ),
    "open: next takes another type": opening(
        "a", "as bfloat16, here they are float32", 23, next=of_other_type, last=of_other_type
    ),
    "resume: too far": resuming("doesn't fit", 30, resume(resume_at=70, ids=ids(*[1] * 71), limit=80)),
    "resume: more than it has": resuming("doesn't fit", 31, resume(have=1, resume_at=1, ids=ids(1, 1))),
    "resume: owes what isn't there": resuming("doesn't fit", 32, resume(next_has=5)),
    "resume: ids from nowhere": resuming("doesn't fit", 33, resume(ids_from=7)),
    "resume: no ids": resuming("doesn't fit", 34, resume(ids=None)),
    "resume: more ids than reserved": resuming("doesn't fit", 35, resume(ids=ids(*[1] * 65))),
    "resume: an id beyond the vocabulary": resuming("beyond the vocabulary", 36, resume(ids=ids(1 << 20))),
    "resume: a negative id": resuming("negative token id", 37, resume(ids=RawTensor("int32", (1,), b"\xff" * 4))),
    "resume: ids as int64": resuming("int32 [n]", 38, resume(ids=typed("int64", 1))),
    "resume: ids in two dimensions": resuming("int32 [n]", 39, resume(ids=typed("int32", 1, 1))),
    "resume: biases without ids": resuming("biases of", 40, resume(bias_ids=ids(1, 2), bias=typed("float32", 1))),
    "another session on the same stream": (
        "one hop of one session",
        lambda stranger, client, running: stranger.end(
            "one", open_message(stranger.peers, "one", session(42)), open_message(stranger.peers, "one", session(43))
        ),
    ),
    "steps for a session of somebody else": to_others(
        "another hop there", "b", lambda client, running: [StepsLink(client, running, 2, 1), Step(hidden(1), 1, 0, 0)]
    ),
    "steps for a first hop": to_others(
        "another hop there", "a", lambda client, running: [StepsLink(client, running, 0, 1), Step(hidden(1), 1, 0, 0)]
    ),
    "tokens for a session of somebody else": to_others(
        "another hop there", "a", lambda client, running: [TokensLink(client, running, 0, 1), Tokens(1, 0, ids=ids(1))]
    ),
    "tokens for a hop in the middle": to_others(
        "another hop there", "b", lambda client, running: [TokensLink(client, running, 2, 1), Tokens(1, 0, ids=ids(1))]
    ),
    "steps of an epoch that is over": to_others(
        "ended it", "b", lambda client, running: [StepsLink(client, running, 2, 0), Step(hidden(1), 0, 0, 0)]
    ),
    "steps for no session": to_others(
        "no such session", "b", lambda client, running: [StepsLink(client, SESSION, 2, 1), Step(hidden(1), 1, 0, 0)]
    ),
    "steps for no layer": to_others(
        "no such session", "b", lambda client, running: [StepsLink(client, running, 3, 1), Step(hidden(1), 1, 0, 0)]
    ),
    "step: of another type": stepping("float32 [n, 32]", 50, Step(hidden(1, dtype="int32"), 1, 0, 0)),
    "step: too narrow": stepping("got [1, 31]", 51, Step(hidden(1, width=31), 1, 0, 0)),
    "step: too wide": stepping("got [1, 33]", 52, Step(hidden(1, width=33), 1, 0, 0)),
    "step: too long": stepping("got [2049, 32]", 53, Step(hidden(2049), 1, 0, 0)),
    "step: empty": stepping("got [0, 32]", 54, Step(hidden(0), 1, 0, 0)),
    "step: in one dimension": stepping("got [32]", 55, Step({"hidden": typed("float32", 32)}, 1, 0, 0)),
    "step: of nothing": stepping("carries `hidden`", 56, Step({}, 1, 0, 0)),
    "step: of another name": stepping("carries `hidden`", 57, Step({"other": typed("float32", 1, 32)}, 1, 0, 0)),
    "step: of another epoch": stepping("a Step of epoch 1", 58, Step(hidden(1), 2, 0, 0)),
    "tokens: of another epoch": drawing("Tokens of epoch 1", 60, Tokens(2, 1, ids=ids(1))),
    "tokens: an id beyond the vocabulary": drawing("beyond the vocabulary", 61, Tokens(1, 1, ids=ids(1 << 20))),
    "tokens: a negative id": drawing("negative token id", 62, Tokens(1, 1, ids=RawTensor("int32", (1,), b"\xff" * 4))),
    "resume: more ids than the context has": resuming("this stream takes", 44, resume(ids=ids(*[1] * 20_000))),
    "tokens: more than a message may have": drawing("513 ids in one", 64, Tokens(1, 1, ids=ids(*[1] * 513))),
    "tokens: a step instead": drawing("got Step", 63, Step(hidden(1), 1, 0, 0)),
}  # fmt: skip
NEVER_ASKED_FOR: tuple[Message, ...] = (
    Opened(1), Prepared(1, 3), RefusedMessage(1, "no"), Unknown(1), Tokens(1, 0, ids=ids(1)), Working(1, 3),
    Extended(1, 9), Fault(1, "step", "no"), Draining(1, 3.0), WhereIs(1, True, 0, 0, False, 0, 0), Unsupported("open"),
    messages.DialledBack(()), messages.Files({}), messages.ModelList(()), Step(hidden(1), 1, 0, 0),
)  # fmt: skip
WELL_FORMED |= {f"answer: {one.kind}": resuming("not for a hop", 70 + n, one) for n, one in enumerate(NEVER_ASKED_FOR)}


async def test_each_well_formed_attack_costs_its_stream_and_nothing_else(tiny: Tiny, stranger: Stranger) -> None:
    found = {}
    async with honest(tiny, tokens=LONGEST) as answer:
        key = next(iter(tiny.swarm.peers["b"].server.runs))
        for what, (expected, attack) in WELL_FORMED.items():
            found[what] = (expected, await attack(stranger, key.client, key.session))
            await goes_on(answer)
            if len(found) % 20 == 0:  # as sessions that are given up would be
                for name in ("a", "b", "one"):
                    tiny.swarm.call(lambda name=name: evict_of(tiny.swarm, name, stranger.me))  # type: ignore[misc]
    assert {what: pair for what, pair in found.items() if pair[0] not in pair[1]} == {}


def evict_of(peers: TinySwarm, name: str, client: PeerId) -> None:
    for run in [run for run in peers.peers[name].server.runs.values() if run.key.client == client]:
        run.evict()


async def test_what_opens_nothing_is_answered_so_and_nothing_is_learnt_of_other_sessions(
    tiny: Tiny, stranger: Stranger
) -> None:
    async with honest(tiny) as answer:
        running = next(iter(tiny.swarm.peers["a"].server.runs)).session
        a = ref(tiny.swarm, "a")
        assert await stranger.answer("a", Prepare(running, 99, Span(0, 2), None, None, a, a)) == Unknown(99)
        for first in (Credit(1, 1000, 0), Where(1), Renew(1), Close(1), Extend(1, 9), resume(), *NEVER_ASKED_FOR):
            assert await stranger.answer("a", first) == Unsupported(first.kind)
            await goes_on(answer)
        late = await stranger.say("a", Prepare(session(1), 3, Span(0, 2), None, None, a, a))
        for message, epoch in ((None, 3), (resume(), 1), (Renew(7), 7), (Where(8), 8), (Extend(9, 9), 9)):
            if message is not None:
                await late.send(message)
            assert await within(late.receive()) == Unknown(epoch)


async def test_steps_that_are_merely_old_or_early_are_dropped_and_the_chain_goes_on(
    tiny: Tiny, stranger: Stranger
) -> None:
    """Positions and rounds that don't follow, replays out of place: none of them is run."""
    async with honest(tiny) as answer:
        control = await stranger.chained(session(1))
        stray = [
            Step(hidden(1), 1, 1, 0), Step(hidden(1), 1, 9, 3), Step(hidden(1), 1, 0, 5), Step(hidden(1), 1, None, 0),
            Step(hidden(1), 1, None, LONG), Step(hidden(1), 1, 1 << 31, 0), Step(hidden(1), 1, 0, LONG),
        ]  # fmt: skip
        steps = await stranger.say("b", *stranger.steps(session(1), *stray))
        await steps.link.ping()
        await control.send(Where(1, 5))
        where = await within(control.receive())
        assert isinstance(where, WhereIs) and (where.round, where.length, where.finished) == (-1, 0, 0)
        early = await stranger.say("b", *stranger.steps(session(1), Step(hidden(1), 9, 0, 0), epoch=9))
        await early.link.ping()
        await goes_on(answer)
        assert early.closed_reason is None, "its epoch may come"
        for stream in (control, steps, early):
            stream.reset("done")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_nan_in_a_step_is_blamed_on_whoever_sent_it(tiny: Tiny, stranger: Stranger, value: float) -> None:
    async with honest(tiny):
        control = await stranger.chained(session(1))
        steps = await stranger.say("b", *stranger.steps(session(1), Step(hidden(1, value=value), 1, 0, 0)))
        fault = await within(control.receive())
        assert fault == Fault(1, "input", "layers 2-3 couldn't finish a step: the input has NaN or Inf", stranger.me)
        for stream in (control, steps):
            stream.reset("done")


async def test_a_step_over_the_reservation_isnt_the_fault_of_whoever_took_it(tiny: Tiny, stranger: Stranger) -> None:
    control = await stranger.chained(session(1), reserve=4)
    steps = await stranger.say("b", *stranger.steps(session(1), Step(hidden(5), 1, 0, 0)))
    fault = await within(control.receive())
    assert isinstance(fault, Fault) and (fault.what, fault.other) == ("room", stranger.me)
    for stream in (control, steps):
        stream.reset("done")


async def test_a_step_that_nobody_could_take_is_refused_before_its_rows_have_come(
    tiny: Tiny, stranger: Stranger
) -> None:
    """Its map and the first of its rows are here, and no more: memory for the rest was never taken."""
    control = await stranger.chained(session(1))
    steps = await stranger.say("b", *stranger.steps(session(1)))
    whole = b"".join(pack(*encode(Step(hidden(2048, width=31), 1, 0, 0))))
    first = struct.pack(">BBI", DATA, Priority.PREFILL << 1, steps.id) + whole[:400]  # no LAST among its flags
    sealed = steps.link.connection._sender.encrypt(first)
    steps.link._transport.write(struct.pack(">H", len(sealed)) + sealed)
    assert "float32 [n, 32]" in await stranger.why_ended(steps)
    control.reset("done")


async def test_an_id_that_is_none_is_blamed_on_the_last_hop(tiny: Tiny, stranger: Stranger) -> None:
    control = await stranger.last(session(1))
    assert "beyond the vocabulary" in await stranger.end(
        "a", stranger.tokens_link(session(1)), Tokens(1, 1, ids=ids(1 << 20))
    )
    fault = await within(control.receive())
    assert isinstance(fault, Fault) and (fault.what, fault.other) == ("input", stranger.me)
    control.reset("done")


# ---------------------------------------------------------------- A makes B send C something bad


@asynccontextmanager
async def between(tiny: Tiny, left: str = "b", right: str = "c") -> AsyncIterator[Link]:
    """The connection of these two in whose streams the honest answer goes: it stays, and neither of them has
    anything against the other."""
    peers = tiny.swarm.peers
    ids_of = {name: peers[name].transport.identity.peer_id for name in (left, right)}

    def link_at(name: str, other: str) -> Link:
        return peers[name].transport.links[ids_of[other]]

    ends = {name: link_at(name, other) for name, other in ((left, right), (right, left))}
    yield ends[right]
    for name, other in ((left, right), (right, left)):
        assert link_at(name, other) is ends[name] and ends[name].closed_reason is None
        account = ends[name].connection._account
        assert account is not None and account._strikes._left == peers[name].transport._accounts.quotas.strikes


async def fed_by_the_stranger(stranger: Stranger, number: int, reserve: int = 64) -> Stream:
    """The stranger's chain: itself, b and c. Its control stream to b, which sends to c what the stranger makes it."""
    return await stranger.chained(session(number), reserve=reserve)


async def open_c(stranger: Stranger, number: int, **changes: Any) -> Stream:
    b, c = ref(stranger.peers, "b"), ref(stranger.peers, "c")
    place = {"span": Span(4, 6), "previous": b, "next": None, "first": ref(stranger.peers, "a"), "last": c}
    stream = await stranger.say("c", open_message(stranger.peers, "c", session(number), **(place | changes)))
    assert isinstance(await within(stream.receive()), Opened)
    return stream


async def b_sends(stranger: Stranger, number: int, *steps: Step) -> tuple[Stream, Stream]:
    """b has run these steps and handed their output on, towards c."""
    control = await fed_by_the_stranger(stranger, number)
    way = await stranger.say("b", *stranger.steps(session(number), *steps))
    run = next(run for key, run in stranger.peers.peers["b"].server.runs.items() if key.session == session(number))
    await stranger.peers.until(lambda: run.core._sent == len(steps) or run.core._link_down)
    return control, way


async def test_a_session_that_c_never_heard_of_costs_only_that_stream(tiny: Tiny, stranger: Stranger) -> None:
    async with honest(tiny) as answer, between(tiny):
        control, way = await b_sends(stranger, 1, Step(hidden(1), 1, 0, 0))
        fault = await within(control.receive())
        assert fault == Fault(1, "link", "no such session here", ref(tiny.swarm, "c").peer)
        await goes_on(answer)
        for stream in (control, way):
            stream.reset("done")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"previous": HopRef(NOBODY, 0, b"")}, "this chain has another hop there"),
        ({"epoch": 7}, "the other side ended it"),
        ({"reserve": 1}, None),
        ({"epoch": 0}, None),
    ],
    ids=["another before it", "a later epoch", "less room", "an older epoch"],
)
async def test_contradictions_between_what_b_and_c_are_told_come_back_to_whoever_told_them(
    tiny: Tiny, stranger: Stranger, changes: dict[str, Any], said: str | None
) -> None:
    async with honest(tiny) as answer, between(tiny):
        at_c = await open_c(stranger, 1, **changes)
        await at_c.send(Resume(changes.get("epoch", 1), 0, 0, 0, ids=ids(1), credit=9, limit=9))
        control, way = await b_sends(stranger, 1, Step(hidden(1), 1, 0, 0), Step(hidden(1), 1, 1, 1))
        await goes_on(answer)
        if said is not None:
            fault = await within(control.receive())
            assert isinstance(fault, Fault) and fault.what == "link" and said in fault.reason
        elif "reserve" in changes:
            fault = await within(at_c.receive())
            assert isinstance(fault, Fault) and fault.what == "room"
        for stream in (at_c, control, way):
            stream.reset("done")


async def test_times_that_a_client_makes_up_dont_make_b_send_what_c_cant_read(tiny: Tiny, stranger: Stranger) -> None:
    async with honest(tiny), between(tiny):
        at_c = await open_c(stranger, 1)
        await at_c.send(Resume(1, 0, 0, 0, ids=ids(1), credit=9, limit=9))
        longest = messages.Spent(codecs.MAX_SECONDS, codecs.MAX_SECONDS)
        control, way = await b_sends(stranger, 1, Step(hidden(1), 1, 0, 0, sample=True, spent=longest))
        tokens = await within(at_c.receive())
        assert isinstance(tokens, Tokens) and tokens.spent == longest
        for stream in (at_c, control, way):
            stream.reset("done")


async def test_numbers_that_overflow_in_b_go_no_further(tiny: Tiny, stranger: Stranger) -> None:
    async with honest(tiny), between(tiny):
        control = await fed_by_the_stranger(stranger, 1)
        way = await stranger.say("b", *stranger.steps(session(1), Step(hidden(1, value=3.4e38), 1, 0, 0)))
        run = next(run for key, run in tiny.swarm.peers["b"].server.runs.items() if key.session == session(1))
        await tiny.swarm.until(lambda: run.core._halted or run.core._sent == 1)
        for stream in (control, way):
            stream.reset("done")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5e-324, top_p=0.5),
        Sampling(temperature=5e-324),
        Sampling(temperature=100.0, top_p=0.0, top_k=1 << 24, min_p=1.0),
        Sampling(repetition_penalty=messages.MAX_REPETITION, presence_penalty=-messages.MAX_PENALTY, seed=LAST_SEED),
        Sampling(logprobs=messages.MAX_LOGPROBS, answer_from=LONG),
    ],
)
async def test_no_way_of_sampling_disturbs_those_in_the_same_step(
    tiny: Tiny, stranger: Stranger, sampling: Sampling
) -> None:
    async with honest(tiny, chain="one"):
        for number in range(4):
            stream = await stranger.say("one", open_message(tiny.swarm, "one", session(number)))
            assert isinstance(await within(stream.receive()), Opened)
            biased = {"bias_ids": ids(1 << 30), "bias": typed("float32", 1)} if number else {}
            await stream.send(resume(sampling=sampling, credit=60, limit=60, **biased))
            tokens = await within(stream.receive())
            assert isinstance(tokens, Tokens), tokens


# ---------------------------------------------------------------- being sent somewhere


def signed_by(stranger: Stranger, peers: TinySwarm, *addresses: str) -> HopRef:
    """The stranger as the next hop: anybody may sign anything about himself."""
    served = open_descriptor(peers.peers["b"].node.descriptor_bytes)
    mine = dataclasses.replace(served, peer=stranger.me, addresses=addresses)
    return HopRef(stranger.me, 2, sign_record(stranger.transport.identity, mine))


async def test_an_open_sends_nobody_into_other_networks_and_tells_nothing_of_them(
    tiny: Tiny, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger is a second identity's next hop, not connected itself, and lists what it wants to know of."""
    a, sybil = tiny.swarm.peers["a"], Stranger(tiny.swarm)
    dialled: list[str] = []

    async def dial(address: Address, *args: object, **kwargs: object) -> Link:
        dialled.append(f"{address.host}:{address.port}")
        raise Unreachable(str(address), "connection refused")

    monkeypatch.setattr(a.transport, "dial", dial)
    places = ("192.168.1.1:80", "10.0.0.1:22", "169.254.169.254:80", "[fe80::1]:1", "[64:ff9b::a00:1]:1", "8.8.8.8:53")
    next_hop = signed_by(sybil, tiny.swarm, *places)
    stream = await stranger.say(
        "a", open_message(tiny.swarm, "a", session(1), next=next_hop, last=next_hop)
    )
    fault = await within(stream.receive())
    assert fault == Fault(1, "link", "it can't be reached where it says it is", sybil.me)
    assert dialled == ["8.8.8.8:53"], "an address of the internet may be dialled, and what is there isn't told"
    stream.reset("done")
    await sybil.close()


async def test_opens_make_a_peer_dial_only_so_many_unknown_addresses(
    tiny: Tiny, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = tiny.swarm.peers["a"]
    a.node._permits._for_others = BucketTable(0.001, 4.0)
    dialled: list[Address] = []

    async def dial(address: Address, *args: object, **kwargs: object) -> Link:
        dialled.append(address)
        raise Unreachable(str(address), "connection refused")

    monkeypatch.setattr(a.transport, "dial", dial)
    for number in range(10):
        sybil = Stranger(tiny.swarm)
        next_hop = signed_by(sybil, tiny.swarm, f"8.8.8.8:{1 + number}")
        stream = await stranger.say(
            "a", open_message(tiny.swarm, "a", session(1 + number), next=next_hop, last=next_hop)
        )
        assert isinstance(await within(stream.receive()), Fault)
        stream.reset("done")
        await sybil.close()
    assert len(dialled) == 4
    a.node._permits._for_others = BucketTable(1.0, 1000.0)


# ---------------------------------------------------------------- hostile hops


def liar_at(
    peer: PeerId, lie: Callable[[Message], Message], told: list[Message]
) -> Callable[[HopRun, Message, Priority], None]:
    """`HopRun._send` of a peer that says something else than it should. told: what it should have said."""
    send = HopRun._send

    def lying(self: HopRun, message: Message, priority: Priority) -> None:
        if self._server.me == peer:
            told.append(message)
            message = lie(message)
        send(self, message, priority)

    return lying


def in_step(**changes: Any) -> Callable[[Message], Message]:
    return lambda message: dataclasses.replace(message, **changes) if isinstance(message, Step) else message


async def test_a_hop_that_sends_nonsense_is_the_one_that_is_replaced(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x and y hold the same layers. Whatever x sends on, the text is right, through y; and c, which found the
    nonsense, was never given up."""
    peers = tiny.new_swarm()
    peers.start_all(tiny.model, {"a": "0:2", "x": "2:4", "c": "4:6", "y": "2:4"}, config=PATIENT)
    x = peers.peers["x"].transport.identity.peer_id
    lies = {
        "NaN": in_step(tensors=hidden(1, value=math.nan)),
        "too wide": in_step(tensors=hidden(1, width=33)),
        "another type": in_step(tensors=hidden(1, dtype="int32")),
        "beyond the room": in_step(tensors=hidden(1000), position=0),
    }
    right = text_of(tiny)[:24]
    for what, lie in lies.items():
        told: list[Message] = []
        monkeypatch.setattr(HopRun, "_send", liar_at(x, lie, told))
        while not told:  # a chain through y is as good
            async with tiny.client(peers) as client:
                answer = await within(client.generate("Hello", max_tokens=24))
            assert list(answer.token_ids) == right, what
            assert {hop.name for hop in answer.hops} == {"a", "y", "c"}, what
        monkeypatch.undo()
    await peers.emptied()
    peers.close()


# ---------------------------------------------------------------- floods


async def test_a_flooder_that_holds_every_session_makes_room_for_whoever_comes(
    tiny: Tiny,
) -> None:
    """It may have all of an idle peer; a first session of somebody else costs its newest one."""
    peers = tiny.new_swarm()
    peers.start("only", tiny.model, "0:6", config=PATIENT, max_sessions=4)
    flooder = Stranger(peers)
    streams = []
    for number in range(4):
        streams.append(await flooder.say("only", open_message(peers, "only", session(number), CONTEXT)))
        assert isinstance(await within(streams[-1].receive()), Opened)
    fifth = await flooder.answer("only", open_message(peers, "only", session(9), CONTEXT))
    assert isinstance(fifth, RefusedMessage) and "full: 4 of 4" in fifth.reason
    async with tiny.client(peers) as client:
        answer = await within(client.generate("Hello", max_tokens=24))
    assert list(answer.token_ids) == text_of(tiny)[:24]
    assert await within(streams[3].receive()) == Unknown(1)
    assert {key.session for key in peers.peers["only"].server.runs} == {session(n) for n in range(3)}
    await flooder.close()
    peers.evict("only")
    await peers.emptied()
    peers.close()


async def test_too_many_opens_are_refused_with_a_reason_and_cost_nobody_else_anything(
    tiny: Tiny, stranger: Stranger
) -> None:
    async with honest(tiny, chain="one", tokens=160) as answer:
        link = await stranger.link("one")
        reasons: list[str] = []
        for number in range(130):
            stream = link.open_stream()
            await stream.send(open_message(tiny.swarm, "one", session(number), fingerprint=bytes(32)))
            refused = await within(stream.receive())
            assert isinstance(refused, RefusedMessage)
            reasons.append(refused.reason)
            stream.reset("done")
        assert sum("too many sessions are opened" in reason for reason in reasons) in range(10, 31)
        assert refused.retry_after_s > 0
        await goes_on(answer)
