"""A chat as its template prints it: text, tokens, and where each message stands in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from .marking import marks_in, unmarked
from .tracing import Span


class RenderedChat:
    """One rendering of a chat. Made by `Tokenizer.render_chat`.

    Attributes:
        text: What the template printed.
        spans: For each message, where in ``text`` the template printed it, with everything that it
            puts around it; None where it prints the message in no loop over messages of its own
            (some put the system message into the first user's).
    """

    def __init__(
        self, printed: str, spans: Sequence[Span | None], encode: Callable[[str], list[int]], *, marked: bool
    ) -> None:
        self._printed = printed
        self._encode = encode
        self._marks = marks_in(printed) if marked else []
        self.text = unmarked(printed) if marked else printed
        self.spans = tuple(span and (self._plain(span[0]), self._plain(span[1])) for span in spans)

    @cached_property
    def tokens(self) -> list[int]:
        """Token ids of the whole text."""
        return self._encode(self._printed)

    def encode(self, start: int, end: int) -> list[int]:
        """Token ids of a part of the text, encoded alone, as a sampler would have it behind a prompt."""
        return self._encode(self._printed[self._position_as_printed(start) : self._position_as_printed(end)])

    def split_tokens(self, position: int) -> tuple[int, int]:
        """Tokens of the text before and behind a position: ``tokens[:a]`` and ``tokens[b:]``.

        ``a == b`` where a token begins at the position. It is found by encoding what stands before it:
        if that gives the first ``a`` tokens, these are exactly that text. Otherwise tokens from ``a``
        to ``b`` are of both sides: a merge crosses the position, and neither side would have been
        encoded so alone.
        """
        if position <= 0:
            return 0, 0
        if position >= len(self.text):
            return len(self.tokens), len(self.tokens)
        at = self._position_as_printed(position)
        before = self._encode(self._printed[:at])
        first = _common(before, self.tokens)
        if first == len(before):
            return first, first
        behind = _common(self._encode(self._printed[at:])[::-1], self.tokens[first:][::-1])
        return first, len(self.tokens) - behind

    def _plain(self, position: int) -> int:
        return position - sum(mark < position for mark, _ in self._marks)

    def _position_as_printed(self, position: int) -> int:
        """Behind marks that end at the position, before one that begins there."""
        for number, (mark, opening) in enumerate(self._marks):
            plain = mark - number
            if plain > position or (plain == position and opening):
                return position + number
        return position + len(self._marks)

    def __repr__(self) -> str:
        return f"RenderedChat({len(self.spans)} messages, {len(self.text)} characters)"


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items both begin with."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
