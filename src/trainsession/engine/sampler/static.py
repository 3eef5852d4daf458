"""Decode steps whose shapes and addresses do not change, so that they can be CUDA graphs.

A step of a small model is hundreds of kernels of some microseconds: the host takes longer to launch
them than the device to run them. As a graph they are one launch. What a graph reads stands in buffers
of this module: tokens, positions, page tables, lengths, and each row's adapter (`bank`). Rows are
filled up to a few sizes with a row that writes to a page of its own.

Shapes: T rows of a step, P pages of a table, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..context import DECODE_TILE, PassContext, Segment
from ..kernels import paged_attention
from ..lora import Adapter
from ..model import LoadedModel
from .bank import COLUMNS, AdapterBank, RowAdapters
from .kv_cache import KVCache
from .sequence import Sequence as Sample

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of a step; more samples than the last take the packed way."""


@dataclass(frozen=True, slots=True)
class StaticAttention:
    """`context.Attention` of a static decode step."""

    cache: KVCache
    slots_T: torch.Tensor
    tables_TP: torch.Tensor
    lengths_T: torch.Tensor

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.cache.write(layer, self.slots_T, torch.stack((k_TGD, v_TGD)))
        return paged_attention.paged_attention(
            q_THD,
            self.cache.layer(layer),
            self.tables_TP,
            self.lengths_T,
            page_size=self.cache.block_size,
            scale=scale,
            window=window,
        )


class StaticDecoder:
    """Decode steps over static buffers.

    Args:
        model: The base model, not in exact mode.
        cache: With a last page that no sequence uses.
        capture: Make graphs. A step of a new size first runs without, and is captured the second time.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, *, capture: bool) -> None:
        self._model = model
        self._cache = cache
        self._bank = AdapterBank(model.lora_modules)
        self._captures = capture
        pages = -(-model.context_length // cache.block_size)
        device, rows = model.device, SIZES[-1]
        self._tokens_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._lengths_T = torch.ones(rows, dtype=torch.int32, device=device)
        self._tables_TP = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self._scales_TC = torch.zeros(rows * COLUMNS, dtype=torch.float32, device=device)
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._generation = self._bank.generation
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @staticmethod
    def suits(model: LoadedModel) -> bool:
        """Whether this is the faster way for a model: on CUDA with Triton, outside exact mode."""
        return model.device.type == "cuda" and not model.exact and paged_attention.available()

    def decode(self, samples: Sequence[Sample], owners: Sequence[Adapter | None]) -> torch.Tensor | None:
        """Feed each sample its next token; logits (T, V), or None where the step does not fit in here."""
        rows = len(samples)
        size = next((size for size in SIZES if size >= rows), None)
        scales = None if size is None else self._bank.place(owners)
        if size is None or scales is None:
            return None
        if self._bank.generation != self._generation:
            self._generation = self._bank.generation
            self._graphs.clear()
            self._seen.clear()
        self._fill(samples, size)
        columns = scales.shape[1]
        scales_TC = self._scales_TC[: size * columns].view(size, columns)
        if columns:
            scales_TC[:rows].copy_(torch.from_numpy(scales))
            scales_TC[rows:].zero_()
        return self._run(size, scales_TC)[:rows]

    def _fill(self, samples: Sequence[Sample], size: int) -> None:
        page_size, spare = self._cache.block_size, self._cache.num_blocks - 1
        width = max(len(sample.blocks) for sample in samples)
        tables = np.full((size, width), spare, dtype=np.int32)
        heads = np.zeros((3, size), dtype=np.int64)
        heads[2] = spare * page_size
        for row, sample in enumerate(samples):
            at = sample.computed
            tables[row, : len(sample.blocks)] = sample.blocks
            heads[:, row] = sample.next_input, at, sample.blocks[at // page_size] * page_size + at % page_size
        for buffer, values in zip((self._tokens_T, self._positions_T, self._slots_T), heads, strict=True):
            buffer[:size].copy_(torch.from_numpy(values))
        self._lengths_T[:size].copy_(torch.from_numpy((heads[1] + 1).astype(np.int32)))
        self._tables_TP[:size, :width].copy_(torch.from_numpy(tables))

    def _run(self, size: int, scales_TC: torch.Tensor) -> torch.Tensor:
        key = (size, scales_TC.shape[1])
        if not self._captures or key not in self._seen:
            self._seen.add(key)
            return self._compute(size, scales_TC)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(size, scales_TC)
            except Exception as error:
                # An architecture may do what a graph cannot hold: slower, but right.
                logger.warning("decode steps of %s run without CUDA graphs: %s", self._model.name, error)
                self._captures = False
                return self._compute(size, scales_TC)
        graph, logits_TV = self._graphs[key]
        graph.replay()
        # A copy: the next step of this size overwrites the graph's own.
        return logits_TV.clone()

    def _capture(self, size: int, scales_TC: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._model.device)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_TV = self._compute(size, scales_TC)
        return graph, logits_TV

    def _compute(self, size: int, scales_TC: torch.Tensor) -> torch.Tensor:
        attention = StaticAttention(
            self._cache, self._slots_T[:size], self._tables_TP[:size], self._lengths_T[:size]
        )
        segments = [Segment(None, 0, size)]
        rows = RowAdapters(self._bank, scales_TC)
        context = PassContext(segments, attention, tile=DECODE_TILE, sampling=True, row_adapters=rows)
        h_TE = self._model.hidden(self._tokens_T[:size], self._positions_T[:size], context)
        return self._model.logits(h_TE, segments, tile=DECODE_TILE, sampling=True, row_adapters=rows)
