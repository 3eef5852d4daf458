"""Tool calls in a model's text, where its convention is plain: ``<tool_call>{"name", "arguments"}</tool_call>``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

OPENING = "<tool_call>"
_CALLS = re.compile(r"(?:\s*<tool_call>\s*(?P<body>\{.*?\})\s*</tool_call>)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


class ToolCallReader:
    """Separates the text of a sample from the tool calls at its end, while it grows.

    Text from the first ``<tool_call>`` on is held back until the sample ends, and so is white space
    that may stand before one. If all of it are complete calls they are the sample's calls; otherwise
    it is text like the rest, and nothing is lost or guessed.
    """

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """The text that certainly is no part of a call."""
        self._held += text
        at = self._held.find(OPENING)
        if at < 0:
            at = len(self._held) - _length_of_beginning(self._held)
        shown = self._held[:at].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def end(self) -> tuple[str, list[Call]]:
        """What was held back: as text, or as calls. The sample has ended."""
        calls = _read_calls(self._held)
        return ("", calls) if calls else (self._held, [])


def _length_of_beginning(text: str) -> int:
    """Of the longest end of the text that begins a call."""
    for length in range(min(len(OPENING) - 1, len(text)), 0, -1):
        if OPENING.startswith(text[-length:]):
            return length
    return 0


def _read_calls(text: str) -> list[Call]:
    """The calls that a text consists of; none if there is anything else in it."""
    calls: list[Call] = []
    at = 0
    while match := _CALLS.match(text, at):
        try:
            body = json.loads(match["body"])
        except (ValueError, RecursionError):
            return []
        name, arguments = body.get("name"), body.get("arguments", {})
        if not isinstance(name, str):
            return []
        calls.append(Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
        at = match.end()
    return [] if text[at:].strip() else calls
