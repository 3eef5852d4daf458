"""Tools: rendered by the model's template, and read back from its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from tests.server.conftest import TOOL_TEMPLATE, Door
from trainsession import AdamParams, Datum
from trainsession.server.doors.openai.tools import ToolCallReader

MODEL = "tiny-tools"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CHAT: list[Any] = [{"role": "user", "content": "1 + 2"}]
SAID = 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader()
    shown = "".join(reader.add(piece) for piece in pieces)
    rest, calls = reader.end()
    return shown + rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (SAID, "Sure.", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "é"}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
            "",
            [("f", '{"s": "é"}'), ("g", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    ],
)
def test_calls_are_read(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " plain \n",
        "a <tool_",
        "<tool_call>",
        '<tool_call>{"name": "f"}',
        '<tool_call>{"name": "f"}</tool_call> and more',
        '<tool_call>{"name": f}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"na',
    ],
)
def test_what_is_no_whole_call_stays_text(text: str) -> None:
    assert read([text]) == (text, [])


@given(
    st.lists(st.sampled_from([*SAID, "<tool_call>", "</tool_call>", '{"name": "f"}', SAID, " \n", "<"]), max_size=12),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_the_split_of_a_stream_changes_nothing(parts: list[str], sizes: list[int]) -> None:
    text, pieces = "".join(parts), []
    while (at := sum(map(len, pieces))) < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
    assert read(pieces) == read([text])


def test_text_is_shown_as_soon_as_it_is_no_call() -> None:
    reader = ToolCallReader()
    assert [reader.add(piece) for piece in ("a", " b", "<t", "ag>", " ", "c")] == ["a", " b", "", "<tag>", "", " c"]


@pytest.fixture(scope="module")
def caller(door: Door) -> Iterator[tuple[OpenAI, str]]:
    """A client and a model that was trained to call the tool."""
    trainer = door.sdk.create_lora_training_client(MODEL, rank=32, seed=0, train_unembed=True)
    tokenizer = trainer.get_tokenizer()
    prompt = tokenizer.apply_chat_template(CHAT, tools=TOOLS, add_generation_prompt=True)
    tokens = [*prompt, *tokenizer.encode(SAID), 2]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    batch = [Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})]
    for _ in range(150):
        backward = trainer.forward_backward(batch)
        trainer.optim_step(AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        if backward.result(60).metrics["loss:sum"] < 0.5:
            break
    sampler = trainer.save_weights_and_get_sampling_client()
    with sampler.openai_client() as client:
        yield client, sampler.openai_model
    trainer.close()


def test_a_call_is_a_call_whole_and_streamed(caller: tuple[OpenAI, str]) -> None:
    client, model = caller
    fields: Any = {"model": model, "messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.message.content == "Sure."
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})

    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.message.content, streamed.finish_reason) == ("Sure.", "tool_calls")
    assert streamed.message.tool_calls is not None
    (again,) = streamed.message.tool_calls
    assert again.function.arguments == call.function.arguments

    cut = client.chat.completions.create(**{**fields, "max_tokens": 40}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content is not None
    assert SAID.startswith(cut.message.content)

    # The next turn of an agent: the answer goes back as it came, with the tool's result.
    history = [*CHAT, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(**{**fields, "messages": history, "max_tokens": 1}).usage is not None


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_tools_and_calls_are_rendered_as_transformers_does(door: Door, tiny_model: Path, tools: Any) -> None:
    arguments = {"a": 1, "s": "ä"}
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    messages: list[Any] = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "3"})
    given = {} if tools is None else {"tools": tools}
    answer = door.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, **given)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)

    tokenizer.chat_template = TOOL_TEMPLATE
    plain = {**call, "function": {"name": "add", "arguments": arguments}}
    turns = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [plain]}, messages[-1]]
    text = tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_strict_is_taken_and_not_shown(door: Door) -> None:
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answers = (
        door.openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1, tools=tools)
        for tools in (TOOLS, strict)
    )
    assert len({answer.usage.prompt_tokens for answer in answers if answer.usage is not None}) == 1


def test_tool_choice_none_offers_no_tools(door: Door) -> None:
    plain = door.openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1)
    none = door.openai.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1, tools=TOOLS, tool_choice="none"
    )
    assert none.usage == plain.usage
