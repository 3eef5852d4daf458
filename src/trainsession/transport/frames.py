"""A stream of samples that is read anew after its connection broke: each token is handed on once.

A stream always begins with the first token. Another process of the service, which draws the samples again, may
interleave and cut its frames otherwise, or send each sample whole. So a place in it is a number of tokens of each
sample, and never a number of frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import EngineLost


@dataclass(slots=True)
class _Sample:
    """What was handed on, and how far the present reading is."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    is_over: bool = False
    read_tokens: int = 0
    read_text: int = 0


class OnceEach:
    """Belongs to one stream, through all of its connections."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def begin(self) -> None:
        """Frames come from the first on, once more."""
        for sample in self._samples.values():
            sample.read_tokens = sample.read_text = 0

    def new(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        """What of a frame with tokens has not been handed on; None where all of it was.

        Raises:
            EngineLost: it is no continuation of what was handed on.
        """
        sample = self._samples.setdefault(frame["index"], _Sample())
        tokens, text, reason = frame["tokens"], frame["text_delta"], frame["stop_reason"]
        known = min(max(len(sample.tokens) - sample.read_tokens, 0), len(tokens))
        read = min(max(len(sample.text) - sample.read_text, 0), len(text))
        same = tokens[:known] == sample.tokens[sample.read_tokens : sample.read_tokens + known]
        if not same or text[:read] != sample.text[sample.read_text : sample.read_text + read]:
            raise EngineLost(
                "the stream was cut off, and its samples came out otherwise when they were drawn again (outside exact "
                "mode they may): it cannot be continued"
            )
        sample.read_tokens += len(tokens)
        sample.read_text += len(text)
        if known == len(tokens) and read == len(text) and (sample.is_over or reason is None) and (known or read):
            return None
        sample.tokens += tokens[known:]
        sample.text += text[read:]
        sample.is_over = reason is not None
        rest = {"tokens": tokens[known:], "logprobs": frame["logprobs"][known:], "text_delta": text[read:]}
        topk = frame.get("topk")
        return {**frame, **rest} if topk is None else {**frame, **rest, "topk": topk[known:]}
