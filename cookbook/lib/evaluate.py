"""Held-out evaluation against any sampling client, the same before, during and after training.

graded = grade_answers(sampler, problems, grade, num_samples=8, max_tokens=200)
print(graded.accuracy, graded.pass_at(4))                    # with 95% intervals
print(paired(before.greedy_right, after.greedy_right))       # `estimates.paired`: the same problems twice
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trainsession as ts

from .data import Problem, weight_sum
from .estimates import Proportion, WinRate, pass_at_k

Grade = Callable[[str, str], float]
"""``grade(text, answer)``; 1 is right."""


@dataclass(frozen=True, slots=True)
class Graded:
    """Graded samples of P problems."""

    right: tuple[tuple[bool, ...], ...]
    """``right[p][i]``: sample i of problem p."""

    @property
    def accuracy(self) -> Proportion:
        """Mean over problems of the share of their samples that is right."""
        return self.pass_at(1)

    def pass_at(self, k: int) -> Proportion:
        """Mean over problems of the chance that one of k samples is right (`pass_at_k`).

        Its interval is of other problems of this kind, with as many samples.
        """
        return Proportion.of([pass_at_k(len(samples), sum(samples), k) for samples in self.right])


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of greedy answers, and of one sample per problem at temperature 1.

    RL raises the sampled figure in part by sharpening the distribution: quote the greedy one.
    """

    greedy: Proportion
    sampled: Proportion
    greedy_right: tuple[bool, ...]
    """Problem by problem, for `estimates.paired`."""


def grade_answers(
    sampler: ts.SamplingClient,
    problems: Sequence[Problem],
    grade: Grade,
    *,
    num_samples: int = 1,
    max_tokens: int,
    temperature: float = 1.0,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> Graded:
    """Answers problems and grades each answer.

    Args:
        sampler: Whose weights answer.
        problems: At least one.
        grade: ``grade(text, answer)``; 1 is right.
        num_samples: Of each problem; pass@k needs k, and is steadier with more.
        max_tokens: Of an answer.
        temperature: Of the draws; 0 is greedy.
        stop: Strings that end an answer, beside the model's end token.
        seed: Of the draws.
    """
    asked = _ask(sampler, problems, num_samples, max_tokens, temperature, stop, seed)
    return _graded(problems, asked.result(), grade)


def accuracy(
    sampler: ts.SamplingClient,
    problems: Sequence[Problem],
    grade: Grade,
    *,
    max_tokens: int,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> Accuracy:
    """How many problems are answered right, greedily and by one sample each; arguments as of `grade_answers`."""
    # Both are submitted before either is awaited: they share the decode batches.
    asked = [_ask(sampler, problems, 1, max_tokens, temperature, stop, seed) for temperature in (0.0, 1.0)]
    greedy, sampled = (_graded(problems, future.result(), grade) for future in asked)
    return Accuracy(greedy.accuracy, sampled.accuracy, tuple(right for (right,) in greedy.right))


def win_rate(
    sampler: ts.SamplingClient,
    baseline: ts.SamplingClient,
    prompts: Sequence[str],
    prefer: Callable[[str, str, str], float],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> WinRate:
    """How often one client's answer is preferred to another's.

    Args:
        sampler: Whose wins are counted.
        baseline: The other.
        prompts: At least one; both answer each.
        prefer: ``prefer(prompt, a, b)``: 1 where a is better, 0 where b is, 0.5 for a tie. It is asked in
            both orders, and an answer that wins the one and loses the other is a tie: judges like what they
            read first.
        max_tokens: Of an answer.
        temperature: Of the draws; 0 is greedy.
        stop: Strings that end an answer, beside the model's end token.
        seed: Of the draws.
    """
    problems = [Problem(prompt, "") for prompt in prompts]
    asked = [_ask(client, problems, 1, max_tokens, temperature, stop, seed) for client in (sampler, baseline)]
    ours, theirs = ([response.text for response in future.result()] for future in asked)
    scores = [
        prefer(prompt, a, b) + 1 - prefer(prompt, b, a) for prompt, a, b in zip(prompts, ours, theirs, strict=True)
    ]
    wins, losses = sum(score > 1 for score in scores), sum(score < 1 for score in scores)
    return WinRate(wins, len(scores) - wins - losses, losses)


def mean_nll(client: ts.TrainingClient | ts.SamplingClient, datums: Sequence[ts.Datum]) -> float:
    """Negative log-likelihood in nats per weighted token; the weights of ``datums`` are a mask.

    Args:
        client: Whose weights; a sampling client gives the same value as the trainer that it comes from.
        datums: Of next tokens, as `completion_datum` makes them.

    Raises:
        ValueError: targets that are not the next tokens, which a sampling client cannot score.
    """
    if isinstance(client, ts.TrainingClient):
        return client.forward(datums, "cross_entropy").result().metrics["loss:sum"] / weight_sum(datums)
    texts: list[list[int]] = []
    for number, datum in enumerate(datums):
        inputs, targets = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        if inputs[1:] != targets[:-1]:
            raise ValueError(f"datum {number}: its target_tokens are not the tokens that follow in its model_input")
        texts.append([*inputs, targets[-1]])
    total = 0.0
    for datum, logprobs in zip(datums, client.compute_logprobs(texts).result(), strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        total -= sum(float(w) * lp for w, lp in zip(weights, logprobs[1:], strict=True) if w and lp is not None)
    return total / weight_sum(datums)


def _ask(
    sampler: ts.SamplingClient,
    problems: Sequence[Problem],
    num_samples: int,
    max_tokens: int,
    temperature: float,
    stop: Sequence[str] | None,
    seed: int,
) -> ts.OperationFuture[list[ts.SampleResponse]]:
    params = ts.SamplingParams(max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed)
    return sampler.sample([problem.prompt for problem in problems], num_samples=num_samples, sampling_params=params)


def _graded(problems: Sequence[Problem], responses: Sequence[ts.SampleResponse], grade: Grade) -> Graded:
    return Graded(
        tuple(
            tuple(grade(sample.text, problem.answer) == 1 for sample in response.sequences)
            for problem, response in zip(problems, responses, strict=True)
        )
    )
