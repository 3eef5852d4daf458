"""S3 that is away, slow, broken or cut off: training waits or goes on, nothing is lost, doubled or half there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from bench.null_engine import NullHost
from tests.proxy import Fault, Proxy
from tests.s3 import BlobStores, S3Server, settings
from tests.service import driver
from tests.service.driver import PROJECT, Trainer, prompt, run, sample, serving, value
from trainsession.errors import BlobsUnavailable
from trainsession.service import readiness
from trainsession.service.service import Service
from trainsession.store import blobs_s3

pytestmark = pytest.mark.timeout(60)
LARGE = 40_000
"""Tokens of a batch that goes to a blob."""


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between the service and S3."""
    proxy = Proxy(s3_server.port)
    for name, setting in settings(proxy.url).items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setattr(driver, "blobs", BlobStores(s3_server))
    monkeypatch.setattr(blobs_s3, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(blobs_s3, "SILENCE_SECONDS", 0.5)
    yield proxy
    proxy.close()


@asynccontextmanager
async def trained(home: Path) -> AsyncIterator[tuple[Service, Trainer]]:
    async with serving(home, NullHost(), retry_seconds=0.05, snapshot_every_operations=2) as service:
        trainer = await Trainer.create(service)
        await trainer.train([3])
        await value(service, await trainer.step(1.0))
        yield service, trainer


def batch(length: int) -> list[object]:
    return [{"tokens": np.ones(length, np.int32), "inputs": {"target_tokens": np.ones(length, np.int64)}}]


FAULTS: list[tuple[Fault, int]] = [
    *(("refuse", 0), ("stall", 0), ("error", 0), ("conflict", 0), ("reset", 0), ("lose answer", 0)),
    *(("cut answer", 0), ("cut request", 50), ("cut request", 1000), ("cut request", 200_000)),
]


@pytest.mark.parametrize(("fault", "cut_at"), FAULTS)
def test_a_save_and_a_large_batch_wait_for_a_store_that_is_away(
    tmp_path: Path, proxy: Proxy, fault: Fault, cut_at: int
) -> None:
    async def test() -> None:
        async with trained(tmp_path) as (service, trainer):
            proxy.set(fault, cut_at=cut_at)
            save = await trainer.submit("save_state", params={"name": "a"})
            # The engine goes on meanwhile, and what fits into a row needs no blob.
            await value(service, await trainer.train([4]))
            step = await value(service, await trainer.step(1.0))
            assert step["metrics"]["grad_norm"] == 4.0
            large = trainer.request("forward_backward", params={"loss_fn": "cross_entropy"}, data=batch(LARGE))
            with pytest.raises(BlobsUnavailable) as caught:
                await service.submit(PROJECT, trainer.id, large)
            assert caught.value.is_retryable()
            assert (await service.get_session(PROJECT, trainer.id)).next_seq == 6  # its number is still free
            if cut_at < 100_000:  # a checkpoint is small
                assert await service.list_checkpoints(PROJECT) == []
            assert proxy.hits > 0

            proxy.set("none")
            await value(service, (await service.submit(PROJECT, trainer.id, large))[0])
            assert (await value(service, await trainer.step(1.0)))["metrics"]["grad_norm"] == LARGE
            path = (await value(service, save))["path"]
            loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
            assert await loaded.weight() == 3.0
            assert len(await service.list_checkpoints(PROJECT)) == 1
        await everything_is_whole(tmp_path)

    run(test())


def test_a_save_that_waits_when_the_service_ends_is_made_by_the_next(tmp_path: Path, proxy: Proxy) -> None:
    """S3 is there again for the snapshot, which must not cover the save."""

    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.05) as service:
            trainer = await Trainer.create(service)
            await trainer.train([3])
            await value(service, await trainer.step(1.0))
            proxy.set("refuse")
            save = await trainer.submit("save_state", params={"name": "a"})
            (session,) = service._sessions.in_memory
            while not proxy.hits:
                await asyncio.sleep(0.01)
            ending = asyncio.create_task(service.close())
            while session.completions:
                await asyncio.sleep(0.001)
            proxy.set("none")
            await ending
        async with serving(tmp_path) as service:
            again = await Trainer.attach(service, trainer.id)
            path = (await value(service, save))["path"]
            assert await again.weight() == 3.0
            loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
            assert await loaded.weight() == 3.0

    run(test(), 30)


