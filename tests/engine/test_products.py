from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.context import DECODE_TILE, PASS_TILE
from trainsession.engine.products import PackedWeight, add_row_products, row_products


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), offset=st.integers(0, 5), tile=st.sampled_from([DECODE_TILE, PASS_TILE]))
def test_row_products_are_the_same_bits_for_any_number_of_rows(rows: int, offset: int, tile: int) -> None:
    x, weight = _random(310, 33, seed=1), _random(33, 47, seed=2)
    whole = row_products(x, weight, tile)
    torch.testing.assert_close(whole, x @ weight)
    # ``offset`` rows of 33 floats: a start that is not aligned to anything.
    assert torch.equal(row_products(x[offset : offset + rows], weight, tile), whole[offset : offset + rows])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), offset=st.integers(0, 5), tile=st.sampled_from([DECODE_TILE, PASS_TILE]))
def test_added_row_products_are_the_same_bits_for_any_number_of_rows(rows: int, offset: int, tile: int) -> None:
    x, weight, before = _random(310, 33, seed=1), _random(33, 47, seed=2), _random(310, 47, seed=3)
    whole, part = before.clone(), before.clone()
    add_row_products(whole, x, weight, tile)
    torch.testing.assert_close(whole, before + x @ weight)
    mine = slice(offset, offset + rows)
    add_row_products(part[mine], x[mine], weight, tile)
    assert torch.equal(part[mine], whole[mine])
    assert torch.equal(part[: mine.start], before[: mine.start])
    assert torch.equal(part[mine.stop :], before[mine.stop :])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), offset=st.integers(0, 5), tile=st.sampled_from([DECODE_TILE, PASS_TILE]))
def test_packed_products_are_the_same_bits_for_any_number_of_rows(rows: int, offset: int, tile: int) -> None:
    x, weight = _random(310, 33, seed=1), _random(47, 33, seed=2)
    packed = PackedWeight(weight, DECODE_TILE)
    whole = packed.row_products(x, tile)
    torch.testing.assert_close(whole, x @ weight.t())
    assert torch.equal(packed.row_products(x[offset : offset + rows], tile), whole[offset : offset + rows])
