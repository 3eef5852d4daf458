"""Bring a database file to this version's schema, or say which version it needs."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .._version import __version__
from ..errors import IncompatibleVersion
from .schema import SCHEMA_VERSION

MIGRATIONS = Path(__file__).parent / "migrations"


def prepare(path: Path) -> None:
    """Create the file, or upgrade an older one in place after copying it beside itself.

    The copy is ``<name>.before-<new schema>``.

    Raises:
        IncompatibleVersion: the file's schema is newer than this version knows.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(path):
        _prepare(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: two that migrate would each find the other's tables. Not the lock of who serves."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _prepare(path: Path) -> None:
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    revision = schema_of(path)
    if revision == SCHEMA_VERSION:
        return
    if revision is not None:
        if revision > SCHEMA_VERSION:
            raise IncompatibleVersion(
                f"{path.name} has schema {revision}, written by trainsession {_writer(path)}; "
                f"this is trainsession {__version__} with schema {SCHEMA_VERSION}. "
                f"Install trainsession>={_writer(path)}, or use another home.",
                details={"schema": revision, "known": SCHEMA_VERSION, "needs": _writer(path)},
            )
        _copy(path, path.with_name(f"{path.name}.before-{SCHEMA_VERSION}"))
    migrate(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('written_by', ?)", (__version__,))


def migrate(path: Path, revision: str = "head") -> None:
    """Run the migrations up to ``revision``."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["path"] = path
    command.upgrade(config, revision)


def schema_of(path: Path) -> str | None:
    """The schema's revision; None for an empty file."""
    with closing(sqlite3.connect(path)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "alembic_version" not in tables:
            return None
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return None if row is None else str(row[0])


def _writer(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
    return "unknown" if row is None else str(row[0])


def _copy(source: Path, target: Path) -> None:
    """A consistent copy, the write-ahead log included."""
    descriptor = os.open(target, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
    os.close(descriptor)
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
