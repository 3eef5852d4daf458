"""Estimates against enumeration, their defining equations and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest

from cookbook.lib.estimates import Paired, Proportion, WinRate, Z, paired, pass_at_k, sign_test


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, c: int):
    samples = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = [any(subset) for subset in combinations(samples, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.93])
def test_pass_at_k_is_unbiased_and_the_obvious_estimate_is_not(p: float):
    """Its expectation over the number of right samples is the chance that one of k new ones is right."""
    n, k = 10, 4
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    true = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights)) == pytest.approx(true, abs=1e-12)
    obvious = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert p == 0 or obvious < true - 1e-3 or p > 0.9


def test_pass_at_k_of_many_samples_is_exact():
    n, c, k = 10_000, 3, 2_000
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_needs_enough_samples(n: int, c: int, k: int):
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("scores", [[], [0.5, 1.5], [math.nan], [-0.1]])
def test_a_proportion_is_of_scores_between_0_and_1(scores: list[float]):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Proportion.of(scores)


def test_a_proportion_of_fractions_says_so():
    share = Proportion.of([1, 0.5, 0.25])
    assert (share.value, str(share).split(";")[0]) == (pytest.approx(1.75 / 3), "58.3% (1.75 of 3")


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_the_interval_covers_what_it_says(p: float):
    """Over all outcomes of 60 answers; Wilson's covers 95% on average, and here never less than 92%."""
    n = 60
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    bounds = [Proportion(c, n).interval for c in range(n + 1)]
    covered = sum(w for w, (low, high) in zip(weights, bounds, strict=True) if low <= p <= high)
    assert 0.92 < covered < 0.99


def test_ties_make_the_interval_of_a_win_rate_wider_than_needed_never_narrower():
    n, win, tie = 40, 0.3, 0.4
    truth, covered = win + tie / 2, 0.0
    for wins in range(n + 1):
        for ties in range(n - wins + 1):
            losses = n - wins - ties
            ways = math.factorial(n) / math.factorial(wins) / math.factorial(ties) / math.factorial(losses)
            low, high = WinRate(wins, ties, losses).rate.interval
            covered += ways * win**wins * tie**ties * (1 - win - tie) ** losses * (low <= truth <= high)
    assert 0.95 < covered <= 1


def test_paired_counts_what_changed():
    first, second = [True, True, False, False, True], [True, False, True, True, True]
    assert paired(first, second) == Paired(gained=2, lost=1, total=5)
    assert paired(first, second).difference == pytest.approx(np.mean(second) - np.mean(first))
    assert paired(first, first) == Paired(0, 0, 5)
    assert paired(first, first).p_value == 1
    with pytest.raises(ValueError, match="got 5 and 4 results"):
        paired(first, second[:4])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired([], [])


@pytest.mark.parametrize(("more", "less"), [(0, 0), (1, 0), (5, 5), (8, 2), (3, 10), (12, 0)])
def test_the_sign_test_enumerates_coins(more: int, less: int):
    n = more + less
    uneven = [abs(2 * sum(coins) - n) >= abs(more - less) for coins in product((0, 1), repeat=n)]
    assert sign_test(more, less) == pytest.approx(sum(uneven) / len(uneven), abs=1e-15)


def test_the_sign_test_of_thousands_is_a_number():
    # The normal approximation, with the correction for continuity.
    assert sign_test(3000, 2800) == pytest.approx(math.erfc(199 / math.sqrt(5800) / math.sqrt(2)), rel=1e-3)
    assert sign_test(1000, 0) == 2.0**-999


def test_the_interval_of_a_difference():
    """The published example of the adjusted Wald interval, by its formula in float64, and its coverage."""
    change = Paired(gained=9, lost=2, total=38)
    p12, p21 = np.float64(10) / 40, np.float64(3) / 40
    half = Z * np.sqrt((p12 + p21 - (p12 - p21) ** 2) / 40)
    assert change.interval == pytest.approx((p12 - p21 - half, p12 - p21 + half), abs=1e-12)
    n, gain, loss, covered = 40, 0.25, 0.1, 0.0
    for gained in range(n + 1):
        for lost in range(n - gained + 1):
            ways = math.comb(n, gained) * math.comb(n - gained, lost)
            low, high = Paired(gained, lost, n).interval
            chance = ways * gain**gained * loss**lost * (1 - gain - loss) ** (n - gained - lost)
            covered += chance * (low <= gain - loss <= high)
    assert 0.94 < covered < 0.98
    low, high = Paired(3, 0, 3).interval
    assert -1 <= low < 0 < high <= 1


def test_texts_have_the_numbers():
    assert str(Paired(9, 2, 38)).startswith("+18.4 points (9 gained, 2 lost of 38; 95% interval ")
    assert str(Paired(9, 2, 38)).endswith("exact McNemar p = 0.065)")
    assert str(WinRate(6, 2, 2)).startswith("70.0% (7 of 10; 95% interval 40..89), 2 ties, exact sign test p = 0.29")
