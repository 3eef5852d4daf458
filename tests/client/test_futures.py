"""One kind of future: waiting, awaiting, time-outs, Ctrl-C, and being forgotten."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref

import pytest

import trainsession as ts
from tests.client.fake import FakeService
from trainsession import ConnectionFailed, Datum, NonFinite, ResultTimeout
from trainsession.client.io_loop import io_loop
from trainsession.client.training import TrainingClient


def test_a_timeout_leaves_the_operation_running(fake: FakeService, trainer: TrainingClient, batch: list[Datum]) -> None:
    fake.hold = {"forward_backward"}
    future = trainer.forward_backward(batch)
    started = time.monotonic()
    with pytest.raises(ResultTimeout, match="goes on"):
        future.result(0.05)
    with pytest.raises(TimeoutError):
        future.exception(0.01)
    assert time.monotonic() - started < 5
    fake.release(trainer, "forward_backward")
    assert future.result(10).metrics["loss:sum"] == 6.0
    assert future.exception() is None


def test_result_may_be_asked_often_and_raises_the_same_error(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.fail["forward_backward"] = NonFinite("datum 0: logprob is nan", details={"datum": 0})
    future = trainer.forward_backward(batch)
    for _ in range(2):
        with pytest.raises(NonFinite, match="datum 0"):
            future.result(10)
    assert isinstance(future.exception(), NonFinite)
    assert repr(future) == "<OperationFuture forward_backward, failed: NonFinite>"


def test_await_works_in_any_running_loop(trainer: TrainingClient, batch: list[Datum]) -> None:
    async def loop_of_a_notebook() -> list[float]:
        future = trainer.forward_backward(batch)
        # A cell may also block: its loop is not the one that results arrive on.
        blocked = trainer.forward_backward(batch).result(10)
        awaited = await future
        both = await asyncio.gather(trainer.forward_backward(batch), trainer.forward_backward(batch))
        again = await future
        assert again is awaited
        return [output.metrics["loss:sum"] for output in (blocked, awaited, *both)]

    assert asyncio.run(loop_of_a_notebook()) == [6.0] * 4


def test_a_task_that_stops_waiting_does_not_stop_the_operation(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.hold = {"forward_backward"}

    async def give_up() -> ts.OperationFuture[ts.ForwardBackwardOutput]:
        future = trainer.forward_backward(batch)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.05)
        with pytest.raises(ResultTimeout):
            await future.result_async(0.05)
        return future

    future = asyncio.run(give_up())
    fake.release(trainer, "forward_backward")
    assert future.result(10).metrics["loss:sum"] == 6.0
    assert fake.cancelled == []


def test_async_twins_of_operations_return_the_future(trainer: TrainingClient, batch: list[Datum]) -> None:
    async def loop() -> tuple[float, float]:
        backward = await trainer.forward_backward_async(batch, loss_fn="cross_entropy")
        step = await trainer.optim_step_async(ts.AdamParams())
        assert isinstance(backward, ts.OperationFuture)
        return (await backward).metrics["loss:sum"], (await step).metrics["grad_norm"]

    assert asyncio.run(loop()) == (6.0, 1.0)


def test_blocking_on_the_io_loop_is_an_error_and_no_deadlock(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.hold = {"forward_backward"}
    future = trainer.forward_backward(batch)

    async def block() -> None:
        future.result()

    with pytest.raises(RuntimeError, match="I/O loop"):
        io_loop().start(block()).result(5)


def test_as_completed_yields_in_the_order_of_the_ends(fake: FakeService, trainer: TrainingClient) -> None:
    fake.hold = {"sample", "optim_step"}
    sampler = trainer.base_sampling_client()
    slow, sample, quick = trainer.optim_step(), sampler.sample([1]), trainer.log({"loss": 1.0})
    ended = ts.as_completed([slow, sample, quick])  # type: ignore[list-item]
    assert next(ended) is quick
    fake.release(trainer, "optim_step")
    assert next(ended) is slow
    with pytest.raises(ResultTimeout, match="1 of 3"):
        list(ts.as_completed([slow, sample, quick], timeout=0.05))  # type: ignore[list-item]
    assert list(ts.as_completed([])) == []


def test_a_forgotten_future_is_neither_kept_nor_complained_about(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum], caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail["forward_backward"] = NonFinite("nobody will ask")
    future = trainer.forward_backward(batch)
    gone = weakref.ref(future)
    del future
    trainer.zero_grad().result(10)
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    assert caplog.records == []


def _interrupt_soon(seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_cancels_what_has_not_started_and_keeps_the_session(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.hold = {"optim_step"}
    done = trainer.forward_backward(batch)
    done.result(10)
    futures = [trainer.optim_step(), trainer.forward_backward(batch), trainer.optim_step()]
    timer = _interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        futures[0].result(20)
    timer.join()
    assert fake.cancelled == ["op_4", "op_3", "op_2"], "newest first"
    fake.release(trainer, "optim_step")
    for future in futures:
        with pytest.raises(ts.Cancelled):
            future.result(10)
    assert trainer.forward_backward(batch).result(10).metrics["loss:sum"] == 6.0
    assert ("POST", "/v1/sessions/ses_1/close") not in fake.calls


def test_ctrl_c_while_sampling_stops_the_samples(fake: FakeService, trainer: TrainingClient) -> None:
    fake.hold = {"sample"}
    sampler = trainer.base_sampling_client()
    future = sampler.sample([[1], [2]], num_samples=2)
    while len(future.operation_ids) < 2:
        time.sleep(0.005)
    timer = _interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        future.result(20)
    timer.join()
    assert sorted(fake.cancelled) == ["smp_0", "smp_1"]
    assert [response.sequences[0].stop_reason for response in future.result(10)] == ["cancelled"] * 2


def test_a_closed_client_fails_what_still_waits(fake: FakeService, trainer: TrainingClient, batch: list[Datum]) -> None:
    fake.hold = {"forward_backward"}
    future = trainer.forward_backward(batch)
    trainer._connection.close()
    with pytest.raises(ConnectionFailed, match=r"attach\(\)"):
        future.result(10)
    assert fake.is_closed
    with pytest.raises(ConnectionFailed, match="closed"):
        trainer.usage()
