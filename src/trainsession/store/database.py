"""One SQLite file: a single writer thread that commits in groups, and readers beside it.

A write is a function of a connection. The writer runs all functions that wait in one transaction,
each in its own savepoint, so that one fsync makes many of them durable and one that fails takes
no other with it.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import sqlite

from ..errors import NotFound, ServiceUnavailable, StorageError
from .upgrade import prepare

T = TypeVar("T")
WriteFunction = Callable[[sa.Connection], T]
DATABASE_FILE = "service.db"
_MAX_GROUP = 1024
"""Write functions in one transaction."""


@dataclass(slots=True)
class _Write:
    function: Callable[[sa.Connection], Any]
    future: asyncio.Future[Any] | None
    """None: nobody waits, so it needs no commit of its own."""
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class WriterStats:
    """What the writer did; with ``synchronous=FULL`` in WAL mode a commit is one fsync."""

    commits: int = 0
    writes: int = 0
    errors: int = field(default=0)


class Prepared:
    """A statement compiled once, run on the driver itself: SQLAlchemy's own path costs ten times what
    SQLite needs for one of the short statements that every operation runs.

    Args:
        columns: Of an ``INSERT``, those that each call gives.
    """

    def __init__(self, statement: sa.ClauseElement, columns: Sequence[str] | None = None) -> None:
        dialect = sqlite.dialect()
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        assert isinstance(compiled, sa.sql.compiler.SQLCompiler)
        self._sql = compiled.string
        self._parameters = [
            (name, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect))
            for name in compiled.positiontup or ()
        ]

    def run(self, connection: sa.Connection, *calls: Mapping[str, Any]) -> None:
        """Once for each call's parameters."""
        _driver(connection).executemany(self._sql, map(self._bound, calls))

    def rows(self, connection: sa.Connection, call: Mapping[str, Any]) -> list[Any]:
        """The rows as plain tuples, so only of columns that SQLite's own types hold."""
        return _driver(connection).execute(self._sql, self._bound(call)).fetchall()

    def _bound(self, call: Mapping[str, Any]) -> list[Any]:
        return [call[name] if process is None else process(call[name]) for name, process in self._parameters]


