"""Stop strings and the text of a stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.sampler.stopping import StopCondition
from trainsession.types import SamplingParams


class Letters:
    """Token ``i`` is the letter ``chr(97 + i)``; nothing is held back."""

    def add(self, token_id: int) -> str:
        return chr(97 + token_id)

    def flush(self) -> str:
        return ""


def run(
    text: str, params: SamplingParams, *, max_tokens: int = 100, eos: tuple[int, ...] = ()
) -> tuple[list[str], str, str, int]:
    """Deltas, whole text, reason and number of tokens."""
    condition = StopCondition(params, max_tokens, eos, Letters())
    deltas = []
    for count, letter in enumerate(text, start=1):
        delta, reason = condition.add(ord(letter) - 97, count)
        deltas.append(delta)
        if reason:
            return deltas, condition.text, reason, count
    deltas.append(condition.end())
    return deltas, condition.text, "none", len(text)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_streamed_text_ends_before_the_first_stop_string(text: str, stops: list[str], min_tokens: int) -> None:
    deltas, whole, reason, count = run(text, SamplingParams(stop=stops, min_tokens=min_tokens))
    assert "".join(deltas) == whole
    # Independently: the first number of tokens (>= min_tokens) whose text ends with a stop string.
    ends = [n for n in range(max(min_tokens, 1), len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert (reason, count, whole) == ("stop", ends[0], text[: ends[0] - longest])
    else:
        assert (reason, whole) == ("none", text)


@pytest.mark.parametrize(
    ("stop", "ignore_eos", "expected"),
    [
        (None, False, ("ab", "stop", 3)),
        ([], False, ("abcd", "length", 4)),
        (None, True, ("abcd", "length", 4)),
        ([3], False, ("ab", "stop", 3)),
        ([3], True, ("abc", "stop", 4)),
        (3, True, ("abc", "stop", 4)),
        ("b", False, ("a", "stop", 2)),
        (["d", 1], False, ("a", "stop", 2)),
        (["cd", 25], True, ("ab", "stop", 4)),
    ],
)
def test_stops_of_every_kind(stop: object, ignore_eos: bool, expected: tuple[str, str, int]) -> None:
    params = SamplingParams(stop=stop, ignore_eos=ignore_eos)  # type: ignore[arg-type]
    _, text, reason, count = run("abcd", params, max_tokens=4, eos=(2,))
    assert (text, reason, count) == expected


def test_a_stop_string_may_span_tokens_and_begin_inside_one() -> None:
    class Pieces:
        def add(self, token_id: int) -> str:
            return ["Hello w", "orl", "d! More"][token_id]

        def flush(self) -> str:
            return ""

    condition = StopCondition(SamplingParams(stop=["world!"]), 10, (), Pieces())
    assert condition.add(0, 1) == ("Hello ", None)
    assert condition.add(1, 2) == ("", None)
    assert condition.add(2, 3) == ("", "stop")
    assert condition.text == "Hello "


def test_what_the_detokenizer_held_back_comes_at_the_end() -> None:
    class HalfACharacter:
        def add(self, token_id: int) -> str:
            return ""

        def flush(self) -> str:
            return "\ufffd"

    condition = StopCondition(SamplingParams(), 1, (), HalfACharacter())
    assert condition.add(0, 1) == ("\ufffd", "length")
    assert condition.text == "\ufffd"
