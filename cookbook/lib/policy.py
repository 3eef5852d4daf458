"""Group advantages and the datums of a policy-gradient step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import trainsession as ts

from .data import completion_datum


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool = False) -> npt.NDArray[np.float64]:
    """Each sample's reward less its group's mean, shape (G,).

    GRPO (Shao et al. 2024, eq. 4 of arXiv:2402.03300) also divides by the group's standard
    deviation, which gives more weight to prompts that are nearly always or nearly never solved;
    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) leaves it out, and so does the default here.
    A group of equal rewards has exactly zero advantages, with or without the division.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or (values == values[0]).all():
        return np.zeros_like(values)
    advantages = values - values.mean()
    return advantages / values.std() if divide_by_std else advantages


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
