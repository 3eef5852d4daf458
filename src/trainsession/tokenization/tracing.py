"""Which message of a chat a template is printing: seen from its loops, never searched for in its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Span = tuple[int, int]
"""Where something stands in a text: its first character, and the one behind its last."""


class MessageTrace:
    """Follows one rendering.

    A template prints a chat in a loop over its messages, whatever it makes of their texts. The
    environment says when a step of a loop begins and when a loop ends, and `printed` counts the
    characters so far; so the span of a message is what was printed in its step. What a message
    contains is never looked at, so no message can pretend to be another.

    Args:
        messages: The very objects that the template is given.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self.printed = 0
        self._index_of = {id(message): index for index, message in enumerate(messages)}
        self._open: dict[int, tuple[int, int]] = {}
        self._found: list[list[Span]] = [[] for _ in messages]

    def enter(self, loop: int, item: Any) -> None:
        """The next step of a loop begins, with this item."""
        self.leave(loop)
        index = self._index_of.get(id(item))
        if index is not None:
            self._open[loop] = index, self.printed

    def leave(self, loop: int) -> None:
        """The loop has ended, or its next step begins."""
        index, start = self._open.pop(loop, (0, self.printed))
        if start < self.printed:
            self._found[index].append((start, self.printed))

    def spans(self) -> list[Span | None]:
        """Of each message; None where no loop printed it, or more than one did."""
        return [found[0] if len(found) == 1 else None for found in self._found]
