"""One long poll for everything; nothing lost when it breaks."""

from __future__ import annotations

import time

import pytest

from tests.client.fake import FakeService
from trainsession import AuthenticationFailed, ConnectionFailed, Datum
from trainsession.client.training import TrainingClient


def test_there_is_one_poll_at_a_time_and_it_waits_for_all(fake: FakeService, trainer: TrainingClient) -> None:
    fake.hold = {"sample"}
    sampler = trainer.base_sampling_client()
    futures = [sampler.sample([1, index + 1]) for index in range(50)]
    while any(future.operation_id is None for future in futures):
        time.sleep(0.005)
    deadline = time.monotonic() + 5
    while len(fake.polls[-1]) < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(fake.polls[-1]) == 50
    assert fake.most_polls == 1
    assert len(fake.polls) < 15, "a burst of submits must not break the poll off each time"
    for index in range(50):
        trainer._connection.io.call_soon(
            fake._end, f"smp_{index}", {"state": "done", "value": {**_EMPTY, "sequences": []}}
        )
    for future in futures:
        future.result(10)


_EMPTY = {"prompt_logprobs": None, "topk_prompt": None, "usage": {}}


def test_a_result_is_acknowledged_only_after_it_was_delivered(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    trainer.forward_backward(batch).result(10)
    assert fake.acknowledged == []
    trainer.zero_grad().result(10)
    assert fake.acknowledged == ["op_1"]
    trainer._connection.close()
    assert fake.acknowledged == ["op_1", "op_2"], "closing acknowledges the rest"


def test_operations_behind_one_that_is_waited_for_do_not_break_the_poll_off(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.hold = {"forward_backward"}
    futures = [trainer.forward_backward(batch) for _ in range(30)]
    while futures[-1].operation_id is None:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(fake.polls) <= 2
    fake.release(trainer, "forward_backward")
    for future in futures:
        future.result(10)
    assert len(fake.polls) <= 5


def test_no_poll_is_open_when_nobody_waits(fake: FakeService, trainer: TrainingClient) -> None:
    trainer.zero_grad().result(10)
    polls = len(fake.polls)
    time.sleep(0.1)
    assert fake.polls_now == 0
    assert len(fake.polls) == polls


def test_a_service_that_is_gone_fails_the_futures_instead_of_hanging(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.break_poll = ConnectionFailed("no service answers")
    fake.hold = {"forward_backward"}
    future = trainer.forward_backward(batch)
    with pytest.raises(ConnectionFailed, match="no service answers"):
        future.result(10)
    fake.release(trainer, "forward_backward")
    assert trainer.fetch("op_1").result(10).metrics["loss:sum"] == 6.0, "the service still has the result"


def test_a_key_that_was_revoked_says_so(fake: FakeService, trainer: TrainingClient) -> None:
    fake.break_poll = AuthenticationFailed("the key was revoked")
    with pytest.raises(AuthenticationFailed):
        trainer.zero_grad().result(10)
    trainer.zero_grad().result(10)


def test_even_a_bug_in_the_transport_reaches_whoever_waits(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.break_poll = ValueError("not a trainsession error")  # type: ignore[assignment]
    with pytest.raises(ValueError, match="not a trainsession error"):
        trainer.zero_grad().result(10)
    fake.refuse[2] = [KeyError("operation_id")]  # type: ignore[list-item]
    with pytest.raises(KeyError):
        trainer.zero_grad().result(10)
    trainer.zero_grad().result(10)
    assert [seq for seq, _ in fake.ran] == [1, 2, 3]
