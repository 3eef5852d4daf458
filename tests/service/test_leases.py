"""Several servers on one database: who runs what, and what one that was replaced can still do (nothing)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL, NullHandle, NullHost
from tests.postgres_proxy import PostgresProxy
from tests.server.together import QUICK
from tests.service.driver import PROJECT, Trainer, prompt, result, run, sample, value
from tests.service.servers import Open, rows, until
from trainsession.errors import DatabaseUnavailable
from trainsession.service.leases import OwnedElsewhere
from trainsession.service.requests import CreateSession
from trainsession.service.service import Service
from trainsession.store.backend import LeaseLost
from trainsession.store.schema import ledger, operations, servers, sessions


class SlowHandle(NullHandle):
    seconds = 0.0

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if method == "train":
            await asyncio.sleep(self.seconds)
        return await super().call(method, *args, **kwargs)


class SlowHost(NullHost):
    """Each of its passes takes so many seconds, in which the event loop goes on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def open(self, base_model: str) -> NullHandle:
        handle = SlowHandle((await super().open(base_model)).engine)
        handle.seconds = self._seconds
        return handle


async def replaced(old: Service, by: Service) -> None:
    """As if the old server's process had stopped to run: it renews no more, and the other one notices."""
    assert old.lease._renewing is not None
    old.lease._renewing.cancel()

    async def has_gone() -> bool:
        return not await rows(by, sa.select(servers.c.id).where(servers.c.id == old.lease.server))

    await until(has_gone)


def test_a_session_has_one_owner_and_others_say_where_it_is(start: Open) -> None:
    async def test() -> None:
        async with start("a", advertise="http://127.0.0.1:7") as a, start("b") as b:
            trainer = await Trainer.create(a)
            operation = await trainer.train([1, 2])
            (sample,) = await a.submit_samples(PROJECT, {"base_model": MODEL}, [prompt([1])])
            elsewhere = Trainer(b, trainer.id, next_seq=2)
            for call in (
                elsewhere.step(),
                Trainer.attach(b, trainer.id),
                b.close_session(PROJECT, trainer.id),
                b.get_session(PROJECT, trainer.id),
            ):
                with pytest.raises(OwnedElsewhere) as found:
                    await call
                assert (found.value.owner, found.value.address) == (a.lease.server, "http://127.0.0.1:7")
            assert (await b.list_sessions(PROJECT))[0].session_id == trainer.id
            # What has ended is in the database, which all read.
            await result(a, operation)
            await result(a, sample)
            assert {one.operation_id for one in (await b.results(PROJECT, [operation, sample])).results} == {
                operation,
                sample,
            }
            assert [(await rows(b, sa.select(sessions.c.owner)))[0][0]] == [a.lease.server]

    run(test())


def test_frozen_weights_of_a_closed_session_can_be_sampled_on_every_server(start: Open) -> None:
    async def test() -> None:
        async with start("a", NullHost(exact=False)) as a, start("b", NullHost(exact=False)) as b:
            trainer = await Trainer.create(a)
            await trainer.train([5])
            await trainer.step(1.0)
            weights = (await trainer.do("snapshot"))["weights"]
            await a.close_session(PROJECT, trainer.id)
            for service in (a, b):
                assert (await sample(service, weights, prompt([1])))["sequences"][0]["logprobs"][0] == -6.0

    run(test(), 30)


def test_a_server_that_said_goodbye_is_replaced_without_waiting_for_its_lease(start: Open) -> None:
    async def test() -> None:
        async with start("b", lease_seconds=60.0) as b:
            async with start("a", SlowHost(1.0), lease_seconds=60.0) as a:
                trainer = await Trainer.create(a)
                ids = [await trainer.train([number]) for number in range(1, 4)]
                ids.append(await trainer.submit("snapshot"))
                ids += await a.submit_samples(PROJECT, {"operation_id": ids[-1]}, [prompt([1])])
                await asyncio.sleep(0.3)
            left = await rows(b, sa.select(operations.c.id).where(operations.c.state == "queued"))
            assert {ids[-1], ids[-2], ids[-3]} <= {row.id for row in left}
            # Nobody asks for them.
            unfinished = sa.select(operations.c.id).where(operations.c.state != "done")

            async def all_done() -> bool:
                return not await rows(b, unfinished)

            await until(all_done)
            assert await Trainer(b, trainer.id, next_seq=5).do("optim_step", params={"learning_rate": 0.5})
            assert await Trainer(b, trainer.id, next_seq=6).weight() == pytest.approx(0.5 * 6)
            assert b.lease.replaced == 1

    run(test())


def test_what_a_replaced_server_still_does_is_not_stored(start: Open) -> None:
    """The zombie: it goes on with all it had, among it a pass whose result comes late."""

    async def test() -> None:
        async with start("a", SlowHost(3.0)) as a, start("b") as b:
            trainer = await Trainer.create(a)
            operations_ = [await trainer.train([1, 2]), await trainer.step()]
            (sample,) = await a.submit_samples(PROJECT, {"base_model": MODEL}, [prompt([1])])
            await replaced(a, b)
            assert [(await result(b, one)).state for one in (*operations_, sample)] == ["done"] * 3
            before = await rows(b, sa.select(ledger.c.operation_id, ledger.c.kind, ledger.c.tokens))
            ends = await rows(b, sa.select(operations.c.id, operations.c.finished_at))
            for write in (
                trainer.step(),
                a.create_session(PROJECT, CreateSession(base_model=MODEL)),
                a.submit_samples(PROJECT, {"base_model": MODEL}, [prompt([1])]),
                a.usage(PROJECT),
            ):
                with pytest.raises(LeaseLost):
                    await write
            await asyncio.sleep(3.5)  # the late pass
            assert await rows(b, sa.select(ledger.c.operation_id, ledger.c.kind, ledger.c.tokens)) == before
            assert await rows(b, sa.select(operations.c.id, operations.c.finished_at)) == ends
            assert (await a.check_ready())["database"] is False
            assert await Trainer(b, trainer.id, next_seq=3).weight() == pytest.approx(0.5 * 3)

    run(test())


