"""A swarm in virtual time around the real session cores: toy model, toy shells, every kind of fault.

The model has six integer layers. A layer's output at a position depends, through a running hash, on its
input at every position before, and the id drawn depends on all ids: one wrong, missing or doubled position
anywhere changes the text. In half of the worlds some layers see a window only, and let go of what lies before it as
soon as they may. What a chain makes is compared with the model run in one piece.

One seed makes one world: peers, claims, KV sizes, speeds, latencies, clients, and a plan of faults that
ends after a while, so that every generation has to come to its right end. Run many by hand with

    python -m tests.sim.session_world --seeds 1000 --start 0 [--without RULE]

where RULE takes one rule of the protocol away (see `RULES`), and must then be seen to fail.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np

from peer.hop import Hop, HopConfig, SessionKey
from peer.hop_effects import Compute, EnsureLink, Free, SendStep, SendTokens, ToClient
from peer.kv import REACH, LayerKV, Reach, Rewinds
from routing.spans import Hop as RouteHop
from routing.spans import Route, Span
from swarm.effects import Ended, Failed, Grew, HopKey, Release, Repaired, RepairStarted, Send
from swarm.errors import CapacityError, MessageError, NoRoute, SwarmError
from swarm.identity import PeerId, peer_id
from swarm.messages import (
    NOTHING_SPENT,
    Close,
    Message,
    Open,
    Resume,
    Sampling,
    Step,
    Tokens,
    Unknown,
    decode,
    encode,
)
from swarm.plans import Plan, PlanRequest
from swarm.session import Phase, Session, _Held
from swarm.session_config import SessionConfig
from swarm.tensors import RawTensor, ids_tensor, read_ids

LAYERS = 6
VOCABULARY = 97
STOP_ID = 13
LEAST_CAPACITY = 45  # KV positions of a peer: no session is longer
MASK = (1 << 62) - 1
FINGERPRINT = bytes(32)


# ------------------------------------------------------------------------------ the toy model


def mix(*numbers: int) -> int:
    """A hash in which every bit of every number counts."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state & MASK


Windows = Mapping[int, int]  # layer -> how many positions it sees; a layer that isn't there sees all


class ToyLayer:
    """Sees everything: the running hash over its inputs is all it needs."""

    def __init__(self, layer: int) -> None:
        self.layer, self.sums = layer, list[int]()

    def forward(self, position: int, rows: Sequence[int]) -> list[int]:
        del self.sums[position:]
        return [self._one(row) for row in rows]

    def _one(self, row: int) -> int:
        self.sums.append(mix(self.sums[-1] if self.sums else self.layer, row, len(self.sums)))
        return mix(self.layer, self.sums[-1], row)


class ToyWindow:
    """Sees `window` positions, and lets go of everything that R (`peer/kv.py`) allows at once."""

    def __init__(self, layer: int, window: int, reach: Reach) -> None:
        self.layer, self.window, self.reach = layer, window, reach
        self.base, self.inputs = 0, list[int]()  # inputs: from position `base` on

    def forward(self, position: int, rows: Sequence[int]) -> list[int]:
        if position == 0:
            self.base = 0
        assert self.base == 0 or position >= self.base + self.window - 1, f"what position {position} sees is gone"
        del self.inputs[position - self.base :]
        made = []
        for start, stop in self.reach.pieces(len(rows)):
            made += [self._one(row) for row in rows[start:stop]]
            if position + stop > self.window + self.reach.positions:
                self._let_go(position + start - self.reach.rewind - self.window + 1)
        return made

    def _one(self, row: int) -> int:
        self.inputs.append(row)
        at = self.base + len(self.inputs) - 1
        return mix(self.layer, at, *self.inputs[max(0, at - self.window + 1) - self.base :])

    def _let_go(self, before: int) -> None:
        if before > self.base:
            del self.inputs[: before - self.base]
            self.base = before


class ToyCache:
    """KV of a span."""

    def __init__(self, span: Span, windows: Windows, reach: Reach) -> None:
        self.span, self.length = span, 0
        self._layers = [
            ToyWindow(layer, windows[layer], reach) if layer in windows else ToyLayer(layer) for layer in span
        ]

    def forward(self, position: int, rows: Sequence[int]) -> list[int]:
        """Cut to `position`, run `rows` (ids on layer 0), append."""
        assert position <= self.length, f"a hole: step at {position}, KV holds {self.length}"
        self.length = position + len(rows)
        for layer in self._layers:
            rows = layer.forward(position, rows)
        return list(rows)


def draw(row: int, sampling: Sampling, position: int, ids: Sequence[int]) -> int:
    """The id at `position`, from the last hidden row and all ids before."""
    assert len(ids) == position
    return mix(row, sampling.seed, position, *ids[-3:], sum(ids)) % VOCABULARY


def whole_text(
    ids: Sequence[int], limit: int, stop_ids: Sequence[int], sampling: Sampling, windows: Windows
) -> list[int]:
    """What the model run in one piece, which keeps everything, makes of `ids`."""
    ids = list(ids)
    cache = ToyCache(Span(0, LAYERS), windows, Reach(rewind=limit))
    position = 0
    while len(ids) < limit:
        rows = cache.forward(position, ids[position:])
        position = len(ids)
        ids.append(draw(rows[-1], sampling, len(ids), ids))
        if ids[-1] in stop_ids:
            break
    return ids


# ------------------------------------------------------------------------------ network


def travelled(message: Message) -> Message:
    """Through the real encoding and back."""
    values, tensors = encode(message)
    return decode(msgpack.unpackb(msgpack.packb(values)), tensors)


