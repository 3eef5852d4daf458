"""Budgets: never exceeded, whoever races; given back on every exit; told to whoever is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL, NullEngine, NullHandle, NullHost
from tests.service.driver import (
    PROJECT,
    Trainer,
    datum,
    one_of_several,
    open_service,
    prompt,
    result,
    run,
    serving,
    value,
)
from tests.service.money import PRICES, TOKEN, allow, left, priced
from trainsession.errors import (
    BudgetExceeded,
    Cancelled,
    IncompleteGradients,
    InvalidRequest,
    NotFound,
    OperationSkipped,
)
from trainsession.service.budgets import Budgets
from trainsession.service.requests import OperationRequest
from trainsession.service.service import Service
from trainsession.store.schema import budgets, ledger, operations

pytestmark = pytest.mark.usefixtures("each_database")
BASE = {"base_model": MODEL}


async def fails(service: Service, operation_id: str) -> Any:
    return (await result(service, operation_id)).error


def test_of_64_racers_at_two_services_as_many_get_through_as_the_budget_holds(tmp_path: Path) -> None:
    async def test() -> None:
        home = priced(tmp_path)
        async with AsyncExitStack() as stack:
            services = [await stack.enter_async_context(one_of_several(home, n)) for n in range(2)]
            trainers = [await Trainer.create(services[n % 2]) for n in range(64)]
            await allow(services[0], 10 * 8 + 4)  # ten and a half batches of four tokens at 2

            async def watch() -> None:
                while True:
                    spent, reserved = await left(services[1])
                    assert spent + reserved <= 84
                    await asyncio.sleep(0.005)

            watching = asyncio.create_task(watch())
            ends = await asyncio.gather(*(trainer.train([1, 2, 3, 4]) for trainer in trainers), return_exceptions=True)
            accepted = [(t.service, end) for t, end in zip(trainers, ends, strict=True) if isinstance(end, str)]
            assert Counter(type(end) for end in ends) == {str: 10, BudgetExceeded: 54}
            for service, operation_id in accepted:
                await value(service, operation_id)
            assert await left(services[0]) == (80, 0)
            assert not watching.done(), watching.exception()
            watching.cancel()

    run(test())


def test_of_racing_samples_those_that_fit_go_on_and_end_cheaper_than_they_reserved(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            # Each reserves 2 + 2 * 5 * 3 = 32.
            request = prompt([7, 8], max_tokens=5, num_samples=2)
            await allow(service, 32 * 3 + 31)
            ids = await service.submit_samples(PROJECT, BASE, [request] * 5)
            ends = [await result(service, operation_id) for operation_id in ids]
            assert [end.state for end in ends] == ["done"] * 3 + ["failed"] * 2
            assert isinstance(ends[4].error, BudgetExceeded)
            assert ends[4].error.details["request"] == 4
            assert await left(service) == (32 * 3, 0)
            # Nothing fits: refused as a whole, nothing is logged.
            with pytest.raises(BudgetExceeded):
                await service.submit_samples(PROJECT, BASE, [request] * 2, idempotency_key="k")
            await allow(service, 32 * 5)
            again = await service.submit_samples(PROJECT, BASE, [request] * 2, idempotency_key="k")
            assert [(await result(service, operation_id)).state for operation_id in again] == ["done"] * 2
            assert await service.submit_samples(PROJECT, BASE, [request] * 2, idempotency_key="k") == again
            assert await left(service) == (32 * 5, 0)

    run(test())


def test_a_request_that_wants_all_or_nothing_gets_nothing_where_one_does_not_fit(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            await allow(service, 19)
            with pytest.raises(BudgetExceeded, match="request 1"):
                await service.submit_samples(PROJECT, BASE, [prompt([1])] * 2, whole=True)
            assert await left(service) == (0, 0)
            count = sa.select(sa.func.count()).select_from(operations)
            assert await service.store.read(lambda connection: connection.execute(count).scalar()) == 0
            # The ledger was summed once, for the new budget, and not for each refusal.
            since = sa.select(budgets.c.since)
            assert await service.store.read(lambda connection: connection.execute(since).scalar()) == 0

    run(test())


def test_a_refused_batch_consumes_its_number_and_no_step_is_made_on_the_rest(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            await allow(service, 5)
            first = await trainer.train([1, 2])
            with pytest.raises(BudgetExceeded) as caught:
                await trainer.train([1, 2])
            step = await trainer.step()
            await value(service, first)
            assert isinstance(await fails(service, step), IncompleteGradients)
            refused = caught.value.details["operation_id"]
            assert isinstance(await fails(service, refused), BudgetExceeded)
            info = await service.get_session(PROJECT, trainer.id)
            assert info.next_seq == 4
            # What is free goes on, also where nothing is left: the work so far can be saved.
            await allow(service, 0)
            await trainer.do("zero_grad")
            assert (await trainer.do("save_state", params={"name": "all"}))["path"]
            assert await left(service) == (4, 0)
            # A retry is answered like its first time, and reserves nothing.
            retry = OperationRequest(kind="forward_backward", seq=1, epoch=1, **batch([1, 2]))
            assert (await service.submit(PROJECT, trainer.id, retry))[0] == first
            assert await left(service) == (4, 0)

    run(test())


def batch(tokens: list[int]) -> dict[str, Any]:
    return {"params": {"loss_fn": "cross_entropy"}, "data": [datum(tokens)]}


def test_the_refusal_says_what_there_is_and_who_can_raise_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            await allow(service, 9, "month")
            await value(service, await trainer.train([1, 2, 3]))
            with pytest.raises(BudgetExceeded) as caught:
                await trainer.train([1, 2])
            error = caught.value
            assert (error.status, error.code) == (402, "budget_exceeded")
            money = {
                name: Decimal(error.details[name]) / TOKEN for name in ("budget", "spent", "reserved", "left", "cost")
            }
            assert money == {"budget": 9, "spent": 6, "reserved": 0, "left": 3, "cost": 4}
            assert error.details["currency"] == "EUR"
            assert error.details["resets_at"] > 1_764_000_000
            assert "could cost up to 0.000004 EUR" in error.message
            assert "`trainsession projects set-budget default AMOUNT`" in error.message
            report = await service.usage(PROJECT)
            assert report.budget is not None
            assert (report.budget.spent, report.budget.left) == (6 * TOKEN, 3 * TOKEN)
            assert (await service.usage(None)).budget is None

    run(test())


def test_a_custom_loss_reserves_its_two_halves(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            await allow(service, 11)
            await value(service, await trainer.submit("forward_keep", data=[datum([1, 2, 3])]))
            assert await left(service) == (3, 0)
            gradients = [np.ones(3, np.float32)]
            await value(service, await trainer.submit("backward", params={"forward_seq": 1}, gradients=gradients))
            assert await left(service) == (6, 0)
            await value(service, await trainer.submit("forward_keep", data=[datum([1, 2, 3])]))
            with pytest.raises(BudgetExceeded):
                await trainer.submit("backward", params={"forward_seq": 3}, gradients=gradients)
            assert isinstance(await fails(service, await trainer.step()), IncompleteGradients)
            assert await left(service) == (9, 0)

    run(test())


class Failing(NullEngine):
    """Fails every pass whose first token is 13."""

    def train(self, items: Any) -> Any:
        bad = [int(item.data[0].model_input.tokens[0]) == 13 for item in items]
        outputs = super().train(items)
        return [InvalidRequest("unlucky") if failed else output for failed, output in zip(bad, outputs, strict=True)]


class FailingHost(NullHost):
    async def open(self, base_model: str) -> Any:
        return NullHandle(Failing())


def test_work_that_fails_is_cancelled_skipped_or_withdrawn_gives_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path), FailingHost()) as service:
            await allow(service, 100)
            trainer = await Trainer.create(service, on_failure="skip")
            # Behind a gap nothing runs, so all of it waits and is reserved.
            gap = trainer.request("zero_grad")
            failing, skipped, cancelled = [await trainer.train([token, 1]) for token in (13, 1, 2)]
            assert await left(service) == (0, 12)
            assert await service.cancel(PROJECT, cancelled)
            assert await left(service) == (0, 8)
            await service.submit(PROJECT, trainer.id, gap)
            assert isinstance(await fails(service, failing), InvalidRequest)
            assert isinstance(await fails(service, skipped), OperationSkipped)
            assert isinstance(await fails(service, cancelled), Cancelled)
            assert await left(service) == (0, 0)
            # What another client takes over withdraws.
            trainer.request("zero_grad")
            trainer.request("zero_grad")
            await trainer.train([1, 2])
            assert await left(service) == (0, 4)
            other = await Trainer.attach(service, trainer.id)
            assert await left(service) == (0, 0)
            # A session that is closed.
            other.request("zero_grad")
            await other.train([1, 2])
            assert await left(service) == (0, 4)
            await service.close_session(PROJECT, trainer.id)
            assert await left(service) == (0, 0)
            # A sample that is cancelled before its weights are there.
            third = await Trainer.create(service)
            third.request("zero_grad")
            snapshot = await third.submit("snapshot")
            (waiting,) = await service.submit_samples(PROJECT, {"operation_id": snapshot}, [prompt([1])])
            assert await left(service) == (0, 10)
            assert await service.cancel(PROJECT, waiting)
            assert await left(service) == (0, 0)

    run(test())


def test_a_restart_with_work_in_flight_keeps_the_reservation_and_settles_it(tmp_path: Path) -> None:
    async def test() -> None:
        home = priced(tmp_path)
        service = await open_service(home)
        await allow(service, 100)
        trainer = await Trainer.create(service)
        gap = trainer.request("zero_grad")
        waiting = await trainer.train([1, 2, 3])
        await service.close()
        # Dearer meanwhile: what was accepted keeps the prices that it was accepted at.
        priced(home, PRICES.replace("train = 2", "train = 70"))
        async with serving(home) as service:
            # Whatever the row says: the log decides.
            await service.store.write(lambda connection: connection.execute(sa.update(budgets).values(reserved=99)))
        async with serving(home) as service:
            assert await left(service) == (0, 6)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, waiting)
            assert await left(service) == (6, 0)
            again = Trainer(service, trainer.id, 3)
            with pytest.raises(BudgetExceeded):
                await again.train([1, 2])

    run(test())


def test_a_budget_that_is_set_lowered_or_cleared_in_flight(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2]))
            gap = trainer.request("zero_grad")
            waiting = [await trainer.train([1, 2, 3]) for _ in range(2)]
            await allow(service, 20)  # counts what was spent and accepted before it was there
            assert await left(service) == (4, 12)
            await allow(service, 5)
            with pytest.raises(BudgetExceeded) as caught:
                await trainer.train([1])
            assert Decimal(caught.value.details["left"]) == 0
            await service.submit(PROJECT, trainer.id, gap)
            for operation_id in waiting:
                await value(service, operation_id)
            assert await left(service) == (16, 0)
            assert await Budgets(service.store.database).clear(PROJECT)
            await value(service, await trainer.train([1, 2]))
            assert (await service.usage(PROJECT)).budget is None
            assert not await Budgets(service.store.database).clear(PROJECT)

    run(test())


def test_another_projects_budget_and_spending_are_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            await service.projects.create("other")
            await allow(service, 3, project="other")
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2, 3, 4]))
            theirs = await Trainer.create(service, project="other")
            with pytest.raises(BudgetExceeded):
                await service.submit("other", theirs.id, theirs.request("forward_backward", **batch([1, 2])))
            assert await left(service, "other") == (0, 0)
            with pytest.raises(NotFound, match="no project nobody"):
                await allow(service, 3, project="nobody")

    run(test())


def test_a_month_begins_anew_and_never_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [1_796_083_199.0]  # the last second of November 2026
    monkeypatch.setattr("time.time", lambda: moment[0])

    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            await allow(service, 10, "month")
            await value(service, await trainer.train([1, 2, 3, 4]))
            gap = trainer.request("zero_grad")
            waiting = await trainer.train([1])
            with pytest.raises(BudgetExceeded):
                await trainer.train([1])
            moment[0] += 1
            assert await left(service) == (0, 2)
            for _ in range(4):
                await trainer.train([1])
            with pytest.raises(BudgetExceeded):  # what was accepted in November is paid in December
                await trainer.train([1])
            moment[0] -= 1  # by the clock of another server it is November still
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, waiting)
            while (await left(service))[1]:
                await asyncio.sleep(0.01)
            assert await left(service) == (10, 0)
            with pytest.raises(BudgetExceeded):
                await trainer.train([1])
            sums = sa.select(sa.func.sum(ledger.c.tokens)).where(ledger.c.created_at < 1_796_083_200)
            assert await service.store.read(lambda connection: connection.execute(sums).scalar()) == 4

    run(test())


def test_prices_in_another_currency_than_the_budget_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        home = priced(tmp_path)
        async with serving(home) as service:
            await allow(service, 1000)
        priced(home, PRICES.replace("EUR", "USD"))
        async with serving(home) as service:
            trainer = await Trainer.create(service)
            with pytest.raises(BudgetExceeded, match="budget is in EUR and prices are in USD"):
                await trainer.train([1])

    run(test())


@pytest.mark.parametrize("amount", ["-1", "NaN", "Infinity", "1e15", "0.0000000000001"])
def test_what_is_no_amount_is_refused(tmp_path: Path, amount: str) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            with pytest.raises(InvalidRequest, match="amount"):
                await Budgets(service.store.database).set(PROJECT, Decimal(amount), "EUR", "total")

    run(test())
