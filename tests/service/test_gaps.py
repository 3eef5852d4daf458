"""Numbers that never come: how long others wait, what becomes of them, and what a late one is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.service.driver import PROJECT, Trainer, datum, open_service, result, run, serving, value
from tests.service.money import allow, left, priced
from trainsession.errors import IncompleteGradients, InvalidRequest, OperationSkipped, RateLimited, SequenceConflict
from trainsession.service import session as module
from trainsession.service.requests import OperationRequest
from trainsession.store.schema import operations

pytestmark = pytest.mark.usefixtures("each_database")
PASS: dict[str, Any] = {"params": {"loss_fn": "cross_entropy"}, "data": [datum([1, 2])]}


async def error_of(trainer: Trainer, operation_id: str) -> Any:
    return (await result(trainer.service, operation_id)).error


def test_what_waits_goes_on_when_the_number_is_given_up_but_no_step_is_made_without_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.05) as service:
            trainer = await Trainer.create(service, gap_timeout=0.3)
            await value(service, await trainer.train([1]))
            late = [trainer.request("forward_backward", **PASS) for _ in range(2)]
            before = time.time()
            waiting, step = await trainer.train([3]), await trainer.step()
            info = await service.get_session(PROJECT, trainer.id)
            assert info.waiting_for == "sequence number 2"
            assert info.waiting_since is not None
            assert info.waiting_until is not None
            assert before <= info.waiting_since <= time.time()
            assert info.waiting_until == pytest.approx(max(info.waiting_since, info.created_at) + 0.3, abs=0.05)
            assert (await value(service, waiting))["usage"]["train"] == 1
            assert time.time() >= info.waiting_until
            error = await error_of(trainer, step)
            assert isinstance(error, IncompleteGradients)
            assert "sequence number 3 never came" in error.message
            for request in late:
                with pytest.raises(SequenceConflict, match="came too late"):
                    await service.submit(PROJECT, trainer.id, request)
            await trainer.do("zero_grad")
            await value(service, await trainer.train([4]))
            await trainer.do("optim_step", params={"learning_rate": 0.5})
            assert await trainer.weight() == 2.0
            info = await service.get_session(PROJECT, trainer.id)
            assert (info.waiting_for, info.waiting_since, info.waiting_until) == ("", None, None)
            # Nobody submitted the missing ones, so nobody finds their results.
            attached = await service.attach(PROJECT, trainer.id)
            kinds = sa.select(operations.c.kind).where(operations.c.id.in_(attached.unfetched))
            assert "missing" not in await service.store.read(lambda c: list(c.execute(kinds).scalars()))

    run(test())


def test_under_the_other_policy_what_waits_is_skipped_and_names_the_number(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path), retry_seconds=0.05) as service:
            await allow(service, 100)
            await service.projects.set_limits(PROJECT, {"max_queued_operations": 3})
            trainer = await Trainer.create(service, gap_timeout=0.2, on_failure="skip")
            trainer.request("zero_grad")
            waiting = [await trainer.train([1, 2]) for _ in range(2)]
            with pytest.raises(RateLimited):
                await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=4, epoch=1))
            assert await left(service) == (0, 8)
            for operation_id in waiting:
                error = await error_of(trainer, operation_id)
                assert isinstance(error, OperationSkipped)
                assert error.message == "skipped: sequence number 1 never came"
                assert error.details["failed_seq"] == 1
            # Their places and what they reserved are free again.
            assert await left(service) == (0, 0)
            await value(service, await trainer.submit("zero_grad"))
            await value(service, await trainer.train([1]))

    run(test())


def test_a_number_in_time_stops_the_clock_and_the_next_gap_has_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.05) as service:
            trainer = await Trainer.create(service, gap_timeout=0.6)
            gap = trainer.request("zero_grad")
            first = await trainer.train([1])
            await asyncio.sleep(0.4)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, first)
            gap = trainer.request("zero_grad")
            second = await trainer.train([1])
            await asyncio.sleep(0.4)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, second)
            await value(service, await trainer.step())

    run(test())


def test_without_a_timeout_it_waits_for_ever_and_another_client_can_take_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.05) as service:
            trainer = await Trainer.create(service, gap_timeout=None)
            trainer.request("zero_grad")
            await trainer.train([1])
            await asyncio.sleep(0.3)
            info = await service.get_session(PROJECT, trainer.id)
            assert (info.waiting_for, info.waiting_until) == ("sequence number 1", None)
            other = await Trainer.attach(service, trainer.id)
            await value(service, await other.train([1]))

    run(test())


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e9, True, "10"])
def test_what_is_no_time_to_wait_is_refused(tmp_path: Path, timeout: Any) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            with pytest.raises(InvalidRequest, match="gap_timeout"):
                await Trainer.create(service, gap_timeout=timeout)

    run(test())


@pytest.mark.parametrize("policy", ["continue", "skip"])
def test_the_time_goes_on_through_a_restart_with_some_grace_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.4)

    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service, gap_timeout=2.0, on_failure=policy)
        await value(service, await trainer.train([1]))
        trainer.request("forward_backward", **PASS)
        waiting = await trainer.train([2])
        since = (await service.get_session(PROJECT, trainer.id)).waiting_since
        await service.close()
        await asyncio.sleep(1.0)
        async with serving(tmp_path, retry_seconds=0.05) as service:
            info = await service.get_session(PROJECT, trainer.id)
            assert since is not None
            assert info.waiting_since == pytest.approx(since, abs=0.05)
            assert info.waiting_until == pytest.approx(since + 2.0, abs=0.05)
            await service.close()
        await asyncio.sleep(1.2)
        opened = time.time()
        async with serving(tmp_path, retry_seconds=0.05) as service:
            ended = await result(service, waiting)
            assert time.time() - opened >= 0.4
            if policy == "continue":
                assert ended.value["usage"]["train"] == 1
            else:
                assert isinstance(ended.error, OperationSkipped)
        # What was given up stays so.
        async with serving(tmp_path) as service:
            again = Trainer(service, trainer.id, 4)
            assert isinstance(await error_of(again, await again.step()), IncompleteGradients)
            with pytest.raises(SequenceConflict, match="came too late"):
                await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=2, epoch=1))
            await again.do("zero_grad")
            await value(service, await again.train([5]))
            await again.do("optim_step", params={"learning_rate": 1.0})
            assert await again.weight() == 5.0

    run(test())


def test_a_number_that_comes_at_the_very_moment_is_taken_or_refused_and_never_both(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.001) as service:
            taken = 0
            for attempt in range(12):
                trainer = await Trainer.create(service, gap_timeout=0.05)
                gap = trainer.request("zero_grad")
                waiting = await trainer.train([attempt + 1])
                await asyncio.sleep(0.045 + attempt * 0.001)
                try:
                    operation_id, _ = await service.submit(PROJECT, trainer.id, gap)
                except SequenceConflict:
                    pass
                else:
                    taken += 1
                    await value(service, operation_id)
                await value(service, waiting)
                of = sa.select(operations.c.kind).where(operations.c.session_id == trainer.id, operations.c.seq == 1)
                kinds = await service.store.read(lambda c, of=of: list(c.execute(of).scalars()))
                assert len(kinds) == 1
                await service.close_session(PROJECT, trainer.id)
            assert taken < 12

    run(test())
