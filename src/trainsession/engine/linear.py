"""Products of frozen weights and LoRA with the rows of a packed pass.

Exact mode (DESIGN section 4, "Rounding"): a matrix product may round a row differently at another
number of rows, but at a fixed number of rows neither a row's place nor its neighbours matter. So
rows go through in tiles of a constant M, the last one padded with zeros, forward and backward; and
so does each adapter's share of them. The gradients of an adapter sum over its own rows only.

Shapes: T rows, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from . import context

if TYPE_CHECKING:
    from .lora import LoraPair

LinearGroup = Literal["attn", "mlp", "unembed", "other"]

_ALIGNMENT = 64
"""Bytes; where BLAS starts reading may decide which of its kernels runs."""
_SERIAL_ELEMENTS = 255 * 64
"""Below the size from which ATen shares a loop among threads (32,768 elements; 16,384 for GELU), and
a multiple of every CPU vector's length."""
_SHARED_ELEMENTS = 32_768
"""From this many elements a thread on ATen gives every thread one equal share of a loop."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def row_products(x_TK: torch.Tensor, w_KN: torch.Tensor, tile: int | None) -> torch.Tensor:
    """``x_TK @ w_KN`` -> (T, N), outside autograd; in tiles of ``tile`` rows unless that is None."""
    if tile is None:
        return x_TK @ w_KN
    x_TK = _aligned(x_TK)
    rows = x_TK.shape[0]
    if rows == tile:
        return torch.mm(x_TK, w_KN)
    out_TN = x_TK.new_empty(rows, w_KN.shape[1])
    whole = rows - rows % tile
    for start in range(0, whole, tile):
        torch.mm(x_TK[start : start + tile], w_KN, out=out_TN[start : start + tile])
    if whole < rows:
        padded = x_TK.new_zeros(tile, x_TK.shape[1])
        padded[: rows - whole] = x_TK[whole:]
        out_TN[whole:] = torch.mm(padded, w_KN)[: rows - whole]
    return out_TN


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows ``start:stop`` get ``scale * B A x``."""

    start: int
    stop: int
    scale: float


