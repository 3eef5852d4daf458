from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainsession.engine.context import DECODE_TILE, PASS_TILE, PassContext, Segment, running
from trainsession.engine.linear import ExactActivation, LoraRows, MultiLoraLinear, multi_lora_product, row_products
from trainsession.engine.lora import Adapter, LoraPair
from trainsession.types import LoraConfig

IN, OUT, RANK = 48, 80, 4


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _pair(seed: int) -> LoraPair:
    return LoraPair(nn.Parameter(_random(RANK, IN, seed=seed)), nn.Parameter(_random(OUT, RANK, seed=seed + 100)))


def _adapter(seed: int) -> Adapter:
    return Adapter(LoraConfig(rank=RANK, alpha=6.0), {"layer": _pair(seed)})


def _layer(*, exact: bool, bias: bool = False) -> MultiLoraLinear:
    base = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    base.weight.copy_(_random(OUT, IN, seed=0))
    layer = MultiLoraLinear(base, "layer", "other")
    layer.exact = exact
    return layer


class _Unused:
    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a linear layer does not attend")


def _run(layer: MultiLoraLinear, x: torch.Tensor, segments: list[Segment], tile: int = PASS_TILE) -> torch.Tensor:
    with running(PassContext(segments, _Unused(), tile)):
        return layer(x)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_each_segment_gets_its_own_adapter_and_gradients(exact: bool, bias: bool) -> None:
    layer = _layer(exact=exact, bias=bias)
    first, second = _adapter(1), _adapter(2)
    x = _random(23, IN, seed=9).requires_grad_()
    segments = [Segment(first, 0, 7), Segment(None, 7, 9), Segment(second, 9, 23)]
    upstream = _random(23, OUT, seed=10)
    out = _run(layer, x, segments)
    out.backward(upstream)

    # The same in float64 with autograd's own products.
    x64 = x.detach().double().requires_grad_()
    factors = {
        adapter: [p.detach().double().requires_grad_() for p in adapter.parameters()] for adapter in (first, second)
    }
    expected = x64 @ layer.weight.double().t() + (layer.bias.double() if layer.bias is not None else 0)
    deltas = []
    for segment in segments:
        rows = x64[segment.start : segment.stop]
        if segment.adapter is None:
            deltas.append(torch.zeros(rows.shape[0], OUT, dtype=torch.float64))
        else:
            a, b = factors[segment.adapter]
            deltas.append(6.0 / RANK * rows @ a.t() @ b.t())
    expected = expected + torch.cat(deltas)
    expected.backward(upstream.double())

    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert x.grad is not None
    assert x64.grad is not None
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-3)
    for adapter in (first, second):
        for parameter, reference in zip(adapter.parameters(), factors[adapter], strict=True):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-5, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(0, 150),
    mine=st.integers(1, 140),
    after=st.integers(0, 40),
    tile=st.sampled_from([DECODE_TILE, PASS_TILE]),
)
def test_exact_rows_and_gradients_do_not_depend_on_neighbours(before: int, mine: int, after: int, tile: int) -> None:
    layer = _layer(exact=True)
    x, upstream = _random(mine, IN, seed=3), _random(mine, OUT, seed=4)

    def run(before: int, after: int) -> list[torch.Tensor]:
        adapter, neighbour = _adapter(1), _adapter(2)
        rows = torch.cat([_random(before, IN, seed=5), x, _random(after, IN, seed=6)]).requires_grad_()
        middle = slice(before, before + mine)
        out = _run(
            layer,
            rows,
            [
                Segment(neighbour, 0, before),
                Segment(adapter, before, middle.stop),
                Segment(None, middle.stop, len(rows)),
            ],
            tile,
        )
        dout = torch.cat([_random(before, OUT, seed=7), upstream, _random(after, OUT, seed=8)])
        out.backward(dout)
        assert rows.grad is not None
        gradients = [parameter.grad for parameter in adapter.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return [out[middle], rows.grad[middle], *[g for g in gradients if g is not None]]

    for alone, crowded in zip(run(0, 0), run(before, after), strict=True):
        assert torch.equal(alone, crowded)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), offset=st.integers(0, 5), tile=st.sampled_from([DECODE_TILE, PASS_TILE]))
def test_row_products_are_the_same_bits_for_any_number_of_rows(rows: int, offset: int, tile: int) -> None:
    x, weight = _random(310, 33, seed=1), _random(33, 47, seed=2)
    whole = row_products(x, weight, tile)
    torch.testing.assert_close(whole, x @ weight)
    # ``offset`` rows of 33 floats: a start that is not aligned to anything.
    assert torch.equal(row_products(x[offset : offset + rows], weight, tile), whole[offset : offset + rows])


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    before=st.integers(0, 200),
    width=st.sampled_from([40, 64, 96, 1536]),
    activation=st.sampled_from([nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")]),
    threads=st.sampled_from([1, 3, 5]),
)
def test_activations_are_the_same_bits_anywhere(
    rows: int, before: int, width: int, activation: nn.Module, threads: int
) -> None:
    # Threads that don't divide the elements into whole vectors.
    with _threads(threads):
        _check_activation(rows, before, width, activation)


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


def test_bfloat16_rows_with_a_float32_adapter() -> None:
    pair = _pair(1)
    x, weight = _random(9, IN, seed=2).bfloat16(), _random(OUT, IN, seed=3).bfloat16()
    out = multi_lora_product(x, weight, tile=None, spans=[LoraRows(0, 9, 0.5)], pairs=[pair])
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    expected = x.float() @ weight.float().t() + 0.5 * x.float() @ pair.A.detach().t() @ pair.B.detach().t()
    assert (out.float() - expected).abs().max() < 0.02 * expected.abs().max()
    assert pair.A.grad is not None
    assert pair.A.grad.dtype == torch.float32


def test_a_module_that_sees_other_rows_than_the_pass_is_refused() -> None:
    with pytest.raises(RuntimeError, match="row by row"):
        _run(_layer(exact=False), _random(5, IN, seed=1), [Segment(_adapter(1), 0, 9)])


def test_frozen_rows_keep_no_input_for_the_backward() -> None:
    """A layer without adapters must not hold its input until the backward."""
    layer = _layer(exact=False)
    out = _run(layer, _random(6, IN, seed=1).requires_grad_(), [Segment(None, 0, 6)])
    saved = [tensor for tensor in out.grad_fn.next_functions[0][0].saved_tensors if tensor is not None]  # type: ignore[union-attr]
    assert [tuple(tensor.shape) for tensor in saved] == [(OUT, IN)]
