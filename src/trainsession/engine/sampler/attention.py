"""Attention of a sampling pass to the paged cache, in units that depend on one sequence only.

Exact mode needs a row's result to be the same alone and in a crowd, so every product here has a
shape that its own sequence decides:
- prefill: the S query rows of one block against all keys up to that block's end;
- decode: one query row against its keys padded to a whole number of blocks (`padded_blocks`).
Units of equal shape from several sequences go through one call: torch's attention on the CPU
computes each (sequence, head) separately, so the batch around a unit does not change its bits
(tested). Padding and the other sequences' stale numbers are masked; masked terms are exact zeros.

The query heads that share a key/value head become rows of one product, so keys and values are
never repeated. In a decode unit those are few rows; they are padded to `_row_multiple`, because
torch gives each thread a work buffer whose size follows from the number of rows, and a buffer
that starts off a vector boundary can make the product round differently on another thread.

Shapes: T rows, B sequences of a group, U blocks of a chunk, S block size, L keys, H query heads,
G key/value heads, R = H / G, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .kv_cache import KVCache
from .windows import Window


def padded_blocks(blocks: int) -> int:
    """Blocks that a decode row attends over: its own, rounded up by at most an eighth.

    So that sequences of similar length share a call, however long they are.
    """
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step


def _row_multiple(device: torch.device) -> int:
    if device.type != "cpu":
        return 1
    return 8 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 4


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Chunks over the same blocks ``first:last`` of their sequences, one table each.

    ``rows_BUS`` maps their positions to rows of the pass; positions past a chunk's end repeat its
    last row, and ``valid`` picks the others.
    """

    cache_rows: torch.Tensor
    first: int
    last: int
    rows_BUS: torch.Tensor
    valid: torch.Tensor
    rows_out: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single rows ``start:stop`` of the pass, over equally many blocks.

    ``cache_rows`` are those of all its samples; with a window, of its ``new_rows`` only, if any.
    """

    cache_rows: torch.Tensor | None
    start: int
    stop: int
    positions_B: torch.Tensor
    keys: int
    window: Window | None = None
    new_rows: torch.Tensor | None = None
    """Rows of the window that are gathered whole; the others get their newest position."""


class PagedAttention:
    """`context.Attention` of one pass: writes its keys and values, then attends group by group."""

    def __init__(
        self,
        cache: KVCache,
        slots_T: torch.Tensor,
        groups: Sequence[PrefillGroup | DecodeGroup],
        order: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._cache = cache
        self._slots_T = slots_T
        self._groups = groups
        self._order = order
        """For decode passes: rows sorted by group, and back. None: they are sorted already."""
        self._masks: dict[tuple[int, int | None], list[torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        kv_2TGD = torch.stack((k_TGD, v_TGD))
        self._cache.write(layer, self._slots_T, kv_2TGD)
        if self._order is not None:
            q_THD = q_THD.index_select(0, self._order[0])
            kv_2TGD = kv_2TGD.index_select(1, self._order[0])
        parts: list[torch.Tensor] = []
        out_THD: torch.Tensor | None = None
        for index, group in enumerate(self._groups):
            masks = self._masks_of(index, group, window, q_THD)
            if isinstance(group, DecodeGroup):
                kv_2BGLD = self._keys_and_values(layer, group, kv_2TGD[:, group.start : group.stop])
                parts.append(self._decode(group, q_THD, kv_2BGLD, masks[0], scale))
            else:
                if out_THD is None:
                    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
                out_THD.index_copy_(0, group.rows_out, self._prefill(layer, group, q_THD, masks, scale))
        if out_THD is not None:
            return out_THD
        out_THD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_THD if self._order is None else out_THD.index_select(0, self._order[1])

    def _keys_and_values(self, layer: int, group: DecodeGroup, newest_2BGD: torch.Tensor) -> torch.Tensor:
        """(2, B, G, L, D), valid until the layer's next call."""
        batch = group.stop - group.start
        gathered = None
        if group.cache_rows is not None:
            new = batch if group.new_rows is None else len(group.new_rows)
            gathered = self._cache.gather(layer, group.cache_rows, new)
        if group.window is None:
            assert gathered is not None
            return gathered
        kv_2CGLD = group.window.layers[layer]
        if gathered is not None and group.new_rows is not None:
            kv_2CGLD.index_copy_(1, group.new_rows, gathered)
        group.window.write(layer, newest_2BGD, group.positions_B)
        return kv_2CGLD[:, :batch]

    def _decode(
        self, group: DecodeGroup, q_THD: torch.Tensor, kv_2BGLD: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        batch = group.stop - group.start
        heads, dim = q_THD.shape[1:]
        shared = heads // self._cache.num_kv_heads
        q_BGRD = q_THD[group.start : group.stop].view(batch, self._cache.num_kv_heads, shared, dim)
        padding = -shared % _row_multiple(q_THD.device)
        # Contiguous either way: the strides that the model hands out depend on the rows of the pass.
        q_BGRD = F.pad(q_BGRD, (0, 0, 0, padding)) if padding else q_BGRD.contiguous()
        k_BGLD, v_BGLD = kv_2BGLD
        o_BGRD = F.scaled_dot_product_attention(q_BGRD, k_BGLD, v_BGLD, attn_mask=mask, scale=scale)
        return o_BGRD[:, :, :shared].reshape(batch, heads, dim)

    def _prefill(
        self, layer: int, group: PrefillGroup, q_THD: torch.Tensor, masks: list[torch.Tensor], scale: float
    ) -> torch.Tensor:
        batch, units, size = group.rows_BUS.shape
        heads, dim = q_THD.shape[1:]
        kv_heads = self._cache.num_kv_heads
        q = q_THD.index_select(0, group.rows_BUS.view(-1)).view(batch, units, size, kv_heads, -1, dim)
        q_UBGRD = q.permute(1, 0, 3, 4, 2, 5).reshape(units, batch, kv_heads, -1, dim)
        k_BGLD, v_BGLD = self._cache.gather(layer, group.cache_rows, batch)
        o_UBGRD = torch.empty_like(q_UBGRD)
        for unit in range(units):
            keys = (group.first + unit + 1) * size
            o_UBGRD[unit] = F.scaled_dot_product_attention(
                q_UBGRD[unit], k_BGLD[:, :, :keys], v_BGLD[:, :, :keys], attn_mask=masks[unit], scale=scale
            )
        o = o_UBGRD.view(units, batch, kv_heads, -1, size, dim).permute(1, 0, 4, 2, 3, 5)
        return o.reshape(-1, heads, dim).index_select(0, group.valid)

    def _masks_of(
        self, index: int, group: PrefillGroup | DecodeGroup, window: int | None, q_THD: torch.Tensor
    ) -> list[torch.Tensor]:
        """Additive masks, one per unit, the same for all layers of one window."""
        masks = self._masks.get((index, window))
        if masks is None:
            shared = q_THD.shape[1] // self._cache.num_kv_heads
            if isinstance(group, DecodeGroup):
                masks = [_mask(group.positions_B, group.keys, window, q_THD.dtype)[:, None, None]]
            else:
                size = self._cache.block_size
                masks = []
                for block in range(group.first, group.last):
                    positions = torch.arange(block * size, (block + 1) * size, device=q_THD.device).repeat(shared)
                    masks.append(_mask(positions, (block + 1) * size, window, q_THD.dtype))
            self._masks[index, window] = masks
        return masks


def _mask(positions: torch.Tensor, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """(positions, keys): 0 where a position attends, -inf elsewhere."""
    distance = positions[:, None] - torch.arange(keys, device=positions.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
