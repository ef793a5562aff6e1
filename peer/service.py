"""A peer's life: claim -> load -> advertise -> serve -> drain.

`PeerService` is the life itself, for tests and programs; `command.py` runs it as `swarm peer`. What a peer decides it
says in a line, with the numbers that decided it.

A span is chosen once: after a short random delay, from what the registry shows then; it is advertised as
loading, looked at again one spreading time later, loaded, and kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import ipaddress
import logging
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

import swarm
from peer.capacity import (
    check_device,
    check_dtype,
    check_memory,
    describe_device,
    free_memory,
    memory_budget,
    numerics_class,
    physical_cores,
    pick_dtype,
    plan_memory,
    show,
    told_when_out_of_memory,
    torch_dtype,
    uses_tf32,
)
from peer.checkpoint import Progress, no_progress
from peer.handout import Handout
from peer.hop import HopConfig
from routing.estimates import compute_s
from routing.placement import Claim, NothingFits, choose_span, recheck
from routing.spans import Span
from swarm.addresses import parse_address
from swarm.display import WARNINGS, count
from swarm.errors import UsageError
from swarm.lan import Announced, Lan, lan_wanted
from swarm.messages import GetFiles
from swarm.node import Node
from swarm.records import MAX_ADDRESSES, MAX_DEVICE_NAME, MAX_MODEL_NAME, MAX_NAME, Descriptor, Load
from swarm.state import PeerDir, StateDir
from swarm.transport import Transport

log = logging.getLogger("swarm.service")

LONGEST_DELAY_S = (
    1.0  # before choosing, where others are: so that those who start together don't choose together
)
SPREADING_S = 1.0  # in which a change reaches a small swarm (gossip's own pace: about 0.1 s a round)
DRAIN_S = 25.0  # open sessions have so long to move before they are left to their clients' repair
MOST_CHOICES = 8  # of a span while others choose too: honest peers settle sooner, and nobody keeps us choosing
FIGURES_S = 1.0  # how often load and speed are brought up to date for the next heartbeat


@dataclass(frozen=True)
class PeerOptions:
    """What `swarm peer` takes, as typed."""

    model: str
    join: tuple[str, ...] = ()
    host: str | None = None
    port: int | None = None
    announce: tuple[str, ...] = ()
    memory: str | None = None
    layers: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    name: str | None = None
    served_name: str | None = None
    max_sessions: int = 8
    context: int | None = None
    new: bool = False
    revision: str | None = None
    lan: bool = True
    network: str = "main"

    def check(self) -> None:
        """Raises UsageError for what can be told without looking at anything."""
        if self.layers is not None:
            self.span()
        cpus = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cpus:
            raise UsageError(
                f"--threads lies between 1 and the {cpus} CPUs of this machine, got {self.threads}"
            )
        if self.max_sessions < 1:
            raise UsageError(f"--max-sessions must be at least 1, got {self.max_sessions}")
        if self.context is not None and self.context < 2:
            raise UsageError(f"--context must be at least 2, got {self.context}")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise UsageError(f"--port lies between 0 (any) and 65535, got {self.port}")
        check_memory(self.memory)
        check_device(self.device)
        check_dtype(self.dtype)
        _check_name("--name", self.name, MAX_NAME)
        _check_name("--served-name", self.served_name, MAX_MODEL_NAME)
        for address in (*self.join, *self.announce):
            parse_address(address)

    def span(self) -> Span | None:
        if self.layers is None:
            return None
        try:
            return Span.parse(self.layers)
        except ValueError as error:
            raise UsageError(f"--layers: {error}") from None


def _check_name(option: str, name: str | None, most: int) -> None:
    if name is not None and not (name and len(name) <= most and name.isprintable()):
        raise UsageError(f"{option} takes 1 to {most} printable characters, got {name[:120]!r}")


class PeerService:
    """One peer, from nothing to serving and back.

    say: one line for the person who runs it. progress: of downloads, hashing and loading.
    Raises SwarmError from `start`, and then nothing is left behind, no claim in the registry either.
    """

    def __init__(
        self,
        options: PeerOptions,
        *,
        state: StateDir | None = None,
        say: Callable[[str], None] = lambda _: None,
        progress: Progress = no_progress,
        rng: random.Random | None = None,
    ) -> None:
        options.check()
        self._options = options
        self._state = state or StateDir.open(None)
        self._say, self._progress = say, progress
        self._rng = rng or random.Random()
        self._stack = contextlib.AsyncExitStack()
        self.config = HopConfig()
        self._beat: asyncio.Task[None] | None = None
        self._sessions = 0
        self._published = False

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Returns once this peer serves. Raises SwarmError."""
        try:
            await self._open()
            await self._choose_model()
            await self._claim()
            await self._load()
            await self._serve()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        """Identity, port, and the swarm."""
        options = self._options
        self._dir: PeerDir = self._stack.enter_context(self._state.lock_peer(new=options.new))
        if self._state.first_start():
            self._say(WARNINGS)
        known = self._state.known_hosts(options.network)
        self.transport = Transport(self._dir.identity, options.network, known_hosts=known)
        self._stack.push_async_callback(self.transport.close)
        await self.transport.listen(options.host, options.port)
        self.node = Node(
            self.transport, role="peer", state=self._state, peer_dir=self._dir, lan=self._lan(), rng=self._rng
        )
        self._stack.push_async_callback(self.node.close)
        await self.node.start(options.join)
        me = self.transport.identity.peer_id
        others = sum(entry.peer != me for entry in self.node.entries())
        found = f"with {count(others, 'peer')} in the swarm" if others else "the first in its swarm"
        self._say(f"peer     {self._name()} ({me[:8]}), port {self.transport.port}, {found}")

    def _lan(self) -> Lan | None:
        """Where others find us without an address; not if others can't reach us there."""
        host = self._options.host
        hosts = own_hosts() if host is None or _is_unspecified(host) else [host]
        dialable = [text for text in hosts if _is_lan_address(text)]
        if not (self._options.lan and lan_wanted() and dialable):
            return None
        announced = Announced(self.transport.identity.peer_id, self.transport.port, dialable)
        return Lan(self._options.network, announced)

    async def _choose_model(self) -> None:
        """What MODEL is, and what of it would fit here."""
        from peer.source import resolve_model

        options = self._options
        self.source = await asyncio.to_thread(
            resolve_model,
            options.model,
            cache=self._state.cache,
            revision=options.revision,
            served_name=options.served_name,
            progress=self._progress,
        )
        await asyncio.to_thread(self._size_up)
        handout = Handout(self.source.tokenizer_hash, self.source.tokenizer_files())
        self.transport.handle(GetFiles, handout.answer)  # no earlier: there was nothing to hand out

    def _size_up(self) -> None:
        """What of the model would fit here, told in a few lines. Imports torch, so it runs in a thread."""
        self._progress("starting torch", 0, 0)
        from peer.weights import span_prices

        options, config = self._options, self.source.config
        self.device = describe_device(options.device)
        stored = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
        self.dtype = pick_dtype(options.dtype, self.device.device, stored)
        self.numerics = numerics_class(self.device.device, self.dtype, tf32=uses_tf32(self.device.device, self.dtype))
        self.threads = options.threads or physical_cores()
        if self.device.device == "cpu":
            self._progress("preparing loops for this machine", 0, 0)
        self.prices = span_prices(self.source, torch_dtype(self.dtype), self.device.device)
        free = free_memory(self.device.device)
        budget = memory_budget(options.memory, self.device.device, free)
        self.plan = plan_memory(
            self.source,
            self.prices,
            device=self.device.device,
            dtype=self.dtype,
            budget=budget,
            sessions=options.max_sessions,
            context=options.context,
            chunk=self.config.prefill_chunk,
        )
        self._say(f"device   {self.device.device} ({self.device.name}), {self.dtype}, {self.threads} threads")
        if self.device.reason:
            self._say(f"         {self.device.reason}")
        if self.device.idle:
            more = " and ".join(self.device.idle)
            self._say(
                f"         {more} idle: start one more `swarm peer ... --device {self.device.idle[0]}` for each"
            )
        layer = self.prices(Span(self.source.layers // 2, self.source.layers // 2 + 1))
        held = str(self.prices.weight_dtype).removeprefix("torch.")
        kept = f", kept in {held} as published" * (held != self.dtype)
        self._say(f"memory   {show(free)} free, {show(budget)} to use; {show(layer)} of weights per layer{kept}")

    # ------------------------------------------------------------ claim

    async def _claim(self) -> None:
        """Delay, choose, advertise as loading, look again one spreading time later."""
        wanted = self._options.span()
        if wanted is not None:
            self.plan.check(wanted)
            await self._advertise(wanted)
            self._say_claim("as asked for with --layers")
            return
        if self._in_company():
            await asyncio.sleep(self._rng.random() * LONGEST_DELAY_S)
        span = self._choose()
        for _ in range(MOST_CHOICES):
            mine = await self._advertise(span)
            if not self._in_company():
                break
            await asyncio.sleep(SPREADING_S)
            better = recheck(self.source.layers, mine, self._others(), self.plan.capacity(), self._rng)
            if better == span:
                break
            self._say(f"layers {span} were claimed by another peer at the same time; taking {better}")
            span = better
        self._say_claim(self._why())

    def _say_claim(self, why: str) -> None:
        weights, kv = self.plan.prices(self.span), self.plan.kv_bytes(self.kv_tokens, self.span)
        self._say(f"layers   {self.span} of {self.source.layers} ({why})")
        self._say(f"         {show(weights)} of weights, {show(kv)} of KV for {self.kv_tokens} tokens")

    def _choose(self) -> Span:
        try:
            return choose_span(self.source.layers, self._others(), self.plan.capacity(), self._rng)
        except NothingFits:
            raise self.plan.nothing_fits() from None

    def _others(self) -> list[Claim]:
        """The claims of everybody else on this model."""
        entries = self.node.entries(self.source.fingerprint)
        return [
            Claim(
                peer=entry.descriptor.peer,
                span=entry.descriptor.span,
                stamp=entry.descriptor.seq,
                settled=entry.heartbeat.state == "serving" or entry.age_s > SPREADING_S,
                tokens_per_s=entry.heartbeat.tokens_per_s or None,
            )
            for entry in entries
            if entry.descriptor.peer != self.transport.identity.peer_id
            and entry.heartbeat.state != "draining"
        ]

    def _in_company(self) -> bool:
        """Whether somebody may be choosing right now: that we know of no claim doesn't say so, it may be on its way."""
        return not self.node.alone or bool(self._others())

    def _why(self) -> str:
        others = [claim.span for claim in self._others()]
        counts = [sum(layer in span for span in others) for layer in self.span]
        if not others:
            return "the first peer of this model, as many layers as fit"
        return f"the weakest that fit, held by {min(counts)} to {max(counts)} other peers so far"

    async def _advertise(self, span: Span) -> Claim:
        """Publish this claim as loading."""
        self.span = span
        source, plan = self.source, self.plan
        self._advertised_at = self._addresses()
        self.kv_tokens = plan.kv_tokens(span)
        descriptor = Descriptor(
            peer=self.transport.identity.peer_id,
            seq=0,
            addresses=tuple(self._advertised_at),
            fingerprint=source.fingerprint,
            model=source.served_name,
            layers=source.layers,
            width=plan.model.width,
            vocab=plan.model.vocab,
            context=plan.context,
            span=span,
            numerics=self.numerics,
            kv_tokens=self.kv_tokens,
            tokenizer_hash=source.tokenizer_hash,
            name=self._name(),
            device=self.device.name[:MAX_DEVICE_NAME],
            release=swarm.__version__,
        )
        self._published = True
        published = self._descriptor = await self.node.publish(descriptor, Load(state="loading"))
        return Claim(published.peer, span, published.seq, settled=False)

    @property
    def model(self) -> str:
        """MODEL as it was typed."""
        return self._options.model

    @property
    def address(self) -> str:
        """What another person pastes after --join, identity included."""
        return f"{self.transport.identity.peer_id}@{self._addresses()[0]}"

    def _name(self) -> str:
        return (self._options.name or socket.gethostname().partition(".")[0])[:MAX_NAME]

    def _addresses(self) -> list[str]:
        """What others can dial: what was announced, else this machine's own addresses, never 0.0.0.0."""
        if self._options.announce:
            return [str(parse_address(text)) for text in self._options.announce][:MAX_ADDRESSES]
        port = self.transport.port
        host = self._options.host
        hosts = own_hosts() if host is None or _is_unspecified(host) else [host]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts][:MAX_ADDRESSES]

    # ------------------------------------------------------------ load and serve

    async def _load(self) -> None:
        """Weights into memory, KV taken, one trial of everything. Torch works in the engine's thread."""
        await asyncio.to_thread(
            importlib.import_module, "peer.engine"
        )  # torch: 5 s in which the loop goes on
        from peer.cache import KvPool
        from peer.engine import Engine, EngineConfig
        from peer.measure import check_it_runs, measure_speed, measure_workspace
        from peer.weights import load_span, span_tensors

        source, plan, span = self.source, self.plan, self.span
        dtype, device, held = torch_dtype(self.dtype), self.device.device, self.prices.weight_dtype
        names = await asyncio.to_thread(span_tensors, source, span)
        await asyncio.to_thread(source.fetch_tensors, names, self._progress)
        self.engine = Engine(None, EngineConfig(threads=self.threads))
        self.engine.start()
        self._stack.push_async_callback(self.engine.stop)

        def loading(done: int, total: int) -> None:
            self._progress(f"loading layers {span}", done, total)

        with told_when_out_of_memory(span):
            model = await self.engine.call(lambda: load_span(source, span, dtype, device, loading, held))
            await asyncio.to_thread(source.fetch_tensors, names, self._progress)  # nothing changed meanwhile
            self._progress(f"trying and measuring layers {span}", 0, 0)
            await self.engine.call(lambda: check_it_runs(model))
            self.engine.model = model
            self.pool = KvPool(plan.sizes, span, plan.pool_bytes(span), dtype=model.dtype, device=model.device)
            await self.engine.call(self.pool.rehearse)
            workspace = await self.engine.call(lambda: measure_workspace(model, self.config.prefill_chunk))
            plan.check_workspace(span, workspace)
            self.speed = await self.engine.call(lambda: measure_speed(model))

    async def _serve(self) -> None:
        from peer.server import Server, Serving

        plan = self.plan
        serving = Serving(
            fingerprint=self.source.fingerprint,
            span=self.span,
            layers=self.source.layers,
            width=plan.model.width,
            dtype=self.dtype,
            max_sessions=self._options.max_sessions,
            context=plan.context,
            vocab=plan.model.vocab,
        )
        self.server = Server(self.node, self.transport, self.engine, self.pool, serving, self.config)
        self.server.on_change = self._sessions_changed
        self._stack.callback(self.server.close)
        self.node.heartbeat(self._load_now("serving"))
        self._beat = asyncio.create_task(self._keep_beating(), name="heartbeat")
        self._beat.add_done_callback(_tell_failure)

    def _load_now(self, state: str) -> Load:
        return Load(
            state=state,
            sessions=self.server.sessions,
            free_kv_tokens=self.server.free_kv_tokens,
            queue_s=self.engine.stats.queue_s if self.server.sessions else 0.0,
            speed=self.speed,
            tokens_per_s=1.0 / compute_s(self.speed, self.span, self.source.layers),
        )

    async def _keep_beating(self) -> None:
        """Fresh figures for every heartbeat that the node sends, and our addresses as they are by now."""
        addresses = self._addresses()
        while True:
            await asyncio.sleep(FIGURES_S)
            self.node.heartbeat(self._load_now("draining" if self.server.draining else "serving"))
            before, addresses = addresses, self._addresses()
            if addresses == before:  # an interface that comes up gets its addresses one by one
                await self._advertise_addresses(addresses)

    async def _advertise_addresses(self, addresses: list[str]) -> None:
        """Tell the swarm where this peer is now, if it has moved."""
        if addresses != self._advertised_at:
            self._advertised_at = addresses
            descriptor = dataclasses.replace(self._descriptor, addresses=tuple(addresses))
            self._descriptor = await self.node.publish(descriptor)
            self._say(f"address  now {', '.join(self._descriptor.addresses)}")

    def _sessions_changed(self) -> None:
        """One quiet line per event."""
        now = self.server.sessions
        if now != self._sessions:
            self._say(f"{'+' if now > self._sessions else '-'} session, {now} open")
            self._sessions = now
            self.node.heartbeat(self._load_now("draining" if self.server.draining else "serving"))

    # ------------------------------------------------------------ stop

    async def drain(self, within_s: float = DRAIN_S) -> None:
        """No new sessions, those open move away, a signed leave, everything closed."""
        self.server.draining = True
        self.node.heartbeat(self._load_now("draining"))
        await self.server.drain(within_s)
        await self.close()

    async def leave(self) -> None:
        """The signed goodbye, where a claim was published. Harmless when repeated."""
        if self._published:
            self._published = False
            await self.node.leave()

    async def close(self) -> None:
        """Leave, then stop whatever was begun; a step or a tensor being loaded is waited for."""
        await self.leave()
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None
        await self._stack.aclose()


def _is_unspecified(host: str) -> bool:
    """0.0.0.0 and its like: fine to listen on, nothing to dial."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def _is_lan_address(host: str) -> bool:
    """Something that an address record can hold, and that isn't this machine's alone."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A bug of ours in a task that nobody awaits."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s stopped", task.get_name(), exc_info=task.exception())


def own_hosts() -> list[str]:
    """This machine's addresses, the routable first, loopback last and only if there is nothing else."""
    import psutil

    found = [
        ipaddress.ip_address(address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [host for host in found if not host.is_link_local and not host.is_loopback]
    ordered = sorted(usable, key=lambda host: (host.version, host.is_private))
    return [str(host) for host in ordered] or ["127.0.0.1"]
