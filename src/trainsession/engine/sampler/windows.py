"""Keys and values of running samples side by side, kept from one decode step to the next (CPU).

Attention wants a sample's keys in one piece, the paged cache has them in blocks. Gathering them
anew in every step took 6 to 8% of it; here only what is new is copied: one position of each
sample, and everything of a sample that has just come.

Shapes: B samples of a group, G key/value heads, L keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .kv_cache import KVCache
from .sequence import Sequence as Sample

_BYTES = 512 * 2**20
"""Of all windows and layers together; groups beyond gather in every step."""


@dataclass(slots=True)
class Window:
    """A group's keys and values in all layers, (2, capacity, G, L, D) each; row i is ``samples[i]``."""

    layers: list[torch.Tensor]
    samples: list[Sample] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """Positions of each row that are in the window."""
    _slots: torch.Tensor | None = None
    """Where this step's position of every row lies."""

    def write(self, layer: int, newest_2BGD: torch.Tensor, positions_B: torch.Tensor) -> None:
        """One position of each of the first B rows."""
        _, capacity, heads, keys, dim = self.layers[layer].shape
        if self._slots is None:
            first = torch.arange(2 * capacity * heads).view(2, capacity, heads)[:, : len(self.samples)] * keys
            self._slots = (first + positions_B[:, None]).reshape(-1)
        self.layers[layer].view(-1, dim).index_copy_(0, self._slots, newest_2BGD.reshape(-1, dim))

    @property
    def capacity(self) -> int:
        return self.layers[0].shape[1]

    @property
    def bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def place(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[int]]:
        """Let the rows be ``samples``: in which order, and which of them are not in the window yet."""
        known = {id(s): row for row, s in enumerate(self.samples) if self.computed[row] == s.computed}
        rows: list[Sample | None] = [None] * len(samples)
        others: list[Sample] = []
        for sample in samples:
            row = known.get(id(sample), len(samples))
            if row < len(samples):
                rows[row] = sample
            else:
                others.append(sample)
        new = [row for row, sample in enumerate(rows) if sample is None]
        placed = [sample if sample is not None else others.pop() for sample in rows]
        self.samples = placed
        # The step writes the position at `computed` of every row.
        self.computed = [sample.computed + 1 for sample in placed]
        self._slots = None
        return placed, new


class DecodeWindows:
    """The windows of one cache, by the keys of a group's rows."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._windows: dict[int, Window] = {}

    def keep(self, keys: set[int]) -> None:
        """Forget windows of other groups, which missed a step."""
        self._windows = {key: window for key, window in self._windows.items() if key in keys}

    def place(self, keys: int, samples: Sequence[Sample]) -> tuple[Window | None, list[Sample], list[int]]:
        """The window of the samples that attend over ``keys`` positions, if there is room for one.

        Returns:
            The window; the samples in the order of its rows; rows that must be gathered whole.
        """
        window = self._windows.get(keys)
        if window is None or window.capacity < len(samples):
            self._windows.pop(keys, None)
            window = self._open(keys, len(samples))
        if window is None:
            return None, list(samples), []
        self._windows[keys] = window
        return window, *window.place(samples)

    def _open(self, keys: int, rows: int) -> Window | None:
        cache = self._cache
        shape = (2, rows, cache.num_kv_heads, keys, cache.head_dim)
        needed = torch.Size(shape).numel() * cache.dtype.itemsize * cache.num_layers
        if cache.device.type != "cpu" or needed + sum(w.bytes for w in self._windows.values()) > _BYTES:
            return None
        return Window([torch.empty(shape, dtype=cache.dtype) for _ in range(cache.num_layers)])