def _forward(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    tile: int | None,
    spans: Sequence[LoraRows],
    pairs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The layer's output and, per span, ``scale * A x`` (rows, R), which the backward needs."""
    out_TN = row_products(x_TK, weight_NK.t(), tile)
    if bias_N is not None:
        out_TN += bias_N
    lows: list[torch.Tensor] = []
    for index, span in enumerate(spans):
        a_RK, b_NR = pairs[2 * index].to(x_TK.dtype), pairs[2 * index + 1].to(x_TK.dtype)
        # The scale goes onto the narrow product: an add with a factor may fuse, and round, otherwise.
        low = row_products(x_TK[span.start : span.stop], a_RK.t(), tile) * span.scale
        out_TN[span.start : span.stop] += row_products(low, b_NR.t(), tile)
        lows.append(low)
    return out_TN, lows


class _MultiLoraProduct(torch.autograd.Function):
    """``x W^T + bias + scale (x A^T) B^T`` by span: gradients for x, A and B; W and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        x_TK, weight_NK, bias_N, tile, spans, *pairs = args
        out_TN, lows = _forward(x_TK, weight_NK, bias_N, tile, spans, pairs)
        # x is needed for A's gradient only; a layer without adapters keeps nothing of its input.
        ctx.save_for_backward(weight_NK, x_TK if spans else None, *pairs, *lows)
        ctx.tile, ctx.spans = tile, spans
        return out_TN

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout_TN = grads[0].contiguous()
        tile, spans = ctx.tile, ctx.spans
        weight_NK, x_TK, *saved = ctx.saved_tensors
        pairs, lows = saved[: 2 * len(spans)], saved[2 * len(spans) :]
        dx_TK = row_products(dout_TN, weight_NK, tile) if ctx.needs_input_grad[0] else None
        dpairs: list[torch.Tensor | None] = []
        for index, span in enumerate(spans):
            a_RK, b_NR = pairs[2 * index].to(dout_TN.dtype), pairs[2 * index + 1].to(dout_TN.dtype)
            x_SK, dout_SN = x_TK[span.start : span.stop], dout_TN[span.start : span.stop]
            if tile is not None:
                x_SK, dout_SN = _aligned(x_SK), _aligned(dout_SN)
            dlow = row_products(dout_SN, b_NR, tile) * span.scale
            needs_a, needs_b = ctx.needs_input_grad[5 + 2 * index : 7 + 2 * index]
            dpairs.append((dlow.t() @ x_SK).to(pairs[2 * index].dtype) if needs_a else None)
            dpairs.append((dout_SN.t() @ lows[index]).to(pairs[2 * index + 1].dtype) if needs_b else None)
            if dx_TK is not None:
                dx_TK[span.start : span.stop] += row_products(dlow, a_RK, tile)
        return dx_TK, None, None, None, None, *dpairs


def multi_lora_product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    tile: int | None,
    spans: Sequence[LoraRows] = (),
    pairs: Sequence[LoraPair] = (),
) -> torch.Tensor:
    """A frozen linear layer with an adapter per span of rows -> (T, N), differentiable.

    Args:
        x_TK: Rows in the model's dtype.
        weight_NK: Frozen weight; gets no gradient, nor does ``bias_N``.
        tile: Rows of one product in exact mode; None outside it.
        spans: Disjoint row ranges with their scales.
        pairs: The adapter weights of each span, float32; cast to the model's dtype for the product.
    """
    flat = [matrix for pair in pairs for matrix in (pair.A, pair.B)]
    if torch.is_grad_enabled() and (x_TK.requires_grad or any(matrix.requires_grad for matrix in flat)):
        out: torch.Tensor = _MultiLoraProduct.apply(x_TK, weight_NK, bias_N, tile, spans, *flat)  # type: ignore[assignment]
        return out
    return _forward(x_TK, weight_NK, bias_N, tile, spans, flat)[0]


class MultiLoraLinear(nn.Module):
    """A frozen linear layer that adds, to each segment of the running pass, its adapter's product.

    ``y = W x + bias + scale * B A x``. Outside a pass, and for segments without an adapter or
    whose adapter does not train this module, it is the base layer.

    Args:
        base: The layer; shared by all adapters.
        name: Its module name in the causal LM, the key of `Adapter.weights`.
        group: What `LoraConfig`'s flags choose it by.
    """

    def __init__(self, base: nn.Linear, name: str, group: LinearGroup) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.group: LinearGroup = group
        self.exact = False

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N); the leading dimensions flatten to the rows of the pass."""
        current = context.maybe_current()
        if current is None:
            return self.base(x)
        spans: list[LoraRows] = []
        pairs: list[LoraPair] = []
        for segment in current.segments:
            pair = segment.adapter.weights.get(self.name) if segment.adapter is not None else None
            if segment.adapter is not None and pair is not None and segment.stop > segment.start:
                spans.append(LoraRows(segment.start, segment.stop, segment.adapter.scale))
                pairs.append(pair)
        x_TK = x.reshape(-1, x.shape[-1])
        if spans and not current.fits(x_TK.shape[0]):
            raise RuntimeError(
                f"{self.name} got {x_TK.shape[0]} rows in a pass of {current.rows}: it does not see the "
                "pass row by row, so it cannot have adapters"
            )
        out_TN = multi_lora_product(
            x_TK,
            self.base.weight,
            self.base.bias,
            tile=current.tile if self.exact else None,
            spans=spans,
            pairs=pairs,
        )
        return out_TN.view(*x.shape[:-1], out_TN.shape[-1])


def _parts(flat: torch.Tensor) -> list[slice]:
    """Parts of which ATen's loop, and every thread's share of it, are whole vectors."""
    size, threads = flat.numel(), torch.get_num_threads()
    if size >= threads * _SHARED_ELEMENTS and size % (64 * threads) == 0:
        return [slice(0, size)]
    return [slice(start, start + _SERIAL_ELEMENTS) for start in range(0, size, _SERIAL_ELEMENTS)]


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        x, function = args
        flat = x.reshape(-1)
        out = torch.empty_like(flat)
        for part in _parts(flat):
            out[part] = function(flat[part])
        ctx.save_for_backward(flat)
        ctx.function = function
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (flat,) = ctx.saved_tensors
        dout = grads[0].reshape(-1)
        dx = torch.empty_like(flat)
        for part in _parts(flat):
            with torch.enable_grad():
                x = flat[part].detach().requires_grad_()
                dx[part] = torch.autograd.grad(ctx.function(x), x, dout[part])[0]
        return dx.view(grads[0].shape), None


class ExactActivation(nn.Module):
    """An elementwise activation whose bits don't depend on where an element lies (CPU).

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
        out: torch.Tensor = _Elementwise.apply(x.contiguous(), self.function)  # type: ignore[assignment]
        return out[..., :width] if spare else out
