"""Operations that are refused when they are submitted: what they end behind them, and what their retry is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.service.driver import PROJECT, Trainer, datum, result, run, serving, value
from tests.service.money import allow, left, priced
from tests.service.test_queue_after_a_crash import Held
from trainsession.errors import (
    BudgetExceeded,
    Cancelled,
    DatabaseUnavailable,
    InvalidDatum,
    OperationSkipped,
    TrainSessionError,
)
from trainsession.service.gaps import Gaps
from trainsession.service.requests import OperationRequest
from trainsession.service.service import Service
from trainsession.service.session import Session

pytestmark = pytest.mark.usefixtures("each_database")
CROSS_ENTROPY = {"loss_fn": "cross_entropy"}
WRONG: dict[str, Any] = {"params": CROSS_ENTROPY, "data": [datum([1, 2], weights=[1.0])]}
LARGE: dict[str, Any] = {"params": CROSS_ENTROPY, "data": [datum([1] * 200)]}


async def refused(trainer: Trainer, request: OperationRequest) -> TrainSessionError:
    with pytest.raises((InvalidDatum, BudgetExceeded)) as caught:
        await trainer.service.submit(PROJECT, trainer.id, request)
    return caught.value


async def error_of(service: Service, operation_id: str) -> Any:
    return (await result(service, operation_id)).error


async def settled(service: Service, trainer: Trainer, seq: int) -> None:
    """The queue stands before this number."""
    (session,) = [session for session in service._sessions.in_memory if session.id == trainer.id]
    async with asyncio.timeout(10):
        while session.next_run != seq:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def with_budget(home: Path) -> AsyncIterator[tuple[Service, Trainer]]:
    async with serving(priced(home), retry_seconds=0.05) as service:
        await allow(service, 100)
        yield service, await Trainer.create(service, on_failure="skip")


@pytest.mark.parametrize(("wrong", "error"), [(WRONG, InvalidDatum), (LARGE, BudgetExceeded)])
@pytest.mark.parametrize("first", ["gap", "behind", "before"])
def test_what_waits_behind_a_refused_operation_is_skipped_in_whatever_order_they_came(
    tmp_path: Path, wrong: dict[str, Any], error: type[TrainSessionError], first: str
) -> None:
    """The number before it comes last, so that it is passed with all of them there; or they come after or before it."""

    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            before, bad = trainer.request("zero_grad"), trainer.request("forward_backward", **wrong)
            behind = [trainer.request("forward_backward", params=CROSS_ENTROPY, data=[datum([3])])]
            behind.append(trainer.request("optim_step"))
            order = {"gap": [bad, *behind, before], "behind": [*behind, bad, before], "before": [*behind, before, bad]}
            ids: dict[int | None, str] = {}
            for request in order[first]:
                if request is bad:
                    refusal = await refused(trainer, request)
                    assert type(refusal) is error
                    ids[2] = refusal.details["operation_id"]
                else:
                    ids[request.seq], _ = await service.submit(PROJECT, trainer.id, request)
            await value(service, ids[1])
            for seq in (3, 4):
                skipped = await error_of(service, ids[seq])
                assert isinstance(skipped, OperationSkipped)
                assert skipped.message == "skipped: operation 2 (forward_backward) of this session failed before it"
                assert skipped.details == {"failed_seq": 2, "failed_operation": ids[2]}
            assert await left(service) == (0, 0)
            # What comes later is no part of that queue; the window lacks what was refused.
            await trainer.do("zero_grad")
            await value(service, await trainer.train([3]))
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 3.0

    run(test())


def test_what_stands_before_it_runs_and_a_cancelled_one_takes_nothing_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            gap = trainer.request("zero_grad")
            good, doomed = await trainer.train([5]), await trainer.train([7])
            step = await trainer.submit("optim_step", params={"learning_rate": 1.0, "allow_incomplete": True})
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            behind = await trainer.submit("zero_grad")
            assert await service.cancel(PROJECT, doomed)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, good)
            await value(service, step)
            assert isinstance(await error_of(service, doomed), Cancelled)
            assert isinstance(await error_of(service, behind), OperationSkipped)
            assert await trainer.weight() == 5.0

    run(test())


def test_under_the_other_policy_what_waits_behind_it_runs(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            behind = await trainer.submit("zero_grad")
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, behind)

    run(test())


def test_the_next_process_skips_what_waited_and_nothing_that_came_after_the_decision(tmp_path: Path) -> None:
    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            first = trainer.request("zero_grad")
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            waiting = await trainer.train([3])
        async with serving(tmp_path) as service:  # the queue did not reach the refused one yet
            trainer.service = service
            await service.submit(PROJECT, trainer.id, first)
            assert isinstance(await error_of(service, waiting), OperationSkipped)
            await trainer.do("zero_grad")  # 4
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            await settled(service, trainer, 6)  # decided: nothing stood behind it
            gap = trainer.request("zero_grad")
            later = [await trainer.train([4]), await trainer.step(1.0)]
        async with serving(tmp_path) as service:
            # All of it is passed again, and neither what is run again nor what came later is skipped.
            trainer.service = service
            await service.submit(PROJECT, trainer.id, gap)
            for operation_id in later:
                await value(service, operation_id)
            assert await trainer.weight() == 4.0

    run(test())


def test_an_engine_that_ends_changes_nothing_of_the_decision(tmp_path: Path) -> None:
    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            await value(service, await trainer.train([3]))
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            await settled(service, trainer, 3)
            gap = trainer.request("zero_grad")
            waiting = await trainer.train([4])
            lane = service._lanes.of("null")
            assert lane.loaded is not None
            lane.loaded.alive = False  # type: ignore[misc]
            service._host._handles.clear()  # type: ignore[attr-defined]
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, waiting)

    run(test())


def test_a_decision_that_cannot_be_written_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            first = trainer.request("zero_grad")
            await refused(trainer, trainer.request("forward_backward", **WRONG))
            waiting = await trainer.submit("zero_grad")
            lane = service._lanes.of("null")
            write, failures = lane._passing._store.write, [0]

            async def flaky(function: Any) -> Any:
                if "_skip_behind" in function.__qualname__ and failures[0] < 2:
                    failures[0] += 1
                    raise DatabaseUnavailable("the database is away")
                return await write(function)

            monkeypatch.setattr(lane._passing._store, "write", flaky)
            await service.submit(PROJECT, trainer.id, first)
            assert isinstance(await error_of(service, waiting), OperationSkipped)
            assert failures[0] == 2

    run(test())


@pytest.mark.parametrize("wrong", [WRONG, LARGE])
def test_the_retry_of_a_refused_submit_is_told_the_same(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Also where the project could pay for it by now, and in the next process."""

    async def test() -> None:
        async with with_budget(tmp_path) as (service, trainer):
            request = trainer.request("forward_backward", idempotency_key="a", **wrong)
            first = await refused(trainer, request)
            await allow(service, 100_000)
            for again in (request, replace(request, idempotency_key="b"), replace(request, seq=None)):
                assert (await refused(trainer, again)).to_wire() == first.to_wire()
            logged = await error_of(service, first.details["operation_id"])
            assert logged.to_wire() == first.to_wire()
            # One that was accepted and failed later is another matter: its submit succeeded.
            step = trainer.request("optim_step")
            accepted = await service.submit(PROJECT, trainer.id, step)
            assert (await error_of(service, accepted[0])).code == "incomplete_gradients"
            assert await service.submit(PROJECT, trainer.id, step) == accepted
        async with serving(tmp_path) as service:
            trainer.service = service
            assert (await refused(trainer, request)).to_wire() == first.to_wire()

    run(test())


