"""Rows of supervised data as token ids: which are the prompt's, and which are learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trainsession as ts

from .config import UsageError

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, as text or as chat messages, and the completion to learn."""

    prompt: str | tuple[Message, ...]
    completion: str


def examples_of_row(row: Mapping[str, Any]) -> list[Example]:
    """The examples of one row, by its keys (the shapes that `cookbook.sft` lists).

    Raises:
        UsageError: none of the known shapes.
    """
    if "messages" in row:
        *context, last = row["messages"]
        if not context or last["role"] != "assistant":
            raise UsageError("messages: expected at least two, the last one of the role assistant")
        return [Example(tuple(context), last["content"])]
    if {"prompt", "completion"} <= row.keys():
        return [Example(row["prompt"], row["completion"])]
    if {"instruction", "instances"} <= row.keys():
        return [
            Example(_user("\n\n".join(filter(None, (row["instruction"], item["input"])))), item["output"])
            for item in row["instances"]
        ]
    if {"question", "answer"} <= row.keys():
        return [Example(_user(row["question"]), row["answer"])]
    raise UsageError(
        f"a row with the keys {', '.join(row)}: expected messages, prompt and completion, "
        "instruction and instances, or question and answer"
    )


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def tokens_of_example(tokenizer: ts.Tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the completion, which ends with an end token.

    A text's prompt and completion are encoded apart, because a sampler is given the prompt apart:
    white space between them belongs to the one it stands in. A chat goes through the model's
    template twice, with and without its last message; the completion is what the second adds.

    Raises:
        UsageError: the template does not continue its own generation prompt, or the model has no
            end token.
    """
    ends = tokenizer.eos_token_ids
    if not ends:
        raise UsageError("this model's tokenizer names no end token, so completions could not end")
    if isinstance(example.prompt, str):
        completion = tokenizer.encode(example.completion, add_special_tokens=False)
        return tokenizer.encode(example.prompt), [*completion, ends[0]]
    messages = [dict(message) for message in example.prompt]
    reply = {"role": "assistant", "content": example.completion}
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*messages, reply])
    if whole[: len(prompt)] != prompt:
        raise UsageError("this chat template does not continue its generation prompt; pass prompt/completion rows")
    completion = whole[len(prompt) :]
    # ChatML ends a turn with <|im_end|> and a newline, but a sampler never gets to the newline.
    last = max((index for index, token in enumerate(completion) if token in ends), default=None)
    return prompt, [*completion, ends[0]] if last is None else completion[: last + 1]
