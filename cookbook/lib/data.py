"""Problems and datums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import trainsession as ts


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, and the answer that a grader compares with."""

    prompt: str
    answer: str


def completion_datum(
    prompt: Sequence[int], completion: Sequence[int], **per_token: Sequence[float] | float
) -> ts.Datum:
    """The datum of ``prompt + completion`` whose loss sees the completion's tokens only.

    With P prompt and C completion tokens, its arrays have P + C - 1 entries: position ``i`` of the
    input predicts token ``i + 1``, so the first P - 1 positions have weight 0.

    Args:
        prompt: P >= 1 token ids.
        completion: C >= 1 token ids.
        per_token: More loss inputs (``advantages``, ``logprobs``, or other ``weights``): C values,
            or one for all of them; prompt positions get 0.
    """
    if len(prompt) == 0 or len(completion) == 0:
        raise ValueError(f"a datum needs a prompt and a completion, got {len(prompt)} and {len(completion)} tokens")
    tokens = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(completion, dtype=np.int64)])
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    for name, values in {"weights": 1.0, **per_token}.items():
        array = np.zeros(len(tokens) - 1, dtype=np.float32)
        array[len(prompt) - 1 :] = values
        inputs[name] = array
    return ts.Datum(ts.ModelInput.from_ints(tokens[:-1]), inputs)


def sequence_datum(tokens: Sequence[int], weights: Sequence[float]) -> ts.Datum:
    """The datum of N tokens, of which those are learned that have a weight.

    Args:
        tokens: N >= 2 token ids.
        weights: N; that of token ``i + 1`` stands at position ``i``, which predicts it.
    """
    inputs = {"target_tokens": np.asarray(tokens[1:], dtype=np.int64), "weights": np.asarray(weights[1:], np.float32)}
    return ts.Datum(ts.ModelInput.from_ints(tokens[:-1]), inputs)


def scaled(datums: Sequence[ts.Datum], name: str, factor: float) -> list[ts.Datum]:
    """The datums with the loss input ``name`` multiplied by ``factor``.

    Losses are sums; a batch whose weights (or advantages) are scaled by 1 / tokens has the mean
    as its loss, and gradients whose norm does not grow with the batch.
    """
    return [
        ts.Datum(d.model_input, {**d.loss_fn_inputs, name: d.loss_fn_inputs[name].to_numpy() * np.float32(factor)})
        for d in datums
    ]


def weight_sum(datums: Sequence[ts.Datum]) -> float:
    """The summed weights: the number of completion tokens, where weights are a mask."""
    return float(sum(d.loss_fn_inputs["weights"].to_numpy().sum() for d in datums))
