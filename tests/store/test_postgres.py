"""A server that goes away, with real connections cut at every moment: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
import sqlalchemy as sa

from tests.postgres import PostgresServer
from tests.postgres_proxy import PostgresProxy, through
from trainsession.errors import DatabaseUnavailable, InvalidRequest, StorageError
from trainsession.store.backend import parse_address
from trainsession.store.database import Database, opened
from trainsession.store.prepared import Prepared
from trainsession.store.schema import meta, projects

_FIND = Prepared(sa.select(projects.c.busy_seconds).where(projects.c.id == sa.bindparam("project")))


def add_second(connection: sa.Connection) -> None:
    """Not idempotent: done twice, it shows."""
    connection.execute(sa.update(projects).values(busy_seconds=projects.c.busy_seconds + 1))


async def seconds(database: Database) -> float:
    return (await database.look_up(_FIND, {"project": "default"}))[0][0]


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("together", [1, 20])
def test_a_commit_without_an_answer_is_done_exactly_once(
    postgres_server: PostgresServer,
    postgres_proxy: PostgresProxy,
    tmp_path: Path,
    cut: Literal["before", "after"],
    together: int,
) -> None:
    url = postgres_server.create()

    async def test() -> None:
        async with opened(tmp_path, through(postgres_server, url)) as database:
            await database.write(add_second)
            for round_ in range(1, 4):
                postgres_proxy.cut = cut
                await asyncio.gather(*(database.write(add_second) for _ in range(together)))
                assert postgres_proxy.cut == ""
                assert await seconds(database) == 1 + round_ * together

    asyncio.run(test())


def test_a_commit_waits_for_its_outcome_and_others_are_refused_meanwhile(
    postgres_server: PostgresServer, postgres_proxy: PostgresProxy, tmp_path: Path
) -> None:
    url = postgres_server.create()

    async def test() -> None:
        async with opened(tmp_path, through(postgres_server, url)) as database:
            await database.write(add_second)
            postgres_proxy.cut, postgres_proxy.refuse = "after", True
            unknown = asyncio.create_task(database.write(add_second))
            await asyncio.sleep(1.0)
            assert not unknown.done()
            with pytest.raises(DatabaseUnavailable, match="reached"):
                await database.write(add_second)
            postgres_proxy.refuse = False
            await unknown
            assert await seconds(database) == 2

    asyncio.run(test())


def test_connections_that_are_cut_at_random_lose_and_double_nothing(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.create()
    dice = random.Random(5)

    async def test() -> None:
        async with opened(tmp_path, url) as database:
            cuts, ended = 0, threading.Event()

            def cut() -> None:
                nonlocal cuts
                while not ended.is_set():
                    time.sleep(dice.uniform(0, 0.3))
                    cuts += postgres_server.terminate(url)

            cutting = asyncio.create_task(asyncio.to_thread(cut))
            done = 0
            try:
                while cuts < 20 or done <= 100:
                    writes = (database.write(add_second) for _ in range(dice.choice([1, 5, 30])))
                    for outcome in await asyncio.gather(*writes, return_exceptions=True):
                        assert outcome is None or isinstance(outcome, StorageError)
                        done += outcome is None
            finally:
                ended.set()
                await cutting
            assert await seconds(database) == done

    asyncio.run(test())


def test_a_server_that_crashes_and_comes_back_is_used_again(postgres_server: PostgresServer, tmp_path: Path) -> None:
    url = postgres_server.create()

    async def test() -> None:
        async with opened(tmp_path, url) as database:
            await database.write(add_second)
            assert await seconds(database) == 1
            postgres_server.crash()
            try:
                started = time.monotonic()
                for failing in (database.write(add_second), seconds(database), database.read(lambda c: c.begin())):
                    with pytest.raises(DatabaseUnavailable) as caught:
                        await failing
                    assert caught.value.is_retryable()
                assert time.monotonic() - started < 20
            finally:
                postgres_server.start()
            assert await seconds(database) == 1
            await database.write(add_second)
            assert await database.read(lambda c: c.execute(sa.select(projects.c.busy_seconds)).scalar()) == 2

    asyncio.run(test())


def test_who_waits_too_long_for_another_writer_is_told(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.create()
    monkeypatch.setattr("trainsession.store.postgres._SETTINGS", ("SET lock_timeout = '300ms'",))

    async def test() -> None:
        async with opened(tmp_path, url) as first, opened(tmp_path, url) as second:
            hold = threading.Event()
            holding = asyncio.create_task(first.write(lambda _: hold.wait(30)))
            await asyncio.sleep(0.3)
            blocked = await asyncio.gather(*(second.write(add_second) for _ in range(5)), return_exceptions=True)
            hold.set()
            await holding
            assert [str(error) for error in blocked if "another process" in str(error)] == [str(blocked[0])] * 5
            await second.write(add_second)
            assert await seconds(first) == 1

    asyncio.run(test())


def test_what_the_database_cannot_hold_is_the_callers_mistake(postgres_server: PostgresServer, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, postgres_server.create()) as database:
            with pytest.raises(InvalidRequest, match="character"):
                await database.write(lambda c: c.execute(sa.insert(meta).values(key="a\0b", value="")))
            with pytest.raises(InvalidRequest, match="character"):
                await database.read(lambda c: c.execute(sa.select(meta).where(meta.c.key == "a\0b")).all())
            await database.write(add_second)

    asyncio.run(test())


def test_writers_that_closed_leave_no_mark(postgres_server: PostgresServer, tmp_path: Path) -> None:
    url = postgres_server.create()

    async def test() -> int:
        async with opened(tmp_path, url) as database:
            await database.write(add_second)
        async with opened(tmp_path, url) as database:
            marks = sa.select(sa.func.count()).where(meta.c.key.like("writer/%"))
            return await database.read(lambda c: c.execute(marks).scalar_one())

    assert asyncio.run(test()) == 0


def test_no_message_shows_the_password(
    postgres_server: PostgresServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = postgres_server.password
    urls = (
        postgres_server.url("nowhere"),
        postgres_server.url("postgres").replace("trainsession:", "nobody:"),
        f"postgresql://u:{secret}@127.0.0.1:1/x",
        f"postgresql://u@127.0.0.1:1/x?password={secret}",
    )
    for url in urls:
        with pytest.raises(StorageError) as caught:
            Database.open(parse_address(tmp_path, url))
        assert secret not in f"{caught.value.message} {caught.value.details}"
    for url in (f"mysql://u:{secret}@h/x", f"not a url {secret}", f"postgresql://u:{secret}@h:port/x"):
        with pytest.raises(InvalidRequest) as refused:
            parse_address(tmp_path, url)
        assert secret not in str(refused.value)
    assert secret not in "".join(capfd.readouterr())
