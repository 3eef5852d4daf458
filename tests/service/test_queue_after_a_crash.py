"""The queue of a home that was copied while its service ran: what a crash leaves behind, on files."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from bench.null_engine import NullHandle, NullHost
from tests.service.driver import PROJECT, Trainer, run, serving, value
from trainsession.errors import DatabaseUnavailable, RateLimited
from trainsession.service.log import OperationLog
from trainsession.service.requests import OperationRequest


class Held(NullHost):
    """Opens no engine before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def open(self, base_model: str) -> NullHandle:
        await self.go.wait()
        return await super().open(base_model)


def test_what_runs_again_after_a_restart_takes_no_place_and_no_distance(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path / "first", NullHost()) as service:
            trainer = await Trainer.create(service)
            ids = [await trainer.train([1, 2, 3]) for _ in range(20)]
            await value(service, ids[-1])
            shutil.copytree(tmp_path / "first", tmp_path / "crashed")
        host = Held()
        async with serving(tmp_path / "crashed", host) as service:
            await service.projects.set_limits(PROJECT, {"max_queued_operations": 2})
            requests = [OperationRequest(kind="zero_grad", seq=seq, epoch=1) for seq in (21, 22, 23)]
            ids = [(await service.submit(PROJECT, trainer.id, request))[0] for request in requests[:2]]
            with pytest.raises(RateLimited):
                await service.submit(PROJECT, trainer.id, requests[2])
            host.go.set()
            for operation_id in ids:
                await value(service, operation_id)
            await service.submit(PROJECT, trainer.id, requests[2])

    run(test())


@pytest.mark.usefixtures("each_database")
def test_an_accepted_operation_waits_for_its_database_and_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was accepted by an earlier process is read from the log when it runs; until then the server may be away."""

    async def test() -> None:
        first = Held()
        async with serving(tmp_path, first) as service:
            trainer = await Trainer.create(service)
            ids = [await trainer.train([1, 2, 3]) for _ in range(4)]
            # The service closes first, then the engine opens: what has not begun stays in the log.
            asyncio.get_running_loop().call_later(0.5, first.go.set)
        reads: list[str] = []
        body = OperationLog.body

        async def away(log: OperationLog, operation_id: str) -> bytes:
            reads.append(operation_id)
            if len(reads) <= 3:
                raise DatabaseUnavailable("the server is away")
            return await body(log, operation_id)

        monkeypatch.setattr(OperationLog, "body", away)
        async with serving(tmp_path, retry_seconds=0.02) as service:
            for operation_id in ids:
                await value(service, operation_id)
        assert len(reads) > 3

    run(test())
