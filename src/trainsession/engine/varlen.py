"""Causal attention over packed sequences, for training passes.

Shapes: T rows of all sequences, L rows of one, S sequences of one length, H query heads, G
key/value heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch.nn import functional

_ALIGNMENT = 64
"""Bytes; products may round otherwise where a sequence starts off such a boundary."""


class VarlenAttention:
    """`context.Attention` for rows that are whole sequences, one after the other.

    Every sequence attends to itself alone. Neighbours of equal length share one call, which gives
    each the bits that it has alone (tests/engine/test_varlen.py). On CUDA in half precision,
    outside exact mode, all go through torch's variable-length flash attention at once.

    Args:
        lengths: Rows of each sequence, in order.
        exact: A sequence's result must not depend on its neighbours (DESIGN section 4, "Rounding").
    """

    def __init__(self, lengths: Sequence[int], *, exact: bool) -> None:
        self.lengths = tuple(lengths)
        self.exact = exact
        self._runs = [(length, len(list(run))) for length, run in groupby(self.lengths)]
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._bounds: torch.Tensor | None = None

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        if q_THD.is_cuda and not self.exact and q_THD.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q_THD, k_TGD, v_TGD, scale, window)
        outputs: list[torch.Tensor] = []
        start = 0
        for length, count in self._batches(q_THD):
            stop = start + length * count
            outputs.append(
                self._equal_lengths(q_THD[start:stop], k_TGD[start:stop], v_TGD[start:stop], length, scale, window)
            )
            start = stop
        return torch.cat(outputs)

    def _batches(self, q_THD: torch.Tensor) -> list[tuple[int, int]]:
        """(length, sequences) of each call."""
        sequence_bytes = q_THD.shape[-1] * q_THD.element_size()
        batches: list[tuple[int, int]] = []
        for length, count in self._runs:
            together = not self.exact or length * sequence_bytes % _ALIGNMENT == 0
            batches += [(length, count)] if together else [(length, 1)] * count
        return batches

    def _equal_lengths(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        length: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        q_SHLD, k_SGLD, v_SGLD = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        if self.exact:
            q_SHLD, k_SGLD, v_SGLD = (x.clone(memory_format=torch.contiguous_format) for x in (q_SHLD, k_SGLD, v_SGLD))
        mask_LL = None
        if window is not None and window < length:
            mask_LL = self._window_mask(length, window, q_THD.device)
        out_SHLD = functional.scaled_dot_product_attention(
            q_SHLD,
            k_SGLD,
            v_SGLD,
            attn_mask=mask_LL,
            is_causal=mask_LL is None,
            scale=scale,
            enable_gqa=q_SHLD.shape[1] != k_SGLD.shape[1],
        )
        return out_SHLD.transpose(1, 2).reshape(q_THD.shape)

    def _window_mask(self, length: int, window: int, device: torch.device) -> torch.Tensor:
        """(L, L), true where row i sees column j: ``0 <= i - j < window``."""
        if (length, window) not in self._masks:
            at_L = torch.arange(length, device=device)
            distance_LL = at_L[:, None] - at_L[None, :]
            self._masks[length, window] = (distance_LL >= 0) & (distance_LL < window)
        return self._masks[length, window]

    def _flash(
        self, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # Older releases want as many key as query heads, newer ones to be told that there are fewer.
        grouped = q_THD.shape[1] != k_TGD.shape[1]
        flash = varlen_attn
        if grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            flash = partial(varlen_attn, enable_gqa=True)
        elif grouped:
            repeats = q_THD.shape[1] // k_TGD.shape[1]
            k_TGD, v_TGD = k_TGD.repeat_interleave(repeats, 1), v_TGD.repeat_interleave(repeats, 1)
        if self._bounds is None:
            bounds = [0, *accumulate(self.lengths)]
            self._bounds = torch.tensor(bounds, dtype=torch.int32, device=q_THD.device)
        longest = max(self.lengths)
        out_THD = flash(
            q_THD.contiguous(),
            k_TGD.contiguous(),
            v_TGD.contiguous(),
            self._bounds,
            self._bounds,
            longest,
            longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
        )
        assert isinstance(out_THD, torch.Tensor)
        return out_THD
