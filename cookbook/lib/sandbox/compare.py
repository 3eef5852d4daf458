"""Whether what a program printed is the expected output."""

from __future__ import annotations

import math
import re

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
INTEGER = re.compile(r"[+-]?\d+")


def same_output(expected: str, actual: str, tolerance: float | None = None) -> bool:
    """Compared word for word, whatever the space between them.

    Args:
        expected: Of the test.
        actual: Of the program.
        tolerance: For expected numbers that are no integers: the error, absolute or relative, that is allowed.
    """
    left, right = expected.split(), actual.split()
    return len(left) == len(right) and all(_same_word(*pair, tolerance) for pair in zip(left, right, strict=True))


def _same_word(expected: str, actual: str, tolerance: float | None) -> bool:
    if tolerance is None or not NUMBER.fullmatch(expected) or INTEGER.fullmatch(expected):
        return expected == actual
    # The pattern keeps out what `float` would take: nan, inf, 1_000.
    return bool(NUMBER.fullmatch(actual)) and math.isclose(
        float(expected), float(actual), rel_tol=tolerance, abs_tol=tolerance
    )
