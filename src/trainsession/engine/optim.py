"""AdamW over one adapter's accumulated gradients (Loshchilov & Hutter 2019)."""

# torch.optim is built on the _foreach functions; they have no other name.
# pyright: reportPrivateImportUsage=false
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


def _norm(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> float:
    """Global L2 norm, summed in float64: finite whenever the elements are."""
    norms = torch._foreach_norm(tensors, dtype=torch.float64)
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

    # A list an operation: on a GPU a few kernels for all matrices instead of a dozen for each.
    step = state.step + 1
    if clips:
        grads = list(torch._foreach_mul(grads, factor))
    exp_avg = list(torch._foreach_mul(state.exp_avg, params.beta1))
    torch._foreach_add_(exp_avg, grads, alpha=1 - params.beta1)
    exp_avg_sq = list(torch._foreach_mul(state.exp_avg_sq, params.beta2))
    torch._foreach_addcmul_(exp_avg_sq, grads, grads, value=1 - params.beta2)
    denominators = torch._foreach_div(exp_avg_sq, 1 - params.beta2**step)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, params.eps)
    changes = list(torch._foreach_div(exp_avg, 1 - params.beta1**step))
    torch._foreach_div_(changes, denominators)
    weights = [parameter.detach() for parameter in parameters]
    if params.weight_decay:
        torch._foreach_add_(changes, weights, alpha=params.weight_decay)
    torch._foreach_mul_(changes[::2], params.learning_rate)
    torch._foreach_mul_(changes[1::2], params.learning_rate * params.lora_plus_ratio)
    stepped = torch._foreach_sub(weights, changes)

    if not math.isfinite(_norm(exp_avg_sq)):
        _refuse_non_finite("the square of the gradient", exp_avg_sq, adapter)
    if not math.isfinite(_norm(stepped)):
        _refuse_non_finite("the new weight", stepped, adapter)
    update_norm = _norm(changes)

    # What needs memory is behind us: from here on nothing can fail.
    torch._foreach_copy_(weights, stepped)
    for parameter in parameters:
        parameter.grad = None
    state.exp_avg, state.exp_avg_sq, state.step = exp_avg, exp_avg_sq, step
    return {"grad_norm": grad_norm, "update_norm": update_norm, "step": float(step)}
