"""What a person meets at the command line: answers, and every way in which a command can end.

Most commands run in this process (`cli.exit_code`), against a tiny swarm in another thread; a process of its
own costs seconds, and is used only where the process is what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import cli
from peer import command as command_module
from peer.hop import HopConfig
from peer.local import free_port
from peer.service import PeerService
from swarm import AsyncClient
from swarm.session_config import SessionConfig
from tests.processes import ROOT, environment
from tests.tiny_model import change_json, weights, write_tiny_model
from tests.tiny_swarm import CONTEXT, LAYERS, WITHIN_S, Background, Oracle, TinySwarm, write_model

PROMPT = "the other one"
KEYS = {"text", "token_ids", "finish_reason", "usage", "timing", "hops"}


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    def fails(self, code: int, *texts: str) -> None:
        """One line that says why and what to do, nothing on stdout, no traceback."""
        complaints = [line for line in self.err.splitlines() if line.startswith("swarm: ")]
        assert len(complaints) == 1, self.err
        assert self.err.splitlines()[-1] == complaints[0]
        assert "Traceback" not in self.err
        for text in texts:
            assert text in complaints[0]
        assert (self.code, self.out) == (code, "")


Swarm = Callable[..., Said]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State of its own for every test."""
    for name in ("SWARM_JOIN", "SWARM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def swarm(capsys: pytest.CaptureFixture[str]) -> Swarm:
    """Run `swarm ...` in this process."""

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        code = cli.exit_code([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=3)


@pytest.fixture(scope="module")
def whole(
    background: Background, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinySwarm]:
    """Two peers that hold a whole model between them. Tests leave it as they found it."""
    made = TinySwarm(background, tmp_path_factory.mktemp("whole"))
    made.start_all(model, {"ada": "0:3", "bob": "3:6"})
    yield made
    made.close()


@pytest.fixture
def own(background: Background, tmp_path: Path) -> Iterator[TinySwarm]:
    """A swarm for one test, empty yet."""
    made = TinySwarm(background, tmp_path / "own")
    yield made
    made.close()


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    """A sound model of a few kilobytes, to be spoiled."""
    return write_tiny_model(tmp_path / "tiny")


# ---------------------------------------------------------------- the command line itself


WRONG = {
    "an unknown command": (["frobnicate"], "no such command 'frobnicate'; see: swarm --help"),
    "an unknown option": (["status", "--jion", "x"], "no such option: --jion"),
    "no model": (["peer"], "missing argument 'MODEL'; see: swarm peer --help"),
    "a prompt without quotes": (["generate", "why", "blue"], "unexpected extra argument"),
    "a port that is no number": (["peer", "m", "--port", "http"], "'--port'"),
    "a port beyond all": (
        ["peer", "m", "--port", "70000"],
        "--port lies between 0 (any) and 65535, got 70000",
    ),
    "layers without an end": (["peer", "m", "--layers", "12"], "layers are written A:B"),
    "layers backwards": (
        ["peer", "m", "--layers", "9:3"],
        "--layers: a span needs 0 <= start < stop, got 9:3",
    ),
    "memory in words": (
        ["peer", "m", "--memory", "lots"],
        "--memory is written as 6GB, 800MiB or 75%, got 'lots'",
    ),
    "no memory": (["peer", "m", "--memory", "0"], "--memory is more than nothing"),
    "more than all memory": (["peer", "m", "--memory", "120%"], "at most 100%, got '120%'"),
    "an unknown device": (
        ["peer", "m", "--device", "tpu"],
        "--device is one of cpu, cuda, cuda:N, mps, got 'tpu'",
    ),
    "an unknown dtype": (["peer", "m", "--dtype", "int3"], "--dtype is one of float32, bfloat16, float16"),
    "no context": (["peer", "m", "--context", "1"], "--context must be at least 2, got 1"),
    "no threads": (["peer", "m", "--threads", "0"], "--threads lies between 1 and"),
    "too many threads": (["peer", "m", "--threads", "99999"], "CPUs of this machine, got 99999"),
    "no sessions": (["peer", "m", "--max-sessions", "0"], "--max-sessions must be at least 1, got 0"),
    "a name of control characters": (["peer", "m", "--name", "\x1b[2J"], "--name takes 1 to 32 printable"),
    "a served name without end": (["peer", "m", "--served-name", "x" * 97], "--served-name takes 1 to 96"),
    "a join address without host": (["peer", "m", "--join", ":7070"], "not an address"),
    "an announced port that is none": (
        ["peer", "m", "--announce", "me:port"],
        "'port' is not a port from 1 to 65535",
    ),
    "below absolute zero": (
        ["generate", "p", "--temperature", "-1"],
        "temperature must lie between 0 (greedy) and",
    ),
    "more than certain": (["generate", "p", "--top-p", "1.5"], "top_p must lie above 0 and be at most 1"),
    "a negative top-k": (["generate", "p", "--top-k", "-3"], "top_k must"),
    "no tokens": (["generate", "p", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
    "a negative seed": (["generate", "p", "--seed", "-1"], "seed must lie between"),
    "an empty stop": (["generate", "p", "--stop", ""], "stop"),
    "an address that is none": (["status", "--join", "here there"], "not an address"),
    "an unknown log level": (
        ["--log-level", "loud", "status"],
        "--log-level is one of debug, info, warning, error",
    ),
    "run": (["run", "llama"], "there is no `swarm run` yet; today swarm generate"),
    "chat": (["chat", "--model", "x"], "Client.stream"),
    "serve": (["serve", "m", "--help"], "swarm peer MODEL"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(swarm: Swarm, what: str) -> None:
    arguments, text = WRONG[what]
    swarm(*arguments).fails(cli.USAGE, text)


def commands() -> dict[str, Any]:
    found: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return {name: command for name, command in found.items() if not command.hidden}


def test_every_command_and_option_explains_itself(swarm: Swarm) -> None:
    assert set(commands()) == {"generate", "status", "peer", "demo"}
    for name, command in commands().items():
        said = swarm(name, "--help")
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"Usage: swarm {name}")
        for option in command.params:
            assert option.help, f"{name} {option.name} has no help"
    assert swarm().out == swarm("--help").out


def test_the_help_of_peer_says_what_lending_a_machine_means(swarm: Swarm) -> None:
    said = " ".join(swarm("peer", "--help").out.split())
    assert "every peer in a chain can learn the prompt and the answer" in said
    assert "anyone who can reach this port may use this peer" in said
    assert "nothing is reported to anyone" in said


LIGHT = """
import logging, sys
import cli
def code(*arguments):
    try:
        return cli.exit_code(list(arguments))
    finally:
        assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules), arguments
codes = [code("--version"), code("--help"), code("peer", "--help"), code("peer", "m", "--memory", "lots"),
         code("peer", "m", "--device", "tpu"), code("status", "--join", sys.argv[1]),
         code("generate", "abc", "--max-tokens", "3", "--join", sys.argv[1])]
logging.getLogger("swarm.node").warning("another process runs with the same identity %s", "abcd")
print(codes)
"""


def test_clients_help_and_wrong_usage_need_no_torch(whole: TinySwarm, home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, whole.address],
        cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2, 2, 0, 0]"
    # and a warning looks like all else that is said
    assert done.stderr.splitlines()[-1] == "swarm: another process runs with the same identity abcd"


def test_the_version_names_release_protocol_torch_and_transformers(swarm: Swarm) -> None:
    import torch
    import transformers

    said = swarm("--version")
    assert said.code == 0
    assert said.out == (
        f"swarm {cli.swarm.__version__}, protocol 1, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )


@pytest.mark.parametrize("command", [("peer", "m"), ("demo",)])
def test_without_the_peer_extra_the_line_that_installs_it_is_told(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    swarm(*command).fails(cli.FAILED, "torch", "pip install -e '.[peer]'")


def test_a_home_that_is_a_file_is_told(swarm: Swarm, home: Path) -> None:
    home.write_text("not a directory")
    swarm("status").fails(cli.USAGE, str(home), "SWARM_HOME")


# ---------------------------------------------------------------- models that can't be served


def without_a_tensor(folder: Path) -> None:
    from safetensors.numpy import save_file

    kept = {name: tensor for name, tensor in weights().items() if name != "model.layers.2.mlp.up_proj.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


BROKEN: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "is gone": (shutil.rmtree, ("no such directory",)),
    "lacks its config": (lambda d: (d / "config.json").unlink(), ("has no config.json", "Hugging Face layout")),
    "lacks its weights": (lambda d: (d / "model.safetensors").unlink(), ("has no weights", "fetch them")),
    "has half a config": (lambda d: (d / "config.json").write_text("{"), ("isn't JSON (line 1", "again")),
    "has an impossible config": (
        lambda d: change_json(d / "config.json", hidden_size="wide"), ("wrong value", "again")
    ),
    "lacks a tensor": (without_a_tensor, ("model.layers.2.mlp.up_proj.weight", "again")),
    "has truncated weights": (cut, ("model.safetensors", "truncated", "again")),
    "has weights of another size": (
        lambda d: change_json(d / "config.json", intermediate_size=25),
        ("has shape [16, 24]", "the config asks for [16, 25]"),
    ),
    "has only pickled weights": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), ("pickled", "safetensors")
    ),
    "is of an unknown kind": (lambda d: change_json(d / "config.json", model_type="novel"), ("'novel'", "pip install")),
    "is quantised": (
        lambda d: change_json(d / "config.json", quantization_config={"quant_method": "awq"}), ("awq", "unquantised")
    ),
}  # fmt: skip


def start_peer(swarm: Swarm, model: Path | str, *options: str) -> Said:
    return swarm("peer", str(model), "--host", "127.0.0.1", "--device", "cpu", "--threads", "1", *options)


@pytest.mark.parametrize("how", BROKEN)
def test_a_peer_whose_model(swarm: Swarm, tiny_dir: Path, how: str) -> None:
    spoil, texts = BROKEN[how]
    spoil(tiny_dir)
    start_peer(swarm, tiny_dir, "--port", "0").fails(cli.FAILED, *texts)


def test_a_word_that_is_no_model_is_told_what_one_is(swarm: Swarm) -> None:
    start_peer(swarm, "llama", "--port", "0").fails(
        cli.FAILED, "no such directory: llama", "org/name", "smollm2"
    )


# ---------------------------------------------------------------- machines and options that don't fit


MISFITS = {
    "memory for no layer": (
        ["--memory", "1MB"], cli.FAILED, ("too small for one layer", " needs ", " MiB", "--memory"),
    ),
    "more memory than there is": (["--memory", "9999TB"], cli.FAILED, ("9999TB asks for", "are free")),
    "layers beyond the model": (["--layers", "2:9"], cli.USAGE, ("--layers 2:9", "the model has 4 layers, 0:4")),
    "layers that don't fit": (["--layers", "0:4", "--memory", "2MB"], cli.FAILED, ("layers 0-3 need", "the budget is")),
    "a context beyond the model": (["--context", "4096"], cli.USAGE, ("--context 4096", "128 positions")),
    "an absent GPU": (["--device", "cuda:99"], cli.USAGE, ("--device cuda:99",)),
    "a revision of a directory": (["--revision", "main"], cli.USAGE, ("--revision",)),
}  # fmt: skip


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_told_with_numbers(swarm: Swarm, tiny_dir: Path, what: str) -> None:
    options, code, texts = MISFITS[what]
    start_peer(swarm, tiny_dir, "--port", "0", *options).fails(code, *texts)


def test_a_taken_port_is_told_before_the_model_is_looked_at(swarm: Swarm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        start_peer(swarm, "./no-such-model", "--port", port).fails(
            cli.FAILED, f"port {port} on 127.0.0.1 is already taken", "leave out --port"
        )


def test_nobody_at_the_join_address_is_told_before_the_model_is_looked_at(swarm: Swarm) -> None:
    address = f"127.0.0.1:{free_port()}"
    start_peer(swarm, "./no-such-model", "--port", "0", "--join", address).fails(
        cli.FAILED, f"nobody answers at {address}", "is a peer running there?"
    )


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
def test_a_key_that_others_can_read_is_refused_with_the_remedy(
    swarm: Swarm, tiny_dir: Path, home: Path
) -> None:
    key = home / "peers" / "0" / "key"
    key.parent.mkdir(parents=True)
    key.write_text("00" * 32)
    key.chmod(0o644)
    start_peer(swarm, tiny_dir, "--port", "0").fails(cli.FAILED, f"chmod 600 {key}")


# ---------------------------------------------------------------- answers


def test_an_answer_is_streamed_to_stdout_and_all_else_to_stderr(
    swarm: Swarm, whole: TinySwarm, model: Path
) -> None:
    said = swarm("generate", PROMPT, "--temperature", "0", "--max-tokens", "20", "--join", whole.address)
    oracle = Oracle(model)
    ids = oracle.greedy(oracle.chat_ids(PROMPT), 20)
    assert said.code == 0
    assert said.out == oracle.text(ids) + "\n"
    assert said.err.startswith(f"{len(ids)} tokens, ")
    assert "via ada 0-2 → bob 3-5" in said.err


def test_json_is_one_object_with_everything(swarm: Swarm, whole: TinySwarm, model: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "9", "--raw", "--json", "--join", whole.address)
    said = swarm("generate", PROMPT, *options)
    oracle = Oracle(model)
    assert (said.code, said.err) == (0, "")
    done = json.loads(said.out)
    assert done.keys() >= KEYS
    assert done["token_ids"] == oracle.greedy(oracle.raw_ids(PROMPT), 9)
    assert done["usage"] == {"prompt_tokens": len(oracle.raw_ids(PROMPT)), "completion_tokens": 9}
    assert done["finish_reason"] == "length"
    assert done["timing"].keys() >= {"ttft_s", "total_s", "tokens_per_s", "stall_s"}
    assert [(hop["name"], hop["start"], hop["stop"]) for hop in done["hops"]] == [
        ("ada", 0, 3),
        ("bob", 3, 6),
    ]


def test_json_tells_logprobs_and_several_answers(swarm: Swarm, whole: TinySwarm) -> None:
    options = ("--max-tokens", "4", "--seed", "7", "--temperature", "1", "--logprobs", "2", "-n", "2")
    said = swarm("generate", PROMPT, *options, "--json", "--join", whole.address)
    assert (said.code, said.err) == (0, "")
    first, second = json.loads(said.out)["choices"]
    assert (first["seed"], second["seed"]) == (7, 8)
    assert [one["id"] for one in first["logprobs"]] == first["token_ids"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in second["logprobs"])
    swarm("generate", PROMPT, "--logprobs", "2", "--join", whole.address).fails(cli.USAGE, "--logprobs needs --json")


def test_a_bias_is_typed_as_id_and_number(swarm: Swarm, whole: TinySwarm) -> None:
    forced = ("--logit-bias", "30=100", "--max-tokens", "3", "--temperature", "0", "--json")
    said = swarm("generate", PROMPT, *forced, "--join", whole.address)
    assert json.loads(said.out)["token_ids"] == [30, 30, 30]
    swarm("generate", PROMPT, "--logit-bias", "x").fails(cli.USAGE, "such as 42=-5, got 'x'")
    swarm("generate", PROMPT, "-n", "0").fails(cli.USAGE, "-n")


def test_max_tokens_beyond_the_context_are_cut_with_a_note(
    swarm: Swarm, whole: TinySwarm, model: Path
) -> None:
    oracle = Oracle(model)
    text = oracle.text(oracle.greedy(oracle.chat_ids(PROMPT), 9))
    options = ("--temperature", "0", "--max-tokens", "5000", "--stop", text[3:])
    said = swarm("generate", PROMPT, *options, "--join", whole.address)
    assert (said.code, said.out) == (0, text[:3] + "\n")
    assert f"the chain's context is {CONTEXT}" in said.err


def test_status_shows_the_peers_and_a_chain(swarm: Swarm, whole: TinySwarm) -> None:
    said = swarm("status", "--join", whole.address)
    assert (said.code, said.err) == (0, "")
    assert "███···" in said.out and "···███" in said.out
    assert "chain ok  ada 0-2 → bob 3-5" in said.out


def test_status_as_json_is_one_object(swarm: Swarm, whole: TinySwarm) -> None:
    said = swarm("status", "--json", "--join", whole.address)
    assert (said.code, said.err) == (0, "")
    (shown,) = json.loads(said.out)["models"]
    assert (shown["name"], shown["coverage"], shown["problem"]) == ("tiny", [1] * LAYERS, None)
    assert [peer["name"] for peer in shown["peers"]] == ["ada", "bob"]


def test_an_address_may_come_from_the_environment_or_from_memory(
    swarm: Swarm, whole: TinySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm("status").fails(cli.FAILED, "none is remembered", "--join host:port")
    monkeypatch.setenv("SWARM_JOIN", whole.address)
    assert swarm("status").code == 0
    monkeypatch.delenv("SWARM_JOIN")
    assert swarm("status").code == 0
    assert swarm("generate", PROMPT, "--max-tokens", "2").code == 0


# ---------------------------------------------------------------- no answer


@pytest.mark.parametrize("command", [("generate", PROMPT), ("status",)])
def test_nobody_at_the_address(swarm: Swarm, command: tuple[str, ...]) -> None:
    address = f"127.0.0.1:{free_port()}"
    swarm(*command, "--join", address).fails(
        cli.FAILED, f"nobody answers at {address}", "is a peer running there?"
    )


@pytest.mark.parametrize("command", [("generate", PROMPT), ("status",)])
def test_only_other_models_at_the_address(swarm: Swarm, whole: TinySwarm, command: tuple[str, ...]) -> None:
    said = swarm(*command, "--model", "llama", "--join", whole.address)
    said.fails(cli.FAILED, "no peer serves 'llama'", "this swarm serves tiny")


def test_layers_without_a_peer_are_named_with_the_command_that_serves_them(
    swarm: Swarm, own: TinySwarm, model: Path
) -> None:
    own.start("ada", model, "0:2")
    remedy = "swarm peer MODEL --layers 2:6 --join"
    swarm("generate", PROMPT, "--join", own.address).fails(
        cli.FAILED, "no live peer serves layers 2-5 of tiny (1 of 1 known peers alive)", remedy
    )
    shown = swarm("status", "--join", own.address)
    assert (shown.code, shown.err) == (1, "")
    assert "no chain" in shown.out and remedy in shown.out
    said = swarm("status", "--json", "--join", own.address)
    assert said.code == 1
    assert remedy in json.loads(said.out)["models"][0]["problem"]


def test_a_prompt_longer_than_the_context(swarm: Swarm, whole: TinySwarm) -> None:
    said = swarm("generate", "q" * (CONTEXT + 30), "--raw", "--join", whole.address)
    said.fails(cli.USAGE, f"this chain's context is {CONTEXT}", "shorten it by at least 32 tokens")


def test_every_peer_is_full(
    swarm: Swarm, own: TinySwarm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = functools.partial(SessionConfig, no_route_patience_s=0.1, patience_s=0.1, min_attempts=1)
    monkeypatch.setattr("swarm.client.SessionConfig", impatient)
    monkeypatch.setattr(cli, "PATIENCE_S", 0.0)
    own.start("ada", model, "0:6", max_sessions=1, config=HopConfig(retry_after_s=0.1))
    with held_session(own):
        said = swarm("generate", PROMPT, "--max-tokens", "5", "--join", own.address)
    said.fails(cli.FAILED, " full: ", "try again later")
    assert said.err.startswith("no token for 0 s: ")


class held_session:
    """A generation that has begun and whose reader has stopped reading."""

    def __init__(self, swarm: TinySwarm) -> None:
        self._swarm = swarm

    def __enter__(self) -> None:
        self._client = AsyncClient(self._swarm.address)
        self._answer = self._client.stream(PROMPT, max_tokens=900, temperature=0)
        self._swarm.run(self._answer.__anext__())

    def __exit__(self, *_: object) -> None:
        self._swarm.run(self._answer.aclose())
        self._swarm.run(self._client.aclose())


# ---------------------------------------------------------------- breaking off


class stalled:
    """While open, this peer computes nothing."""

    def __init__(self, swarm: TinySwarm, name: str) -> None:
        self._swarm, self._engine = swarm, swarm.peers[name].engine
        self._go = threading.Event()

    def __enter__(self) -> None:
        self._swarm.call(lambda: self._engine.call(self._go.wait))

    def __exit__(self, *_: object) -> None:
        self._go.set()


class Meanwhile:
    """Work in a thread while a command runs here. Where it fails, the command is interrupted and `join` raises."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            interrupt_me()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def interrupt_me(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_ctrl_c_ends_an_answer_and_frees_the_peers_at_once(swarm: Swarm, own: TinySwarm, model: Path) -> None:
    ada = own.start("ada", model, "0:6")
    opened = threading.Event()
    ada.server.on_change = opened.set

    def interrupt() -> None:
        opened.wait(WITHIN_S)
        interrupt_me()

    with stalled(own, "ada"):
        thread = Meanwhile(interrupt)
        said = swarm("generate", PROMPT, "--join", own.address)
        thread.join()
        assert said.code == cli.INTERRUPTED
        assert "Traceback" not in said.err
        own.empty()


def test_whoever_reads_the_answer_may_stop_reading(whole: TinySwarm, home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cli",
        "generate",
        PROMPT,
        "--max-tokens",
        "500",
        "--join",
        whole.address,
    ]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert running.stdout is not None and running.stderr is not None
    with running:
        assert running.stdout.read(4)
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == cli.FAILED
    whole.empty()


# ---------------------------------------------------------------- the life of `swarm peer`


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], PeerService]]:
    """Wait until the peer that runs in this process serves."""
    ready = threading.Event()
    found: list[PeerService] = []
    announce = command_module._announce

    def told(service: PeerService) -> None:
        announce(service)
        found.append(service)
        ready.set()

    monkeypatch.setattr(command_module, "_announce", told)

    def wait() -> PeerService:
        assert ready.wait(WITHIN_S), "the peer didn't start"
        return found[-1]

    yield wait
    gc.unfreeze()


def shown_by(swarm: TinySwarm, name: str) -> set[str]:
    """Names of the peers that `name` knows to be alive."""
    node = swarm.peers[name].node
    return swarm.call(lambda: {entry.descriptor.name for entry in node.entries()})


def until_shown(swarm: TinySwarm, name: str, state: str) -> None:
    """Wait until ada, whom clients ask, knows this peer in that state. It serves once it was dialled back."""

    async def wait() -> None:
        node = swarm.peers["ada"].node
        async with asyncio.timeout(WITHIN_S):
            while (name, state) not in {(e.descriptor.name, e.heartbeat.state) for e in node.entries()}:
                await node.changed()

    swarm.run(wait())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_peer_that_is_told_to_stop_leaves_at_once(
    swarm: Swarm, own: TinySwarm, model: Path, serving: Callable[[], PeerService], number: int
) -> None:
    own.start("ada", model, "0:6")
    known: list[set[str]] = []
    passed_over: list[int] = []

    def stop() -> None:
        serving()
        known.append(shown_by(own, "ada"))
        passed_over.append(gc.get_freeze_count())
        interrupt_me(number)

    thread = Meanwhile(stop)
    said = start_peer(swarm, model, "--port", "0", "--name", "eve", "--join", own.address)
    thread.join()
    assert said.code == 0
    assert passed_over[0] > 100_000, "a full collection of garbage would hold the loop for 175 ms, with torch in it"
    assert known == [{"ada", "eve"}]
    assert shown_by(own, "ada") == {"ada"}  # a lease would have run on for seconds
    assert "Traceback" not in said.err
    assert said.out.startswith(f"swarm peer {model} --join ")
    assert "leaving: nobody is served now" in said.err


class Reading:
    """A client of a swarm, in the swarm's loop, that is asked for one piece at a time."""

    def __init__(self, swarm: TinySwarm) -> None:
        self._swarm = swarm
        self._client = AsyncClient(swarm.address)
        self.answer = self._client.stream(PROMPT, max_tokens=900, temperature=0)
        self.ids: list[int] = []

    def piece(self) -> None:
        self.ids += self._swarm.run(self.answer.__anext__()).token_ids

    def until_it_knows(self, name: str) -> None:
        self._swarm.run(self._until_it_knows(name))

    async def _until_it_knows(self, name: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while (name, "serving") not in {
                (e.descriptor.name, e.heartbeat.state) for e in self._client.peers()
            }:
                await self._client.changed()

    def close(self) -> None:
        self._swarm.run(self.answer.aclose())
        self._swarm.run(self._client.aclose())


def test_a_leaving_peer_hands_its_sessions_over(
    swarm: Swarm, own: TinySwarm, model: Path, serving: Callable[[], PeerService]
) -> None:
    own.start("ada", model, "0:3")
    seen: dict[str, Any] = {}

    def move() -> None:
        serving()
        until_shown(own, "eve", "serving")
        reading = Reading(own)
        try:
            reading.piece()
            seen["before"] = [hop.name for hop in reading.answer.hops]
            own.start("bob", model, "3:6")
            reading.until_it_knows("bob")
            interrupt_me()
            while not reading.answer.repairs or reading.answer.repairs[-1].stalled_s is None:
                reading.piece()
            seen["after"] = [hop.name for hop in reading.answer.hops]
            seen["ids"] = reading.ids
        finally:
            reading.close()

    thread = Meanwhile(move)
    options = ("--port", "0", "--layers", "3:6", "--name", "eve", "--join", own.address)
    said = start_peer(swarm, model, *options)
    thread.join()
    assert said.code == 0
    assert (seen["before"], seen["after"]) == (["ada", "eve"], ["ada", "bob"])
    oracle = Oracle(model)
    assert seen["ids"] == oracle.greedy(oracle.chat_ids(PROMPT), len(seen["ids"]))
    assert "leaving: no new sessions; 1 open one may take 25 s to move to other peers" in said.err
    assert shown_by(own, "ada") == {"ada", "bob"}


def test_a_session_that_can_move_nowhere_holds_nobody_back_for_long(
    swarm: Swarm,
    own: TinySwarm,
    model: Path,
    serving: Callable[[], PeerService],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who asks twice is not even kept waiting so long."""
    monkeypatch.setattr(command_module, "DRAIN_S", 0.5)
    exits: list[int] = []
    monkeypatch.setattr(command_module.os, "_exit", exits.append)
    own.start("ada", model, "0:3")

    def stop() -> None:
        eve = serving()
        until_shown(own, "eve", "serving")
        reading = Reading(own)
        try:
            reading.piece()
            interrupt_me()
            until_shown(own, "eve", "draining")
            assert eve.server.sessions == 1
            interrupt_me()
        finally:
            reading.close()

    thread = Meanwhile(stop)
    options = ("--port", "0", "--layers", "3:6", "--name", "eve", "--join", own.address)
    said = start_peer(swarm, model, *options)
    thread.join()
    assert (said.code, exits) == (0, [cli.INTERRUPTED])
    assert shown_by(own, "ada") == {"ada"}


# ---------------------------------------------------------------- the process itself


@contextlib.contextmanager
def peer_process(model: Path, home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "cli", "peer", str(model), "--host", "127.0.0.1", "--device", "cpu"]
    running = subprocess.Popen(
        [*command, "--threads", "1", *options],
        cwd=ROOT, env=environment(home), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        with running:
            yield running
    finally:
        running.kill()


def read_until(stream: Any, text: str) -> str:
    """Lines of a process up to and with the one that has `text`."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"the process ended without saying {text!r}: {''.join(lines)}")


def test_a_killed_peer_starts_again_as_itself_and_stops_in_order(
    own: TinySwarm, model: Path, home: Path, swarm: Swarm
) -> None:
    own.start("ada", model, "0:3")
    options = ("--port", "0", "--layers", "3:6", "--name", "eve", "--join", own.address)
    with peer_process(model, home, *options) as first:
        assert first.stdout is not None and first.stderr is not None
        before = first.stdout.readline()
        first.send_signal(signal.SIGKILL)
        assert "anyone who can reach this port may use this peer" in first.stderr.read()
    with peer_process(model, home, *options) as second:
        assert second.stdout is not None and second.stderr is not None
        after = second.stdout.readline()
        until_shown(own, "eve", "serving")
        said = swarm("generate", PROMPT, "--max-tokens", "4", "--join", own.address)
        assert (said.code, "via ada 0-2 → eve 3-5" in said.err) == (0, True)
        second.send_signal(signal.SIGTERM)
        told = second.stderr.read()
    assert second.returncode == 0
    assert identity_in(before) == identity_in(after) != ""
    assert "anyone who can reach" not in told  # the notice is for the first start
    assert "Traceback" not in told
    assert shown_by(own, "ada") == {"ada"}


def identity_in(line: str) -> str:
    """Of the line that others paste."""
    return line.partition("--join ")[2].partition("@")[0]


def test_a_peer_interrupted_while_it_starts_is_gone_at_once(own: TinySwarm, model: Path, home: Path) -> None:
    own.start("ada", model, "0:6")
    with peer_process(model, home, "--port", "0", "--name", "eve", "--join", own.address) as running:
        assert running.stdout is not None and running.stderr is not None
        read_until(running.stderr, "with 1 peer in the swarm")  # then it imports torch, in a thread
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == "stopped before it served\n"
        assert running.stdout.read() == ""
    assert running.returncode == cli.INTERRUPTED
    assert shown_by(own, "ada") == {"ada"}
