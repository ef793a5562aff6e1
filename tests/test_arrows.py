"""The one dependency rule, `cli -> peer -> swarm -> routing`, and what else must never be imported where.

Imports are read from the syntax trees, those inside functions and under TYPE_CHECKING included, so
that a lazy import can't go around a rule.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("routing", "swarm", "peer", "cli")  # each may import itself and what stands before it
CORES = (
    "swarm/noise.py",
    "swarm/addresses.py",
    "swarm/buckets.py",
    "swarm/door.py",
    "swarm/flow.py",
    "swarm/quotas.py",
    "swarm/wire.py",
    "swarm/registry.py",
    "swarm/table.py",
    "swarm/heads.py",
    "swarm/asks.py",
    "swarm/digests.py",
    "swarm/places.py",
    "swarm/budget.py",
    "swarm/clocks.py",
    "swarm/listing.py",
    "swarm/following.py",
    "swarm/owner.py",
    "swarm/neighbour.py",
    "swarm/circle.py",
    "swarm/records.py",
    "swarm/messages.py",
    "swarm/session.py",
    "peer/admission.py",
    "peer/hop.py",
    "peer/journal.py",
    "peer/batch.py",
)
OUTSIDE_WORLD = {"asyncio", "socket", "ssl", "selectors", "time", "datetime", "threading", "concurrent"}
HEAVY = {"torch", "transformers"}
RUNS_STRANGERS_CODE = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop", "runpy",
    "jsonpickle", "yaml",
}  # fmt: skip
# functions that do, or that load a pickle: by whatever module's name they are called
RUN_BY_NAME = {"eval", "exec", "compile", "__import__", "breakpoint"}
RUN_AS_ATTRIBUTE = {
    "torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load", "pandas.read_pickle", "builtins.eval",
    "builtins.exec", "os.system", "os.popen", "importlib.import_module", "import_module",
}  # fmt: skip
# Modules of ours, imported by a name that stands in our own code.
ALLOWED = {path: {"importlib.import_module"} for path in ("swarm/confined_worker.py", "peer/service.py")}


def sources(layer: str) -> list[Path]:
    return [ROOT / "cli.py"] if layer == "cli" else sorted((ROOT / layer).rglob("*.py"))


EVERY_SOURCE = [path for layer in LAYERS for path in sources(layer)]


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str | None]]:
    """(module, name) for `from module import name`, (module, None) for `import module`, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{package}.{module}".rstrip(".")
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"} and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, None


def called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def tops(source: str, package: str) -> set[str]:
    return {module.partition(".")[0] for module, _ in imported(ast.parse(source), package)}


def upward(source: str, layer: str) -> set[str]:
    return tops(source, layer) & set(LAYERS[LAYERS.index(layer) + 1 :])


