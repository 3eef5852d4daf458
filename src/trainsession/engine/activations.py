"""Elementwise functions whose bits don't depend on where an element lies (CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

_GRAIN = 32_768
"""Elements from which ATen gives a loop another thread."""
_GELU_GRAIN = 16_384
"""Elements from which ATen's GELU runs on every thread there is."""
_SERIAL_ELEMENTS = 255 * 64
"""Below both, and a multiple of every CPU vector's length."""


def _parts(flat: torch.Tensor, function: nn.Module) -> list[slice]:
    """Parts of which ATen's loop, and every thread's equal share of it, are whole vectors."""
    size, threads = flat.numel(), torch.get_num_threads()
    shares = {max(1, min(threads, -(-size // _GRAIN)))}
    if size > _GELU_GRAIN and not _is_silu(function):
        shares.add(threads)
    if all(size % (64 * share) == 0 for share in shares):
        return [slice(0, size)]
    return [slice(start, start + _SERIAL_ELEMENTS) for start in range(0, size, _SERIAL_ELEMENTS)]


def _is_silu(function: nn.Module) -> bool:
    return isinstance(function, (nn.SiLU, ACT2CLS["silu"]))


def _derivative(function: nn.Module, x: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    if _is_silu(function):
        return torch.ops.aten.silu_backward(dout, x)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, dout)[0]


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        x, function = args
        flat = x.reshape(-1)
        ctx.save_for_backward(flat)
        ctx.function = function
        return _apply(flat, function).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (flat,) = ctx.saved_tensors
        dout = grads[0].reshape(-1)
        dx = _by_parts(_parts(flat, ctx.function), lambda part: _derivative(ctx.function, flat[part], dout[part]))
        return dx.view(grads[0].shape), None


def _apply(flat: torch.Tensor, function: nn.Module) -> torch.Tensor:
    return _by_parts(_parts(flat, function), lambda part: function(flat[part]))


def _by_parts(parts: list[slice], compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    return compute(parts[0]) if len(parts) == 1 else torch.cat([compute(part) for part in parts])


class ExactActivation(nn.Module):
    """An elementwise activation whose bits don't depend on where an element lies.

    ATen's vectorised loops hand what does not fill a vector to a scalar twin that may round
    otherwise (SiLU does, in float32), at the end of the tensor and of every thread's share of it.
    So: whole vectors only, in parts that are shared among threads evenly or not at all.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        spare = -width % 64
        if spare:
            x = nn.functional.pad(x, (0, spare))
        x = x.contiguous()
        if torch.is_grad_enabled() and x.requires_grad:
            out: torch.Tensor = _Elementwise.apply(x, self.function)  # type: ignore[assignment]
        else:
            out = _apply(x.view(-1), self.function).view(x.shape)
        return out[..., :width] if spare else out
