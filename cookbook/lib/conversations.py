"""Rows of supervised data as sequences of tokens, with the mask of what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trainsession as ts

from . import formats
from .config import UsageError
from .rendering import Learn, Rendered, Renderer
from .rows import Row

_SHAPES = (
    "messages, conversations, prompt and completion, instruction and instances, instruction and output, "
    "or question and answer"
)


def sequences_of_row(renderer: Renderer, row: Row, learn: Learn = "all") -> list[Rendered]:
    """What is trained on of a row, by its fields (docs/recipes.md lists the shapes).

    Args:
        learn: Which messages of a chat: the assistant's, all or the last one.

    Raises:
        UsageError: none of the known shapes, or a chat that the template refuses; names the row.
    """
    try:
        if {"messages", "conversations"} & row.values.keys():
            tools = formats.tools(row)
            return (renderer.with_tools(tools) if tools else renderer).examples(formats.chat(row), learn)
        if {"prompt", "completion"} <= row.values.keys():
            return [_completion(renderer, row)]
        return [sequence for messages in _asked(row) for sequence in renderer.examples(messages)]
    except ts.InvalidRequest as error:
        raise row.error(str(error)) from None
    except UsageError as error:
        raise (error if str(error).startswith(row.where) else row.error(str(error))) from None


def _completion(renderer: Renderer, row: Row) -> Rendered:
    prompt, completion = row.values["prompt"], row.values["completion"]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise row.error(f"'{name}' is {value!r:.60}; must be a text (chats are rows with 'messages')")
    return text_sequence(renderer.tokenizer, prompt, completion)


def text_sequence(tokenizer: ts.Tokenizer, prompt: str, completion: str) -> Rendered:
    """Two texts as they are, then the end token.

    They are encoded apart, because a sampler is given the prompt apart: white space between them
    belongs to the one it stands in.

    Raises:
        UsageError: an empty prompt; or the model has no end token.
    """
    ends = tokenizer.eos_token_ids
    if not ends:
        raise UsageError("this model's tokenizer names no end token, so completions could not end")
    given, learned = tokenizer.encode(prompt), tokenizer.encode(completion, add_special_tokens=False)
    if not given:
        raise UsageError("'prompt' is empty; there is nothing to predict the first token from")
    return Rendered(tokenizer, [*given, *learned, ends[0]], [0.0] * len(given) + [1.0] * (len(learned) + 1))


def _asked(row: Row) -> list[Sequence[Mapping[str, Any]]]:
    """Chats of a question and its answer."""
    values = row.values
    if {"instruction", "instances"} <= values.keys():
        instances = values["instances"]
        if not isinstance(instances, list) or not all(isinstance(item, Mapping) for item in instances):
            raise row.error(f"'instances' is {instances!r:.60}; must be a list of objects with 'input' and 'output'")
        pairs = [
            (values["instruction"], item.get("input"), item.get("output"), f"instances[{index}].output")
            for index, item in enumerate(instances)
        ]
    elif {"instruction", "output"} <= values.keys():
        pairs = [(values["instruction"], values.get("input"), values["output"], "output")]
    elif {"question", "answer"} <= values.keys():
        pairs = [(values["question"], None, values["answer"], "answer")]
    else:
        raise row.error(f"the row has {', '.join(values) or 'no fields'}; expected {_SHAPES}")
    chats: list[Sequence[Mapping[str, Any]]] = []
    for instruction, more, answer, name in pairs:
        for text in (instruction, more or "", answer):
            if not isinstance(text, str):
                raise row.error(f"{text!r:.60} of a question or '{name}' must be a text")
        question = "\n\n".join(filter(None, (instruction, more)))
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats
