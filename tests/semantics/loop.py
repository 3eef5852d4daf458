"""A short training loop through the SDK, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import trainsession as ts

MODEL = "tiny-llama"
CONTEXT = 512
VOCABULARY = 320
PROMPT: list[int] = [5, 9, 17, 33, 65, 129, 257]
ADAM = ts.AdamParams(learning_rate=1e-2)


def new_trainer(service: ts.ServiceClient, model: str = MODEL, **options: Any) -> ts.TrainingClient:
    return service.create_lora_training_client(model, **{"rank": 4, "alpha": 8, "seed": 1, **options})


def tokens(length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 299, length)


def datum(length: int = 7, seed: int = 0, **inputs: Any) -> ts.Datum:
    """Random tokens; ``None`` leaves an input out."""
    ids = tokens(length + 1, seed)
    given = {"target_tokens": ids[1:], **inputs}
    return ts.Datum(ids[:-1], {key: value for key, value in given.items() if value is not None})


def rl_datum(length: int = 7, seed: int = 0, **inputs: Any) -> ts.Datum:
    return datum(length, seed, **{"logprobs": np.full(length, -2.0), "advantages": np.ones(length), **inputs})


def batch() -> list[ts.Datum]:
    return [datum(7, 1), datum(4, 2), datum(11, 3)]


def step(trainer: ts.TrainingClient) -> dict[str, float]:
    """One step on `batch`: its loss and the step's metrics, to the bit."""
    loss = trainer.forward_backward(batch())
    stepped = trainer.optim_step(ADAM)
    return loss.result(60).metrics | stepped.result(60).metrics


def logprobs_of(trainer: ts.TrainingClient, data: list[ts.Datum]) -> npt.NDArray[np.float32]:
    """All target logprobs of a forward, one after the other."""
    return np.concatenate([values.to_numpy() for values in trainer.forward(data).result(60).logprobs])


def assert_says(error: ts.TrainSessionError, words: Sequence[str]) -> None:
    """The message names what is wrong, where, and what would be right."""
    for word in words:
        assert word in error.message, f"{word!r} is not in {error.message!r}"
