"""What a failing call leaves behind, custom losses through kept graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.semantics.training import (
    arrays_equal,
    assert_close,
    equal,
    item,
    make_adapter,
    rl_data,
    run,
    sft_data,
    take_gradients,
)
from trainsession.engine.api import TrainOutput
from trainsession.engine.lora import Adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.optim import AdamState, optim_step
from trainsession.engine.trainer import KEPT_BUDGETS, Trainer
from trainsession.errors import InvalidDatum, InvalidRequest, NonFinite, NotFound, TrainSessionError
from trainsession.types import AdamParams, Datum

LENGTHS = (9, 4, 13)


@pytest.fixture
def model(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def untied(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("qwen3")


@pytest.fixture
def poisoned(untied: LoadedModel) -> Iterator[int]:
    """A token id whose embedding, not whose logit, is NaN while the test runs."""
    embedding = untied.causal.get_input_embeddings().weight
    token = 5
    kept = embedding.data[token].clone()  # type: ignore[index]
    embedding.data[token] = float("nan")  # type: ignore[index]
    yield token
    embedding.data[token] = kept  # type: ignore[index]


def without_token(data: list[Datum], token: int) -> list[Datum]:
    clean = []
    for datum in data:
        tokens, targets = datum.model_input.tokens.copy(), datum.loss_fn_inputs["target_tokens"].data.copy()
        tokens[tokens == token], targets[targets == token] = 6, 6
        clean.append(Datum(tokens, {**datum.loss_fn_inputs, "target_tokens": targets}))
    return clean


def failure(trainer: Trainer, adapter: Adapter, data: list[Datum], loss_fn: str) -> TrainSessionError:
    (output,) = trainer.train([item(data, loss_fn)], {"a": adapter})
    assert isinstance(output, TrainSessionError)
    return output


# --- failures -----------------------------------------------------------------------------


def test_a_real_overflow_names_its_datum_and_leaves_the_gradients_as_they_were(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model, token_budget=16), make_adapter(model)
    run(trainer, adapter, sft_data(model, LENGTHS), "cross_entropy")
    pending = [parameter.grad for parameter in adapter.parameters()]
    copies = [grad.clone() for grad in pending if grad is not None]
    data = rl_data(model, LENGTHS)
    inputs = dict(data[2].loss_fn_inputs)
    logprobs = inputs["logprobs"].data.copy()
    logprobs[10] = -3000.0  # a ratio of exp(3000) on a token with weight 1
    advantages = np.full(13, -1.0)
    data[2] = Datum(data[2].model_input, {**inputs, "logprobs": logprobs, "advantages": advantages})
    error = failure(trainer, adapter, data, "ppo")
    assert isinstance(error, NonFinite)
    assert (error.details["datum"], error.details["position"]) == (2, 10)
    assert "datum 2" in error.message
    after = [parameter.grad for parameter in adapter.parameters()]
    assert all(new is old for new, old in zip(after, pending, strict=True))
    assert equal(copies, [grad for grad in after if grad is not None])


def test_a_gradient_that_overflows_float32_is_an_error_not_infinity(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    (datum,) = rl_data(model, (9,))
    inputs = {**datum.loss_fn_inputs, "logprobs": np.full(9, -120.0), "advantages": np.ones(9)}
    error = failure(trainer, adapter, [datum, Datum(datum.model_input, inputs)], "importance_sampling")
    assert isinstance(error, NonFinite)
    assert error.details["datum"] == 1
    assert all(parameter.grad is None for parameter in adapter.parameters())


def test_nan_in_one_call_spares_its_neighbours_in_the_pass(untied: LoadedModel, poisoned: int) -> None:
    trainer, bad, good = Trainer(untied), make_adapter(untied, 0), make_adapter(untied, 1)
    clean = without_token(sft_data(untied, LENGTHS, seed=3), poisoned)
    expected = run(trainer, good, clean, "cross_entropy")
    expected_grads = take_gradients(good)
    tokens = clean[1].model_input.tokens.copy()
    tokens[2] = poisoned
    dirty = [clean[0], Datum(tokens, clean[1].loss_fn_inputs)]
    failed, output = trainer.train(
        [item(dirty, "cross_entropy", "bad"), item(clean, "cross_entropy", "good")], {"bad": bad, "good": good}
    )
    assert isinstance(failed, NonFinite)
    assert failed.details["datum"] == 1
    assert all(parameter.grad is None for parameter in bad.parameters())
    assert isinstance(output, TrainOutput)
    assert arrays_equal(output.logprobs, expected.logprobs)
    assert equal(take_gradients(good), expected_grads)


def test_nan_at_a_masked_position_is_reported_too(untied: LoadedModel, poisoned: int) -> None:
    (datum,) = without_token(sft_data(untied, (6,), weights=[0.0] * 6), poisoned)
    tokens = datum.model_input.tokens.copy()
    tokens[4] = poisoned
    error = failure(Trainer(untied), make_adapter(untied), [Datum(tokens, datum.loss_fn_inputs)], "cross_entropy")
    assert isinstance(error, NonFinite)
    assert error.details["datum"] == 0


def test_a_gradient_that_overflows_below_the_loss_names_its_datum(model: LoadedModel) -> None:
    """Loss and logprobs are finite; A's gradient is not, because B is huge."""
    trainer, adapter = Trainer(model), make_adapter(model)
    with torch.no_grad():
        # At rank 4, B of 1e30 with A of zero changes no logit and multiplies every gradient of A.
        for pair in adapter.weights.values():
            pair.A.zero_()
            pair.B.fill_(1e30)
    calm = sft_data(model, (4, 4), weights=np.full(4, 1e-25))
    loud = sft_data(model, (4,), weights=np.full(4, 1e15))
    error = failure(trainer, adapter, [*calm, *loud, *calm], "cross_entropy")
    assert isinstance(error, NonFinite)
    assert error.details["datum"] == 2
    assert all(parameter.grad is None for parameter in adapter.parameters())


