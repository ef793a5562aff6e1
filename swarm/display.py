"""How the swarm looks in a terminal: the status tables and the chain in one line. rich only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from routing.spans import Span
from swarm.chains import ModelStatus, PeerStatus
from swarm.clocks import describe
from swarm.generation import Completion, ServedBy

WARNINGS = """Before you lend this machine:
every peer in a chain can learn the prompt and the answer that pass through it;
anyone who can reach this port may use this peer;
nothing is reported to anyone."""

PIPED_WIDTH = 160  # columns
BAR_COLUMNS = 40  # a bar of a cell per layer up to here; beyond it, layers share cells
STATE_STYLE = {"serving": "green", "loading": "yellow", "draining": "magenta"}


def terminal(*, stderr: bool = False) -> Console:
    """Where results go, or what is told beside them; wide where it is no terminal, so that nothing is cut."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def span_bar(span: Span, layers: int) -> str:
    """The span as a bar over all layers: one cell per layer, or per group of layers in a deep model."""
    columns = min(layers, BAR_COLUMNS)
    cells = []
    for column in range(columns):
        first, stop = column * layers // columns, max((column + 1) * layers // columns, column * layers // columns + 1)
        cells.append("█" if span.start < stop and first < span.stop else "·")
    return "".join(cells)


def coverage_bar(coverage: Sequence[int]) -> str:
    """How many peers hold each layer, a digit per cell (+ for ten and more); a cell shows its weakest layer."""
    layers = len(coverage)
    columns = min(layers, BAR_COLUMNS)
    cells = []
    for column in range(columns):
        first = column * layers // columns
        weakest = min(coverage[first : max((column + 1) * layers // columns, first + 1)])
        cells.append(str(weakest) if weakest < 10 else "+")
    return "".join(cells)


def chain_line(hops: Sequence[ServedBy]) -> str:
    """`ada 0-11 → bob 12-20 → eve 21-29`"""
    return " → ".join(f"{hop.name} {Span(hop.start, hop.stop)}" for hop in hops)


def count(number: int, what: str) -> str:
    """`1 peer`, `2 peers`"""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def status_view(models: Sequence[ModelStatus]) -> RenderableType:
    """Everything `swarm status` shows."""
    if not models:
        return Text("no peer serves a model here; start one with: swarm peer MODEL --join ADDR")
    return Group(*(part for model in models for part in _model_view(model)))


def _model_view(model: ModelStatus) -> list[RenderableType]:
    peers = count(len(model.peers), "peer")
    title = Text.assemble((model.name, "bold"), f"  {model.layers} layers, {peers}, {model.fingerprint.hex()[:8]}")
    return [title, _peer_table(model), *_health(model), Text("")]


def _peer_table(model: ModelStatus) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("peer", "layers", f"span over 0-{model.layers - 1}", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("device")  # the one that gives way in a narrow terminal
    for heading in ("free KV", "tokens/s", "round trip", "load", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peer in model.peers:
        table.add_row(*_peer_row(peer, model.layers))
    return table


def _peer_row(peer: PeerStatus, layers: int) -> tuple[RenderableType, ...]:
    state = Text(peer.state, style=STATE_STYLE.get(peer.state, ""))
    load = f"{peer.sessions} open" + (f", {duration(peer.queue_s)} wait" if peer.queue_s >= 0.001 else "")
    return (
        Text(_name(peer)),  # Text: a stranger's name is no markup
        str(peer.descriptor.span),
        span_bar(peer.descriptor.span, layers),
        state,
        Text(peer.descriptor.device, no_wrap=True, overflow="ellipsis"),
        f"{peer.free_kv_tokens:,}",
        f"{peer.tokens_per_s:.0f}" if peer.state != "loading" else "–",
        duration(peer.rtt_s),
        load if peer.state != "loading" else "–",
        duration(peer.age_s),
    )


def _name(peer: PeerStatus) -> str:
    return peer.descriptor.name or peer.descriptor.peer[:8]


def _health(model: ModelStatus) -> list[RenderableType]:
    weak_count = min(model.coverage)
    clocks = [
        Text(f"clock      {_name(peer)}'s is {describe(peer.clock_error_s)} the others'", style="yellow")
        for peer in model.peers
        if peer.clock_error_s
    ]
    covered = f"coverage  {coverage_bar(model.coverage)}  weakest: layers {model.weakest}, {count(weak_count, 'peer')}"
    if model.route is None:
        return [Text(covered), Text(f"no chain   {model.problem}", style="red"), *clocks]
    names = {peer.descriptor.peer: _name(peer) for peer in model.peers}
    chain = " → ".join(f"{names.get(hop.peer, hop.peer[:8])} {hop.span}" for hop in model.route.hops)  # type: ignore[call-overload]
    speed = f"about {1 / model.route.step_s:.0f} tokens/s" if model.route.step_s > 0 else ""
    return [Text(covered), Text.assemble(("chain ok  ", "green"), f"{chain}  {speed}"), *clocks]


def status_json(models: Sequence[ModelStatus]) -> str:
    return json.dumps({"models": [_model_json(model) for model in models]}, ensure_ascii=False)


def _model_json(model: ModelStatus) -> dict[str, Any]:
    hops = None
    if model.route is not None:
        hops = [{"peer": hop.peer, "start": hop.span.start, "stop": hop.span.stop} for hop in model.route.hops]
    return {
        "name": model.name,
        "fingerprint": model.fingerprint.hex(),
        "layers": model.layers,
        "coverage": list(model.coverage),
        "weakest": {"start": model.weakest.start, "stop": model.weakest.stop, "peers": min(model.coverage)},
        "chain": hops,
        "problem": model.problem,
        "peers": [_peer_json(peer) for peer in model.peers],
    }


def _peer_json(peer: PeerStatus) -> dict[str, Any]:
    what = peer.descriptor
    return {
        "peer": what.peer,
        "name": what.name,
        "addresses": list(what.addresses),
        "span": [what.span.start, what.span.stop],
        "state": peer.state,
        "device": what.device,
        "numerics": what.numerics,
        "context": what.context,
        "kv_tokens": what.kv_tokens,
        "free_kv_tokens": peer.free_kv_tokens,
        "tokens_per_s": peer.tokens_per_s,
        "rtt_s": peer.rtt_s,
        "sessions": peer.sessions,
        "queue_s": peer.queue_s,
        "age_s": peer.age_s,
        "clock_error_s": peer.clock_error_s,
    }


def completion_json(*answers: Completion) -> str:
    """What `swarm generate --json` prints: one answer, or {"choices": [...]} for several."""
    shown = [_completion(answer) for answer in answers]
    return json.dumps(shown[0] if len(shown) == 1 else {"choices": shown}, ensure_ascii=False)


def _completion(completion: Completion) -> dict[str, Any]:
    shown = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": asdict(completion.usage),
        "timing": asdict(completion.timing),
        "hops": hops_json(completion.hops),
        "repairs": len(completion.repairs),
        "seed": completion.seed,
        "model": completion.model,
        "notes": list(completion.notes),
    }
    if completion.logprobs is not None:
        shown["logprobs"] = [asdict(one) for one in completion.logprobs]
    return shown


def hops_json(hops: Sequence[ServedBy]) -> list[dict[str, Any]]:
    return [{"peer": hop.peer, "name": hop.name, "start": hop.start, "stop": hop.stop} for hop in hops]
