"""RMSNorm's backward in few passes over memory (CPU).

Autograd takes a dozen elementwise operations through the chain of a norm's own forward, and a small
model spends more time in them than in its adapters. The forward stays the module's, bit for bit.

Shapes: T rows, E hidden size; leading dimensions are rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

_PROBE_ROWS = 3


def install_norms(model: nn.Module) -> int:
    """Give every frozen RMSNorm of the model this backward; returns how many there were.

    A module counts as one if its class says so and its output is the formula's, bit for bit:
    ``weight * (x * rsqrt(mean(x^2) + eps))`` with the statistics in float32.
    """
    installed = 0
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and weight.dim() == 1):
            continue
        if isinstance(eps, float) and _is_plain(module, weight, eps):
            module.forward = partial(_normed, weight, eps)
            installed += 1
    return installed


@torch.no_grad()
def _is_plain(module: nn.Module, weight_E: torch.Tensor, eps: float) -> bool:
    x_TE = torch.randn(_PROBE_ROWS, len(weight_E), generator=torch.Generator().manual_seed(0)).to(weight_E)
    return torch.equal(module(x_TE), _formula(x_TE, weight_E, eps)[0])


def _formula(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x32_TE = x_TE.float()
    scale_T1 = torch.rsqrt(x32_TE.pow(2).mean(-1, keepdim=True) + eps)
    return weight_E * (x32_TE * scale_T1).to(x_TE.dtype), scale_T1


def _normed(weight_E: torch.Tensor, eps: float, x_TE: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and x_TE.requires_grad:
        out_TE: torch.Tensor = _Norm.apply(x_TE, weight_E, eps)  # type: ignore[assignment]
        return out_TE
    return _formula(x_TE, weight_E, eps)[0]


class _Norm(torch.autograd.Function):
    """Gradient for x; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        x_TE, weight_E, eps = args
        out_TE, scale_T1 = _formula(x_TE, weight_E, eps)
        ctx.save_for_backward(x_TE, weight_E, scale_T1)
        return out_TE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # With s = rsqrt(mean(x^2) + eps) and g = dout * weight: dx = s g - x s^3 mean(g x).
        x_TE, weight_E, scale_T1 = ctx.saved_tensors
        dx_TE = (grads[0] * weight_E).float()
        x32_TE = x_TE.float()
        mean_T1 = (dx_TE * x32_TE).mean(-1, keepdim=True)
        dx_TE = dx_TE.mul_(scale_T1).addcmul_(x32_TE, mean_T1.mul_(scale_T1.pow(3)), value=-1)
        return dx_TE.to(x_TE.dtype), None, None
