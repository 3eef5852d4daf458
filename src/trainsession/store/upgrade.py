"""Bring a database to this version's schema, or say which version it needs."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from .._version import __version__
from ..errors import IncompatibleVersion, StorageError
from .backend import Backend, cause_of
from .schema import SCHEMA_VERSION, meta

MIGRATIONS = Path(__file__).parent / "migrations"


def prepare(backend: Backend, *, upgrade: bool = False) -> str | None:
    """Build the schema in an empty database; upgrade an older one, or ask for that.

    Args:
        upgrade: Upgrade an older one, whatever its kind. By default only a file is, after it was copied.

    Returns:
        The revision that it had; None for an empty one.

    Raises:
        IncompatibleVersion: the schema is newer than this version knows, or older and not upgraded.
        StorageError: it cannot be created, reached, read or written.
    """
    try:
        backend.create()
        with backend.preparing():
            return _prepare(backend, upgrade)
    except (*backend.errors, OSError) as error:
        ours = backend.translate(error, "opened")
        if isinstance(ours, StorageError):
            raise ours from error
        raise StorageError(f"the database {backend.name} cannot be opened: {cause_of(error)}") from error


def _prepare(backend: Backend, upgrade: bool) -> str | None:
    revision, writer = _state(backend)
    if revision == SCHEMA_VERSION:
        return revision
    if revision is not None:
        if revision > SCHEMA_VERSION:
            raise IncompatibleVersion(
                f"{backend.name} has schema {revision}, written by trainsession {writer}; "
                f"this is trainsession {__version__} with schema {SCHEMA_VERSION}. "
                f"Install trainsession>={writer}, or use another home or database.",
                details={"schema": revision, "known": SCHEMA_VERSION, "needs": writer},
            )
        if not (upgrade or backend.upgrades_itself):
            raise IncompatibleVersion(
                f"{backend.name} has schema {revision}, and trainsession {__version__} needs {SCHEMA_VERSION}. "
                "Back it up, stop what uses it, then run `trainsession db upgrade`.",
                details={"schema": revision, "known": SCHEMA_VERSION},
            )
        backend.keep_copy(SCHEMA_VERSION)
    migrate(backend)
    return revision


def migrate(backend: Backend, revision: str = "head") -> None:
    """Run the migrations up to ``revision``, in one transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = config.attributes["engine"] = backend.engine("migrate")
    try:
        command.upgrade(config, revision)
        with engine.begin() as connection:
            connection.execute(sa.delete(meta).where(meta.c.key == "written_by"))
            connection.execute(sa.insert(meta).values(key="written_by", value=__version__))
    finally:
        engine.dispose()


def schema_of(backend: Backend) -> str | None:
    """The schema's revision; None for an empty database."""
    return _state(backend)[0]


def _state(backend: Backend) -> tuple[str | None, str]:
    """Revision, and the version that wrote it."""
    engine = backend.engine("read")
    try:
        with engine.connect() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                return None, "unknown"
            revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            writer = connection.execute(sa.select(meta.c.value).where(meta.c.key == "written_by")).scalar()
            return revision, writer or "unknown"
    finally:
        engine.dispose()
