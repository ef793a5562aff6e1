"""Templates that want out of their sandbox, or more than they may have: what each way of trying comes to."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import psutil
import pytest

from swarm.errors import TemplateFailed, UsageError
from swarm.template import TemplateLimits, TemplateRenderer

VARIABLES = {"messages": [{"role": "user", "content": "x"}], "bos_token": "<s>"}

# each gets to objects of Python that aren't the template's own, if anything lets it
ESCAPES = [
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('__cl' ~ 'ass__')|attr('__base__') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ ['']|selectattr('__class__.__mro__')|list }}",
    "{{ ['']|groupby('__class__')|list }}",
    "{{ ['a', 'b']|sort(attribute='__class__.__mro__')|list }}",
    "{{ ['a']|sum(attribute='__class__') }}",
    "{{ ['a', 'b']|min(attribute='__class__') }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ['{0.__class__}']|map('format', raise_exception)|list }}",
    "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{{ dict(f='{0.__class__}'.format)['f'](1) }}",
    "{{ ('{0.__class__}'|safe).format(1) }}",
    "{{ ('{a.__class__}'|escape).format_map({'a': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}{{ m._environment }}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ (messages|select).gi_code }}",
    "{{ raise_exception.__code__ }}",
    "{{ raise_exception.func_globals }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "{{ namespace({'__class__': 1}) }}",
    "{{ namespace([('_private', 1)]) }}",
    "{% for x in [1] %}{{ loop._iterator }}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ missing._undefined_exception }}{{ missing.__class__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import system %}{{ system('id') }}",
    "{% import messages[0].role as x %}{{ x }}",
    "{% extends '/etc/passwd' %}",
    "{% include ['a', '/etc/passwd'] ignore missing %}",
    "{{ messages.pop() }}",
    "{{ messages[0].clear() }}",
    "{{ dict(a=1).update({'b': 2}) }}",
    "{{ dict.__class__ }}{{ dict.__init__ }}",
    "{{ messages.__await__ }}{{ messages.__reduce_ex__(2) }}",
    "{{ 'a'.encode('idna') }}",
    "{% debug %}",
]
OBJECTS = ("class", "function", "module", "method", "code", "frame", "Namespace", "root:")

# each takes for ever, or more memory than there is
BOMBS = [
    "{{ range(10 ** 9)|list|length }}",
    "{{ range(0, 10 ** 18, 10 ** 12)|list }}",
    "{{ (10 ** 1000000)|string|length }}",
    "{{ ([0] * (2 ** 33))|length }}",
    "{{ 'a'|center(10 ** 10) }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '%*d' % (2 ** 31 - 1, 1) }}",
    "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
    "{{ ('a' * 99999)|wordwrap(1, wrapstring='a' * 99999) }}",
    "{{ ('a' * 100000).translate({97: 'a' * 100000}) }}",
    "{{ [1]|batch(10 ** 9, 1)|list|length }}",
    "{{ [[1]]|tojson(indent=10 ** 9) }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|pprint }}",
    "{{ " + "not " * 20_000 + "1 }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ 1" + "|string" * 30_000 + " }}",
    "{% if 0 %}" + "{% elif 0 %}" * 15_000 + "{% endif %}",
]
LIMITS = TemplateLimits(render_s=0.5)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize("template", ESCAPES)
def test_no_way_out_of_the_sandbox_shows_an_object_of_python(template: str, renderer: TemplateRenderer) -> None:
    try:
        text = renderer.render(template, VARIABLES)
    except TemplateFailed:
        return
    assert not any(word in text for word in OBJECTS), text


def test_what_the_objects_look_like_is_known_to_the_test_above(renderer: TemplateRenderer) -> None:
    shown = "{{ cycler }} {{ raise_exception }} {{ ''.join }} {{ namespace(a=1) }}"
    assert all(word in renderer.render(shown, VARIABLES) for word in ("class", "function", "method", "Namespace"))


@pytest.mark.parametrize("template", BOMBS, ids=lambda text: text[:40])
def test_a_bomb_ends_at_a_limit_and_the_next_rendering_works(template: str, renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateFailed):
        renderer.render(template, VARIABLES)
    assert renderer.render("still here", {}) == "still here"


def test_what_a_template_raises_is_cut_and_is_one_line(renderer: TemplateRenderer) -> None:
    with pytest.raises(UsageError) as caught:
        renderer.render("{{ raise_exception('a\\n\\x1b[2J' * 5000) }}", VARIABLES)
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_a_template_has_the_memory_that_it_is_given_and_no_more(renderer: TemplateRenderer) -> None:
    renderer.render("", {})
    worker = psutil.Process(renderer._confined._processes[0]._process.pid)
    assert worker.rlimit(psutil.RLIMIT_AS) == (LIMITS.memory_bytes, LIMITS.memory_bytes)
    assert worker.rlimit(psutil.RLIMIT_CPU)[0] <= 60, "seconds of the processor, should the parent be gone"
