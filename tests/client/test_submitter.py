"""Numbers, order, and what becomes of a number whose operation the service did not take."""

from __future__ import annotations

import threading
import time

import pytest

from tests.client.fake import FakeService, f32, i64
from trainsession import (
    AdamParams,
    Cancelled,
    CheckpointExists,
    ConnectionFailed,
    Datum,
    InvalidDatum,
    PayloadTooLarge,
    RateLimited,
    SequenceConflict,
    SessionClosed,
    SessionFenced,
    TensorData,
)
from trainsession.client.training import TrainingClient


def test_operations_are_numbered_and_sent_in_the_order_of_the_calls(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    futures = [trainer.forward_backward(batch) if i % 2 == 0 else trainer.optim_step() for i in range(20)]
    for future in futures:
        future.result(10)
    assert [body["seq"] for body in fake.submits] == list(range(1, 21))
    assert [kind for _, kind in fake.ran] == ["forward_backward", "optim_step"] * 10
    assert {body["epoch"] for body in fake.submits} == {1}
    assert len({body["idempotency_key"] for body in fake.submits}) == 20
    assert trainer.next_seq == 21


def test_submits_overlap_but_only_a_few(fake: FakeService, trainer: TrainingClient, batch: list[Datum]) -> None:
    fake.submit_seconds = 0.02
    started = time.monotonic()
    futures = [trainer.forward_backward(batch) for _ in range(20)]
    for future in futures:
        future.result(10)
    assert fake.most_submits == 4
    assert time.monotonic() - started < 20 * 0.02
    assert [seq for seq, _ in fake.ran] == list(range(1, 21))


def test_a_call_returns_before_the_service_has_answered(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.submit_seconds = 0.5
    started = time.monotonic()
    future = trainer.forward_backward(batch)
    assert time.monotonic() - started < 0.25
    assert not future.done()
    assert future.operation_id is None
    future.result(10)
    assert future.operation_id == "op_1"


def test_many_threads_get_different_numbers(fake: FakeService, trainer: TrainingClient) -> None:
    def calls() -> None:
        for _ in range(25):
            trainer.zero_grad().result(10)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [seq for seq, _ in fake.ran] == list(range(1, 101))


def test_data_are_those_of_the_moment_of_the_call(fake: FakeService, trainer: TrainingClient) -> None:
    fake.submit_seconds = 0.05
    weights, targets = f32([1, 1, 1]), i64([2, 3, 4])
    data = [Datum([1, 2, 3], {"target_tokens": targets, "weights": weights})]
    futures = [trainer.forward_backward(data) for _ in range(6)]
    weights[:] = 7
    targets[:] = 9
    data[0].model_input.tokens[:] = 8
    data.clear()
    for future in futures:
        future.result(10)
    for body in fake.submits:
        (datum,) = body["data"]
        assert datum["tokens"].tolist() == [1, 2, 3]
        assert datum["inputs"]["target_tokens"].tolist() == [2, 3, 4]
        assert datum["inputs"]["weights"].tolist() == [1, 1, 1]


def test_a_refusal_that_consumed_its_number_is_only_that_futures_error(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.refuse[1] = [InvalidDatum("datum 0: token id 999", details={"datum": 0})]
    bad, good = trainer.forward_backward(batch), trainer.zero_grad()
    with pytest.raises(InvalidDatum, match="token id 999") as caught:
        bad.result(10)
    assert caught.value.details == {"datum": 0}
    good.result(10)
    assert [body["kind"] for body in fake.submits] == ["forward_backward", "zero_grad"]


def test_a_refusal_that_left_the_number_free_is_filled_with_a_skip(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.refuse[1] = [PayloadTooLarge("too large")]
    bad, good = trainer.forward_backward(batch), trainer.zero_grad()
    with pytest.raises(PayloadTooLarge):
        bad.result(10)
    good.result(10)
    assert fake.ran == [(1, "skip"), (2, "zero_grad")]


def test_when_nobody_answers_the_queue_fails_at_once_and_the_next_call_repairs_the_numbers(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.submit_seconds = 0.05
    for seq in range(1, 5):
        fake.refuse[seq] = [ConnectionFailed("nobody there")]
    futures = [trainer.forward_backward(batch) for _ in range(10)]
    for future in futures:
        with pytest.raises(ConnectionFailed):
            future.result(10)
    assert len(fake.submits) == 4, "what is queued behind must not wait for its own time-out"
    trainer.zero_grad().result(10)
    assert fake.ran == [*((seq, "skip") for seq in range(1, 11)), (11, "zero_grad")]


def test_a_submit_whose_answer_was_lost_keeps_its_number(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.lose_answer[1] = ConnectionFailed("the answer was lost")
    with pytest.raises(ConnectionFailed):
        trainer.forward_backward(batch).result(10)
    trainer.zero_grad().result(10)
    assert fake.ran == [(1, "forward_backward"), (2, "zero_grad")]
    skip = next(body for body in fake.submits if body["kind"] == "skip")
    assert skip["seq"] == 1


def test_a_full_queue_of_the_service_only_delays(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.refuse[1] = [RateLimited("4096 operations are queued")]
    trainer.forward_backward(batch).result(10)
    first, second = fake.submits
    assert first["idempotency_key"] == second["idempotency_key"]
    assert fake.ran == [(1, "forward_backward")]


@pytest.mark.parametrize("error", [SessionFenced("fenced"), SessionClosed("closed"), SequenceConflict("used")])
def test_a_lost_session_is_an_error_of_each_call_and_no_hang(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum], error: Exception
) -> None:
    fake.refuse[1] = fake.refuse[2] = [error]  # type: ignore[list-item]
    fake.refuse[2] = [error]  # type: ignore[list-item]
    for _ in range(2):
        with pytest.raises(type(error)):
            trainer.forward_backward(batch).result(10)
    assert len(fake.submits) == 2


def test_errors_of_operations_keep_their_class(fake: FakeService, trainer: TrainingClient) -> None:
    fake.fail["save_state"] = CheckpointExists("a checkpoint of this name exists", details={"name": "x"})
    with pytest.raises(CheckpointExists) as caught:
        trainer.save_state("x").result(10)
    assert caught.value.details == {"name": "x"}


def test_cancelling_what_is_not_sent_yet_sends_a_skip(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.submit_seconds = 0.1
    futures = [trainer.forward_backward(batch) for _ in range(8)]
    assert futures[7].cancel()
    with pytest.raises(Cancelled):
        futures[7].result(10)
    for future in futures[:7]:
        future.result(10)
    assert fake.ran[-1] == (8, "skip")
    assert "data" not in fake.submits[-1]


def test_cancelling_what_the_service_has_asks_the_service(fake: FakeService, trainer: TrainingClient) -> None:
    fake.hold = {"zero_grad"}
    first, second = trainer.zero_grad(), trainer.optim_step(AdamParams())
    while second.operation_id is None:
        time.sleep(0.005)
    assert second.queue_position == 1
    assert second.cancel()
    fake.release(trainer, "zero_grad")
    first.result(10)
    with pytest.raises(Cancelled):
        second.result(10)
    assert not second.cancel(), "it has ended"
    assert second.queue_position is None


def test_close_waits_for_what_is_queued_and_then_refuses(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.submit_seconds = 0.02
    futures = [trainer.forward_backward(batch) for _ in range(10)]
    trainer.close()
    assert all(future.done() for future in futures)
    assert fake.calls[-1] == ("POST", "/v1/sessions/ses_1/close")
    with pytest.raises(SessionClosed, match="ses_1"):
        trainer.optim_step()
    trainer.close()
    assert fake.calls.count(("POST", "/v1/sessions/ses_1/close")) == 1


def test_an_exception_in_a_with_block_keeps_the_session(fake: FakeService, trainer: TrainingClient) -> None:
    with pytest.raises(ZeroDivisionError), trainer:
        raise ZeroDivisionError
    assert ("POST", "/v1/sessions/ses_1/close") not in fake.calls


def test_results_come_back_as_typed_values(fake: FakeService, trainer: TrainingClient, batch: list[Datum]) -> None:
    output = trainer.forward_backward(batch, "cross_entropy").result(10)
    assert output.metrics == {"loss:sum": 6.0}
    assert output.logprobs == [TensorData(f32([-1.5, -1.5, -1.5]))]
    assert output.usage.train == 3
    assert trainer.optim_step().result(10).metrics["grad_norm"] == 1.0
    saved = trainer.save_weights_for_sampler("final", ttl_seconds=3600).result(10)
    assert saved.path == "ts://ses_1/state/final"
    assert fake.submits[-1]["params"] == {"overwrite": False, "name": "final", "ttl_seconds": 3600}
    assert trainer.load_state_with_optimizer("ts://ses_1/state/a").result(10) == "ts://ses_1/state/a"
    assert fake.submits[-1]["params"] == {"path": "ts://ses_1/state/a", "optimizer": True}
    trainer.optim_step(AdamParams(learning_rate=2e-3), progress={"row": 7}).result(10)
    assert fake.submits[-1]["params"]["learning_rate"] == 2e-3
    assert fake.submits[-1]["progress"] == {"row": 7}
