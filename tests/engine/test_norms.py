"""RMSNorm's own backward against autograd through transformers' module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trainsession.engine.norms import install_norms


def _norm(width: int, dtype: torch.dtype = torch.float32) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm.requires_grad_(False)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradient_is_autograds_and_the_output_the_modules_own_bits(dtype: torch.dtype, tolerance: float) -> None:
    theirs, ours = _norm(96, dtype), _norm(96, dtype)
    assert install_norms(ours) == 1
    x, dout = (_random(2, 7, 96, seed=seed).to(dtype) for seed in (2, 3))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [norm(leaf) for norm, leaf in zip((theirs, ours), inputs, strict=True)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], ours(x))
    # The reference has no rounding of its own: the formula in float64 at the same values.
    exact = x.double().requires_grad_()
    (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5) * theirs.weight.double()).backward(dout.double())
    for out, leaf in zip(outs, inputs, strict=True):
        out.backward(dout)
        assert leaf.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), before=st.integers(0, 200), width=st.sampled_from([40, 64, 96, 576]))
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(rows: int, before: int, width: int) -> None:
    norm = _norm(width)
    install_norms(norm)
    x, dout = _random(rows, width, seed=rows), _random(rows, width, seed=4)
    crowd = torch.cat([_random(before, width, seed=5), x, _random(3, width, seed=6)]).requires_grad_()
    crowd_dout = torch.cat([_random(before, width, seed=7), dout, _random(3, width, seed=8)])
    alone = x.clone().requires_grad_()
    out_crowd, out_alone = norm(crowd), norm(alone)
    out_crowd.backward(crowd_dout)
    out_alone.backward(dout)
    assert crowd.grad is not None
    assert torch.equal(out_alone, out_crowd[before : before + rows])
    assert alone.grad is not None
    assert torch.equal(alone.grad, crowd.grad[before : before + rows])


def test_norms_of_another_formula_stay_as_they_are() -> None:
    gemma = GemmaRMSNorm(64)
    nn.init.normal_(gemma.weight, generator=torch.Generator().manual_seed(1))
    x = _random(3, 64, seed=2)
    before = gemma(x)
    assert install_norms(nn.ModuleList([gemma, nn.LayerNorm(64)])) == 0
    assert torch.equal(gemma(x), before)
