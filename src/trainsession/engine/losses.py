"""The built-in losses: plain functions over the flat target tokens of many datums.

Every loss is a sum over tokens and datums, never a mean, so that gradients of ``fb(A + B)`` equal
those of ``fb(A); fb(B)`` however a batch is cut. Formulas, with ``lp`` the model's logprobs, ``q``
the sampler's, ``A`` advantages, ``r = exp(lp - q)``, ``sg`` stop-gradient and ``w`` weights:

    cross_entropy        -(w * lp)
    importance_sampling  -(w * r * A)
    ppo                  -(w * min(r * A, clip(r, low, high) * A))           (Schulman et al. 2017)
    cispo                -(w * sg(clip(r, low, high)) * lp * A)              (MiniMax-M1, 2025)
    dro                  -(w * (lp * A - beta / 2 * (lp - q)**2))            (Richemond et al. 2024)
    gspo                 ppo's, with r = sg(s) * exp(lp - sg(lp)) and        (Zheng et al. 2025)
                         s = exp(mean of lp - q over the sequence's ratio mask)

Values are float64 on the CPU: a ratio of exp(91) overflows float32, and these vectors are tiny
beside the logits. What is masked is left out by selection before any exp, never multiplied by zero.

Shapes: M target tokens (entries) of D datums, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Flat loss inputs; all (M,) and of one float dtype but for ``datum_M``."""

    logprobs_M: torch.Tensor
    """The model's; gradients are taken with respect to these."""
    weights_M: torch.Tensor
    datum_M: torch.Tensor
    """int64: which datum an entry belongs to, 0 to D - 1."""
    num_datums: int
    sampler_logprobs_M: torch.Tensor | None = None
    advantages_M: torch.Tensor | None = None
    ratio_mask_M: torch.Tensor | None = None
    """gspo's; None means ``weights_M``."""


@dataclass(frozen=True, slots=True)
class LossValue:
    """Loss per entry (M,), weights applied, and what the metrics of RL losses need (else None).

    ``log_ratio_M`` is ``lp - q``; ``ratio_M`` is what the loss multiplies with (gspo: the
    sequence's); ``clipped_M`` marks entries that the clip holds: for ppo and gspo those whose
    gradient it removed, for cispo those whose ratio lay outside. Zero, one and False where masked.
    """

    loss_M: torch.Tensor
    log_ratio_M: torch.Tensor | None = None
    ratio_M: torch.Tensor | None = None
    clipped_M: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _RlTokens:
    """The RL inputs with every masked entry replaced by a harmless one."""

    logprobs_M: torch.Tensor
    log_ratio_M: torch.Tensor
    advantages_M: torch.Tensor


def _kept(batch: TokenBatch) -> torch.Tensor:
    return batch.weights_M != 0


def _rl_tokens(batch: TokenBatch) -> _RlTokens:
    assert batch.sampler_logprobs_M is not None
    assert batch.advantages_M is not None
    keep, zero = _kept(batch), batch.logprobs_M.new_zeros(())
    logprobs = torch.where(keep, batch.logprobs_M, zero)
    return _RlTokens(
        logprobs,
        logprobs - torch.where(keep, batch.sampler_logprobs_M, zero),
        torch.where(keep, batch.advantages_M, zero),
    )


def _weighted(batch: TokenBatch, loss_M: torch.Tensor) -> torch.Tensor:
    return torch.where(_kept(batch), loss_M * batch.weights_M, 0.0)


def _ratio_times_advantage(log_ratio_M: torch.Tensor, advantages_M: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio) * A``, exactly zero (not inf * 0) where the advantage is zero."""
    live = advantages_M != 0
    return torch.where(live, torch.exp(torch.where(live, log_ratio_M, 0.0)) * advantages_M, 0.0)


def _clipped_objective(
    log_ratio_M: torch.Tensor, advantages_M: torch.Tensor, config: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's ``min(r * A, clip(r) * A)`` and where the clip decides.

    Written as a choice between the two, because autograd through ``min`` multiplies an infinite
    ratio's gradient by zero.
    """
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    ratio_M = torch.exp(log_ratio_M.detach())
    clipped_M = torch.where(advantages_M > 0, ratio_M > high, ratio_M < low) & (advantages_M != 0)
    free_M = _ratio_times_advantage(torch.where(clipped_M, 0.0, log_ratio_M), advantages_M)
    return torch.where(clipped_M, ratio_M.clamp(low, high) * advantages_M, free_M), clipped_M