@pytest.mark.parametrize("policy", ["continue", "skip"])
@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_a_step_before_what_ended_without_running_leaves_its_progress(tmp_path: Path, policy: str, how: str) -> None:
    """The queue passes what was refused before the step's result is written."""

    async def test() -> None:
        host = Held()
        async with serving(tmp_path, host) as service:
            trainer = await Trainer.create(service, on_failure=policy)
            await trainer.train([5])
            step = await trainer.step(progress={"batch": 1})
            if how == "refused":
                await refused(trainer, trainer.request("forward_backward", **WRONG))
            else:
                assert await service.cancel(PROJECT, await trainer.step())
            host.go.set()
            await value(service, step)
            await settled(service, trainer, 4)
        async with serving(tmp_path) as service:
            attached = await service.attach(PROJECT, trainer.id)
            assert (attached.next_seq, attached.session.step, attached.progress) == (4, 1, {"batch": 1})

    run(test())


def test_a_refusal_names_its_operation_also_where_the_transaction_was_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            write = service.store.write

            async def lost_once(function: Any) -> Any:
                def again(connection: sa.Connection) -> Any:
                    with connection.begin_nested() as lost:
                        function(connection)
                        lost.rollback()
                    return function(connection)

                return await write(again)

            monkeypatch.setattr(service.store, "write", lost_once)
            refusal = await refused(trainer, trainer.request("forward_backward", **WRONG))
            told = refusal.details["operation_id"]
            assert isinstance(await error_of(service, told), InvalidDatum)

    run(test())


@pytest.mark.parametrize("faults", [2, 1000])
def test_a_fault_of_the_queue_is_tried_again_and_in_the_end_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service)
            trainer.request("zero_grad")  # never sent
            give_up, left = Gaps.give_up, [faults]

            async def faulty(gaps: Gaps, session: Session) -> None:
                if session.pending and left[0]:
                    left[0] -= 1
                    raise RuntimeError("ours")
                await give_up(gaps, session)

            monkeypatch.setattr(Gaps, "give_up", faulty)
            waiting = await trainer.submit("zero_grad")
            while left[0] > faults - 2:
                await asyncio.sleep(0.005)
            if faults == 2:
                await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=1, epoch=1))
            assert ((await result(service, waiting)).error is None) == (faults == 2)

    run(test(), timeout=10)
