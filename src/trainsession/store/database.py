"""A database: a single writer thread that commits in groups, and readers beside it.

A write is a function of a connection. The writer runs all functions that wait in one transaction,
each in its own savepoint, so that one fsync makes many of them durable and one that fails takes
no other with it. A function may be run more than once; what it did before was rolled back then.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import sqlalchemy as sa

from ..errors import DatabaseUnavailable, NotFound, ServiceUnavailable, StorageError
from .backend import Address, Backend, Verdict, backend_of, parse_address
from .prepared import Prepared, driver_of
from .upgrade import prepare

T = TypeVar("T")
WriteFunction = Callable[[sa.Connection], T]
_MAX_GROUP = 1024
"""Write functions in one transaction."""
_PAUSES = (0.05, 0.4)
"""Seconds before a transaction that was rolled back is run again."""
_ASK_SECONDS = 0.2
"""Between two attempts to learn whether a commit took place."""
_CLOSING_SECONDS = 5.0
"""A service that closes waits this much longer to learn it."""


@dataclass(slots=True)
class _Write:
    function: Callable[[sa.Connection], Any]
    future: asyncio.Future[Any] | None
    """None: nobody waits, so it needs no commit of its own."""
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class WriterStats:
    """What the writer did; a commit is one fsync (on SQLite ``synchronous=FULL`` in WAL mode)."""

    commits: int = 0
    writes: int = 0
    errors: int = field(default=0)


class Database:
    """A database; `open`, then `write` and `read` from one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.stats = WriterStats()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._lazy: list[_Write] = []
        self._lazy_lock = threading.Lock()
        self._closed = False
        self._engine = backend.engine("read")
        self._writer = backend.engine("write")
        self._writing: sa.Connection | None = None
        """The writer thread's own, kept from one transaction to the next until the disk fails."""
        self._in_doubt = False
        """The writer thread waits to learn whether a commit took place."""
        self._looking_up: sa.Connection | None = None
        """The event loop's own; see `look_up`."""
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="trainsession-read")
        self._seekers = ThreadPoolExecutor(2, thread_name_prefix="trainsession-look-up") if backend.remote else None
        self._thread = threading.Thread(target=self._write_loop, name="trainsession-writer", daemon=True)

    @classmethod
    def open(cls, address: Address) -> Self:
        """Open a database; create or upgrade a file, fill an empty database of a server.

        Raises:
            StorageError: it cannot be created, reached or written.
            IncompatibleVersion: a newer version wrote it, or it is on a server and an older one did.
        """
        backend = backend_of(address)
        prepare(backend)
        database = cls(backend)
        database._thread.start()
        return database

    @property
    def shared(self) -> bool:
        """Whether several processes may serve it at once."""
        return self._backend.remote

    def fence(self, server: str) -> None:
        """Write from now on only while ``servers`` has this row: a process that lost it changes nothing more."""
        self._backend.fence = server

    async def write(self, function: WriteFunction[T]) -> T:
        """Run ``function`` in the next transaction; durable when this returns.

        Raises:
            StorageError: the disk is full or not writable; nothing of the function remains.
            DatabaseUnavailable: the server is out of reach; nothing of it remains either.
            LeaseLost: this process' row is gone (`fence`).
        """
        if self._closed:
            raise ServiceUnavailable("the service is closing")
        if self._in_doubt:
            raise DatabaseUnavailable("the database cannot be reached now")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Write(function, future))
        return await future

    def write_lazily(self, function: WriteFunction[Any]) -> None:
        """Run ``function`` within the next transaction that somebody waits for, or at `close`."""
        with self._lazy_lock:
            self._lazy.append(_Write(function, None))

    async def read(self, function: Callable[[sa.Connection], T]) -> T:
        """Run ``function`` on a connection that sees what was committed; it may be run more than once.

        Raises:
            StorageError: the database cannot be read.
        """
        if self._closed:
            raise ServiceUnavailable("the service is closing")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, function)

    def _read(self, function: Callable[[sa.Connection], T]) -> T:
        for pause in (*_PAUSES, None):
            try:
                with self._engine.connect() as connection:
                    try:
                        return function(connection)
                    except self._backend.errors as error:
                        if self._backend.judge(error) == "again":
                            connection.invalidate()
                        raise
            except self._backend.errors as error:
                if pause is None or self._backend.judge(error) != "again":
                    raise self._backend.translate(error, "read") from error
                # The connections in the pool are of before the server's last restart, too.
                self._engine.dispose()
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def look_up(self, statement: Prepared, call: Mapping[str, Any]) -> list[Any]:
        """The rows of a statement that finds one or two by their key, as of the last commit of any process.

        On a file it runs on the event loop itself: that takes some 10 microseconds and no lock, the way
        to a thread and back ten times as long, and it may not stand behind a long read.

        Raises:
            StorageError: the database cannot be read.
        """
        if self._closed:
            raise ServiceUnavailable("the service is closing")
        if self._seekers is not None:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._seekers, self._read, lambda c: statement.rows(c, call))
        try:
            if self._looking_up is None:
                self._looking_up = self._engine.connect()
            return statement.rows(self._looking_up, call)
        except self._backend.errors as error:
            raise self._backend.translate(error, "read") from error

    async def close(self) -> None:
        """Finish the writes that wait, then close the database."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        for pool in (self._readers, self._seekers):
            if pool is not None:
                pool.shutdown(wait=True)
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
        self._backend.close()

    def _transact(self, group: Sequence[_Write]) -> None:
        """Run a group to its end: every item has its result or its error then."""
        verdict: Verdict = "final"
        error: Exception | None = None
        for pause in (0.0, *_PAUSES):
            if pause:
                time.sleep(pause)
            error = self._attempt(group)
            if error is None:
                self.stats.commits += 1
                self.stats.writes += len(group)
                return
            verdict = self._backend.judge(error)
            if verdict != "again":
                break
            self._let_go()
        assert error is not None
        if verdict == "final" and len(group) > 1:
            # A fault of the disk: it is tried one by one, so that what can be written is.
            self._let_go()
            for item in group:
                self._transact([item])
            return
        for item in group:  # a single function's own error among them
            item.error = self._backend.translate(error, "written")
        if isinstance(group[0].error, StorageError):
            self.stats.errors += 1
            self._let_go()
            if verdict == "final":
                self._backend.bury(self._writer)

    def _attempt(self, group: Sequence[_Write]) -> Exception | None:
        """One transaction of all; None if it was committed."""
        mark: str | None = None
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
                        self._run_in_savepoint(connection, item)
                mark = self._backend.mark(connection)
                transaction.commit()
            return None
        except _TransactionLost as lost:
            return lost.error
        except Exception as error:
            if mark is not None and self._backend.judge(error) == "again" and self._was_committed(mark):
                return None
            return error

    def _was_committed(self, mark: str) -> bool:
        """Ask until there is an answer. Without one, a write would be lost or done twice."""
        self._let_go()
        self._in_doubt = True
        deadline: float | None = None
        try:
            while deadline is None or time.monotonic() < deadline:
                try:
                    return self._backend.was_committed(mark)
                except self._backend.errors:
                    time.sleep(_ASK_SECONDS)
                if self._closed and deadline is None:
                    deadline = time.monotonic() + _CLOSING_SECONDS
            return False
        finally:
            self._in_doubt = False

    def _run_in_savepoint(self, connection: sa.Connection, item: _Write) -> None:
        driver = driver_of(connection)
        driver.execute("SAVEPOINT item")
        item.error = None
        try:
            item.result = item.function(connection)
        except Exception as error:  # handed to whoever awaits this write
            if self._backend.judge(error) == "again" or not self._backend.in_transaction(connection):
                raise _TransactionLost(error) from error
            item.error = self._backend.translate(error, "written")
            driver.execute("ROLLBACK TO item")
        driver.execute("RELEASE item")

    def _let_go(self) -> None:
        """Close the writer's connection, whatever state it is in."""
        if self._writing is not None:
            self._writing.invalidate()
            self._writing.close()
            self._writing = None
        self._writer.dispose()


@asynccontextmanager
async def opened(home: Path, url: str | None = None, *, create: bool = True) -> AsyncIterator[Database]:
    """The database of a home, for a command that works on it, beside the service that may run there.

    Args:
        url: Of a PostgreSQL database; default: the file in the home.
        create: Make the file, and the home, where there is none.

    Raises:
        NotFound: there is none, and it is not to be made.
        StorageError, IncompatibleVersion: see `Database.open`.
    """
    address = parse_address(home, url)
    if not create and isinstance(address, Path) and not address.exists():
        raise NotFound(f"no trainsession home is at {home}", details={"home": str(home)})
    database = Database.open(address)
    try:
        yield database
    finally:
        await database.close()


class _TransactionLost(Exception):
    """The whole transaction is gone, not only what one function did: on SQLite when the disk is full."""

    def __init__(self, error: Exception) -> None:
        self.error = error


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
