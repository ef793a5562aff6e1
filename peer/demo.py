"""`swarm demo`: five real peers on this machine, one answer twice, one peer killed on the way.

The peers are separate processes with memory budgets of their own; nothing is assigned to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from peer.checkpoint import Progress
from peer.local import READY_TIMEOUT_S, LocalSwarm
from peer.progress import terminal_progress
from peer.source import prepare_smollm2
from swarm import AsyncClient
from swarm.display import chain_line, duration, hops_json, status_view, terminal
from swarm.errors import SwarmError
from swarm.generation import Completion, Generation, ServedBy
from swarm.state import StateDir

PROMPT = "Why is the sky blue?"
TOKENS = 96  # at least 64 before the comparison means something, and short enough to watch
KILL_AFTER_TOKENS = 16
ENDED_TOO_SOON = 3  # exit code: the answer ended before the kill

# Each budget differs, and whatever the order in which these arrive, every layer ends up with two peers or more
# (tests/test_placement.py tries all of them).
PEERS = (("ada", "600MB"), ("bob", "580MB"), ("cleo", "560MB"), ("dan", "540MB"), ("eve", "520MB"))


async def start_swarm(swarm: LocalSwarm, client: AsyncClient, tell: Console) -> None:
    """Start the five and wait until all of them serve. Raises SwarmError with what they said last."""
    (first, budget), *others = PEERS
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await swarm.start(first, "--memory", budget)
            await swarm.connect(client)
            for name, budget in others:
                await swarm.start(name, "--memory", budget)
            for name, entry in (await swarm.serving(client, [name for name, _ in PEERS])).items():
                tell.print(f"  {name} chose layers {entry.descriptor.span}")
    except TimeoutError:
        raise SwarmError(f"the peers weren't ready within {READY_TIMEOUT_S:.0f} s: {swarm.last_words()}") from None


async def run_demo(prompt: str | None, as_json: bool) -> int:
    """The whole demo; returns the exit code: 0 identical, 1 not, 3 the answer ended before the kill."""
    tell = terminal(stderr=as_json)
    with _told_to_end_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="swarm-demo-") as folder:
        home, cache = Path(folder), StateDir.open(None).cache
        with terminal_progress() as progress:
            await _prepared(cache, progress)
        tell.print(f"starting {len(PEERS)} peers, each with a memory budget of its own ...")
        async with LocalSwarm("smollm2", home, cache) as swarm:
            client = AsyncClient(swarm.address, home=home / "client")
            try:
                await start_swarm(swarm, client, tell)
                return await _play(client, swarm, prompt or PROMPT, tell, as_json)
            finally:
                await client.aclose()


@contextlib.contextmanager
def _told_to_end_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, and SIGHUP when the terminal is closed, clean up as well."""
    names = ("SIGTERM", "SIGHUP")  # the second isn't everywhere
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one
    for number in ours:
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