def test_a_server_notices_that_it_was_replaced(start: Open) -> None:
    async def test() -> None:
        async with start("a", renew_seconds=4.0) as a, start("b") as b:
            trainer = await Trainer.create(a)
            await asyncio.wait_for(a.lease.lost.wait(), 20)  # it sleeps for longer than its lease
            assert (await a.check_ready())["lease"] is False
            assert b.lease.replaced == 1
            assert await Trainer(b, trainer.id).step() is not None

    run(test())


def test_after_an_outage_that_outlasted_all_leases_nobody_is_replaced(start: Open, database: str) -> None:
    async def test() -> None:
        async with start("a") as a, start("b") as b:
            expired = sa.update(servers).values(expires_at=1.0)
            await a.store.write(lambda connection: connection.execute(expired))
            await asyncio.sleep(1.5)
            assert not a.lease.lost.is_set()
            assert not b.lease.lost.is_set()
            assert len(await rows(a, sa.select(servers.c.id))) == 2

    run(test())


def test_poll_of_what_several_servers_run(start: Open) -> None:
    async def test() -> None:
        async with start("a", SlowHost(1.0)) as a, start("b", SlowHost(2.0)) as b:
            of_a, of_b = await Trainer.create(a), await Trainer.create(b)
            ids = [await of_a.train([1]), await of_b.train([1])]
            first = await a.results(PROJECT, ids, timeout=20.0)
            assert [one.operation_id for one in first.results] == [ids[0]]
            with pytest.raises(OwnedElsewhere) as found:
                await a.results(PROJECT, [ids[1]], timeout=20.0)
            assert found.value.owner == b.lease.server
            (last,) = (await b.results(PROJECT, [ids[1]], timeout=20.0)).results
            assert last.state == "done"
            assert await value(a, ids[1])

    run(test())


def test_a_server_that_is_cut_off_from_the_database_is_replaced(
    start: Open, tmp_path: Path, postgres_proxy: PostgresProxy
) -> None:
    """In the middle of a commit, and it comes back later: what it then still wants to write is refused."""

    async def test() -> None:
        async with start("a", through=True) as a, start("b") as b:
            trainer = await Trainer.create(a)
            await result(a, await trainer.train([1, 2]))
            postgres_proxy.refuse, postgres_proxy.cut = True, "before"
            late = asyncio.gather(trainer.step(), trainer.train([5]), return_exceptions=True)
            successor = Trainer(b, trainer.id, next_seq=2)

            async def taken_over() -> bool:
                return not await rows(b, sa.select(servers.c.id).where(servers.c.id == a.lease.server))

            await until(taken_over)
            await result(b, await successor.step())
            postgres_proxy.refuse = False
            await asyncio.wait_for(a.lease.lost.wait(), 20)
            assert all(isinstance(one, DatabaseUnavailable) for one in await late)
            assert await successor.weight() == pytest.approx(0.5 * 3)

    run(test())


def test_a_session_that_only_pays_may_be_anothers(start: Open) -> None:
    async def test() -> None:
        async with start("a") as a, start("b") as b:
            payer = await a.base_sampler(PROJECT, MODEL)
            assert (await b.base_sampler(PROJECT, MODEL)).session_id == payer.session_id
            request = prompt([1], session_id=payer.session_id)
            (sample,) = await b.submit_samples(PROJECT, {"base_model": MODEL}, [request])
            assert (await result(b, sample)).state == "done"
            payers = [row.session_id for row in await rows(a, sa.select(ledger.c.session_id).distinct())]
            assert payers == [payer.session_id]

    run(test())


def test_a_stream_of_a_sample_whose_server_is_gone(start: Open) -> None:
    async def test() -> None:
        async with start("b") as b:
            async with start("a") as a:
                (sample,) = await a.submit_samples(PROJECT, {"base_model": MODEL}, [prompt([1])])
                await result(a, sample)
                with pytest.raises(OwnedElsewhere):
                    await anext(b.stream(PROJECT, sample))

            async def taken_over() -> bool:
                return b.lease.replaced == 1

            await until(taken_over)
            assert [frame.get("tokens") async for frame in b.stream(PROJECT, sample)] == [[2, 3, 4], None]

    run(test())


def test_a_server_that_is_closing_takes_over_nothing_more(start: Open) -> None:
    async def test() -> None:
        async with start("a") as a:
            async with start("b") as b:
                await Trainer.create(b)
                a.lease.closing = True
            await asyncio.sleep(5 * QUICK["renew_seconds"])  # b has said goodbye
            assert a.lease.replaced == 0
            a.lease.closing = False

            async def has_taken_over() -> bool:
                return a.lease.replaced == 1

            await until(has_taken_over)

    run(test())
