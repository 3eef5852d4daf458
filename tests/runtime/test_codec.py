from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from trainsession import wire
from trainsession.engine.api import AdapterState, EngineInfo, SampleEvent, SampleItem, TrainItem, TrainOutput
from trainsession.errors import InvalidDatum
from trainsession.runtime.codec import decode, encode
from trainsession.types import AdamParams, Datum, LoraConfig, SamplingParams, TensorData

LORA = LoraConfig(rank=4, seed=11, target_modules=("q_proj", "v_proj"))
VALUES: list[Any] = [
    None,
    [True, 1, 2.5, "text", b"bytes", ("a", 1), {"k": 1, 7: [None]}, {"$": "not a tag"}],
    np.arange(6, dtype=np.int32).reshape(2, 3),
    LORA,
    AdamParams(learning_rate=3e-4, grad_clip_norm=1.0),
    EngineInfo(
        base_model="m",
        identity="i",
        context_length=512,
        vocab_size=320,
        eos_token_ids=(2, 5),
        dtype="float32",
        device="cpu",
        exact=True,
        versions={"torch": "2"},
    ),
    TrainItem(
        adapter_id="a",
        data=[Datum([5, 6, 7], {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 0.5], "temperature": 0.7})],
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 0.8},
        keep_graph="op",
    ),
    [TrainOutput(logprobs=[np.array([-1.5, -0.25], np.float32)], metrics={"loss:sum": 1.75})],
    AdapterState(config=LORA, tensors={"weight/m.lora_A": np.ones((4, 3), np.float32)}, step=3, window="open"),
    SampleItem(
        request_id="r",
        prompt=np.array([5, 6], np.int32),
        num_samples=2,
        params=SamplingParams(max_tokens=4, seed=1, stop=["\n", 7], logit_bias={5: -1.0}),
        topk_logprobs=2,
        cache_salt="project",
    ),
    SampleEvent(
        request_id="r",
        tokens=[5],
        logprobs=[-0.5],
        topk=[[(5, -0.5), (6, -1.0)]],
        stop_reason="length",
        text="é",
        prompt_logprobs=[None, *[-1.0] * 200_000],
    ),
]


def equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, TensorData):
        return equal(left.data, right.data)
    if isinstance(left, Datum):
        return equal(left.model_input.tokens, right.model_input.tokens) and equal(
            left.loss_fn_inputs, right.loss_fn_inputs
        )
    if is_dataclass(left):
        return all(equal(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_crosses_comes_out_as_it_went_in(value: Any) -> None:
    assert equal(decode(encode(value)), value)


def test_an_error_keeps_its_class_message_and_details() -> None:
    error = decode(encode([InvalidDatum("datum 3: no", details={"datum": 3, "key": "weights"})]))[0]
    assert type(error) is InvalidDatum
    assert (error.message, error.details) == ("datum 3: no", {"datum": 3, "key": "weights"})


def test_only_named_types_cross() -> None:
    with pytest.raises(TypeError, match="object cannot cross"):
        encode([object()])
    with pytest.raises(KeyError):
        decode(wire.pack({"$": "Popen", "of": [["sh"]]}))
