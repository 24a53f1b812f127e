"""Chat templates of anybody: ended in time, and what is simple stays fast.

The attacks that the sandbox answers are in test_tokenizer; all of them fail at once.
The ones here succeed in Jinja's sandbox, and take the machine's memory or hours.
"""

import time

import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models import chat_template
from jaxkern.models.chat_template import _rendered, _rendered_apart, is_simple, render
from jaxkern.models.tokenizer import tokenizer_from_gguf
from tests.models.smollm2 import smollm2
from tests.models.tiny_gguf import TEMPLATE, write_tiny_gguf

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is {{ 1 }} < 2?\n☕"},
]
DOUBLING = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(60) %}"
DOUBLING += "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WRITES = LOOPS.replace("{% endfor %}", "{{ 'x' * 1000 }}{% endfor %}", 1)
ATTACKS = {
    "padding": ("{{ '{:>1000000000}'.format(1) }}", "512 MB of memory"),
    "old_padding": ("{{ '%1000000000d' % 1 }}", "512 MB of memory"),
    "product": ("{{ 'x' * 10**10 }}", "512 MB of memory"),
    "centred": ("{{ 'x'.center(10**10) }}", "512 MB of memory"),
    "doubling": (DOUBLING, "512 MB of memory|computes|more than 3 seconds"),
    "power": ("{{ 10 ** (10 ** 8) }}", "computes|more than 3 seconds"),
    "loops": (LOOPS, "computes for more than a second|more than 3 seconds"),
    "writes": (WRITES, r"writes more than 10\d+ characters"),
    "range": ("{% for i in range(10**10) %}{% endfor %}", "Range too big"),
    "lists": ("{{ range(99999) | list | string * 1000 }}", "512 MB of memory"),
    "macros": (
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "recursion",
    ),
    "parentheses": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "recursion"),
    "long_error": ("{{ raise_exception('x' * 10**6) }}", "x{500}$"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(tmp_path, name):
    template, message = ATTACKS[name]
    metadata = dict(read_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama")).metadata)
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.chat_template": template})
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"the file's template fails: .*({message})"):
        tokenizer.chat(MESSAGES)
    assert time.perf_counter() - start < chat_template.SECONDS + 2


SIMPLE = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m.content }}\n"
    "{% endfor %}",
    "{% for m in messages %}{% if loop.first and m.role != 'user' %}{{ m.content ~ '!' "
    "}}{% elif m.role not in ['user'] %}{{ raise_exception('no') }}{% endif %}"
    "{% break %}{% endfor %}{{ messages[-1].content if messages else '' }}",
]
OTHERS = [
    "{% for m in messages %}{% for n in messages %}{{ m }}{% endfor %}{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% endfor %}",
    "{% set x = 'a' %}{{ x }}",
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{{ 'x' * 3 }}",
    "{{ 2 ** 3 }}",
    "{{ 'a' % 1 }}",
    "{{ 'a'.upper() }}",
    "{% macro f() %}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(m.children) }}{% endfor %}",
    "{{ raise_exception(*messages) }}",
    "{{ 1 if 1 is divisibleby(2) }}",
    "{{ 1 }}" * 600,
    "x" * 30_000,
    "{% for %}",
]


@pytest.mark.parametrize("template", SIMPLE)
def test_simple_templates_stay_in_this_process(template, monkeypatch):
    """And write what they would write in their own."""
    assert is_simple(template)
    variables = {"messages": MESSAGES, "bos_token": "<s>", "add_generation_prompt": 1}
    request = chat_template.json.dumps(
        {"template": template, "variables": variables, "path": chat_template.sys.path}
    )
    apart = _outcome(_rendered_apart, request)
    monkeypatch.setattr(chat_template.subprocess, "run", None)
    assert _outcome(_rendered, template, variables) == apart
    variables.pop("messages")
    assert _outcome(render, template, MESSAGES, **variables) == apart


def _outcome(f, *args, **variables):
    try:
        return f(*args, **variables)
    except Exception as error:
        return f"raised {error}"


@pytest.mark.parametrize("template", OTHERS)
def test_all_others_do_not(template):
    assert not is_simple(template)


def test_smollm2_is_simple():
    template = read_gguf(smollm2()).metadata["tokenizer.chat_template"]
    assert is_simple(template)


def test_what_a_template_may_use():
    """Filters, macros, namespaces and the date, as those of well-known models do."""
    template = (
        "{%- macro line(m) -%}{{ m.role | upper }}: {{ m.content | trim }};"
        "{%- endmacro -%}"
        "{%- set n = namespace(count=0) -%}{%- for m in messages -%}"
        "{%- set n.count = n.count + 1 -%}{{ line(m) }}{%- endfor -%}"
        "{{ n.count }}{{ messages | length }}{{ strftime_now('%Y') | int > 2000 }}"
        "{{ messages[0] | tojson }}"
    )
    assert render(template, [{"role": "user", "content": " ☕ "}]) == (
        'USER: ☕;11True{"content": " \\u2615 ", "role": "user"}'
    )


def test_long_messages_are_no_attack():
    text = "long " * 10**6
    template = "{% set x = messages[0].content %}{{ x }}{{ x }}"
    assert render(template, [{"role": "user", "content": text}]) == 2 * text
