from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainsession as ts
from cookbook.lib.data import completion_datum
from cookbook.lib.rl.advantages import Advantages, dr_grpo, grpo
from cookbook.lib.rl.datums import policy_datums


@pytest.mark.parametrize("compare", [dr_grpo, grpo])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_make_no_datum(reward: float, compare: Advantages):
    assert policy_datums([1, 2], [sample([3])] * 7, compare([[reward] * 7])[0]) == []


def sample(tokens: list[int], logprobs: list[float] | None = None) -> ts.SampledSequence:
    """A sample whose logprobs depend on its tokens alone, as those of one prompt and one policy do."""
    values = logprobs or [-0.5 - token / 8 - index for index, token in enumerate(tokens)]
    return ts.SampledSequence(tokens, values, "stop")


def importance_sampling(datum: ts.Datum, policy: dict[int, float]) -> tuple[float, np.ndarray]:
    """Loss, and its gradient by the policy's logprobs (N,), in float64: -sum(exp(lp - q) A w)."""
    inputs = {name: value.to_numpy().astype(np.float64) for name, value in datum.loss_fn_inputs.items()}
    logprobs = np.array([policy[int(token)] - i / 10 for i, token in enumerate(inputs["target_tokens"])])
    terms = np.exp(logprobs - inputs["logprobs"]) * inputs["advantages"] * inputs["weights"]
    return -terms.sum(), -terms


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0])),
        min_size=2,
        max_size=16,
    )
)
def test_merging_duplicates_changes_neither_loss_nor_gradient(group: list[tuple[list[int], float]]):
    prompt, policy = [7, 8, 9], {0: -0.3, 1: -1.4, 2: -2.2, 7: -1.0, 8: -1.1, 9: -1.2}
    samples = [sample(tokens) for tokens, _ in group]
    advantages = dr_grpo([[reward for _, reward in group]])[0]
    apart = [
        completion_datum(prompt, s.tokens, logprobs=s.logprobs, advantages=float(a))
        for s, a in zip(samples, advantages, strict=True)
    ]
    merged = policy_datums(prompt, samples, advantages)

    assert len(merged) <= len({tuple(tokens) for tokens, _ in group})
    losses = [sum(importance_sampling(d, policy)[0] for d in datums) for datums in (apart, merged)]
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-5)
    gradients = [by_sequence(datums, policy) for datums in (apart, merged)]
    for tokens in gradients[0]:
        kept = gradients[1].get(tokens, np.zeros_like(gradients[0][tokens]))
        np.testing.assert_allclose(kept, gradients[0][tokens], atol=1e-5)


def by_sequence(datums: list[ts.Datum], policy: dict[int, float]) -> dict[tuple[int, ...], np.ndarray]:
    """The gradient summed over the datums of each sequence of tokens."""
    total: dict[tuple[int, ...], np.ndarray] = {}
    for datum in datums:
        key = tuple(datum.loss_fn_inputs["target_tokens"].tolist())
        gradient = importance_sampling(datum, policy)[1]
        total[key] = total[key] + gradient if key in total else gradient
    return total


def test_duplicates_keep_their_own_logprobs_and_sum_their_advantages():
    datums = policy_datums([1], [sample([5, 6]), sample([4]), sample([5, 6])], [0.25, -1.0, 0.5])
    assert [d.loss_fn_inputs["target_tokens"].tolist() for d in datums] == [[5, 6], [4]]
    assert [d.loss_fn_inputs["advantages"].tolist() for d in datums] == [[0.75, 0.75], [-1.0]]
    np.testing.assert_array_equal(datums[0].loss_fn_inputs["logprobs"].to_numpy(), sample([5, 6]).logprobs)


def test_one_advantage_per_sample():
    with pytest.raises(ValueError):
        policy_datums([1], [sample([2])], [1.0, 2.0])
