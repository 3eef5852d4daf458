"""Money and time: the prices, engine time, the usage report."""

from __future__ import annotations

import time

from ..engine.api import EngineHandle
from ..store.store import Store
from ..types import Usage, UsageReport
from .engine_time import EngineTime
from .prices import PriceTable
from .usage import UsageQuery, read_report

_FLUSH_SECONDS = 5.0


def usage_to_wire(usage: Usage) -> dict[str, float]:
    return {**usage.tokens, "cost": usage.cost}


class Meter:
    """Knows the prices and measures how long engines worked for whom."""

    def __init__(self, store: Store, prices: PriceTable) -> None:
        self._store = store
        self.prices = prices
        self._time = EngineTime()
        self._flushed_at = 0.0

    def enter(self, handle: EngineHandle, project: str, session_id: str, base_model: str) -> None:
        """A call for this session goes to the engine; every `enter` needs its `leave`."""
        self._time.enter(handle, (project, session_id, base_model))

    def leave(self, handle: EngineHandle, project: str, session_id: str, base_model: str) -> None:
        self._time.leave(handle, (project, session_id, base_model))

    def flush(self, at_once: bool = False) -> None:
        """Now and then, hand the seconds measured so far to the next transaction; a crash loses the last."""
        now = time.monotonic()
        if at_once or now >= self._flushed_at + _FLUSH_SECONDS:
            self._flushed_at = now
            if (write := self._time.take()) is not None:
                self._store.write_lazily(write)

    async def usage(self, query: UsageQuery) -> UsageReport:
        """Everything metered up to now that the query asks for.

        Raises:
            NotFound: no such session in this project.
            InvalidRequest, LimitExceeded: see `UsageQuery` and `read_report`.
        """
        write = self._time.take()
        # Also with nothing of its own to write: earlier seconds may wait for a transaction to come.
        await self._store.write(write if write is not None else lambda connection: None)
        return await self._store.read(lambda connection: read_report(connection, query, self.prices))
