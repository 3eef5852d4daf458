"""When a sample ends, and the text that it shows. Plain Python: no tensor is touched here."""

from __future__ import annotations

from typing import Protocol

from ...types import SamplingParams
from ...types.results import StopReason


class Detokenizer(Protocol):
    """`trainsession.tokenization.IncrementalDetokenizer`, or a stand-in in tests."""

    def add(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Text of a growing sample that never goes past a stop string.

    What could still become a stop string is held back until it is decided.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stops = stop_strings
        self._longest = max((len(stop) for stop in stop_strings), default=0)
        self._text = ""
        self._shown = 0

    @property
    def text(self) -> str:
        """All text so far; whole once the sample has ended."""
        return self._text

    def add(self, piece: str, *, may_stop: bool) -> bool:
        """Append text; True if a stop string is complete now, and the text cut before it.

        An occurrence that an earlier token completed is passed over (``min_tokens``).
        """
        earlier = len(self._text)
        self._text += piece
        if not (may_stop and piece):
            return False
        found = -1
        for stop in self._stops:
            at = self._text.find(stop, max(0, earlier - len(stop) + 1))
            if at >= 0 and (found < 0 or at < found):
                found = at
        if found < 0:
            return False
        self._text = self._text[: max(found, self._shown)]
        return True

    def take(self, *, ended: bool) -> str:
        """Text that was not shown yet and is certain."""
        end = len(self._text)
        if not ended:
            end -= self._undecided()
        delta = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return delta

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            ending = self._text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0


class StopCondition:
    """Decides after each token of one sample whether it was the last.

    Args:
        params: The request's.
        max_tokens: Tokens at most.
        eos_token_ids: The model's end tokens.
        detokenizer: Of this sample alone.
    """

    def __init__(
        self, params: SamplingParams, max_tokens: int, eos_token_ids: tuple[int, ...], detokenizer: Detokenizer
    ) -> None:
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._detokenizer = detokenizer
        self._stream = TextStream(params.stop_strings)
        self._ended = False
        self.end_tokens = end_tokens(params, eos_token_ids)

    @property
    def text(self) -> str:
        return self._stream.text

    def add(self, token: int, num_tokens: int) -> tuple[str, StopReason | None]:
        """Text that this token makes certain, and why it is the last one (or None).

        Args:
            token: The new token.
            num_tokens: Tokens of the sample, this one included.
        """
        may_stop = num_tokens >= self._min_tokens
        reason: StopReason | None = None
        if may_stop and token in self.end_tokens:
            reason = "stop"  # an end token adds no text, special or not
        elif self._stream.add(self._detokenizer.add(token), may_stop=may_stop):
            reason = "stop"
            self._ended = True
        elif num_tokens >= self._max_tokens:
            reason = "length"
        if reason is None:
            return self._stream.take(ended=False), None
        return self.end(), reason

    def end(self) -> str:
        """The sample is over: text that was still held back."""
        if not self._ended:
            self._ended = True
            self._stream.add(self._detokenizer.flush(), may_stop=False)
        return self._stream.take(ended=True)


def end_tokens(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Token ids that end a sample."""
    return tuple(dict.fromkeys((*params.stop_token_ids, *(eos_token_ids if params.stops_at_eos else ()))))
