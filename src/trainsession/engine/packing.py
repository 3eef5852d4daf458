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


def plan(lengths_by_item: Sequence[Sequence[int]], budget: int) -> list[list[Microbatch]]:
    """Packed passes over all items: each holds at most one microbatch of an item, in item order.

    Items take turns, so that a short call shares the first passes of a long one instead of waiting
    behind it. A pass stays within ``budget`` unless a single datum is longer.
    """
    queues = [cut(lengths, budget, item)[::-1] for item, lengths in enumerate(lengths_by_item)]
    passes: list[list[Microbatch]] = []
    first = 0
    while any(queues):
        current: list[Microbatch] = []
        room = budget
        order = [*range(first, len(queues)), *range(first)]
        for item in order:
            if queues[item] and (not current or queues[item][-1].tokens <= room):
                current.append(queues[item].pop())
                room -= current[-1].tokens
        passes.append(sorted(current, key=lambda batch: batch.item))
        first = (first + 1) % len(queues)
    return passes
