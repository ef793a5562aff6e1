"""From what the registry knows to a chain: models that are live, offers, and the plan.

Used by every client for its generations and by `swarm status` for the health it shows, so that
status can't say "healthy" where a client finds a gap: both plan a real route.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from routing.estimates import Links, prefill_s
from routing.planner import NoChain, coverage, plan, weakest
from routing.spans import Hop, Offer, Route, Span
from swarm.clocks import clock_errors
from swarm.errors import AmbiguousModel, NoRoute, UnknownModel
from swarm.identity import PeerId
from swarm.plans import Plan
from swarm.records import Descriptor
from swarm.registry import PeerEntry


@dataclass(frozen=True, slots=True)
class LiveModel:
    """One model as the registry shows it: all its live peers, whatever their state."""

    name: str
    fingerprint: bytes
    layers: int
    entries: tuple[PeerEntry, ...]

    @property
    def vocab(self) -> int:
        """What most of its peers say: ids that a model can draw are lower."""
        counts = Counter(entry.descriptor.vocab for entry in self.entries)
        return max(sorted(counts), key=counts.__getitem__)

    @property
    def serving(self) -> tuple[PeerEntry, ...]:
        return tuple(entry for entry in self.entries if entry.heartbeat.state == "serving")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(entry.descriptor.model for entry in self.entries)


def live_models(entries: Sequence[PeerEntry]) -> tuple[LiveModel, ...]:
    """Group live entries by fingerprint, ordered by name.

    The served name is each peer's own choice; the commonest one names the model, ties by text.
    """
    groups: dict[bytes, list[PeerEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.descriptor.fingerprint, []).append(entry)
    models = [_model(fingerprint, group) for fingerprint, group in groups.items()]
    return tuple(sorted(models, key=lambda model: (model.name, model.fingerprint)))


def _model(fingerprint: bytes, group: Sequence[PeerEntry]) -> LiveModel:
    names = Counter(entry.descriptor.model for entry in group)
    counts = Counter(entry.descriptor.layers for entry in group)
    layers = max(sorted(counts), key=counts.__getitem__)  # one fingerprint has one count, unless somebody lies
    return LiveModel(
        name=max(sorted(names), key=names.__getitem__),
        fingerprint=fingerprint,
        layers=layers,
        entries=tuple(entry for entry in group if entry.descriptor.layers == layers),
    )


class Named(Protocol):
    """A model as `choose_model` sees it: one of the records here, or one that a source lists."""

    @property
    def name(self) -> str: ...
    @property
    def names(self) -> Collection[str]: ...
    @property
    def fingerprint(self) -> bytes: ...


N = TypeVar("N", bound=Named)


def choose_model(models: Sequence[N], wanted: str | None) -> N:
    """The model called `wanted` (a name, or name@fingerprint), or the only one where none is named.

    Raises UnknownModel, or AmbiguousModel listing the choices.
    """
    if wanted is None:
        found = list(models)
    else:
        name, _, start = wanted.partition("@")
        found = [
            model
            for model in models
            if name in model.names and model.fingerprint.hex().startswith(start.lower())
        ]
    if not found:
        raise UnknownModel(wanted or "", sorted(model.name for model in models))
    if len(found) > 1:
        same_name = len({model.name for model in found}) < len(found)
        raise AmbiguousModel(sorted(label(model) if same_name else model.name for model in found))
    return found[0]


def label(model: Named) -> str:
    """The name, and enough of the fingerprint to tell two models of one name apart."""
    return f"{model.name}@{model.fingerprint.hex()[:8]}"


def offers(entries: Sequence[PeerEntry], link_s: Mapping[PeerId, float]) -> list[Offer]:
    """What the planner may use. link_s: half round trips from here, in seconds, where measured."""
    return [
        Offer(
            peer=entry.descriptor.peer,
            span=entry.descriptor.span,
            numerics=entry.descriptor.numerics,
            speed=entry.heartbeat.speed,
            queue_s=entry.heartbeat.queue_s,
            free_kv_tokens=entry.heartbeat.free_kv_tokens,
            link_s=link_s.get(entry.descriptor.peer),
        )
        for entry in entries
        if entry.heartbeat.state == "serving"
    ]


def plan_chain(
    model: LiveModel,
    link_s: Mapping[PeerId, float],
    known: int,
    *,
    need_kv: int = 1,
    hopeful: bool = False,
    context: int = 1,
    kept: Sequence[Hop] = (),
    excluded_peers: Collection[str] = (),
    excluded_links: Collection[tuple[str, str]] = (),
    numerics: str | None = None,
    rng: random.Random | None = None,
) -> Route:
    """The fastest chain now. Raises NoRoute naming the gap and the command that would fill it.

    need_kv: positions each new hop must be able to reserve. hopeful: where only full peers are left, take those:
    what they advertise is up to a minute old, and asking costs a round trip. context: positions each hop must be
    able to hold at all. known: peers of this swarm that were alive lately, for the message. kept: as they are, but
    of two that excluded_links keep apart either may be replaced, where nothing else helps.
    """
    usable = [entry for entry in model.serving if entry.descriptor.context >= context]
    planned = functools.partial(
        plan,
        model.layers,
        offers(usable, link_s),
        Links(client_s={str(peer): half for peer, half in link_s.items()}),
        excluded_peers=frozenset(excluded_peers),
        excluded_links=frozenset(excluded_links),
        numerics=numerics,
        rng=rng,
    )
    apart = {peer for pair in excluded_links for peer in pair}
    loose = [hop for hop in kept if hop.peer not in apart]
    holds = [kept] if len(loose) == len(kept) else [kept, loose]
    problem: NoRoute | None = None
    for need in (need_kv, 0) if hopeful else (need_kv,):
        for held in holds:
            try:
                return planned(need_kv=need, kept=held)
            except NoChain as error:
                problem = problem or _no_route(model, error, known, need_kv)
    assert problem is not None
    raise problem


def _no_route(model: LiveModel, found: NoChain, known: int, need_kv: int) -> NoRoute:
    gap, why = found.gap, ""
    held = [entry for entry in model.entries if _overlap(entry.descriptor.span, gap)]
    loading = [entry for entry in held if entry.heartbeat.state == "loading"]
    serving = [entry for entry in held if entry.heartbeat.state == "serving"]
    if found.cause == "full" and serving:
        most = max(entry.heartbeat.free_kv_tokens for entry in serving)
        why = (
            f"every peer with layers {gap} of {model.name} is full: "
            f"{need_kv} positions are needed, at most {most} are free"
        )
        remedy = "try again later or with a smaller max_tokens, or add a peer"
    elif loading:
        remedy = f"{_are(len(loading))} loading those layers; try again in a moment"
    elif serving:
        why = f"the peers with layers {gap} of {model.name} can't be used now: they failed, or can't reach each other"
        remedy = "try again later, or add a peer"
    else:
        remedy = f"start one with: swarm peer MODEL --layers {gap.start}:{gap.stop} --join ADDR"
    alive = len(model.entries)
    return NoRoute(model.name, str(gap), alive, max(known, alive), remedy, why)


def _are(number: int) -> str:
    return f"{number} of them is" if number == 1 else f"{number} of them are"


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


def make_plan(route: Route, model: LiveModel, descriptors: Mapping[PeerId, bytes], chunk: int) -> Plan:
    """A route with what a session needs to open it and to know when it is late.

    descriptors: signed bytes of all peers of the route. chunk: positions of a prefill step.
    """
    entries = {entry.descriptor.peer: entry for entry in model.entries}
    chunk_s = 0.0
    for hop in route.hops:
        entry = entries.get(PeerId(hop.peer))
        if entry is not None:
            chunk_s += prefill_s(entry.heartbeat.speed, hop.span, model.layers, chunk) + entry.heartbeat.queue_s
    return Plan(route=route, descriptors=descriptors, chunk_s=chunk_s)


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One row of `swarm status`. rtt_s is None where the peer didn't answer a ping. clock_error_s: how far its wall
    clock is ahead of the others', 0 where it isn't far enough to tell anybody."""

    descriptor: Descriptor
    state: str
    sessions: int
    free_kv_tokens: int
    queue_s: float
    tokens_per_s: float
    age_s: float
    rtt_s: float | None
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model's peers, coverage per layer, and the route that a client would get now, or why none."""

    name: str
    fingerprint: bytes
    layers: int
    peers: tuple[PeerStatus, ...]
    coverage: tuple[int, ...]
    weakest: Span
    route: Route | None
    problem: str | None


