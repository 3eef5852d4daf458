"""Coercions of tokens and tensors: what users hand in comes out exactly, or is refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainsession import Datum, EncodedTextChunk, InvalidDatum, InvalidRequest, ModelInput, TensorData

torch = pytest.importorskip("torch")
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(tokens=ids)
def test_tokens_of_every_kind_are_the_same(tokens: list[int]) -> None:
    forms: list[Any] = [tokens, tuple(tokens), np.array(tokens, dtype=np.int64), np.array(tokens, dtype=np.uint32)]
    forms += [torch.tensor(tokens, dtype=torch.int64), ModelInput.from_ints(tokens), TensorData(tokens, dtype="int64")]
    for form in forms:
        made = ModelInput.from_ints(form)
        assert made.to_ints() == tokens
        assert made.tokens.dtype == np.int32
        assert made.length == len(made) == len(tokens)
    chunked = ModelInput([EncodedTextChunk(tokens[:3]), EncodedTextChunk([]), EncodedTextChunk(tokens[3:])])
    assert chunked == ModelInput.from_ints(tokens)


def test_model_input_grows_without_changing() -> None:
    start = ModelInput.from_ints([1, 2])
    assert start.append_int(3).append(EncodedTextChunk([4, 5])).to_ints() == [1, 2, 3, 4, 5]
    assert start.to_ints() == [1, 2]
    assert ModelInput.empty().length == 0
    assert ModelInput.empty().chunks == []
    assert [list(chunk.tokens) for chunk in start.chunks] == [[1, 2]]
    assert repr(ModelInput.from_ints(range(9))) == "ModelInput(9 tokens: 0, 1, 2, 3, 4, 5, ...)"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0], "float64"),
        ([True], "bool"),
        ([-1], "token id -1"),
        ([2**31], f"token id {2**31}"),
        ([2**70], "integers"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([[1], [1, 2]], "ragged"),
        (["a"], "integers"),
        ("text", "got a string"),
        ([None], "integers"),
        (5, r"shape \(\)"),
        (torch.zeros(1), "float32"),
    ],
)
def test_what_is_no_token_sequence_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ModelInput.from_ints(tokens)


def test_encoded_lists_are_not_equal_to_other_things() -> None:
    assert ModelInput.from_ints([1]) != [1]
    assert TensorData([1]) != np.array([1])
    assert Datum([1], {}) != ModelInput.from_ints([1])


@given(array=hnp.arrays(st.sampled_from([np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_]), (2, 3)))
def test_numpy_and_torch_agree(array: np.ndarray) -> None:
    ours = TensorData(array)
    assert ours == TensorData.from_numpy(array) == TensorData.from_torch(torch.from_numpy(array.copy()))
    assert ours.dtype == ("float32" if array.dtype.kind == "f" else "int64")
    assert ours.shape == (2, 3)
    np.testing.assert_array_equal(ours.to_numpy(), array.astype(ours.dtype))
    assert torch.equal(ours.to_torch().isnan(), torch.from_numpy(np.isnan(ours.to_numpy())))


def test_torch_tensors_of_every_kind() -> None:
    expected = [[1.5, -2.0], [0.25, 3.0]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor(expected, dtype=dtype, requires_grad=True)
        assert TensorData.from_torch(tensor).tolist() == expected
        assert TensorData(tensor.t()).tolist() == [[1.5, 0.25], [-2.0, 3.0]]
    assert TensorData(torch.tensor([True, False])).tolist() == [1, 0]
    assert TensorData(torch.tensor([True, False]), dtype="float32").tolist() == [1.0, 0.0]
    back = TensorData(torch.tensor([1, 2])).to_torch()
    assert back.dtype == torch.int64
    back[0] = 9  # a copy of its own


def test_scalars_and_empty_data_keep_their_shape() -> None:
    assert TensorData(2.5).shape == ()
    assert TensorData(np.float32(2.5)).tolist() == 2.5
    assert TensorData([]).dtype == "float32"
    assert TensorData([], dtype="int64").shape == (0,)
    assert TensorData(np.zeros((0, 4), dtype=np.int32)).shape == (0, 4)
    assert TensorData(torch.zeros(3, 0)).shape == (3, 0)
    assert TensorData([1, 2, 3, 4], shape=[2, 2]).tolist() == [[1, 2], [3, 4]]
    assert len(TensorData([1, 2])) == 2
    np.testing.assert_array_equal(np.asarray(TensorData([1, 2])), [1, 2])


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_int64_is_exact(values: list[int]) -> None:
    assert TensorData(values, dtype="int64").tolist() == values


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([1.5], {"dtype": "int64"}, "cannot hold 1.5"),
        ([float("nan")], {"dtype": "int64"}, "cannot hold nan"),
        ([1.0, float("inf")], {"dtype": "int64"}, "cannot hold inf"),
        ([1e19], {"dtype": "int64"}, r"cannot hold 1e\+19"),
        (np.array([2**63], dtype=np.uint64), {}, "cannot hold 9223372036854775808"),
        ([2**70], {}, "expected numbers, got object"),
        (["a"], {}, "expected numbers"),
        ([None], {}, "expected numbers"),
        ([1 + 2j], {}, "expected numbers"),
        ([[1], [1, 2]], {}, "not a rectangular array"),
        ([1], {"dtype": "float64"}, "dtype must be"),
        ([1, 2, 3], {"shape": [2, 2]}, "do not fill shape"),
    ],
)
def test_what_would_change_or_is_no_tensor_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TensorData(data, **options)


def test_nan_and_infinity_are_kept_for_the_service_to_report() -> None:
    values = TensorData([float("nan"), float("inf")]).to_numpy()
    assert np.isnan(values[0])
    assert np.isinf(values[1])
    assert TensorData([float("nan")]) == TensorData([float("nan")])


def test_datum_takes_what_users_have() -> None:
    datum = Datum(
        np.array([5, 6]),
        {
            "target_tokens": torch.tensor([6, 7]),
            "weights": [0, 1],
            "advantages": np.array([1, 2], dtype=np.int64),
            "logprobs": torch.tensor([-1.0, -2.0], dtype=torch.bfloat16),
            "temperature": 0.5,
        },
    )
    kinds = {key: (value.dtype, value.shape) for key, value in datum.loss_fn_inputs.items()}
    assert kinds == {
        "target_tokens": ("int64", (2,)),
        "weights": ("float32", (2,)),
        "advantages": ("float32", (2,)),
        "logprobs": ("float32", (2,)),
        "temperature": ("float32", ()),
    }
    assert repr(datum) == "Datum(2 tokens, target_tokens, weights, advantages, logprobs, temperature)"
    assert Datum(datum.model_input, datum.loss_fn_inputs) == datum


@pytest.mark.parametrize("key", ["target_tokens", "weights", "advantages", "my_own"])
@pytest.mark.parametrize("value", [["x"], [[1], [1, 2]], [None], "text", {"a": 1}])
def test_a_bad_input_is_named(key: str, value: Any) -> None:
    with pytest.raises(InvalidDatum, match=rf"loss_fn_inputs\['{key}'\]") as caught:
        Datum([1], {key: value})
    assert caught.value.details == {"key": key}


def test_values_survive_pickling() -> None:
    """Data loaders hand datums between processes."""
    datum = Datum([1, 2], {"target_tokens": [2, 3], "temperature": 1.0})
    assert pickle.loads(pickle.dumps(datum)) == datum  # noqa: S301
