"""SHELL of a serving peer: sockets -> hop -> engine -> next hop.

One `HopRun` a (client, session, start layer): it owns the `hop.Hop` core, the KV cache, the stream to the
client and the streams to its neighbours, does what the core asks for, and keeps the core's one timer.
The state outlives its streams: a client that reconnects finds it until the lease is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.admission import AdmissionConfig, Holding, OpenRate, sessions_to_let_go
from peer.cache import KvPool
from peer.engine import Engine, Job, JobResult
from peer.hop import Hop, HopConfig, SessionKey
from peer.hop_effects import Compute, Effect, EnsureLink, Free, SendStep, SendTokens, ToClient
from peer.model import from_raw, to_raw
from peer.outbound import Outbound, check_target
from routing.spans import Span
from swarm.addresses import address_group
from swarm.errors import (
    BadInput,
    CacheFull,
    EngineStopped,
    MessageError,
    PeerFailed,
    StepFailed,
    SwarmError,
)
from swarm.flow import Priority
from swarm.identity import PeerId
from swarm.link import Link, Stream
from swarm.messages import (
    MAX_BIASED,
    Extend,
    HopRef,
    Message,
    Open,
    Prepare,
    RefusedMessage,
    Renew,
    Resume,
    Spent,
    Step,
    StepsLink,
    Tokens,
    TokensLink,
    Unknown,
    Where,
)
from swarm.node import Node
from swarm.packing import MAX_MAP_BYTES, Specs
from swarm.records import open_descriptor
from swarm.tensors import ITEM_BYTES, check_ids, ids_tensor, read_ids
from swarm.transport import Transport

log = logging.getLogger("swarm.server")

MAX_STEP_ROWS = 2048  # rows of one step that a neighbour may send; our own chunks are far smaller
STEP_HEADER_BYTES = 1024  # a step's map
RESUME_BYTES = MAX_MAP_BYTES + 2 + 8 * MAX_BIASED  # beside its ids, of which there are as many as the context has
TELL_AGAIN_S = 6.0  # while leaving: above the 5 s for which a client with nowhere to go lets the matter rest


@dataclass(frozen=True, slots=True)
class Serving:
    """What this peer serves. width: of hidden states, whose rows travel as `dtype`."""

    fingerprint: bytes
    span: Span
    layers: int
    width: int
    dtype: str
    max_sessions: int
    context: int
    vocab: int


class Server:
    """All sessions of this peer. Raises nothing at its callers; faults cost the stream they came on."""

    def __init__(
        self,
        node: Node,
        transport: Transport,
        engine: Engine,
        pool: KvPool,
        serving: Serving,
        config: HopConfig,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self.node, self.transport, self.engine, self.pool = node, transport, engine, pool
        self.serving, self.config = serving, config
        pool.on_free = engine.drop
        self.me = transport.identity.peer_id
        self.admission = admission or AdmissionConfig()
        self._opens = OpenRate(self.admission)
        self.runs: dict[SessionKey, HopRun] = {}  # in the order in which they were opened
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None  # a session came or went
        self.emptied = asyncio.Event()
        self.emptied.set()
        for first in (Open, Prepare):
            most = RESUME_BYTES + ITEM_BYTES["int32"] * serving.context
            transport.handle(first, self._on_session, max_message_bytes=most)
        most = STEP_HEADER_BYTES + MAX_STEP_ROWS * serving.width * ITEM_BYTES[serving.dtype]
        transport.handle(StepsLink, self._on_steps, max_message_bytes=most)
        transport.handle(TokensLink, self._on_tokens)

    @property
    def sessions(self) -> int:
        return len({(client, session) for client, session, _ in self.runs})

    @property
    def free_kv_tokens(self) -> int:
        """Positions that a new session over the whole claim could have now, silent clients let go if need be."""
        silent = [run.key for run in self._silent()]
        if len(self.runs) - len(silent) >= self.serving.max_sessions:
            return 0
        return self.pool.ledger.free_without(silent)

    # ------------------------------------------------------------ streams from clients

    async def _on_session(self, stream: Stream, message: Message) -> None:
        run: HopRun | None = None
        try:
            while True:
                if isinstance(message, Open | Prepare):
                    if not self._may_begin(stream, message):
                        message = await stream.receive()
                        continue
                    run = self._run_for(stream, message, run)
                if isinstance(message, Extend) and message.positions > self.serving.context:
                    reason = self._beyond_context(message.positions)
                    stream.send_nowait(RefusedMessage(message.epoch, reason, self.config.retry_after_s))
                elif run is not None and not run.freed:
                    run.receive(stream, message)
                elif isinstance(message, Resume | Renew | Where | Extend):
                    stream.send_nowait(Unknown(message.epoch))
                message = await stream.receive()
        finally:
            if run is not None:
                run.detach(stream)

    def _may_begin(self, stream: Stream, message: Open | Prepare) -> bool:
        """False: this client, or its network, begins too many epochs, and was told so."""
        link = stream.link
        if self._opens.take(link.peer, address_group(link.remote[0]), asyncio.get_running_loop().time()):
            return True
        reason = f"too many sessions are opened from there: {self.admission.opens_per_s:g} a second are taken"
        stream.send_nowait(RefusedMessage(message.epoch, reason, self.admission.retry_after_s))
        return False

    def _run_for(self, stream: Stream, message: Open | Prepare, before: HopRun | None) -> HopRun | None:
        """The run that this message is for, made on `Open`; None once it was answered with a no.

        before: the one that this stream was for so far.
        """
        client = stream.link.peer
        key = SessionKey(client, message.session, message.span.start)
        if before is not None and before.key != key:
            raise MessageError("a stream is for one hop of one session")
        run = self.runs.get(key)
        if run is not None:
            if isinstance(message, Open) and (wrong := self._unservable(message)) is not None:
                raise MessageError(wrong)
            return run
        if isinstance(message, Prepare):
            stream.send_nowait(Unknown(message.epoch))
            return None
        group = address_group(stream.link.remote[0])
        reason = self._unservable(message) or self._no_room(message, client, group)
        if reason is not None:
            stream.send_nowait(RefusedMessage(message.epoch, reason, self.config.retry_after_s))
            return None
        run = self.runs[key] = HopRun(self, client, message.session, message.span.start, group)
        self.emptied.clear()
        return run

    def _unservable(self, message: Open) -> str | None:
        """Why such a session could never be held here, or None."""
        serving = self.serving
        if message.fingerprint != serving.fingerprint:
            return f"another model is served here ({serving.fingerprint.hex()[:8]})"
        if not serving.span.covers(message.span):
            return f"layers {message.span} aren't served here, {serving.span} are"
        if message.reserve > serving.context:
            return self._beyond_context(message.reserve)
        return None

    def _beyond_context(self, positions: int) -> str:
        return f"{positions} positions are beyond the context of {self.serving.context} here"

    def _no_room(self, message: Open, client: PeerId, group: str) -> str | None:
        """Why one more session can't be held now, or None. Silent ones are let go for it, and some of those who
        hold more than their share."""
        if self.draining:
            return "draining"
        self._make_room(message.reserve, message.span)
        self._share_out(message, client, group)
        if len(self.runs) >= self.serving.max_sessions:
            return f"full: {len(self.runs)} of {self.serving.max_sessions} sessions are open"
        return None

    def _make_room(self, positions: int, span: Span) -> None:
        """Let go of sessions whose client has fallen silent, the stalest first, while room is lacking.

        Of none if all of them wouldn't be enough: their clients may come back.
        """
        silent = self._silent()
        if not self.pool.has_room(positions, span, [run.key for run in silent]):
            return
        for run in silent:
            if self.pool.has_room(positions, span) and len(self.runs) < self.serving.max_sessions:
                return
            log.info("session %s let go: its client was silent", run.key.session.hex()[:8])
            run.evict()

    def _share_out(self, message: Open, client: PeerId, group: str) -> None:
        """Let go of sessions of whoever holds most, where `client` has less and finds no room. Of none if that
        wouldn't be enough."""
        ledger, runs = self.pool.ledger, list(self.runs.values())
        surplus = len(runs) + 1 - self.serving.max_sessions
        going = sessions_to_let_go(_holdings(runs, lambda _: 1), client, group, 1, surplus)
        if len(going) < surplus:
            return
        staying = [run for run in runs if run.key not in going]
        wanted = ledger.sizes.bytes(message.reserve, message.span)
        lacking = ledger.used + wanted - ledger.total - sum(map(ledger.held, going))
        if lacking > 0:
            more = sessions_to_let_go(_holdings(staying, ledger.held), client, group, wanted, lacking)
            going = going + more if more else []
        for run in [run for run in runs if run.key in going]:
            log.info("session %s let go: %s holds more than its share", run.key.session.hex()[:8], run.key.client[:8])
            run.evict()

    def _silent(self) -> list[HopRun]:
        """Sessions whose client isn't heard, the stalest first."""
        now = asyncio.get_running_loop().time()
        silent = [run for run in self.runs.values() if run.core.in_grace(now)]
        return sorted(silent, key=lambda run: run.core.idle_since or 0.0)

    # ------------------------------------------------------------ streams from other hops

    async def _on_steps(self, stream: Stream, link: Message) -> None:
        assert isinstance(link, StepsLink)
        run = self._linked(link)
        stream.admit(self._admit_step)
        while await run.ready_for(link.epoch):
            run.check_sender(stream.link.peer, first=False)
            step = await stream.receive()
            if not isinstance(step, Step) or step.epoch != link.epoch:
                raise MessageError(f"expected a Step of epoch {link.epoch}, got {type(step).__name__}")
            run.receive_step(stream.link.peer, step, self.hidden(step))

    async def _on_tokens(self, stream: Stream, link: Message) -> None:
        assert isinstance(link, TokensLink)
        run = self._linked(link)
        while await run.ready_for(link.epoch):
            run.check_sender(stream.link.peer, first=True)
            tokens = await stream.receive()
            if not isinstance(tokens, Tokens) or tokens.epoch != link.epoch:
                raise MessageError(f"expected Tokens of epoch {link.epoch}, got {type(tokens).__name__}")
            run.receive_tokens(stream.link.peer, tokens)

    def _linked(self, link: StepsLink | TokensLink) -> HopRun:
        run = self.run_at(link.client, link.session, link.start)
        if run is None:
            raise MessageError("no such session here")
        return run

    def hidden(self, step: Step) -> Tensor:
        """The step's rows as a tensor [n, width]. Raises MessageError unless shape and dtype are the model's."""
        self._check_hidden({name: (raw.dtype, raw.shape) for name, raw in step.tensors.items()})
        return from_raw(step.tensors["hidden"])

    def _admit_step(self, values: Mapping[str, Any], specs: Specs) -> None:
        """Looked at when a step's map is here, before memory is taken for its rows. Raises MessageError."""
        if values.get("kind") == Step.kind:
            self._check_hidden({name: (dtype, shape) for name, dtype, shape in specs})

    def _check_hidden(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        dtype, shape = tensors.get("hidden", ("nothing", ()))
        wanted, width = self.serving.dtype, self.serving.width
        if dtype != wanted or len(shape) != 2 or shape[1] != width or not 0 < shape[0] <= MAX_STEP_ROWS:
            raise MessageError(
                f"a step carries `hidden` as {wanted} [n, {width}], n up to {MAX_STEP_ROWS}, got {list(shape)} {dtype}"
            )

    def run_at(self, client: PeerId, session: bytes, start: int) -> HopRun | None:
        return self.runs.get(SessionKey(client, session, start))

    async def reach(self, to: HopRef, client: Link | None) -> Link:
        """A connection to another hop, by the addresses in its signed descriptor. Raises PeerFailed.

        client: whose chain it is; None if it is gone."""
        if client is None:
            raise PeerFailed(to.peer, "its client is gone")
        return await self.node.link_for(to.peer, open_descriptor(to.descriptor).addresses, client)

    def forget(self, run: HopRun) -> None:
        self.runs.pop(run.key, None)
        if not self.runs:
            self.emptied.set()
        self.on_change()

    # ------------------------------------------------------------ leaving

    async def drain(self, within_s: float) -> None:
        """No new sessions; those open are told to go elsewhere. Returns when none is left or time is up.

        Told again and again, since whoever could take them over may only be starting.
        """
        self.draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while self.runs and (left_s := until - loop.time()) > 0:
            for run in list(self.runs.values()):
                run.leave(left_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, TELL_AGAIN_S)):
                    await self.emptied.wait()
        if self.runs:
            log.info("%d sessions were still open after %.0f s", len(self.runs), within_s)

    def close(self) -> None:
        """Let go of what is still open without a word (the connections, which close now too, say it)."""
        for run in list(self.runs.values()):
            run.let_go()


