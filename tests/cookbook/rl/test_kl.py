from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

import trainsession as ts
from cookbook.lib.rl.env import Step
from cookbook.lib.rl.kl import kl_advantages, mean_kl
from cookbook.lib.rl.rollouts import Trajectory, Turn

Table = npt.NDArray[np.float64]
LENGTH, VOCABULARY = 3, 2


def log_softmax(x: Table) -> Table:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def of(tokens: tuple[int, ...], logits: Table) -> Table:
    """Logprobs of a policy whose logits depend on position and the token before, (position, before, token)."""
    table = log_softmax(logits)
    before = (0, *tokens[:-1])
    return np.array([table[i, b, t] for i, (b, t) in enumerate(zip(before, tokens, strict=True))])


def kl(logits: Table, reference: Table) -> float:
    """KL of whole sequences, by enumeration."""
    total = 0.0
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        mine, theirs = of(tokens, logits).sum(), of(tokens, reference).sum()
        total += np.exp(mine) * (mine - theirs)
    return total


def test_in_expectation_the_advantages_give_the_gradient_of_the_kl():
    """The policy gradient of every possible episode, weighted by its probability, against finite differences."""
    draw = np.random.default_rng(0)
    logits, reference = draw.normal(size=(2, LENGTH, VOCABULARY, VOCABULARY))
    coefficient = 0.3
    sequences = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    trajectories, references = [], []
    for tokens in sequences:
        action = ts.SampledSequence(list(tokens), of(tokens, logits).tolist(), "stop")
        trajectories.append(Trajectory([Turn([9, 9], action, Step())]))
        references.append(np.concatenate([np.zeros(2), of(tokens, reference)]))
    advantages = kl_advantages(trajectories, references, coefficient)

    gradient = np.zeros_like(logits)
    for tokens, values in zip(sequences, advantages, strict=True):
        assert (values[:2] == 0).all()
        probability = np.exp(of(tokens, logits).sum())
        for i, (before, token) in enumerate(zip((0, *tokens[:-1]), tokens, strict=True)):
            score = -np.exp(log_softmax(logits)[i, before])
            score[token] += 1
            gradient[i, before] += probability * values[2 + i] * score

    expected = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        up, down = logits.copy(), logits.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        expected[place] = -coefficient * (kl(up, reference) - kl(down, reference)) / 2e-5
    assert np.abs(expected).max() > 0.01
    # Trajectories hold float32 logprobs.
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_the_mean_counts_action_tokens_only():
    action = ts.SampledSequence([1, 2], [-1.0, -2.0], "stop")
    trajectory = Trajectory([Turn([5], action, Step(observation=[7])), Turn([7], action, Step())])
    reference = np.array([0.0, -1.5, -2.5, -9.0, -1.0, -3.0])
    assert mean_kl([trajectory], [reference]) == (0.5 + 0.5 + 0.0 + 1.0) / 4
    assert mean_kl([], []) == 0.0
    assert kl_advantages([], [], 1.0) == []
