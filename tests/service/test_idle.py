"""Sessions that nobody uses: saved and closed after days, by the database's own clock of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL
from tests.service.driver import PROJECT, Trainer, open_service, prompt, run, sample, serving, value
from tests.service.test_queue_after_a_crash import Held
from tests.service.test_recovery import abandon
from trainsession.errors import StorageError
from trainsession.service.requests import CreateSession, OperationRequest
from trainsession.service.service import Service
from trainsession.store.schema import sessions

pytestmark = pytest.mark.usefixtures("each_database")
DAYS = 86_400.0


async def days_pass(service: Service, days: float) -> None:
    """In the database, and in the memory of this process."""
    for session in service._sessions.in_memory:
        session.used_at -= days * DAYS
    for session_id in service._sessions._noted:
        service._sessions._noted[session_id] -= days * DAYS
    older = sa.update(sessions).values(used_at=sessions.c.used_at - days * DAYS)
    await service.store.write(lambda connection: connection.execute(older))


async def state_of(service: Service, session_id: str) -> str:
    return (await service.get_session(PROJECT, session_id)).state


@pytest.mark.parametrize("how", ["in memory", "closed", "killed"])
def test_a_session_nobody_used_for_days_is_saved_and_closed(tmp_path: Path, how: str) -> None:
    """Also one that nobody touched since the service started, whose log has yet to be run again."""

    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        untouched = await Trainer.create(service)
        await trainer.train([5])
        await value(service, await trainer.step(1.0))
        if how != "in memory":
            await (service.close() if how == "closed" else abandon(service))
            service = await open_service(tmp_path)
        try:
            await days_pass(service, 6.9)
            await service._janitor.round()
            assert await state_of(service, trainer.id) == "running"
            await days_pass(service, 0.2)
            await service._janitor.round()
            assert await state_of(service, trainer.id) == "closed"
            assert await state_of(service, untouched.id) == "closed"
            (saved,) = await service.list_checkpoints(PROJECT)
            assert saved.kind == "state"
            resumed = await Trainer.create(
                service, base_model="", lora=None, from_checkpoint=saved.path, with_optimizer=True
            )
            assert await resumed.weight() == 5.0
        finally:
            await service.close()

    run(test())


def test_a_session_that_is_only_sampled_is_in_use(tmp_path: Path) -> None:
    """A base model's, that of a snapshot, and one that only pays; also for the next process."""

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([5])
            await trainer.step(1.0)
            weights = (await trainer.do("snapshot"))["weights"]
            sampler, _ = await service.create_session(PROJECT, CreateSession(base_model=MODEL, kind="sampler"))
            unused, _ = await service.create_session(PROJECT, CreateSession(base_model=MODEL, kind="sampler"))
            for _ in range(3):
                await days_pass(service, 4)
                await sample(service, weights, prompt([1]))
                await sample(service, {"base_model": MODEL}, prompt([1], session_id=sampler.session_id))
                await service._janitor.round()
            assert await state_of(service, unused.session_id) == "closed"
        async with serving(tmp_path) as service:
            await days_pass(service, 4)
            await service._janitor.round()
            assert await state_of(service, trainer.id) == "running"
            assert await state_of(service, sampler.session_id) == "running"

    run(test())


def test_that_a_session_is_in_use_is_not_written_with_each_sample(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            sampler, _ = await service.create_session(PROJECT, CreateSession(base_model=MODEL, kind="sampler"))
            lazy: list[object] = []
            service._sessions._store.write_lazily = lazy.append  # type: ignore[method-assign]
            started = time.monotonic()
            for _ in range(20):
                service._sessions.touch([sampler.session_id])
            assert len(lazy) == 1
            (session,) = service._sessions.in_memory
            assert session.used_at >= started
            await asyncio.sleep(0)

    run(test())


def test_a_session_that_cannot_be_restored_is_kept(tmp_path: Path) -> None:
    """E.g. the model is loaded in another dtype: no checkpoint can be saved, so its snapshots are all there is."""

    async def set_dtype(service: Service, dtype: str) -> None:
        query = sa.update(sessions).values(dtype=dtype)
        await service.store.write(lambda connection: connection.execute(query))

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([5])
            await value(service, await trainer.step(1.0))
        async with serving(tmp_path) as service:
            await set_dtype(service, "another")
            for _ in range(2):
                await days_pass(service, 8)
                await service._janitor.round()
            assert await state_of(service, trainer.id) == "failed"
            await set_dtype(service, "float32")
        async with serving(tmp_path) as service:
            assert await (await Trainer.attach(service, trainer.id)).weight() == 5.0

    run(test())


@pytest.mark.parametrize("taken_up", ["attached", "submitted"])
def test_a_session_that_is_taken_up_while_it_is_saved_or_waits_for_its_turn_stays_open(
    tmp_path: Path, taken_up: str
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            idle = [await Trainer.create(service) for _ in range(2)]
            for trainer in idle:
                await trainer.train([5])
                await value(service, await trainer.step(1.0))
        host = Held()
        async with serving(tmp_path, host) as service:
            await days_pass(service, 8)
            round_ = asyncio.create_task(service._janitor.round())
            while not service._sessions.queued():  # the save of one waits for the engine
                await asyncio.sleep(0.005)
            for trainer in idle:
                if taken_up == "attached":
                    await service.attach(PROJECT, trainer.id)
                else:
                    await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad"))
            host.go.set()
            await round_
            for trainer in idle:
                assert await state_of(service, trainer.id) == "running"

    run(test())


@pytest.mark.parametrize("fault", [StorageError("damaged"), RuntimeError("ours")])
@pytest.mark.parametrize("where", ["loaded", "retired"])
def test_a_session_that_cannot_be_closed_does_not_keep_the_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, fault: Exception
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            idle = [await Trainer.create(service) for _ in range(3)]
        async with serving(tmp_path) as service:
            owner, name = (service._sessions, "_load") if where == "loaded" else (service._janitor, "_retire")
            real, calls = getattr(owner, name), [0]

            async def faulty_once(*args: Any) -> Any:
                calls[0] += 1
                if calls[0] == 1:
                    raise fault
                return await real(*args)

            monkeypatch.setattr(owner, name, faulty_once)
            await days_pass(service, 8)
            await service._janitor.round()
            assert sorted([await state_of(service, trainer.id) for trainer in idle]) == ["closed", "closed", "running"]

    run(test())
