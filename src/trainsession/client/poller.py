"""One long poll per service collects the results of everything this process waits for.

Results can't be lost: the service keeps a result until it was acknowledged, and a result is
acknowledged in the poll *after* the one that delivered it. So a poll may be broken off and sent
anew at any time, which is how operations that were submitted meanwhile join it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any, Protocol

from ..errors import Cancelled, ConnectionFailed, from_wire
from ..limits import LIMITS

POLL_SECONDS = 25.0
"""How long the service may hold a poll that has nothing to say."""
_ANSWER_MARGIN = 15.0
_REISSUE_GAP = 0.02
"""A poll lives at least this long before a new id breaks it off, so that a burst costs few polls."""


class Request(Protocol):
    async def __call__(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: Any = None,
        timeout: float | None = None,
        held: bool = False,
    ) -> Any: ...


class ResultPoller:
    """Belongs to the I/O loop; so do all its methods."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._to_acknowledge: dict[str, None] = {}
        self._polled: frozenset[str] = frozenset()
        self._changed: asyncio.Future[None] | None = None
        """Of the poll under way: done when it should be broken off."""
        self._task: asyncio.Task[None] | None = None

    async def wait(self, operation_id: str, behind: str | None = None) -> Any:
        """The value of an operation's result.

        Args:
            behind: An operation that must end first. While a poll waits for that one, there is no
                need to break it off.

        Raises:
            TrainSessionError: the operation's own error; `Cancelled`; `ConnectionFailed` when the
                service is gone.
        """
        arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[operation_id] = arrived
        if self._task is None:
            self._task = asyncio.create_task(self._poll_while_waiting())
        elif behind not in self._polled:
            self.wake()
        try:
            result = await arrived
        finally:
            self._waiting.pop(operation_id, None)
        return _value(result)

    async def position(self, operation_id: str) -> int | None:
        """Operations that stand before this one, or None when it has ended."""
        answer = await self._ask([operation_id], [], 0.0)
        return answer["positions"].get(operation_id)

    def acknowledge(self, operation_id: str) -> None:
        """The result was read in another way (a stream) and need not be kept."""
        self._to_acknowledge[operation_id] = None

    def wake(self) -> None:
        """Ask anew: there is something else to wait for, or something ended out of order."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def close(self, why: str) -> None:
        """Acknowledge what was delivered, and fail what still waits with this message."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._fail(ConnectionFailed(why))
        if self._to_acknowledge:
            await self._ask([], list(itertools.islice(self._to_acknowledge, LIMITS.max_poll_ids)), 0.0)
            self._to_acknowledge.clear()

    async def _poll_while_waiting(self) -> None:
        try:
            while self._waiting:
                await self._poll()
        except Exception as error:  # whatever it was, whoever waits must hear of it
            self._fail(error)
        finally:
            self._polled = frozenset()
            self._task = None

    async def _poll(self) -> None:
        # The oldest first, if there are more than one poll takes; the rest follow as those end.
        ids = list(itertools.islice(self._waiting, LIMITS.max_poll_ids))
        acknowledged = list(itertools.islice(self._to_acknowledge, LIMITS.max_poll_ids))
        self._polled = frozenset(ids)
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        poll = loop.create_task(self._ask(ids, acknowledged, POLL_SECONDS))
        try:
            started = loop.time()
            await asyncio.wait([poll, self._changed], return_when=asyncio.FIRST_COMPLETED)
            if not poll.done():
                lived = loop.time() - started
                await asyncio.wait([poll], timeout=max(0.0, _REISSUE_GAP - lived))
            if not poll.done():
                return
            answer = poll.result()
        finally:
            if not poll.done():
                poll.cancel()
                await asyncio.gather(poll, return_exceptions=True)
        for operation_id in acknowledged:
            self._to_acknowledge.pop(operation_id, None)
        self._deliver(answer["results"])

    async def _ask(self, wait: list[str], ack: list[str], seconds: float) -> Any:
        body = {"wait": wait, "ack": ack, "timeout": seconds}
        held = seconds > 0
        return await self._request("POST", "/v1/results", json=body, timeout=seconds + _ANSWER_MARGIN, held=held)

    def _deliver(self, results: Iterable[dict[str, Any]]) -> None:
        for result in results:
            operation_id = result["operation_id"]
            arrived = self._waiting.pop(operation_id, None)
            if arrived is not None and not arrived.done():
                arrived.set_result(result)
            self._to_acknowledge[operation_id] = None

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for arrived in waiting.values():
            if not arrived.done():
                arrived.set_exception(error)


def _value(result: dict[str, Any]) -> Any:
    if result["state"] == "done":
        return result["value"]
    if result.get("error"):
        raise from_wire(result["error"])
    raise Cancelled(f"operation {result['operation_id']} was cancelled before it started")
