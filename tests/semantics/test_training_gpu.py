"""Training on one CUDA GPU: the CPU's float32 results, and exact mode's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.optim import AdamState, optim_step
from trainsession.engine.trainer import Trainer
from trainsession.types import AdamParams

from .training import (
    LOSS_CONFIGS,
    arrays_equal,
    assert_close,
    data_for,
    equal,
    item,
    make_adapter,
    run,
    run_all,
    sft_data,
    take_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (9, 4, 130, 1, 70)


def on_cuda(path: Path, dtype: str, *, exact: bool) -> LoadedModel:
    return load_model(path, name="tiny", device="cuda", dtype=dtype, exact=exact)


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("loss_fn", LOSS_CONFIGS)
@pytest.mark.parametrize("train_unembed", [False, True])
def test_float32_gives_the_cpus_results(
    loaded: Callable[[str], LoadedModel], tiny_model: Path, loss_fn: str, train_unembed: bool
) -> None:
    cpu, cuda = loaded("llama"), on_cuda(tiny_model, "float32", exact=False)
    data = data_for(loss_fn, cpu, LENGTHS)
    one, two = (make_adapter(model, train_unembed=train_unembed) for model in (cpu, cuda))
    expected = run(Trainer(cpu), one, data, loss_fn)
    actual = run(Trainer(cuda, token_budget=150), two, data, loss_fn)
    for mine, wanted in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-4)
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-3)
    assert_close(on_host(take_gradients(two)), take_gradients(one), 2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_exact_mode_has_the_same_bits_alone_and_in_a_crowd(tiny_model: Path, dtype: str, loss_fn: str) -> None:
    model = on_cuda(tiny_model, dtype, exact=True)
    trainer = Trainer(model, token_budget=300)
    mine, other = make_adapter(model, 0), make_adapter(model, 1)
    data = data_for(loss_fn, model, LENGTHS)
    alone = run(trainer, mine, data, loss_fn)
    grads = take_gradients(mine)
    outputs = run_all(
        trainer,
        [item(sft_data(model, (50, 20), seed=5), "cross_entropy", "other"), item(data, loss_fn, "mine")],
        {"mine": mine, "other": other},
    )
    assert arrays_equal(outputs[1].logprobs, alone.logprobs)
    assert outputs[1].metrics == alone.metrics
    assert equal(take_gradients(mine), grads)


@pytest.mark.parametrize("exact", [True, False])
def test_bfloat16_learns_and_forward_equals_forward_backward(tiny_model: Path, exact: bool) -> None:
    model = on_cuda(tiny_model, "bfloat16", exact=exact)
    trainer, adapter = Trainer(model), make_adapter(model)
    state, data = AdamState.fresh(adapter), sft_data(model, (100, 60))
    forward = run(trainer, adapter, data, "cross_entropy", backward=False)
    losses = []
    for step in range(30):
        output = run(trainer, adapter, data, "cross_entropy")
        if step == 0:
            assert arrays_equal(output.logprobs, forward.logprobs)
        losses.append(output.metrics["loss:sum"])
        optim_step(adapter, state, AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.8 * losses[0]