def model_status(model: LiveModel, rtts: Mapping[PeerId, float | None], known: int) -> ModelStatus:
    """What `swarm status` shows of one model, its health found by planning a real route."""
    spans = [entry.descriptor.span for entry in model.serving]
    weak, _ = weakest(model.layers, spans)
    half = {peer: rtt / 2 for peer, rtt in rtts.items() if rtt is not None}
    route, problem = None, None
    try:
        route = plan_chain(model, half, known)
    except NoRoute as error:
        problem = str(error)
    errors = clock_errors({e.peer: e.heartbeat.issued_ms / 1000 + e.age_s for e in model.entries})
    rows = tuple(_peer_status(entry, rtts, errors) for entry in sorted(model.entries, key=_by_span))
    cover = coverage(model.layers, spans)
    return ModelStatus(model.name, model.fingerprint, model.layers, rows, cover, weak, route, problem)


def _by_span(entry: PeerEntry) -> tuple[Span, str]:
    return entry.descriptor.span, entry.descriptor.name


def _peer_status(
    entry: PeerEntry, rtts: Mapping[PeerId, float | None], clock_errors_s: Mapping[PeerId, float]
) -> PeerStatus:
    beat = entry.heartbeat
    return PeerStatus(
        entry.descriptor,
        beat.state,
        beat.sessions,
        beat.free_kv_tokens,
        beat.queue_s,
        beat.tokens_per_s,
        entry.age_s,
        rtts.get(entry.descriptor.peer),
        clock_errors_s.get(entry.descriptor.peer, 0.0),
    )
