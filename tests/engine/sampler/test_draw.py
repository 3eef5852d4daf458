"""Draws against float64 formulas written here a second time, in plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.sampler.sampling import Row, draw, topk_logprobs, truncate, uniform
from trainsession.types import SamplingParams

Array = npt.NDArray[np.float64]


def reference_truncate(probs: Array, params: SamplingParams) -> Array:
    """One row: rank by (probability, lowest id), then keep a prefix of the ranking."""
    ranking = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    if params.top_p < 1:
        # With top-k, p is relative to what top-k left. Sums in the order of the ranking.
        total = np.cumsum(probs[ranking])[-1] if 0 < params.top_k < len(probs) else np.cumsum(probs)[-1]
        kept, mass = [], 0.0
        for token in ranking:
            if kept and mass >= params.top_p * total:
                break
            kept.append(token)
            mass += probs[token]
        ranking = kept
    floor = params.min_p * probs.max()
    out = np.zeros_like(probs)
    for token in ranking:
        if probs[token] >= floor:
            out[token] = probs[token]
    return out


params_of_a_row = st.builds(
    SamplingParams,
    top_k=st.sampled_from([-1, -1, 1, 2, 3, 7, 1000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
)
# Sixteenths add exactly, so that boundaries are hit and ties are frequent.
weights = st.lists(st.integers(0, 4), min_size=12, max_size=12).filter(any)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(weights, params_of_a_row), min_size=1, max_size=4))
def test_truncation_keeps_exactly_the_smallest_set(rows: list[tuple[list[int], SamplingParams]]) -> None:
    probs = np.array([weights for weights, _ in rows], dtype=np.float64) / 16
    actual = torch.from_numpy(probs.copy())
    truncate(actual, [params for _, params in rows])
    for row, (_, params) in enumerate(rows):
        np.testing.assert_array_equal(actual[row].numpy(), reference_truncate(probs[row], params))


def test_top_p_over_a_flat_vocabulary_looks_past_the_first_candidates() -> None:
    random = np.random.default_rng(0)
    probs = random.random(5_000)
    probs /= probs.sum()
    params = SamplingParams(top_p=0.95)
    actual = torch.from_numpy(probs[None].copy())
    truncate(actual, [params])
    np.testing.assert_array_equal(actual[0].numpy(), reference_truncate(probs, params))


def row(number: float = 0.5, *, prompt: Any = (), output: Any = (), **params: Any) -> Row:
    return Row(SamplingParams(**params), number, prompt, output)


def test_penalties_and_bias_come_before_logprobs() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, 3.0])
    params = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {4: -2.5, 0: 1.0},
    }
    drawn = draw(
        torch.tensor(logits[None], dtype=torch.float32),
        [row(0.5, prompt=[1], output=[0, 2, 2], temperature=0.7, **params)],
    )[0]
    expected = logits.copy()
    for token in (0, 1, 2):  # prompt and output
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[0] -= 0.4 + 0.2 * 1
    expected[2] -= 0.4 + 0.2 * 2
    expected[4] -= 2.5
    expected[0] += 1.0
    scaled = expected / 0.7
    logprobs = scaled - np.log(np.exp(scaled).sum())
    assert drawn.logprob == pytest.approx(logprobs[drawn.token], abs=1e-6)
    cumulative = np.cumsum(np.exp(logprobs))
    assert drawn.token == int(np.searchsorted(cumulative, 0.5, side="right"))


def test_the_draw_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    count = 20_000
    rows = [row(uniform(7, position)) for position in range(count)]
    tokens = [drawn.token for drawn in draw(logits.expand(count, -1), rows)]
    observed = np.bincount(tokens, minlength=5)
    expected = torch.softmax(logits[0].double(), -1).numpy() * count
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    assert chi_squared < 18.5  # 4 degrees of freedom: p = 0.001


@pytest.mark.parametrize("vocabulary", [5, 256, 1_001, 49_152])
def test_the_draw_inverts_the_cumulative_distribution(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocabulary, generator=generator) * 4
    logits[:, : vocabulary // 3] = -math.inf  # whole parts of the vocabulary that cannot be drawn
    probs = torch.softmax(logits[0].double(), -1).numpy()
    cumulative = np.cumsum(probs)
    numbers = [0.0, 1 - 2.0**-48, *(uniform(3, position) for position in range(300))]
    for number, drawn in zip(numbers, draw(logits.expand(len(numbers), -1), [row(n) for n in numbers]), strict=True):
        assert probs[drawn.token] > 0
        # float32 sums: the number may lie on the other side of a boundary that it all but touches.
        assert cumulative[drawn.token] - probs[drawn.token] - 2e-6 <= number <= cumulative[drawn.token] + 2e-6


def test_uniform_numbers_are_uniform_and_belong_to_their_counter() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 / math.sqrt(12 * len(numbers))
    assert len(set(numbers.tolist())) == len(numbers)
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_temperature_zero_takes_the_lowest_id_of_equals_with_the_logprob_of_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    drawn = draw(logits, [row(temperature=0)])[0]
    assert drawn.token == 1
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits.double(), -1)[0, 1]))


def test_logprobs_are_taken_before_truncation() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9, 1.0]])
    whole = torch.log_softmax(logits.double() / 0.6, -1)[0]
    for params in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        drawn = draw(logits, [row(temperature=0.6, **params)])[0]
        assert (drawn.token, drawn.logprob) == (1, pytest.approx(float(whole[1]), abs=1e-6))


def test_a_banned_token_is_never_drawn_and_the_others_keep_their_logprob() -> None:
    logits = torch.tensor([[50.0, 1.0, 0.0]])
    for temperature in (0.0, 1.0):
        for number in (0.0, 0.3, 1 - 2.0**-48):
            params = SamplingParams(temperature=temperature)
            drawn = draw(logits, [Row(params, number, [], [], banned=(0,))])[0]
            assert drawn.token in (1, 2)
            assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits.double(), -1)[0, drawn.token]))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-48])
def test_a_token_of_probability_zero_is_never_drawn(number: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 0.0, -math.inf]])
    drawn = draw(logits, [row(number)])[0]
    assert drawn.token in (1, 3)
    assert math.isfinite(drawn.logprob)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_show_in_their_own_row_only(bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}):
        broken, sound = draw(logits, [row(0.4, **params), row(0.4, **params)])
        assert not math.isfinite(broken.logprob)
        assert sound == draw(logits[1:], [row(0.4, **params)])[0]


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 1_001, generator=generator) * 4
    choices: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.7},
        {"min_p": 0.02},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    rows = [Row(SamplingParams(**choices[i % 6]), uniform(i, 0), [1, 2, 3], [4, 5], topk=i % 3) for i in range(40)]
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    backwards = draw(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


def test_equal_alternatives_are_listed_by_id() -> None:
    logprobs = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25]]))
    assert [token for token, _ in topk_logprobs(logprobs, [4])[0]] == [0, 1, 2, 3]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    draw(logits, [row(temperature=0.5, logit_bias={1: 3.0}, top_k=2), row(temperature=0)])
    assert torch.equal(logits, before)
