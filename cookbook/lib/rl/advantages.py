"""Advantages: how much better an episode was than what was to be expected, without a value network.

Each takes the rewards of a batch, group by group, and returns an advantage for each of them. One per
episode; `datums` spreads it over the episode's tokens. `ADVANTAGES` has them by name, for a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Rewards = Sequence[Sequence[float]]


def dr_grpo(groups: Rewards) -> list[Values]:
    """Less the group's mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    return [_centred(group) for group in groups]


def grpo(groups: Rewards) -> list[Values]:
    """Also divided by the group's standard deviation: GRPO (Shao et al. 2024, arXiv:2402.03300, 4.1.2).

    That gives more weight to problems which are nearly always or nearly never solved.
    """
    return [_divided(values, values) for values in dr_grpo(groups)]


def rloo(groups: Rewards) -> list[Values]:
    """Less the mean of the group's other rewards (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    One alone, as where the others of its group failed, has nothing to be compared with: 0.
    """
    return [_centred(group) * len(group) / max(1, len(group) - 1) for group in groups]


def reinforce_pp(groups: Rewards) -> list[Values]:
    """Less the batch's mean, divided by its standard deviation: REINFORCE++ (Hu 2025, arXiv:2501.03262).

    Groups play no part, so one sample of each prompt is enough.
    """
    centred = _centred(_flat(groups).tolist())
    return _like(groups, _divided(centred, centred))


def reinforce_pp_baseline(groups: Rewards) -> list[Values]:
    """Less the group's mean, then divided by the batch's standard deviation: the same paper's variant for groups."""
    centred = dr_grpo(groups)
    return [_divided(values, np.concatenate(centred)) for values in centred]


class MovingBaseline:
    """REINFORCE with the running mean of the rewards so far as its baseline (Williams 1992).

    Args:
        decay: Of the mean, by batch. The first batch is compared with its own mean.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.mean: float | None = None

    def __call__(self, groups: Rewards) -> list[Values]:
        rewards = _flat(groups)
        if rewards.size == 0:
            return [np.zeros(0) for _ in groups]
        baseline = float(rewards.mean()) if self.mean is None else self.mean
        self.mean = self.decay * baseline + (1 - self.decay) * float(rewards.mean())
        return _like(groups, rewards - baseline)


Advantages = Callable[[Rewards], list[Values]]
ADVANTAGES: Mapping[str, Advantages] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether they differ by no more than rounding does, as in sums of the same parts in another order."""
    values = np.asarray(rewards, dtype=np.float64)
    return values.size == 0 or bool(np.ptp(values) <= 1e-9 * np.abs(values).max())


def _centred(group: Sequence[float]) -> Values:
    """Equal rewards have exactly no advantage: what rounding leaves, a division would make as large as any."""
    values = np.asarray(group, dtype=np.float64)
    return np.zeros_like(values) if are_equal(group) else values - values.mean()


def _divided(values: Values, by: Values) -> Values:
    """By the standard deviation of ``by``, if it has one."""
    deviation = by.std() if by.size else 0.0
    return values / deviation if deviation > 0 else values


def _flat(groups: Rewards) -> Values:
    return np.concatenate([np.asarray(group, dtype=np.float64) for group in groups]) if groups else np.zeros(0)


def _like(groups: Rewards, values: Values) -> list[Values]:
    return np.split(values, np.cumsum([len(group) for group in groups])[:-1]) if groups else []
