from __future__ import annotations

from typing import Any

import pytest

import trainsession as ts
from cookbook.lib.config import UsageError
from cookbook.lib.conversations import sequences_of_row, text_sequence
from cookbook.lib.rendering import Renderer
from cookbook.lib.rows import Row

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def learned(tokenizer: ts.Tokenizer, learn: Any = "all", **values: Any) -> list[tuple[str, list[str]]]:
    """Text and learned parts of each sequence."""
    sequences = sequences_of_row(Renderer(tokenizer), Row(values, "rows.jsonl:3"), learn)
    return [(sequence.text, sequence.learned) for sequence in sequences]


def chat(question: str, answer: str) -> tuple[str, list[str]]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
    return text, [f"{answer}<|im_end|>"]


def test_each_shape_of_row(tiny_tokenizer: ts.Tokenizer) -> None:
    expected = [chat("hi", "hello")]
    assert learned(tiny_tokenizer, messages=[USER, ASSISTANT]) == expected
    spoken = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert learned(tiny_tokenizer, conversations=spoken) == expected
    assert learned(tiny_tokenizer, question="hi", answer="hello") == expected
    assert learned(tiny_tokenizer, instruction="hi", input="", output="hello") == expected
    assert learned(tiny_tokenizer, prompt="a", completion=" b") == [("a b<|im_end|>", [" b<|im_end|>"])]
    instances = [{"input": "", "output": "x"}, {"input": "more", "output": "y"}]
    assert learned(tiny_tokenizer, id="seed_task_0", instruction="hi", instances=instances) == [
        chat("hi", "x"),
        chat("hi\n\nmore", "y"),
    ]


def test_all_replies_or_the_last_one(tiny_tokenizer: ts.Tokenizer) -> None:
    messages = [USER, ASSISTANT, USER, {**ASSISTANT, "content": "bye"}]
    ((text, parts),) = learned(tiny_tokenizer, messages=messages)
    assert parts == ["hello<|im_end|>", "bye<|im_end|>"]
    assert learned(tiny_tokenizer, "last", messages=messages) == [(text, parts[1:])]


def test_texts_are_encoded_apart_as_a_sampler_has_them(tiny_tokenizer: ts.Tokenizer) -> None:
    sequence = text_sequence(tiny_tokenizer, "The quick", " brown fox")
    prompt = tiny_tokenizer.encode("The quick")
    assert sequence.tokens[: len(prompt)] == prompt
    assert sequence.learned == [" brown fox<|im_end|>"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"text": "a", "label": 1},
            "the row has text, label; expected messages, conversations, prompt and completion, ",
        ),
        ({"messages": [USER]}, "there is no message of the role 'assistant' to learn"),
        ({"messages": [ASSISTANT]}, "messages[0] is the assistant's: there is no prompt before it"),
        ({"messages": [{"role": "bot"}]}, "'messages[0].role' is 'bot'; must be one of system, "),
        ({"prompt": "", "completion": "b"}, "'prompt' is empty"),
        ({"prompt": [USER], "completion": "b"}, "'prompt' is [{'role': 'user', 'content': 'hi'}]; must be a text"),
        ({"question": 1, "answer": "b"}, "1 of a question or 'answer' must be a text"),
        ({"instruction": "a", "instances": {}}, "'instances' is {}; must be a list"),
        ({"instruction": "a", "instances": [{}]}, "None of a question or 'instances[0].output' must be a text"),
    ],
)
def test_what_is_wrong_and_where(values: dict[str, Any], message: str, tiny_tokenizer: ts.Tokenizer) -> None:
    with pytest.raises(UsageError) as caught:
        learned(tiny_tokenizer, **values)
    assert str(caught.value).startswith(f"rows.jsonl:3: {message}")


def test_a_template_that_refuses_a_chat(tiny_tokenizer: ts.Tokenizer) -> None:
    template = b"{{ raise_exception('roles must alternate') }}"
    tokenizer = ts.Tokenizer({**tiny_tokenizer.files, "chat_template.jinja": template})
    with pytest.raises(UsageError, match=r"^rows\.jsonl:3: the chat template could not .* roles must alternate$"):
        learned(tokenizer, messages=[USER, ASSISTANT])
