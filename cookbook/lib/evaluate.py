"""Held-out evaluation: accuracy with its uncertainty, and negative log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trainsession as ts

from .data import Problem, weight_sum


@dataclass(frozen=True, slots=True)
class Proportion:
    """``successes`` of ``total``."""

    successes: int
    total: int

    @property
    def value(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% score interval (Wilson 1927), which stays inside [0, 1] at both ends."""
        z, n, p = 1.959964, self.total, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # p, against rounding

    def __str__(self) -> str:
        low, high = self.interval
        count = f"{self.successes} of {self.total}"
        return f"{100 * self.value:.1f}% ({count}; 95% interval {100 * low:.0f}..{100 * high:.0f})"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of greedy answers, and of one sample per problem at temperature 1.

    RL raises the sampled figure in part by sharpening the distribution: quote the greedy one.
    """

    greedy: Proportion
    sampled: Proportion


def accuracy(
    sampler: ts.SamplingClient,
    problems: Sequence[Problem],
    grade: Callable[[str, str], float],
    *,
    max_tokens: int,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> Accuracy:
    """How many problems are answered right.

    Args:
        sampler: Whose weights answer.
        problems: At least one.
        grade: ``grade(text, answer)``; 1 is right.
        max_tokens: Of an answer.
        stop: Strings that end an answer, beside the model's end token.
        seed: Of the sampled answers.
    """
    prompts = [problem.prompt for problem in problems]
    # Both are submitted before either is awaited: they share the decode batches.
    answers = [
        sampler.sample(
            prompts,
            num_samples=1,
            sampling_params=ts.SamplingParams(max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed),
        )
        for temperature in (0.0, 1.0)
    ]
    greedy, sampled = (
        Proportion(
            sum(
                grade(response.text, problem.answer) == 1
                for problem, response in zip(problems, future.result(), strict=True)
            ),
            len(problems),
        )
        for future in answers
    )
    return Accuracy(greedy, sampled)


def mean_nll(trainer: ts.TrainingClient, datums: Sequence[ts.Datum]) -> float:
    """Negative log-likelihood in nats per weighted token; the weights of ``datums`` are a mask."""
    output = trainer.forward(datums, "cross_entropy").result()
    return output.metrics["loss:sum"] / weight_sum(datums)
