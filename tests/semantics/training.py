"""Small training calls for the semantics tests, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainsession.engine.api import TrainItem, TrainOutput
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.trainer import Trainer
from trainsession.types import Datum, LoraConfig

LOSS_CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {},
    "cispo": {},
    "dro": {"beta": 0.05},
    "gspo": {},
}


def make_adapter(model: LoadedModel, seed: int = 0, **config: Any) -> Adapter:
    """An adapter whose B is not zero, so that every factor has a gradient."""
    adapter = new_adapter(LoraConfig(rank=4, alpha=8, seed=seed, **config), model.lora_modules, model.device)
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for pair in adapter.weights.values():
            pair.B.copy_(torch.randn(pair.B.shape, generator=generator) * 0.05)
    return adapter


def sft_data(model: LoadedModel, lengths: Sequence[int], seed: int = 0, **inputs: Any) -> list[Datum]:
    stream = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = stream.integers(3, model.vocab_size, length + 1)
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **inputs}))
    return data


def rl_data(model: LoadedModel, lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    """Prompts of about a third (weight and advantage 0), then tokens with an advantage."""
    stream = np.random.default_rng(seed)
    data = []
    for datum in sft_data(model, lengths, seed):
        length = datum.model_input.length
        weights = np.where(np.arange(length) < length // 3, 0.0, 1.0)
        inputs: dict[str, Any] = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": -stream.uniform(3, 8, length),
            "advantages": stream.normal(size=length) * weights,
            "weights": weights,
        }
        data.append(Datum(datum.model_input, inputs))
    return data


def data_for(loss_fn: str, model: LoadedModel, lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    make = sft_data if loss_fn == "cross_entropy" else rl_data
    return make(model, lengths, seed)


def near_policy(trainer: Trainer, adapter: Adapter, data: Sequence[Datum], spread: float = 0.1) -> list[Datum]:
    """The same data with sampler logprobs close to the model's own, so that ratios are near 1."""
    stream = np.random.default_rng(7)
    output = run(trainer, adapter, data, None)
    return [
        Datum(datum.model_input, {**datum.loss_fn_inputs, "logprobs": lp + stream.uniform(-spread, spread, lp.shape)})
        for datum, lp in zip(data, output.logprobs, strict=True)
    ]


def item(data: Sequence[Datum], loss_fn: str | None, adapter_id: str = "a", **options: Any) -> TrainItem:
    options.setdefault("backward", loss_fn is not None)
    options.setdefault("loss_fn_config", LOSS_CONFIGS.get(loss_fn or "", {}))
    return TrainItem(adapter_id=adapter_id, data=data, loss_fn=loss_fn, **options)


def run(trainer: Trainer, adapter: Adapter, data: Sequence[Datum], loss_fn: str | None, **options: Any) -> TrainOutput:
    (output,) = trainer.train([item(data, loss_fn, **options)], {"a": adapter})
    assert isinstance(output, TrainOutput), output
    return output


def run_all(trainer: Trainer, items: Sequence[TrainItem], adapters: Mapping[str, Adapter]) -> list[TrainOutput]:
    outputs = trainer.train(items, adapters)
    assert all(isinstance(output, TrainOutput) for output in outputs), outputs
    return [output for output in outputs if isinstance(output, TrainOutput)]


def take_gradients(adapter: Adapter) -> list[torch.Tensor]:
    """The accumulated gradients, which are then dropped."""
    grads = []
    for parameter in adapter.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad)
        parameter.grad = None
    return grads


def gradients(
    trainer: Trainer, adapter: Adapter, data: Sequence[Datum], loss_fn: str, **options: Any
) -> list[torch.Tensor]:
    run(trainer, adapter, data, loss_fn, **options)
    return take_gradients(adapter)


def equal(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def arrays_equal(one: Sequence[npt.NDArray[Any]], two: Sequence[npt.NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def assert_close(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Within ``tolerance`` of the largest gradient."""
    scale = max(float(tensor.abs().max()) for tensor in two)
    for a, b in zip(one, two, strict=True):
        assert float((a - b).abs().max()) <= tolerance * scale
