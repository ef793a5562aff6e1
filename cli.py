"""The command line: the composition root. Imports `peer` (and with it torch) only inside the commands that need it.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, Optional, TypeVar

import typer
from rich.console import Console

import swarm
from swarm.display import chain_line, completion_json, status_json, status_view
from swarm.errors import SwarmError, UsageError
from swarm.noise import MAJOR_VERSION

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WrongUsage = typer.BadParameter.__mro__[1]  # click's UsageError, of the click that this typer brings along
PIPED_WIDTH = 160  # columns where the output is no terminal, so that no name is cut

app = typer.Typer(
    name="swarm",
    help="Run a language model that fits on no single machine here, on spare GPUs that people lend.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

T = TypeVar("T")
Join = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer reads this at run time)
    typer.Option("--join", metavar="ADDR", help="Address of any peer: host, host:port or PEERID@host:port. May be repeated. "
                 "Default: SWARM_JOIN, else peers remembered from last time."),
]
Model = Annotated[Optional[str], typer.Option("--model", help="Which model, where several are live.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show release, protocol, torch and transformers.")] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", help="How much to tell on stderr: debug, info, warning or error.")
    ] = "warning",
) -> None:
    if version:
        print(version_line())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    level = getattr(logging, log_level.upper(), None)
    if not isinstance(level, int):
        raise UsageError(f"--log-level takes debug, info, warning or error, got {log_level!r}")
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def version_line() -> str:
    found = []
    for library in ("torch", "transformers"):
        try:
            found.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{library} not installed")
    return f"swarm {swarm.__version__}, protocol {MAJOR_VERSION}, {', '.join(found)}"


# ---------------------------------------------------------------- generate, status


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    join: Join = None,
    model: Model = None,
    max_tokens: Annotated[Optional[int], typer.Option(help="At most so many new tokens. [default: 512]")] = None,  # noqa: UP045
    temperature: Annotated[Optional[float], typer.Option(help="0 is greedy. [default: the model's]")] = None,  # noqa: UP045
    top_k: Annotated[Optional[int], typer.Option(help="Sample among the k likeliest; 0 is off.")] = None,  # noqa: UP045
    top_p: Annotated[Optional[float], typer.Option(help="Sample among the likeliest that make up p; 1 is off.")] = None,  # noqa: UP045
    stop: Annotated[Optional[list[str]], typer.Option(help="End the answer before this text. May be repeated.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="Same seed, same text. [default: a new one, reported]")] = None,  # noqa: UP045
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json: Json = False,
) -> None:
    """Stream an answer from the swarm."""
    options = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "stop": stop or (), "seed": seed, "raw": raw,
    }  # fmt: skip
    run(_generate(prompt, join, model, options, json))


async def _generate(prompt: str, join: list[str] | None, model: str | None, options: dict[str, Any], json: bool) -> None:
    async with swarm.AsyncClient(join or None, model=model) as client, client.stream(prompt, **options) as answer:
        told = 0
        async for piece in answer:
            told = _tell_repairs(answer, told)
            if not json:
                print(piece.text, end="", flush=True)
        done = answer.result
        assert done is not None
        if json:
            print(completion_json(done))
            return
        print()
        for note in done.notes:
            say(note)
        say(
            f"{done.usage.completion_tokens} tokens, {done.timing.tokens_per_s:.1f} tokens/s, first after "
            f"{done.timing.ttft_s:.2f} s, via {chain_line(done.hops)}"
        )


def _tell_repairs(answer: swarm.Generation, told: int) -> int:
    for repair in answer.repairs[told:]:
        say(f"\nrepaired after token {repair.at_token}: {repair.reason}; now {chain_line(repair.after)}")
    return len(answer.repairs)


@app.command()
def status(join: Join = None, model: Model = None, json: Json = False) -> None:
    """Show peers, coverage, and whether a chain can be built now (exit 0 if so, 1 if not)."""
    models = run(_status(join, model))
    if json:
        print(status_json(models))
    else:
        console().print(status_view(models))
    if not models or any(one.route is None for one in models):
        raise typer.Exit(FAILED)


async def _status(join: list[str] | None, model: str | None) -> tuple[Any, ...]:
    async with swarm.AsyncClient(join or None) as client:
        return await client.status(model)


# ---------------------------------------------------------------- peer, demo


@app.command()
def peer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory in Hugging Face layout, a hub id, or smollm2.")],
    join: Join = None,
    host: Annotated[Optional[str], typer.Option(help="Bind this address only. [default: all interfaces]")] = None,  # noqa: UP045
    port: Annotated[Optional[int], typer.Option(help="[default: the next free one from 7070]")] = None,  # noqa: UP045
    announce: Annotated[
        Optional[list[str]], typer.Option(help="host:port that others should dial. May be repeated.")  # noqa: UP045
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What to use at most: 6GB, 800MiB, 75%. [default: 90% of free device memory, on CPU half]"),
    ] = None,
    layers: Annotated[Optional[str], typer.Option(metavar="A:B", help="Serve layers A to B-1. [default: chosen]")] = None,  # noqa: UP045
    device: Annotated[Optional[str], typer.Option(help="cpu, cuda, cuda:1, mps. [default: the best there is]")] = None,  # noqa: UP045
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="float32, bfloat16, float16. [default: float32 on CPU, else the model's]"),
    ] = None,
    threads: Annotated[Optional[int], typer.Option(help="CPU threads to compute with. [default: physical cores]")] = None,  # noqa: UP045
    name: Annotated[Optional[str], typer.Option(help="What others see. [default: the host's name]")] = None,  # noqa: UP045
    served_name: Annotated[Optional[str], typer.Option(help="The model's name in the swarm. [default: from MODEL]")] = None,  # noqa: UP045
    max_sessions: Annotated[int, typer.Option(help="Generations at a time.")] = 8,
    context: Annotated[Optional[int], typer.Option(help="Positions one session may have. [default: what fits]")] = None,  # noqa: UP045
    new: Annotated[bool, typer.Option("--new", help="Start with a new identity.")] = False,
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit of a hub model.")] = None,  # noqa: UP045
) -> None:
    """Serve some layers of MODEL to the swarm."""
    from peer.service import PeerOptions, serve

    options = PeerOptions(
        model=model, join=swarm.join_addresses(join or None), host=host, port=port, announce=tuple(announce or ()),
        memory=memory, layers=layers, device=device, dtype=dtype, threads=threads, name=name,
        served_name=served_name, max_sessions=max_sessions, context=context, new=new, revision=revision,
    )  # fmt: skip
    raise typer.Exit(serve(options, run))


@app.command()
def demo(
    prompt: Annotated[Optional[str], typer.Argument(help="What to ask.")] = None,  # noqa: UP045
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object, as the last line.")] = False,
) -> None:
    """A real swarm on this machine: five peers, one answer, one of them killed on the way."""
    from peer.demo import run_demo

    raise typer.Exit(run(run_demo(prompt, json)))


TODAY = {
    "run": 'swarm generate "PROMPT" answers one prompt; swarm demo starts a whole swarm here',
    "chat": 'swarm generate "PROMPT" answers one prompt; from Python, Client.stream takes a list of messages',
    "serve": "swarm peer MODEL serves layers of a model to a swarm",
}


def _not_yet(verb: str) -> None:
    @app.command(
        verb, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    )
    def answer() -> None:
        raise UsageError(f"there is no `swarm {verb}` yet. What exists today: {TODAY[verb]}")


for _verb in TODAY:
    _not_yet(_verb)


# ---------------------------------------------------------------- the shell around it all


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on uvloop where it exists, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def main() -> None:
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        return app(standalone_mode=False) or 0
    except WrongUsage as error:
        error.show(file=sys.stderr)
        return USAGE
    except UsageError as error:
        say(f"swarm: {error}")
        return USAGE
    except SwarmError as error:
        say(f"swarm: {error}")
        return FAILED
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors", "psutil", "huggingface_hub", "gguf"):
            raise
        say(f"swarm: {error.name} isn't installed; to run a peer: pip install 'layerswarm[peer]'")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


if __name__ == "__main__":
    main()
