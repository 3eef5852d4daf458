"""Telling the control tokens of a chat template from those that a user typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_START, _END = "\U000f0000", "\U000f0001"
"""Private-use characters around a special token that stands in a message; removed after rendering."""
_MARKS = re.compile(f"[{_START}{_END}]")


def marks_in(rendered: str) -> list[tuple[int, bool]]:
    """Where marks stand in a text, and whether each is the opening one."""
    return [(match.start(), match.group() == _START) for match in _MARKS.finditer(rendered)]


def unmarked(rendered: str) -> str:
    return _MARKS.sub("", rendered)


class UserText:
    """One rendering of a chat in which only the template's own special tokens count.

    `mark` wraps every special token spelled in the messages, the template renders, and `encode`
    turns unwrapped special tokens into their ids and everything between them into plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = [token for token in tokenizer.added_tokens.values() if token.special]
        special.sort(key=lambda token: len(token.content), reverse=True)  # the longest match wins
        spellings = "|".join(re.escape(token.content) for token in special) or "(?!)"
        written = "|".join(
            (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
            for token in special
        )
        self._spelled = re.compile(spellings)
        self._written = re.compile(f"{_START}(?P<user>{spellings}){_END}|{_START}|{_END}|(?P<own>{written or '(?!)'})")

    def mark(self, value: Any) -> Any:
        """The value with special tokens in its texts wrapped, keys included: a model wrote those of a tool call."""
        if isinstance(value, str):
            clean = value.replace(_START, "").replace(_END, "")
            return self._spelled.sub(f"{_START}\\g<0>{_END}", clean)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a text that was rendered from marked values."""
        ids: list[int] = []
        plain: list[str] = []
        at = 0
        for match in self._written.finditer(rendered):
            plain.append(rendered[at : match.start()])
            at = match.end()
            if match["own"] is None:
                plain.append(match["user"] or "")
                continue
            ids += self._encode_plain(plain)
            token_id = self._tokenizer.token_to_id(match["own"]) or self._tokenizer.token_to_id(match["own"].strip())
            if token_id is not None:
                ids.append(token_id)
        plain.append(rendered[at:])
        return ids + self._encode_plain(plain)

    def _encode_plain(self, parts: list[str]) -> list[int]:
        text = "".join(parts)
        parts.clear()
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False) if text else []
