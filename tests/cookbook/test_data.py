from __future__ import annotations

import numpy as np
import pytest

import trainsession as ts
from cookbook.lib.data import completion_datum, scaled, sequence_datum, weight_sum


def test_completion_datum_predicts_the_next_token_and_weighs_the_completion_only():
    datum = completion_datum([10, 11, 12], [20, 21], advantages=0.5, logprobs=[-1.0, -2.0])
    assert datum.model_input.to_ints() == [10, 11, 12, 20]
    inputs = {name: value.tolist() for name, value in datum.loss_fn_inputs.items()}
    assert inputs == {
        "target_tokens": [11, 12, 20, 21],
        "weights": [0, 0, 1, 1],
        "advantages": [0, 0, 0.5, 0.5],
        "logprobs": [0, 0, -1, -2],
    }


def test_completion_datum_takes_own_weights():
    datum = completion_datum([1], [2, 3, 4], weights=[0.0, 1.0, 0.5])
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 1, 0.5]
    assert weight_sum([datum, datum]) == 3


@pytest.mark.parametrize(("prompt", "completion"), [([], [1]), ([1], [])])
def test_completion_datum_refuses_an_empty_side(prompt: list[int], completion: list[int]):
    with pytest.raises(ValueError, match="a prompt and a completion"):
        completion_datum(prompt, completion)


def test_completion_datum_refuses_a_wrong_number_of_values():
    with pytest.raises(ValueError):
        completion_datum([1, 2], [3, 4], advantages=[1.0, 2.0, 3.0])


def test_scaled_changes_one_input_of_new_datums():
    datum = completion_datum([1, 2], [3], advantages=2.0)
    (half,) = scaled([datum], "advantages", 0.5)
    assert half.loss_fn_inputs["advantages"].tolist() == [0, 1]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 2]
    assert half.loss_fn_inputs["weights"] == datum.loss_fn_inputs["weights"]
    assert half.loss_fn_inputs["advantages"].to_numpy().dtype == np.float32
    assert isinstance(half, ts.Datum)


def test_sequence_datum_gives_each_prediction_the_weight_of_its_token():
    datum = sequence_datum([10, 11, 12, 13], [0.0, 1.0, 0.0, 0.5])
    assert datum.model_input.to_ints() == [10, 11, 12]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [11, 12, 13]
    assert datum.loss_fn_inputs["weights"].tolist() == [1, 0, 0.5]