def rows_tensor(rows: Sequence[int]) -> RawTensor:
    return RawTensor("int64", (len(rows), 1), np.asarray(rows, dtype="<i8").tobytes())


def tensor_rows(tensor: RawTensor) -> list[int]:
    return [int(row) for row in np.frombuffer(tensor.data, dtype="<i8")]


class Stream:
    """One stream between two nodes: in order in each direction, until it breaks."""

    def __init__(self, world: World, a: Node, b: Node) -> None:
        self.world, self.ends = world, (a, b)
        self.open = True
        self._last = {a.name: 0.0, b.name: 0.0}
        self.on_message: dict[str, Callable[[Message], None]] = {}
        self.on_lost: dict[str, Callable[[str, bool], None]] = {}
        self._born = {a.name: a.incarnation, b.name: b.incarnation}
        world.streams.append(self)

    def other(self, node: Node) -> Node:
        return self.ends[1] if node is self.ends[0] else self.ends[0]

    def send(self, sender: Node, message: Message) -> None:
        if not self.open or self.world.lose(message):
            return
        to = self.other(sender)
        at = max(self._last[sender.name], self.world.arrival(sender, to))
        self._last[sender.name] = at
        message = travelled(message)
        self.world.at(at, lambda: self._arrive(to, sender, message))

    def _arrive(self, to: Node, sender: Node, message: Message) -> None:
        """A hole that opened meanwhile holds it up; a peer that died meanwhile never sees it."""
        if to.incarnation != self._born[to.name]:
            return
        if not self.open and self.world.rng.random() < 0.5:
            return  # what was in flight when it broke: a part still arrives
        again = self.world.passable_at(sender, to)
        if again > self.world.now:
            self._last[sender.name] = max(self._last[sender.name], again)
            self.world.at(self._last[sender.name], lambda: self._arrive(to, sender, message))
            return
        to.run(lambda: self.on_message.get(to.name, lambda _: None)(message))

    def break_(self, reason: str, gone: bool, silent: Node | None = None) -> None:
        """Both ends that live hear of it a moment later."""
        if not self.open:
            return
        self.open = False
        for node in self.ends:
            if node is silent:
                continue
            lost = self.on_lost.get(node.name)
            if lost is not None:
                delay = self.world.latency(self.other(node), node)
                self.world.at(self.world.now + delay, self._teller(node, lost, reason, gone))

    def _teller(
        self, node: Node, lost: Callable[[str, bool], None], reason: str, gone: bool
    ) -> Callable[[], None]:
        def tell() -> None:
            if node.incarnation == self._born[node.name]:
                node.run(lambda: lost(reason, gone))

        return tell