@pytest.mark.parametrize("fault", ["refuse", "error", "cut answer", "lose answer", "stall"])
def test_one_attempt_that_fails_is_not_noticed(tmp_path: Path, proxy: Proxy, fault: Fault) -> None:
    async def test() -> None:
        async with trained(tmp_path) as (service, trainer):
            for times in (1, 2):
                proxy.set(fault, times=times, cut_at=5)
                large = trainer.request("forward_backward", params={"loss_fn": "cross_entropy"}, data=batch(LARGE))
                await value(service, (await service.submit(PROJECT, trainer.id, large))[0])
                assert proxy.hits == times
                proxy.set("none")
                assert (await value(service, await trainer.step(1.0)))["metrics"]["grad_norm"] == LARGE
        await everything_is_whole(tmp_path)

    run(test())


@pytest.mark.parametrize("fault", ["refuse", "cut answer"])
def test_what_was_accepted_waits_for_what_it_has_to_read(tmp_path: Path, proxy: Proxy, fault: Fault) -> None:
    """After a restart: the snapshot, a logged body, a checkpoint's files for a load and for a sample."""

    async def test() -> None:
        async with trained(tmp_path) as (service, trainer):
            path = (await trainer.do("save_state", params={"name": "a"}))["path"]
            weights = (await trainer.do("save_weights", params={"name": "w"}))["path"]
        async with serving(tmp_path, retry_seconds=0.05) as service:
            again = await Trainer.attach(service, trainer.id)
            proxy.set(fault, cut_at=300)
            waiting = [
                await again.train([5]),
                await again.step(1.0),
                await again.submit("load_state", params={"path": path, "optimizer": True}),
            ]
            drawn = asyncio.create_task(sample(service, {"path": weights}, prompt([1])))
            await asyncio.sleep(1.5)
            ended = await service.results(PROJECT, waiting, timeout=0.1)
            assert ended.results == []
            assert not drawn.done()
            proxy.set("none")
            assert (await value(service, waiting[1]))["metrics"]["grad_norm"] == 5.0
            await value(service, waiting[2])
            assert await again.weight() == 3.0
            assert (await drawn)["sequences"][0]["logprobs"][0] == -4.0

    run(test())


def test_a_service_that_cannot_reach_its_blobs_is_not_ready_and_stays_quick(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(blobs_s3, "SILENCE_SECONDS", 20.0)

    async def test() -> None:
        async with trained(tmp_path) as (service, _):
            assert all((await service.check_ready()).values())
            proxy.set("stall")
            monkeypatch.setattr(readiness, "CHECK_SECONDS", 0.3)
            for _ in range(12):  # more than there are threads: a check must not leave one behind each time
                assert not (await service.check_ready())["blobs"]
            started = time.monotonic()
            await service.store.in_thread(lambda: None)
            assert time.monotonic() - started < 5
            assert proxy.hits <= 2
            proxy.set("none")
            monkeypatch.setattr(readiness, "CHECK_SECONDS", 5.0)
            async with asyncio.timeout(20):
                while not (await service.check_ready())["blobs"]:
                    await asyncio.sleep(0.1)

    run(test())


def test_a_server_killed_and_started_again_has_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = S3Server()
    try:
        for name, setting in settings(own.url).items():
            monkeypatch.setenv(name, setting)
        monkeypatch.setattr(driver, "blobs", BlobStores(own))

        async def test() -> None:
            async with trained(tmp_path) as (service, trainer):
                own.kill()
                save = await trainer.submit("save_state", params={"name": "a"})
                await asyncio.sleep(0.5)
                own.start()
                path = (await value(service, save))["path"]
                loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
                assert await loaded.weight() == 3.0

        run(test())
    finally:
        own.stop()


async def everything_is_whole(home: Path) -> None:
    """What rows refer to is there and verifies; what they do not is garbage that the janitor may remove."""
    async with serving(home) as service:
        for checkpoint in await service.list_checkpoints(PROJECT):
            for file in await service.checkpoint_files(PROJECT, checkpoint.path):
                with await service.read_checkpoint_file(PROJECT, checkpoint.path, file["name"]) as content:
                    assert len(content.read()) == file["size"]
        service._janitor.orphan_seconds = -60.0
        await service._janitor.round()
        used = await service.store.read(service._janitor.used)
        assert driver.blobs.names(home) == used
