"""Staying near a reference policy: its logprobs, and the penalty for leaving it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import trainsession as ts

from .rollouts import Trajectory

Values = npt.NDArray[np.float64]


def reference_logprobs(reference: ts.SamplingClient, trajectories: Sequence[Trajectory]) -> list[Values]:
    """For each trajectory (T,): what the reference gives its tokens at temperature 1; the first has 0.

    Args:
        reference: ``trainer.base_sampling_client()``, or any other frozen policy.
    """
    if not trajectories:
        return []
    found = reference.compute_logprobs([trajectory.tokens for trajectory in trajectories]).result()
    return [np.array([value or 0.0 for value in values], dtype=np.float64) for values in found]


def mean_kl(trajectories: Sequence[Trajectory], references: Sequence[Values]) -> float:
    """KL(policy || reference) in nats per action token: the mean of ``lp - ref``, which is unbiased and may be < 0.

    Of episodes sampled at temperature 1 only, as `kl_advantages`: at another, ``lp`` is of other probabilities.
    """
    parts = [_log_ratio(one, ref)[one.is_action] for one, ref in zip(trajectories, references, strict=True)]
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(values.mean()) if values.size else 0.0


def kl_advantages(trajectories: Sequence[Trajectory], references: Sequence[Values], coefficient: float) -> list[Values]:
    """Advantages by token (T,) of the penalty ``-coefficient * KL(policy || reference)`` on whole episodes.

    The penalty is a reward of ``-coefficient * (lp - ref)`` at every action token, as in RLHF (Ouyang et al.
    2022, arXiv:2203.02155, eq. 2); a token's advantage is what is still to come, itself included, less the
    batch's mean. In expectation that is the gradient of the KL of the whole sequence.
    """
    to_go: list[Values] = []
    for trajectory, reference in zip(trajectories, references, strict=True):
        penalty = np.where(trajectory.is_action, -coefficient * _log_ratio(trajectory, reference), 0.0)
        to_go.append(np.cumsum(penalty[::-1])[::-1])
    masks = [trajectory.is_action for trajectory in trajectories]
    actions = (
        np.concatenate([values[mask] for values, mask in zip(to_go, masks, strict=True)]) if to_go else np.zeros(0)
    )
    mean = actions.mean() if actions.size else 0.0
    return [np.where(mask, values - mean, 0.0) for values, mask in zip(to_go, masks, strict=True)]


def _log_ratio(trajectory: Trajectory, reference: Values) -> Values:
    return trajectory.logprobs.astype(np.float64) - reference
