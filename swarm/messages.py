"""Every message, one frozen dataclass each, validated on decode.

A message is a small map (msgpack, see `wire.py`) and optional named tensors. Each field of a
dataclass carries a codec, which says what may come from the network (`codecs.py`); unknown kinds
raise `UnknownKind`.

Which message opens which stream:

    client -> hop       `Open` or `Prepare`, then that session's control both ways
    hop -> next hop     `StepsLink`, then `Step`s
    last hop -> first   `TokensLink`, then `Tokens`
    peer <-> peer       `GossipHello`, then the registry's messages
    anyone -> peer      `GetFiles` / `DialBack`, one question and one answer
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, dataclass_transform

from routing.spans import Span
from swarm.codecs import (
    MAX_EPOCH,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SECONDS,
    Codec,
    Wire,
    digest,
    epoch,
    exact_text,
    expect,
    flag,
    from_map,
    integer,
    list_of,
    nested,
    number,
    octets,
    of,
    one_of,
    optional,
    peer,
    position,
    seconds,
    session_id,
    span,
    text,
    to_map,
)
from swarm.errors import MessageError
from swarm.identity import PeerId
from swarm.tensors import RawTensor, floats_tensor, ids_tensor, read_floats, read_ids

MAX_STOP_IDS = 256       # generation configs list a handful
MAX_RECORD_BYTES = 1024  # descriptor and heartbeat together (protocol.md)
MAX_LOGPROBS = 20        # likeliest ids per token, as the field's own interface has it
MAX_IDS_TOLD = 512       # in one Tokens; a ring brings one at a time, a client that missed some misses 64
MAX_BIASED = 1024        # ids with a logit bias
MAX_BIAS = 100.0         # enough to force or forbid an id
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 100.0


class UnknownKind(MessageError):
    """Answered with `Unsupported`."""


@dataclass(frozen=True)
class Message:
    """Base of all messages. `kind` goes into the map; tensor fields are named in `TENSORS`."""

    kind: ClassVar[str]
    TENSORS: ClassVar[tuple[str, ...]] = ()


M = TypeVar("M")
REGISTERED: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True)
def message(kind: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: freeze the dataclass and register it under `kind`."""

    def register(cls: type[M]) -> type[M]:
        made = dataclass(frozen=True)(cls)
        made.kind = kind  # type: ignore[attr-defined]
        assert kind not in REGISTERED, kind
        REGISTERED[kind] = made  # type: ignore[assignment]
        return made

    return register


def encode(msg: Message) -> tuple[dict[str, Wire], dict[str, RawTensor]]:
    """The map and the named tensors of a message, ready for `packing.pack`."""
    if isinstance(msg, NamedTensors):
        tensors = msg.tensors
    else:
        named = {name: getattr(msg, name) for name in msg.TENSORS}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    return {"kind": msg.kind, **to_map(msg)}, tensors


def decode(values: Mapping[str, Wire], tensors: Mapping[str, RawTensor]) -> Message:
    """The reverse of `encode`. Raises MessageError, or UnknownKind for a kind that isn't ours."""
    kind = values.get("kind")
    cls = REGISTERED.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise UnknownKind(f"unknown kind of message {str(kind)[:40]!r}")
    made = from_map(cls, values)
    for name in cls.TENSORS:
        object.__setattr__(made, name, tensors.get(name))
    if isinstance(made, NamedTensors):
        object.__setattr__(made, "tensors", dict(tensors))
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


@dataclass(frozen=True)
class NamedTensors(Message):
    """A message that carries whatever tensors the step has, by name."""

    tensors: dict[str, RawTensor] = field(default_factory=dict)



# ---------------------------------------------------------------- a session's control


