"""AdamW against torch's own, and its refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from trainsession.engine.lora import Adapter, LoraPair
from trainsession.engine.optim import AdamState, optim_step
from trainsession.errors import NoGradients, NonFinite
from trainsession.types import AdamParams, LoraConfig


def make_adapter(seed: int = 0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator))

    pairs = {name: LoraPair(matrix(2, 6), matrix(5, 2)) for name in ("q_proj", "up_proj")}
    return Adapter(LoraConfig(rank=2, seed=seed), pairs)


def give_gradients(adapter: Adapter, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    grads = [torch.randn(parameter.shape, generator=generator) for parameter in adapter.parameters()]
    for parameter, grad in zip(adapter.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    return grads


def snapshot(adapter: Adapter, state: AdamState) -> list[torch.Tensor]:
    tensors = [*adapter.parameters(), *state.exp_avg, *state.exp_avg_sq]
    return [tensor.detach().clone() for tensor in tensors] + [torch.tensor(state.step)]


def unchanged(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_torchs_adamw(decay: float) -> None:
    adapter = make_adapter()
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in adapter.parameters()]
    reference = torch.optim.AdamW(twins, lr=1e-2, betas=(0.8, 0.97), eps=1e-8, weight_decay=decay)
    state = AdamState.fresh(adapter)
    params = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.97, eps=1e-8, weight_decay=decay)
    for step in range(1, 6):
        for twin, grad in zip(twins, give_gradients(adapter, step), strict=True):
            twin.grad = grad
        metrics = optim_step(adapter, state, params)
        reference.step()
        assert metrics["step"] == step
        for mine, theirs in zip(adapter.parameters(), twins, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_parameters_are_per_call() -> None:
    adapter = make_adapter()
    state = AdamState.fresh(adapter)
    give_gradients(adapter, 0)
    optim_step(adapter, state, AdamParams(learning_rate=1e-2))
    before = snapshot(adapter, state)[0]
    give_gradients(adapter, 1)
    optim_step(adapter, state, AdamParams(learning_rate=0.0))
    assert torch.equal(before, adapter.parameters()[0])
    assert state.step == 2


def test_the_first_step_moves_every_weight_by_the_learning_rate() -> None:
    adapter = make_adapter()
    before = [parameter.detach().clone() for parameter in adapter.parameters()]
    grads = give_gradients(adapter, 0)
    optim_step(adapter, AdamState.fresh(adapter), AdamParams(learning_rate=1e-3))
    for old, new, grad in zip(before, adapter.parameters(), grads, strict=True):
        torch.testing.assert_close(new, old - 1e-3 * grad.sign(), rtol=0, atol=1e-6)


def test_norms_are_global_and_before_clipping() -> None:
    adapter = make_adapter()
    before = torch.cat([parameter.detach().flatten() for parameter in adapter.parameters()])
    grads = give_gradients(adapter, 0)
    metrics = optim_step(adapter, AdamState.fresh(adapter), AdamParams(grad_clip_norm=0.1))
    after = torch.cat([parameter.detach().flatten() for parameter in adapter.parameters()])
    assert metrics["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in grads]).norm().item(), rel=1e-6)
    assert metrics["update_norm"] == pytest.approx((after - before).norm().item(), rel=1e-3)


def test_clipping_scales_this_adapters_gradients_to_the_norm() -> None:
    adapter, state = make_adapter(), AdamState.fresh(make_adapter())
    other = make_adapter(1)
    other_grads = give_gradients(other, 1)
    grads = give_gradients(adapter, 0)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    optim_step(adapter, state, AdamParams(beta1=0.0, grad_clip_norm=0.5))
    for moment, grad in zip(state.exp_avg, grads, strict=True):
        torch.testing.assert_close(moment, grad * (0.5 / norm), rtol=1e-5, atol=1e-7)
    assert unchanged(other_grads, [parameter.grad for parameter in other.parameters() if parameter.grad is not None])


def test_clipping_leaves_small_gradients_alone() -> None:
    one, two = make_adapter(), make_adapter()
    for adapter, clip in ((one, 0.0), (two, 1e6)):
        give_gradients(adapter, 0)
        optim_step(adapter, AdamState.fresh(adapter), AdamParams(grad_clip_norm=clip))
    assert unchanged(list(one.parameters()), list(two.parameters()))


def test_lora_plus_raises_bs_learning_rate_only() -> None:
    plain, plus = make_adapter(), make_adapter()
    start = make_adapter()
    for adapter, ratio in ((plain, 1.0), (plus, 16.0)):
        give_gradients(adapter, 0)
        optim_step(adapter, AdamState.fresh(adapter), AdamParams(learning_rate=1e-4, lora_plus_ratio=ratio))
    for name, pair in start.weights.items():
        assert torch.equal(plain.weights[name].A, plus.weights[name].A)
        moved, moved_plus = plain.weights[name].B - pair.B, plus.weights[name].B - pair.B
        torch.testing.assert_close(moved_plus, 16 * moved, rtol=1e-2, atol=1e-6)


def test_gradients_are_cleared_and_a_second_step_needs_new_ones() -> None:
    adapter, state = make_adapter(), AdamState.fresh(make_adapter())
    give_gradients(adapter, 0)
    optim_step(adapter, state, AdamParams())
    before = snapshot(adapter, state)
    with pytest.raises(NoGradients):
        optim_step(adapter, state, AdamParams())
    assert unchanged(before, snapshot(adapter, state))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_a_gradient_that_is_or_squares_to_non_finite_changes_nothing(bad: float) -> None:
    adapter, state = make_adapter(), AdamState.fresh(make_adapter())
    give_gradients(adapter, 0)
    optim_step(adapter, state, AdamParams())
    give_gradients(adapter, 1)
    grad = adapter.weights["up_proj"].B.grad
    assert grad is not None
    grad[0, 0] = bad
    before = snapshot(adapter, state)
    pending = [copy.deepcopy(parameter.grad) for parameter in adapter.parameters()]
    with pytest.raises(NonFinite, match=r"up_proj\.lora_B"):
        optim_step(adapter, state, AdamParams())
    assert unchanged(before, snapshot(adapter, state))
    for kept, parameter in zip(pending, adapter.parameters(), strict=True):
        assert kept is not None
        assert parameter.grad is not None
        assert torch.equal(kept.nan_to_num(7.0), parameter.grad.nan_to_num(7.0))


def test_a_learning_rate_that_overflows_the_weights_changes_nothing() -> None:
    adapter, state = make_adapter(), AdamState.fresh(make_adapter())
    give_gradients(adapter, 0)
    before = snapshot(adapter, state)
    with pytest.raises(NonFinite, match="the new weight"):
        optim_step(adapter, state, AdamParams(learning_rate=1e39))
    assert unchanged(before, snapshot(adapter, state))


def test_tiny_and_zero_gradients_stay_finite() -> None:
    adapter, state = make_adapter(), AdamState.fresh(make_adapter())
    for parameter in adapter.parameters():
        parameter.grad = torch.full_like(parameter, 1e-30)
        parameter.grad[0] = 0.0
    metrics = optim_step(adapter, state, AdamParams())
    assert 0 <= metrics["update_norm"] < 1e-3