class Node:
    """A machine: alive or not, and frozen for a while or not."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.id: PeerId = peer_id(mix(*name.encode()).to_bytes(8, "big") * 4)
        self.alive = True
        self.incarnation = 0
        self.frozen_until = 0.0

    def run(self, act: Callable[[], None]) -> None:
        """Now, or in order once thawed; never if it dies before."""
        if not self.alive:
            return
        if self.frozen_until > self.world.now:
            born = self.incarnation
            self.world.at(self.frozen_until, lambda: self.run(act) if self.incarnation == born else None)
        else:
            act()


class World:
    """Virtual time and a network whose links can break, hold everything up, or be slow."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.streams: list[Stream] = []
        self.nodes: dict[PeerId, Node] = {}
        self.broken: dict[frozenset[str], float] = {}  # until when
        self.holes: dict[frozenset[str], float] = {}
        self._latency: dict[frozenset[str], float] = {}
        self.counts: Counter[str] = Counter()
        self.windows: Windows = {}
        self.reach = REACH
        self.lose: Callable[[Message], bool] = lambda message: False  # for told scenarios

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._count), act))

    def run_until(self, when: float, stop: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= when and not stop():
            self.now, _, act = heapq.heappop(self._events)
            act()
        if not stop():
            self.now = when

    def latency(self, a: Node, b: Node) -> float:
        pair = frozenset((a.name, b.name))
        if pair not in self._latency:
            self._latency[pair] = 0.0005 if a is b else self.rng.choice((0.002, 0.01, 0.04))
        return self._latency[pair] * (0.7 + self.rng.random())

    def passable_at(self, a: Node, b: Node) -> float:
        return self.holes.get(frozenset((a.name, b.name)), 0.0)

    def arrival(self, a: Node, b: Node) -> float:
        return max(self.now, self.passable_at(a, b)) + self.latency(a, b)

    def connect(self, a: Node, to: PeerId, done: Callable[[Stream | None, str], None]) -> None:
        """A stream to `to`, or None with a reason; or silence for as long as a hole lasts."""
        b = self.nodes[to]
        born = a.incarnation

        def answer() -> None:
            if a.incarnation != born:
                return
            if self.passable_at(a, b) > self.now or b.frozen_until > self.now:
                self.at(max(self.passable_at(a, b), b.frozen_until) + 0.01, answer)
            elif not b.alive or self.broken.get(frozenset((a.name, b.name)), 0.0) > self.now:
                a.run(lambda: done(None, "connection refused"))
            else:
                a.run(lambda: done(Stream(self, a, b), ""))

        self.at(self.arrival(a, b) + self.latency(a, b), answer)

    # faults

    def break_link(self, a: Node, b: Node, seconds: float) -> None:
        pair = frozenset((a.name, b.name))
        self.broken[pair] = self.now + seconds
        for stream in self.streams:
            if {node.name for node in stream.ends} == pair:
                stream.break_("connection reset", True)

    def hole(self, a: Node, b: Node, seconds: float) -> None:
        self.holes[frozenset((a.name, b.name))] = self.now + seconds

    def reset_streams(self, a: Node, b: Node) -> None:
        """Streams end, the connection stands."""
        for stream in self.streams:
            if {node.name for node in stream.ends} == {a.name, b.name}:
                stream.break_("stream reset", False)

    def crash(self, node: Node, restart_after: float | None) -> None:
        node.alive = False
        node.incarnation += 1
        for stream in self.streams:
            if node in stream.ends:
                stream.break_("connection reset", True, silent=node)
        if restart_after is not None:
            self.at(self.now + restart_after, lambda: self.restart(node))

    def restart(self, node: Node) -> None:
        node.alive = True


# ------------------------------------------------------------------------------ a peer's toy shell


class ToyLedger:
    def __init__(self, capacity: int, world: World) -> None:
        self.capacity, self.world = capacity, world
        self.held: dict[SessionKey, int] = {}
        self.make_room: Callable[[SessionKey, int], None] = lambda key, missing: None

    @property
    def free_positions(self) -> int:
        return self.capacity - sum(self.held.values())

    def reserve(self, key: SessionKey, positions: int, span: Span) -> None:
        assert key not in self.held, "reserved twice"
        self._need(key, positions)
        self.held[key] = positions

    def extend(self, key: SessionKey, positions: int) -> None:
        self._need(key, positions - self.held[key])
        self.held[key] = positions

    def _need(self, key: SessionKey, positions: int) -> None:
        if positions > self.free_positions:
            self.make_room(key, positions)
        if positions > self.free_positions:
            raise CapacityError(f"{positions} KV positions wanted, {self.free_positions} free")

    def free(self, key: SessionKey) -> None:
        del self.held[key]

    def keeps(self, held: int, positions: int) -> bool:
        return True

    def rewinds(self, span: Span) -> Rewinds:
        layers = tuple(LayerKV(1, 1, 1, self.world.windows.get(layer)) for layer in span)
        return Rewinds.over(layers, self.world.reach)


@dataclass
class _Incoming:
    """A stream from another hop: what came and wasn't read yet."""

    sender: PeerId
    epoch: int
    unread: deque[Message] = field(default_factory=deque)


class ToyPeer(Node):
    def __init__(self, world: World, name: str, span: Span, capacity: int, config: HopConfig) -> None:
        super().__init__(world, name)
        self.span, self.config = span, config
        self.capacity = capacity
        self.step_s = self.usual_s = 0.01
        self.row_s = 0.002
        self.faulty_until = 0.0
        self.rows_run = 0
        self._reset()
        world.nodes[self.id] = self

    def _reset(self) -> None:
        self.ledger = ToyLedger(self.capacity, self.world)
        self.ledger.make_room = self._make_room
        self.hops: dict[SessionKey, Hop] = {}
        self.caches: dict[SessionKey, ToyCache] = {}
        self.client_streams: dict[SessionKey, Stream] = {}
        self.incoming: dict[SessionKey, list[_Incoming]] = {}
        self.outgoing: dict[SessionKey, tuple[int, Stream | None]] = {}
        self.engine: deque[tuple[Hop, Compute]] = deque()
        self.busy = False
        self._timers: dict[SessionKey, float] = {}

    def restarted(self) -> None:
        self._reset()

    # the client's streams

    def client_stream(self, stream: Stream, key: SessionKey) -> None:
        def lost(reason: str, gone: bool) -> None:
            if self.client_streams.get(key) is stream:
                del self.client_streams[key]
                if key in self.hops:
                    self.hops[key].client_gone(self.world.now)
                    self._drive(key)

        stream.on_message[self.name] = lambda message: self._control(stream, key, message)
        stream.on_lost[self.name] = lost

    def _control(self, stream: Stream, key: SessionKey, message: Message) -> None:
        if stream.open:
            self.client_streams[key] = stream
        hop = self.hops.get(key)
        if hop is None:
            if not isinstance(message, Open):
                if not isinstance(message, Close):
                    stream.send(self, Unknown(message.epoch))  # type: ignore[attr-defined]
                return
            hop = self.hops[key] = Hop(
                self.id, key.client, key.session, key.start, self.config, self.ledger, self._join
            )
        hop.receive(message, self.world.now)
        self._drive(key)

    @staticmethod
    def _join(pieces: Sequence[Any]) -> list[int]:
        return [row for piece in pieces for row in piece]

    def _make_room(self, key: SessionKey, missing: int) -> None:
        idle = [k for k, hop in self.hops.items() if k != key and hop.in_grace(self.world.now)]
        for other in sorted(idle, key=lambda k: self.hops[k].idle_since or 0.0):
            if self.ledger.free_positions >= missing:
                return
            self.world.counts["evicted"] += 1
            self.hops[other].evict(self.world.now)
            self._drive(other)

    # driving a hop

    def _drive(self, key: SessionKey) -> None:
        hop = self.hops.get(key)
        while hop is not None:
            effects = hop.drain()
            for effect in effects:
                self._perform(key, hop, effect)
            if not effects and not self._read_links(key, hop):
                break
        if hop is not None and not hop.finished:
            self._arm(key, hop)

    def _arm(self, key: SessionKey, hop: Hop) -> None:
        at = hop.deadline
        if at is not None and (key not in self._timers or at < self._timers[key] - 1e-9):
            self._timers[key] = at
            born = self.incarnation
            self.world.at(at, lambda: self.run(lambda: self._tick(key)) if self.incarnation == born else None)

    def _tick(self, key: SessionKey) -> None:
        self._timers.pop(key, None)
        if key in self.hops:
            self.hops[key].tick(self.world.now)
            self._drive(key)

    def _perform(self, key: SessionKey, hop: Hop, effect: Any) -> None:
        match effect:
            case ToClient(message):
                self.world.counts[f"hop {message.kind}"] += 1
                if key in self.client_streams:
                    self.client_streams[key].send(self, message)
            case EnsureLink(epoch, to):
                self._ensure_link(key, epoch, to.peer, to.start, is_last=hop._is_last)
            case SendStep():
                header = Step(
                    epoch=effect.epoch, round=effect.round, position=effect.position, sample=effect.sample
                )
                object.__setattr__(header, "tensors", {"hidden": rows_tensor(effect.payload)})
                self._send_on_link(key, effect.epoch, header)
            case SendTokens():
                ids = ids_tensor(effect.ids)
                self._send_on_link(key, effect.epoch, Tokens(effect.epoch, effect.first_position, None, ids))
            case Compute():
                self.engine.append((hop, effect))
                self._run_engine()
            case Free():
                if self.hops.get(key) is hop:
                    del self.hops[key]
                    self.caches.pop(key, None)
                    self.outgoing.pop(key, None)
            case _:
                raise AssertionError(effect)

    # links

    def _ensure_link(self, key: SessionKey, epoch: int, to: PeerId, start: int, is_last: bool) -> None:
        self.outgoing[key] = (epoch, None)
        target = SessionKey(key.client, key.session, start)

        def done(stream: Stream | None, reason: str) -> None:
            hop = self.hops.get(key)
            if hop is None or self.outgoing.get(key) != (epoch, None):
                return
            if stream is None:
                hop.link_down(epoch, reason, self.world.now)
            else:
                self.outgoing[key] = (epoch, stream)
                stream.on_lost[self.name] = lambda reason, gone: self._link_lost(key, epoch, reason)
                other = self.world.nodes[to]
                assert isinstance(other, ToyPeer)
                other.link_stream(stream, target, self.id, epoch, self)
                hop.link_up(epoch, self.world.now)
            self._drive(key)

        self.world.connect(self, to, done)

    def _link_lost(self, key: SessionKey, epoch: int, reason: str) -> None:
        if key in self.hops:
            self.hops[key].link_down(epoch, reason, self.world.now)
            self._drive(key)

    def link_stream(self, stream: Stream, key: SessionKey, sender: PeerId, epoch: int, other: Node) -> None:
        incoming = _Incoming(sender, epoch)
        self.incoming.setdefault(key, []).append(incoming)

        def arrived(message: Message) -> None:
            incoming.unread.append(message)
            self._drive(key)

        # A node that talks to itself has one name for both ends: only its receiving end gets messages.
        stream.on_message[self.name] = arrived

    def _send_on_link(self, key: SessionKey, epoch: int, message: Message) -> None:
        at, stream = self.outgoing.get(key, (-1, None))
        if at == epoch and stream is not None:
            stream.send(self, message)

    def _read_links(self, key: SessionKey, hop: Hop) -> bool:
        """Read one step that the hop accepts; whether there was one."""
        links = self.incoming.get(key, [])
        self.incoming[key] = links = [link for link in links if hop.accepts(link.epoch) != "never"]
        for link in links:
            if link.unread and hop.accepts(link.epoch) == "now":
                self._give(hop, link, link.unread.popleft())
                return True
        return False

    def _give(self, hop: Hop, link: _Incoming, message: Message) -> None:
        now = self.world.now
        match message:
            case Step():
                rows = tensor_rows(message.tensors["hidden"])
                hop.receive_step(link.sender, link.epoch, message, rows, now)
            case Tokens():
                assert message.ids is not None
                hop.receive_tokens(
                    link.sender, link.epoch, message.first_position, read_ids(message.ids), now
                )
            case _:
                raise AssertionError(message)

    # the engine: one job at a time for all sessions

    def _run_engine(self) -> None:
        if self.busy or not self.engine:
            return
        self.busy = True
        hop, job = self.engine.popleft()
        rows = list(job.ids if job.ids is not None else job.payload)
        seconds = (self.step_s + self.row_s * len(rows) * len(job.span)) * (0.5 + self.world.rng.random())
        born = self.incarnation
        self.world.at(
            self.world.now + seconds,
            lambda: self.run(lambda: self._computed(hop, job, rows)) if self.incarnation == born else None,
        )

    def _computed(self, hop: Hop, job: Compute, rows: list[int]) -> None:
        self.busy = False
        key = hop.key
        if self.hops.get(key) is hop:
            if self.faulty_until > self.world.now:
                hop.failed(job, "not finite", self.world.now)
            else:
                self._forward(hop, job, rows)
            self._drive(key)
        self._run_engine()

    def _forward(self, hop: Hop, job: Compute, rows: list[int]) -> None:
        cache = self.caches.get(hop.key)
        if cache is None or cache.span != job.span:
            cache = self.caches[hop.key] = ToyCache(job.span, self.world.windows, self.world.reach)
        output = cache.forward(job.position, rows)
        self.rows_run += len(rows)
        token = None
        if job.sample is not None:
            token = draw(output[-1], job.sample.sampling, job.sample.position, job.sample.ids)
        last = job.span.stop == LAYERS
        hop.computed(job, None if last else output, token, self.world.now)


# ------------------------------------------------------------------------------ a client's toy shell


class ToyClient(Node):
    def __init__(self, world: World, name: str, peers: list[ToyPeer], config: SessionConfig) -> None:
        super().__init__(world, name)
        self.peers, self.config = peers, config
        self.session = Session(config, self.plan, world.rng)
        self.base = list(config.prompt)  # what the text goes on from
        self.text = list(config.prompt)
        self.finish: str | None = None
        self.error: SwarmError | None = None
        self.repairs: list[Repaired] = []
        self.channels: dict[HopKey, _Channel] = {}
        self.gone = False
        self.reads = True
        self.seen_dead: dict[PeerId, float] = {}
        self._timer: float | None = None
        world.nodes[self.id] = self

    def start(self) -> None:
        if self.session.phase is Phase.NEW:  # a fault may have cancelled it already
            self.drive(self.session.start)

    def drive(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.gone:
            return
        call(*arguments, self.world.now)
        for effect in self.session.drain():
            self._perform(effect)
        self._arm()

    def _arm(self) -> None:
        at = self.session.deadline
        if at is not None and (self._timer is None or at < self._timer - 1e-9):
            self._timer = at
            self.world.at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.drive(self.session.tick)

    def _perform(self, effect: Any) -> None:
        match effect:
            case Send(key, message):
                self.world.counts[f"client {message.kind}"] += 1
                if isinstance(message, Resume) and message.have == 0 and self.session._held[key].oldest:
                    self.world.counts["replayed for want of a window"] += 1
                self.channels.setdefault(key, _Channel(self, key)).send(message)
            case Release(key):
                channel = self.channels.pop(key, None)
                if channel is not None:
                    channel.released = True
            case Grew(ids, first, finish):
                assert self.finish is None, "text after the end"
                assert first == len(self.text), f"grew at {first}, {len(self.text)} known"
                self.text += ids
                assert len(self.text) <= self.session._granted, "more than credit allowed"
                if finish is not None:
                    self.finish = finish
                if self.reads:
                    self.world.at(self.world.now, self.catch_up)
            case Repaired():
                self.repairs.append(effect)
                self.world.counts["repaired"] += 1
                self.world.counts[f"repaired: {effect.reason.split(':', 1)[-1].strip()[:40]}"] += 1
            case RepairStarted():
                self.world.counts["repair started"] += 1
            case Failed(error):
                self.error = error
            case Ended(finish):
                self.finish = finish
            case _:
                raise AssertionError(effect)

    def catch_up(self) -> None:
        self.drive(self.session.read, len(self.text))

    def rewind(self, position: int, new_ids: tuple[int, ...], limit: int | None = None) -> None:
        self.text[position:] = new_ids
        self.base = list(self.text)
        if limit is not None:
            self.config = replace(self.config, limit=limit, reserve=max(limit, self.config.reserve))
        self.drive(lambda *step: self.session.rewind(*step, limit=limit), position, new_ids)

    def lost(self, channel: _Channel, reason: str, peer_gone: bool) -> None:
        if self.channels.get(channel.key) is channel:
            del self.channels[channel.key]
            if not self.gone:
                call = lambda key, why, now: self.session.lost(key, why, now, peer_gone=peer_gone)  # noqa: E731
                self.drive(call, channel.key, reason)

    def plan(self, request: PlanRequest) -> Plan:
        """The chain with the fewest new hops, else a random one; dead peers are known only after a while."""
        world = self.world
        edges: list[tuple[RouteHop, float]] = [(hop, 0.1) for hop in request.kept]
        for peer in self.peers:
            if peer.id in request.excluded_peers:
                continue
            if not peer.alive and self.seen_dead.setdefault(peer.id, world.now) < world.now - 5.0:
                continue
            if peer.alive:
                self.seen_dead.pop(peer.id, None)
            for start in peer.span:
                for stop in range(start + 1, peer.span.stop + 1):
                    cost = 1.0 + world.rng.random() + 0.3 * (peer.ledger.free_positions < self.config.reserve)
                    edges.append((RouteHop(Span(start, stop), peer.id), cost))
        hops = cheapest(edges, request.excluded_links)
        if hops is None:
            raise NoRoute("toy", "somewhere", 0, 0, "wait")
        return Plan(Route(hops, 0.05), {PeerId(hop.peer): b"" for hop in hops}, chunk_s=0.1)


def cheapest(
    edges: Sequence[tuple[RouteHop, float]], bad_links: frozenset[tuple[PeerId, PeerId]]
) -> tuple[RouteHop, ...] | None:
    best: dict[tuple[int, str], tuple[float, tuple[RouteHop, ...]]] = {(0, ""): (0.0, ())}
    for layer in range(LAYERS):
        for (at, last), (cost, hops) in list(best.items()):
            if at != layer:
                continue
            for hop, more in edges:
                if hop.span.start != layer or (last, hop.peer) in bad_links:
                    continue
                if hop.span.stop == LAYERS and hops and (hop.peer, hops[0].peer) in bad_links:
                    continue
                to = (hop.span.stop, hop.peer)
                if to not in best or cost + more < best[to][0]:
                    best[to] = (cost + more, (*hops, hop))
    ends = [found for (at, _), found in best.items() if at == LAYERS]
    return min(ends, key=lambda found: found[0])[1] if ends else None


class _Channel:
    """One stream to one hop, made on the first send."""

    def __init__(self, client: ToyClient, key: HopKey) -> None:
        self.client, self.key = client, key
        self.outbox: list[Message] = []
        self.stream: Stream | None = None
        self.released = False
        client.world.connect(client, key.peer, self._connected)

    def _connected(self, stream: Stream | None, reason: str) -> None:
        if stream is None:
            self.client.lost(self, reason, True)
            return
        self.stream = stream
        peer = self.client.world.nodes[self.key.peer]
        assert isinstance(peer, ToyPeer)
        session = self.client.config.session
        peer.client_stream(stream, SessionKey(self.client.id, session, self.key.start))
        stream.on_message[self.client.name] = self._received
        stream.on_lost[self.client.name] = lambda reason, gone: self.client.lost(self, reason, gone)
        for message in self.outbox:
            stream.send(self.client, message)

    def _received(self, message: Message) -> None:
        # Also from a stream that is given up: the transport may still hold something.
        self.client.drive(self.client.session.receive, self.key, message)

    def send(self, message: Message) -> None:
        if self.stream is None:
            self.outbox.append(message)
        else:
            self.stream.send(self.client, message)


# ------------------------------------------------------------------------------ one seed, one world


class Trial:
    """A world made from a seed, its plan of faults, and what must hold at its end."""

    FAULTS_END = 40.0
    HANG = 900.0

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = world = World(seed)
        self.rng = world.rng
        self.hop_config = HopConfig(
            prefill_chunk=self.rng.choice((1, 2, 3, 5)), lease_s=10.0, grace_after_s=5.0, max_waiting_steps=2
        )
        self.longer = random.Random(~seed)
        self._choose_windows(self.longer)
        self.tight = self.rng.random() < 0.4
        self.copies = self.rng.choice((1, 2, 2))
        self.peers = self._make_peers()
        self.clients = [
            self._make_client(n) for n in range(3 if self.tight else self.rng.choice((1, 1, 2, 3)))
        ]
        self._plan_faults()

    def _choose_windows(self, rng: random.Random) -> None:
        """Some layers, or all, in half of the worlds; R from nothing to a few positions."""
        if rng.random() < 0.5:
            chosen = [layer for layer in range(LAYERS) if rng.random() < rng.choice((0.3, 1.0))]
            self.world.windows = {layer: rng.choice((1, 2, 4, 7)) for layer in chosen}
        chunk = self.hop_config.prefill_chunk
        self.world.reach = Reach(rng.choice((0, 1, 3, 6)), rng.choice((chunk, chunk, 1)))

    def _make_peers(self) -> list[ToyPeer]:
        while True:
            spans = [self._span() for _ in range(self.rng.randint(5, 9))]
            if all(sum(layer in span for span in spans) >= self.copies for layer in range(LAYERS)):
                break
        peers = []
        for number, span in enumerate(spans):
            capacity = self.rng.randint(LEAST_CAPACITY, 70) if self.tight else 1000
            peer = ToyPeer(self.world, f"peer{number}", span, capacity, self.hop_config)
            peer.step_s = peer.usual_s = self.rng.choice((0.002, 0.01, 0.05))
            peers.append(peer)
        return peers

    def _span(self) -> Span:
        start = self.rng.randrange(LAYERS)
        return Span(start, min(LAYERS, start + self.rng.randint(1, 4)))

    def _make_client(self, number: int) -> ToyClient:
        rng = self.rng
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 5, 12))))
        limit = len(prompt) + rng.choice((1, 5, 12, 25))
        config = SessionConfig(
            session=bytes([number]) * 16,
            prompt=prompt,
            limit=limit,
            fingerprint=FINGERPRINT,
            reserve=limit + rng.randint(0, 5),
            sampling=Sampling(temperature=1.0, seed=rng.randrange(1 << 30)),
            stop_ids=(STOP_ID,) if rng.random() < 0.5 else (),
            credit_window=rng.choice((1, 3, 64)),
            renew_every_s=1.5,
            exclusion_s=rng.choice((0.5, 60.0)),
            chunk=self.hop_config.prefill_chunk,
            patience_s=400.0,
            max_attempts=400,
            no_route_patience_s=200.0,
        )
        client = ToyClient(self.world, f"client{number}", self.peers, config)
        self.world.at(rng.random() * 0.5, client.start)
        return client

    # faults

    def _plan_faults(self) -> None:
        everything = [
            *(self._crash, self._crash, self._crash_two, self._freeze, self._slow, self._break, self._hole),
            *(self._reset, self._offline, self._cancel, self._vanish, self._rewind, self._rewind),
            *(self._stop_reading, self._leave, self._faulty, self._evict),
        ]
        forgetful = [self._reset_client, self._reset_client, self._break_client, self._rewind]
        if self.rng.random() < 0.8:
            kinds, number = everything, self.rng.choice((0, 1, 3, 6, 10))
        else:  # hops come back with what they knew long ago
            kinds, number = forgetful, 25
        for _ in range(number):
            within = self.rng.choice((1.0, 3.0, 10.0, self.FAULTS_END))  # most while there is work
            self.world.at(self.rng.random() * within, self.rng.choice(kinds))

    def _peer(self) -> ToyPeer:
        """Rather one that does something."""
        busy = [peer for peer in self.peers if peer.hops]
        return self.rng.choice(busy if busy and self.rng.random() < 0.8 else self.peers)

    def _crash(self) -> None:
        self._crash_one(self._peer())

    def _crash_one(self, peer: ToyPeer) -> None:
        if peer.alive:
            self.world.counts["crash"] += 1
            self.world.crash(peer, self.rng.choice((0.5, 3.0, 20.0)))
            peer.restarted()

    def _crash_two(self) -> None:
        self._crash()
        self.world.at(self.world.now + self.rng.choice((0.0, 0.02, 0.3)), self._crash)

    def _freeze(self) -> None:
        self.world.counts["freeze"] += 1
        self._peer().frozen_until = self.world.now + self.rng.choice((0.5, 3.0, 15.0, 30.0))

    def _slow(self) -> None:
        peer = self._peer()
        peer.step_s = self.rng.choice((0.5, 3.0, 20.0))
        self.world.at(self.world.now + 15.0, lambda: setattr(peer, "step_s", peer.usual_s))

    def _pair(self) -> tuple[Node, Node]:
        nodes: list[Node] = [*self.peers, *self.clients]
        one = self._peer()
        return one, self.rng.choice([node for node in nodes if node is not one])

    def _break(self) -> None:
        self.world.break_link(*self._pair(), self.rng.choice((0.0, 1.0, 20.0)))

    def _hole(self) -> None:
        self.world.hole(*self._pair(), self.rng.choice((1.0, 5.0, 30.0)))

    def _reset(self) -> None:
        self.world.reset_streams(*self._pair())

    def _reset_client(self) -> None:
        self.world.reset_streams(self._client(), self._peer())

    def _break_client(self) -> None:
        self.world.break_link(self._client(), self._peer(), 0.1)

    def _client(self) -> ToyClient:
        return self.rng.choice(self.clients)

    def _offline(self) -> None:
        client, seconds = self._client(), self.rng.choice((0.5, 4.0, 25.0))
        if client.gone or client.finish is not None:
            return
        told = self.rng.random() < 0.7
        if told:
            client.drive(client.session.online, False)
            self.world.at(self.world.now + seconds, lambda: client.drive(client.session.online, True))
        breaks = self.rng.random() < 0.5
        for peer in self.peers:
            if breaks:
                self.world.break_link(client, peer, seconds)
            else:
                self.world.hole(client, peer, seconds)

    def _cancel(self) -> None:
        client = self._client()
        client.drive(client.session.cancel)

    def _vanish(self) -> None:
        client = self._client()
        client.gone = True
        self.world.crash(client, None)

    def _rewind(self) -> None:
        client = self._client()
        if client.gone or client.finish is not None:
            return
        position = self.rng.randint(0, len(client.text))
        new = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.choice((0, 1, 2, 6))))
        limit = min(LEAST_CAPACITY, client.config.limit + self.longer.choice((0, 0, -1, 1, 4, 9)))
        if 1 <= position + len(new) < limit:
            client.rewind(position, new, limit)

    def _stop_reading(self) -> None:
        client = self._client()
        client.reads = False

        def again() -> None:
            client.reads = True
            client.catch_up()

        self.world.at(self.world.now + self.rng.choice((1.0, 12.0)), again)

    def _leave(self) -> None:
        peer = self._peer()
        for key in list(peer.hops):
            peer.hops[key].leave(5.0)
            peer.run(lambda key=key: peer._drive(key))

    def _faulty(self) -> None:
        if all(peer.faulty_until == 0.0 for peer in self.peers):  # two would rightly reject the step
            self._peer().faulty_until = self.world.now + 3.0

    def _evict(self) -> None:
        peer = self._peer()
        if peer.hops and peer.alive and peer.frozen_until <= self.world.now:
            key = self.rng.choice(list(peer.hops))
            peer.hops[key].evict(self.world.now)
            peer._drive(key)

    # the end

    def run(self) -> Counter[str]:
        """Raises AssertionError when anything isn't as it must be."""
        self.world.run_until(self.HANG, self._over)
        for client in self.clients:
            self._check(client)
        self.world.run_until(self.world.now + self.FAULTS_END + 3 * self.hop_config.lease_s)
        for peer in self.peers:
            assert not peer.ledger.held, f"{peer.name} still holds {peer.ledger.held}"
            assert not peer.hops and not peer.caches, f"{peer.name} still has hops {list(peer.hops)}"
        return self.world.counts

    def _over(self) -> bool:
        return all(client.gone or client.finish is not None for client in self.clients)

    def _check(self, client: ToyClient) -> None:
        if client.gone:
            return
        assert client.finish is not None, f"{client.name} hangs in {client.session.phase}"
        config = client.config
        right = whole_text(client.base, config.limit, config.stop_ids, config.sampling, self.world.windows)
        assert list(client.session.ids) == client.text, "what grew isn't what is known"
        assert client.text == right[: len(client.text)], f"{client.name}: {client.text} should be {right}"
        if client.finish in ("stop", "length"):
            assert client.text == right, f"{client.name} ended early with {client.finish}"
            assert (client.finish == "stop") == (right[-1] in config.stop_ids)
        else:
            assert client.finish == "cancelled", f"{client.name} failed: {client.error!r}"