@dataclass(frozen=True, slots=True)
class HopRef:
    """Another hop of the chain: who, from which layer, and its signed descriptor (the bytes)."""

    peer: PeerId = of(peer)
    start: int = of(integer(0, MAX_LAYERS))
    descriptor: bytes = of(octets(0, MAX_RECORD_BYTES))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last hop turns logits into an id. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Penalties look at the ids so far: repetition (1 is off) at all, presence and frequency (0 is off) at those
    from position `answer_from` on. logprobs: report the chosen id's and so many of the likeliest; None: none.
    logit_bias: (id, what is added to its logit); it travels as tensors of `Resume`.
    """

    temperature: float = of(number(0.0, 100.0), default=0.0)
    top_k: int = of(integer(0, MAX_POSITION), default=0)
    top_p: float = of(number(0.0, 1.0), default=1.0)
    min_p: float = of(number(0.0, 1.0), default=0.0)
    repetition_penalty: float = of(number(MIN_REPETITION, MAX_REPETITION), default=1.0)
    presence_penalty: float = of(number(-MAX_PENALTY, MAX_PENALTY), default=0.0)
    frequency_penalty: float = of(number(-MAX_PENALTY, MAX_PENALTY), default=0.0)
    answer_from: int = of(position, default=0)
    logprobs: int | None = of(optional(integer(0, MAX_LOGPROBS)), default=None)
    seed: int = of(integer(0, (1 << 63) - 1), default=0)
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class _Chained(Message):
    """What `Open` and `Prepare` share: the hop's place in this epoch's chain.

    previous is None on the first hop, next on the last (which feeds `first`).
    """

    session: bytes = of(session_id)
    epoch: int = of(epoch)
    span: Span = of(span)
    previous: HopRef | None = of(optional(nested(HopRef)))
    next: HopRef | None = of(optional(nested(HopRef)))
    first: HopRef = of(nested(HopRef))
    last: HopRef = of(nested(HopRef))

    @property
    def is_first(self) -> bool:
        return self.previous is None

    @property
    def is_last(self) -> bool:
        return self.next is None


@message("open")
class Open(_Chained):
    """Hold state for this session: `reserve` KV positions. Answered Opened, Refused."""

    fingerprint: bytes = of(digest)
    reserve: int = of(position)


@message("prepare")
class Prepare(_Chained):
    """Stop the older epoch and say how far you are. Answered Prepared, Refused, Unknown."""


@message("opened")
class Opened(Message):
    epoch: int = of(epoch)


@message("prepared")
class Prepared(Message):
    """length: positions whose output is in the journal (last hop: positions finished). oldest: attention
    windows have let go of what came before, so `Resume` may cut here at `oldest` or later, or at 0."""

    epoch: int = of(epoch)
    length: int = of(position)
    oldest: int = of(position, default=0)


@message("refused")
class RefusedMessage(Message):
    epoch: int = of(epoch)
    reason: str = of(text())
    retry_after_s: float = of(seconds, default=0.0)


@message("unknown")
class Unknown(Message):
    """Not held, or held with another sub-span: replace, no blame."""

    epoch: int = of(epoch)


@message("resume")
class Resume(Message):
    """Cut to `have`, owe the next hop `[next_has, resume_at)`, then steps of this epoch may come.

    resume_at: r of protocol.md. ids (first and last hop): the client's ids from `ids_from` on,
    int32 [n]. credit: first position that may not be sampled yet. limit: generation ends before
    this position. sampling and stop_ids: last hop. bias_ids, bias: its `logit_bias`, int32 and float32 [n].
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("ids", "bias_ids", "bias")
    epoch: int = of(epoch)
    have: int = of(position)
    next_has: int = of(position)
    resume_at: int = of(position)
    ids_from: int = of(position, default=0)
    credit: int = of(position, default=0)
    limit: int = of(position, default=0)
    stop_ids: tuple[int, ...] = of(list_of(position, MAX_STOP_IDS), default=())
    sampling: Sampling | None = of(optional(nested(Sampling)), default=None)
    ids: RawTensor | None = None
    bias_ids: RawTensor | None = None
    bias: RawTensor | None = None

    def complete_sampling(self) -> Sampling:
        """`sampling` with its logit_bias. Raises MessageError for one that can't be."""
        sampling = self.sampling or Sampling()
        if self.bias_ids is None or self.bias is None:
            return sampling
        count, biases = math.prod(self.bias_ids.shape), math.prod(self.bias.shape)
        if count != biases or count > MAX_BIASED:  # before any of them is read
            raise MessageError(f"{biases} biases of {count} ids; of at most {MAX_BIASED} ids each has one")
        ids, bias = read_ids(self.bias_ids), read_floats(self.bias)
        if not all(abs(value) <= MAX_BIAS for value in bias):  # not a number fails too
            raise MessageError(f"a logit bias lies between -{MAX_BIAS:g} and {MAX_BIAS:g}")
        return dataclasses.replace(sampling, logit_bias=tuple(zip(ids, bias, strict=True)))


