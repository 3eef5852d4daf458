"""In which order items are seen: by seed and epoch alone, from any place on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from .config import UsageError

T = TypeVar("T")


class Shuffled(Generic[T]):
    """Items without end, in another order each epoch.

    Where it stands is two whole numbers, so a run goes on in the middle of an epoch with nothing
    else saved: a new `Shuffled` of the same items and seed, at that `position`, gives what this one
    would have given. The order depends on the seed, the epoch and the number of items; not on the
    process, the machine or Python's hash seed.

    Args:
        items: At least one.
        seed: Of the orders.
        position: Epoch, and how many of its items were taken.

    Attributes:
        position: Where it stands.
    """

    def __init__(self, items: Sequence[T], seed: int, position: tuple[int, int] = (0, 0)) -> None:
        epoch, taken = position
        if not items:
            raise ValueError("there are no items to shuffle")
        if epoch < 0 or not 0 <= taken <= len(items):
            raise ValueError(f"position {epoch}, {taken}: there are {len(items)} items in an epoch")
        self._items = items
        self._seed = seed
        self.position = epoch, taken
        self._order = self._order_of(epoch)

    def take(self, count: int) -> list[T]:
        """The next items; an epoch may end among them."""
        taken: list[T] = []
        while len(taken) < count:
            epoch, start = self.position
            end = min(start + count - len(taken), len(self._items))
            taken += [self._items[index] for index in self._order[start:end]]
            self.position = epoch, end
            if end == len(self._items):
                self.position = epoch + 1, 0
                self._order = self._order_of(epoch + 1)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._items)))
        # Of a text Random takes the SHA-512, not Python's hash.
        random.Random(f"order {self._seed} {epoch}").shuffle(order)
        return order


def split(items: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Training and held-out items, chosen by ``seed``; at least one of each.

    Raises:
        UsageError: fewer than two items.
    """
    order = list(range(len(items)))
    random.Random(f"split {seed}").shuffle(order)
    count = min(max(1, round(fraction * len(order))), len(order) - 1)
    if count < 1:
        raise UsageError(f"{len(order)} usable examples: at least 2 are needed, one of them held out")
    return [items[index] for index in order[count:]], [items[index] for index in order[:count]]