def test_an_unexpected_failure_restores_every_gradient(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, adapter = Trainer(model, token_budget=10), make_adapter(model)
    run(trainer, adapter, sft_data(model, LENGTHS), "cross_entropy")
    pending = [parameter.grad for parameter in adapter.parameters()]
    calls = iter(range(10))
    hidden = type(model).hidden

    def fail_second(*args: object) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return hidden(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "hidden", fail_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(trainer, adapter, sft_data(model, LENGTHS), "cross_entropy")
    assert all(parameter.grad is old for parameter, old in zip(adapter.parameters(), pending, strict=True))


def test_an_invalid_call_fails_alone(model: LoadedModel) -> None:
    trainer, a, b = Trainer(model), make_adapter(model, 0), make_adapter(model, 1)
    wrong = [Datum([3, 4], {"target_tokens": [3, model.vocab_size]})]
    failed, output = trainer.train(
        [item(wrong, "cross_entropy", "a"), item(sft_data(model, LENGTHS), "cross_entropy", "b")], {"a": a, "b": b}
    )
    assert isinstance(failed, InvalidDatum)
    assert failed.details == {"datum": 0, "key": "target_tokens"}
    assert isinstance(output, TrainOutput)


def test_refusals(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = sft_data(model, (4,))
    with pytest.raises(InvalidRequest, match="needs a loss_fn"):
        trainer.validate(item(data, None, backward=True), adapter)
    with pytest.raises(InvalidRequest, match="frozen"):
        trainer.validate(item(data, "cross_entropy"), adapter.frozen_copy())
    with pytest.raises(InvalidDatum, match="context of 512"):
        trainer.validate(item(sft_data(model, (513,)), "cross_entropy"), adapter)
    with pytest.raises(InvalidRequest, match="empty"):
        trainer.validate(item([], "cross_entropy"), adapter)
    trainer.validate(item(data, "cross_entropy", backward=False), adapter.frozen_copy())


# --- custom losses --------------------------------------------------------------------------


def keep(trainer: Trainer, adapter: Adapter, data: list[Datum], forward_id: str = "f") -> list[npt.NDArray[np.float32]]:
    return run(trainer, adapter, data, None, keep_graph=forward_id).logprobs


def ones_like(logprobs: list[npt.NDArray[np.float32]], value: float = -1.0) -> list[npt.NDArray[np.float32]]:
    return [np.full_like(array, value) for array in logprobs]


@pytest.mark.parametrize("budget", [8, 512])
def test_a_kept_forward_with_cross_entropys_gradient_is_cross_entropy(model: LoadedModel, budget: int) -> None:
    """At a budget of 8 tokens the graph is too large to keep: the backward computes it again."""
    trainer, adapter = Trainer(model, token_budget=budget), make_adapter(model)
    data = sft_data(model, (9, 4, 13, 20))
    assert (sum((9, 4, 13, 20)) > KEPT_BUDGETS * budget) == (budget == 8)
    expected = run(trainer, adapter, data, "cross_entropy")
    expected_grads = take_gradients(adapter)
    logprobs = keep(trainer, adapter, data)
    assert all(parameter.grad is None for parameter in adapter.parameters())
    assert arrays_equal(logprobs, expected.logprobs)
    trainer.backward("f", ones_like(logprobs))
    assert equal(take_gradients(adapter), expected_grads)


def test_a_dpo_like_loss_equals_torchs_own_gradient(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = sft_data(model, LENGTHS)
    logprobs = [torch.tensor(array, requires_grad=True) for array in keep(trainer, adapter, data)]
    sums = torch.stack([array.sum() for array in logprobs])
    loss = -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1])) + (logprobs[2] ** 2).mean()
    loss.backward()
    given = [array.grad.numpy() for array in logprobs if array.grad is not None]
    trainer.backward("f", given)
    # The same derivative as weights of a cross entropy.
    weighted = [
        Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": -array})
        for datum, array in zip(data, given, strict=True)
    ]
    custom = take_gradients(adapter)
    run(trainer, adapter, weighted, "cross_entropy")
    assert_close(custom, take_gradients(adapter))


def test_soft_targets_and_a_trained_unembedding_flow_through_a_kept_graph(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model, train_unembed=True)
    stream = np.random.default_rng(0)
    tokens, targets = stream.integers(3, 300, 7), stream.integers(3, 300, (7, 3))
    weights = stream.normal(size=(7, 3)).astype(np.float32)
    run(trainer, adapter, [Datum(tokens, {"target_tokens": targets, "weights": weights})], "cross_entropy")
    expected = take_gradients(adapter)
    keep(trainer, adapter, [Datum(tokens, {"target_tokens": targets})])
    trainer.backward("f", [-weights])
    assert_close(take_gradients(adapter), expected)


def test_a_kept_forward_is_used_once_and_can_be_dropped(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = sft_data(model, (5,))
    gradients = ones_like(keep(trainer, adapter, data))
    trainer.backward("f", gradients)
    with pytest.raises(NotFound):
        trainer.backward("f", gradients)
    keep(trainer, adapter, data)
    trainer.drop_graph("f")
    trainer.drop_graph("never")
    with pytest.raises(NotFound):
        trainer.backward("f", gradients)


def test_an_adapter_that_goes_away_takes_its_forward_along(model: LoadedModel) -> None:
    trainer, a, b = Trainer(model), make_adapter(model, 0), make_adapter(model, 1)
    data = sft_data(model, (5,))
    gradients = ones_like(keep(trainer, a, data, "a"))
    keep(trainer, b, data, "b")
    trainer.forget(a)
    with pytest.raises(NotFound):
        trainer.backward("a", gradients)
    trainer.backward("b", gradients)


def test_an_adapter_keeps_one_forward(model: LoadedModel) -> None:
    trainer, a, b = Trainer(model), make_adapter(model, 0), make_adapter(model, 1)
    data = sft_data(model, (5,))
    gradients = ones_like(keep(trainer, a, data, "a1"))
    keep(trainer, b, data, "b1")
    keep(trainer, a, data, "a2")
    with pytest.raises(NotFound):
        trainer.backward("a1", gradients)
    trainer.backward("a2", gradients)
    trainer.backward("b1", gradients)


def test_kept_graphs_of_many_adapters_are_bounded_and_still_answered(model: LoadedModel) -> None:
    trainer = Trainer(model, token_budget=8)
    adapters = [make_adapter(model, seed) for seed in range(4)]
    data = sft_data(model, (20,))
    expected = []
    for adapter in adapters:
        run(trainer, adapter, data, "cross_entropy")
        expected.append(take_gradients(adapter))
    for index, adapter in enumerate(adapters):
        keep(trainer, adapter, data, str(index))
    gradients = [np.full(20, -1.0, dtype=np.float32)]
    held = [kept for kept in trainer._kept.values() if kept.passes is not None]
    assert sum(kept.tokens for kept in held) <= KEPT_BUDGETS * 8
    for index, adapter in enumerate(adapters):
        trainer.backward(str(index), gradients)
        assert equal(take_gradients(adapter), expected[index])


def test_a_step_between_forward_and_backward_voids_the_graph(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = sft_data(model, (5,))
    run(trainer, adapter, data, "cross_entropy")
    gradients = ones_like(keep(trainer, adapter, data))
    optim_step(adapter, AdamState.fresh(adapter), AdamParams())
    with pytest.raises(NotFound):
        trainer.backward("f", gradients)


def test_wrong_gradients_are_refused_and_the_forward_stays(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    logprobs = keep(trainer, adapter, sft_data(model, (5, 3)))
    good = ones_like(logprobs)
    with pytest.raises(InvalidRequest, match="1 gradients for 2 datums"):
        trainer.backward("f", good[:1])
    with pytest.raises(InvalidDatum, match=r"datum 1: gradient of shape \(2,\), expected \(3,\)"):
        trainer.backward("f", [good[0], good[1][:2]])
    with pytest.raises(InvalidDatum, match="datum 0") as caught:
        trainer.backward("f", [good[0] * np.nan, good[1]])
    assert caught.value.details["datum"] == 0
    assert all(parameter.grad is None for parameter in adapter.parameters())
    trainer.backward("f", good)


def test_gradients_of_a_custom_loss_add_to_what_is_pending(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = sft_data(model, (5, 3))
    run(trainer, adapter, data, "cross_entropy")
    once = [grad.clone() for grad in (parameter.grad for parameter in adapter.parameters()) if grad is not None]
    trainer.backward("f", ones_like(keep(trainer, adapter, data)))
    assert_close(take_gradients(adapter), [2 * grad for grad in once])


def test_a_long_sequence_is_a_pass_of_its_own(model: LoadedModel) -> None:
    trainer, adapter = Trainer(model, token_budget=8), make_adapter(model)
    data = sft_data(model, (3, 40, 3))
    expected = run(Trainer(model), adapter, data, "cross_entropy")
    expected_grads = take_gradients(adapter)
    assert arrays_equal(run(trainer, adapter, data, "cross_entropy").logprobs, expected.logprobs)
    assert_close(take_gradients(adapter), expected_grads)
