"""A heavy project beside a light one, in a real service whose engine takes its time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.null_engine import NullEngine, NullHandle, NullHost
from tests.service.driver import Trainer, datum, result, run, serving
from trainsession.service.requests import OperationRequest
from trainsession.service.service import Service

PASS_SECONDS = 0.05
TOKENS = 20_000
"""More than half of what a shared pass takes: one operation, one pass."""


class SlowHandle(NullHandle):
    """An engine that is busy elsewhere, as one with a device is: the event loop goes on."""

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if method == "train":
            await asyncio.sleep(PASS_SECONDS)
        return await super().call(method, *args, **kwargs)


class SlowHost(NullHost):
    async def open(self, base_model: str) -> NullHandle:
        if base_model not in self._handles:
            self.engines[base_model] = NullEngine(base_model)
            self._handles[base_model] = SlowHandle(self.engines[base_model])
        return self._handles[base_model]


async def submit(service: Service, project: str, session_id: str, seq: int) -> str:
    data = [datum([1] * TOKENS)]
    request = OperationRequest(
        kind="forward_backward", seq=seq, epoch=1, params={"loss_fn": "cross_entropy"}, data=data
    )
    return (await service.submit(project, session_id, request))[0]


def test_a_heavy_project_cannot_hold_up_a_light_one(tmp_path: Path) -> None:
    async def test() -> None:
        host = SlowHost()
        async with serving(tmp_path, host) as service:
            for project in ("heavy", "light"):
                await service.projects.create(project)
            heavy = [(await Trainer.create(service, project="heavy")).id for _ in range(4)]
            light = (await Trainer.create(service, project="light")).id
            submits = [submit(service, "heavy", session, seq) for seq in range(1, 11) for session in heavy]
            queued = await asyncio.gather(*submits)
            passes = host.engines["null"].merged
            for seq in range(1, 6):  # one after the other, as a loop does
                operation_id = await submit(service, "light", light, seq)
                before = len(passes)
                assert (await result(service, operation_id, "light")).state == "done"
                # At most the pass that ran, one whose turn it was, and its own.
                assert len(passes) - before <= 3
            left = await service.results("heavy", queued)
            assert len(left.positions) > 20
            await asyncio.gather(*(result(service, operation_id, "heavy") for operation_id in queued))

    run(test(), timeout=120)
