"""What rows may look like: chats, preferences, problems with an answer; with tests: `code_problems`.

Every check names the row and the field: ``train.jsonl:17: 'messages[2].role' is 'asistant'; must be one
of system, user, assistant, tool``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .data import Problem
from .rows import Row

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt, a reply to it, and a reply that is worse."""

    prompt: list[Message]
    chosen: Message
    rejected: Message


def chat(row: Row) -> list[Message]:
    """Of ``messages`` (``role``, ``content``) or ``conversations`` (``from``, ``value``); ``system`` comes first."""
    name = "conversations" if "conversations" in row.values else "messages"
    return _with_system(row, messages_in(row, name, field_of(row, name)))


def tools(row: Row) -> list[Mapping[str, Any]]:
    """The functions that a chat's model may call: JSON schemas, or the text of such a list; none without ``tools``."""
    value = row.values.get("tools") or []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise row.error(f"'tools' is not valid JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise row.error(f"'tools' is {shown(value)}; must be a list of JSON schemas of functions")
    return value


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    system = row.values.get("system")
    if not system:
        return messages
    if not isinstance(system, str) or messages[0]["role"] == "system":
        raise row.error(f"'system' is {shown(system)}; must be a text, and the only system message")
    return [{"role": "system", "content": system}, *messages]


def preference(row: Row) -> Preference:
    """Of ``prompt`` (a text or messages) or ``conversations``, and ``chosen`` and ``rejected``.

    These are texts, messages, or lists of one message. Without a prompt both are whole chats that
    differ in their last message.
    """
    replies: list[list[Message]] = []
    for name in ("chosen", "rejected"):
        value = field_of(row, name)
        if isinstance(value, str):
            value = [{"role": "assistant", "content": value}]
        replies.append(messages_in(row, name, [value] if isinstance(value, Mapping) else value))
    chosen, rejected = replies
    if "conversations" in row.values:
        prompt = _with_system(row, messages_in(row, "conversations", row.values["conversations"]))
    elif "prompt" in row.values:
        value = row.values["prompt"]
        prompt = messages_in(row, "prompt", [{"role": "user", "content": value}] if isinstance(value, str) else value)
    else:
        prompt, chosen, rejected = chosen[:-1], chosen[-1:], rejected[len(chosen) - 1 :]
        if not prompt or replies[1][: len(prompt)] != prompt:
            raise row.error("without a 'prompt', 'chosen' and 'rejected' must be chats that differ in the last message")
    for name, reply in (("chosen", chosen), ("rejected", rejected)):
        if len(reply) != 1 or reply[0]["role"] != "assistant":
            roles = ", ".join(message["role"] for message in reply)
            raise row.error(f"'{name}' has messages of {roles or 'nobody'} behind the prompt; must be one of assistant")
    return Preference(prompt, chosen[0], rejected[0])


def answered(row: Row) -> Problem:
    """Of ``prompt`` (or ``question``) and ``answer``, which may be a number."""
    return Problem(text_of(row, "prompt", "question"), str(_scalar(row, "answer")))


def messages_in(row: Row, name: str, value: Any) -> list[Message]:
    """A list of messages, checked; fields that are null are left out, parts of a content are joined."""
    if not isinstance(value, list) or not value:
        raise row.error(f"'{name}' is {shown(value)}; must be a list of at least one message")
    return [_message(row, f"{name}[{index}]", item) for index, item in enumerate(value)]


def _message(row: Row, name: str, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise row.error(f"'{name}' is {shown(value)}; must be an object with 'role' and 'content'")
    message = {key: item for key, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if speaker not in _SPEAKERS:
            raise row.error(f"'{name}.from' is {shown(speaker)}; must be one of {', '.join(_SPEAKERS)}")
        message = {"role": _SPEAKERS[speaker], "content": message.pop("value", None), **message}
        content = f"{name}.value"
    else:
        content = f"{name}.content"
    if "role" not in message:
        raise row.error(f"'{name}.role' is missing; must be one of {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        raise row.error(f"'{name}.role' is {shown(message['role'])}; must be one of {', '.join(ROLES)}")
    text = message.get("content")
    parts_of_text = isinstance(text, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in text
    )
    if not (isinstance(text, str) or parts_of_text or (text is None and message.get("tool_calls"))):
        found = "missing" if text is None else shown(text)
        raise row.error(f"'{content}' is {found}; must be a text, or a list of {{'type': 'text', 'text'}}")
    # Joined: a template that does not know lists would print Python's notation of one.
    return {**message, "content": "".join(part["text"] for part in text)} if isinstance(text, list) else message


def field_of(row: Row, *names: str) -> Any:
    """The first of these fields that the row has."""
    for name in names:
        if row.values.get(name) is not None:
            return row.values[name]
    wanted = " or ".join(f"'{name}'" for name in names)
    raise row.error(f"{wanted} is missing; the row has {', '.join(row.values) or 'no fields'}")


def text_of(row: Row, *names: str) -> str:
    value = field_of(row, *names)
    if not isinstance(value, str):
        name = next(name for name in names if row.values.get(name) is not None)
        raise row.error(f"'{name}' is {shown(value)}; must be a text")
    return value


def _scalar(row: Row, name: str) -> str | int | float:
    value = field_of(row, name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise row.error(f"'{name}' is {shown(value)}; must be a text or a number")
    return value


def shown(value: Any) -> str:
    return f"{value!r:.60}"
