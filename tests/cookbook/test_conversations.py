from __future__ import annotations

import pytest

from cookbook.lib.config import UsageError
from cookbook.lib.conversations import Example, examples_of_row

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def test_each_shape_of_row():
    assert examples_of_row({"prompt": "a", "completion": " b"}) == [Example("a", " b")]
    assert examples_of_row({"messages": [USER, ASSISTANT]}) == [Example((USER,), "hello")]
    assert examples_of_row({"question": "hi", "answer": "#### 1"}) == [Example((USER,), "#### 1")]
    instances = [{"input": "", "output": "x"}, {"input": "more", "output": "y"}]
    assert examples_of_row({"id": "seed_task_0", "instruction": "hi", "instances": instances}) == [
        Example((USER,), "x"),
        Example(({"role": "user", "content": "hi\n\nmore"},), "y"),
    ]


@pytest.mark.parametrize("messages", [[ASSISTANT], [USER], [ASSISTANT, USER]])
def test_messages_must_end_with_a_reply(messages: list[dict[str, str]]):
    with pytest.raises(UsageError, match="the last one of the role assistant"):
        examples_of_row({"messages": messages})


def test_an_unknown_shape_names_its_keys_and_the_known_ones():
    with pytest.raises(UsageError, match=r"keys text, label: expected messages, prompt and completion"):
        examples_of_row({"text": "a", "label": 1})