def bias_tensors(sampling: Sampling) -> tuple[RawTensor | None, RawTensor | None]:
    """Its logit_bias as `Resume` carries it: bias_ids and bias, nothing for none."""
    if not sampling.logit_bias:
        return None, None
    ids, bias = zip(*sampling.logit_bias, strict=True)
    return ids_tensor(ids), floats_tensor(bias)


@message("credit")
class Credit(Message):
    """Sample up to position `upto` (exclusive). I hold `have` ids: send again what comes after."""

    epoch: int = of(epoch)
    upto: int = of(position)
    have: int = of(position)


@message("where")
class Where(Message):
    """ask: a number of the client's, given back in the answer."""

    epoch: int = of(epoch)
    ask: int = of(integer(0, MAX_EPOCH), default=0)


@message("whereis")
class WhereIs(Message):
    """epoch: the hop's own. round: of the last step taken (-1: none yet). known: ids held (first and
    last hop). length: positions taken. finished: positions computed. sent: positions handed to the
    next hop's link (last hop: ids handed to the first). waiting: that link isn't up."""

    epoch: int = of(epoch)
    resumed: bool = of(flag)
    round: int = of(integer(-1, MAX_EPOCH))
    length: int = of(position)
    in_engine: bool = of(flag)
    finished: int = of(position)
    sent: int = of(position)
    known: int = of(position, default=0)
    waiting: bool = of(flag, default=False)
    ask: int = of(integer(0, MAX_EPOCH), default=0)


@message("working")
class Working(Message):
    """Sent each second while a step is still in the engine; extends the deadline."""

    epoch: int = of(epoch)
    length: int = of(position)


@message("renew")
class Renew(Message):
    """Keeps the reservation for another lease."""

    epoch: int = of(epoch)


@message("extend")
class Extend(Message):
    """Reserve up to `positions` in all. Answered Extended or Refused."""

    epoch: int = of(epoch)
    positions: int = of(position)


@message("extended")
class Extended(Message):
    epoch: int = of(epoch)
    positions: int = of(position)


@message("close")
class Close(Message):
    """Frees at once. Never affects a newer epoch."""

    epoch: int = of(epoch)


@message("fault")
class Fault(Message):
    """A hop can't go on with this epoch. `what` says whose fault: the `link` to `other`; the `step`, which this hop
    couldn't run; the `input`, as `other` sent what can't be right (NaN, an id beyond the vocabulary); or the `room`,
    as a step of `other`'s runs over the reservation, so that either it or the client asks for too much."""

    epoch: int = of(epoch)
    what: str = of(one_of("link", "step", "input", "room"))
    reason: str = of(text())
    other: PeerId | None = of(optional(peer), default=None)


@message("drain")
class Draining(Message):
    """A peer that wants to leave: repair this session elsewhere before `within_s` is over."""

    epoch: int = of(epoch)
    within_s: float = of(seconds)


# ---------------------------------------------------------------- between hops


@dataclass(frozen=True)
class _Link(Message):
    """First message of a stream between hops: which hop state it feeds, for one epoch only."""

    client: PeerId = of(peer)
    session: bytes = of(session_id)
    start: int = of(integer(0, MAX_LAYERS))
    epoch: int = of(epoch)


@message("steps-link")
class StepsLink(_Link):
    """`Step`s follow. start: the receiving hop's start layer."""


@message("tokens-link")
class TokensLink(_Link):
    """`Tokens` follow, from the last hop to the first. start: 0."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a round's time went so far: seconds in the engines of the hops, and waiting for them."""

    compute_s: float = of(seconds, default=0.0)
    queue_s: float = of(seconds, default=0.0)

    def plus(self, other: Spent) -> Spent:
        """At most what the next hop takes: what comes from before is a stranger's word."""
        return Spent(
            min(MAX_SECONDS, self.compute_s + other.compute_s), min(MAX_SECONDS, self.queue_s + other.queue_s)
        )


NOTHING_SPENT = Spent()


@message("step")
class Step(NamedTensors):
    """One pass of new positions. tensors: `hidden` [n, width]. round None: replay of what the
    sender already had. sample: ends at the last known id, so the last hop samples."""

    epoch: int = of(epoch, default=0)
    round: int | None = of(optional(integer(0, MAX_EPOCH)), default=None)
    position: int = of(position, default=0)
    sample: bool = of(flag, default=False)
    spent: Spent = of(nested(Spent), default=NOTHING_SPENT)


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Natural logarithms of probabilities, by the model's own distribution: before any bias, penalty, temperature
    or filter. chosen: of the id that was drawn. top: (id, logprob) of the likeliest, the likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@message("tokens")
