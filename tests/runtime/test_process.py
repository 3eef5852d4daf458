"""An engine in its own process: a real tiny model, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainsession.engine.api import SampleEvent, SampleItem, TrainItem
from trainsession.errors import EngineError, EngineLost, NoGradients, ServiceUnavailable
from trainsession.runtime.host import LOAD_ATTEMPTS, EngineOptions, LocalHost
from trainsession.runtime.process import EngineProcess
from trainsession.types import AdamParams, Datum, LoraConfig, SamplingParams

LORA = LoraConfig(rank=4, seed=3)
DATA = [Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9]}), Datum([9, 4], {"target_tokens": [4, 2]})]


def _with_engine(model: Path, test: Callable[[EngineProcess], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineOptions(name=str(model), device="cpu", dtype="float32"), **options)
        try:
            await asyncio.wrap_future(engine.ready)
            await test(engine)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 120))


async def _train(engine: Any) -> list[Any]:
    await engine.call("add_adapter", "a", LORA)
    (output,) = await engine.call("train", [TrainItem(adapter_id="a", data=DATA, loss_fn="cross_entropy")])
    metrics = await engine.call("optim_step", "a", AdamParams(learning_rate=1e-2))
    state = await engine.call("capture", "a", optimizer=True)
    return [output.metrics, metrics, *output.logprobs, *state.tensors.values()]


async def _sample(engine: Any, tokens: int, request_id: str = "r") -> list[SampleEvent]:
    events: list[SampleEvent] = []
    ended = asyncio.Event()

    def on_event(event: SampleEvent) -> None:
        events.append(event)
        if event.done:
            ended.set()

    params = SamplingParams(max_tokens=tokens, seed=7, stop=[])
    prompt = np.array([5, 6, 7], np.int32)
    engine.sample(SampleItem(request_id=request_id, prompt=prompt, num_samples=2, params=params), on_event)
    await ended.wait()
    return events


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_computes_what_a_thread_computes(tiny_model: Path) -> None:
    async def both() -> None:
        outcomes: list[tuple[list[Any], list[SampleEvent]]] = []
        for processes in (False, True):
            host = LocalHost(processes=processes, device="cpu", dtype="float32")
            engine = await host.open(str(tiny_model))
            outcomes.append((await _train(engine), await _sample(engine, 5)))
            assert engine.busy_seconds > 0
            with pytest.raises(NoGradients):
                await engine.call("optim_step", "a", AdamParams())
            await host.close()
        (in_thread, drawn), (in_process, drawn_there) = outcomes
        assert len(in_thread) == len(in_process)
        for ours, theirs in zip(in_thread, in_process, strict=True):
            assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
        assert drawn == drawn_there

    asyncio.run(asyncio.wait_for(both(), 120))


def test_a_killed_process_fails_what_waits_at_once_and_the_next_call_too(tiny_model: Path) -> None:
    async def test(engine: EngineProcess) -> None:
        await engine.call("add_adapter", "a", LORA)
        sampling = asyncio.create_task(_sample(engine, 400))
        await asyncio.sleep(0.2)
        assert not sampling.done()
        calling = asyncio.create_task(engine.call("capture", "a", optimizer=True))
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        events = await asyncio.wait_for(sampling, 5)
        assert isinstance(events[-1].error, EngineLost)
        assert events[-1].done
        with contextlib.suppress(EngineLost):  # it may have been answered before
            await calling
        assert not engine.alive
        with pytest.raises(EngineLost, match="exit status"):
            await engine.call("capture", "a", optimizer=True)
        (end,) = await _sample(engine, 3, "later")
        assert isinstance(end.error, EngineLost)

    _with_engine(tiny_model, test)


def test_a_process_that_stops_answering_is_killed(tiny_model: Path) -> None:
    async def test(engine: EngineProcess) -> None:
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match="no sign of life for 3 s"):
            await engine.call("stats")
        assert not _running(engine.pid)

    _with_engine(tiny_model, test, hang_seconds=3.0)


def test_an_engine_whose_thread_hangs_is_killed_and_one_that_computes_is_not(tmp_path: Path, tiny_model: Path) -> None:
    async def test(engine: EngineProcess) -> None:
        await engine.call("add_adapter", "a", LORA)
        data = [Datum([5 + i % 200 for i in range(400)], {"target_tokens": [6] * 400})] * 200
        started = time.monotonic()
        await engine.call("train", [TrainItem(adapter_id="a", data=data, loss_fn="cross_entropy")])
        assert time.monotonic() - started > 2.5  # one call takes longer than it may be stuck
        await asyncio.sleep(3)  # without work it is not stuck either
        assert engine.alive
        os.mkfifo(tmp_path / "config.json")  # who opens it for writing waits for a reader
        with pytest.raises(EngineLost, match="got nothing done for 2 s"):
            await engine.call("export_merged", "a", str(tmp_path))
        assert not _running(engine.pid)

    _with_engine(tiny_model, test, stuck_seconds=2.0)


def test_a_host_starts_another_for_one_that_is_lost(tiny_model: Path) -> None:
    async def test() -> None:
        host = LocalHost(processes=True, device="cpu", dtype="float32")
        first = await host.open(str(tiny_model))
        assert isinstance(first, EngineProcess)
        assert await host.open(str(tiny_model)) is first
        os.kill(first.pid, signal.SIGKILL)
        while first.alive:
            await asyncio.sleep(0.01)
        second = await host.open(str(tiny_model))
        assert second is not first
        assert await second.call("stats")
        await host.close()
        with pytest.raises(ServiceUnavailable):
            await second.call("stats")

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_process_that_ends_while_it_loads_is_started_again_but_not_for_ever(tiny_model: Path) -> None:
    async def test(kills: int) -> None:
        host = LocalHost(processes=True, device="cpu", dtype="float32")

        async def kill() -> None:
            killed: set[int] = set()
            while len(killed) < kills:
                await asyncio.sleep(0.01)
                for engine in host._engines.values():
                    if isinstance(engine, EngineProcess) and engine.pid and engine.pid not in killed:
                        os.kill(engine.pid, signal.SIGKILL)
                        killed.add(engine.pid)

        killing = asyncio.create_task(kill())
        try:
            engine = await host.open(str(tiny_model))
            assert kills < LOAD_ATTEMPTS
            assert await engine.call("stats")
        finally:
            await killing
            await host.close()

    asyncio.run(asyncio.wait_for(test(1), 120))
    with pytest.raises(EngineError, match=r"could not be loaded, 3 times: .*exit status"):
        asyncio.run(asyncio.wait_for(test(LOAD_ATTEMPTS), 120))


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:200] if file.suffix == ".safetensors" else data)

    async def test() -> None:
        host = LocalHost(processes=True, device="cpu", dtype="float32")
        with pytest.raises(EngineError, match="failed in loading the model: SafetensorError"):
            await host.open(str(broken))
        await host.close()

    asyncio.run(asyncio.wait_for(test(), 120))


_PARENT = """
import asyncio, sys
from trainsession.runtime.host import LocalHost

async def main():
    engine = await LocalHost(processes=True, device="cpu", dtype="float32").open(sys.argv[1])
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_ends_with_its_parent_however_that_ends(tiny_model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _PARENT, str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _running(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while _running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
