"""What a cancel, or the end of its session, does to operations that wait, run, or cannot be written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench.null_engine import NullEngine, NullHandle, NullHost
from tests.service.driver import PROJECT, Trainer, result, run, serving, value
from tests.service.money import allow, left, priced
from trainsession.errors import Cancelled, StorageError
from trainsession.service import submission
from trainsession.service.endings import Ending

pytestmark = pytest.mark.usefixtures("each_database")


class SlowHandle(NullHandle):
    """Its passes end when they are ``allowed`` to."""

    def __init__(self, engine: NullEngine) -> None:
        super().__init__(engine)
        self.inside, self.allowed = asyncio.Event(), asyncio.Event()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if method == "train":
            self.inside.set()
            await self.allowed.wait()
        return await super().call(method, *args, **kwargs)


class SlowHost(NullHost):
    """Its engine opens when it is ``loaded``."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = SlowHandle(NullEngine())
        self.loaded, self.opening = asyncio.Event(), asyncio.Event()

    async def open(self, base_model: str) -> Any:
        self.opening.set()
        await self.loaded.wait()
        return self.handle


def test_what_the_engine_runs_when_its_session_is_closed_ends_and_is_paid(tmp_path: Path) -> None:
    async def test() -> None:
        host = SlowHost()
        host.loaded.set()
        async with serving(priced(tmp_path), host) as service:
            await allow(service, 100)
            trainer = await Trainer.create(service)
            running = await trainer.train([1, 2, 3])
            await host.handle.inside.wait()
            waiting = await trainer.train([1])
            closing = asyncio.create_task(service.close_session(PROJECT, trainer.id))
            assert isinstance((await result(service, waiting)).error, Cancelled)
            host.handle.allowed.set()
            assert (await closing).state == "closed"
            assert (await value(service, running))["usage"]["train"] == 3
            logged = (await service._log.results(PROJECT, [running]))[running]
            assert logged is not None
            assert logged.state == "done"
            assert await left(service) == (6, 0)

    run(test(), 20)


def test_what_is_cancelled_while_its_engine_is_loaded_does_not_run(tmp_path: Path) -> None:
    async def test() -> None:
        host = SlowHost()
        host.handle.allowed.set()
        async with serving(tmp_path, host) as service:
            trainer = await Trainer.create(service)
            cancelled = await trainer.train([1, 2, 3])
            await host.opening.wait()
            for _ in range(10):  # the lane has picked it
                await asyncio.sleep(0)
            assert await service.cancel(PROJECT, cancelled)
            host.loaded.set()
            await trainer.do("zero_grad")
            assert "forward_backward" not in host.handle.engine.calls

    run(test(), 20)


@pytest.mark.parametrize("passed", [False, True])
def test_a_cancel_that_cannot_be_written_leaves_an_operation_that_runs_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    """Where the queue has ``passed`` it before the write failed it cannot run any more."""

    async def test() -> None:
        monkeypatch.setattr(submission, "_RETRY_SECONDS", 0.01)
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            cancelled = await trainer.train([1, 2, 3])
            last = await trainer.submit("zero_grad")
            finish = service._log.finish

            async def fail_once(ending: Ending, *more: Ending) -> None:
                if ending.operation_id != cancelled:
                    return await finish(ending, *more)
                monkeypatch.setattr(service._log, "finish", finish)
                if passed:
                    await service.submit(PROJECT, trainer.id, gap)
                    await value(service, last)
                raise StorageError("the disk is full")

            monkeypatch.setattr(service._log, "finish", fail_once)
            if passed:
                assert await service.cancel(PROJECT, cancelled)
                logged = (await service._log.results(PROJECT, [cancelled]))[cancelled]
                assert logged is not None
                assert logged.state == "cancelled"
            else:
                with pytest.raises(StorageError):
                    await service.cancel(PROJECT, cancelled)
                await service.submit(PROJECT, trainer.id, gap)
                assert (await value(service, cancelled))["metrics"]["loss:sum"] == 6.0

    run(test(), 20)


def test_what_is_submitted_while_its_session_is_closed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accepted by the transaction before the one that closes the session, which cancels it."""

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.do("zero_grad")
            accept = service._log.accept
            closing: list[asyncio.Task[Any]] = []

            async def accept_and_close(*args: Any) -> Any:
                close = service._sessions.close(PROJECT, trainer.id)
                asyncio.get_running_loop().call_soon(lambda: closing.append(asyncio.create_task(close)))
                return await accept(*args)

            monkeypatch.setattr(service._log, "accept", accept_and_close)
            submitted = await trainer.train([1])
            await closing[0]
            answer = await service.results(PROJECT, [submitted], timeout=0.5)
            assert [ended.state for ended in answer.results] == ["cancelled"]

    run(test())
