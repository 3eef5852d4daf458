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
from ..kernels.paged_attention import Pages, paged_attention, why_not
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
        pages = Pages(self.cache.layer(layer), self.tables_TP, self.lengths_T, self.cache.block_size)
        return paged_attention(q_THD, pages, scale=scale, window=window)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that was started before its samples were asked for: row i fed ``samples[i]`` at its position."""

    samples: list[Sample]
    positions: list[int]
    logits_TV: torch.Tensor

    def logits_of(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Of these samples, if all of them were in it and stand where it left them."""
        rows = {id(sample): row for row, sample in enumerate(self.samples)}
        wanted = [rows.get(id(sample), -1) for sample in samples]
        if any(
            row < 0 or self.positions[row] != sample.computed or not sample.wants_token
            for row, sample in zip(wanted, samples, strict=True)
        ):
            return None
        if wanted == list(range(len(self.samples))):
            return self.logits_TV
        return self.logits_TV.index_select(0, torch.tensor(wanted, device=self.logits_TV.device))


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
        self._heads_3T = torch.zeros(3, rows, dtype=torch.int64, device=device)
        """Tokens, positions and slots."""
        self._lengths_T = torch.ones(rows, dtype=torch.int32, device=device)
        self._tables = np.full((rows, pages), cache.num_blocks - 1, dtype=np.int32)
        self._tables_TP = torch.from_numpy(self._tables).to(device, copy=True)
        self._filler = [cache.num_blocks - 1]
        self._rows: list[tuple[list[int], int]] = [(self._filler, 1)] * rows
        """Whose pages stand in the table, and how many."""
        self._hidden = torch.zeros(rows * COLUMNS, dtype=torch.bool, device=device)
        self._placed: tuple[list[Adapter | None], torch.Tensor] | None = None
        """Whose columns stand in it."""
        self._ahead: _Ahead | None = None
        self.taken_ahead = 0
        """Steps that were computed before they were asked for."""
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        logit_rows = rows if capture else 0
        self._logits_TV = torch.zeros(logit_rows, model.vocab_size, dtype=model.dtype, device=device)
        """What all graphs write to."""
        self._generation = self._bank.generation
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @staticmethod
    def suits(model: LoadedModel) -> bool:
        """Whether this is the faster way for a model: on CUDA, outside exact mode, where the kernel runs."""
        if model.device.type != "cuda" or model.exact:
            return False
        reason = why_not(model.num_heads, model.num_kv_heads, model.head_dim, model.dtype, model.device)
        if reason:
            logger.warning("%s decodes without CUDA graphs: %s", model.name, reason)
        return not reason

    def decode(self, samples: Sequence[Sample], owners: Sequence[Adapter | None]) -> torch.Tensor | None:
        """Feed each sample its next token; logits (T, V), or None where the step does not fit in here."""
        ahead, self._ahead = self._ahead, None
        logits_TV = None if ahead is None else ahead.logits_of(samples)
        if logits_TV is not None:
            self.taken_ahead += 1
            return logits_TV
        return self._step(samples, [sample.next_input for sample in samples], owners)

    def run_ahead(self, samples: Sequence[Sample], tokens: Sequence[int], owners: Sequence[Adapter | None]) -> None:
        """Start the step that feeds the samples these tokens, which they don't have yet.

        The next `decode` takes its logits if it asks for no others. What such a step wrote for a sample
        that does not go on lies behind its end, and comes before whatever uses its pages next.
        """
        logits_TV = self._step(samples, tokens, owners)
        if logits_TV is not None:
            self._ahead = _Ahead(list(samples), [sample.computed for sample in samples], logits_TV)

    def forget(self) -> None:
        """Drop what ran ahead, and whatever keeps samples and adapters alive."""
        self._ahead = self._placed = None

    def _step(
        self, samples: Sequence[Sample], tokens: Sequence[int], owners: Sequence[Adapter | None]
    ) -> torch.Tensor | None:
        size = next((size for size in SIZES if size >= len(samples)), None)
        hidden_TC = None if size is None else self._hidden_of(owners, size)
        if size is None or hidden_TC is None:
            return None
        self._fill(samples, tokens, size)
        return self._run(size, hidden_TC)[: len(samples)]

    def _hidden_of(self, owners: Sequence[Adapter | None], size: int) -> torch.Tensor | None:
        """Columns of the bank that each row does not see (T, C), or None: see `AdapterBank.place`."""
        last = self._placed
        if last is not None and last[1].shape[0] == size and _same(last[0], owners):
            return last[1]
        self._placed = None
        hidden = self._bank.place(owners)
        if hidden is None:
            return None
        if self._bank.generation != self._generation:
            self._generation = self._bank.generation
            self._graphs.clear()
            self._seen.clear()
        rows, columns = hidden.shape
        hidden_TC = self._hidden[: size * columns].view(size, columns)
        if columns:
            hidden_TC[:rows].copy_(torch.from_numpy(hidden))
            hidden_TC[rows:].fill_(True)
        self._placed = (list(owners), hidden_TC)
        return hidden_TC

    def _fill(self, samples: Sequence[Sample], tokens: Sequence[int], size: int) -> None:
        page_size, rows = self._cache.block_size, len(samples)
        spare = self._cache.num_blocks - 1
        at = [sample.computed for sample in samples]
        slots = [
            s.blocks[position // page_size] * page_size + position % page_size
            for s, position in zip(samples, at, strict=True)
        ]
        filler = size - rows
        heads = np.array(
            [[*tokens, *[0] * filler], [*at, *[0] * filler], [*slots, *[spare * page_size] * filler]], dtype=np.int64
        )
        self._heads_3T[:, :size].copy_(torch.from_numpy(heads))
        self._lengths_T[:size].copy_(self._heads_3T[1, :size] + 1)
        # A sample's list of blocks only grows; one that was preempted starts another list.
        wanted = [sample.blocks for sample in samples] + [self._filler] * filler
        changed = [
            row
            for row, (blocks, (before, pages)) in enumerate(zip(wanted, self._rows, strict=False))
            if before is not blocks or pages != len(blocks)
        ]
        if changed:
            for row in changed:
                self._tables[row, : len(wanted[row])] = wanted[row]
            width = max(len(wanted[row]) for row in changed)
            low, high = changed[0], changed[-1] + 1
            self._tables_TP[low:high, :width].copy_(torch.from_numpy(self._tables[low:high, :width]))
            for row in changed:  # once it is there: the copy may find no memory
                self._rows[row] = (wanted[row], len(wanted[row]))

    def _run(self, size: int, hidden_TC: torch.Tensor) -> torch.Tensor:
        key = (size, hidden_TC.shape[1])
        if not self._captures or key not in self._seen:
            self._seen.add(key)
            return self._compute(size, hidden_TC)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(size, hidden_TC)
            except torch.OutOfMemoryError:
                self._seen.discard(key)  # training needs it just now; another time, then
                return self._compute(size, hidden_TC)
            except Exception as error:
                # An architecture may do what a graph cannot hold: slower, but right.
                logger.warning("decode steps of %s run without CUDA graphs: %s", self._model.name, error)
                self._captures = False
                self._graphs.clear()
                return self._compute(size, hidden_TC)
        self._graphs[key].replay()
        # A copy: the next step overwrites it.
        return self._logits_TV[:size].clone()

    def _capture(self, size: int, hidden_TC: torch.Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._model.device)
        torch.cuda.synchronize(self._model.device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._logits_TV[:size].copy_(self._compute(size, hidden_TC))
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails at its end stays on its own
        return graph

    def _compute(self, size: int, hidden_TC: torch.Tensor) -> torch.Tensor:
        tokens_T, positions_T, slots_T = self._heads_3T[:, :size]
        attention = StaticAttention(self._cache, slots_T, self._tables_TP[:size], self._lengths_T[:size])
        segments = [Segment(None, 0, size)]
        rows = RowAdapters(self._bank, hidden_TC)
        context = PassContext(segments, attention, tile=DECODE_TILE, sampling=True, row_adapters=rows)
        h_TE = self._model.hidden(tokens_T, positions_T, context)
        return self._model.logits(h_TE, segments, tile=DECODE_TILE, sampling=True, row_adapters=rows)


def _same(left: Sequence[Adapter | None], right: Sequence[Adapter | None]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
