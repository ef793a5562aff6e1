"""Chat templates: equal to transformers' apply_chat_template, and harmless whatever they try."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from swarm.errors import TemplateFailed, UsageError
from swarm.template import MAX_TEMPLATE_BYTES, TemplateLimits, TemplateRenderer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

CHATS = {
    "one question": [{"role": "user", "content": "Why is the sky blue?"}],
    "a system prompt": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  spaces around  "},
    ],
    "several turns": [
        {"role": "user", "content": "héllo 你好 👋🏽 <b>&amp;</b>"},
        {"role": "assistant", "content": "line\nline\t'\"\\ {{ not a template }}"},
        {"role": "user", "content": "</s><s>[INST]"},
    ],
}

TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "header style": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "instruction style": """{{ bos_token }}{% set ns = namespace(system='', turns=0) %}
{% for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'user' %}
{% set ns.turns = ns.turns + 1 %}
[INST] {{ ns.system + '\\n\\n' if ns.system and loop.last else '' }}{{ message['content'] }} [/INST]
{%- elif message['role'] == 'assistant' %}
{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}{{ ns.turns }}""",
    "macros, tojson and filters": """{%- macro turn(role, text='') -%}
<{{ role|upper }} {{ {'text': text, 'n': [1, 2.5, none, true], 'ü': '<'}|tojson }}>
{{ kwargs|tojson(indent=2) }}
{%- endmacro -%}
{%- for m in messages -%}
{{ turn(m.role, m.content, thinking=m.thinking or '-') }}{{ m | items | list | length }}
{%- if loop.index0 % 2 == 1 %}{{ loop.cycle('a', 'b') }}{% break %}{% endif %}
{%- endfor -%}
{{ dict(a=1, b=messages|length)|tojson(separators=(',', ':')) }}{{ dict.fromkeys(['x'])|tojson }}
{{ messages | map(attribute='role') | join(',') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ 'a long text to wrap'|wordwrap(6) }} {{ messages[0]|pprint }} {{ messages[-1].content|urlencode }}
{{- documents is none }} {{ pad_token is defined }} {{ 'a.b'.split('.')[-1] }} {{ '\\N{BULLET}' }}""",
    "trimmed blocks": "  {% if true %}\n  x\n  {% endif %}\n\n{# note #}\n y {%- if false %}{% endif %}\n",
}

# each with what the user is told; none may reach anything outside the sandbox
FAILING = {
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals of a method": ("{{ messages.append.__globals__ }}", "unsafe|undefined"),
    "globals of a helper": ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
    "globals of our function": ("{{ raise_exception.__globals__['sys'] }}", "unsafe"),
    "attributes through a filter": ("{{ (raise_exception|attr('__globals__'))['sys'] }}", "undefined|unsafe"),
    "attributes through format": ("{{ '{0.__class__.__mro__}'.format(raise_exception) }}", "unsafe"),
    "underscores on a namespace": ("{% set ns = namespace(_x=1) %}", "underscore"),
    "changing a list": ("{{ messages.append(1) }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "a syntax error": ("{% if %}", "Expected an expression"),
    "an undefined name": ("{{ nothing.there }}", "undefined"),
    "endless recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "nested too deeply"),
    "deep nesting": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "nested too deeply|broke the process"),
    "much output": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 4194304 bytes"),
    "half a surrogate pair": ("{{ '\\ud800' }}", "surrogate"),
}

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), **SPECIAL)


def context(chat: list[dict[str, str]]) -> dict[str, object]:
    return {**SPECIAL, "messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}


def worker_pid(renderer: TemplateRenderer) -> int:
    return renderer._confined._processes[0]._process.pid


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(
    template: str,
    chat: list[dict[str, str]],
    renderer: TemplateRenderer,
    hugging_face: PreTrainedTokenizerFast,
) -> None:
    expected = hugging_face.apply_chat_template(
        chat, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert renderer.render(template, context(chat)) == expected


def test_strftime_now_tells_the_local_date_as_transformers_does(
    renderer: TemplateRenderer, hugging_face: PreTrainedTokenizerFast
) -> None:
    template = "{{ strftime_now('%d %B %Y %Z') }}"

    def theirs() -> str:
        return hugging_face.apply_chat_template(CHATS["one question"], chat_template=template, tokenize=False)

    before = theirs()
    ours = renderer.render(template, {})
    assert ours in (before, theirs())


def test_a_template_that_refuses_messages_is_a_usage_error_with_its_own_words(
    renderer: TemplateRenderer,
) -> None:
    with pytest.raises(UsageError, match=r"refuses these messages: roles must alternate  \[31m"):
        renderer.render("{{ raise_exception('roles must alternate\\x1b\\x07[31m') }}", {})


@pytest.mark.parametrize(("template", "words"), FAILING.values(), ids=FAILING)
def test_a_failing_template_is_a_typed_error_and_the_next_rendering_works(
    template: str, words: str, renderer: TemplateRenderer
) -> None:
    with pytest.raises(TemplateFailed, match=words):
        renderer.render(template, context(CHATS["one question"]))
    assert renderer.render("{{ messages[0].role }}", context(CHATS["one question"])) == "user"


@pytest.mark.parametrize(
    "template", [ENDLESS, "{{ 7 ** (7 ** 11) }}"], ids=["in the template", "in one call that never yields"]
)
def test_an_endless_template_is_killed_and_the_next_rendering_works(template: str) -> None:
    renderer = TemplateRenderer(TemplateLimits(render_s=0.5))
    try:
        with pytest.raises(TemplateFailed, match=r"longer than 0\.5 s"):
            renderer.render(template, {})
        assert renderer.render("still here", {}) == "still here"
    finally:
        renderer.close()


@needs_linux
@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'a' * (10 ** 10) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ (range(99999) | list) * 99999 }}",
    ],
)
def test_a_memory_bomb_ends_within_its_memory(bomb: str, renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateFailed, match="ran out of memory"):
        renderer.render(bomb, {})
    assert renderer.render("still here", {}) == "still here"


@needs_linux
def test_the_worker_has_no_environment_and_can_open_nothing(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    renderer.close()
    renderer.render("", {})
    worker = psutil.Process(worker_pid(renderer))
    assert "HF_TOKEN" not in worker.environ()
    assert worker.rlimit(psutil.RLIMIT_NOFILE) == (3, 3)
    assert worker.net_connections() == []


def test_a_template_that_is_too_long_is_refused_unread(renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateFailed, match="256 KiB"):
        renderer.render("é" * (MAX_TEMPLATE_BYTES // 2 + 1), {})


def test_one_worker_serves_many_renderings(renderer: TemplateRenderer) -> None:
    renderer.render("", {})
    first = worker_pid(renderer)
    assert [renderer.render("{{ n }}", {"n": n}) for n in range(50)] == [str(n) for n in range(50)]
    assert worker_pid(renderer) == first


async def test_rendering_leaves_the_event_loop_free_and_close_ends_it() -> None:
    slow, quick = TemplateRenderer(TemplateLimits(render_s=60)), TemplateRenderer()
    try:
        endless = asyncio.create_task(slow.render_async(ENDLESS, {}))
        assert await quick.render_async("done", {}) == "done"
        assert not endless.done()
        while not slow._confined._processes:
            await quick.render_async("", {})
        slow.close()
        with pytest.raises(TemplateFailed):
            await endless
    finally:
        slow.close()
        quick.close()


def test_no_worker_outlives_its_renderer() -> None:
    renderer = TemplateRenderer()
    renderer.render("", {})
    worker = psutil.Process(worker_pid(renderer))
    del renderer
    worker.wait(timeout=30)
    assert not worker.is_running()


PARENT = """
import sys, threading, json
sys.path.insert(0, sys.argv[1])
from swarm.template import TemplateLimits, TemplateRenderer
renderer = TemplateRenderer(TemplateLimits(render_s=1))
renderer.render("", {})
if sys.argv[2]:
    threading.Thread(target=renderer.render, args=(sys.argv[2], {})).start()
print(renderer._confined._processes[0]._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "template", ["", ENDLESS, "{{ 7 ** (7 ** 11) }}"], ids=["idle", "busy", "in one call"]
)
def test_no_worker_outlives_a_killed_parent(template: str) -> None:
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", PARENT, root, template]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(json.loads(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    worker.wait(timeout=30)
    assert not worker.is_running()
