"""Turns the scheduler's integers into packed passes of the model.

Rows are sorted by weights, so that the rows of one adapter are adjacent.

Shapes: T rows of a pass, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..context import DECODE_TILE, PassContext, Segment
from ..lora import Adapter
from ..model import LoadedModel
from .attention import DecodeGroup, PagedAttention, PrefillGroup, padded_blocks
from .kv_cache import KVCache
from .scheduler import Chunk
from .sequence import Request
from .sequence import Sequence as Sample
from .static import StaticDecoder
from .windows import DecodeWindows

_LOGIT_ROWS = 128
"""Rows of which logits exist at once where every prompt position is scored."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Logits of consecutive prompt positions ``start:stop`` of a request."""

    request: Request
    start: int
    stop: int
    logits_TV: torch.Tensor


class Runner:
    """Runs prefill and decode passes over the cache.

    Args:
        static: Runs the decode steps that fit in there.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, static: StaticDecoder | None = None) -> None:
        self._model = model
        self._cache = cache
        self._static = static
        self._windows = DecodeWindows(cache)

    def release(self) -> None:
        """Give back memory that is kept from step to step."""
        self._windows.keep(set())
        if self._static is not None:
            self._static.forget()

    @property
    def runs_ahead(self) -> bool:
        """Whether decode steps can be started before it is known which samples go on."""
        return self._static is not None

    def run_ahead(self, going_on: Sequence[tuple[Sample, int]], adapters: Mapping[str, Adapter | None]) -> None:
        """Start the next decode step of samples, with the tokens that they were just given."""
        if self._static is not None and going_on:
            owners = [adapters[sample.request.id] for sample, _ in going_on]
            self._static.run_ahead([s for s, _ in going_on], [token for _, token in going_on], owners)

    def prefill(
        self,
        chunks: Sequence[Chunk],
        adapters: Mapping[str, Adapter | None],
        on_scored: Callable[[ScoredRows], None],
    ) -> dict[str, torch.Tensor]:
        """Compute chunks of prompts.

        Args:
            chunks: What to compute.
            adapters: By request id.
            on_scored: Called with the logits of every position of prompts whose logprobs are wanted.

        Returns:
            Logits (V,) of the last position, by request id, of the prompts that are complete now.
        """
        chunks = sorted(chunks, key=lambda chunk: chunk.request.weights_key)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        for chunk in chunks:
            starts.append(len(tokens))
            tokens += chunk.request.prompt[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += self._cache.slots(chunk.request.prompt_blocks, chunk.start, chunk.stop)
        attention = PagedAttention(self._cache, self._tensor(slots), self._prefill_groups(chunks, starts))
        owners = [adapters[chunk.request.id] for chunk in chunks]
        segments = _segments(owners, [*starts, len(tokens)])
        h_TE = self._model.hidden(
            self._tensor(tokens), self._tensor(positions), PassContext(segments, attention, sampling=True)
        )
        for chunk, start, adapter in zip(chunks, starts, owners, strict=True):
            if not chunk.request.prompt_scored:
                for scored in self._score(chunk, h_TE[start : start + chunk.stop - chunk.start], adapter):
                    on_scored(scored)
        ends = [
            (chunk, start + chunk.stop - chunk.start - 1, adapter)
            for chunk, start, adapter in zip(chunks, starts, owners, strict=True)
            if chunk.stop == len(chunk.request.prompt) and chunk.request.pending
        ]
        if not ends:
            return {}
        rows = self._tensor([row for _, row, _ in ends])
        logits_TV = self._logits(h_TE.index_select(0, rows), [adapter for _, _, adapter in ends])
        return {chunk.request.id: logits_V for (chunk, _, _), logits_V in zip(ends, logits_TV, strict=True)}

    def decode(
        self, samples: Sequence[Sample], adapters: Mapping[str, Adapter | None]
    ) -> tuple[list[Sample], torch.Tensor]:
        """Feed each sample its next token.

        Returns:
            The samples that want a new token, and their logits (T, V) in the model's dtype.
        """
        if self._static is not None:
            owners = [adapters[sample.request.id] for sample in samples]
            logits_TV = self._static.decode(samples, owners)
            if logits_TV is not None:
                wanting = [i for i, sample in enumerate(samples) if sample.wants_token]
                if len(wanting) < len(samples):
                    logits_TV = logits_TV.index_select(0, self._tensor(wanting))
                return [samples[i] for i in wanting], logits_TV
        return self._decode_packed(samples, adapters)

    def _decode_packed(
        self, samples: Sequence[Sample], adapters: Mapping[str, Adapter | None]
    ) -> tuple[list[Sample], torch.Tensor]:
        size = self._cache.block_size
        samples = sorted(samples, key=lambda s: (s.request.weights_key, padded_blocks(s.computed // size + 1)))
        lengths = [padded_blocks(sample.computed // size + 1) for sample in samples]
        order = sorted(range(len(samples)), key=lengths.__getitem__)
        in_groups, groups = self._decode_groups([samples[i] for i in order], [lengths[i] for i in order])
        row_of = {id(sample): row for row, sample in enumerate(samples)}
        order = [row_of[id(sample)] for sample in in_groups]
        back = sorted(range(len(samples)), key=order.__getitem__)
        in_order = order == list(range(len(samples)))
        attention = PagedAttention(
            self._cache,
            self._tensor([slot for s in samples for slot in self._cache.slots(s.blocks, s.computed, s.computed + 1)]),
            groups,
            None if in_order else (self._tensor(order), self._tensor(back)),
        )
        owners = [adapters[sample.request.id] for sample in samples]
        context = PassContext(
            _segments(owners, list(range(len(samples) + 1))), attention, tile=DECODE_TILE, sampling=True
        )
        h_TE = self._model.hidden(
            self._tensor([sample.next_input for sample in samples]),
            self._tensor([sample.computed for sample in samples]),
            context,
        )
        wanting = [i for i, sample in enumerate(samples) if sample.wants_token]
        if len(wanting) < len(samples):
            h_TE = h_TE.index_select(0, self._tensor(wanting))
        if not wanting:
            return [], h_TE.new_empty(0, self._model.vocab_size)
        return [samples[i] for i in wanting], self._logits(h_TE, [owners[i] for i in wanting])

    # --- parts of a pass -------------------------------------------------------------------
    def _prefill_groups(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> list[PrefillGroup]:
        size = self._cache.block_size
        members: dict[tuple[int, int], list[int]] = {}
        for i, chunk in enumerate(chunks):
            members.setdefault((chunk.start // size, -(-chunk.stop // size)), []).append(i)
        groups: list[PrefillGroup] = []
        for (first, last), indices in members.items():
            rows: list[int] = []
            valid: list[int] = []
            for i in indices:
                count = chunks[i].stop - chunks[i].start
                valid += range(len(rows), len(rows) + count)
                rows += range(starts[i], starts[i] + count)
                rows += [starts[i] + count - 1] * ((last - first) * size - count)
            rows_T, valid_T = self._tensor(rows), self._tensor(valid)
            groups.append(
                PrefillGroup(
                    cache_rows=self._cache.rows_of([chunks[i].request.prompt_blocks[:last] for i in indices]),
                    first=first,
                    last=last,
                    rows_BUS=rows_T.view(len(indices), last - first, size),
                    valid=valid_T,
                    rows_out=rows_T.index_select(0, valid_T),
                )
            )
        return groups

    def _decode_groups(
        self, samples: Sequence[Sample], lengths: Sequence[int]
    ) -> tuple[list[Sample], list[DecodeGroup]]:
        """The samples, sorted by ``lengths`` (blocks), in the order of the rows of their windows; and the groups."""
        in_order: list[Sample] = []
        groups: list[DecodeGroup] = []
        size = self._cache.block_size
        self._windows.keep({blocks * size for blocks in lengths})
        for blocks, run in groupby(zip(samples, lengths, strict=True), key=lambda pair: pair[1]):
            start = len(in_order)
            window, members, new_rows = self._windows.place(blocks * size, [sample for sample, _ in run])
            in_order += members
            gathered = members if window is None else [members[row] for row in new_rows]
            # Padding repeats the last block: any finite numbers do, they are masked.
            tables = [(s.blocks + [s.blocks[-1]] * blocks)[:blocks] for s in gathered]
            groups.append(
                DecodeGroup(
                    cache_rows=self._cache.rows_of(tables) if tables else None,
                    start=start,
                    stop=len(in_order),
                    positions_B=self._tensor([s.computed for s in members]),
                    keys=blocks * size,
                    window=window,
                    new_rows=self._tensor(new_rows) if new_rows else None,
                )
            )
        return in_order, groups

    def _score(self, chunk: Chunk, h_TE: torch.Tensor, adapter: Adapter | None) -> Iterator[ScoredRows]:
        for start in range(0, h_TE.shape[0], _LOGIT_ROWS):
            part = h_TE[start : start + _LOGIT_ROWS]
            logits_TV = self._model.logits(part, [Segment(adapter, 0, part.shape[0])], sampling=True)
            first = chunk.start + start
            yield ScoredRows(chunk.request, first, first + part.shape[0], logits_TV)

    def _logits(self, h_TE: torch.Tensor, owners: Sequence[Adapter | None]) -> torch.Tensor:
        segments = _segments(owners, list(range(len(owners) + 1)))
        return self._model.logits(h_TE, segments, tile=DECODE_TILE, sampling=True)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)


def _segments(owners: Sequence[Adapter | None], bounds: Sequence[int]) -> list[Segment]:
    """One segment per run of rows of the same adapter; run ``i`` is ``bounds[i]:bounds[i + 1]``."""
    segments: list[Segment] = []
    for i, adapter in enumerate(owners):
        if segments and segments[-1].adapter is adapter:
            segments[-1] = Segment(adapter, segments[-1].start, bounds[i + 1])
        else:
            segments.append(Segment(adapter, bounds[i], bounds[i + 1]))
    return segments
