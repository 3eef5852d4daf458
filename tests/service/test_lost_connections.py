"""Connections to the database that are cut while operations come and end: the sum is exact."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest

from bench.null_engine import NullHost
from tests.postgres import Databases, PostgresServer
from tests.service import driver
from tests.service.driver import PROJECT, Trainer, datum, prompt, result, run, serving, value
from trainsession.errors import StorageError
from trainsession.service.service import Service

_CROSS_ENTROPY = {"loss_fn": "cross_entropy"}


async def persistently(service: Service, trainer: Trainer, kind: str, **fields: object) -> str:
    """Submit as the SDK does: the same number and body again, until there is an answer."""
    request = trainer.request(kind, **fields)
    while True:
        try:
            return (await service.submit(PROJECT, trainer.id, request))[0]
        except StorageError:
            await asyncio.sleep(0.02)


async def eventually(service: Service, operation_id: str) -> None:
    """Wait for an operation to succeed, through polls that fail."""
    while True:
        try:
            assert (await result(service, operation_id)).error is None
            return
        except StorageError:
            await asyncio.sleep(0.02)


def test_a_loop_through_cut_connections_adds_up(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases = Databases(postgres_server)
    monkeypatch.setattr(driver, "databases", databases)
    dice = random.Random(3)
    ended = threading.Event()

    def cut() -> int:
        count = 0
        while not ended.is_set():
            time.sleep(dice.uniform(0.05, 0.5))
            count += postgres_server.terminate(str(databases.url(tmp_path)))
        return count

    async def loop(service: Service, trainer: Trainer, batches: int) -> None:
        ids = []
        for number in range(1, batches + 1):
            ids.append(
                await persistently(service, trainer, "forward_backward", params=_CROSS_ENTROPY, data=[datum([number])])
            )
            if number % 5 == 0:
                ids.append(await persistently(service, trainer, "optim_step", params={"learning_rate": 1.0}))
        for operation_id in ids:
            await eventually(service, operation_id)

    async def sampling(service: Service, count: int) -> None:
        for number in range(count):
            while True:
                try:
                    ids = await service.submit_samples(
                        PROJECT, {"base_model": "null"}, [prompt([1, 2])], idempotency_key=f"sample {number}"
                    )
                    break
                except StorageError:
                    await asyncio.sleep(0.02)
            await eventually(service, ids[0])

    async def test() -> None:
        settings = {"retry_seconds": 0.05, "snapshot_every_operations": 4}
        async with serving(tmp_path, NullHost(), **settings) as service:
            trainers = [await Trainer.create(service) for _ in range(2)]
            cutting = asyncio.create_task(asyncio.to_thread(cut))
            try:
                await asyncio.gather(*(loop(service, trainer, 20) for trainer in trainers), sampling(service, 20))
            finally:
                ended.set()
                cuts = await cutting
            assert cuts > 5
            for trainer in trainers:
                assert (await service.get_session(PROJECT, trainer.id)).next_seq == 25
                assert await trainer.weight() == sum(range(1, 21))
            total = (await service.usage(PROJECT)).total
            assert (total.train, total.sample) == (40, 60)
        async with serving(tmp_path, NullHost()) as service:
            attached = await service.attach(PROJECT, trainers[0].id)
            assert attached.next_seq == 26
            assert await Trainer(service, trainers[0].id, 26, attached.epoch).weight() == sum(range(1, 21))
            await value(service, await Trainer(service, trainers[0].id, 27, attached.epoch).train([1]))

    run(test(), timeout=120)
