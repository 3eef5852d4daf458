"""Replies as messages: what a template prints comes back, and nothing that a model writes raises."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainsession as ts
from cookbook.lib.rendering import Renderer
from tests.cookbook.rendering.chats import any_text, plain_text, word
from tests.cookbook.rendering.conftest import FAMILIES

Family = Callable[[str], ts.Tokenizer]
QUESTION = {"role": "user", "content": "2 + 2?"}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | any_text | st.just("</tool_call>"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain_text, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["add", "f"]),
    st.dictionaries(plain_text, values, max_size=3),
)


def reply(renderer: Renderer, message: dict[str, Any]) -> list[int]:
    """The tokens that a model which answers with this message samples."""
    (example,) = renderer.examples([QUESTION, message])
    return list(example.tokens)[len(renderer.prompt([QUESTION])) :]


thoughts = st.tuples(word, plain_text, word).map("".join)
NOISE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "{", '"name": "f"', "}", "\n", "x"]


@settings(max_examples=30, deadline=None)
@given(content=plain_text, thinking=st.none() | thoughts, called=st.lists(calls, max_size=3))
def test_qwen3_reads_what_it_prints(
    content: str, thinking: str | None, called: list[dict[str, Any]], family: Family
) -> None:
    content = composed(content.lstrip("\n"))  # as the template prints it
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = composed(thinking)
    if called:
        message["tool_calls"] = composed(called)
    renderer = Renderer(family("qwen3"))
    parsed = renderer.parse(reply(renderer, message))
    assert parsed.message == message
    assert parsed.stopped
    assert parsed.unparsed == ()


def composed(value: Any) -> Any:
    """In Unicode's composed form, as Qwen's tokenizer has it."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, list):
        return [composed(item) for item in value]
    return {composed(k): composed(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(content=plain_text)
def test_plain_replies_come_back(name: str, content: str, family: Family) -> None:
    content = {"smollm2": content, "llama3": content.strip(), "qwen3": composed(content.lstrip("\n"))}[name]
    renderer = Renderer(family(name))
    parsed = renderer.parse(reply(renderer, {"role": "assistant", "content": content}))
    assert (parsed.message, parsed.stopped, parsed.unparsed) == ({"role": "assistant", "content": content}, True, ())


GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("text", "content", "thinking", "count", "unparsed"),
    [
        ("<think>hm</think>4", "4", "hm", 0, []),
        ("\n<think>\n\n</think>\n\n4", "4", None, 0, []),
        ("4", "4", None, 0, []),
        ("<think>\nhm, and then", "", None, 0, [("<think>\nhm, and then", "the thinking has no </think>")]),
        ("4</think>", "4</think>", None, 0, []),
        (f"yes\n{GOOD}", "yes", None, 1, []),
        (GOOD + GOOD, "", None, 2, []),
        (f"<think>hm</think>{GOOD}", "", "hm", 1, []),
        (f"{GOOD}\nso", "", None, 1, [("so", "behind a tool call")]),
        (f"{GOOD} and {GOOD}", "", None, 2, [("and", "behind a tool call")]),
        ("a\n<tool_call>\n{'name': 'f'}\n</tool_call>", "a", None, 0, [
            ("<tool_call>\n{'name': 'f'}\n</tool_call>", "not valid JSON")]),
        (f"<tool_call>{{broken</tool_call>{GOOD}", "", None, 1, [("<tool_call>{broken</tool_call>", "not valid JSON")]),
        ('<tool_call>\n{"name": "f", "arg', "", None, 0, [('<tool_call>\n{"name": "f", "arg', "not valid JSON")]),
        ('<tool_call>{"name": "f"}', "", None, 0, [('<tool_call>{"name": "f"}', "no </tool_call> behind the JSON")]),
        ('<tool_call>[1]</tool_call>', "", None, 0, [("<tool_call>[1]</tool_call>", "not an object with a 'name'")]),
        ('<tool_call>{"name": 1}</tool_call>', "", None, 0, [
            ('<tool_call>{"name": 1}</tool_call>', "not an object with a 'name'")]),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "", None, 0, [
            ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "'arguments' is not an object")]),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", None, 0, [
            ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not valid JSON: NaN is no JSON")]),
        ("<tool_call>" + "[" * 9_000, "", None, 0, [("<tool_call>" + "[" * 9_000, "not valid JSON")]),
        ("<tool_call>", "", None, 0, [("<tool_call>", "not valid JSON")]),
    ],
)  # fmt: skip
def test_what_a_model_gets_wrong_is_kept_apart(
    text: str, content: str, thinking: str | None, count: int, unparsed: list[tuple[str, str]], family: Family
) -> None:
    renderer = Renderer(family("qwen3"))
    parsed = renderer.parse([*renderer.tokenizer.encode(text), *renderer.stop_tokens[:1]])
    assert parsed.message["content"] == content
    assert parsed.message.get("reasoning_content") == thinking
    assert parsed.message.get("tool_calls", []) == [CALL] * count
    assert [part.text for part in parsed.unparsed] == [part for part, _ in unparsed]
    for part, (_, reason) in zip(parsed.unparsed, unparsed, strict=True):
        assert part.reason.startswith(reason)
    assert parsed.stopped


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.sampled_from(NOISE)))
def test_nothing_that_a_model_writes_raises(parts: list[str], family: Family) -> None:
    renderer = Renderer(family("qwen3"))
    parsed = renderer.parse(renderer.tokenizer.encode("".join(parts)))
    assert not parsed.stopped
    kept = "".join([parsed.message["content"], *(part.text for part in parsed.unparsed)])
    assert "".join(parts).count("x") == (kept + parsed.message.get("reasoning_content", "")).count("x")


def test_a_cut_reply_and_one_that_ran_on(family: Family) -> None:
    renderer = Renderer(family("smollm2"))
    tokens = renderer.tokenizer.encode("four")
    stop = renderer.stop_tokens[0]
    assert renderer.parse(tokens).stopped is False
    parsed = renderer.parse([*tokens, stop, *tokens, stop])
    assert (parsed.message["content"], parsed.stopped) == ("four", True)
    assert [(part.text, part.reason) for part in parsed.unparsed] == [("four<|im_end|>", "behind the stop token")]
    assert renderer.parse([]).message["content"] == ""


def test_thinking_that_the_prompt_begins(family: Family) -> None:
    """As Qwen3's thinking-only models and DeepSeek-R1 do: the opening tag is the prompt's, not the reply's."""
    files = dict(family("qwen3").files)
    template = files["chat_template.jinja"].decode()
    files["chat_template.jinja"] = template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    ).encode()
    assert files != family("qwen3").files
    renderer = Renderer(ts.Tokenizer(files))
    message = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    tokens = reply(renderer, message)
    assert renderer.tokenizer.decode(tokens) == "hm\n</think>\n\n4<|im_end|>"
    assert renderer.parse(tokens).message == message
    (cut,) = renderer.parse(tokens[:1]).unparsed
    assert cut.reason == "the thinking has no </think>"


def test_a_template_without_tags_has_text_only(family: Family) -> None:
    renderer = Renderer(family("smollm2"))
    text = f"<think>hm</think>{GOOD}"
    parsed = renderer.parse(renderer.tokenizer.encode(text))
    assert parsed.message == {"role": "assistant", "content": text}
