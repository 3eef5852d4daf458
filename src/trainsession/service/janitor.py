"""What time does: results expire, sessions go idle, blobs nobody refers to are removed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from ..errors import TrainSessionError
from ..store.clock import earliest_now
from ..store.schema import checkpoints, frozen_weights, internal_snapshots, meta, operations
from ..store.store import BLOBS_KEY, Store
from .checkpoints import Checkpoints
from .lane import Lane
from .log import SAMPLE
from .session import Session
from .sessions import Sessions
from .settings import Settings

logger = logging.getLogger(__name__)


class Janitor:
    """Goes round every ``janitor_seconds``.

    Attributes:
        orphan_seconds: A blob without a row is only then garbage; before, its row may be about to be written.
    """

    orphan_seconds = 3600.0

    def __init__(
        self,
        store: Store,
        checkpoints_: Checkpoints,
        sessions: Sessions,
        lane_of: Callable[[str], Lane],
        retire: Callable[[Session], Awaitable[None]],
        settings: Settings,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints_
        self._sessions = sessions
        self._lane_of = lane_of
        self._retire = retire
        self._settings = settings

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.janitor_seconds)
            try:
                await self.round()
            except TrainSessionError as error:  # a full disk must not end the rounds
                logger.warning("housekeeping failed and will be tried again: %s", error.message)
            except Exception:  # nor must a fault of ours
                logger.exception("housekeeping failed and will be tried again")

    async def round(self) -> None:
        await self._expire_results()
        await self._checkpoints.remove_expired()
        await self._remove_orphans()
        async for session in self._sessions.unused(self._settings.close_after_idle_seconds):
            await self._in_turn(session, self._retire(session))
        now = time.monotonic()
        for session in self._sessions.in_memory:
            await self._in_turn(session, self._look_after(session, now))

    async def _in_turn(self, session: Session, work: Awaitable[None]) -> None:
        try:
            await work
        except TrainSessionError as error:  # of one session; the others have their turn
            logger.warning("housekeeping of session %s will be tried again: %s", session.id, error.message)
        except Exception:
            logger.exception("housekeeping of session %s met a fault and will be tried again", session.id)

    async def _look_after(self, session: Session, now: float) -> None:
        lane = self._lane_of(session.base_model)
        if session.resident and session.idle and session.used_at < now - self._settings.idle_seconds:
            await lane.evict(session)
        else:
            await lane.tidy(session)

    async def _expire_results(self) -> None:
        now = earliest_now()
        expired = sa.and_(
            operations.c.finished_at.is_not(None),
            sa.or_(
                operations.c.finished_at < now - self._settings.keep_result_seconds,
                operations.c.acked_at < now - self._settings.keep_acknowledged_seconds,
            ),
        )
        with_result = sa.and_(expired, sa.or_(operations.c.result.is_not(None), operations.c.result_blob.is_not(None)))
        samples = sa.and_(expired, operations.c.kind == SAMPLE)

        def write(connection: sa.Connection) -> list[str]:
            blobs = list(connection.execute(sa.select(operations.c.result_blob).where(with_result)).scalars())
            blobs += connection.execute(sa.select(operations.c.body_blob).where(samples)).scalars()
            # A training operation's row stays: its number remains taken, and a replay may need its body.
            connection.execute(sa.delete(operations).where(samples))
            connection.execute(sa.update(operations).where(with_result).values(result=None, result_blob=None))
            return [blob for blob in blobs if blob is not None]

        await self._store.drop_blobs(await self._store.write(write))

    async def _remove_orphans(self) -> None:
        await self._store.in_thread(self._store.blobs.forget_unfinished, self.orphan_seconds)
        old = await self._store.in_thread(lambda: set(self._store.blobs.older_than(self.orphan_seconds)))
        if old:
            await self._store.drop_blobs(sorted(old - await self._store.read(self.used)))

    @staticmethod
    def used(connection: sa.Connection) -> set[str]:
        """Names of the blobs that rows refer to."""
        names: set[str] = set()
        for column in (
            operations.c.body_blob,
            operations.c.result_blob,
            internal_snapshots.c.blob,
            frozen_weights.c.blob,
        ):
            names.update(connection.execute(sa.select(column).where(column.is_not(None))).scalars())
        shared = sa.select(meta.c.value).where(meta.c.key == BLOBS_KEY)
        names.update(value.split(" ")[0] for value in connection.execute(shared).scalars())
        for files in connection.execute(sa.select(checkpoints.c.files)).scalars():
            names.update(file["blob"] for file in files)
        return names
