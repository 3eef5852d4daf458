"""From chat messages to the text that a model was trained on, by its own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, meta

from ..errors import InvalidRequest
from .sandbox import ChatTemplateEnvironment, TemplateBudgetExceeded
from .tracing import MessageTrace, Span

Messages = Sequence[Mapping[str, Any]]
"""``[{"role": "user", "content": "Hi"}, ...]``"""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What the Python that a template compiles to raises on data it was not written for."""

_environment = ChatTemplateEnvironment()


def render_chat(
    template: str,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> tuple[str, list[Span | None]]:
    """The chat as one text, and where each message stands in it (`MessageTrace.spans`).

    Raises:
        InvalidRequest: messages that are not messages, a variable that the template does not
            read, a template that refuses them, is wrong, or exceeds its budget.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, add_generation_prompt begins a new one: choose one",
            details={"key": "continue_final_message"},
        )
    chat = _plain_messages(messages)
    _check_variables(template, variables, special_tokens)
    final = _mark_end(chat) if continue_final_message else ""
    trace = MessageTrace(chat)
    try:
        text = _environment.render(
            template,
            {
                **special_tokens,
                **_plain(variables, "chat template variables"),
                "messages": chat,
                "tools": _plain(tools, "tools"),
                "documents": _plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            },
            trace=trace,
        )
    except TemplateBudgetExceeded as error:
        raise InvalidRequest(f"the chat template was stopped: {error}", details={"key": "chat_template"}) from None
    except _TEMPLATE_FAILURES as error:
        raise InvalidRequest(
            f"the chat template could not render these messages: {error or type(error).__name__}",
            details={"key": "messages"},
        ) from error
    if continue_final_message:
        text = _cut_at_end_mark(text, final)
    return text, [span and (min(span[0], len(text)), min(span[1], len(text))) for span in trace.spans()]


def _plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Copies of the messages in plain JSON types, without the keys that are None."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages: expected a list of messages, got {type(messages).__name__}", details={"key": "messages"}
        )
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", details={"key": "messages"})
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{index}]: expected a map with a text 'role', got {message!r:.80}",
                details={"key": "messages"},
            )
        if len(message) == 1:
            raise InvalidRequest(
                f"messages[{index}] of role {message['role']!r} has no 'content'", details={"key": "messages"}
            )
        plain = _plain(message, f"messages[{index}]")
        chat.append(_with_reasoning_names({key: value for key, value in plain.items() if value is not None}))
    return chat


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under both names that templates read, whichever it was given under."""
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, what: str) -> Any:
    """The value rebuilt from plain JSON types: a template sees no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    raise InvalidRequest(f"{what}: expected plain JSON values, got {type(value).__name__}", details={"key": what})


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a template reads.

    Raises:
        InvalidRequest: the template is not valid Jinja.
    """
    try:
        return frozenset(meta.find_undeclared_variables(_environment.parse(template)))
    except (TemplateError, RecursionError) as error:
        raise InvalidRequest(f"the chat template is not valid: {error}", details={"key": "chat_template"}) from None


def _check_variables(template: str, variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    taken = _RESERVED | special_tokens.keys() | _environment.globals.keys()
    offered = sorted(template_variables(template) - taken)
    for key in variables:
        if key not in offered:
            raise InvalidRequest(
                f"apply_chat_template: this model's chat template takes no {key!r}; "
                f"it takes {', '.join(offered) or 'no variables'}",
                details={"key": key},
            )


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Append a tag to the final message's text, in place; returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    for block in reversed(content or []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text = block["text"]
            block["text"] = text + _CONTINUE_TAG
            return text
    raise InvalidRequest(
        "continue_final_message: the final message has no text to continue", details={"key": "continue_final_message"}
    )


def _cut_at_end_mark(text: str, final: str) -> str:
    """The rendered chat up to the end of its final message (transformers' rule for trimmed text)."""
    tag = _CONTINUE_TAG.strip()
    if tag not in text or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the final message does not appear in the rendered chat; "
            "this chat template changes it",
            details={"key": "continue_final_message"},
        )
    at = text.rindex(tag)
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trimmed the message, so the text before the tag is trimmed too
