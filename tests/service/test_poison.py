"""Operations under which the service itself meets a fault: they fail alone, after a few tries, and change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL, NullEngine, NullHandle, NullHost
from tests.service.driver import PROJECT, Trainer, result, run, serving, value
from trainsession.engine.api import TrainItem, TrainOutput
from trainsession.errors import EngineError, TrainSessionError
from trainsession.service.lane import MAX_FAULTS
from trainsession.store.schema import operations
from trainsession.types import AdamParams

pytestmark = pytest.mark.usefixtures("each_database")
POISON = 13.0
"""Of this learning rate, or of a batch of this token, the engine answers what the service cannot read."""


@dataclasses.dataclass(slots=True)
class Poisoned(NullEngine):
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, Any]:  # type: ignore[override]
        metrics = NullEngine.optim_step(self, adapter_id, params)
        if params.learning_rate != POISON:
            return metrics
        self.calls.append("poison")
        return {**metrics, "step": "none"}

    def train(self, items: Sequence[TrainItem]) -> list[TrainOutput | TrainSessionError]:
        outputs = NullEngine.train(self, items)
        if any(POISON in datum.model_input.tokens for item in items for datum in item.data):
            return [None] * len(outputs)  # type: ignore[list-item]
        return outputs


class PoisonedHost(NullHost):
    async def open(self, base_model: str) -> NullHandle:
        if base_model not in self._handles:
            self.engines[base_model] = Poisoned(base_model, **self._options)
            self._handles[base_model] = NullHandle(self.engines[base_model])
        return self._handles[base_model]


@pytest.mark.parametrize("on_failure", ["continue", "skip"])
def test_it_fails_alone_after_a_few_tries_and_changes_nothing(tmp_path: Path, on_failure: Any) -> None:
    async def test() -> None:
        host = PoisonedHost()
        async with serving(tmp_path, host, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service, on_failure=on_failure)
            neighbour = await Trainer.create(service)
            await value(service, await trainer.train([3]))
            await value(service, await trainer.step(1.0))
            await value(service, await trainer.train([4]))
            gap = trainer.request("optim_step", params={"learning_rate": POISON})
            behind = await trainer.submit("zero_grad")
            poison, _ = await service.submit(PROJECT, trainer.id, gap)
            await value(service, await neighbour.train([5]))
            ended = await result(service, poison)
            assert type(ended.error) is EngineError
            assert poison in ended.error.message
            assert ended.error.details["operation_id"] == poison
            assert host.engines[MODEL].calls.count("poison") == MAX_FAULTS
            behind_error = (await result(service, behind)).error
            assert (behind_error is None) == (on_failure == "continue")
            if behind_error is not None:
                assert behind_error.code == "operation_skipped"
            assert await trainer.weight() == 3.0
            assert (await service.get_session(PROJECT, trainer.id)).step == 1
            await trainer.do("zero_grad")
            await value(service, await trainer.train([2]))
            await value(service, await trainer.step(1.0))
            await value(service, await neighbour.step(1.0))
            assert (await trainer.weight(), await neighbour.weight()) == (5.0, 5.0)
            assert (await service.usage(PROJECT, trainer.id)).total.train == 3
        async with serving(tmp_path, PoisonedHost()) as service:  # it is not tried again by the next process
            trainer.service = service
            assert await trainer.weight() == 5.0

    run(test())


def test_in_a_merged_pass_the_neighbours_are_run_again_without_it(tmp_path: Path) -> None:
    async def test() -> None:
        host = PoisonedHost()
        async with serving(tmp_path, host, retry_seconds=0.02) as service:
            trainers = [await Trainer.create(service) for _ in range(3)]
            for trainer in trainers:
                await value(service, await trainer.train([1]))
            gaps = [trainer.request("zero_grad") for trainer in trainers]
            tokens = [2, int(POISON), 3]
            passes = [await trainer.train([token]) for trainer, token in zip(trainers, tokens, strict=True)]
            for trainer, gap in zip(trainers, gaps, strict=True):
                await service.submit(PROJECT, trainer.id, gap)
            ended = [await result(service, operation_id) for operation_id in passes]
            assert [end.error is None for end in ended] == [True, False, True]
            await value(service, await trainers[0].step(1.0))
            assert await trainers[0].weight() == 2.0

    run(test())


def test_a_session_that_cannot_be_restored_fails_and_the_others_of_its_lane_go_on(tmp_path: Path) -> None:
    """Its log holds what no version wrote."""

    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.02) as service:
            broken, other = await Trainer.create(service), await Trainer.create(service)
            await value(service, await broken.train([1]))
            await value(service, await other.train([2]))
            mine = sa.update(operations).where(operations.c.session_id == broken.id)
            await service.store.write(lambda connection: connection.execute(mine.values(quote={"most": "nonsense"})))
            lane = service._lanes.of(MODEL)
            assert lane.loaded is not None
            lane.loaded.alive = False  # type: ignore[misc]
            service._host._handles.clear()  # type: ignore[attr-defined]
            async with asyncio.timeout(20):
                await value(service, await other.step(1.0))
                assert await other.weight() == 2.0
                error = (await result(service, await broken.step(1.0))).error
            assert type(error) is EngineError
            assert (await service.get_session(PROJECT, broken.id)).state == "failed"

    run(test())
