"""Who may start on a database beside whom, and with which address and blobs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import sqlalchemy as sa

from bench.null_engine import NullHost
from tests.conftest import use_blobs
from tests.server.together import QUICK
from tests.service.driver import PROJECT, Trainer, datum, run
from tests.service.servers import URL, Open, rows, until
from trainsession.errors import InvalidRequest, ServiceUnavailable, StorageError
from trainsession.service.service import Service
from trainsession.service.settings import Settings
from trainsession.store.backend import LeaseLost
from trainsession.store.schema import servers


def test_servers_that_share_a_prefix_in_s3_need_no_directory_in_common(
    start: Open, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = use_blobs(request, monkeypatch, s3=True).address(tmp_path)

    async def test() -> None:
        async with start("b", blobs=prefix) as b:
            async with start("a", blobs=prefix) as a:
                trainer = await Trainer.create(a)
                await trainer.train([5])
                await trainer.step(1.0)
                path = (await trainer.do("save_state", params={"name": "shared"}))["path"]
                assert [one.path for one in await b.list_checkpoints(PROJECT)] == [path]
                (file, *_) = await b.checkpoint_files(PROJECT, path)
                with await b.read_checkpoint_file(PROJECT, path, file["name"]) as opened:
                    assert len(opened.read()) == file["size"]

            async def has_taken_over() -> bool:
                return b.lease.replaced == 1

            await until(has_taken_over)
            assert await (await Trainer.attach(b, trainer.id)).weight() == 5.0

    run(test())


def test_the_next_run_of_a_home_does_not_wait_for_the_lease_of_the_last(start: Open) -> None:
    """Who has the home's lock knows that the process before is gone, however it ended."""

    async def test() -> None:
        async with start("a", lease_seconds=60.0) as killed:
            trainer = await Trainer.create(killed)
            await trainer.do("forward_backward", params={"loss_fn": "cross_entropy"}, data=[datum([1, 2])])
            async with start("a", lease_seconds=60.0, advertise=None) as again:
                await Trainer(again, trainer.id, next_seq=2).do("optim_step", params={"learning_rate": 0.5})
                assert len(await rows(again, sa.select(servers.c.id))) == 1
            with pytest.raises(LeaseLost):
                await trainer.step()

    run(test())


@pytest.mark.parametrize(("first", "second"), [(None, URL), (URL, None), (None, None)])
def test_two_servers_must_be_able_to_reach_each_other(start: Open, first: str | None, second: str | None) -> None:
    async def test() -> None:
        async with start("a", advertise=first) as a:
            with pytest.raises(ServiceUnavailable, match="--advertise"):
                async with start("b", advertise=second):
                    pass
            assert len(await rows(a, sa.select(servers.c.id))) == 1
            assert await Trainer.create(a)

    run(test())


@pytest.mark.parametrize("address", ["host:8000", "ftp://host", "http://", "http://host/under"])
def test_an_address_that_is_none_is_refused(start: Open, address: str) -> None:
    async def test() -> None:
        with pytest.raises(InvalidRequest, match="advertise"):
            async with start("a", advertise=address):
                pass

    run(test())


def test_who_has_other_blobs_does_not_start(start: Open, tmp_path: Path) -> None:
    async def test() -> None:
        async with start("a") as a:
            (tmp_path / "b" / "blobs").mkdir(parents=True)
            with pytest.raises(StorageError, match="blobs of this database are elsewhere"):
                async with start("b"):
                    pass
            # No rows refer to the blob that says so, and yet it is no garbage.
            (mark,) = (tmp_path / "blobs").glob("shared-*")
            os.utime(mark, (1.0, 1.0))
            await a._janitor.round()
        async with start("c"):
            assert mark.exists()

    run(test())


def test_one_process_on_a_file_has_no_lease(tmp_path: Path) -> None:
    async def test() -> None:
        service = await Service.open(tmp_path, NullHost(), settings=Settings(**QUICK))
        try:
            assert await Trainer.create(service)
            commits = service.store.database.stats.commits
            await asyncio.sleep(1.0)
            assert service.store.database.stats.commits == commits
            assert await rows(service, sa.select(servers)) == []
            assert (await service.check_ready())["lease"] is True
        finally:
            await service.close()

    run(test())
