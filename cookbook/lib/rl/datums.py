"""From samples and trajectories to the datums of a policy-gradient step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import trainsession as ts

from ..data import completion_datum
from .rollouts import Trajectory, TrajectoryGroup


def policy_datums(
    prompt: Sequence[int], samples: Sequence[ts.SampledSequence], advantages: Sequence[float] | npt.NDArray[np.float64]
) -> list[ts.Datum]:
    """Datums for ``importance_sampling``, ``ppo`` or ``cispo`` from one prompt's samples.

    The same sample drawn twice is trained once with the summed advantage: both copies have the
    same logprobs, and the importance-sampling loss is linear in the advantage, so loss and
    gradient stay the same and short answers cost a fraction of the time. A clipped loss clips by
    the advantage's sign, which a sum of equal-reward copies keeps. Samples without advantage
    carry no gradient and are left out, so an evenly rewarded group gives no datum at all.

    Args:
        prompt: Token ids.
        samples: G samples of it.
        advantages: One per sample, spread over its tokens.
    """
    merged: dict[tuple[int, ...], float] = {}
    first: dict[tuple[int, ...], ts.SampledSequence] = {}
    for sample, advantage in zip(samples, advantages, strict=True):
        key = tuple(sample.tokens)
        merged[key] = merged.get(key, 0.0) + float(advantage)
        first.setdefault(key, sample)
    return [
        completion_datum(prompt, sample.tokens, logprobs=sample.logprobs, advantages=merged[key])
        for key, sample in first.items()
        if merged[key] != 0.0
    ]


def trajectory_datum(
    trajectory: Trajectory, advantages: float | npt.NDArray[np.float64], *, temperature: float = 1.0
) -> ts.Datum:
    """One datum of a whole episode; the loss sees the policy's own tokens only.

    Args:
        trajectory: With T tokens in all.
        advantages: One for every action token, or (T,) values of which those of the actions count.
        temperature: That the actions were sampled at, if it is neither 0 nor 1: their logprobs are of
            ``softmax(logits / temperature)``, and so must be those that they are compared with.
    """
    tokens = np.asarray(trajectory.tokens, dtype=np.int64)
    mask = trajectory.is_action.astype(np.float32)
    inputs = {
        "target_tokens": tokens[1:],
        "weights": mask[1:],
        "logprobs": trajectory.logprobs[1:],
        "advantages": (np.broadcast_to(advantages, tokens.shape) * mask).astype(np.float32)[1:],
    }
    if temperature not in (0.0, 1.0):
        inputs["temperature"] = np.float32(temperature)
    return ts.Datum(ts.ModelInput.from_ints(tokens[:-1]), inputs)


def group_datums(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[npt.NDArray[np.float64]],
    *,
    token_advantages: Sequence[Sequence[npt.NDArray[np.float64]]] | None = None,
    temperature: float = 1.0,
) -> list[ts.Datum]:
    """The datums of all trajectories that have an advantage.

    Args:
        groups: What was rolled out.
        advantages: By group, one per trajectory (`advantages`).
        token_advantages: By group and trajectory, (T,) more by token (`kl.kl_advantages`).
        temperature: As of `trajectory_datum`.
    """
    datums: list[ts.Datum] = []
    for index, (group, values) in enumerate(zip(groups, advantages, strict=True)):
        for place, (trajectory, value) in enumerate(zip(group.trajectories, values, strict=True)):
            by_token = np.full(len(trajectory.tokens), value, dtype=np.float64)
            if token_advantages is not None:
                by_token = by_token + token_advantages[index][place]
            if (by_token[trajectory.is_action] != 0).any():
                datums.append(trajectory_datum(trajectory, by_token, temperature=temperature))
    return datums
