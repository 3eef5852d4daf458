"""Logprobs in OpenAI's two shapes. Every sampled token has its entry, the end token too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ....tokenization import IncrementalDetokenizer, Tokenizer
from ....tokenization.detokenizer import token_bytes
from .answers import ChatLogprobs, SampledLogprob, TextLogprobs, TokenLogprob

TopK = Sequence[Sequence[tuple[int, float]] | None]
"""For each token the most likely (token id, logprob); None where there are none."""

_LOWEST = -9999.0
"""OpenAI's number for a token that cannot be; JSON has no minus infinity."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float], topk: TopK | None
) -> ChatLogprobs:
    """For a chat's ``logprobs``."""
    rows = topk or [()] * len(tokens)
    content = [
        SampledLogprob(
            **_entry(tokenizer, token, logprob).model_dump(),
            top_logprobs=[_entry(tokenizer, other, value) for other, value in row or ()],
        )
        for token, logprob, row in zip(tokens, logprobs, rows, strict=True)
    ]
    return ChatLogprobs(content=content, refusal=None)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> TokenLogprob:
    data = bytes_of(tokenizer, token)
    shown = None if data is None else list(data)
    return TokenLogprob(token=spelling(tokenizer, token), logprob=max(logprob, _LOWEST), bytes=shown)


class TextLogprobsBuilder:
    """For a text completion's ``logprobs``: one call for a whole text, or one for each chunk of it.

    Args:
        offset: Characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._offset = offset

    def add(self, tokens: Sequence[int], logprobs: Sequence[float | None], topk: TopK | None) -> TextLogprobs:
        """The next tokens' entries. Offsets are in the text before a stop string is cut from it."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._detokenizer.add(token))
        return TextLogprobs(
            tokens=[spelling(self._tokenizer, token) for token in tokens],
            token_logprobs=[None if value is None else max(value, _LOWEST) for value in logprobs],
            top_logprobs=None if topk is None else self._alternatives(tokens, logprobs, topk),
            text_offset=offsets,
        )

    def _alternatives(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], topk: TopK
    ) -> list[dict[str, float] | None]:
        """The most likely tokens and the one that was drawn; of two with one spelling the likelier."""
        rows: list[dict[str, float] | None] = []
        for token, logprob, row in zip(tokens, logprobs, topk, strict=True):
            if row is None or logprob is None:
                rows.append(None)
                continue
            shown: dict[str, float] = {}
            for other, value in [*row, (token, logprob)]:
                shown.setdefault(spelling(self._tokenizer, other), max(value, _LOWEST))
            rows.append(shown)
        return rows


def spelling(tokenizer: Tokenizer, token: int) -> str:
    """A token's own text; ``bytes:\\xe4`` for a part of a character, ``token_id:7`` for one without a text."""
    data = bytes_of(tokenizer, token)
    if data is None:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The bytes that a token stands for in a text; None for an id that the tokenizer does not know."""
    text = tokenizer.id_to_token(token)
    if text is None:
        return None
    if token in tokenizer.added_tokens:
        return text.encode()
    if tokenizer.decoder_type == "ByteLevel":
        return token_bytes(text)
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()