# ------------------------------------------------------------------------------ taking rules away


def _patched(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _steps_before_resume() -> Callable[[], None]:
    def accepts(self: Hop, epoch: int) -> str:
        if self.finished or epoch < self._epoch:
            return "never"
        return "now" if epoch == self._epoch else "later"

    receive_step = Hop.receive_step

    def eager(self: Hop, *arguments: Any) -> None:
        resumed, self._resumed = self._resumed, True
        if not resumed:
            self._resume_at = 1 << 20
        receive_step(self, *arguments)
        self._resumed = resumed

    undo = [_patched(Hop, "accepts", accepts), _patched(Hop, "receive_step", eager)]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


def _length_counts_finished_steps() -> Callable[[], None]:
    def takes(self: Hop, step: Step, count: int) -> bool:
        length = self._journal.length
        if step.round is None:
            return step.position == length and step.position + count <= self._resume_at
        return step.round == self._next_round and step.position <= length

    return _patched(Hop, "_takes", takes)


def _length_counts_taken_steps_in_prepared() -> Callable[[], None]:
    """What KV holds or will hold is told to the client, not what the journal can give."""
    begin, check = Hop._begin, Hop._check_resume

    def told(self: Hop, message: Any) -> None:
        taken = self._taken
        begin(self, message)
        self._told = taken  # type: ignore[attr-defined]

    def answer(self: Hop) -> None:
        from swarm.messages import Opened, Prepared

        self._answered = True
        length = getattr(self, "_told", self._taken)
        opened = isinstance(self._chain, Open)
        self._tell(Opened(self._epoch) if opened else Prepared(self._epoch, length))

    def lax(self: Hop, message: Any, ids: list[int]) -> None:
        try:
            check(self, message, ids)
        except MessageError:
            if message.have <= self._journal.length:
                raise

    undo = [
        _patched(Hop, "_begin", told),
        _patched(Hop, "_answer", answer),
        _patched(Hop, "_check_resume", lax),
    ]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


def _prepare_after_any_open() -> Callable[[], None]:
    arm_opening = Session._arm_opening

    def eager(self: Session, now: float) -> None:
        for held in self._held.values():
            held.opened = True
        arm_opening(self, now)

    return _patched(Session, "_arm_opening", eager)


def _no_rewind_bound() -> Callable[[], None]:
    resume = Session._resume

    def unbounded(self: Session, now: float) -> None:
        self._rewound_to = None
        resume(self, now)

    return _patched(Session, "_resume", unbounded)


def _old_tokens_count() -> Callable[[], None]:
    """Client and first hop append whatever fits their length, of whichever epoch."""
    receive, tokens, accepts = Session.receive, Hop.receive_tokens, Hop.accepts

    def lax_client(self: Session, key: HopKey, message: Message, now: float) -> None:
        known = len(self._ids)
        old = isinstance(message, Tokens) and message.epoch < self._epoch and self.phase is not Phase.DONE
        if old and message.first_position <= known:  # type: ignore[attr-defined]
            ids = read_ids(message.ids)[known - message.first_position :]  # type: ignore[attr-defined]
            if ids and known + len(ids) < self._config.limit:
                self._ids += ids
                self._effects.append(Grew(tuple(ids), known, None, NOTHING_SPENT))
        receive(self, key, message, now)

    def lax_hop(self: Hop, sender: PeerId, epoch: int, *rest: Any) -> None:
        tokens(self, sender, self._epoch, *rest)

    def lax_accepts(self: Hop, epoch: int) -> str:
        return accepts(self, max(epoch, self._epoch) if self._is_first else epoch)

    undo = [
        _patched(Session, "receive", lax_client),
        _patched(Hop, "receive_tokens", lax_hop),
        _patched(Hop, "accepts", lax_accepts),
    ]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


def _no_starting_over() -> Callable[[], None]:
    return _patched(Session, "_start_over", Session._trouble)


def _rewound_blindly() -> Callable[[], None]:
    """Hops are cut to wherever the client wants, as if windows let go of nothing."""
    undo = [
        _patched(_Held, "kept", lambda self, upto: min(self.length, upto)),
        _patched(Rewinds, "allows", lambda self, position: True),
    ]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


def _windows_follow_finished_steps() -> Callable[[], None]:
    """What a step lets go of is counted when it is finished: too late for a `Prepared` before that."""
    wrote, computed = Rewinds.wrote, Hop.computed

    def finished(self: Hop, *arguments: Any) -> None:
        wrote(self._rewinds, *getattr(self._rewinds, "handed_out", (0, 1)))
        computed(self, *arguments)

    undo = [
        _patched(Rewinds, "wrote", lambda self, *step: setattr(self, "handed_out", step)),
        _patched(Hop, "computed", finished),
    ]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


RULES: dict[str, Callable[[], Callable[[], None]]] = {
    "no-step-before-resume": _steps_before_resume,
    "length-counts-taken": _length_counts_finished_steps,
    "length-is-journal": _length_counts_taken_steps_in_prepared,
    "prepare-only-after-opened": _prepare_after_any_open,
    "rewind-bound": _no_rewind_bound,
    "drop-old-tokens": _old_tokens_count,
    "three-refusals": _no_starting_over,
    "cannot-rewind": _rewound_blindly,
    "windows-count-handed-out": _windows_follow_finished_steps,
}


@contextmanager
def without(rule: str | None) -> Iterator[None]:
    undo = RULES[rule]() if rule is not None else lambda: None
    try:
        yield
    finally:
        undo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--without", choices=sorted(RULES))
    parser.add_argument("--show", type=int, default=5, help="tracebacks to print")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    with without(options.without):
        for seed in range(options.start, options.start + options.seeds):
            try:
                counts += Trial(seed).run()
            except Exception as error:
                failed[f"{type(error).__name__}: {str(error)[:50]}"] += 1
                if sum(failed.values()) <= options.show:
                    print(f"seed {seed}: {''.join(traceback.format_exception(error)[-3:])}")
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    print(f"{sum(failed.values())} of {options.seeds} seeds failed", dict(failed.most_common(8)))


if __name__ == "__main__":
    main()
