"""Frozen linear layers with the LoRA of every adapter in a packed pass.

Layers that are called with the same tensor (query, key and value; gate and up) compute together,
as the first of them is called: their A's are one product, forward and backward, and their
gradients for that tensor add up in place. Exact mode's tiles: `products`; each adapter's rows are
tiled from their own start, and its gradients sum over its own rows only.

Shapes: T rows, S rows of one adapter, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from . import activity, context
from .context import DECODE_TILE
from .products import PackedWeight, add_row_products, aligned, row_products

if TYPE_CHECKING:
    from .lora import LoraPair

LinearGroup = Literal["attn", "mlp", "unembed", "other"]


class FrozenLayer(NamedTuple):
    """A layer's own weights; ``packed`` takes the place of ``weight_NK`` where no gradient is asked for."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None = None
    packed: PackedWeight | None = None


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows ``start:stop`` get ``scale * B A x``; one pair, or None, for each layer."""

    start: int
    stop: int
    scale: float
    pairs: Sequence[LoraPair | None]


@dataclass(frozen=True, slots=True)
class _Span:
    """`LoraRows` without its matrices: those of ``layers`` stand in order, A and B by turns, at ``first``."""

    start: int
    stop: int
    scale: float
    layers: tuple[int, ...]
    first: int

    def matrices(self, flat: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The A's, stacked to (sum of R, K), and the B's."""
        own = [matrix.to(dtype) for matrix in flat[self.first : self.first + 2 * len(self.layers)]]
        return own[0] if len(own) == 2 else torch.cat(own[::2]), own[1::2]


