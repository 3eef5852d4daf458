"""The engine core on one CUDA GPU: ``pytest -m gpu``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainsession.engine.api import TrainItem, TrainOutput
from trainsession.engine.engine import LocalEngine
from trainsession.engine.model import load_model
from trainsession.engine.selfcheck import packed_pass
from trainsession.types import AdamParams, Datum, LoraConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def _sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(320, (length,), generator=generator).cuda() for length in lengths]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_logits_agree_with_the_cpu(name: str, dtype: str, tiny_path: Callable[[str], Path]) -> None:
    sequences = _sequences(17, 1, 40)
    gpu = load_model(tiny_path(name), name=name, device="cuda", dtype=dtype)
    cpu = load_model(tiny_path(name), name=name, device="cpu", dtype="float32")
    assert not gpu.exact
    assert gpu.identity == cpu.identity
    _, on_gpu, _ = packed_pass(gpu, sequences)
    _, on_cpu, _ = packed_pass(cpu, [tokens.cpu() for tokens in sequences])
    error_T = (on_gpu.float().cpu() - on_cpu).abs().amax(-1) / on_cpu.abs().amax()
    # A router at a tie may pick another expert in bfloat16, hence the median.
    assert error_T.median() < (1e-5 if dtype == "float32" else 0.03)
    assert dtype != "float32" or error_T.max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_is_bit_equal_in_a_crowd(dtype: str, tiny_model: Path) -> None:
    model = load_model(tiny_model, name="tiny", device="cuda", dtype=dtype, exact=True)
    assert model.exact
    mine, *others = _sequences(13, 200, 50)
    alone, alone_logits, _ = packed_pass(model, [mine])
    crowd, crowd_logits, _ = packed_pass(model, [others[0], mine, others[1]])
    assert torch.equal(crowd[200:213], alone)
    assert torch.equal(crowd_logits[200:213], alone_logits)


def test_training_steps_agree_with_the_cpu(tiny_model: Path) -> None:
    stream = np.random.default_rng(0)
    rows = stream.integers(0, 300, size=(4, 20))
    data = [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]
    weights: dict[str, dict[str, np.ndarray]] = {}
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "cuda"):
        engine = LocalEngine.load(tiny_model, name="tiny", device=device, dtype="float32")
        engine.add_adapter("a", LoraConfig(rank=4, seed=1, train_unembed=True))
        losses[device] = []
        for _ in range(3):
            (output,) = engine.train([TrainItem(adapter_id="a", data=data, loss_fn="cross_entropy")])
            assert isinstance(output, TrainOutput)
            losses[device].append(output.metrics["loss:sum"])
            # A large eps: without it Adam turns the rounding of gradients near zero into whole steps.
            engine.optim_step("a", AdamParams(learning_rate=0.01, eps=1e-3))
        weights[device] = engine.capture("a", optimizer=True).tensors
    assert losses["cpu"][-1] < losses["cpu"][0]
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-5)
    for key, value in weights["cpu"].items():
        # Of the tensor's largest value: after a step each device differentiates at slightly other weights.
        np.testing.assert_allclose(weights["cuda"][key], value, rtol=0, atol=2e-3 * np.abs(value).max(), err_msg=key)
