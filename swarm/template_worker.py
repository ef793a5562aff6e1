"""The job that renders a stranger's chat template, in a process of its own (`confined_worker.py`).

Request: {"template", "variables"}. Answer: one blob, the text, or {"raised"} (the template called
raise_exception), or {"failed", "ends"}.

The environment is that of transformers' `apply_chat_template` (utils/chat_template_utils.py,
`_cached_compile_jinja_template`): the same delimiters, filters, globals and extensions.
"""

from __future__ import annotations

import encodings.ascii
import encodings.unicode_escape  # jinja2's string literals; nothing can be imported later
import html  # noqa: F401
import json
import pprint  # noqa: F401
import textwrap  # noqa: F401
import unicodedata  # noqa: F401
import urllib.parse  # noqa: F401
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.constants
import jinja2.debug
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]:
    """What answers requests, once it has passed through all that imports or opens something on its first use."""
    most = settings["answer_bytes"]
    answer({"template": "{{ strftime_now('%Z') }}{{ missing.x }}", "variables": {}}, 100)
    "".encode("ascii", "backslashreplace").decode("unicode-escape")
    assert encodings.ascii and encodings.unicode_escape
    return lambda fields, blobs: answer(fields, most)


def answer(request: dict[str, Any], output_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    try:
        return {}, [render(request["template"], request["variables"], output_bytes)]
    except Raised as error:
        return {"raised": str(error)[:MESSAGE_CHARACTERS]}, []
    except MemoryError:
        return {"failed": "it ran out of memory", "ends": True}, []
    except TooLong as error:
        return {"failed": str(error), "ends": True}, []
    except RecursionError:
        return {"failed": "it is nested too deeply", "ends": True}, []
    except Exception as error:  # any line of a stranger's code may raise anything
        return {"failed": f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]}, []


def render(source: str, variables: dict[str, Any], output_bytes: int) -> bytes:
    pieces, size = [], 0
    for piece in _compiled(source).generate(**variables):
        pieces.append(piece.encode("utf-8", "surrogatepass"))
        size += len(pieces[-1])
        if size > output_bytes:
            raise TooLong(f"it wrote more than {output_bytes} bytes")
    return b"".join(pieces)
