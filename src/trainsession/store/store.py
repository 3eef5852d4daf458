"""The database and the blobs of one home, and the rule of which bytes go where."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from ..errors import StorageError
from .backend import parse_address
from .blobs import blobs_of, parse_blobs
from .database import Database
from .schema import meta

logger = logging.getLogger(__name__)
T = TypeVar("T")
BLOBS_KEY = "blobs"
"""In ``meta``: name and checksum of a blob that says which blobs are those of a shared database."""
_DATABASE = "database"
INLINE_BYTES = 256 * 1024
"""Up to here bytes sit in their row (one fsync in all); above they become a blob (two more)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes in a row (``inline``) or in a blob, with their checksum."""

    sha256: str
    inline: bytes | None = None
    blob: str | None = None

    def columns(self, prefix: str) -> dict[str, Any]:
        return {f"{prefix}_sha256": self.sha256, prefix: self.inline, f"{prefix}_blob": self.blob}

    @classmethod
    def of_row(cls, row: Any, prefix: str) -> Stored:
        values = row._mapping
        return cls(values[f"{prefix}_sha256"], values[prefix], values[f"{prefix}_blob"])


class Store:
    """What a home directory holds: ``service.db`` and ``blobs/``, unless one or both are elsewhere.

    Args:
        database: URL of a PostgreSQL database; default: the file in the home.
        blobs: ``s3://bucket/prefix``; default: the directory in the home.
    """

    def __init__(self, home: Path, database: str | None = None, blobs: str | None = None) -> None:
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"the home {home} cannot be made: {error.strerror}") from error
        self.scratch = home / "tmp"
        """For files on their way, on the file system of the home."""
        where = parse_blobs(home, blobs)
        self.database = Database.open(parse_address(home, database))
        self.blobs = blobs_of(where, self.scratch)
        self._files = ThreadPoolExecutor(self.blobs.concurrency, thread_name_prefix="trainsession-files")
        self.write = self.database.write
        self.write_lazily = self.database.write_lazily
        self.read = self.database.read

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run blocking file work or a large encoding beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *args)

    async def keep(self, prefix: str, data: bytes) -> Stored:
        """Hold bytes for a row that is about to be written."""
        if len(data) <= INLINE_BYTES:
            return Stored(hashlib.sha256(data).hexdigest(), inline=data)
        blob = await self.in_thread(self.blobs.put, prefix, data)
        return Stored(blob.sha256, blob=blob.name)

    async def load(self, stored: Stored) -> bytes:
        """The bytes again, verified.

        Raises:
            StorageError: they are gone or were changed.
        """
        if stored.blob is not None:
            return await self.in_thread(self.blobs.get, stored.blob, stored.sha256)
        if stored.inline is None:
            raise StorageError("these bytes were deleted")
        return stored.inline

    async def claim_blobs(self, used: Callable[[sa.Connection], set[str]]) -> None:
        """Make the blobs this database's.

        Args:
            used: Names of the blobs that rows refer to.

        Raises:
            StorageError: they are another's, or those of this database are elsewhere.
        """

        def name(connection: sa.Connection) -> str:
            found = connection.execute(sa.select(meta.c.value).where(meta.c.key == _DATABASE)).scalar()
            if found is None:
                found = secrets.token_hex(16)
                connection.execute(sa.insert(meta).values(key=_DATABASE, value=found))
            return found

        mine = await self.write(name)
        owner = await self.in_thread(self.blobs.owner)
        if owner is None:
            names = await self.read(used)
            if names and not await self.in_thread(self.blobs.has, min(names)):
                raise StorageError(
                    f"the blobs of this database are elsewhere, not in {self.blobs.name}: give --blobs as before"
                )
            # A file's database is in the home with its blobs; a server's may be tried on a home that has a file.
            if names or not self.database.shared or not await self.in_thread(self._has_blobs):
                await self.in_thread(self.blobs.claim, mine)
            # Also where there were blobs: another server that starts at this moment may have claimed them.
            owner = await self.in_thread(self.blobs.owner)
        if owner != mine:
            raise StorageError(
                f"the blobs in {self.blobs.name} belong to another database; give this one blobs of its own (another "
                "prefix of --blobs, or another --home), or serve the database that they belong to"
            )

    def _has_blobs(self) -> bool:
        return next(self.blobs.older_than(-86_400), None) is not None

    async def check_blobs(self) -> None:
        """Make sure that these blobs are those of the database, by one that all who share it must find.

        Raises:
            StorageError: others that serve this database have theirs elsewhere.
        """
        known = sa.select(meta.c.value).where(meta.c.key == BLOBS_KEY)

        def agree(connection: sa.Connection, mine: str) -> str:
            first = connection.execute(known).scalar()
            if first is None:
                connection.execute(sa.insert(meta).values(key=BLOBS_KEY, value=mine))
            return first or mine

        value = await self.read(lambda connection: connection.execute(known).scalar())
        if value is None:
            blob = await self.in_thread(self.blobs.put, "shared", b"the blobs of this database")
            mine = f"{blob.name} {blob.sha256}"
            value = await self.write(lambda connection: agree(connection, mine))
            if value != mine:
                await self.drop_blobs([blob.name])
        try:
            await self.in_thread(self.blobs.get, *value.split(" "))
        except StorageError as error:
            raise StorageError(
                "the blobs of this database are elsewhere: all servers that share a database must share the directory "
                f"of blobs, too ({error.message})"
            ) from error

    async def drop_blobs(self, names: Sequence[str]) -> None:
        """Delete blobs that no row refers to. What cannot be deleted now, the janitor finds later."""

        def drop() -> None:
            for name in names:
                try:
                    self.blobs.delete(name)
                except StorageError as error:
                    logger.warning("a blob is deleted later: %s", error.message)
                    return

        if names:
            await self.in_thread(drop)

    @property
    def fsyncs(self) -> int:
        """Commits and blob fsyncs so far (a WAL checkpoint's own are not counted)."""
        return self.database.stats.commits + self.blobs.fsyncs

    async def close(self) -> None:
        await self.database.close()
        self._files.shutdown(wait=True)
