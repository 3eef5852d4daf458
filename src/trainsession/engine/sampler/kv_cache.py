"""The tensors behind the block numbers: keys and values of every layer.

Shapes: N blocks, S positions of a block, G key/value heads, D head dimension, T rows of a pass.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from ..model import LoadedModel

_CPU_BYTES = 2 * 2**30
_CPU_FRACTION = 0.25
_GPU_FRACTION = 0.3
"""Of the free memory; training shares the device."""


class KVCache:
    """Paged keys and values.

    Each layer is one tensor of (2, G, N, S, D): seen as rows of one block's S * D numbers, a
    single `index_select` brings the keys and values of a whole group of sequences into the
    (2, B, G, L, D) that attention wants.
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.num_layers = model.num_layers
        self.dtype = model.dtype
        self.device = model.device
        shape = (2, model.num_kv_heads, num_blocks * block_size, model.head_dim)
        # Masked positions are multiplied by zero, so stale memory must at least be finite.
        self._layers = [_zeros(shape, model.dtype, model.device) for _ in range(model.num_layers)]
        self._block_rows = [
            layer.view(2 * model.num_kv_heads * num_blocks, block_size * model.head_dim) for layer in self._layers
        ]
        heads = torch.arange(2 * model.num_kv_heads, device=model.device) * num_blocks
        self._first_row_2G = heads.view(2, 1, model.num_kv_heads, 1)
        self._gathered = torch.empty(0, dtype=model.dtype, device=model.device)

    def layer(self, layer: int) -> torch.Tensor:
        """Keys and values of one layer, (2, G, N * S, D)."""
        return self._layers[layer]

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Where positions ``start:stop`` of a sequence with these blocks lie."""
        size = self.block_size
        return [blocks[position // size] * size + position % size for position in range(start, stop)]

    def write(self, layer: int, slots_T: torch.Tensor, kv_2TGD: torch.Tensor) -> None:
        self._layers[layer].index_copy_(2, slots_T, kv_2TGD.transpose(1, 2))

    def rows_of(self, tables_BN: Sequence[Sequence[int]]) -> torch.Tensor:
        """The index that `gather` takes, for block tables of equal length."""
        tables = torch.tensor(tables_BN, dtype=torch.int64, device=self.device)
        return (self._first_row_2G + tables[None, :, None, :]).reshape(-1)

    def gather(self, layer: int, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """Keys and values (2, B, G, L, D), valid until the next call: the buffer is reused."""
        size = rows.shape[0] * self._block_rows[layer].shape[1]
        if self._gathered.numel() < size:
            self._gathered = self._gathered.new_empty(size)
        out = self._gathered[:size].view(rows.shape[0], -1)
        torch.index_select(self._block_rows[layer], 0, rows, out=out)
        return out.view(2, batch, self.num_kv_heads, -1, self.head_dim)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)`` each, in all layers."""
        if not pairs:
            return
        sources, targets = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        for layer in self._layers:
            blocks = layer.view(2, self.num_kv_heads, self.num_blocks, -1)
            blocks.index_copy_(2, targets, blocks.index_select(2, sources))

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold NaN, also where there is no memory left, not even for their numbers."""
        if not blocks:
            return
        layers = [layer.view(2, self.num_kv_heads, self.num_blocks, -1) for layer in self._layers]
        try:
            index = torch.tensor(blocks, device=self.device)
            for layer in layers:
                layer.index_fill_(2, index, 0.0)
        except torch.OutOfMemoryError:  # one by one: slower by as many launches
            for layer in layers:
                for block in blocks:
                    layer[:, :, block].zero_()


def default_num_blocks(model: LoadedModel, block_size: int) -> int:
    """Blocks for the memory that sampling may take, and at least one full context of them.

    2 GiB or a quarter of the memory on a CPU, whichever is less (taken only as it is used); 30% of
    what is free on a GPU.
    """
    if model.device.type == "cuda":
        available = int(torch.cuda.mem_get_info(model.device)[0] * _GPU_FRACTION)
    else:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = min(_CPU_BYTES, int(physical * _CPU_FRACTION))
    position = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    one_context = -(-model.context_length // block_size)
    return max(one_context, available // (position * block_size))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves zeroed memory to the operating system, which hands it out on first use.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
