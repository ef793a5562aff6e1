"""The command line: the composition root. Imports `peer` (and with it torch) only inside the commands that need it.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
Whatever goes wrong outside of this program is one line, `swarm: what happened; what to do`; only our own
bugs show a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, NoReturn, Optional, TypeVar

import typer

import swarm
from swarm.display import WARNINGS, chain_line, completion_json, status_json, status_view, terminal
from swarm.errors import SwarmError, UnknownModel, UsageError
from swarm.noise import MAJOR_VERSION
from swarm.options import MAX_ANSWERS

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WrongUsage = typer.BadParameter.__mro__[1]  # click's UsageError, of the click that this typer brings along
PATIENCE_S = 5.0  # without a token, before a person is told that it goes on
PEER_EXTRA = ("torch", "transformers", "safetensors", "huggingface_hub", "gguf", "psutil")

app = typer.Typer(
    name="swarm",
    help="Run a language model that fits on no single machine here, on spare GPUs that people lend.",
    epilog="Start with `swarm demo`; `swarm COMMAND --help` explains each command.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)

T = TypeVar("T")
Join = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer reads this at run time)
    typer.Option(
        "--join",
        metavar="ADDR",
        help="Where any peer of the swarm is: host, host:port or PEERID@host:port; the port is 7070 unless "
        "given. May be repeated. [default: SWARM_JOIN, else peers remembered from last time or found on the local "
        "network]",
    ),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", metavar="NAME", help="Which model, where the swarm serves several."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead.")]


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the versions of swarm, protocol, torch, transformers; exit."),
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level", metavar="LEVEL", help="Tell more on stderr: debug, info, warning, error."
        ),
    ] = "warning",
) -> None:
    if version:
        print(version_line())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    start_logging(log_level)


def start_logging(name: str) -> None:
    """Warnings look like all else that is said here; who asks for more sees when, and from where."""
    if name.lower() not in ("debug", "info", "warning", "error"):
        raise UsageError(f"--log-level is one of debug, info, warning, error, got {name!r}")
    level = getattr(logging, name.upper())
    quiet = level >= logging.WARNING
    style = "swarm: %(message)s" if quiet else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=level, format=style)


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
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question, or the text to go on with.")],
    join: Join = None,
    model: Model = None,
    max_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="End after so many new tokens. [default: 512]"),
    ] = None,
    temperature: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="T", help="How daring: 0 always takes the likeliest token. [default: the model's]"
        ),
    ] = None,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="K", help="Choose among the K likeliest tokens; 0: among all. [default: the model's]"
        ),
    ] = None,
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="P",
            help="Choose among the likeliest tokens that make up P together; 1: among all. [default: the model's]",
        ),
    ] = None,
    min_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="P",
            help="Leave out tokens less likely than P times the likeliest; 0: none. [default: the model's]",
        ),
    ] = None,
    repetition_penalty: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="F",
            help="Divide the logits of tokens that occurred, in prompt or answer, by F (multiply negative ones); "
            "1: off. [default: the model's]",
        ),
    ] = None,
    presence_penalty: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="X", help="Subtract X from the logit of each token in the answer so far. [default: 0]"),
    ] = None,
    frequency_penalty: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="X", help="The same for each time that it occurred there. [default: 0]"),
    ] = None,
    logit_bias: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="ID=X", help="Add X to the logit of the token ID. May be repeated."),
    ] = None,
    logprobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="K", help="With --json: how likely each token was, and the K likeliest in its place."
        ),
    ] = None,
    stop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="TEXT", help="End the answer before this text. May be repeated."),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N", help="The same seed gives the same text. [default: a new one; --json tells it]"
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            metavar="N",
            min=1,
            max=MAX_ANSWERS,
            help="So many answers, at the same time; their seeds follow each other.",
        ),
    ] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the model's chat template.")] = False,
    json: Json = False,
) -> None:
    """Answer a prompt, streamed as it is written."""
    options = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "logit_bias": _biases(logit_bias or []), "logprobs": logprobs,
        "stop": stop or (), "seed": seed, "raw": raw,
    }  # fmt: skip
    if logprobs is not None and not json:
        raise UsageError("--logprobs needs --json, which shows them")
    if n == 1:
        run(_generate(prompt, join, model, options, json))
    else:
        run(_generate_many(prompt, join, model, n, options, json))


def _biases(texts: list[str]) -> dict[int, float]:
    """`--logit-bias` as typed."""
    found = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias takes a token id and a number, such as 42=-5, got {text!r}") from None
    return found


async def _generate_many(
    prompt: str, join: list[str] | None, model: str | None, n: int, options: dict[str, Any], json: bool
) -> None:
    async with swarm.AsyncClient(join or None, model=model) as client:
        answers = await client.generate_many(prompt, n, **options)
    if json:
        print(completion_json(*answers))
        return
    for number, answer in enumerate(answers, 1):
        say(f"answer {number} of {n}, seed {answer.seed}: {_summary(answer)}")
        print(answer.text, flush=True)


async def _generate(
    prompt: str, join: list[str] | None, model: str | None, options: dict[str, Any], json: bool
) -> None:
    client = swarm.AsyncClient(join or None, model=model)
    answer = client.stream(prompt, **options)  # a wrong option is told before anybody is dialled
    async with client, answer:
        if json:
            await _follow(answer, show=False)
            assert answer.result is not None
            print(completion_json(answer.result))
            return
        await _follow(answer, show=True)
        assert answer.result is not None
        for note in answer.result.notes:
            say(note)
        say(_summary(answer.result))


async def _follow(answer: swarm.Generation, show: bool) -> None:
    """Read an answer to its end; `show` writes its text, and ends the line even where it breaks off."""
    told, written = 0, False
    loop = asyncio.get_running_loop()
    waiting = loop.call_later(PATIENCE_S, _tell_of_waiting, answer, "")
    try:
        async for piece in answer:
            waiting.cancel()
            for repair in answer.repairs[told:]:
                lead = "\n" if written else ""
                say(
                    f"{lead}repaired after token {repair.at_token}: {repair.reason}; now {chain_line(repair.after)}"
                )
            told = len(answer.repairs)
            if show:
                print(piece.text, end="", flush=True)
                written = True
            lead = "\n" if written else ""
            waiting = loop.call_later(PATIENCE_S, _tell_of_waiting, answer, lead)
    finally:
        waiting.cancel()
        if written:
            print(flush=True)


def _tell_of_waiting(answer: swarm.Generation, lead: str) -> None:
    """For a person who sees nothing happen. The reason is that of a repair under way, if there is one."""
    under_way = [repair.reason for repair in answer.repairs if repair.stalled_s is None]
    why = under_way[-1] if under_way else "the peers are busy, slow or gone"
    say(f"{lead}no token for {PATIENCE_S:.0f} s: {why}; Ctrl-C gives up")


def _summary(done: swarm.Completion) -> str:
    return (
        f"{done.usage.completion_tokens} tokens, {done.timing.tokens_per_s:.1f} tokens/s, first after "
        f"{done.timing.ttft_s:.2f} s, via {chain_line(done.hops)}"
    )


@app.command()
def status(join: Join = None, model: Model = None, json: Json = False) -> None:
    """Show the peers, who holds which layers, and whether an answer is possible now.

    Exit code 0 if a whole chain of peers can be built for each model shown, 1 if not.
    """
    models = run(_status(join, model))
    if json:
        print(status_json(models))
    else:
        terminal().print(status_view(models))
    if not models or any(one.route is None for one in models):
        raise typer.Exit(FAILED)


async def _status(join: list[str] | None, model: str | None) -> tuple[Any, ...]:
    async with swarm.AsyncClient(join or None) as client:
        return await client.status(model)


# ---------------------------------------------------------------- peer, demo


@app.command(epilog=WARNINGS)
def peer(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A directory in Hugging Face layout, a GGUF file, an id on the Hugging Face hub (org/name; "
            "org/name:Q4_K_M for one of its GGUF files), or smollm2, a small one to try with.",
        ),
    ],
    join: Join = None,
    host: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST", help="Listen on this address only. [default: on all of this machine]"),
    ] = None,
    port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="PORT", help="Listen on this port. [default: the next free one from 7070]"),
    ] = None,
    announce: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="HOST:PORT",
            help="Where others reach this peer, if not at its own addresses (behind a router). May be repeated.",
        ),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="Use at most this: 6GB, 800MiB, or 75% of what is free. [default: 90% of a GPU's free memory; "
            "on a CPU half of what is available]",
        ),
    ] = None,
    layers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="A:B",
            help="Serve these layers: 0:12 is the first twelve. [default: chosen, where the swarm is weakest]",
        ),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:N or mps. [default: the best one here]"),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="TYPE",
            help="Compute in float32, bfloat16 or float16. [default: float32 on a CPU, else as the model is stored]",
        ),
    ] = None,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="CPU threads to compute with. [default: as many as physical cores]"),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="What others see this peer called. [default: the machine's name]"),
    ] = None,
    served_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="What the swarm calls the model. [default: from MODEL]"),
    ] = None,
    max_sessions: Annotated[int, typer.Option(metavar="N", help="Generations at a time.")] = 8,
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N",
            help="Tokens that one generation may have here, prompt included. [default: the model's limit, at most "
            "4096]",
        ),
    ] = None,
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Start with an identity of its own, never used before. [default: the first free]"
        ),
    ] = False,
    revision: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="REV", help="Branch, tag or commit of a model on the hub. [default: main]"),
    ] = None,
    no_lan: Annotated[
        bool,
        typer.Option(
            "--no-lan",
            help="Neither announce this peer on the local network (mDNS) nor look for others there. [default: both]",
        ),
    ] = False,
) -> None:
    """Serve some layers of MODEL to a swarm, until Ctrl-C.

    Without --join or SWARM_JOIN it joins peers that it remembers or finds on the local network; where nobody
    answers it begins a swarm of its own. It prints the line with which another machine joins.
    """
    from peer.command import serve
    from peer.service import PeerOptions

    options = PeerOptions(
        model=model, join=swarm.join_addresses(join or None), host=host, port=port, announce=tuple(announce or ()),
        memory=memory, layers=layers, device=device, dtype=dtype, threads=threads, name=name,
        served_name=served_name, max_sessions=max_sessions, context=context, new=new, revision=revision,
        lan=not no_lan,
    )  # fmt: skip
    options.check()
    require_peer_extra()
    raise typer.Exit(serve(options, run))


@app.command()
def demo(
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="PROMPT", help="What to ask. [default: Why is the sky blue?]"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object, the last line on stdout.")
    ] = False,
) -> None:
    """A real swarm on this machine: five peers, one answer, one of them killed on the way.

    Downloads a small model (93 MB) on its first run. Exit code 0 if the answer survived word for word,
    3 if it ended before the kill.
    """
    require_peer_extra()
    from peer.demo import run_demo

    raise typer.Exit(run(run_demo(prompt, json)))


def require_peer_extra() -> None:
    """Raises SwarmError at once, rather than when the first missing library is needed."""
    missing = [name for name in PEER_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise SwarmError(
            f"{', '.join(missing)} not installed, which a peer needs; in LayerSwarm's directory run: "
            "pip install -e '.[peer]'"
        )


TODAY = {
    "run": 'swarm generate "PROMPT" answers one prompt, and swarm demo shows a whole swarm on this machine',
    "chat": 'swarm generate "PROMPT" answers one prompt; from Python, Client.stream takes a list of messages',
    "serve": "swarm peer MODEL serves layers of a model to a swarm",
}


def _not_yet(verb: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(verb, hidden=True, context_settings=settings)
    def answer() -> None:
        raise UsageError(f"there is no `swarm {verb}` yet; today {TODAY[verb]}")


for _verb in TODAY:
    _not_yet(_verb)


# ---------------------------------------------------------------- the shell around it all


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


def main() -> NoReturn:
    """Ends without the interpreter's own clearing up: for torch that takes seconds, and nothing is left to clear."""
    try:
        code = exit_code()
    except SystemExit as error:  # typer's way where nobody reads stdout any more
        code = error.code if isinstance(error.code, int) else FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def exit_code(arguments: list[str] | None = None) -> int:
    """Run one command, `sys.argv` unless given, and say in one line what went wrong."""
    try:
        return app(arguments, prog_name="swarm", standalone_mode=False) or 0
    except WrongUsage as error:
        say(f"swarm: {wrong_usage(error)}")
        return USAGE
    except SwarmError as error:
        say(f"swarm: {error}")
        # the swarm lacks that model: nothing is wrong with the command
        return USAGE if isinstance(error, UsageError) and not isinstance(error, UnknownModel) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        logging.getLogger("swarm.cli").debug("failed", exc_info=error)
        say(f"swarm: {': '.join(str(fact) for fact in (error.filename, error.strerror) if fact) or error}")
        return FAILED


def wrong_usage(error: Any) -> str:
    """What typer has to say of a wrong command line, as one line in our words."""
    text = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "swarm"
    return f"{text[:1].lower()}{text[1:]}; see: {command} --help"


if __name__ == "__main__":
    main()
