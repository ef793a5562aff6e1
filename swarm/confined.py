"""Strangers' code and data in a process of its own: our end of it. `confined_worker.py` is the other.

Invariant: whatever a job is given, it can cost the seconds and the memory of its `Limits` and one typed error,
nothing else. The process has no environment, no files, no sockets and nothing of this process's memory; it is
kept for the next request, killed at a deadline, and ends with its owner.

Two jobs share it: `template.py` (chat templates) and `tokenizer.py` (tokenizers, whose regular expressions can
take for ever). A message, either way, is one line of JSON, then the blobs whose sizes are its "sizes".
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm.errors import SwarmError

WORKER = Path(__file__).with_name("confined_worker.py")
# what an interpreter may need to start, and the time zone that templates tell
KEPT_ENVIRONMENT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
MAX_HEADER_BYTES = 256 << 10  # of an answer: everything long is a blob
MAX_BLOBS = 8
MAX_WORDS = 500  # characters of an error; the process keeps to it too, unless a job has taken it over


@dataclass(frozen=True)
class Limits:
    """What one job may cost. memory_bytes: address space, the interpreter's own 30 MiB included. answer_bytes: of
    one answer's blobs. start_s: importing libraries on a busy machine; nothing of a stranger's runs in it."""

    memory_bytes: int
    answer_bytes: int
    start_s: float = 30.0


@dataclass(frozen=True)
class Said:
    """One message, either way."""

    fields: Mapping[str, object]
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Job:
    """module: of this package, with a `make(settings)` that returns what answers. libraries: what it imports that
    isn't in the standard library. failed: makes the error, of words that follow the thing's name ("it ...")."""

    module: str
    libraries: tuple[str, ...]
    failed: Callable[[str], SwarmError]


@dataclass(frozen=True)
class First:
    """What every new process of a job is told before anything else; if it doesn't say yes, it is of no use."""

    request: Said
    seconds: float
    check: Callable[[Said], None]  # raises on an answer that isn't a yes


class Confined:
    """One job's process. Safe to use from several threads, one request at a time."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self._job, self._limits = job, limits
        self._first: First | None = None
        self._lock = threading.Lock()
        self._processes: list[_Process] = []  # none or one; a list, so that the finalizer can hold it
        self._finalizer = weakref.finalize(self, _end_all, self._processes)

    def start(self) -> None:
        """Have the process ready, so that the first request needn't wait for it. Raises the job's error."""
        with self._lock:
            self._running()

    def begin(self, first: First) -> Said:
        """Tell this process, and each later one, `first`. Returns the answer. Raises as `ask`, and what it raises."""
        with self._lock:
            assert self._first is None, "a process begins once"
            answer = self._told(self._running(), first)
            self._first = first
            return answer

    def ask(self, request: Said, seconds: float) -> Said:
        """The answer. Blocks, at most `seconds` and what a start takes; other callers wait for their turn.

        Raises the job's error when the process reaches a limit or breaks; the next request gets a new one.
        """
        with self._lock:
            return self._answer(self._running(), request, seconds)

    def close(self) -> None:
        """End the process, and with it a request in flight. A later request starts another."""
        for process in tuple(self._processes):
            process.kill()
        with self._lock:
            _end_all(self._processes)

    def _running(self) -> _Process:
        if not self._processes:
            self._processes.append(_Process(self._job, self._limits))
            if self._first is not None:
                self._told(self._processes[0], self._first)
        return self._processes[0]

    def _told(self, process: _Process, first: First) -> Said:
        answer = self._answer(process, first.request, first.seconds)
        try:
            first.check(answer)
        except SwarmError:
            _end_all(self._processes)
            raise
        return answer

    def _answer(self, process: _Process, request: Said, seconds: float) -> Said:
        try:
            answer = process.ask(request, seconds)
        except SwarmError:
            _end_all(self._processes)
            raise
        if answer.fields.get("ends"):
            _end_all(self._processes)
        return answer


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


class _Process:
    """One subprocess. `ask` either returns its answer or raises the job's error, and then it must be ended."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self._job, self._limits = job, limits
        self._ready = False
        kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                _command(job, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=kept | ONE_THREAD,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise job.failed(f"no process could be started for it ({error})") from error

    def ask(self, request: Said, seconds: float) -> Said:
        if not self._ready:
            self._exchange([], self._limits.start_s, "the process for it did not start")
            self._ready = True
        header = {**request.fields, "seconds": seconds, "sizes": [len(blob) for blob in request.blobs]}
        line = json.dumps(header).encode() + b"\n"
        return self._exchange([line, *request.blobs], seconds, "it broke its process")

    def _exchange(self, request: list[bytes], seconds: float, broken: str) -> Said:
        """Write, and read one answer; killing the process is what ends either when it is late."""
        assert self._process.stdin and self._process.stdout
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            answer = self._written_and_read(request)
        except OSError:  # it died before it had read everything
            answer = None
        finally:
            timer.cancel()
        if late.is_set():
            raise self._job.failed(f"it took longer than {seconds:.3g} s")
        if answer is None:
            raise self._job.failed(broken)
        return answer

    def _written_and_read(self, request: list[bytes]) -> Said | None:
        assert self._process.stdin and self._process.stdout
        for part in request:
            self._process.stdin.write(part)
        self._process.stdin.flush()
        return read_answer(self._process.stdout, self._limits.answer_bytes)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        assert self._process.stdin and self._process.stdout
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(OSError):  # what was left in the buffer has no reader any more
            self._process.stdin.close()


def read_answer(pipe: IO[bytes], most: int) -> Said | None:
    """One message with at most `most` bytes of blobs; None if what comes is anything else."""
    line = pipe.readline(MAX_HEADER_BYTES)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith(b"\n") or not isinstance(fields, dict):
        return None
    sizes = fields.pop("sizes", [])
    sound = isinstance(sizes, list) and len(sizes) <= MAX_BLOBS
    if not sound or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) > most:
        return None
    blobs = tuple(pipe.read(size) for size in sizes)
    return Said(fields, blobs) if [len(blob) for blob in blobs] == sizes else None


def _command(job: Job, limits: Limits) -> list[str]:
    settings = {
        "job": job.module,
        "paths": _library_paths(job.libraries),
        "memory_bytes": limits.memory_bytes,
        "answer_bytes": limits.answer_bytes,
    }
    # -I -S: no variables, no user's or project's files on the path, no .pth code; and it starts sooner
    return [sys.executable, "-I", "-S", str(WORKER), json.dumps(settings)]


def _library_paths(libraries: tuple[str, ...]) -> list[str]:
    """The folders that hold them, wherever this interpreter found them."""
    paths = []
    for name in libraries:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is one of our dependencies"
        paths.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(paths))


def one_line(words: object) -> str:
    """A stranger's words for a terminal: no control characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:MAX_WORDS]).strip()
