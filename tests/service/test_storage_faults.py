"""A disk that is full or refuses to sync: a typed error, nothing lost, usable afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event

from bench.null_engine import NullHost
from tests.service.driver import PROJECT, Trainer, run, serving, value
from trainsession.errors import StorageError
from trainsession.service.service import Service

CROSS_ENTROPY = {"loss_fn": "cross_entropy"}


def refuse_fsync(patch: pytest.MonkeyPatch, code: int) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_large_batch_that_cannot_be_stored_takes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            blobs = set(os.listdir(tmp_path / "blobs"))
            request = trainer.request("forward_backward", params=CROSS_ENTROPY, data=_batch(40_000))
            with monkeypatch.context() as patch:
                refuse_fsync(patch, code)
                with pytest.raises(StorageError):
                    await service.submit(PROJECT, trainer.id, request)
            assert set(os.listdir(tmp_path / "blobs")) == blobs
            assert (await service.get_session(PROJECT, trainer.id)).next_seq == 1
            await value(service, (await service.submit(PROJECT, trainer.id, request))[0])
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 40_000.0

    run(test())


def test_a_save_on_a_full_disk_fails_and_the_session_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([3])
            await value(service, await trainer.step(1.0))
            blobs = set(os.listdir(tmp_path / "blobs"))
            with monkeypatch.context() as patch:
                refuse_fsync(patch, errno.ENOSPC)
                with pytest.raises(StorageError, match="free some space"):
                    await trainer.do("save_state", params={"name": "a"})
            assert set(os.listdir(tmp_path / "blobs")) == blobs
            await trainer.do("save_state", params={"name": "a"})
            assert await trainer.weight() == 3.0

    run(test())


def test_a_database_that_cannot_grow_loses_nothing(tmp_path: Path) -> None:
    """SQLite itself reports a full disk here: the file may have no more pages."""

    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([3]))
            limit = [_pages(service)]
            writer = service.store.database._writer
            event.listen(writer, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {limit[0]}"))
            submitted: list[str] = []
            requests = [trainer.request("forward_backward", params=CROSS_ENTROPY, data=_batch(900)) for _ in range(100)]

            async def fill() -> None:
                for request in requests:
                    submitted.append((await service.submit(PROJECT, trainer.id, request))[0])

            with pytest.raises(StorageError, match="full"):
                await fill()
            limit[0] = 1_000_000
            del requests[: len(submitted)]
            await fill()
            for operation_id in submitted:
                await value(service, operation_id)
            step = await value(service, await trainer.step(1.0))
            assert step["metrics"]["grad_norm"] == 3.0 + 100 * 900

    run(test())


def test_a_result_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service)
            finish, failures = service._log.finish, [0]

            async def flaky(*endings: object) -> None:
                if failures[0] < 3:
                    failures[0] += 1
                    raise StorageError("the disk is full")
                await finish(*endings)  # type: ignore[arg-type]

            monkeypatch.setattr(service._log, "finish", flaky)
            output = await value(service, await trainer.train([3]))
            assert output["metrics"]["loss:sum"] == 3.0
            assert failures[0] == 3
            assert host.engines["null"].calls.count("forward_backward") == 1
            assert (await service.usage(PROJECT)).total.train == 1

    run(test())


def test_a_result_that_cannot_be_written_at_the_end_is_that_of_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is behind the operation, so what the end saves would cover a number that has no result."""

    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([3]))
            refused = [0]

            async def refuse(*_endings: object) -> None:
                refused[0] += 1
                raise StorageError("the disk is full")

            monkeypatch.setattr(service._log, "finish", refuse)
            lost = await trainer.train([4])
            while not refused[0]:
                await asyncio.sleep(0.01)
        async with serving(tmp_path) as service:
            again = await Trainer.attach(service, trainer.id)
            assert (await value(service, lost))["metrics"]["loss:sum"] == 4.0
            assert (await value(service, await again.step(1.0)))["metrics"]["grad_norm"] == 7.0

    run(test(), 20)


def test_a_home_that_cannot_be_used_is_a_storage_error(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(StorageError, match="home"):
            await Service.open(tmp_path / "file" / "home", NullHost())
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "service.db").mkdir()
        with pytest.raises(StorageError):
            await Service.open(tmp_path / "home", NullHost())

    run(test())


def _batch(length: int) -> list[object]:
    """One datum of ones, as arrays: 12 bytes a token in the log."""
    return [{"tokens": np.ones(length, np.int32), "inputs": {"target_tokens": np.ones(length, np.int64)}}]


def _pages(service: Service) -> int:
    with service.store.database._writer.connect() as connection:
        return connection.exec_driver_sql("PRAGMA page_count").scalar_one()