async def _prepared(cache: Path, progress: Progress) -> None:
    """The model is there. In a thread that nobody waits for: Ctrl-C doesn't wait for a download, which ends
    with this process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def prepare() -> None:
        error: BaseException | None = None
        try:
            prepare_smollm2(cache, progress)
        except BaseException as found:
            error = found
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=prepare, name="smollm2", daemon=True).start()
    await done


async def _play(client: AsyncClient, swarm: LocalSwarm, prompt: str, tell: Console, as_json: bool) -> int:
    models = await client.status()
    tell.print()
    tell.print(status_view(models))
    tell.print(f"[bold]{prompt}[/bold]")
    undisturbed = await _undisturbed(client, prompt, tell)
    if len(undisturbed.token_ids) <= KILL_AFTER_TOKENS:
        return _too_soon(undisturbed, tell)
    disturbed, killed = await _disturbed(client, swarm, prompt, tell)
    if killed is None:
        return _too_soon(disturbed, tell)
    return _summary(undisturbed, disturbed, killed, tell, as_json)


def _too_soon(answer: Completion, tell: Console) -> int:
    tell.print(
        f"\nthe answer ended after {len(answer.token_ids)} tokens, before the kill after token {KILL_AFTER_TOKENS}; "
        f"try a prompt with a longer answer"
    )
    return ENDED_TOO_SOON


async def _undisturbed(client: AsyncClient, prompt: str, tell: Console) -> Completion:
    async with client.stream(prompt, max_tokens=TOKENS, temperature=0) as answer:
        first = True
        async for piece in answer:
            if first:
                tell.print(f"[dim]chain: {chain_line(answer.hops)}[/dim]")
                first = False
            _write(tell, piece.text)
    assert answer.result is not None
    tell.print()
    return answer.result


@dataclass(frozen=True)
class Killed:
    peer: str
    name: str
    pid: int
    at_token: int
    before: tuple[ServedBy, ...]


async def _disturbed(
    client: AsyncClient, swarm: LocalSwarm, prompt: str, tell: Console
) -> tuple[Completion, Killed | None]:
    tell.print("\n[bold]the same again, but one of the peers will be killed:[/bold]")
    killed: Killed | None = None
    told = False
    async with client.stream(prompt, max_tokens=TOKENS, temperature=0) as answer:
        count = 0
        async for piece in answer:
            if killed is not None and not told and answer.repairs:
                told = True
                _tell_kill(killed, answer, tell)
            _write(tell, piece.text)
            count += len(piece.token_ids)
            if killed is None and count >= KILL_AFTER_TOKENS and piece.final is None:
                killed = _kill_one(swarm, answer, count)
    assert answer.result is not None
    tell.print()
    return answer.result, killed


def _kill_one(swarm: LocalSwarm, answer: Generation, count: int) -> Killed:
    """The middle hop: neither the one that holds the prompt's ids nor the one that samples."""
    victim = answer.hops[len(answer.hops) // 2]
    process = swarm.peers[victim.name]
    process.kill()
    return Killed(victim.peer, victim.name, process.pid, count, answer.hops)


def _tell_kill(killed: Killed, answer: Generation, tell: Console) -> None:
    tell.print(
        f"\n[red]✗ killed {killed.name} (process {killed.pid}) after token {killed.at_token}; "
        f"new chain: {chain_line(answer.repairs[-1].after)}[/red]"
    )


def _write(tell: Console, text: str) -> None:
    tell.out(text, end="", highlight=False)
    tell.file.flush()


def _summary(undisturbed: Completion, disturbed: Completion, killed: Killed, tell: Console, as_json: bool) -> int:
    identical = undisturbed.token_ids == disturbed.token_ids and undisturbed.text == disturbed.text
    verdict = "[green]identical[/green]" if identical else "[red]DIFFERENT[/red]"
    tell.print(f"""
tokens               {len(disturbed.token_ids)}
tokens/s             {undisturbed.timing.tokens_per_s:.1f} undisturbed
time to first token  {duration(undisturbed.timing.ttft_s)}
hops before          {chain_line(killed.before)}
hops after           {chain_line(disturbed.hops)}
stall                {disturbed.timing.stall_s * 1000:.0f} ms, at the kill
the two answers are  {verdict}""")
    if as_json:
        print(json.dumps(_summary_json(undisturbed, disturbed, killed, identical), ensure_ascii=False))
    return 0 if identical else 1


def _summary_json(undisturbed: Completion, disturbed: Completion, killed: Killed, identical: bool) -> dict[str, object]:
    return {
        "tokens": len(disturbed.token_ids),
        "text": disturbed.text,
        "tokens_per_s": undisturbed.timing.tokens_per_s,
        "ttft_s": undisturbed.timing.ttft_s,
        "stall_s": disturbed.timing.stall_s,
        "hops_before": hops_json(killed.before),
        "hops_after": hops_json(disturbed.hops),
        "killed": {"peer": killed.peer, "pid": killed.pid, "at_token": killed.at_token},
        "identical": identical,
    }
