"""How long a client may take: for the head of a request, its body, and for taking in the answer.

The body's deadline is the guard's, since whoever sends one is told. The others belong to connections on which
there is nobody to tell, and nothing of them is on the way of a call: the server looks at its connections once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from starlette.types import Message, Receive

from ..errors import RequestTimeout

HEAD_SECONDS = 30.0
"""A connection is closed on which the head of a request is not whole for so long."""
BODY_SECONDS = 30.0
"""A request waits for its body for so long, and ..."""
BODY_BYTES_PER_SECOND = 4096
"""... a second longer for so many bytes that have come. So a large body over a thin line passes."""
REST_SECONDS = 300.0
"""A client may go on with a body that was refused for so long: many look for the answer only behind its end."""
TAKE_SECONDS = 120.0
"""A connection is broken whose client takes nothing of an answer for so long."""

_Stage: TypeAlias = tuple[str, object]


def timely(receive: Receive) -> Receive:
    """``receive`` that waits for the body no longer than a client with something to send would take.

    Only time spent waiting for the client counts: a service that is slow to read holds nothing against it.

    Raises (while the body is read):
        RequestTimeout
    """
    waited, received, more = 0.0, 0, True

    async def in_time() -> Message:
        nonlocal waited, received, more
        if not more:
            return await receive()  # the next thing to come is the disconnect
        began = time.monotonic()
        try:
            async with asyncio.timeout(BODY_SECONDS + received / BODY_BYTES_PER_SECOND - waited):
                message = await receive()
        except TimeoutError:
            raise _too_slow(received) from None
        waited += time.monotonic() - began
        received += len(message.get("body", b""))
        more = message.get("more_body", False)
        return message

    return in_time


def _too_slow(received: int) -> RequestTimeout:
    seconds, rate = BODY_SECONDS, BODY_BYTES_PER_SECOND
    return RequestTimeout(
        f"the body comes too slowly: of it {received} bytes have come. A body has {seconds:g} s, and a second more for "
        f"each {rate} bytes that have come",
        details={"received": received, "seconds": seconds, "bytes_per_second": rate},
    )


class SlowConnections:
    """Ends connections of uvicorn whose clients neither send a request nor take their answer."""

    def __init__(self) -> None:
        self._since: dict[Any, tuple[_Stage, float]] = {}

    def end(self, connections: Iterable[Any]) -> None:
        """Look at all of a server's connections; called again and again."""
        now, before, self._since = time.monotonic(), self._since, {}
        for connection in list(connections):
            stage = _stage_of(connection)
            if stage is None:
                continue
            last, since = before.get(connection, (stage, now))
            since = since if last == stage else now
            self._since[connection] = (stage, since)
            if now - since > _seconds(stage):
                # Closing would wait until all of an answer has been taken.
                end = connection.transport.abort if stage[0] == "answer" else connection.shutdown
                end()


def _seconds(stage: _Stage) -> float:
    return {"answer": TAKE_SECONDS, "rest": REST_SECONDS, "head": HEAD_SECONDS}[stage[0]]


def _stage_of(connection: Any) -> _Stage | None:
    """What the connection waits for of its client, and a value that changes when some of it has come."""
    untaken = connection.transport.get_write_buffer_size()
    if untaken:
        return "answer", untaken
    cycle = connection.cycle
    is_between = cycle is None or cycle.response_complete
    # With its timer a connection is idle, which is uvicorn's affair; the first byte of a head stops the timer.
    if is_between and connection.timeout_keep_alive_task is None and not connection.transport.is_closing():
        return "head" if cycle is None or not cycle.more_body else "rest", cycle
    return None
