"""Whether the service can take work: its database and its blob store can be written."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import sqlalchemy as sa

from ..store.schema import meta
from ..store.store import Store
from .leases import Lease

logger = logging.getLogger(__name__)

FRESH_SECONDS = 2.0
"""An answer is given again for so long: whoever asks needs no key, and a check costs fsyncs."""
CHECK_SECONDS = 5.0
"""What takes longer has failed."""
_PROBED = "probed_at"


class Readiness:
    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._checking = asyncio.Lock()
        self._checked_at = float("-inf")
        self._found: dict[str, bool] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def check(self) -> dict[str, bool]:
        """Which of ``database`` and ``blobs`` took a write just now, or within the last two seconds; and
        ``lease``, whether no other server has replaced this one."""
        async with self._checking:
            if time.monotonic() >= self._checked_at + FRESH_SECONDS:
                parts = {"database": self._database, "blobs": self._blobs}
                done = await asyncio.gather(*(self._works(name, write) for name, write in parts.items()))
                self._found = dict(zip(parts, done, strict=True))
                self._checked_at = time.monotonic()
            return {**self._found, "lease": not self._lease.lost.is_set()}

    async def _database(self) -> None:
        def write(connection: sa.Connection) -> None:
            now = str(int(time.time()))
            again = sa.update(meta).where(meta.c.key == _PROBED).values(value=now)
            if connection.execute(again).rowcount == 0:
                connection.execute(sa.insert(meta).values(key=_PROBED, value=now))

        await self._store.write(write)

    async def _blobs(self) -> None:
        blob = await self._store.in_thread(self._store.blobs.put, "probe", b"probe")
        await self._store.drop_blobs([blob.name])

    async def _works(self, name: str, write: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        try:
            # One that hangs is waited for again: another would only take a thread more.
            task = self._under_way.get(name) or asyncio.create_task(write())
            self._under_way[name] = task
            try:
                await asyncio.wait_for(asyncio.shield(task), CHECK_SECONDS)
            finally:
                if task.done():
                    del self._under_way[name]
        except Exception as error:  # whatever it is, the answer is no; the reason is for the log alone
            logger.warning("not ready: %s cannot be written: %s", name, str(error) or type(error).__name__)
            return False
        return True
