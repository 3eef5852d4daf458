"""AdamW over one adapter's accumulated gradients (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import NoGradients, NonFinite
from ..types import AdamParams
from .lora import Adapter


@dataclass(slots=True)
class AdamState:
    """Moments in the order of ``Adapter.parameters()``, float32, and the number of steps taken."""

    exp_avg: list[torch.Tensor]
    exp_avg_sq: list[torch.Tensor]
    step: int = 0

    @classmethod
    def fresh(cls, adapter: Adapter) -> AdamState:
        return cls(
            [torch.zeros_like(parameter, requires_grad=False) for parameter in adapter.parameters()],
            [torch.zeros_like(parameter, requires_grad=False) for parameter in adapter.parameters()],
        )


@dataclass(frozen=True, slots=True)
class _Update:
    """What a step would make of one parameter, beside its present values."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    change: torch.Tensor


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    """Global L2 norm, summed in float64: finite whenever the elements are."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _refuse_non_finite(what: str, tensors: Sequence[torch.Tensor], adapter: Adapter) -> None:
    names = [f"{name}.lora_{side}" for name in adapter.weights for side in "AB"]
    for name, tensor in zip(names, tensors, strict=True):
        if not bool(torch.isfinite(tensor).all()):
            raise NonFinite(
                f"optim_step: {what} of {name} is NaN or infinite; nothing was changed. Look at the data and the "
                "learning rate, then drop these gradients with zero_grad()",
                details={"parameter": name},
            )


@torch.no_grad()
def optim_step(adapter: Adapter, state: AdamState, params: AdamParams) -> dict[str, float]:
    """One step on the accumulated gradients, which it clears; either all of it happens or nothing.

    ``p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)``, with ``m_hat``, ``v_hat`` the
    bias-corrected moments and, for B matrices, ``lr = learning_rate * lora_plus_ratio``. With
    ``grad_clip_norm`` the gradients are first scaled down to that global L2 norm; the norm is over
    this adapter alone.

    Returns:
        ``grad_norm`` (before clipping), ``update_norm`` (L2 norm of the change of all weights) and
        ``step`` (steps taken, this one included).

    Raises:
        NoGradients: nothing was accumulated since the last step.
        NonFinite: a gradient, or what it would make of moments and weights, is NaN or infinite.
    """
    parameters = adapter.parameters()
    if all(parameter.grad is None for parameter in parameters):
        raise NoGradients("optim_step without gradients: call forward_backward first")
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    grad_norm = _norm(grads)
    if not math.isfinite(grad_norm):
        _refuse_non_finite("the gradient", grads, adapter)
    clips = 0 < params.grad_clip_norm < grad_norm
    factor = params.grad_clip_norm / grad_norm if clips else 1.0

    step = state.step + 1
    updates: list[_Update] = []
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        grad = grad * factor if clips else grad
        exp_avg = state.exp_avg[index] * params.beta1 + grad * (1 - params.beta1)
        exp_avg_sq = state.exp_avg_sq[index] * params.beta2 + grad * grad * (1 - params.beta2)
        denominator = (exp_avg_sq / (1 - params.beta2**step)).sqrt_().add_(params.eps)
        change = (exp_avg / (1 - params.beta1**step)).div_(denominator)
        if params.weight_decay:
            change += parameter * params.weight_decay
        is_b = index % 2 == 1
        change *= params.learning_rate * (params.lora_plus_ratio if is_b else 1.0)
        updates.append(_Update(parameter - change, exp_avg, exp_avg_sq, change))

    squares, weights = [update.exp_avg_sq for update in updates], [update.weight for update in updates]
    if not math.isfinite(_norm(squares)):
        _refuse_non_finite("the square of the gradient", squares, adapter)
    if not math.isfinite(_norm(weights)):
        _refuse_non_finite("the new weight", weights, adapter)
    update_norm = _norm([update.change for update in updates])

    # What needs memory is behind us: from here on nothing can fail.
    for parameter, update in zip(parameters, updates, strict=True):
        parameter.copy_(update.weight)
        parameter.grad = None
    state.exp_avg, state.exp_avg_sq = [update.exp_avg for update in updates], squares
    state.step = step
    return {"grad_norm": grad_norm, "update_norm": update_norm, "step": float(step)}
