"""The process that renders a stranger's chat template. Run by path, never imported by the package.

Invariant: whatever the template does, this process can only answer on stdout or die. It starts with an
empty environment; once jinja2 is imported it can open no further file or socket, its memory and CPU
time are limited where the platform has such limits, a watchdog that needs no interpreter lock ends it
after its deadline, and it ends when its stdin closes. `template.py` holds the other end.

One JSON line in: {"template", "variables"}. One JSON line out: {"text"}, {"raised"} (the template called
raise_exception), or {"failed", "ends"} (`ends`: this process is no longer fit for use and exits).
The first line out is {"ready": true}.

The environment is that of transformers' `apply_chat_template` (utils/chat_template_utils.py,
`_cached_compile_jinja_template`): the same delimiters, filters, globals and extensions.
"""

from __future__ import annotations

import encodings.ascii
import encodings.unicode_escape  # jinja2's string literals; nothing can be imported later
import faulthandler
import json
import pprint  # noqa: F401
import signal
import sys
import textwrap  # noqa: F401
import time
import unicodedata  # noqa: F401
import urllib.parse  # noqa: F401
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

_SETTINGS = json.loads(sys.argv[1]) if __name__ == "__main__" else {"paths": []}
sys.path.extend(_SETTINGS["paths"])  # python -I -S has no site-packages; the parent names what we need

import jinja2.constants  # noqa: E402
import jinja2.debug  # noqa: E402
import jinja2.ext  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.exceptions import SecurityError, TemplateError  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.runtime import Macro  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from jinja2.utils import Namespace  # noqa: E402

MESSAGE_CHARACTERS = 500  # of an error: enough for a person, too little to flood a terminal
COMPILED_TEMPLATES = 4  # one worker serves one model; more than one template is rare


class Raised(TemplateError):
    """The template's own raise_exception."""


class TooLong(Exception):
    pass


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training. Here it only passes through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Macro) -> str:
        return caller()


class TemplateDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace` that refuses names beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works, as in jinja2
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: underscores are refused")


def _raise_exception(message: object) -> None:
    raise Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=TemplateDict(),
        namespace=TemplateNamespace,
    )
    return env


_ENVIRONMENT = environment()


@lru_cache(COMPILED_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def render(source: str, variables: dict[str, Any], output_bytes: int) -> str:
    pieces, size = [], 0
    for piece in _compiled(source).generate(**variables):
        pieces.append(piece)
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > output_bytes:
            raise TooLong(f"it wrote more than {output_bytes} bytes")
    return "".join(pieces)


def answer(request: dict[str, Any], output_bytes: int) -> dict[str, Any]:
    try:
        return {"text": render(request["template"], request["variables"], output_bytes)}
    except Raised as error:
        return {"raised": str(error)[:MESSAGE_CHARACTERS]}
    except MemoryError:
        return {"failed": "it ran out of memory", "ends": True}
    except TooLong as error:
        return {"failed": str(error), "ends": True}
    except RecursionError:
        return {"failed": "it is nested too deeply", "ends": True}
    except Exception as error:  # any line of a stranger's code may raise anything
        return {"failed": f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS], "ends": False}


def confine(memory_bytes: int) -> Callable[[float], None]:
    """Give up what rendering doesn't need. Returns what limits the CPU seconds from now on."""
    try:
        import resource
    except ImportError:  # Windows
        return lambda seconds: None
    # no new file descriptor: neither a file nor a socket can be opened any more
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_NOFILE, 3)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # macOS has no RLIMIT_AS that it would accept
            continue

    def limit_cpu(seconds: float) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))

    return limit_cpu


def warm_up() -> None:
    """Pass once through everything that imports or opens something on its first use."""
    answer({"template": "{{ strftime_now('%Z') }}{{ missing.x }}", "variables": {}}, 100)
    "".encode("ascii", "backslashreplace").decode("unicode-escape")
    assert encodings.ascii and encodings.unicode_escape


def say(reply: dict[str, Any]) -> None:
    line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    warm_up()
    limit_cpu = confine(_SETTINGS["memory_bytes"])
    say({"ready": True})
    while line := sys.stdin.buffer.readline():
        # a little later than the parent, for the case that there is no parent any more
        faulthandler.dump_traceback_later(_SETTINGS["render_s"] + 1, exit=True)
        limit_cpu(_SETTINGS["render_s"] + 1)
        reply = answer(json.loads(line), _SETTINGS["output_bytes"])
        say(reply)
        faulthandler.cancel_dump_traceback_later()
        if reply.get("ends"):
            return


if __name__ == "__main__":
    main()