class Tokens(Message):
    """ids for positions from `first_position` on. finish: set with the last id of the generation.

    Where they were asked for, in one run for all ids: logprobs, float32 [n + n * k], of each chosen id and then of
    the k likeliest, and top_ids, int32 [n * k], which these are.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("ids", "logprobs", "top_ids")
    epoch: int = of(epoch)
    first_position: int = of(position)
    finish: str | None = of(optional(one_of("stop", "length")), default=None)
    ids: RawTensor | None = None
    spent: Spent = of(nested(Spent), default=NOTHING_SPENT)
    logprobs: RawTensor | None = None
    top_ids: RawTensor | None = None

    def check(self) -> None:
        if self.ids is None or self.ids.dtype != "int32" or len(self.ids.shape) != 1:
            raise MessageError("Tokens needs ids, int32 [n]")
        if self.ids.shape[0] > MAX_IDS_TOLD:
            raise MessageError(f"{self.ids.shape[0]} ids in one Tokens, {MAX_IDS_TOLD} are allowed")

    def likelihoods(self) -> tuple[Likelihoods, ...]:
        """One for each id, or none at all. Raises MessageError."""
        if self.ids is None or self.logprobs is None or self.top_ids is None:
            return ()
        count, tops, found = self.ids.shape[0], math.prod(self.top_ids.shape), math.prod(self.logprobs.shape)
        wide = tops // max(count, 1)
        if wide > MAX_LOGPROBS or (tops, found) != (count * wide, count * (1 + wide)):  # before any is read
            raise MessageError(f"{found} logprobs and {tops} likeliest ids don't go with {count} ids")
        values, ids = read_floats(self.logprobs), read_ids(self.top_ids)
        if not all(value <= 0.0 for value in values):  # not a number fails too
            raise MessageError("a logprob is at most 0")
        rows = []
        for row in range(count):
            chosen, *top = values[row * (1 + wide) : (row + 1) * (1 + wide)]
            rows.append(Likelihoods(chosen, tuple(zip(ids[row * wide : (row + 1) * wide], top, strict=True))))
        return tuple(rows)


def likelihood_tensors(rows: Sequence[Likelihoods]) -> dict[str, RawTensor]:
    """As `Tokens` carries them: nothing for no rows. Every row has equally many."""
    if not rows:
        return {}
    values = [value for row in rows for value in (row.chosen, *(logprob for _, logprob in row.top))]
    return {"logprobs": floats_tensor(values), "top_ids": ids_tensor([i for row in rows for i, _ in row.top])}


# ---------------------------------------------------------------- questions to any peer


@message("get-files")
class GetFiles(Message):
    """The tokenizer, chat template and generation config that a descriptor's hash stands for."""

    tokenizer_hash: bytes = of(digest)


@message("files")
class Files(NamedTensors):
    """tensors: file name -> its bytes, uint8 [n]."""


@message("dial-back")
class DialBack(Message):
    """Please dial these addresses of mine and say which of them reach me."""

    addresses: tuple[str, ...] = of(list_of(text(), 8))


@message("dialled-back")
class DialledBack(Message):
    reached: tuple[str, ...] = of(list_of(text(), 8))


@message("unsupported")
class Unsupported(Message):
    """The answer to a kind that isn't known here."""

    what: str = of(text(80))


# ---------------------------------------------------------------- the registry (registry.py)

RECORD_ID_BYTES = 8    # first bytes of a head's SHA-256: one wrong pair in 2**32 records held
MAX_IDS = 1000         # per list; two lists of 8-byte identifiers just fit a message
MAX_TOLD = 128         # records in one delta; its 16 KiB are full long before
MAX_BUCKETS = 512      # of a digest, 8 bytes each
MAX_MODELS_WANTED = 16  # that one client follows on one stream
MAX_MODELS_TOLD = 100  # in one list; its 16 KiB hold so many with one long name each
MAX_NAMES_TOLD = 4     # of one model
MAX_PLACES_TOLD = 8    # as many as a record lists


