"""Packed causal attention against plain softmax attention in float64, and alone against in a crowd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.varlen import VarlenAttention

SCALE = 0.3


def inputs(rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads)]


def attend(lengths: Sequence[int], qkv: Sequence[torch.Tensor], window: int | None, *, exact: bool) -> torch.Tensor:
    q, k, v = qkv
    return VarlenAttention(lengths, exact=exact).attend(0, q, k, v, SCALE, window)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """One sequence, softmax written out."""
    length, repeats = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (length if window is None else window))
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_forward_and_backward_equal_plain_attention(window: int | None, kv_heads: int, exact: bool) -> None:
    lengths = (5, 5, 1, 7, 7, 7, 2)
    tensors = [x.requires_grad_() for x in inputs(sum(lengths), kv_heads=kv_heads)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    out = attend(lengths, tensors, window, exact=exact)
    split = zip(*(x.split(lengths) for x in doubles), strict=True)
    expected = torch.cat([reference(q, k, v, window) for q, k, v in split])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weights = inputs(sum(lengths), seed=1)[0]
    actual_grads = torch.autograd.grad(out, tensors, weights)
    expected_grads = torch.autograd.grad(expected, doubles, weights.double())
    for actual, wanted in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, 6),
    st.sampled_from([8, 12, 16]),
    st.sampled_from([None, 4]),
)
def test_a_sequence_has_the_bits_that_it_has_alone(
    neighbours: list[int], length: int, place: int, dim: int, window: int | None
) -> None:
    place = min(place, len(neighbours))
    lengths = [*neighbours[:place], length, *neighbours[place:]]
    start = sum(lengths[:place])
    own = slice(start, start + length)
    crowd = [x.requires_grad_() for x in inputs(sum(lengths), dim=dim)]
    alone = [x[own].detach().clone().requires_grad_() for x in crowd]
    out = attend(lengths, crowd, window, exact=True)
    out_alone = attend([length], alone, window, exact=True)
    assert torch.equal(out[own], out_alone)
    weights = inputs(sum(lengths), dim=dim, seed=1)[0]
    grads = torch.autograd.grad(out, crowd, weights)
    grads_alone = torch.autograd.grad(out_alone, alone, weights[own])
    for together, single in zip(grads, grads_alone, strict=True):
        assert torch.equal(together[own], single)


@pytest.mark.parametrize("copies", [2, 5])
def test_equal_lengths_in_one_call_have_the_bits_of_single_calls(copies: int) -> None:
    qkv = inputs(64 * copies, heads=9, kv_heads=3, dim=64)
    together = attend([64] * copies, qkv, None, exact=True)
    for index in range(copies):
        own = slice(64 * index, 64 * (index + 1))
        assert torch.equal(together[own], attend([64], [x[own] for x in qkv], None, exact=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 17])
def test_flash_on_cuda_equals_plain_attention(window: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    lengths = (33, 128, 1, 200)
    tensors = [x.cuda().bfloat16().requires_grad_() for x in inputs(sum(lengths), dim=64)]
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    out = attend(lengths, tensors, window, exact=False)
    split = zip(*(x.split(lengths) for x in doubles), strict=True)
    expected = torch.cat([reference(q, k, v, window) for q, k, v in split])
    torch.testing.assert_close(out.cpu().double(), expected, atol=3e-2, rtol=3e-2)
    weights = inputs(sum(lengths), dim=64, seed=1)[0]
    actual_grads = torch.autograd.grad(out, tensors, weights.cuda().bfloat16())
    expected_grads = torch.autograd.grad(expected, doubles, weights.double())
    for actual, wanted in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual.cpu().double(), wanted, atol=1e-1, rtol=3e-2)
