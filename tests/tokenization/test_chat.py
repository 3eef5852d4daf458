"""Chat templates: the same text as transformers renders, and no template runs away."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.errors import InvalidRequest
from trainsession.tokenization.chat import render_chat

reference = pytest.importorskip("transformers.utils.chat_template_utils")

USER = [{"role": "user", "content": "x"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    defaults: dict[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "special_tokens": {"bos_token": "<s>"},
        "variables": {},
    }
    return render_chat(template, messages, **(defaults | options))[0]


TEMPLATES = {
    "trimmed blocks": "{% if true %}\n   {% for m in messages %}\n {{ m.content }}\n {% endfor %}\n{% endif %}\n",
    "loop variables": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{% endfor %}"
    ),
    "slices": "{% for m in messages[::-1] %}{{ loop.revindex }}{{ m.role }}{{ loop.first }}{% endfor %}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "else": "{% for m in messages if m.role == 'nobody' %}x{% else %}none{% endfor %}",
    "recursive": (
        "{% for m in [[1, [2]], 3] recursive %}{% if m is iterable %}"
        "({{ loop(m) }}){% else %}{{ m }}{% endif %}{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tojson": "{{ messages | tojson }}{{ {'a': '<é>', 'b': [1.5, none, true]} | tojson(indent=2) }}",
    "filters": (
        "{{ messages | map(attribute='role') | join(', ') }}{{ ' a ' | trim }}{{ 'abc' | upper | replace('B', 'xx') }}"
    ),
    "select": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | length }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "macro": "{% macro turn(m) %}[{{ m.role }}]{{ caller() if caller }}{% endmacro %}{{ turn(messages[0]) }}",
    "concat": "{{ bos_token ~ 1 ~ none ~ messages[0].content ~ [1, 'a'] }}{{ 'ab' * 3 }}{{ '%s-%03d' % ('x', 7) }}",
    "methods": "{{ messages[0].content.strip().split('a')[-1].startswith('x') }}{{ '{:>5}|{}'.format('a', 2) }}",
    "undefined": (
        "{{ nothing }}{{ messages[0].nothing }}{% if nothing is defined %}x{% endif %}{{ nothing | default('d') }}"
    ),
    "documents and tools": (
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    ),
    "dict": (
        "{{ dict(a=1) }}{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'b': 1} | dictsort }}"
    ),
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
}
CHATS = [
    USER,
    [
        {"role": "system", "content": " Be short. "},
        {"role": "user", "content": "abc\n", "name": None},
        {"role": "assistant", "content": "é<&>'\"", "reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "three"])
def test_renders_what_transformers_renders(name: str, chat: list[dict[str, Any]]) -> None:
    shared: dict[str, Any] = {"tools": [{"name": "f"}], "documents": [{"title": "t", "text": "d"}]}
    theirs, _ = reference.render_jinja_template(
        [[{k: v for k, v in m.items() if v is not None} for m in chat]],
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        **shared,
    )
    assert render(TEMPLATES[name], chat, **shared) == theirs[0]


@settings(max_examples=50, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_tojson_is_that_of_transformers(value: Any) -> None:
    chat = [{"role": "user", "content": value}]
    theirs, _ = reference.render_jinja_template([chat], chat_template="{{ messages[0].get('content') | tojson }}")
    assert render("{{ messages[0].get('content') | tojson }}", chat) == (theirs[0] if value is not None else "null")


RUNAWAYS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "huge range": "{{ range(10 ** 9) | list }}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "doubled by ~": "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled by +": "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "squared number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "filter width": "{{ 'a' | center(10000000000) }}",
    "method width": "{{ 'a'.ljust(10000000000) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "computed width": "{{ '%*d' % (10000000000, 1) }}",
    "brace width": "{{ '{:>10000000000}'.format(1) }}",
    "computed brace width": "{{ '{:{}}'.format(1, '>10000000000') }}",
    "replace": "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "replace filter": "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "shared lists as JSON": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}"
    ),
    "shared lists as text": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "filters in a loop": "{% for a in range(9999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
}


@pytest.mark.parametrize("name", RUNAWAYS)
def test_a_template_that_runs_away_is_stopped_within_a_second(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="chat template"):
        render(RUNAWAYS[name])
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace(_x=1) }}{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template)


def test_a_template_may_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_messages_are_checked_and_not_changed() -> None:
    for bad, message in [
        ([], "messages is empty"),
        ("hi", "expected a list of messages, got str"),
        ([{"content": "x"}], r"messages\[0\]: expected a map with a text 'role'"),
        ([USER[0], "x"], r"messages\[1\]"),
        ([USER[0], {"role": "assistant"}], r"messages\[1\] of role 'assistant' has no 'content'"),
        ([{"role": "user", "content": object()}], r"messages\[0\]: expected plain JSON values, got object"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            render("x", bad)
    chat = [{"role": "user", "content": "x"}]
    render("{{ messages[0].content }}", chat, continue_final_message=True)
    assert chat == [{"role": "user", "content": "x"}]


def test_content_that_the_template_cannot_use_is_an_error_of_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="could not render these messages"):
        render("{{ 'a' + messages[0].content }}", [{"role": "user", "content": ["x"]}])


def test_variables_are_those_that_the_template_reads() -> None:
    template = "{{ enable_thinking }}{{ messages }}{{ bos_token }}"
    assert render(template, variables={"enable_thinking": False}).startswith("False")
    for key in ("enable_thinkng", "messages", "tools", "bos_token", "tokenize", "range", "chat_template"):
        with pytest.raises(InvalidRequest, match=f"takes no '{key}'; it takes enable_thinking"):
            render(template, variables={key: True})
    with pytest.raises(InvalidRequest, match="it takes no variables"):
        render("x", variables={"enable_thinking": True})


def test_continuing_the_final_message() -> None:
    template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(template, [{"role": "assistant", "content": "a b "}], continue_final_message=True) == "<a b"
    with pytest.raises(InvalidRequest, match="choose one"):
        render(template, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidRequest, match="does not appear"):
        render("nothing", continue_final_message=True)
    with pytest.raises(InvalidRequest, match="no text to continue"):
        render(template, [{"role": "assistant", "tool_calls": []}], continue_final_message=True)


def test_a_large_honest_chat_renders() -> None:
    chat = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(render(TEMPLATES["filters"], chat)) > 2000
    assert len(render("{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}", chat)) > 2_000_000
