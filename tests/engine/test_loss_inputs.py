"""Wrong training calls are refused before anything runs, naming the datum and the key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainsession.engine.loss_inputs import SIGNATURES, check_data, resolve_config
from trainsession.errors import InvalidDatum, InvalidRequest, LimitExceeded
from trainsession.types import Datum

GOOD: dict[str, Any] = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


def check(datum: Datum, loss_fn: str | None = "ppo", **config: float) -> None:
    good = Datum([0, 1, 2], GOOD if loss_fn == "ppo" else {"target_tokens": [1, 2, 3]})
    check_data([good, datum], loss_fn, config, context_length=8, vocab_size=10)


def test_good_data_passes() -> None:
    check(Datum([0, 1, 2], {**GOOD, "weights": [0.0, 1.0, 0.5], "temperature": 0.7}))


@pytest.mark.parametrize(
    ("tokens", "inputs", "key", "said"),
    [
        ([], GOOD, "model_input", "empty"),
        (list(range(9)), GOOD, "model_input", "context of 8"),
        ([0, 10, 2], GOOD, "model_input", "token id 10, outside the vocabulary of 10"),
        ([0, 1, 2], {**GOOD, "target_tokens": [1, 2, 10]}, "target_tokens", "token id 10"),
        ([0, 1, 2], {**GOOD, "target_tokens": [1, -1, 3]}, "target_tokens", "token id -1"),
        ([0, 1, 2], {**GOOD, "target_tokens": [1, 2]}, "target_tokens", "shape (2,), expected (3,)"),
        ([0, 1, 2], {**GOOD, "target_tokens": [[1], [2], [3]]}, "target_tokens", "expected (3,)"),
        ([0, 1, 2], {"logprobs": [0.0] * 3, "advantages": [0.0] * 3}, "target_tokens", "missing"),
        ([0, 1, 2], {"target_tokens": [1, 2, 3], "advantages": [0.0] * 3}, "logprobs", "missing; ppo needs"),
        ([0, 1, 2], {**GOOD, "advantages": [1.0] * 2}, "advantages", "shape (2,), expected (3,)"),
        ([0, 1, 2], {**GOOD, "advantages": [1.0, float("nan"), 1.0]}, "advantages", "NaN or infinite at position 1"),
        ([0, 1, 2], {**GOOD, "weights": [1.0, 1.0, float("inf")]}, "weights", "NaN or infinite at position 2"),
        ([0, 1, 2], {**GOOD, "weights": 1.0}, "weights", "shape ()"),
        ([0, 1, 2], {**GOOD, "mask": [1.0] * 3}, "mask", "known are target_tokens, logprobs, advantages, weights"),
        ([0, 1, 2], {**GOOD, "temperature": 0.0}, "temperature", "above 0"),
        ([0, 1, 2], {**GOOD, "temperature": [1.0] * 3}, "temperature", "one finite number"),
    ],
)
def test_a_wrong_datum_is_named(tokens: list[int], inputs: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(InvalidDatum) as caught:
        check(Datum(tokens, inputs))
    assert caught.value.details == {"datum": 1, "key": key}
    assert caught.value.message.startswith("datum 1:")
    assert said in caught.value.message


def test_soft_targets_are_for_cross_entropy_and_custom_losses() -> None:
    soft = Datum([0, 1], {"target_tokens": [[1, 2, 3], [4, 5, 6]], "weights": [[0.2, 0.3, 0.5]] * 2})
    check(soft, "cross_entropy")
    check(soft, None)
    with pytest.raises(InvalidDatum, match="weights"):
        check(Datum([0, 1], {"target_tokens": [[1, 2], [3, 4]], "weights": [1.0, 1.0]}), "cross_entropy")


@pytest.mark.parametrize("width", [0, 129])
def test_number_of_soft_targets_is_bounded(width: int) -> None:
    with pytest.raises(InvalidDatum, match="max_topk_logprobs"):
        check(Datum([0, 1], {"target_tokens": np.ones((2, width), dtype=np.int64)}), "cross_entropy")


def test_a_custom_loss_may_carry_inputs_of_its_own() -> None:
    check(Datum([0, 1], {"target_tokens": [1, 2], "reward": 3.0, "weights": [float("nan")]}), None)


def test_gspo_refuses_a_negative_ratio_mask() -> None:
    datum = Datum([0, 1, 2], {**GOOD, "sequence_ratio_mask": [1.0, -1.0, 0.0]})
    with pytest.raises(InvalidDatum, match="mask is >= 0"):
        check_data([datum], "gspo", {}, context_length=8, vocab_size=10)


def test_no_data_and_too_much_data_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        check_data([], "ppo", {}, context_length=8, vocab_size=10)
    with pytest.raises(LimitExceeded, match="max_datums"):
        check_data([Datum([0, 1, 2], GOOD)] * 65_537, "ppo", {}, context_length=8, vocab_size=10)


def test_an_unknown_loss_lists_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match=f"known are {', '.join(SIGNATURES)}"):
        check_data([Datum([0], GOOD)], "grpo", {}, context_length=8, vocab_size=10)


@pytest.mark.parametrize(
    ("loss_fn", "config", "key"),
    [
        ("ppo", {"clip": 0.2}, "clip"),
        ("cross_entropy", {"beta": 0.1}, "beta"),
        ("dro", {}, "beta"),
        ("dro", {"beta": -1.0}, "beta"),
        ("ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold"),
        ("gspo", {"clip_high_threshold": True}, "clip_high_threshold"),
    ],
)
def test_wrong_configuration_is_refused_by_key(loss_fn: str, config: dict[str, float], key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_config(loss_fn, config)
    assert caught.value.details["key"] == key
    assert repr(key).strip("'") in caught.value.message


def test_documented_defaults() -> None:
    assert resolve_config("cispo", {}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert resolve_config("gspo", {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
