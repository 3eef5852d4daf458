"""A loss of the caller's own: two numbers, gradients from torch, and nothing lost when it raises."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.fake import FakeService, f32
from trainsession import Cancelled, Datum, InvalidDatum, InvalidRequest, NonFinite, Usage
from trainsession.client.custom_loss import evaluate
from trainsession.client.training import TrainingClient


def dpo_like(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, Mapping[str, Any]]:
    margin = logprobs[0].sum() - logprobs[1].sum()
    loss = -torch.nn.functional.logsigmoid(0.1 * margin) + sum((lp**2).sum() for lp in logprobs)
    return loss, {"margin:mean": margin}


@pytest.fixture
def pair() -> list[Datum]:
    return [
        Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "reward": 1.0}),
        Datum([1, 2], {"target_tokens": [2, 9], "anything": [[1, 2], [3, 4]]}),
    ]


def test_the_gradients_are_those_of_finite_differences(pair: list[Datum]) -> None:
    rng = np.random.default_rng(0)
    logprobs = [rng.normal(-1, 0.5, 3).astype(np.float32), rng.normal(-1, 0.5, 2).astype(np.float32)]
    loss, metrics, gradients = evaluate(dpo_like, pair, logprobs)

    def value(values: list[np.ndarray]) -> float:
        return float(dpo_like(pair, [torch.tensor(v, dtype=torch.float64) for v in values])[0])

    assert loss == pytest.approx(value(logprobs), rel=1e-5)
    assert metrics == {"margin:mean": pytest.approx(float(logprobs[0].sum() - logprobs[1].sum()), rel=1e-5)}
    for which, gradient in enumerate(gradients):
        assert gradient.dtype == np.float32
        for position in range(len(gradient)):
            up, down = [[v.astype(np.float64) for v in logprobs] for _ in range(2)]
            up[which][position] += 1e-5
            down[which][position] -= 1e-5
            assert gradient[position] == pytest.approx((value(up) - value(down)) / 2e-5, rel=1e-3)


def test_both_numbers_are_taken_at_once_and_the_gradients_are_sent(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum]
) -> None:
    custom = trainer.forward_backward_custom(pair, dpo_like)
    step = trainer.optim_step()
    output = custom.result(20)
    step.result(10)
    assert fake.ran == [(1, "forward_keep"), (2, "backward"), (3, "optim_step")]
    forward = next(body for body in fake.submits if body["kind"] == "forward_keep")
    assert [set(datum["inputs"]) for datum in forward["data"]] == [{"target_tokens"}, {"target_tokens"}]
    backward = next(body for body in fake.submits if body["kind"] == "backward")
    assert backward["params"] == {"forward_seq": 1}
    expected = evaluate(dpo_like, pair, [np.full(3, -1.5, np.float32), np.full(2, -1.5, np.float32)])
    for sent, gradient in zip(backward["gradients"], expected[2], strict=True):
        np.testing.assert_array_equal(sent, gradient)
    assert output.metrics["loss:sum"] == pytest.approx(expected[0])
    assert output.metrics["margin:mean"] == pytest.approx(-1.5)
    assert output.usage == Usage(train=5), "the backward turns what the forward cost into training"


def test_an_exception_of_the_function_is_the_futures_and_the_queue_goes_on(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum]
) -> None:
    class RewardModelBroke(Exception):
        pass

    def broken(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        raise RewardModelBroke("no reward")

    future = trainer.forward_backward_custom(pair, broken)
    after = trainer.zero_grad()
    with pytest.raises(RewardModelBroke, match="no reward"):
        future.result(20)
    after.result(10)
    assert fake.ran == [(1, "forward_keep"), (2, "skip"), (3, "zero_grad")]


def test_a_failed_forward_is_the_futures_error_and_skips_the_second_number(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum]
) -> None:
    fake.fail["forward_keep"] = NonFinite("datum 1: logprob is nan")
    future, after = trainer.forward_backward_custom(pair, dpo_like), trainer.zero_grad()
    with pytest.raises(NonFinite, match="datum 1"):
        future.result(20)
    after.result(10)
    assert fake.ran[1:] == [(2, "skip"), (3, "zero_grad")]


def test_functions_run_one_at_a_time_on_a_thread_of_their_own_while_others_go_on(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum]
) -> None:
    threads: list[str] = []
    go = threading.Event()

    def slow(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        threads.append(threading.current_thread().name)
        assert go.wait(10)
        return logprobs[0].sum(), {}

    first, second = trainer.forward_backward_custom(pair, slow), trainer.forward_backward_custom(pair, slow)
    # The service is reached and answers while the function is still at work.
    assert trainer.base_sampling_client().sample([1, 2]).result(10).sequences[0].tokens == [5, 6]
    trainer.log({"loss": 1.0}).result(10)
    assert not first.done()
    go.set()
    first.result(10)
    second.result(10)
    assert len(set(threads)) == 1
    assert threads[0].startswith("trainsession-custom-loss")


def test_the_function_sees_the_data_of_the_moment_of_the_call(trainer: TrainingClient) -> None:
    weights = f32([1, 2, 3])
    data = [Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "w": weights})]
    seen: list[list[float]] = []

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        seen.append(data[0].loss_fn_inputs["w"].tolist())
        return logprobs[0].sum(), {}

    future = trainer.forward_backward_custom(data, loss)
    weights[:] = 0
    data.clear()
    future.result(20)
    assert seen == [[1, 2, 3]]


def test_cancelling_while_the_function_runs_sends_no_gradient(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum]
) -> None:
    started, go = threading.Event(), threading.Event()

    def slow(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        started.set()
        assert go.wait(10)
        return logprobs[0].sum(), {}

    future = trainer.forward_backward_custom(pair, slow)
    assert started.wait(20)
    assert future.cancel()
    go.set()
    with pytest.raises(Cancelled):
        future.result(10)
    trainer.zero_grad().result(10)
    assert fake.ran == [(1, "forward_keep"), (2, "skip"), (3, "zero_grad")]


def _no_metrics(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum()


def _vector(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0], {}


def _constant(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return torch.tensor(1.0), {}


def _nan(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum() * float("nan"), {}


def _nan_gradient(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum() + (logprobs[1] + 1.5).sqrt().sum(), {}


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (_no_metrics, InvalidRequest, r"returns \(loss, metrics\), got Tensor"),
        (_vector, InvalidRequest, "scalar tensor"),
        (_constant, InvalidRequest, "does not depend on the logprobs"),
        (_nan, NonFinite, "the custom loss is nan"),
        (_nan_gradient, NonFinite, "datum 1: the gradient"),
    ],
)
def test_what_a_function_may_not_return(
    fake: FakeService, trainer: TrainingClient, pair: list[Datum], function: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        trainer.forward_backward_custom(pair, function).result(20)
    trainer.zero_grad().result(10)
    assert fake.ran[1:] == [(2, "skip"), (3, "zero_grad")]


def test_unused_logprobs_get_zero_gradients(pair: list[Datum]) -> None:
    def first_only(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        return 2 * logprobs[0].sum(), {}

    _, _, gradients = evaluate(first_only, pair, [np.zeros(3, np.float32), np.zeros(2, np.float32)])
    assert gradients[0].tolist() == [2, 2, 2]
    assert gradients[1].tolist() == [0, 0]


def test_bad_arguments_take_no_number(fake: FakeService, trainer: TrainingClient, pair: list[Datum]) -> None:
    with pytest.raises(InvalidRequest, match="a function"):
        trainer.forward_backward_custom(pair, "cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(InvalidDatum, match="datum 0"):
        trainer.forward_backward_custom([Datum([1, 2], {"reward": 1.0})], dpo_like)
    assert trainer.next_seq == 1
