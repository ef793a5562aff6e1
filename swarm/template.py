"""Chat templates: strangers' code, rendered in a process of its own.

Invariant: a template can cost its user `render_s` seconds and a typed error, nothing else. It is rendered
by `template_worker.py`, a subprocess without environment, files, sockets or this process's memory; it is
started on first use, kept for the next prompt, and killed at its deadline. jinja2's sandbox is the first
fence, the process the second.

`tokenizer.py` has one renderer per model, so that two models never share a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import TemplateFailed, UsageError

MAX_WORDS = 500  # characters of an error; the worker keeps to it too, unless a template has taken it over
MAX_TEMPLATE_BYTES = 256 << 10  # the longest on the hub are some 30 KiB
WORKER = Path(__file__).with_name("template_worker.py")
# what an interpreter may need to start, and the time zone that strftime_now tells
KEPT_ENVIRONMENT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may cost. All of it is generous: real templates need milliseconds and kilobytes."""

    render_s: float = 5.0
    start_s: float = 30.0  # importing jinja2 on a busy machine; no stranger's code runs in it
    memory_bytes: int = 512 << 20  # address space, the interpreter's own 30 MiB included
    output_bytes: int = 4 << 20  # a million tokens


class TemplateRenderer:
    """Renders templates in one worker process. Safe to use from several threads, one rendering at a time."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []  # none or one; a list, so that the finalizer can hold it
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def render(self, template: str, variables: Mapping[str, object]) -> str:
        """The text. Blocks, at most `start_s + render_s`; other callers wait for their turn.

        Raises UsageError with the template's own words when it refuses the messages, and TemplateFailed
        when it is broken or reaches a limit. Either way the next rendering is not affected.
        """
        if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise TemplateFailed(f"it is longer than {MAX_TEMPLATE_BYTES >> 10} KiB")
        request = json.dumps({"template": template, "variables": dict(variables)}).encode() + b"\n"
        with self._lock:
            if not self._workers:
                self._workers.append(_Worker(self.limits))
            worker = self._workers[0]
            try:
                reply = worker.ask(request)
            except TemplateFailed:
                self._discard()
                raise
            if reply.get("ends"):
                self._discard()
        return _text_of(reply)

    async def render_async(self, template: str, variables: Mapping[str, object]) -> str:
        """`render` for asyncio code: waits in a thread, which may outlive a cancellation by `render_s`."""
        return await asyncio.to_thread(self.render, template, variables)

    def close(self) -> None:
        """End the worker, and with it a rendering in flight. A later rendering starts another."""
        for worker in tuple(self._workers):
            worker.kill()
        with self._lock:
            self._discard()

    def _discard(self) -> None:
        _end_all(self._workers)


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _text_of(reply: Mapping[str, object]) -> str:
    if "raised" in reply:
        raise UsageError(f"the model's chat template refuses these messages: {_printable(reply['raised'])}")
    text = reply.get("text")
    if not isinstance(text, str):
        raise TemplateFailed(_printable(reply.get("failed", "no answer")))
    if not _encodable(text):
        raise TemplateFailed("it wrote half of a surrogate pair")
    return text


def _printable(words: object) -> str:
    """A stranger's words for a terminal: no control characters, one line."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:MAX_WORDS]).strip()


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Worker:
    """One subprocess. `ask` either returns its answer or raises TemplateFailed, and then it must be ended."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        # 6: a control character is six bytes of JSON
        self._longest_reply = 6 * limits.output_bytes + (64 << 10)
        self._ready = False
        try:
            self._process = subprocess.Popen(
                _command(limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ},
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise TemplateFailed(f"no process could be started to render it ({error})") from error

    def ask(self, request: bytes) -> dict[str, object]:
        if not self._ready:
            self._exchange(b"", self._limits.start_s, "the process that renders it did not start")
            self._ready = True
        return self._exchange(request, self._limits.render_s, "it broke the process that renders it")

    def _exchange(self, request: bytes, seconds: float, broken: str) -> dict[str, object]:
        late = threading.Event()
        line = self._line(request, seconds, late)
        if late.is_set():
            raise TemplateFailed(f"it took longer than {seconds:g} s")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not line.endswith(b"\n") or not isinstance(reply, dict):
            raise TemplateFailed(broken)
        return reply

    def _line(self, request: bytes, seconds: float, late: threading.Event) -> bytes:
        """Write, and read one line; killing the process is what ends either when it is late."""

        def give_up() -> None:
            late.set()
            self.kill()

        assert self._process.stdin and self._process.stdout
        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            return self._process.stdout.readline(self._longest_reply)
        except OSError:  # it died before it had read everything
            return b""
        finally:
            timer.cancel()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        assert self._process.stdin and self._process.stdout
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(OSError):  # what was left in the buffer has no reader any more
            self._process.stdin.close()


def _command(limits: TemplateLimits) -> list[str]:
    settings = {
        "paths": _library_paths(),
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "render_s": limits.render_s,
    }
    # -I -S: no variables, no user's or project's files on the path, no .pth code; and it starts sooner
    return [sys.executable, "-I", "-S", str(WORKER), json.dumps(settings)]


def _library_paths() -> list[str]:
    """The folders that hold jinja2 and what it imports, wherever this interpreter found them."""
    paths = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is one of our dependencies"
        paths.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(paths))
