from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainsession.engine.api import Engine, SampleEvent, SampleItem
from trainsession.errors import EngineError, InvalidRequest, NotFound, ServiceUnavailable
from trainsession.runtime.thread import SLICE_STEPS, EngineThread
from trainsession.types import SamplingParams


class CountingEngine:
    """An engine whose samples are counters: each step adds one token to every request."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(base_model="counting")
        self.running: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.trace: list[str] = []
        self.step_errors: Iterator[Exception] = iter(())
        self.thread = threading.current_thread()
        self.closed = False

    def submit(self, item: SampleItem) -> None:
        if item.num_samples == 0:
            raise InvalidRequest("no samples")
        self.running[item.request_id] = cast(int, item.params.max_tokens)

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[SampleEvent]:
        self.trace.append("step")
        for error in self.step_errors:
            raise error
        events: list[SampleEvent] = []
        for request_id, left in list(self.running.items()):
            ended = left == 1 or request_id in self.cancelled
            events.append(SampleEvent(request_id=request_id, tokens=[left]))
            self.running[request_id] = left - 1
            if ended:
                del self.running[request_id]
                events.append(SampleEvent(request_id=request_id, done=True))
        return events

    def note(self, text: str, seconds: float = 0.0) -> str:
        assert threading.current_thread() is self.thread
        self.trace.append(text)
        time.sleep(seconds)
        return text.upper()

    def fail(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        self.closed = True


def _item(request_id: str, tokens: int, num_samples: int = 1) -> SampleItem:
    params = SamplingParams(max_tokens=tokens)
    return SampleItem(request_id=request_id, prompt=cast(Any, [1]), num_samples=num_samples, params=params)


def _run(test: Callable[[CountingEngine, EngineThread], Any]) -> CountingEngine:
    made: list[CountingEngine] = []

    def load() -> Engine:
        made.append(CountingEngine())
        return cast(Engine, made[0])

    async def main() -> None:
        thread = EngineThread(load, "test")
        await asyncio.wrap_future(thread.ready)
        try:
            await test(made[0], thread)
        finally:
            await thread.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert made[0].closed
    return made[0]


async def _collect(thread: EngineThread, item: SampleItem) -> list[SampleEvent]:
    events: list[SampleEvent] = []
    done = asyncio.Event()

    def on_event(event: SampleEvent) -> None:
        assert asyncio.get_running_loop()
        events.append(event)
        if event.done:
            done.set()

    thread.sample(item, on_event)
    await done.wait()
    return events


def test_calls_run_in_order_on_the_engines_thread() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        results = await asyncio.gather(*(thread.call("note", f"n{i}", seconds=0.01) for i in range(5)))
        assert results == [f"N{i}" for i in range(5)]
        assert engine.trace == [f"n{i}" for i in range(5)]
        assert 0.05 <= thread.busy_seconds < 1.0

    _run(test)


def test_typed_errors_pass_and_others_become_engine_errors_without_a_traceback() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        with pytest.raises(NotFound, match="gone"):
            await thread.call("fail", NotFound("gone"))
        with pytest.raises(EngineError, match="fail: ZeroDivisionError: by zero") as caught:
            await thread.call("fail", ZeroDivisionError("by zero"))
        assert "Traceback" not in caught.value.message
        assert await thread.call("note", "alive") == "ALIVE"

    _run(test)


def test_events_arrive_in_order_one_request_beside_the_other() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        first, second = await asyncio.gather(_collect(thread, _item("a", 30)), _collect(thread, _item("b", 3)))
        assert [event.tokens for event in first] == [[n] for n in range(30, 0, -1)] + [[]]
        assert [event.tokens for event in second] == [[3], [2], [1], []]
        # Both ran in the same steps, not one after the other.
        assert engine.trace.count("step") < 33

    _run(test)


def test_calls_and_decode_steps_take_turns() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        sample = asyncio.create_task(_collect(thread, _item("a", 10_000)))
        await thread.call("note", "warm-up")
        calls = [asyncio.create_task(thread.call("note", f"n{i}", seconds=0.002)) for i in range(10)]
        await asyncio.gather(*calls)
        between = " ".join(engine.trace).split("n0", 1)[1].split("n9")[0]
        slices = [part.count("step") for part in between.split("n") if "step" in part]
        assert slices
        assert max(slices) <= SLICE_STEPS
        assert min(slices) >= 1
        thread.cancel("a")
        assert (await sample)[-1].done

    _run(test)


def test_the_error_of_a_submit_arrives_as_an_event() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        (event,) = await _collect(thread, _item("a", 5, num_samples=0))
        assert event.done
        assert isinstance(event.error, InvalidRequest)

    _run(test)


def test_a_failing_step_ends_the_running_requests_and_nothing_else() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        sample = asyncio.create_task(_collect(thread, _item("a", 10_000)))
        await thread.call("note", "warm-up")
        engine.step_errors = iter([MemoryError("out of blocks")])
        last = (await sample)[-1]
        assert last.done
        assert isinstance(last.error, EngineError)
        assert engine.cancelled == {"a"}
        assert await thread.call("note", "alive") == "ALIVE"
        assert (await _collect(thread, _item("b", 2)))[-1].error is None

    _run(test)


def test_a_sampler_beyond_repair_refuses_and_does_not_spin() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        engine.step_errors = itertools.repeat(MemoryError("broken"))
        first = await _collect(thread, _item("a", 5))
        assert isinstance(first[-1].error, EngineError)
        await asyncio.sleep(0.05)
        assert engine.trace.count("step") <= 3
        second = await _collect(thread, _item("b", 5))
        assert isinstance(second[-1].error, EngineError)
        assert await thread.call("note", "trains") == "TRAINS"

    _run(test)


def test_a_call_whose_task_was_cancelled_does_not_run() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        running = asyncio.create_task(thread.call("note", "first", seconds=0.1))
        waiting = asyncio.create_task(thread.call("note", "second"))
        await asyncio.sleep(0.02)
        waiting.cancel()
        assert await running == "FIRST"
        assert await thread.call("note", "third") == "THIRD"
        assert engine.trace == ["first", "third"]

    _run(test)


def test_closing_fails_what_waits() -> None:
    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        running = asyncio.create_task(thread.call("note", "first", seconds=0.1))
        waiting = asyncio.create_task(thread.call("note", "second"))
        sample = asyncio.create_task(_collect(thread, _item("a", 10_000)))
        await asyncio.sleep(0.02)
        await thread.close()
        assert await running == "FIRST"
        with pytest.raises(ServiceUnavailable):
            await waiting
        assert isinstance((await sample)[-1].error, ServiceUnavailable)
        with pytest.raises(ServiceUnavailable):
            await thread.call("note", "late")
        assert isinstance((await _collect(thread, _item("late", 1)))[-1].error, ServiceUnavailable)

    _run(test)


def test_a_failing_load_is_the_error_of_ready() -> None:
    def load() -> Engine:
        raise OSError("no such file")

    thread = EngineThread(load, "test")
    with pytest.raises(EngineError, match="loading the model: OSError: no such file"):
        thread.ready.result(timeout=20)


def test_the_users_number_of_threads_stays() -> None:
    import torch

    before = torch.get_num_threads()

    async def test(engine: CountingEngine, thread: EngineThread) -> None:
        assert await thread.call("note", "x") == "X"

    _run(test)
    assert torch.get_num_threads() == before
