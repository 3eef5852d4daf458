"""What rows may look like, and errors that name the row and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.lib import formats
from cookbook.lib.config import UsageError
from cookbook.lib.data import Problem
from cookbook.lib.rows import Row, read_rows

USER = {"role": "user", "content": "hi"}
GOOD, BAD = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "no"}
DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def row(**values: Any) -> Row:
    return Row(values, "train.jsonl:17")


def test_chats() -> None:
    assert formats.chat(row(messages=[USER, GOOD])) == [USER, GOOD]
    spoken = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert formats.chat(row(conversations=spoken)) == [USER, GOOD]
    system = {"role": "system", "content": "Be short."}
    assert formats.chat(row(conversations=spoken, system="Be short.")) == [system, USER, GOOD]
    schema = [{"type": "function", "function": {"name": "f"}}]
    assert formats.tools(row(tools=schema)) == formats.tools(row(tools=json.dumps(schema))) == schema
    assert formats.tools(row(tools="")) == formats.tools(row()) == []
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    kept = {"role": "assistant", "tool_calls": call["tool_calls"]}
    assert formats.chat(row(messages=[USER, call, {"role": "tool", "content": "1", "name": None}])) == [
        USER,
        kept,
        {"role": "tool", "content": "1"},
    ]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert formats.chat(row(messages=[{"role": "user", "content": parts}])) == [USER]


def test_preferences() -> None:
    expected = formats.Preference([USER], GOOD, BAD)
    said = {"from": "gpt", "value": "hello"}, {"from": "gpt", "value": "no"}
    for values in (
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"conversations": [{"from": "human", "value": "hi"}], "chosen": said[0], "rejected": said[1]},
    ):
        assert formats.preference(row(**values)) == expected


def test_problems() -> None:
    assert formats.answered(row(question="2 + 2?", answer=4)) == Problem("2 + 2?", "4")
    assert formats.answered(row(prompt="2 + 2?", answer="#### 4")) == Problem("2 + 2?", "#### 4")


@pytest.mark.parametrize(
    ("read", "values", "message"),
    [
        (formats.chat, {"messages": [USER, GOOD, {"role": "asistant", "content": "x"}]},
         "'messages[2].role' is 'asistant'; must be one of system, user, assistant, tool"),
        (formats.chat, {"messages": [{"content": "x"}]},
         "'messages[0].role' is missing; must be one of system, user, assistant, tool"),
        (formats.chat, {"messages": [USER, {"role": "assistant"}]},
         "'messages[1].content' is missing; must be a text, or a list of {'type': 'text', 'text'}"),
        (formats.chat, {"messages": [{"role": "user", "content": 3}]},
         "'messages[0].content' is 3; must be a text, or a list of {'type': 'text', 'text'}"),
        (formats.chat, {"messages": ["hi"]}, "'messages[0]' is 'hi'; must be an object with 'role' and 'content'"),
        (formats.chat, {"messages": []}, "'messages' is []; must be a list of at least one message"),
        (formats.chat, {"mesages": [USER]}, "'messages' is missing; the row has mesages"),
        (formats.chat, {"conversations": [{"from": "bot", "value": "x"}]},
         "'conversations[0].from' is 'bot'; must be one of human, gpt, observation, system, user, assistant, tool"),
        (formats.chat, {"conversations": [{"from": "gpt", "text": "x"}]},
         "'conversations[0].value' is missing; must be a text, or a list of {'type': 'text', 'text'}"),
        (formats.chat, {"messages": [{"role": "system", "content": "x"}, USER], "system": "y"},
         "'system' is 'y'; must be a text, and the only system message"),
        (formats.tools, {"tools": "[x]"}, "'tools' is not valid JSON: Expecting value: line 1 column 2 (char 1)"),
        (formats.tools, {"tools": ["f"]}, "'tools' is ['f']; must be a list of JSON schemas of functions"),
        (formats.preference, {"prompt": "hi", "chosen": "hello"}, "'rejected' is missing; the row has prompt, chosen"),
        (formats.preference, {"prompt": "hi", "chosen": 1, "rejected": "no"},
         "'chosen' is 1; must be a list of at least one message"),
        (formats.preference, {"prompt": "hi", "chosen": [USER], "rejected": "no"},
         "'chosen' has messages of user behind the prompt; must be one of assistant"),
        (formats.preference, {"chosen": [USER, GOOD], "rejected": [GOOD, BAD]},
         "without a 'prompt', 'chosen' and 'rejected' must be chats that differ in the last message"),
        (formats.preference, {"chosen": "a", "rejected": "b"},
         "without a 'prompt', 'chosen' and 'rejected' must be chats that differ in the last message"),
        (formats.answered, {"prompt": "x"}, "'answer' is missing; the row has prompt"),
        (formats.answered, {"prompt": "x", "answer": True}, "'answer' is True; must be a text or a number"),
        (formats.answered, {"prompt": ["x"], "answer": 1}, "'prompt' is ['x']; must be a text"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(read: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(row(**values))
    assert str(caught.value) == f"train.jsonl:17: {message}"


def test_public_files() -> None:
    if not DATA.is_dir():
        pytest.skip("the data files are not at ../shared/data")
    pairs = [formats.preference(r) for r in read_rows(DATA / "llamafactory_demo" / "dpo_en_demo.json")]
    assert len(pairs) == 300
    assert all(pair.chosen != pair.rejected for pair in pairs)
    assert len([formats.chat(r) for r in read_rows(DATA / "llamafactory_demo" / "kto_en_demo.json")]) == 300
    assert len([formats.answered(r) for r in read_rows(DATA / "gsm8k", "test")]) == 1319
