"""SHELL and public API: `AsyncClient`. Its twin for programs without an event loop is in `blocking.py`.

A client holds no weights and advertises nothing. It needs the address of any one peer, learns the
rest from the registry it subscribes to, and opens a chain per generation. Many generations may
run at once on one client.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Unpack

from swarm.bundles import Bundles
from swarm.chains import LiveModel, ModelStatus, choose_model, live_models, make_plan, model_status, plan_chain
from swarm.driver import SessionDriver
from swarm.errors import (
    NoRoute,
    PromptTooLong,
    SwarmError,
    UnknownModel,
    UsageError,
)
from swarm.following import Following
from swarm.generation import Completion, Generation, Opening
from swarm.identity import Identity, PeerId
from swarm.lan import Lan, lan_wanted
from swarm.messages import ModelSeen
from swarm.node import Node
from swarm.options import Options, Wanted, seeds_of
from swarm.plans import Plan, PlanRequest, Timings
from swarm.prompts import Prompt
from swarm.registry import PeerEntry
from swarm.session import Session
from swarm.session_config import SessionConfig
from swarm.state import StateDir
from swarm.tokenizer import EncodedPrompt
from swarm.transport import Transport

DEFAULT_MAX_TOKENS = 512
PING_BUDGET_S = 0.3       # before the first plan: a route that avoids one slow link is worth it
ASK_AGAIN_S = 60.0        # before a peer that didn't answer is pinged again
MOST_PINGED = 16          # beyond it, the estimate from those measured will do
SESSION_ID_BYTES = 16
PREFILL_CHUNK = SessionConfig.chunk  # what a peer runs per prefill step unless told otherwise; only for estimates
CLOSED = "this client is closed; make a new one"


class AsyncClient:
    """Generates text on a swarm.

    address: `host`, `host:port` or `PEERID@host:port` of any peer, or several of them; without one,
    `SWARM_JOIN`, a peer remembered from last time, or one found on the local network. model: which model, where
    several are live. only: names or ids of the peers that may be in a chain (say, those whose owners you know).

        async with AsyncClient("192.168.1.20:7070") as client:
            async for piece in client.stream("Why is the sky blue?"):
                print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        model: str | None = None,
        only: Collection[str] = (),
        network: str = "main",
        home: Path | None = None,
    ) -> None:
        self._join = join_addresses(address)
        self._only = frozenset(only)
        self._model = model
        self._following = Following(model, everything=bool(only))
        self._network = network
        self._home = home
        self._node: Node | None = None
        self._transport: Transport | None = None
        self._closed = False
        self._connecting = asyncio.Lock()
        self._bundles = Bundles(lambda peer: self._require_node().link(peer))
        self._drivers: weakref.WeakSet[SessionDriver] = weakref.WeakSet()
        self._asked: dict[PeerId, float] = {}  # peers that were pinged, when
        self._rng = random.Random()
        self._timings = Timings()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def connect(self) -> None:
        """Subscribe at the address. Raises Unreachable, IdentityError, VersionMismatch; UsageError once closed."""
        async with self._connecting:
            if self._closed:
                raise UsageError(CLOSED)
            if self._node is not None:
                return
            state = StateDir.open(self._home)
            transport = Transport(Identity.ephemeral(), self._network, known_hosts=state.known_hosts(self._network))
            lan = Lan(self._network) if lan_wanted() else None
            node = Node(transport, role="client", state=state, lan=lan, follow=self._following)
            try:
                await node.start(self._join)
                await node.whole()
            except BaseException:
                await node.close()
                await transport.close()
                raise
            self._node, self._transport = node, transport

    async def aclose(self) -> None:
        """End whatever still runs, freeing its peers, and let go of the swarm. Harmless when repeated."""
        self._closed = True
        async with self._connecting:
            drivers = list(self._drivers)
            for driver in drivers:
                driver.cancel()
            await asyncio.gather(*(driver.farewell() for driver in drivers))
            if self._node is not None and self._transport is not None:
                node, transport = self._node, self._transport
                self._node = self._transport = None
                await node.close()
                await transport.close()
        await self._bundles.aclose()

    # ------------------------------------------------------------ generating

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Generate, piece by piece. Leaving the loop cancels and frees the peers at once.

        prompt: text, or messages with `role` and `content`; `raw` leaves the chat template out.
        model: which one, where several are live. max_tokens: 512 unless said; what lies beyond the chain's context is
        cut, with a note.
        temperature (0 is greedy), top_k, top_p, min_p and repetition_penalty follow the model's generation config
        where they aren't given. presence_penalty and frequency_penalty look at the answer so far, repetition_penalty
        at the prompt too. logit_bias: token id -> what is added to its logit.
        logprobs: report each token's, and those of so many likeliest, by the model's own distribution.
        stop: strings that end the answer, not part of it. seed: reported in the result if not given.
        Raises UsageError; iterating raises UsageError (nothing was sent), NoRoute, GenerationFailed, Unreachable.
        """
        wanted = Wanted(**options)

        async def opening() -> Opening:
            return await self._open(prompt, wanted)

        return Generation(opening)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer; options and errors as for `stream`."""
        async with self.stream(prompt, **options) as generation:
            async for _ in generation:
                pass
        assert generation.result is not None
        return generation.result

    async def generate_many(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> tuple[Completion, ...]:
        """n answers to one prompt, at the same time. Their seeds are `seed` and the n - 1 that follow it, so the first
        is what `generate` gives with that seed. When one fails, all end and its error is raised."""
        answers = [Options(**{**options, "seed": seed}) for seed in seeds_of(options.get("seed"), n)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.generate(prompt, **each)) for each in answers]
        except* SwarmError as failed:
            raise failed.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def _open(self, prompt: Prompt, wanted: Wanted) -> Opening:
        started = asyncio.get_running_loop().time()
        self._bundles.warm()
        await self.connect()
        live = await self._find(wanted.model or self._model)
        (codec, encoded), _ = await asyncio.gather(
            self._bundles.encode(live, prompt, wanted.raw), self._measure_once(live)
        )
        limit, notes = self._limit(live, encoded, wanted.max_tokens)
        sampling = wanted.sampling(codec.defaults, codec.vocab_size, answer_from=len(encoded.ids))
        names: dict[PeerId, str] = {}
        planner = self._planner(live, names)

        async def driver(ids: tuple[int, ...], limit: int) -> SessionDriver:
            await self._follow(live.fingerprint)
            config = SessionConfig(
                session=secrets.token_bytes(SESSION_ID_BYTES),
                prompt=ids,
                limit=limit,
                sampling=sampling,
                stop_ids=tuple(codec.eos_ids),
                fingerprint=live.fingerprint,
                reserve=limit,
                vocab=live.vocab,
            )
            # the client may have been closed meanwhile
            made = SessionDriver(Session(config, planner, self._rng, self._timings), self._require_node())
            self._drivers.add(made)
            return made

        return Opening(
            driver=driver,
            prompt=tuple(encoded.ids),
            limit=limit,
            context=lambda wanted: self._context(self._as_of_now(live), wanted),
            codec=codec,
            stops=wanted.stops,
            logprobs=sampling.logprobs is not None,
            model=live.name,
            seed=sampling.seed,
            notes=notes,
            name_of=lambda peer: names.get(peer) or peer[:8],
            started=started,
        )

    async def _find(self, name: str | None) -> LiveModel:
        """The model of that name (or the only one), with its peers. Raises UnknownModel, AmbiguousModel."""
        node = self._require_node()
        if self._following.everything:
            return choose_model(live_models(self._usable(node.entries())), name)
        listed = await self._find_listed(node, name)
        await self._follow(listed.fingerprint)
        return choose_model(live_models(node.entries(listed.fingerprint)), name)

    async def _follow(self, fingerprint: bytes) -> None:
        """See to it that this model's records are here."""
        node = self._require_node()
        if not self._following.everything:
            self._following.use(fingerprint)
            await node.want(self._following(node.models()))

    async def _find_listed(self, node: Node, name: str | None) -> ModelSeen:
        try:
            return choose_model(node.models(), name)
        except UnknownModel:
            if name is None:
                raise
        await node.seek(name.partition("@")[0])  # a list has no room for all the models of a very large swarm
        return choose_model(node.models(), name)

    def _usable(self, entries: Sequence[PeerEntry]) -> Sequence[PeerEntry]:
        if not self._only:
            return entries
        return [e for e in entries if e.descriptor.name in self._only or e.descriptor.peer in self._only]

    def _require_node(self) -> Node:
        if self._node is None:
            raise UsageError(CLOSED)
        return self._node

    def _limit(self, live: LiveModel, encoded: EncodedPrompt, max_tokens: int | None) -> tuple[int, tuple[str, ...]]:
        """The position before which generation ends, and notes for the caller. Raises PromptTooLong, NoRoute."""
        notes = [encoded.note] if encoded.note else []
        length = len(encoded.ids)
        wanted = length + (DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens)
        context = self._context(live, wanted)
        if length >= context:
            raise PromptTooLong(length, context)
        if wanted > context:
            cut = f"max_tokens was cut from {wanted - length} to {context - length}"
            notes.append(f"{cut}: the chain's context is {context}")
            wanted = context
        return wanted, tuple(notes)

    def _context(self, live: LiveModel, wanted: int) -> int:
        """The context of the chain that would be used: `wanted` if a chain can hold it, else the most that one can.

        Raises NoRoute when no chain can be built at all.
        """
        known = self._require_node().known(live.fingerprint)
        contexts = sorted({entry.descriptor.context for entry in live.serving if entry.descriptor.context < wanted})
        for context in [wanted, *reversed(contexts)]:
            try:
                plan_chain(live, {}, known, need_kv=0, context=context)
            except NoRoute:
                continue
            return context
        plan_chain(live, {}, known, need_kv=0)  # raises, naming the gap
        raise AssertionError("a chain without demands exists, but not one with the smallest context")

    def _planner(self, live: LiveModel, names: dict[PeerId, str]) -> Callable[[PlanRequest], Plan]:
        """names: those of all peers that were ever in sight, also when they are gone."""
        descriptors: dict[PeerId, bytes] = {}
        numerics: list[str] = []

        def plan(request: PlanRequest) -> Plan:
            model = self._as_of_now(live)
            route = plan_chain(
                model,
                self._half_round_trips(),
                self._require_node().known(live.fingerprint),
                need_kv=request.positions,
                hopeful=request.fresh or bool(request.excluded_peers),  # those that refused are among these
                context=request.positions,
                kept=request.kept,
                excluded_peers=request.excluded_peers,
                excluded_links=request.excluded_links,
                numerics=numerics[0] if numerics else None,
                rng=self._rng,
            )
            entries = {entry.descriptor.peer: entry for entry in model.entries}
            for peer, entry in entries.items():
                descriptors[peer], names[peer] = entry.descriptor_bytes, entry.descriptor.name
            if not numerics:
                numerics.append(entries[PeerId(route.hops[0].peer)].descriptor.numerics)
            return make_plan(route, model, dict(descriptors), PREFILL_CHUNK)

        return plan

    def _as_of_now(self, live: LiveModel) -> LiveModel:
        """The same model with the peers that are in sight now."""
        models = live_models(self._usable(self._require_node().entries(live.fingerprint)))
        return models[0] if models else LiveModel(live.name, live.fingerprint, live.layers, ())

    def _half_round_trips(self) -> dict[PeerId, float]:
        links = {} if self._transport is None else self._transport.links
        return {peer: link.rtt_s / 2 for peer, link in links.items() if link.rtt_s is not None}

    async def _measure_once(self, live: LiveModel) -> None:
        """Ping peers never talked to, a few and briefly, so that the plan knows what is near.

        One that doesn't answer is left alone for a while: it would cost every generation the whole budget.
        """
        measured, now = self._half_round_trips(), asyncio.get_running_loop().time()
        self._asked = {peer: at for peer, at in self._asked.items() if now - at < ASK_AGAIN_S}
        strangers = [entry.descriptor.peer for entry in live.serving]
        strangers = [peer for peer in strangers if peer not in measured and peer not in self._asked][:MOST_PINGED]
        if strangers:
            self._asked |= dict.fromkeys(strangers, now)
            await self._require_node().measure(strangers, timeout_s=PING_BUDGET_S)

    # ------------------------------------------------------------ looking

    def peers(self) -> tuple[PeerEntry, ...]:
        """Who is alive now, of the models that this client follows: its own or the only one, those it generated
        with, and all models once `status` was asked for all. Empty before `connect`."""
        return () if self._node is None else self._node.entries()

    async def changed(self) -> None:
        """Wait for the next change of what `peers` returns."""
        await self._require_node().changed()

    async def status(self, model: str | None = None) -> tuple[ModelStatus, ...]:
        """Peers, coverage and a really planned route of each live model (or of `model`)."""
        await self.connect()
        node = self._require_node()
        if model is not None:
            models: tuple[LiveModel, ...] = (await self._find(model),)
        else:
            self._following.everything = True
            await node.want(None)
            models = live_models(node.entries())
        peers = [entry.descriptor.peer for live in models for entry in live.entries]
        rtts = await node.measure(peers)
        return tuple(model_status(live, rtts, node.known()) for live in models)


def join_addresses(address: str | Sequence[str] | None) -> tuple[str, ...]:
    """What to join: what is given, else what `SWARM_JOIN` lists (commas or spaces), else nothing."""
    if address is None:
        return tuple(os.environ.get("SWARM_JOIN", "").replace(",", " ").split())
    return (address,) if isinstance(address, str) else tuple(address)
