"""Learning rates: plain functions of the step, since every `optim_step` is given its own."""

from __future__ import annotations

import math


def cosine(step: int, total: int, *, warmup: int = 0) -> float:
    """The factor of a linear warm-up followed by half a cosine down to zero.

    Args:
        step: From 0 to ``total - 1``.
        total: Steps in all.
        warmup: Steps of the rise: the first has the factor ``1 / warmup``.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
