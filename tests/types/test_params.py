"""Parameters: defaults of the contract, and messages that name the key."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainsession import AdamParams, InvalidRequest, LimitExceeded, LoraConfig, SamplingParams, wire
from trainsession.types.params import WireParams

positive = st.floats(1e-6, 10.0)


def test_defaults_are_those_of_the_contract() -> None:
    assert AdamParams() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0, 1.0)
    lora = LoraConfig()
    assert (lora.rank, lora.alpha, lora.scale) == (32, 32.0, 1.0)
    assert LoraConfig(rank=8).scale == 4.0
    assert (lora.train_attn, lora.train_mlp, lora.train_unembed) == (True, True, False)
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert sampling.stops_at_eos


@pytest.mark.parametrize(
    ("cls", "arguments", "key"),
    [
        (AdamParams, {"learning_rate": -1e-4}, "learning_rate"),
        (AdamParams, {"learning_rate": math.nan}, "learning_rate"),
        (AdamParams, {"learning_rate": math.inf}, "learning_rate"),
        (AdamParams, {"learning_rate": "1e-4"}, "learning_rate"),
        (AdamParams, {"learning_rate": None}, "learning_rate"),
        (AdamParams, {"learning_rate": True}, "learning_rate"),
        (AdamParams, {"beta1": 1.0}, "beta1"),
        (AdamParams, {"beta2": -0.1}, "beta2"),
        (AdamParams, {"eps": 0.0}, "eps"),
        (AdamParams, {"weight_decay": -1.0}, "weight_decay"),
        (AdamParams, {"grad_clip_norm": -1.0}, "grad_clip_norm"),
        (AdamParams, {"lora_plus_ratio": 0.0}, "lora_plus_ratio"),
        (LoraConfig, {"rank": 0}, "rank"),
        (LoraConfig, {"rank": -4}, "rank"),
        (LoraConfig, {"rank": 8.0}, "rank"),
        (LoraConfig, {"rank": True}, "rank"),
        (LoraConfig, {"alpha": 0.0}, "alpha"),
        (LoraConfig, {"alpha": math.nan}, "alpha"),
        (LoraConfig, {"seed": -1}, "seed"),
        (LoraConfig, {"seed": 2**63}, "seed"),
        (LoraConfig, {"seed": 1.0}, "seed"),
        (LoraConfig, {"train_attn": "yes"}, "train_attn"),
        (LoraConfig, {"train_unembed": 1}, "train_unembed"),
        (LoraConfig, {"target_modules": "q_proj"}, "target_modules"),
        (LoraConfig, {"target_modules": ()}, "target_modules"),
        (LoraConfig, {"target_modules": [3]}, "target_modules"),
        (LoraConfig, {"target_modules": [""]}, "target_modules"),
        (LoraConfig, {"target_modules": 3}, "target_modules"),
        (SamplingParams, {"max_tokens": 0}, "max_tokens"),
        (SamplingParams, {"max_tokens": -1}, "max_tokens"),
        (SamplingParams, {"max_tokens": 1.0}, "max_tokens"),
        (SamplingParams, {"min_tokens": -1}, "min_tokens"),
        (SamplingParams, {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (SamplingParams, {"temperature": -0.1}, "temperature"),
        (SamplingParams, {"temperature": math.nan}, "temperature"),
        (SamplingParams, {"top_p": 0.0}, "top_p"),
        (SamplingParams, {"top_p": 1.1}, "top_p"),
        (SamplingParams, {"min_p": 1.1}, "min_p"),
        (SamplingParams, {"top_k": 0}, "top_k"),
        (SamplingParams, {"top_k": -2}, "top_k"),
        (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty"),
        (SamplingParams, {"presence_penalty": math.inf}, "presence_penalty"),
        (SamplingParams, {"seed": 2**62}, "seed"),
        (SamplingParams, {"ignore_eos": "no"}, "ignore_eos"),
        (SamplingParams, {"stop": ""}, "stop"),
        (SamplingParams, {"stop": ["a", ""]}, "stop"),
        (SamplingParams, {"stop": -1}, "stop"),
        (SamplingParams, {"stop": [True]}, "stop"),
        (SamplingParams, {"stop": 1.5}, "stop"),
        (SamplingParams, {"stop": b"ab"}, "stop"),
        (SamplingParams, {"stop": [["a"]]}, "stop"),
        (SamplingParams, {"stop": {"a": 1}}, "stop"),
        (SamplingParams, {"logit_bias": [1]}, "logit_bias"),
        (SamplingParams, {"logit_bias": {"a": 1.0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {-1: 1.0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {1.5: 1.0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {1: math.inf}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {1: "x"}}, "logit_bias"),
    ],
)
def test_a_bad_value_is_refused_and_its_key_named(cls: type[WireParams], arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        cls(**arguments)
    assert caught.value.details["key"] == key
    assert key in str(caught.value)


def test_limits_are_named() -> None:
    for make, limit in [
        (lambda: LoraConfig(rank=257), "max_rank"),
        (lambda: SamplingParams(stop=[str(n) for n in range(17)]), "max_stop_sequences"),
        (lambda: SamplingParams(stop="x" * 257), "max_stop_length"),
        (lambda: SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "max_logit_bias"),
    ]:
        with pytest.raises(LimitExceeded) as caught:
            make()
        assert caught.value.details["limit"] == limit


def test_an_adapter_that_trains_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one of"):
        LoraConfig(train_attn=False, train_mlp=False)


def test_numbers_of_numpy_become_plain() -> None:
    adam = AdamParams(learning_rate=np.float32(0.5), weight_decay=np.float64(0.25), grad_clip_norm=1)  # type: ignore[arg-type]
    assert json.dumps(adam.to_wire())
    assert (adam.learning_rate, adam.weight_decay, adam.grad_clip_norm) == (0.5, 0.25, 1.0)
    params = SamplingParams(max_tokens=np.int64(3), seed=np.int32(1), stop=[np.int64(7)], logit_bias={np.int64(2): 1})  # type: ignore[list-item]
    assert json.dumps(params.to_wire())
    assert params == SamplingParams(max_tokens=3, seed=1, stop=(7,), logit_bias={2: 1.0})
    assert json.dumps(LoraConfig(rank=np.int64(4)).to_wire())  # type: ignore[arg-type]


def test_stops() -> None:
    mixed = SamplingParams(stop=["\n", 5, "end"])
    assert (mixed.stop_strings, mixed.stop_token_ids, mixed.stops_at_eos) == (("\n", "end"), (5,), True)
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=3).stop_token_ids == (3,)
    assert not SamplingParams(stop=[]).stops_at_eos
    assert not SamplingParams(ignore_eos=True).stops_at_eos


adams = st.builds(
    AdamParams,
    learning_rate=st.floats(0, 1),
    beta1=st.floats(0, 0.99),
    eps=positive,
    weight_decay=st.floats(0, 1),
    grad_clip_norm=st.floats(0, 10),
    lora_plus_ratio=positive,
)
loras = st.builds(
    LoraConfig,
    rank=st.integers(1, 256),
    alpha=st.none() | positive,
    seed=st.none() | st.integers(0, 2**63 - 1),
    train_unembed=st.booleans(),
    target_modules=st.none() | st.lists(st.text(min_size=1), min_size=1, max_size=3).map(tuple),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 100),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.just(-1) | st.integers(1, 100),
    seed=st.none() | st.integers(0, 2**62 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=5) | st.integers(0, 1000), max_size=4),
    ignore_eos=st.booleans(),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=4),
)


@given(params=st.one_of(adams, loras, samplings))
def test_parameters_come_back_over_both_media_types(params: WireParams) -> None:
    assert type(params).from_wire(wire.unpack(wire.pack(params.to_wire()))) == params
    assert type(params).from_wire(json.loads(json.dumps(params.to_wire()))) == params


@pytest.mark.parametrize("cls", [AdamParams, LoraConfig, SamplingParams])
def test_unknown_keys_and_other_types_are_refused(cls: type[WireParams]) -> None:
    with pytest.raises(InvalidRequest, match="unknown key 'lr'; known are") as caught:
        cls.from_wire({"lr": 1})
    assert caught.value.details == {"key": "lr"}
    with pytest.raises(InvalidRequest, match="unknown key"):
        cls.from_wire({1: 2, "a": 3})  # type: ignore[dict-item]
    for body in (None, [], "x", 3):
        with pytest.raises(InvalidRequest, match="expected a map"):
            cls.from_wire(body)  # type: ignore[arg-type]