def _holdings(runs: Sequence[HopRun], amount: Callable[[SessionKey], int]) -> list[Holding[SessionKey]]:
    return [Holding(run.key, run.key.client, run.group, amount(run.key)) for run in runs]


class HopRun:
    """Shell around one `Hop` core."""

    def __init__(self, server: Server, client: PeerId, session: bytes, start: int, group: str) -> None:
        self.group = group  # of addresses, from which the client came
        self.core = Hop(server.me, client, session, start, server.config, server.pool, torch.cat)
        self.key = self.core.key
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._outbound: Outbound | None = None  # of the newest epoch
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self.freed = False

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def client_link(self) -> Link | None:
        return None if self._stream is None else self._stream.link

    # ------------------------------------------------------------ what comes in

    def receive(self, stream: Stream, message: Message) -> None:
        """Raises MessageError when the message can't be right."""
        if isinstance(message, Open | Prepare):
            check_target(message, self._server.me, self._server.serving)
        elif isinstance(message, Resume) and message.ids is not None:
            check_ids(message.ids, self._server.serving.vocab)
        if self._stream is None or isinstance(message, Open | Prepare):  # else a late one on a stream given up
            self._stream = stream
        self._drive(self.core.receive, message)
        if isinstance(message, Open):
            self._server.on_change()

    def receive_step(self, sender: PeerId, step: Step, rows: Tensor) -> None:
        self._drive(self.core.receive_step, sender, step.epoch, step, rows)

    def receive_tokens(self, sender: PeerId, tokens: Tokens) -> None:
        """Raises MessageError; the client of this session hears who sent it."""
        assert tokens.ids is not None
        try:
            check_ids(tokens.ids, self._server.serving.vocab)
            ids = read_ids(tokens.ids)
        except MessageError as error:
            self._drive(self.core.bad_input, sender, tokens.epoch, str(error))
            raise
        self._drive(self.core.receive_tokens, sender, tokens.epoch, tokens.first_position, ids)

    async def ready_for(self, epoch: int) -> bool:
        """Wait until a step of `epoch` may be read; False once that epoch is over."""
        while (verdict := "never" if self.freed else self.core.accepts(epoch)) == "later":
            self._changed.clear()
            await self._changed.wait()
        return verdict == "now"

    def check_sender(self, sender: PeerId, *, first: bool) -> None:
        """Raises MessageError unless the present chain puts `sender` before this hop (first: round the ring)."""
        if not self.core.takes_from(sender, first):
            raise MessageError("this chain has another hop there")

    def detach(self, stream: Stream) -> None:
        """The client's stream is gone; the lease runs on. What never opened holds nothing, and goes."""
        if self.freed:
            return
        if self._stream is stream:
            self._stream = None
            self._drive(self.core.client_gone)
        if self.core.finished:
            self.let_go()

    def link_up(self, epoch: int) -> None:
        self._drive(self.core.link_up, epoch)

    def link_down(self, epoch: int, reason: str) -> None:
        self._drive(self.core.link_down, epoch, reason)

    def evict(self) -> None:
        self._drive(self.core.evict)

    def leave(self, within_s: float) -> None:
        self.core.leave(within_s)
        self._transmit()

    # ------------------------------------------------------------ what the core wants

    def _drive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Tell the core, do what it wants done, and re-arm the one timer."""
        if not self.freed:
            call(*arguments, self.now)
            self._transmit()

    def _transmit(self) -> None:
        for effect in self.core.drain():
            self._perform(effect)
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.freed and self.core.deadline is not None:
            self._timer = self._loop.call_at(self.core.deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._drive(self.core.tick)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ToClient(message):
                self._to_client(message)
            case EnsureLink(epoch, to):
                self._replace_outbound(Outbound(self._server, self, epoch, to))
            case SendStep():
                step = Step(
                    {"hidden": to_raw(effect.payload)},
                    effect.epoch, effect.round, effect.position, effect.sample,
                    effect.spent,
                )  # fmt: skip
                self._send(step, Priority.DECODE if len(effect.payload) == 1 else Priority.PREFILL)
            case SendTokens(epoch, _, first, ids):
                self._send(Tokens(epoch, first, ids=ids_tensor(ids)), Priority.DECODE)
            case Compute():
                self._compute(effect)
            case Free():
                self.let_go()

    def _to_client(self, message: Message) -> None:
        if self._stream is not None:
            try:
                self._stream.send_nowait(message, Priority.CONTROL)
            except SwarmError as error:  # gone or not reading: the lease decides, not this message
                log.debug("the client of %s can't be told: %s", self.key.session.hex()[:8], error)

    def _replace_outbound(self, outbound: Outbound | None) -> None:
        if self._outbound is not None:
            self._outbound.close()
        self._outbound = outbound

    def _send(self, message: Message, priority: Priority) -> None:
        assert self._outbound is not None, "the core sends only over a link that it asked for"
        self._outbound.send(message, priority)

    def _compute(self, work: Compute) -> None:
        job = Job(
            cache=self._server.pool.cache(self.key),
            span=work.span,
            position=work.position,
            ids=work.ids,
            hidden=work.payload,
            sample=work.sample,
        )
        try:
            answer = self._server.engine.submit(job)
        except SwarmError as error:  # told in its turn: the core is still saying what it wants
            answer = self._loop.create_future()
            answer.set_exception(error)
        answer.add_done_callback(lambda done: self._computed(work, done))

    def _computed(self, work: Compute, answer: asyncio.Future[JobResult]) -> None:
        error = StepFailed(str(work.span), "the session was closed") if answer.cancelled() else answer.exception()
        if self.freed or isinstance(error, EngineStopped):  # stopped: this peer is closing, its links say so
            return
        if error is not None:
            if not isinstance(error, SwarmError):  # a bug of ours: told in full here, in short to the client
                log.error("a step failed", exc_info=error)
            what = "input" if isinstance(error, BadInput) else "room" if isinstance(error, CacheFull) else "step"
            self._drive(functools.partial(self.core.failed, what=what), work, str(error) or type(error).__name__)
            return
        result = answer.result()
        spent = Spent(result.computed_s, result.waited_s)
        self.core.computed(work, result.output, result.token, self.now, spent, result.likelihoods)
        self._transmit()

    def let_go(self) -> None:
        """No timer, stream or task of this session is left afterwards."""
        if self.freed:
            return
        self.freed = True
        if self._timer is not None:
            self._timer.cancel()
        self._replace_outbound(None)
        self._changed.set()
        self._server.forget(self)
