"""Matrix products whose rows round alike alone and in a crowd.

Exact mode (DESIGN section 4, "Rounding"): a matrix product may round a row differently at another
number of rows, but at a fixed number of rows neither a row's place nor its neighbours matter. So
rows go through in tiles of a constant M, the last one padded with zeros. Everywhere ``tile`` is
that constant, or None outside exact mode.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

_ALIGNMENT = 64
"""Bytes; where BLAS starts reading may decide which of its kernels runs."""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy that is contiguous and starts where a fresh tensor would."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0


def row_products(x_TK: torch.Tensor, w_KN: torch.Tensor, tile: int | None) -> torch.Tensor:
    """``x_TK @ w_KN`` -> (T, N), outside autograd."""
    if tile is None:
        return x_TK @ w_KN
    x_TK = aligned(x_TK)
    rows = x_TK.shape[0]
    if rows == tile:
        return torch.mm(x_TK, w_KN)
    out_TN = x_TK.new_empty(rows, w_KN.shape[1])
    whole = rows - rows % tile
    for start in range(0, whole, tile):
        torch.mm(x_TK[start : start + tile], w_KN, out=out_TN[start : start + tile])
    if whole < rows:
        out_TN[whole:] = torch.mm(_padded(x_TK[whole:], tile), w_KN)[: rows - whole]
    return out_TN


def add_row_products(out_TN: torch.Tensor, x_TK: torch.Tensor, w_KN: torch.Tensor, tile: int | None) -> None:
    """``out_TN += x_TK @ w_KN`` in one pass over ``out_TN``, outside autograd."""
    if tile is None:
        out_TN.addmm_(x_TK, w_KN)
        return
    x_TK = aligned(x_TK)
    rows = x_TK.shape[0]
    for start in range(0, rows, tile):
        out, x = out_TN[start : start + tile], x_TK[start : start + tile]
        if len(x) == tile and _is_aligned(out):
            out.addmm_(x, w_KN)
        else:
            out.copy_(_padded(out, tile).addmm_(_padded(x, tile), w_KN)[: len(x)])


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]] = x
    return padded


class PackedWeight:
    """A frozen weight in the blocked order that oneDNN's products read, a copy of its own (CPU).

    For the few rows of a decode pass: at 32 rows it was 1.1 to 1.8 times as fast as a plain product
    on an AVX2 CPU in float32, at 8 rows up to 2.8 times; from about 500 rows on it gains nothing.

    Args:
        weight_NK: The weight.
        rows: Of a usual product.
    """

    def __init__(self, weight_NK: torch.Tensor, rows: int) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, rows)
        self._width = weight_NK.shape[0]

    def row_products(self, x_TK: torch.Tensor, tile: int | None) -> torch.Tensor:
        """``x_TK @ weight_NK^T`` -> (T, N), outside autograd."""
        rows = x_TK.shape[0]
        if tile is None or rows == tile:
            return self._product(aligned(x_TK))
        x_TK = aligned(x_TK)
        out_TN = x_TK.new_empty(rows, self._width)
        for start in range(0, rows, tile):
            x = x_TK[start : start + tile]
            out_TN[start : start + tile] = self._product(x if len(x) == tile else _padded(x, tile))[: len(x)]
        return out_TN

    def _product(self, x_TK: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, None, "none", [], "")
