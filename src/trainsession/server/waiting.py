"""Waiting on behalf of a client: not longer than the client and the server are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from ..errors import Cancelled, ServiceUnavailable

T = TypeVar("T")
Meanwhile = Callable[[], Awaitable[Any]]
"""Called every second of a wait; what it raises ends the wait."""
ASK_AGAIN_SECONDS = 1.0


async def while_connected(request: Request, awaitable: Awaitable[T], meanwhile: Meanwhile | None = None) -> T:
    """Await, but stop when the client hangs up or the server begins to stop.

    A client breaks a long poll off to send another one; without this each would be held until its
    own time is over. The request's body must have been read.

    Raises:
        ServiceUnavailable: the server stops; the client asks again, here or at its successor.
        Cancelled: nobody is there to read the answer.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        return await _first(request, awaitable, meanwhile, gone)
    finally:
        gone.cancel()


async def unless_closing(request: Request, awaitable: Awaitable[T], meanwhile: Meanwhile | None = None) -> T:
    """Await, but raise `ServiceUnavailable` when the server begins to stop."""
    return await _first(request, awaitable, meanwhile)


async def _first(
    request: Request,
    awaitable: Awaitable[T],
    meanwhile: Meanwhile | None,
    gone: asyncio.Future[None] | None = None,
) -> T:
    closing: asyncio.Future[None] | None = request.app.state.closing
    work: asyncio.Future[T] = asyncio.ensure_future(awaitable)
    ends: set[asyncio.Future[Any]] = {end for end in (gone, closing) if end is not None}
    try:
        every = None if meanwhile is None else ASK_AGAIN_SECONDS
        while not (await asyncio.wait({work, *ends}, timeout=every, return_when=asyncio.FIRST_COMPLETED))[0]:
            if meanwhile is not None:
                await meanwhile()
        if work.done():
            return work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    if closing is not None and closing.done():
        raise ServiceUnavailable("the service is shutting down")
    raise Cancelled("the client hung up")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