class Database:
    """A database file; `open`, then `write` and `read` from one event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stats = WriterStats()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._lazy: list[_Write] = []
        self._lazy_lock = threading.Lock()
        self._closed = False
        self._engine = connect(path)
        self._writer = connect(path, "BEGIN IMMEDIATE")
        self._writing: sa.Connection | None = None
        """The writer thread's own, kept from one transaction to the next until the disk fails."""
        self._looking_up: sa.Connection | None = None
        """The event loop's own; see `look_up`."""
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="trainsession-read")
        self._thread = threading.Thread(target=self._write_loop, name="trainsession-writer", daemon=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open, create or upgrade the file.

        Raises:
            StorageError: it cannot be created or written.
            IncompatibleVersion: a newer version wrote it.
        """
        try:
            prepare(path)
            database = cls(path)
            with database._engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1 FROM meta LIMIT 1")
        except (exc.DBAPIError, sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot open the database {path.name}: {_reason(error)}") from error
        database._thread.start()
        return database

    async def write(self, function: WriteFunction[T]) -> T:
        """Run ``function`` in the next transaction; durable when this returns.

        Raises:
            StorageError: the disk is full, or not writable; nothing of the function remains.
        """
        if self._closed:
            raise ServiceUnavailable("the service is closing")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Write(function, future))
        return await future

    def write_lazily(self, function: WriteFunction[Any]) -> None:
        """Run ``function`` within the next transaction that somebody waits for, or at `close`."""
        with self._lazy_lock:
            self._lazy.append(_Write(function, None))

    async def read(self, function: Callable[[sa.Connection], T]) -> T:
        """Run ``function`` on a connection that sees what was committed."""

        def run() -> T:
            try:
                with self._engine.connect() as connection:
                    return function(connection)
            except exc.DBAPIError as error:
                raise StorageError(f"the database cannot be read: {_reason(error)}") from error

        if self._closed:
            raise ServiceUnavailable("the service is closing")
        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def look_up(self, statement: Prepared, call: Mapping[str, Any]) -> list[Any]:
        """The rows of a statement that finds one or two by their key, as of the last commit of any process.

        It runs on the event loop itself: that takes some 10 microseconds and no lock, the way to a
        thread and back ten times as long, and it may not stand behind a long read.

        Raises:
            StorageError: the file cannot be read.
        """
        if self._closed:
            raise ServiceUnavailable("the service is closing")
        try:
            if self._looking_up is None:
                self._looking_up = self._engine.connect()
            return statement.rows(self._looking_up, call)
        except (exc.DBAPIError, sqlite3.Error) as error:
            raise StorageError(f"the database cannot be read: {_reason(error)}") from error

    async def close(self) -> None:
        """Finish the writes that wait, then close the file."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._readers.shutdown(wait=True)
        if self._looking_up is not None:
            self._looking_up.close()
        self._engine.dispose()

    def _write_loop(self) -> None:
        closing = False
        while not closing:
            group: list[_Write] = []
            item = self._queue.get()
            while True:
                if item is None:
                    closing = True
                    break
                group.append(item)
                if len(group) >= _MAX_GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            with self._lazy_lock:
                lazy, self._lazy = self._lazy, []
            group = lazy + group
            if group:
                self._transact(group)
                _deliver(group)
                with self._lazy_lock:  # nobody hears of their errors, so they are tried again
                    self._lazy[:0] = [item for item in lazy if isinstance(item.error, StorageError)]
        self._let_go()

    def _transact(self, group: Sequence[_Write]) -> None:
        try:
            if self._writing is None:
                self._writing = self._writer.connect()
            connection = self._writing
            with connection.begin() as transaction:
                if len(group) == 1:  # the transaction itself is its savepoint
                    group[0].error = None
                    group[0].result = group[0].function(connection)
                else:
                    for item in group:
                        _run_in_savepoint(connection, item)
                transaction.commit()
            self.stats.commits += 1
            self.stats.writes += len(group)
        except Exception as error:
            # Of a group only a fault of the disk gets here: then it is tried one by one, so that
            # what can be written is. A single function's error goes to whoever awaits it.
            if len(group) > 1:
                self._let_go()
                for item in group:
                    self._transact([item])
                return
            group[0].error = _translate(error)
            if isinstance(group[0].error, StorageError):
                self.stats.errors += 1
                self._let_go()

    def _let_go(self) -> None:
        """Close the writer's connection, whatever state it is in."""
        if self._writing is not None:
            self._writing.invalidate()
            self._writing.close()
            self._writing = None
        self._writer.dispose()


@asynccontextmanager
async def opened(home: Path, *, create: bool = True) -> AsyncIterator[Database]:
    """The database of a home, for a command that works on it, beside the service that may run there.

    Raises:
        NotFound: there is none, and it is not to be made.
        StorageError, IncompatibleVersion: see `Database.open`.
    """
    if not create and not (home / DATABASE_FILE).exists():
        raise NotFound(f"no trainsession home is at {home}", details={"home": str(home)})
    database = Database.open(home / DATABASE_FILE)
    try:
        yield database
    finally:
        await database.close()


class _TransactionLost(Exception):
    """SQLite gave up the whole transaction, as it does on a full disk or an I/O error."""


def _run_in_savepoint(connection: sa.Connection, item: _Write) -> None:
    driver = _driver(connection)
    driver.execute("SAVEPOINT item")
    item.error = None
    try:
        item.result = item.function(connection)
    except Exception as error:  # handed to whoever awaits this write
        if not driver.in_transaction:
            raise _TransactionLost from error
        item.error = _translate(error)
        driver.execute("ROLLBACK TO item")
    driver.execute("RELEASE item")


def connect(path: Path, begin: str = "BEGIN") -> sa.Engine:
    """An engine whose transactions begin explicitly (pysqlite's own rules would defer them)."""
    engine = sa.create_engine(f"sqlite:///{path}")

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


def _driver(connection: sa.Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def _deliver(group: Sequence[_Write]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
    for item in group:
        if item.future is not None:
            by_loop.setdefault(item.future.get_loop(), []).append(item)
    for loop, items in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, items)


def _resolve(items: Sequence[_Write]) -> None:
    for item in items:
        if item.future is None or item.future.done():
            continue
        if item.error is not None:
            item.future.set_exception(item.error)
        else:
            item.future.set_result(item.result)


def _translate(error: Exception) -> Exception:
    """A fault of the disk becomes `StorageError`; a broken constraint stays what it is."""
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(cause, sqlite3.IntegrityError | sqlite3.ProgrammingError) or not isinstance(cause, sqlite3.Error):
        return error
    return StorageError(f"the database cannot be written: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The driver's own words, without SQL or parameters."""
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause)
