"""What differs between the databases, in one place: `sqlite` and `postgres` are its two sides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy import exc

from ..errors import DatabaseUnavailable, InvalidRequest, StorageError

DATABASE_FILE = "service.db"
Address: TypeAlias = Path | sa.URL
"""An SQLite file, or where a PostgreSQL database is."""
Use = Literal["write", "read", "migrate"]
Verdict = Literal["final", "again", "blocked"]
"""Of a transaction that failed: it would fail again; it left nothing behind and may be run again; no
other could be run now either."""


class LeaseLost(DatabaseUnavailable):
    """Another server found this one's lease expired and has its sessions now; nothing is written here any more."""


class Backend(ABC):
    """One database, of one kind."""

    name: str
    """How it is called in messages: never with a password."""
    driver_errors: ClassVar[type[Exception]]
    """Of the driver itself, which `Prepared` statements run on."""
    remote: ClassVar[bool]
    """Behind a network, so nothing may wait for it on the event loop."""
    upgrades_itself: ClassVar[bool]
    """An older schema is upgraded when it is opened, instead of asking for `trainsession db upgrade`."""
    fence: str | None = None
    """A row of ``servers``: once it is gone no ``write`` transaction begins any more."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (exc.DBAPIError, self.driver_errors)

    @abstractmethod
    def engine(self, use: Use) -> sa.Engine:
        """Connections for one use. A transaction of ``write`` or ``migrate`` is the database's only one
        of its kind, in all processes, from its begin to its end: so what it reads first is still so when
        it writes."""

    @abstractmethod
    def create(self) -> None:
        """Make the empty database, where that is ours to do."""

    def preparing(self) -> AbstractContextManager[None]:
        """Around the upgrade: two processes that migrate would each find the other's tables."""
        return nullcontext()

    @abstractmethod
    def keep_copy(self, revision: str) -> None:
        """Before an upgrade to ``revision``: a copy of what is there, where that is ours to do."""

    def bury(self, engine: sa.Engine) -> None:
        """A transaction that was said to have failed must not come back after a crash."""
        return

    @abstractmethod
    def in_transaction(self, connection: sa.Connection) -> bool:
        """Whether the transaction is still there, so that its savepoints are."""

    @abstractmethod
    def judge(self, error: BaseException) -> Verdict: ...

    @abstractmethod
    def translate(self, error: Exception, verb: str) -> Exception:
        """A fault of the database becomes `StorageError`; a broken constraint stays what it is.

        Args:
            verb: What could not be done, for example ``written``.
        """

    def mark(self, connection: sa.Connection) -> str | None:
        """What tells this transaction from all others; None where a commit that fails left nothing.

        Raises:
            StorageError: it cannot be committed any more.
        """
        return None

    def was_committed(self, mark: str) -> bool:
        """Whether the transaction of this mark was committed; waits until it has ended."""
        raise AssertionError(f"{self.name} leaves no marks, so nobody has one to ask about: {mark}")

    def close(self) -> None:
        """Nothing will be written any more: remove what marks left."""
        return


def parse_address(home: Path, database: str | None) -> Address:
    """Where the database of a home is: the file in it, or what a PostgreSQL URL says.

    Args:
        database: ``postgresql://user:password@host:port/name``; None or "": the file.

    Raises:
        InvalidRequest: not such a URL. It is not repeated, as it may hold a password.
    """
    if not database:
        return home / DATABASE_FILE
    try:
        url = sa.make_url(database)
    except (exc.ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise InvalidRequest(
            "database: expected postgresql://user:password@host:port/name", details={"key": "database"}
        )
    return url.set(drivername="postgresql+psycopg")


def backend_of(address: Address) -> Backend:
    """The side that an address belongs to; only what is used is imported.

    Raises:
        StorageError: a PostgreSQL database, and its driver is not installed.
    """
    if isinstance(address, Path):
        from .sqlite import SqliteBackend

        return SqliteBackend(address)
    try:
        from .postgres import PostgresBackend
    except ModuleNotFoundError as error:
        message = f"a PostgreSQL database needs {error.name}: pip install 'trainsession[postgres]'"
        raise StorageError(message) from None
    return PostgresBackend(address)


def cause_of(error: BaseException) -> Any:
    """The driver's own error within SQLAlchemy's."""
    return error.orig if isinstance(error, exc.DBAPIError) else error
