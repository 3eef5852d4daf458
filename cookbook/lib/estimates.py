"""What a number of graded answers says: proportions with intervals, pass@k, and two runs compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

Z = 1.959964  # two-sided 95%


@dataclass(frozen=True, slots=True)
class Proportion:
    """``successes`` of ``total``; the sum of scores between 0 and 1 is as good."""

    successes: float
    total: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> Self:
        """The mean of scores.

        Raises:
            ValueError: no scores, or one that is not between 0 and 1.
        """
        if not scores or not all(0 <= score <= 1 for score in scores):
            raise ValueError(f"expected scores between 0 and 1, got {list(scores)[:5]}")
        return cls(math.fsum(scores), len(scores))

    @property
    def value(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% score interval (Wilson 1927), which stays inside [0, 1] at both ends.

        For yes or no it covers about 95%; for scores between (pass@k, wins with ties) more, as those vary less.
        """
        n, p = self.total, self.value
        centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # p, against rounding

    def __str__(self) -> str:
        low, high = self.interval
        count = f"{self.successes:.10g} of {self.total}"
        return f"{100 * self.value:.1f}% ({count}; 95% interval {100 * low:.0f}..{100 * high:.0f})"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples, taken from these without replacement, is right.

    Unbiased for the chance that one of k new samples is (Chen et al. 2021, arXiv:2107.03374, eq. 1);
    1 - (1 - right / samples)**k is not.

    Args:
        samples: n >= k samples of one problem.
        right: c of them are right.
        k: At least 1.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and no more right ones: {right} of {samples} are right")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs on the same problems. What both got right or wrong says nothing of their difference."""

    gained: int
    """Right in the second run only."""
    lost: int
    """Right in the first run only."""
    total: int

    @property
    def difference(self) -> float:
        """Of the accuracies, second less first."""
        return (self.gained - self.lost) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95%, of the difference: the adjusted Wald interval for paired proportions.

        Bonett and Price 2012, Journal of Educational and Behavioral Statistics 37(4), 479-488.
        """
        n = self.total + 2
        gained, lost = (self.gained + 1) / n, (self.lost + 1) / n
        centre, half = gained - lost, Z * math.sqrt((gained + lost - (gained - lost) ** 2) / n)
        return max(-1.0, centre - half), min(1.0, centre + half)

    @property
    def p_value(self) -> float:
        """Two-sided, of McNemar's exact test: how often a fair coin splits the changed problems as unevenly."""
        return sign_test(self.gained, self.lost)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{100 * self.difference:+.1f} points ({self.gained} gained, {self.lost} lost of {self.total}; "
            f"95% interval {100 * low:+.1f}..{100 * high:+.1f}; exact McNemar p = {self.p_value:.2g})"
        )


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Compares two runs on the same problems, in the same order.

    Raises:
        ValueError: none, or not as many of one as of the other.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"two runs on the same problems are compared, got {len(first)} and {len(second)} results")
    changes = [bool(after) - bool(before) for before, after in zip(first, second, strict=True)]
    return Paired(changes.count(1), changes.count(-1), len(changes))


@dataclass(frozen=True, slots=True)
class WinRate:
    """One client's answers beside another's."""

    wins: int
    ties: int
    losses: int

    @property
    def rate(self) -> Proportion:
        """A tie is half a win."""
        return Proportion(self.wins + self.ties / 2, self.wins + self.ties + self.losses)

    @property
    def p_value(self) -> float:
        """Two-sided, of the exact sign test: ties say nothing."""
        return sign_test(self.wins, self.losses)

    def __str__(self) -> str:
        return f"{self.rate}, {self.ties} ties, exact sign test p = {self.p_value:.2g}"


def sign_test(more: int, less: int) -> float:
    """How likely a fair coin, thrown ``more + less`` times, is as uneven as this or more."""
    n = more + less
    ways = tail = 1  # of n throws, none of the rarer side; then at most 1, 2, ...
    for count in range(min(more, less)):
        ways = ways * (n - count) // (count + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)
