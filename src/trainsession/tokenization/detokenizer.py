"""Text of a growing token sequence, handed out as soon as it is final."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache

from .tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "�"


class IncrementalDetokenizer:
    """Decodes token by token: the pieces put together are exactly ``tokenizer.decode(ids)``.

    A piece never ends within a character: bytes that may still become one are held back until the
    next token decides, or `flush`. The cost of a token does not grow with the sequence.

    Args:
        tokenizer: Whose tokens.
        skip_special_tokens: Special tokens add no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._pieces: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.decoder_type == "ByteLevel" else None
        self._context: list[int] = []
        """The last token whose text is out: decoders treat the first token of a text differently."""
        self._context_text = ""
        self._held: list[int] = []

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_id: int) -> str:
        """The text that this token completes; often more or less than the token's own."""
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._utf8 is not None:
            return self._emit(self._utf8.decode(token_bytes(token)))
        self._held.append(token_id)
        if self._tokenizer.cleans_up_spaces or _BYTE_TOKEN.fullmatch(token):
            return ""  # one later byte can still change how a whole run of byte tokens reads
        piece = self._window()
        if piece.endswith(_REPLACEMENT):
            return ""
        self._context, self._held = [token_id], []
        self._context_text = self._tokenizer.decode(self._context)
        return self._emit(piece)

    def flush(self) -> str:
        """What was held back, as `Tokenizer.decode` reads it; the sequence has ended."""
        if self._utf8 is not None:
            return self._emit(self._utf8.decode(b"", final=True))
        piece = self._window() if self._held else ""
        self._held = []
        return self._emit(piece)

    def _window(self) -> str:
        return self._tokenizer.decode(self._context + self._held)[len(self._context_text) :]

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


@lru_cache(maxsize=1 << 16)
def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for (GPT-2's byte-to-character table).

    An added token with other characters, such as a space, stands for its own UTF-8.
    """
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters are themselves; the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
