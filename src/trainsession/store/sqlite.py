"""SQLite: one file in the home, for one machine."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from ..errors import DatabaseUnavailable, StorageError
from .backend import Backend, Use, Verdict, cause_of

_BEGIN: dict[Use, str] = {"read": "BEGIN", "write": "BEGIN IMMEDIATE", "migrate": "BEGIN IMMEDIATE"}


class SqliteBackend(Backend):
    driver_errors = sqlite3.Error
    remote = False
    upgrades_itself = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name

    def engine(self, use: Use) -> sa.Engine:
        """Its transactions begin explicitly (pysqlite's own rules would defer them)."""
        # Parameters are prompts and hashes of keys: they stay out of what an error says.
        engine = sa.create_engine(f"sqlite:///{self._path}", hide_parameters=True)
        begin = _BEGIN[use]

        @event.listens_for(engine, "connect")
        def _on_connect(connection: sqlite3.Connection, _record: Any) -> None:
            connection.isolation_level = None
            # The patience first: changing the mode takes a lock, too.
            for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _on_begin(connection: sa.Connection) -> None:
            _driver(connection).execute(begin)

        return engine

    def create(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A lock of its own, not that of who serves the home."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def keep_copy(self, revision: str) -> None:
        """A consistent copy, the write-ahead log included: ``<name>.before-<revision>``."""
        target = self._path.with_name(f"{self._path.name}.before-{revision}")
        os.close(os.open(target, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600))
        with closing(sqlite3.connect(self._path)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)

    def in_transaction(self, connection: sa.Connection) -> bool:
        """On a full disk or an I/O error SQLite gives up the whole transaction."""
        return _driver(connection).in_transaction

    def bury(self, engine: sa.Engine) -> None:
        """Of a commit that could not be synced the log has all: SQLite itself passes over it, but who opens the file
        after this process was killed takes it for committed. So another transaction is written in its place."""
        with suppress(*self.errors), engine.connect() as connection, connection.begin():
            _driver(connection).execute("UPDATE alembic_version SET version_num = version_num")

    def judge(self, error: BaseException) -> Verdict:
        return "blocked" if _is_locked(cause_of(error)) else "final"

    def translate(self, error: Exception, verb: str) -> Exception:
        cause = cause_of(error)
        if isinstance(cause, OSError):
            return StorageError(f"the database {self.name} cannot be {verb}: {cause.strerror or cause}")
        if isinstance(cause, sqlite3.IntegrityError | sqlite3.ProgrammingError) or not isinstance(cause, sqlite3.Error):
            return error
        if _is_locked(cause):
            return DatabaseUnavailable(f"the database cannot be {verb}: another process has been writing for too long")
        # The driver's own words, without SQL or parameters.
        return StorageError(f"the database cannot be {verb}: {cause}")


def _is_locked(error: BaseException | None) -> bool:
    """Another process held its lock for all of ``busy_timeout``."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.OperationalError) and code is not None and code & 0xFF == sqlite3.SQLITE_BUSY


def _driver(connection: sa.Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver
