"""PostgreSQL (13 or newer): a server of its own, for a service on more than one machine.

A transaction of the writer begins with an advisory lock, so that there is one at a time in all
processes, as on SQLite, and nothing that it reads changes before it writes. It also leaves a mark in
``meta``. When the connection is lost while a commit is under way, only the database knows whether it
took place: whoever has the lock next finds the mark, or that it is not there.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import errors as codes
from psycopg.pq import TransactionStatus
from sqlalchemy import event

from ..errors import DatabaseUnavailable, InvalidRequest, StorageError
from .backend import Backend, LeaseLost, Use, Verdict, cause_of
from .schema import meta

LOCK = 0x7472_7365_7373
"""The advisory lock of whoever writes to the database."""
_SETTINGS = (
    # A stricter setting of the server stays.
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')",
    # Who waits for the lock of a process that hangs gives up; a process that hangs loses the lock.
    "SET lock_timeout = '10s'",
    "SET idle_in_transaction_session_timeout = '10s'",
)
_CONNECT: dict[str, Any] = {
    # SQLAlchemy's "begin" event sends BEGIN itself, with what belongs to it, in one round trip.
    "autocommit": True,
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "trainsession",
    "client_encoding": "utf8",
}
_ROLLED_BACK = (codes.SerializationFailure, codes.DeadlockDetected)


class PostgresBackend(Backend):
    driver_errors = psycopg.Error
    remote = True
    upgrades_itself = False

    def __init__(self, url: sa.URL) -> None:
        self._url = url
        self.name = f"{url.database or url.username or ''} at {url.host or 'the local socket'}"
        self._key = f"writer/{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

    def engine(self, use: Use) -> sa.Engine:
        # What the URL says of these goes before.
        given = {name: value for name, value in _CONNECT.items() if name not in self._url.query}
        engine = sa.create_engine(self._url, connect_args=given, pool_size=4)

        @event.listens_for(engine, "connect")
        def _on_connect(connection: psycopg.Connection[Any], _record: Any) -> None:
            for setting in _SETTINGS:
                connection.execute(setting)

        @event.listens_for(engine, "begin")
        def _on_begin(connection: sa.Connection) -> None:
            begin = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SELECT pg_advisory_xact_lock({LOCK})"
            if use == "read":  # one state of the database for all that a function reads
                begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
            elif use == "write":
                mark = connection.info["mark"] = str(next(self._numbers))
                # Under the lock, so who takes this process' row away does it before or after the transaction.
                fence = "" if self.fence is None else f" FROM servers WHERE id = '{self.fence}'"
                begin += (
                    f"; INSERT INTO meta (key, value) SELECT '{self._key}', '{mark}'{fence} "
                    "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
                )
            cursor = _driver(connection).execute(begin.encode(), prepare=False)
            while cursor.nextset():
                pass
            if use == "write" and cursor.rowcount == 0:
                raise LeaseLost

        return engine

    def create(self) -> None:
        """The operator made it."""

    def keep_copy(self, revision: str) -> None:
        """The operator has backups; an upgrade is one transaction, all or nothing."""

    def in_transaction(self, connection: sa.Connection) -> bool:
        return _status(connection) in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def judge(self, error: BaseException) -> Verdict:
        cause = cause_of(error)
        if isinstance(cause, _ROLLED_BACK) or _is_lost(cause):
            return "again"
        return "blocked" if isinstance(cause, codes.LockNotAvailable | LeaseLost) else "final"

    def translate(self, error: Exception, verb: str) -> Exception:
        cause = cause_of(error)
        if not isinstance(cause, psycopg.Error):
            return error
        if isinstance(cause, codes.LockNotAvailable):
            return DatabaseUnavailable(f"the database cannot be {verb}: another process has been writing for too long")
        if isinstance(cause, psycopg.DataError):
            return InvalidRequest(
                "a text holds a character (U+0000), or a number is larger, than the database can store"
            )
        if isinstance(cause, codes.InsufficientPrivilege) or not isinstance(
            cause, psycopg.IntegrityError | psycopg.ProgrammingError
        ):
            # The server's own words, without SQL or parameters.
            words = cause.diag.message_primary or (str(cause).splitlines() or [type(cause).__name__])[0]
            kind = DatabaseUnavailable if self.judge(error) == "again" else StorageError
            return kind(f"the database cannot be {verb}: {words}")
        return error

    def mark(self, connection: sa.Connection) -> str | None:
        if _status(connection) != TransactionStatus.INTRANS:  # a COMMIT would be a silent ROLLBACK
            raise StorageError("the database gave the transaction up")
        return connection.info["mark"]

    def was_committed(self, mark: str) -> bool:
        # This transaction begins when the other one, if the server still has it, is over.
        with self._alone() as connection:
            last = connection.execute(sa.select(meta.c.value).where(meta.c.key == self._key)).scalar()
        return last == mark

    def close(self) -> None:
        with suppress(*self.errors), self._alone() as connection:
            connection.execute(sa.delete(meta).where(meta.c.key == self._key))

    @contextmanager
    def _alone(self) -> Iterator[sa.Connection]:
        """A transaction that leaves no mark."""
        engine = self.engine("migrate")
        try:
            with engine.begin() as connection:
                yield connection
        finally:
            engine.dispose()


def _is_lost(cause: object) -> bool:
    """Whether there is no connection (any more): the server rolls back what was not committed."""
    if not isinstance(cause, psycopg.OperationalError):
        return False
    state = cause.sqlstate
    return state is None or state[:2] == "08" or state in ("57P01", "57P02", "57P03", "57P05", "25P03", "53300")


def _status(connection: sa.Connection) -> TransactionStatus:
    return _driver(connection).info.transaction_status


def _driver(connection: sa.Connection) -> psycopg.Connection[Any]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver
