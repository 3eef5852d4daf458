"""Which of several servers on one database runs what.

A *server* is one run of a service process. It has a row in ``servers`` with a lease, which it renews by
the database's clock; sessions and samples name the server that runs them. Every write begins by looking
whether the row is still there (`Database.fence`). Who finds a lease expired removes the row and takes over
what that server ran, in one transaction: from then on nothing that the old one still does is stored.

A database in a file has one process, which holds the home's lock: its server is called "" and has no lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import sqlalchemy as sa

from ..errors import InvalidRequest, ServiceUnavailable, StorageError, TrainSessionError
from ..store.backend import LeaseLost
from ..store.schema import operations, servers, sessions
from ..store.store import Store
from .ids import new_id
from .log import SAMPLE
from .settings import Settings

logger = logging.getLogger(__name__)
_NOW = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))
_ENDED = 0.0
"""``expires_at`` of a server that said goodbye."""


class OwnedElsewhere(ServiceUnavailable):
    """Another server runs this. Over HTTP the request is forwarded to it (`trainsession.server.forwarding`).

    Attributes:
        owner: Its id.
        address: Where it is reached; None: nowhere just now, as when it died and is yet to be replaced.
    """

    def __init__(self, owner: str, address: str | None) -> None:
        super().__init__("this is run by another server, which cannot be reached just now; try again")
        self.owner, self.address = owner, address


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What this server runs from now on, of so many others; ``samples`` are ids of operations."""

    servers: int = 0
    sessions: int = 0
    samples: Sequence[str] = ()


class Lease:
    """This process' place among the servers of its database.

    Args:
        address: URL at which the others reach this one, or None: then it must be the only one.

    Raises:
        InvalidRequest: ``address`` is no ``http(s)://host[:port]``.

    Attributes:
        server: The id of this run; "" on a database in a file.
        lost: Set when another server has taken over.
        closing: Set when this one ends: it renews while it saves what it has, and takes over nothing more.
        replaced: Servers that this one has taken over from.
    """

    def __init__(self, store: Store, settings: Settings, address: str | None = None) -> None:
        self._store = store
        self._settings = settings
        self._address = None if address is None else checked_address(address)
        self._peers: dict[str, str | None] = {}
        self._renewing: asyncio.Task[None] | None = None
        self.server = new_id("srv") if store.database.shared else ""
        self.lost = asyncio.Event()
        self.closing = False
        self.replaced = 0

    async def take(self, home: Path) -> TakenOver:
        """Register, and take over from the home's last server: its process is gone, as the caller has the home's lock.

        Raises:
            ServiceUnavailable: another server is there, and one of the two does not say where it is reached.
            StorageError: this one does not have the blobs of the others.
        """
        if not self.server:
            return TakenOver()
        await self._store.check_blobs()
        trace = home / "server"
        before = trace.read_text() if trace.exists() else ""

        def write(connection: sa.Connection) -> TakenOver:
            now = _now(connection)
            rows = connection.execute(sa.select(servers)).all()
            for row in rows:
                if row.id != before and row.expires_at > now and None in (row.address, self._address):
                    raise _cannot_be_reached(row.id, row.address, self._settings.lease_seconds)
            mine = {"id": self.server, "address": self._address, "started_at": now}
            connection.execute(sa.insert(servers).values(**mine, expires_at=now + self._settings.lease_seconds))
            # An expired lease is nothing yet: after an outage of the database all have expired.
            gone = {before, *(row.id for row in rows if row.expires_at == _ENDED)}
            return self._take_over(connection, [*gone, ""])

        taken = await self._store.write(write)
        try:
            trace.write_text(self.server)
        except OSError as error:
            raise StorageError(f"{trace} cannot be written: {error.strerror}") from error
        self._store.database.fence(self.server)
        return taken

    def keep(self, take_up: Callable[[TakenOver], Awaitable[None]]) -> None:
        """Renew until `release`, and take over from servers whose lease expired.

        Args:
            take_up: Runs what was taken over; called again where it fails.
        """
        if self.server:
            self._renewing = asyncio.create_task(self._keep(take_up), name="lease")

    async def _keep(self, take_up: Callable[[TakenOver], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as taking_up:
            while True:
                await asyncio.sleep(self._settings.renew_seconds)
                try:
                    taken = await self._store.write(self._renew)
                except LeaseLost as error:
                    logger.error("%s: %s", self.server, error.message)
                    self.lost.set()
                    return
                except Exception as error:  # whatever it is: without renewals all would be lost
                    logger.warning("the lease cannot be renewed yet: %s", _said(error))
                    continue
                if taken is not None:
                    self.replaced += taken.servers
                    logger.warning("took over %d sessions and %d samples", taken.sessions, len(taken.samples))
                    # Beside this loop: while much is loaded the lease must not expire.
                    taking_up.create_task(self._until_done(take_up, taken))

    async def _until_done(self, take_up: Callable[[TakenOver], Awaitable[None]], taken: TakenOver) -> None:
        while not self.lost.is_set():
            try:
                await take_up(taken)
                return
            except Exception as error:  # whatever it is, the renewals go on, and nobody else will do this
                logger.warning("what was taken over cannot be run yet: %s", _said(error))
                await asyncio.sleep(self._settings.retry_seconds)

    async def release(self) -> None:
        """Say goodbye, so that another server need not wait for the lease to expire. The last write of this one."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        mine = sa.update(servers).where(servers.c.id == self.server).values(expires_at=_ENDED)
        with suppress(StorageError):  # then it is lost, or expires
            await self._store.write(lambda connection: connection.execute(mine))

    # --- who runs it -------------------------------------------------------------------------

    async def check(self, owner: str) -> None:
        """Raise `OwnedElsewhere` where that is not this server."""
        if owner == self.server:
            return
        if owner not in self._peers:  # it may have come since the last renewal
            query = sa.select(servers.c.address).where(servers.c.id == owner)
            row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
            if row is None:
                raise OwnedElsewhere(owner, None)
            self._peers[owner] = row.address
        raise OwnedElsewhere(owner, self._peers[owner])

    async def check_operations(self, project: str, ids: Sequence[str]) -> None:
        """Raise `OwnedElsewhere` where one other server runs all of these, or ran them and is still there."""
        if not self.server or not ids:
            return
        owner = sa.case((operations.c.kind == SAMPLE, operations.c.owner), else_=sessions.c.owner)
        query = sa.select(owner).distinct().select_from(operations)
        query = query.outerjoin(sessions, sessions.c.id == operations.c.session_id)
        query = query.where(operations.c.project == project, operations.c.id.in_(list(ids)))
        query = query.where(sa.or_(operations.c.state == "queued", owner.in_(sa.select(servers.c.id))))
        owners = await self._store.read(lambda connection: connection.execute(query).scalars().all())
        if len(owners) == 1:
            await self.check(owners[0])

    def knows(self, owner: str) -> bool:
        """Whether that server was there at the last renewal."""
        return owner in self._peers

    # --- inside ------------------------------------------------------------------------------

    def _renew(self, connection: sa.Connection) -> TakenOver | None:
        now = _now(connection)
        rows = {row.id: row for row in connection.execute(sa.select(servers))}
        # Who was late may have slept, or the database was away: the others have their turn first.
        on_time = rows.pop(self.server).expires_at > now
        mine = sa.update(servers).where(servers.c.id == self.server)
        connection.execute(mine.values(expires_at=now + self._settings.lease_seconds))
        # Dated by a clock that has been set back since: it would stand for a dead server for as long. Who lives renews
        # long before, whatever lease it was configured with.
        farthest = now + 4 * self._settings.lease_seconds
        ahead = sa.update(servers).where(servers.c.expires_at > farthest, servers.c.id != self.server)
        connection.execute(ahead.values(expires_at=farthest))
        gone = [row.id for row in rows.values() if row.expires_at == _ENDED or (on_time and row.expires_at <= now)]
        self._peers = {row.id: row.address for row in rows.values() if row.id not in gone}
        return self._take_over(connection, gone) if gone and not self.closing else None

    def _take_over(self, connection: sa.Connection, gone: Sequence[str]) -> TakenOver:
        connection.execute(sa.delete(servers).where(servers.c.id.in_(gone)))
        running = sa.and_(sessions.c.owner.in_(gone), sessions.c.state != "closed")
        moved = sa.update(sessions).where(running).values(owner=self.server)
        queued = sa.and_(operations.c.kind == SAMPLE, operations.c.state == "queued", operations.c.owner.in_(gone))
        drawn = sa.update(operations).where(queued).values(owner=self.server)
        return TakenOver(
            len(gone),
            connection.execute(moved).rowcount,
            list(connection.execute(drawn.returning(operations.c.id)).scalars()),
        )


def checked_address(address: str) -> str:
    """Without a slash at its end. Raises `InvalidRequest`."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
        raise InvalidRequest(
            f"advertise: expected http://host[:port] or https://host[:port], got {address!r}",
            details={"key": "advertise"},
        )
    return address.rstrip("/")


def _cannot_be_reached(other: str, address: str | None, seconds: float) -> ServiceUnavailable:
    which = "that one" if address is None else "this one"
    return ServiceUnavailable(
        f"another server ({other}) works on this database, and {which} does not say where it can be reached: start "
        "each with --advertise and the URL at which the others reach it. If the other one was killed just now, "
        f"try again in {seconds:g} s"
    )


def _said(error: Exception) -> str:
    return error.message if isinstance(error, TrainSessionError) else repr(error)


def _now(connection: sa.Connection) -> float:
    """The database's clock: those of several machines may differ."""
    return float(connection.execute(_NOW).scalar_one())
