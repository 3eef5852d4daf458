"""What is SQLite's own: a file that another process locks."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import sqlalchemy as sa

from trainsession.errors import DatabaseUnavailable
from trainsession.store.database import Database
from trainsession.store.schema import projects

PATIENCE = 10.0
"""Seconds that a writer waits for another one."""


def _add_second(connection: sa.Connection) -> None:
    connection.execute(sa.update(projects).values(busy_seconds=projects.c.busy_seconds + 1))


def test_who_waits_too_long_for_another_process_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        database = Database.open(tmp_path / "service.db")
        lock = sqlite3.connect(tmp_path / "service.db", isolation_level=None)
        try:
            lock.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            # The first is on its way alone, so the others are one transaction behind it.
            refused = await asyncio.gather(*(database.write(_add_second) for _ in range(5)), return_exceptions=True)
            assert PATIENCE - 1 < time.monotonic() - started < 2 * PATIENCE + 5
            for error in refused:
                assert isinstance(error, DatabaseUnavailable), error
                assert error.status == 503
                assert "another process" in error.message
            lock.execute("ROLLBACK")
            await asyncio.gather(*(database.write(_add_second) for _ in range(5)))
            seconds = sa.select(projects.c.busy_seconds)
            assert await database.read(lambda connection: connection.execute(seconds).scalar()) == 5
        finally:
            lock.close()
            await database.close()

    asyncio.run(asyncio.wait_for(test(), 90))