def _forward(
    x_TK: torch.Tensor,
    layers: Sequence[FrozenLayer],
    tile: int | None,
    spans: Sequence[_Span],
    flat: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each layer's output and, by span and layer, ``scale * A x`` (S, R), which the backward needs."""
    outs: list[torch.Tensor] = []
    for layer in layers:
        if layer.packed is not None:
            out_TN = layer.packed.row_products(x_TK, tile)
        else:
            out_TN = row_products(x_TK, layer.weight_NK.t(), tile)
        if layer.bias_N is not None:
            out_TN += layer.bias_N
        outs.append(out_TN)
    lows: list[torch.Tensor] = []
    for span in spans:
        a_RK, bs = span.matrices(flat, x_TK.dtype)
        # The scale goes onto the narrow product.
        low_SR = row_products(x_TK[span.start : span.stop], a_RK.t(), tile).mul_(span.scale)
        for layer, b_NR, low in zip(span.layers, bs, low_SR.split([b.shape[1] for b in bs], dim=1), strict=True):
            lows.append(aligned(low))
            add_row_products(outs[layer][span.start : span.stop], lows[-1], b_NR.t(), tile)
    return outs, lows


class _MultiLoraProducts(torch.autograd.Function):
    """Gradients for x, A and B; the layers' own weights are frozen."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        x_TK, layers, tile, spans, *flat = args
        outs, lows = _forward(x_TK, layers, tile, spans, flat)
        # x is needed for A's gradient only; layers without adapters keep nothing of their input.
        weights = [layer.weight_NK for layer in layers]
        ctx.save_for_backward(x_TK if spans else None, *weights, *flat, *lows)
        ctx.tile, ctx.spans, ctx.counts = tile, spans, (len(weights), len(flat))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        activity.tick()
        x_TK, *saved = ctx.saved_tensors
        weights, flat = saved[: ctx.counts[0]], saved[ctx.counts[0] : sum(ctx.counts)]
        lows = iter(saved[sum(ctx.counts) :])
        tile, spans = ctx.tile, ctx.spans
        douts = [None if dout is None else dout.contiguous() for dout in grads]
        dx_TK: torch.Tensor | None = None
        if ctx.needs_input_grad[0]:
            for dout_TN, weight_NK in zip(douts, weights, strict=True):
                if dout_TN is not None and dx_TK is None:
                    dx_TK = row_products(dout_TN, weight_NK, tile)
                elif dout_TN is not None and dx_TK is not None:
                    add_row_products(dx_TK, dout_TN, weight_NK, tile)
        dflat: list[torch.Tensor | None] = [None] * len(flat)
        for span in spans:
            a_RK, bs = span.matrices(flat, x_TK.dtype)
            dlows: list[torch.Tensor] = []
            for index, (layer, b_NR) in enumerate(zip(span.layers, bs, strict=True)):
                low_SR, dout_TN, at = next(lows), douts[layer], span.first + 2 * index + 1
                if dout_TN is None:
                    dlows.append(torch.zeros_like(low_SR))
                    continue
                dout_SN = dout_TN[span.start : span.stop]
                dout_SN = dout_SN if tile is None else aligned(dout_SN)
                dlows.append(row_products(dout_SN, b_NR, tile))
                if ctx.needs_input_grad[4 + at]:
                    dflat[at] = (dout_SN.t() @ low_SR).to(flat[at].dtype)
            dlow_SR = (dlows[0] if len(dlows) == 1 else torch.cat(dlows, dim=1)).mul_(span.scale)
            if ctx.needs_input_grad[4 + span.first]:
                x_SK = x_TK[span.start : span.stop]
                da_RK = (dlow_SR.t() @ (x_SK if tile is None else aligned(x_SK))).to(flat[span.first].dtype)
                parts = da_RK.split([b.shape[1] for b in bs])
                for index, part in enumerate(parts):
                    # A copy where several share one: each becomes the `.grad` of a parameter.
                    dflat[span.first + 2 * index] = part if len(parts) == 1 else part.clone()
            if dx_TK is not None:
                add_row_products(dx_TK[span.start : span.stop], dlow_SR, a_RK, tile)
        return dx_TK, None, None, None, *dflat


def multi_lora_products(
    x_TK: torch.Tensor, layers: Sequence[FrozenLayer], *, tile: int | None, rows: Sequence[LoraRows] = ()
) -> Sequence[torch.Tensor]:
    """``x W^T + bias + scale (x A^T) B^T`` -> (T, N) of each layer, differentiable by x, A and B.

    Args:
        x_TK: Rows in the model's dtype.
        layers: What they go through; gets no gradient.
        tile: Rows of one product in exact mode; None outside it.
        rows: Disjoint row ranges with their adapters' matrices, float32; cast to the model's dtype
            for the product.
    """
    flat: list[torch.Tensor] = []
    spans: list[_Span] = []
    for span in rows:
        chosen = [(layer, pair) for layer, pair in enumerate(span.pairs) if pair is not None]
        if chosen:
            spans.append(_Span(span.start, span.stop, span.scale, tuple(layer for layer, _ in chosen), len(flat)))
            flat += [matrix for _, pair in chosen for matrix in (pair.A, pair.B)]
    if torch.is_grad_enabled() and (x_TK.requires_grad or any(matrix.requires_grad for matrix in flat)):
        outs: Sequence[torch.Tensor] = _MultiLoraProducts.apply(x_TK, layers, tile, spans, *flat)  # type: ignore[assignment]
        return outs
    return _forward(x_TK, layers, tile, spans, flat)[0]


class MultiLoraLinear(nn.Module):
    """A frozen linear layer that adds, to each segment of the running pass, its adapter's product.

    ``y = W x + bias + scale * B A x``. Outside a pass, and for segments without an adapter or
    whose adapter does not train this module, it is the base layer.

    Args:
        base: The layer; shared by all adapters.
        name: Its module name in the causal LM, the key of `Adapter.weights`.
        group: What `LoraConfig`'s flags choose it by.

    Attributes:
        exact: Products in the pass's tiles.
        packs: Sampling passes use a `PackedWeight`, made at the first of them.
        siblings: The layers that are called with the same tensor, itself among them (`find_siblings`).
    """

    def __init__(self, base: nn.Linear, name: str, group: LinearGroup) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.group: LinearGroup = group
        self.exact = False
        self.packs = False
        self.siblings: tuple[MultiLoraLinear, ...] = (self,)
        self._packed: PackedWeight | None = None

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
        if current.row_adapters is not None:
            return current.row_adapters.linear(self, x)
        ready = current.ready.pop(self.name, None)
        if ready is not None and ready[0] is x:
            return ready[1]
        outs = self._products_of_siblings(x, current)
        for sibling, out_TN in zip(self.siblings, outs, strict=True):
            current.ready[sibling.name] = (x, out_TN.view(*x.shape[:-1], out_TN.shape[-1]))
        return current.ready.pop(self.name)[1]

    def _products_of_siblings(self, x: torch.Tensor, current: context.PassContext) -> Sequence[torch.Tensor]:
        rows: list[LoraRows] = []
        for segment in current.segments:
            if segment.adapter is None or segment.stop == segment.start:
                continue
            pairs = [segment.adapter.weights.get(layer.name) for layer in self.siblings]
            if any(pair is not None for pair in pairs):
                rows.append(LoraRows(segment.start, segment.stop, segment.adapter.scale, pairs))
        x_TK = x.reshape(-1, x.shape[-1])
        if rows and not current.fits(x_TK.shape[0]):
            raise RuntimeError(
                f"{self.name} got {x_TK.shape[0]} rows in a pass of {current.rows}: it does not see the "
                "pass row by row, so it cannot have adapters"
            )
        activity.tick()
        layers = [layer._frozen(current.sampling) for layer in self.siblings]
        return multi_lora_products(x_TK, layers, tile=current.tile if self.exact else None, rows=rows)

    def _frozen(self, sampling: bool) -> FrozenLayer:
        if not (sampling and self.packs):
            return FrozenLayer(self.base.weight, self.base.bias)
        if self._packed is None:
            self._packed = PackedWeight(self.base.weight, DECODE_TILE)
        return FrozenLayer(self.base.weight, self.base.bias, self._packed)


def find_siblings(layers: Iterable[MultiLoraLinear], run: Callable[[], object]) -> None:
    """Let layers that ``run`` calls with one and the same tensor, one after the other, be siblings."""
    calls: list[tuple[MultiLoraLinear, torch.Tensor]] = []

    def record(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, MultiLoraLinear)
        calls.append((layer, args[0]))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found: list[tuple[torch.Tensor, list[MultiLoraLinear]]] = []
    for layer, x in calls:
        if found and found[-1][0] is x and layer not in found[-1][1]:
            found[-1][1].append(layer)
        else:
            found.append((x, [layer]))
    seen: set[MultiLoraLinear] = set()
    for _, together in found:
        if seen.isdisjoint(together):
            for layer in together:
                layer.siblings = tuple(together)
        seen.update(together)
