"""Who waits for which result: the long poll, without polling."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import NotFound
from ..limits import LIMITS
from . import tracing
from .leases import Lease
from .log import OperationLog
from .requests import OperationResult, Results

_REMEMBERED = 2_048
"""Results held in memory beside the log; a poll usually finds its own here."""


_AWAY_SECONDS = 0.2
"""Between two looks at the log for what other servers run."""


class _Open(NamedTuple):
    """An operation that will end in this process."""

    project: str
    kind: str
    position: Callable[[], int]
    since: float


class Outcomes:
    """Results of this process' operations, and the events of those who wait for them.

    Args:
        lease: Says who runs what is not run here.
        ended: Told the kind, end state and seconds of each operation that ends.
    """

    def __init__(self, log: OperationLog, lease: Lease, ended: Callable[[str, str, float], None]) -> None:
        self._log = log
        self._lease = lease
        self._ended = ended
        self._recent: OrderedDict[str, tuple[str, OperationResult]] = OrderedDict()
        self._open: dict[str, _Open] = {}
        self._waiters: dict[str, set[asyncio.Event]] = {}

    def expect(self, project: str, operation_id: str, kind: str, position: Callable[[], int]) -> None:
        """An operation will end in this process; ``position`` says how many stand before it."""
        self._open[operation_id] = _Open(project, kind, position, time.monotonic())

    def publish(self, result: OperationResult) -> None:
        """An operation has ended, durably."""
        entry = self._open.pop(result.operation_id, None)
        if entry is not None:
            seconds = time.monotonic() - entry.since
            self._ended(entry.kind, result.state, seconds)
            tracing.operation(result.operation_id, entry.kind, result.state, seconds)
            self._recent[result.operation_id] = (entry.project, result)
            while len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
        for event in self._waiters.pop(result.operation_id, ()):
            event.set()

    def forget(self, operation_ids: Iterable[str]) -> None:
        """These were withdrawn before they ran and will never end."""
        for operation_id in operation_ids:
            self._open.pop(operation_id, None)
            for event in self._waiters.pop(operation_id, ()):
                event.set()

    async def wait(self, project: str, operation_id: str) -> OperationResult:
        """The end of one operation, however long it takes.

        Raises:
            NotFound: no such operation in this project.
        """
        while True:
            ready, _ = await self._collect(project, [operation_id])
            if ready:
                return ready[0]
            await self._any([operation_id], None)

    async def poll(self, project: str, wait: Sequence[str], ack: Sequence[str], timeout: float) -> Results:
        """What of ``wait`` has ended; waits up to ``timeout`` seconds for the first.

        An unknown id is answered with a failed result, so that it doesn't hold up the others.

        Raises:
            OwnedElsewhere: one other server runs all of them, and knows best when the first has ended.
        """
        LIMITS.check("max_poll_ids", len(wait), "wait")
        LIMITS.check("max_poll_ids", len(ack), "ack")
        LIMITS.check("max_poll_seconds", timeout, "timeout")
        self._log.acknowledge(project, ack)
        for operation_id in ack:
            if operation_id in self._recent and self._recent[operation_id][0] == project:
                del self._recent[operation_id]
        ready, open_ids = await self._collect(project, wait)
        deadline = time.monotonic() + timeout
        while not ready and open_ids and (left := deadline - time.monotonic()) > 0:
            here = [operation_id for operation_id in open_ids if operation_id in self._open]
            if not here:
                await self._lease.check_operations(project, open_ids)
            await self._any(here, left if len(here) == len(open_ids) else min(left, _AWAY_SECONDS))
            ready, open_ids = await self._collect(project, wait)
        return Results(ready, {operation_id: self._position(operation_id) for operation_id in open_ids})

    async def _collect(self, project: str, ids: Sequence[str]) -> tuple[list[OperationResult], list[str]]:
        found: dict[str, OperationResult | None] = {}
        for operation_id in ids:
            if operation_id in self._open:
                if self._open[operation_id].project == project:
                    found[operation_id] = None
            elif operation_id in self._recent and self._recent[operation_id][0] == project:
                found[operation_id] = self._recent[operation_id][1]
        missing = [operation_id for operation_id in ids if operation_id not in found]
        if missing:
            found |= await self._log.results(project, missing)
        ready: list[OperationResult] = []
        open_ids: list[str] = []
        for operation_id in ids:
            if operation_id not in found:
                ready.append(OperationResult(operation_id, "failed", error=unknown_operation(operation_id)))
            elif (result := found[operation_id]) is not None:
                ready.append(result)
            else:
                open_ids.append(operation_id)
        return ready, open_ids

    async def _any(self, ids: Sequence[str], timeout: float | None) -> None:
        event = asyncio.Event()
        for operation_id in ids:
            if operation_id not in self._open:
                event.set()  # it ended since it was looked up
            else:
                self._waiters.setdefault(operation_id, set()).add(event)
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            for operation_id in ids:
                events = self._waiters.get(operation_id)
                if events is not None:
                    events.discard(event)
                    if not events:
                        del self._waiters[operation_id]

    def _position(self, operation_id: str) -> int:
        entry = self._open.get(operation_id)
        return 0 if entry is None else max(0, entry.position())


def unknown_operation(operation_id: str) -> NotFound:
    """It does not exist, or not for this caller."""
    return NotFound(f"no operation {operation_id} in this project", details={"id": operation_id})
