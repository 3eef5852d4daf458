"""An order that depends on seed and epoch alone, and goes on from two whole numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.lib.config import UsageError
from cookbook.lib.order import Shuffled, split

counts = st.lists(st.integers(0, 9), max_size=8)


@given(size=st.integers(1, 12), seed=st.integers(), before=counts, after=counts)
def test_a_run_goes_on_where_another_stopped(size: int, seed: int, before: list[int], after: list[int]) -> None:
    items = [f"item {index}" for index in range(size)]
    whole = Shuffled(items, seed)
    for count in before:
        assert len(whole.take(count)) == count
    resumed = Shuffled(list(items), seed, whole.position)
    assert [whole.take(count) for count in after] == [resumed.take(count) for count in after]
    assert whole.position == resumed.position == divmod(sum(before) + sum(after), size)


@given(size=st.integers(1, 12), seed=st.integers(), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_each_epoch_has_every_item_once_however_it_is_taken(size: int, seed: int, sizes: list[int]) -> None:
    order, pieces = Shuffled(range(size), seed), Shuffled(range(size), seed)
    taken: list[int] = []
    for count in sizes:
        taken += pieces.take(count)
    epochs = len(taken) // size
    assert order.take(len(taken)) == taken
    for epoch in range(epochs):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    first, second = Shuffled(range(50), 0), Shuffled(range(50), 1)
    one, two = first.take(50), first.take(50)
    assert len({tuple(one), tuple(two), tuple(second.take(50)), tuple(range(50))}) == 4


def test_the_order_is_the_same_in_every_process() -> None:
    """These very numbers: another process, hash seed or version must not change a resumed run."""
    expected = "[0, 1, 7, 3, 6, 4, 2, 5, 1, 5, 2, 3, 6, 0, 4, 7] (['e', 'b', 'a', 'd', 'c', 'h'], ['g', 'f'])"
    shown = "Shuffled(range(8), 3).take(16), split('abcdefgh', 0.3, 3)"
    code = f"from cookbook.lib.order import Shuffled, split; print({shown})"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == expected
    assert f"{Shuffled(range(8), 3).take(16)} {split('abcdefgh', 0.3, 3)}" == expected


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (0, 4)])
def test_a_position_of_other_items_is_refused(position: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="there are 3 items in an epoch"):
        Shuffled(range(3), 0, position)
    with pytest.raises(ValueError, match="no items"):
        Shuffled([], 0)


def test_split_covers_everything_once() -> None:
    train, test = split(range(20), 0.1, seed=0)
    assert (len(train), len(test)) == (18, 2)
    assert sorted([*train, *test]) == list(range(20))
    assert [len(part) for part in split(range(2), 0.9, seed=0)] == [1, 1]
    assert split(range(20), 0.5, 1) != split(range(20), 0.5, 2)
    with pytest.raises(UsageError, match="at least 2"):
        split(range(1), 0.1, seed=0)
