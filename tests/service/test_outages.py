"""What was accepted waits for the database and the blobs that it is read from, however long they are away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bench.null_engine import NullHandle, NullHost
from tests.postgres import PostgresServer
from tests.postgres_proxy import PostgresProxy
from tests.service.driver import PROJECT, Trainer, run, serving, value
from tests.service.servers import Open
from trainsession.errors import BlobsUnavailable

CROSS_ENTROPY = {"loss_fn": "cross_entropy"}
LARGE = [{"tokens": np.ones(40_000, np.int32), "inputs": {"target_tokens": np.ones(40_000, np.int64)}}]
"""A batch that goes to a blob."""


class GatedHost(NullHost):
    """Its engine is loaded when somebody opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def open(self, base_model: str) -> NullHandle:
        self.asked.set()
        await self.gate.wait()
        return await super().open(base_model)


def test_an_operation_waits_for_the_database_that_its_body_is_in(
    start: Open, postgres_proxy: PostgresProxy, postgres_server: PostgresServer, database: str
) -> None:
    async def test() -> None:
        async with start("a") as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            ids = [await trainer.train([3]), await trainer.step(1.0)]
        host = GatedHost()
        async with start("a", host, through=True, retry_seconds=0.05, lease_seconds=60.0) as service:
            await service.submit(PROJECT, trainer.id, gap)
            await host.asked.wait()
            postgres_proxy.refuse = True
            assert postgres_server.terminate(database)
            host.gate.set()
            await asyncio.sleep(1.5)
            postgres_proxy.refuse = False
            for operation_id in ids:
                await value(service, operation_id)
            trainer.service = service
            assert await trainer.weight() == 3.0

    run(test())


def test_an_operation_waits_for_a_directory_of_blobs_that_is_not_mounted_at_the_moment(tmp_path: Path) -> None:
    """The body of a pass, and the snapshot that its session begins with."""

    async def test() -> None:
        async with serving(tmp_path, snapshot_every_operations=2) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1]))
            await value(service, await trainer.step(1.0))
            gap = trainer.request("zero_grad")
            ids = [await trainer.submit("forward_backward", params=CROSS_ENTROPY, data=LARGE), await trainer.step(1.0)]
        host = GatedHost()
        async with serving(tmp_path, host, retry_seconds=0.05) as service:
            await service.submit(PROJECT, trainer.id, gap)
            await host.asked.wait()
            (tmp_path / "blobs").rename(tmp_path / "away")
            host.gate.set()
            await asyncio.sleep(0.5)
            large = trainer.request("forward_backward", params=CROSS_ENTROPY, data=LARGE)
            with pytest.raises(BlobsUnavailable):
                await service.submit(PROJECT, trainer.id, large)
            (tmp_path / "away").rename(tmp_path / "blobs")
            for operation_id in ids:
                await value(service, operation_id)
            trainer.service = service
            await value(service, (await service.submit(PROJECT, trainer.id, large))[0])
            assert await trainer.weight() == 40_001.0

    run(test())
