"""Cuts datums into microbatches and lays microbatches of several calls into packed passes.

Integers only, no torch. A microbatch's content depends on its own call alone: neighbours decide
which pass it travels in, never what it holds, so that they cannot change its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Datums ``start:stop`` of item ``item``, ``tokens`` in all."""

    item: int
    start: int
    stop: int
    tokens: int


def cut(lengths: Sequence[int], budget: int, item: int = 0) -> list[Microbatch]:
    """Consecutive whole datums, as many as fit into ``budget`` tokens at a time.

    A datum longer than the budget is a microbatch of its own.

    Args:
        lengths: Tokens of each datum, all at least 1.
        budget: Tokens of a microbatch, at least 1.
    """
    if budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {budget}")
    batches: list[Microbatch] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > budget:
            batches.append(Microbatch(item, start, index, tokens))
            start, tokens = index, 0
        tokens += length
    if tokens:
        batches.append(Microbatch(item, start, len(lengths), tokens))
    return batches


def tile_of(tokens: int, tiles: Sequence[int]) -> int:
    """The smallest of the ascending ``tiles`` that holds so many tokens, else the largest."""
    return next((tile for tile in tiles if tokens <= tile), tiles[-1])


def plan(
    lengths_by_item: Sequence[Sequence[int]], budget: int, tiles: Sequence[int] | None = None
) -> list[list[Microbatch]]:
    """Packed passes over all items: each holds at most one microbatch of an item, in item order.

    Items take turns, so that a short call shares the first passes of a long one instead of waiting
    behind it. A pass stays within ``budget`` unless a single datum is longer.

    Args:
        lengths_by_item: Tokens of each datum, by item.
        budget: Tokens of a pass.
        tiles: Exact mode's row tiles, ascending: only microbatches of one tile (`tile_of`) share a
            pass, so that a microbatch is computed in the tiles that it has alone.
    """
    queues = [cut(lengths, budget, item)[::-1] for item, lengths in enumerate(lengths_by_item)]
    passes: list[list[Microbatch]] = []
    first = 0
    while any(queues):
        current: list[Microbatch] = []
        room = budget
        for item in (*range(first, len(queues)), *range(first)):
            if not queues[item]:
                continue
            batch = queues[item][-1]
            same_tile = (
                tiles is None or not current or tile_of(batch.tokens, tiles) == tile_of(current[0].tokens, tiles)
            )
            if not current or (same_tile and batch.tokens <= room):
                current.append(queues[item].pop())
                room -= batch.tokens
        passes.append(sorted(current, key=lambda batch: batch.item))
        first = (first + 1) % len(queues)
    return passes
