from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainsession.engine.context import DECODE_TILE, PASS_TILE, PassContext, Segment, running
from trainsession.engine.linear import FrozenLayer, LoraRows, MultiLoraLinear, find_siblings, multi_lora_products
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


def test_bfloat16_rows_with_a_float32_adapter() -> None:
    pair = _pair(1)
    x, weight = _random(9, IN, seed=2).bfloat16(), _random(OUT, IN, seed=3).bfloat16()
    (out,) = multi_lora_products(x, [FrozenLayer(weight)], tile=None, rows=[LoraRows(0, 9, 0.5, [pair])])
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


class _Block(nn.Module):
    """Two layers that share their input, and one that has its own."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([])
        for index, (rows, columns) in enumerate([(OUT, IN), (OUT, IN), (IN, OUT)]):
            base = nn.Linear(columns, rows, bias=False).requires_grad_(False)
            base.weight.copy_(_random(rows, columns, seed=20 + index))
            layer = MultiLoraLinear(base, f"layer{index}", "other")
            layer.exact = exact
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.layers
        return down(torch.tanh(gate(x)) * up(x))


def _block_adapter(seed: int, names: list[str]) -> Adapter:
    shapes = {"layer0": (IN, OUT), "layer1": (IN, OUT), "layer2": (OUT, IN)}
    weights = {
        name: LoraPair(
            nn.Parameter(_random(RANK, shapes[name][0], seed=seed + i)),
            nn.Parameter(_random(shapes[name][1], RANK, seed=seed + 10 + i)),
        )
        for i, name in enumerate(names)
    }
    return Adapter(LoraConfig(rank=RANK, alpha=6.0), weights)


@pytest.mark.parametrize("exact", [False, True])
def test_layers_with_one_input_compute_together_and_give_what_they_give_alone(exact: bool) -> None:
    """Adapters that train all, one or none of the siblings; values and gradients."""
    segments = [
        Segment(_block_adapter(1, ["layer0", "layer1", "layer2"]), 0, 7),
        Segment(None, 7, 9),
        Segment(_block_adapter(2, ["layer1"]), 9, 23),
    ]
    parameters = [p for segment in segments if segment.adapter for p in segment.adapter.parameters()]

    def run(block: _Block) -> list[torch.Tensor]:
        x = _random(23, IN, seed=9).requires_grad_()
        context = PassContext(segments, _Unused(), PASS_TILE)
        with running(context):
            out = block(x)
        assert context.ready == {}
        gradients = torch.autograd.grad(out, [x, *parameters], _random(23, IN, seed=10))
        return [out, *gradients]

    apart, together = _Block(exact), _Block(exact)
    with running(PassContext(segments, _Unused(), PASS_TILE)):
        find_siblings(list(together.layers), lambda: together(_random(23, IN, seed=1)))  # type: ignore[arg-type]
    gate, up, down = together.layers
    assert gate.siblings == up.siblings == (gate, up)
    assert down.siblings == (down,)
    for one, other in zip(run(apart), run(together), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_sibling_that_is_called_with_another_tensor_computes_for_it() -> None:
    block = _Block(exact=False)
    gate, up = block.layers[0], block.layers[1]
    segments = [Segment(None, 0, 5)]
    x, other = _random(5, IN, seed=1), _random(5, IN, seed=2)
    with running(PassContext(segments, _Unused())):
        find_siblings([gate, up], lambda: (gate(x), up(x)))  # type: ignore[list-item]
        out = gate(x), up(other)
    torch.testing.assert_close(out[0], x @ gate.weight.t())  # type: ignore[operator]
    torch.testing.assert_close(out[1], other @ up.weight.t())  # type: ignore[operator]


def test_an_output_that_nobody_uses_gets_no_gradient() -> None:
    block = _Block(exact=False)
    gate, up = block.layers[0], block.layers[1]
    adapter = _block_adapter(1, ["layer0", "layer1"])
    x = _random(5, IN, seed=1).requires_grad_()
    with running(PassContext([Segment(adapter, 0, 5)], _Unused())):
        find_siblings([gate, up], lambda: (gate(x), up(x)))  # type: ignore[list-item]
        gate(x)
        used = up(x)
    used.sum().backward()
    unused = adapter.weights["layer0"]
    assert unused.B.grad is None
    assert unused.A.grad is None or not unused.A.grad.any()
    pair = adapter.weights["layer1"]
    expected = (up.weight + 6.0 / RANK * pair.B @ pair.A).sum(0).expand(5, -1)  # type: ignore[operator]
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_sampling_passes_use_the_packed_weight_and_training_passes_do_not() -> None:
    layer = _layer(exact=True, bias=True)
    layer.packs = True
    x, adapter = _random(7, IN, seed=1), _adapter(1)
    outs = []
    for sampling in (False, True):
        with torch.no_grad(), running(PassContext([Segment(adapter, 0, 7)], _Unused(), sampling=sampling)):
            outs.append(layer(x))
        assert (layer._packed is not None) == sampling
    torch.testing.assert_close(outs[1], outs[0])