def cross_entropy(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """``-(w * lp)``; with K soft targets a position has K entries."""
    return LossValue(_weighted(batch, -torch.where(_kept(batch), batch.logprobs_M, 0.0)))


def importance_sampling(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """``-(w * r * A)``."""
    rl = _rl_tokens(batch)
    loss_M = -_ratio_times_advantage(rl.log_ratio_M, rl.advantages_M)
    return _rl_value(batch, rl, loss_M, torch.zeros_like(_kept(batch)))


def ppo(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """``-(w * min(r * A, clip(r, low, high) * A))``; thresholds are ratios (0.8, 1.2)."""
    rl = _rl_tokens(batch)
    objective_M, clipped_M = _clipped_objective(rl.log_ratio_M, rl.advantages_M, config)
    return _rl_value(batch, rl, -objective_M, clipped_M)


def cispo(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """``-(w * sg(clip(r, low, high)) * lp * A)``; thresholds default to 0 and 4: one-sided."""
    rl = _rl_tokens(batch)
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    ratio_M = torch.exp(rl.log_ratio_M.detach())
    loss_M = -(ratio_M.clamp(low, high) * rl.logprobs_M * rl.advantages_M)
    return _rl_value(batch, rl, loss_M, (ratio_M < low) | (ratio_M > high))


def dro(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """``-(w * (lp * A - beta / 2 * (lp - q)**2))``."""
    rl = _rl_tokens(batch)
    loss_M = -(rl.logprobs_M * rl.advantages_M - 0.5 * config["beta"] * rl.log_ratio_M**2)
    return _rl_value(batch, rl, loss_M, torch.zeros_like(_kept(batch)))


def gspo(batch: TokenBatch, config: Mapping[str, float]) -> LossValue:
    """PPO's clip on the sequence's ratio: the geometric mean of its tokens' ratios.

    The mean is weighted by ``sequence_ratio_mask`` (default: ``weights``); a sequence whose mask
    is all zero has ratio 1.
    """
    assert batch.sampler_logprobs_M is not None
    rl = _rl_tokens(batch)
    mask_M = batch.weights_M if batch.ratio_mask_M is None else batch.ratio_mask_M
    raw_M = (batch.logprobs_M - batch.sampler_logprobs_M).detach()
    sums_D = raw_M.new_zeros(batch.num_datums)
    total_D = sums_D.index_add(0, batch.datum_M, torch.where(mask_M != 0, raw_M * mask_M, 0.0))
    count_D = sums_D.index_add(0, batch.datum_M, mask_M)
    mean_D = torch.where(count_D != 0, total_D / torch.where(count_D != 0, count_D, 1.0), 0.0)
    # Its value is the sequence's log ratio, its gradient that of the token's own logprob.
    log_ratio_M = torch.where(_kept(batch), mean_D[batch.datum_M], 0.0) + (rl.logprobs_M - rl.logprobs_M.detach())
    objective_M, clipped_M = _clipped_objective(log_ratio_M, rl.advantages_M, config)
    return _rl_value(batch, rl, -objective_M, clipped_M, ratio_M=torch.exp(log_ratio_M.detach()))


def _rl_value(
    batch: TokenBatch,
    rl: _RlTokens,
    loss_M: torch.Tensor,
    clipped_M: torch.Tensor,
    ratio_M: torch.Tensor | None = None,
) -> LossValue:
    log_ratio_M = rl.log_ratio_M.detach()
    return LossValue(
        _weighted(batch, loss_M), log_ratio_M, torch.exp(log_ratio_M) if ratio_M is None else ratio_M, clipped_M
    )


LOSSES: Mapping[str, Callable[[TokenBatch, Mapping[str, float]], LossValue]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""Formulas by name; `loss_inputs.SIGNATURES` says what each takes. The configuration is complete."""


class LossMetrics:
    """Sums and counts of one call's metrics, over any number of microbatches.

    Means are over tokens with nonzero weight, and 0 where there is none. ``kl:mean`` estimates
    KL(sampler || model) by ``(r - 1) - log r``, which is unbiased for samples of the sampler and
    never negative (k3 in Schulman, "Approximating KL divergence", 2020). ``entropy:mean`` is that
    of the whole (tempered) distribution at each position.
    """

    def __init__(self) -> None:
        self._loss = 0.0
        self._tokens = 0
        self._sums: dict[str, float] = {}
        self._ratio_max = 0.0

    def add(
        self, value: LossValue, weights_M: torch.Tensor, row_M: torch.Tensor, entropy_M: torch.Tensor | None
    ) -> None:
        """Add one microbatch; ``row_M`` tells which entries share a position."""
        keep_M = weights_M != 0
        self._loss += float(value.loss_M.detach().sum())
        self._tokens += int(torch.unique(row_M[keep_M]).numel())
        if value.log_ratio_M is None or value.ratio_M is None or value.clipped_M is None or entropy_M is None:
            return
        token_ratio_M = torch.exp(value.log_ratio_M)
        for name, values_M in (
            ("ratio:mean", value.ratio_M.detach()),
            ("clip_fraction:mean", value.clipped_M.to(value.ratio_M.dtype)),
            ("entropy:mean", entropy_M),
            ("kl:mean", (token_ratio_M - 1.0) - value.log_ratio_M),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + float(values_M[keep_M].sum())
        if bool(keep_M.any()):
            self._ratio_max = max(self._ratio_max, float(value.ratio_M[keep_M].max()))

    def result(self) -> dict[str, float]:
        """``loss:sum``, ``tokens:sum`` and, for RL losses, ratio, clip fraction, entropy and KL."""
        metrics = {"loss:sum": self._loss, "tokens:sum": float(self._tokens)}
        for name, total in self._sums.items():
            metrics[name] = total / self._tokens if self._tokens else 0.0
        if self._sums:
            metrics["ratio:max"] = self._ratio_max
        return metrics
