"""Several writers on one database: what one writer alone kept true must be true with many."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.service.driver import PROJECT, Trainer, database_of, datum, run, serving
from trainsession.errors import Conflict, SequenceConflict
from trainsession.service.bodies import pack_request
from trainsession.service.endings import Ending
from trainsession.service.keys import Keys
from trainsession.service.log import Accepted, OperationLog
from trainsession.service.prices import Charge, Quote
from trainsession.service.projects import Projects
from trainsession.service.requests import OperationRequest
from trainsession.service.session import Session
from trainsession.store.schema import ledger, operations, sessions
from trainsession.store.store import Store

pytestmark = pytest.mark.usefixtures("each_database")
WRITERS = 4
FREE = Quote(currency="USD", prices={})


@asynccontextmanager
async def stores(home: Path, count: int = WRITERS) -> AsyncIterator[list[Store]]:
    """As many writers, connections and threads as ``count`` processes would have."""
    async with AsyncExitStack() as stack:
        made = [Store(home, database_of(home)) for _ in range(count)]
        for store in made:
            stack.push_async_callback(store.close)
        yield made


async def session_in(home: Path) -> Session:
    async with serving(home) as service:
        trainer = await Trainer.create(service)
        return await service._sessions.live(PROJECT, trainer.id)


def request(seq: int | None, key: str = "", token: int = 1) -> OperationRequest:
    return OperationRequest(
        kind="forward_backward",
        seq=seq,
        idempotency_key=key,
        params={"loss_fn": "cross_entropy"},
        data=[datum([token])],
    )


async def accept(store: Store, session: Session, of: OperationRequest) -> Accepted:
    return await OperationLog(store).accept(session, of, await store.keep("body", pack_request(of)), 1)


async def rows(store: Store, query: sa.Select[int]) -> int:
    return await store.read(lambda connection: connection.execute(query).scalar_one())


COUNT = sa.select(sa.func.count()).select_from(operations)


@pytest.mark.parametrize(("seq", "key"), [(1, ""), (None, "k"), (1, "k")])
def test_equal_submits_have_one_effect(tmp_path: Path, seq: int | None, key: str) -> None:
    async def test() -> None:
        session = await session_in(tmp_path)
        async with stores(tmp_path) as all_stores:
            equal = [accept(store, session, request(seq, key)) for store in all_stores for _ in range(25)]
            accepted = await asyncio.gather(*equal)
            assert len({one.operation_id for one in accepted}) == 1
            assert sum(one.new for one in accepted) == 1
            assert await rows(all_stores[0], COUNT) == 1

    run(test())


def test_submits_without_a_number_get_one_each_without_gaps(tmp_path: Path) -> None:
    async def test() -> None:
        session = await session_in(tmp_path)
        async with stores(tmp_path) as all_stores:
            many = [accept(store, session, request(None, token=n)) for store in all_stores for n in range(25)]
            assert sorted(one.seq for one in await asyncio.gather(*many)) == list(range(1, 101))

    run(test())


def test_of_two_operations_that_want_one_number_one_gets_it(tmp_path: Path) -> None:
    async def test() -> None:
        session = await session_in(tmp_path)
        async with stores(tmp_path) as all_stores:
            other = [accept(store, session, request(1, token=n)) for n, store in enumerate(all_stores, start=1)]
            ended = await asyncio.gather(*other, return_exceptions=True)
            assert sum(isinstance(one, Accepted) for one in ended) == 1
            assert sum(isinstance(one, SequenceConflict) for one in ended) == WRITERS - 1

    run(test())


def test_an_operation_ends_once_and_is_billed_once(tmp_path: Path) -> None:
    async def test() -> None:
        session = await session_in(tmp_path)
        async with stores(tmp_path) as all_stores:
            ids = [(await accept(all_stores[0], session, request(seq))).operation_id for seq in range(1, 21)]
            ends = [
                Ending(
                    operation_id=operation_id,
                    state="done",
                    charges=[Charge(kind="train", tokens=7, price=3)],
                    payer=session.id,
                    base_model=session.base_model,
                    currency="USD",
                )
                for operation_id in ids
            ]
            await asyncio.gather(*(OperationLog(store).finish(end) for store in all_stores for end in ends))
            assert await rows(all_stores[0], sa.select(sa.func.sum(ledger.c.tokens))) == 7 * 20
            assert await rows(all_stores[0], sa.select(sa.func.count()).select_from(ledger)) == 20

    run(test())


def test_equal_samples_are_accepted_once(tmp_path: Path) -> None:
    async def test() -> None:
        numbers = itertools.count()

        def sample(index: int) -> dict[str, object]:
            return {
                "id": f"op_{next(numbers)}",
                "project": PROJECT,
                "kind": "sample",
                "scope": "sample",
                "idempotency_key": f"k/{index}",
                "weights": {},
                "state": "queued",
                "tokens": 1,
                "created_at": 0.0,
                "body_sha256": f"of {index}",
            }

        async with stores(tmp_path) as all_stores:
            calls = [
                OperationLog(store).accept_samples([sample(index) for index in range(3)], [FREE] * 3, False)
                for store in all_stores
                for _ in range(10)
            ]
            earlier = [logged.earlier for logged in await asyncio.gather(*calls)]
            assert earlier.count(None) == 1
            assert len({tuple(ids) for ids in earlier if ids is not None}) == 1
            assert await rows(all_stores[0], COUNT) == 3

    run(test())


def test_a_project_is_made_once_and_its_limits_are_not_overwritten(tmp_path: Path) -> None:
    async def test() -> None:
        async with stores(tmp_path) as all_stores:
            of = [Projects(store.database) for store in all_stores]
            made = await asyncio.gather(*(projects.create("a") for projects in of), return_exceptions=True)
            assert sum(isinstance(one, Conflict) for one in made) == WRITERS - 1
            names = ("max_live_sessions", "max_queued_operations", "max_concurrent_samples", "max_tokens_per_minute")
            await asyncio.gather(
                *(projects.set_limits("a", {name: 5}) for projects, name in zip(of, names, strict=True))
            )
            assert (await of[0].get("a")).own_limits == dict.fromkeys(names, 5)
            await asyncio.gather(*(Keys(store.database).create("a") for store in all_stores))
            assert len(await Keys(all_stores[0].database).list("a")) == WRITERS

    run(test())


def test_values_come_back_as_they_were_given(tmp_path: Path) -> None:
    """Floats to the last bit, JSON with what only Python's reader takes, booleans as booleans, bytes."""
    values = {"a": [1, 2.5, None, True, "\u0000 ü 🤖"], "nan": float("inf"), "deep": {"x": {}}}

    async def test() -> None:
        session = await session_in(tmp_path)
        (store,) = [Store(tmp_path, database_of(tmp_path))]
        moment = 1_764_570_408.123456
        change = sa.update(sessions).where(sessions.c.id == session.id)
        change = change.values(metadata=values, progress=4, used_at=moment, with_optimizer=True)
        await store.write(lambda connection: connection.execute(change))
        row = await store.read(lambda connection: connection.execute(sa.select(sessions)).mappings().one())
        assert (row["metadata"], row["progress"], row["used_at"]) == (values, 4, moment)
        assert row["with_optimizer"] is True
        assert row["closed_at"] is None
        every_byte = bytes(range(256))
        of = request(1)
        operation = await OperationLog(store).accept(session, of, await store.keep("body", every_byte), 1)
        assert await OperationLog(store).body(operation.operation_id) == every_byte
        await store.close()

    run(test())