def global_randomness(source: str) -> set[str]:
    """What a module takes of `random` besides the class whose instances are passed in."""
    tree = ast.parse(source)
    names = {name for module, name in imported(tree, "") if module == "random" and name is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            names.add(node.attr)
    return names - {"Random"}


def strangers_code(source: str) -> set[str]:
    """The ways to run what was read as data. `model.eval()` and `re.compile` are none of them."""
    tree = ast.parse(source)
    found = tops(source, "") & RUNS_STRANGERS_CODE
    found |= {f"{module}.{name}" for module, name in imported(tree, "")} & RUN_AS_ATTRIBUTE
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in RUN_BY_NAME:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in RUN_AS_ATTRIBUTE:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.add(f"{node.arg}={ast.unparse(node.value)}")
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.add("shell")
    return found


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_nothing_imports_upward(path: Path) -> None:
    assert upward(path.read_text("utf-8"), layer_of(path)) == set()


@pytest.mark.parametrize("path", [path for path in EVERY_SOURCE if layer_of(path) != "peer"], ids=name_of)
def test_torch_and_transformers_live_in_peer_only(path: Path) -> None:
    assert tops(path.read_text("utf-8"), layer_of(path)) & HEAVY == set()


@pytest.mark.parametrize("path", sources("routing"), ids=name_of)
def test_routing_is_pure(path: Path) -> None:
    source = path.read_text("utf-8")
    used = tops(source, "routing") - {"routing"}
    assert used <= sys.stdlib_module_names
    assert used & (OUTSIDE_WORLD | {"os", "io", "pathlib", "subprocess", "secrets"}) == set()
    assert global_randomness(source) == set()


@pytest.mark.parametrize("core", CORES)
def test_a_core_knows_no_socket_clock_thread_or_global_randomness(core: str) -> None:
    source = (ROOT / core).read_text("utf-8")
    assert tops(source, core.partition("/")[0]) & OUTSIDE_WORLD == set()
    assert global_randomness(source) == set()


def test_only_the_transport_opens_sockets() -> None:
    users = {name_of(path) for path in sources("swarm") if "socket" in tops(path.read_text("utf-8"), "swarm")}
    assert users <= {"swarm/transport.py"}


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_nothing_runs_what_was_read_as_data(path: Path) -> None:
    assert strangers_code(path.read_text("utf-8")) == ALLOWED.get(name_of(path), set())


def reached(module: str, seen: set[str]) -> set[str]:
    """The modules of ours that one imports, those that these import, and so on; in functions too."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if module not in seen and path.exists():
        seen.add(module)
        for name, inner in imported(ast.parse(path.read_text("utf-8")), module.partition(".")[0]):
            reached(name, seen)
            reached(f"{name}.{inner}", seen)
    return seen


READS_FILES = {
    f"peer.{name}"
    for name in ("source", "directory", "hub", "layout", "json_cursor", "weights", "safetensors_header", "gguf_header",
                 "gguf_config", "gguf_tokenizer", "tokenizer_bundle", "fingerprint")
}  # fmt: skip


def test_nothing_that_answers_strangers_can_read_a_models_files() -> None:
    """They are read once, in a thread, before a peer serves: what a bad one costs holds nobody's step."""
    answering = {module for path in sources("swarm") for module in reached(f"swarm.{path.stem}", set())}
    for module in ("peer.server", "peer.handout"):
        answering |= reached(module, set())
    assert answering & READS_FILES == set()
    assert reached("peer.service", set()) >= READS_FILES, "or this looks for what isn't there"


def test_who_answers_strangers_is_known() -> None:
    """Whoever takes messages of a stranger is among those that the test before this one looks at."""
    taking = {name_of(path) for layer in ("swarm", "peer") for path in sources(layer) if takes_messages(path)}
    assert taking == {"swarm/node.py", "peer/server.py", "peer/service.py"}
    service = (ROOT / "peer/service.py").read_text("utf-8")
    assert service.count("transport.handle(") == service.count("transport.handle(GetFiles, handout.answer)") == 1


def takes_messages(path: Path) -> bool:
    return ".handle(" in path.read_text("utf-8")


def test_the_command_imports_peer_only_inside_the_commands_that_need_it() -> None:
    tree = ast.parse((ROOT / "cli.py").read_text("utf-8"))
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    at_import = {module.partition(".")[0] for node in outside for module, _ in imported(node, "cli")}
    assert "peer" not in at_import


@pytest.mark.parametrize("module", ["swarm", "cli"])
def test_a_fresh_import_brings_in_neither_torch_nor_transformers(module: str) -> None:
    program = f"import {module}, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# ---------------------------------------------------------------- the rules themselves, on what they must catch


@pytest.mark.parametrize(
    "source",
    [
        "import peer",
        "from peer.engine import Engine",
        "def f():\n    import peer.hop as hop",
        "if TYPE_CHECKING:\n    from cli import main",
        "importlib.import_module('peer.engine')",
    ],
)
def test_an_upward_import_is_seen_wherever_it_stands(source: str) -> None:
    assert upward(source, "swarm")


def test_a_relative_import_stays_in_its_package() -> None:
    assert tops("from . import wire\nfrom .noise import Handshake", "swarm") == {"swarm"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "eval('1')",
        "exec(text)",
        "run = eval",
        "torch.load(path)",
        "from torch import load",
        "import marshal",
        "from importlib import import_module",
        "importlib.import_module(name)",
        "import runpy",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "builtins.exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=anything)",
        "load(path, allow_pickle=True)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_every_way_to_run_data_is_seen(source: str) -> None:
    assert strangers_code(source)


def test_what_only_looks_like_it_is_allowed() -> None:
    allowed = "model.eval()\nsafetensors.torch.load_file(path)\nre.compile('a')\nload(path, trust_remote_code=False)"
    assert strangers_code(allowed) == set()


def test_randomness_may_be_passed_in_but_not_taken() -> None:
    assert global_randomness("from random import Random\nimport random\nrng: random.Random") == set()
    assert global_randomness("import random\nrandom.random()") == {"random"}
    assert global_randomness("from random import choice") == {"choice"}
