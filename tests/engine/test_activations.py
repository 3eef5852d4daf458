from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainsession.engine.activations import ExactActivation


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    before=st.integers(0, 200),
    width=st.sampled_from([40, 64, 96, 1536]),
    activation=st.sampled_from([nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")]),
    threads=st.sampled_from([1, 2, 3, 5, 16]),
)
def test_activations_are_the_same_bits_anywhere(
    rows: int, before: int, width: int, activation: nn.Module, threads: int
) -> None:
    # Threads that don't divide the elements into whole vectors.
    with _threads(threads):
        _check_activation(rows, before, width, activation)


@pytest.mark.parametrize(
    "activation", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu", "tanh"]
)
@pytest.mark.parametrize("threads", [2, 3, 5, 7])
def test_sizes_just_above_those_that_aten_shares_among_threads(activation: nn.Module, threads: int) -> None:
    """GELU above 16,384 elements runs on every thread, in shares that need not be whole vectors."""
    with _threads(threads):
        for rows in (9, 11, 12, 16, 22):
            _check_activation(3, rows - 6, 1536, activation)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_activation(rows: int, before: int, width: int, activation: nn.Module) -> None:
    exact = ExactActivation(activation)
    x = 3 * _random(rows, width, seed=rows)
    crowd = torch.cat([_random(before, width, seed=1), x, _random(3, width, seed=2)]).requires_grad_()
    alone = x.clone().requires_grad_()
    out_crowd, out_alone = exact(crowd), exact(alone)
    assert torch.equal(out_alone, out_crowd[before : before + rows])
    torch.testing.assert_close(out_alone, activation(x))
    out_crowd.sum().backward()
    out_alone.sum().backward()
    assert alone.grad is not None
    assert crowd.grad is not None
    assert torch.equal(alone.grad, crowd.grad[before : before + rows])
    reference = x.clone().requires_grad_()
    activation(reference).sum().backward()
    torch.testing.assert_close(alone.grad, reference.grad)


@pytest.mark.parametrize(
    "activation", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu", "tanh"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_shared_among_threads_has_the_bits_of_small_parts(
    activation: nn.Module, dtype: torch.dtype
) -> None:
    exact = ExactActivation(activation)
    x = 3 * _random(512, 1024, seed=0).to(dtype)
    whole, rows = x.clone().requires_grad_(), x.clone().requires_grad_()
    out_whole, out_rows = exact(whole), torch.cat([exact(part) for part in rows.split(7)])
    assert torch.equal(out_whole, out_rows)
    weights = _random(512, 1024, seed=1).to(dtype)
    out_whole.backward(weights)
    out_rows.backward(weights)
    assert whole.grad is not None
    assert rows.grad is not None
    assert torch.equal(whole.grad, rows.grad)
