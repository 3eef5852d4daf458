"""The writer, the blobs and the migrations, on real files."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.exc import IntegrityError

from tests.postgres import Databases, PostgresServer
from trainsession.errors import IncompatibleVersion, ServiceUnavailable
from trainsession.store.backend import Address, Backend, backend_of, parse_address
from trainsession.store.database import Database, opened
from trainsession.store.prepared import Prepared
from trainsession.store.schema import SCHEMA_VERSION, meta, metadata, projects
from trainsession.store.sqlite import SqliteBackend
from trainsession.store.store import INLINE_BYTES, Store
from trainsession.store.upgrade import migrate, prepare, schema_of


def put(key: str, value: str = "x") -> sa.Insert:
    return sa.insert(meta).values(key=key, value=value)


def keys(connection: sa.Connection) -> set[str]:
    ours = sa.and_(meta.c.key != "written_by", meta.c.key.not_like("writer/%"))
    return set(connection.execute(sa.select(meta.c.key).where(ours)).scalars())


@pytest.fixture
def address(databases: Databases, tmp_path: Path) -> Address:
    """A migrated database: once a file, once on a server."""
    return parse_address(tmp_path, databases.url(tmp_path))


@contextmanager
def connected(address: Address) -> Iterator[sa.Connection]:
    """A connection of another process, so to speak; commits at the end."""
    engine = backend_of(address).engine("migrate")
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def test_migrations_build_exactly_the_schema(address: Address) -> None:
    prepare(backend_of(address))
    with connected(address) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == SCHEMA_VERSION


def test_a_newer_database_is_refused_with_the_version_it_needs(address: Address, databases: Databases) -> None:
    prepare(backend_of(address))
    with connected(address) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.exec_driver_sql("UPDATE meta SET value = '42.0' WHERE key = 'written_by'")
    for upgrade in (False, True):
        with pytest.raises(IncompatibleVersion, match=r"trainsession>=42\.0"):
            prepare(backend_of(address), upgrade=upgrade)
    with pytest.raises(IncompatibleVersion, match=r"trainsession>=42\.0"):
        Database.open(address)
    assert schema_of(backend_of(address)) == "9999"


def older(address: Address) -> Backend:
    """A database of the first schema, with something in it."""
    backend = backend_of(address)
    backend.create()
    migrate(backend, "0001")
    with connected(address) as connection:
        connection.exec_driver_sql("INSERT INTO meta VALUES ('kept', 'value')")
        connection.exec_driver_sql("INSERT INTO projects VALUES ('default', 2.5)")
    return backend


def check_kept(address: Address) -> None:
    with connected(address) as connection:
        assert connection.exec_driver_sql("SELECT value FROM meta WHERE key = 'kept'").scalar() == "value"
        assert connection.exec_driver_sql("SELECT id, busy_seconds FROM projects").all() == [("default", 2.5)]


def test_an_older_file_is_copied_and_upgraded_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    prepare(older(path))
    assert schema_of(SqliteBackend(path)) == SCHEMA_VERSION
    copy = tmp_path / f"service.db.before-{SCHEMA_VERSION}"
    assert schema_of(SqliteBackend(copy)) == "0001"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    for file in (path, copy):
        check_kept(file)


def test_an_older_database_of_a_server_waits_for_its_operator(postgres_server: PostgresServer, tmp_path: Path) -> None:
    address = parse_address(tmp_path, postgres_server.create(empty=True))
    backend = older(address)
    with pytest.raises(IncompatibleVersion, match="trainsession db upgrade"):
        Database.open(address)
    assert schema_of(backend) == "0001"
    assert prepare(backend, upgrade=True) == "0001"
    check_kept(address)
    assert prepare(backend, upgrade=True) == SCHEMA_VERSION
    Database.open(address)


def test_an_empty_database_is_filled_once_by_whoever_comes_first(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.create(empty=True)
    command = [sys.executable, "-m", "trainsession.cli", "db", "upgrade"]
    env = {**os.environ, "TRAINSESSION_DATABASE_URL": url}
    racing = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[1] for process in racing]
    assert [process.returncode for process in racing] == [0, 0, 0], said
    assert schema_of(backend_of(parse_address(tmp_path, url))) == SCHEMA_VERSION
    assert postgres_server.password not in "".join(said)


def test_a_look_up_sees_what_another_process_just_committed(address: Address) -> None:
    find = Prepared(sa.select(meta.c.value).where(meta.c.key == sa.bindparam("of")))

    async def test() -> None:
        database = Database.open(address)
        assert await database.look_up(find, {"of": "k"}) == []
        for value in ("first", "second"):
            with connected(address) as other:
                other.execute(sa.delete(meta).where(meta.c.key == "k"))
                other.execute(put("k", value))
            assert await database.look_up(find, {"of": "k"}) == [(value,)]
        await database.close()
        with pytest.raises(ServiceUnavailable):
            await database.look_up(find, {"of": "k"})

    asyncio.run(test())


def test_writes_are_grouped_and_one_that_fails_takes_no_other_with_it(address: Address) -> None:
    async def test() -> None:
        database = Database.open(address)

        def half(connection: sa.Connection) -> None:
            connection.execute(put("half"))
            raise ValueError("on purpose")

        writes = [database.write(lambda c, n=n: c.execute(put(str(n)))) for n in range(50)]
        outcomes = await asyncio.gather(*writes, database.write(half), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [ValueError]
        assert await database.read(keys) == {str(n) for n in range(50)}
        assert database.stats.writes == 51
        assert database.stats.commits < 51
        with pytest.raises(IntegrityError):
            await database.write(lambda c: c.execute(put("1")))
        await database.close()

    asyncio.run(test())


def test_a_lazy_write_needs_no_commit_of_its_own_and_is_not_forgotten(address: Address) -> None:
    async def test() -> None:
        database = Database.open(address)
        database.write_lazily(lambda c: c.execute(put("lazy")))
        assert database.stats.commits == 0
        await database.write(lambda c: c.execute(put("now")))
        assert await database.read(keys) == {"lazy", "now"}
        assert database.stats.commits == 1
        database.write_lazily(lambda c: c.execute(put("last")))
        await database.close()
        database = Database.open(address)
        assert await database.read(keys) == {"lazy", "now", "last"}
        await database.close()

    asyncio.run(test())


def test_a_prepared_statement_binds_as_sqlalchemy_does(address: Address) -> None:
    insert = sa.insert(projects)
    row = {"id": "p", "busy_seconds": 2.5}

    async def test() -> None:
        database = Database.open(address)
        await database.write(lambda c: Prepared(insert, list(row)).run(c, row, row | {"id": "q"}))
        find = Prepared(sa.select(projects.c.busy_seconds).where(projects.c.id == sa.bindparam("project")))
        assert await database.read(lambda c: find.rows(c, {"project": "p"})) == [(2.5,)]
        assert await database.read(lambda c: find.rows(c, {"project": "r"})) == []
        with pytest.raises(IntegrityError):
            await database.write(lambda c: c.execute(insert.values(**row)))
        with pytest.raises(Exception, match=r"(?i)unique"):
            await database.write(lambda c: Prepared(insert, list(row)).run(c, row))
        await database.close()

    asyncio.run(test())


def test_the_settings_that_durability_rests_on(tmp_path: Path) -> None:
    async def test() -> None:
        database = Database.open(tmp_path / "service.db")

        def pragmas(connection: sa.Connection) -> list[object]:
            names = ("journal_mode", "synchronous", "foreign_keys")
            return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

        assert await database.write(pragmas) == ["wal", 2, 1]
        assert stat.S_IMODE((tmp_path / "service.db").stat().st_mode) == 0o600
        await database.close()

    asyncio.run(test())


def test_a_commit_of_a_server_is_durable_whatever_its_own_default(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.create()
    name = sa.make_url(url).database
    query = "SELECT current_setting('synchronous_commit'), current_setting('transaction_isolation')"

    async def test(default: str) -> tuple[Any, Any]:
        postgres_server.execute(f"ALTER DATABASE {name} SET synchronous_commit = {default}")
        postgres_server.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
        async with opened(tmp_path, url) as database:
            return await database.write(lambda c: tuple(c.exec_driver_sql(query).one()))

    assert asyncio.run(test("off")) == ("on", "read committed")
    assert asyncio.run(test("remote_apply")) == ("remote_apply", "read committed")


def test_small_bytes_stay_in_their_row_and_large_ones_become_blobs(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        small, large = (
            await store.keep("body", b"x" * INLINE_BYTES),
            await store.keep("body", b"x" * (INLINE_BYTES + 1)),
        )
        assert (small.blob, large.inline) == (None, None)
        assert await store.load(small) == b"x" * INLINE_BYTES
        assert await store.load(large) == b"x" * (INLINE_BYTES + 1)
        assert store.fsyncs == 2
        await store.close()

    asyncio.run(test())


@pytest.mark.parametrize("before", [None, "0001"])
def test_many_processes_open_a_new_or_an_old_file_at_once(tmp_path: Path, before: str | None) -> None:
    forked = multiprocessing.get_context("fork")
    for turn in range(4):
        path = tmp_path / str(turn) / "service.db"
        if before is not None:
            path.parent.mkdir()
            path.touch(0o600)
            migrate(backend_of(path), before)
        together, said = forked.Barrier(4), forked.Queue()

        def open_and_write(number: int, path: Path = path, together: Any = together, said: Any = said) -> None:
            async def work() -> None:
                database = Database.open(path)
                await database.write(lambda connection: connection.execute(put(f"opened by {number}")))
                await database.close()

            together.wait()
            try:
                asyncio.run(work())
                said.put("")
            except BaseException as error:
                said.put(repr(error))

        processes = [forked.Process(target=open_and_write, args=(number,)) for number in range(4)]
        for process in processes:
            process.start()
        assert [said.get(timeout=60) for _ in processes] == [""] * 4
        for process in processes:
            process.join(20)
        assert schema_of(backend_of(path)) == SCHEMA_VERSION
        with contextlib.closing(sqlite3.connect(path)) as connection:
            written = connection.execute("SELECT count(*) FROM meta WHERE key LIKE 'opened by %'").fetchone()
        assert written == (4,)