def packed(size: int, most: int) -> Codec:
    """Many values of `size` bytes as one string: one item for the limits of `wire.py`."""

    def read(value: Wire) -> tuple[bytes, ...]:
        good = isinstance(value, bytes) and len(value) % size == 0 and len(value) <= size * most
        expect(good, f"at most {most} values of {size} bytes", value)
        return tuple(bytes(value[at : at + size]) for at in range(0, len(value), size))

    return Codec(b"".join, read)


_record_ids = packed(RECORD_ID_BYTES, MAX_IDS)
_signed = octets(64, MAX_RECORD_BYTES)
_age_ms = integer(0, 1_000_000_000)


@dataclass(frozen=True, slots=True)
class Told:
    """head: a signed heartbeat or leave, `age_s` seconds after it was issued, as the sender counts.
    descriptor: the signed bytes that the heartbeat names, where the receiver may lack them."""

    head: bytes
    age_s: float
    descriptor: bytes | None = None


def _write_told(told: Told) -> Wire:
    ms = math.ceil(told.age_s * 1000)  # never younger
    return [told.head, ms] if told.descriptor is None else [told.head, ms, told.descriptor]


def _read_told(value: Wire) -> Told:
    expect(isinstance(value, list) and 2 <= len(value) <= 3, "a head, its age and a descriptor", value)
    descriptor = _signed.read(value[2]) if len(value) == 3 else None
    return Told(_signed.read(value[0]), _age_ms.read(value[1]) / 1000, descriptor)


_told = Codec(_write_told, _read_told)  # a list and milliseconds: 30 bytes less than a map, for each of many


@message("gossip-hello")
class GossipHello(Message):
    """Opens a neighbourhood between peers. snapshot: first tell me all, in Deltas up to `complete`."""

    snapshot: bool = of(flag)


@message("subscribe")
class Subscribe(Message):
    """A client wants to hear of these models (by fingerprint), or with None of all. Said again it replaces what
    it said before. snapshot: first tell all of what is new in it, in Deltas up to `complete`. named: list models
    of this name first, should there be more than a list holds."""

    only: tuple[bytes, ...] | None = of(optional(list_of(digest, MAX_MODELS_WANTED)), default=None)
    snapshot: bool = of(flag, default=True)
    named: str = of(text(128), default="")


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """A model that is alive: its fingerprint, the names under which it is served (the commonest first), and by
    how many peers."""

    fingerprint: bytes
    names: tuple[str, ...]
    peers: int

    @property
    def name(self) -> str:
        return self.names[0]


def _write_model(model: ModelSeen) -> Wire:
    return [model.fingerprint, model.peers, *model.names]


def _read_model(value: Wire) -> ModelSeen:
    good = isinstance(value, list) and 3 <= len(value) <= 2 + MAX_NAMES_TOLD
    expect(good, "a fingerprint, a number of peers and names", value)
    names = tuple(_model_name.read(one) for one in value[2:])
    return ModelSeen(digest.read(value[0]), names, _peer_count.read(value[1]))


_model_name = text(128)
_peer_count = integer(0, 1 << 20)


@message("model-list")
class ModelList(Message):
    """Which models are alive, the one with most peers first: a subscriber's answer, and told again when it
    changes. So a client can name the one it wants before it hears of any peer. here: where its sender says that it
    listens, for a client that hears of another model than the sender's has no record of it."""

    models: tuple[ModelSeen, ...] = of(list_of(Codec(_write_model, _read_model), MAX_MODELS_TOLD))
    here: tuple[str, ...] = of(list_of(exact_text(80), MAX_PLACES_TOLD), default=())


@message("offer")
class Offer(Message):
    """Identifiers of heads that are new here. changes: more than a renewal, so ask for all of it."""

    renewals: tuple[bytes, ...] = of(_record_ids)
    changes: tuple[bytes, ...] = of(_record_ids)


@message("ask")
class Ask(Message):
    """Tell me these heads. full: with their descriptors."""

    heads: tuple[bytes, ...] = of(_record_ids)
    full: tuple[bytes, ...] = of(_record_ids)


@message("delta")
class Delta(Message):
    """complete: the last part of a snapshot."""

    records: tuple[Told, ...] = of(list_of(_told, MAX_TOLD))
    complete: bool = of(flag, default=False)


@message("digest")
class Digest(Message):
    """One sum per bucket of peers over what is alive here; renewals don't change it. Where it
    differs the receiver offers what it has, and answers with its own, so that the sender does too."""

    sums: tuple[bytes, ...] = of(packed(8, MAX_BUCKETS))
    answer: bool = of(flag, default=False)
