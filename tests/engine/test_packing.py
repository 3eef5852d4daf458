"""Every datum exactly once, in order, within the budget, and no call's cut depends on another's."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainsession.engine.packing import Microbatch, cut, plan, tile_of

lengths = st.lists(st.integers(1, 40), max_size=30)
budgets = st.integers(1, 64)
TILES = (4, 16, 32)


@given(lengths, budgets)
def test_cut_holds_every_datum_once_in_order(lengths: list[int], budget: int) -> None:
    batches = cut(lengths, budget)
    assert [index for batch in batches for index in range(batch.start, batch.stop)] == list(range(len(lengths)))
    assert all(batch.tokens == sum(lengths[batch.start : batch.stop]) for batch in batches)


@given(lengths, budgets)
def test_cut_respects_the_budget_unless_one_datum_is_longer(lengths: list[int], budget: int) -> None:
    for batch in cut(lengths, budget):
        assert batch.tokens <= budget or batch.stop - batch.start == 1


@given(lengths, budgets)
def test_cut_is_greedy(lengths: list[int], budget: int) -> None:
    batches = cut(lengths, budget)
    for batch, following in pairwise(batches):
        assert batch.tokens + lengths[following.start] > budget


@given(st.lists(lengths, min_size=1, max_size=5), budgets, st.sampled_from([None, TILES]))
def test_an_item_is_cut_as_if_it_were_alone(items: list[list[int]], budget: int, tiles: tuple[int, ...] | None) -> None:
    passes = plan(items, budget, tiles)
    for item, lengths in enumerate(items):
        own = [batch for batches in passes for batch in batches if batch.item == item]
        assert own == cut(lengths, budget, item)


@given(st.lists(lengths, min_size=1, max_size=5), budgets)
def test_passes_respect_the_budget_and_hold_an_item_once(items: list[list[int]], budget: int) -> None:
    for batches in plan(items, budget):
        assert batches
        assert [batch.item for batch in batches] == sorted({batch.item for batch in batches})
        assert sum(batch.tokens for batch in batches) <= budget or len(batches) == 1


@given(st.lists(lengths, min_size=1, max_size=5), budgets)
def test_a_pass_holds_microbatches_of_one_tile(items: list[list[int]], budget: int) -> None:
    for batches in plan(items, budget, TILES):
        assert len({tile_of(batch.tokens, TILES) for batch in batches}) == 1


def test_the_tile_is_the_smallest_that_holds_the_tokens() -> None:
    assert [tile_of(tokens, TILES) for tokens in (1, 4, 5, 16, 17, 99)] == [4, 4, 16, 16, 32, 32]


def test_a_short_item_does_not_wait_behind_a_long_one() -> None:
    passes = plan([[8] * 10, [2]], 10)
    assert passes[0] == [Microbatch(0, 0, 1, 8), Microbatch(1, 0, 1, 2)]


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cut([1], 0)


@pytest.mark.parametrize("module", ["packing", "loss_inputs"])
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import trainsession.engine.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
