"""Waiting on behalf of a client: not longer than the client and the server are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request

from ..errors import Cancelled, ServiceUnavailable

T = TypeVar("T")


async def while_connected(request: Request, awaitable: Awaitable[T]) -> T:
    """Await, but stop when the client hangs up or the server begins to stop.

    A client breaks a long poll off to send another one; without this each would be held until its
    own time is over. The request's body must have been read.

    Raises:
        ServiceUnavailable: the server stops; the client asks again, here or at its successor.
        Cancelled: nobody is there to read the answer.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        return await _first(request, awaitable, gone)
    finally:
        gone.cancel()


async def unless_closing(request: Request, awaitable: Awaitable[T]) -> T:
    """Await, but raise `ServiceUnavailable` when the server begins to stop."""
    return await _first(request, awaitable)


async def _first(request: Request, awaitable: Awaitable[T], gone: asyncio.Future[None] | None = None) -> T:
    closing: asyncio.Future[None] | None = request.app.state.closing
    work: asyncio.Future[T] = asyncio.ensure_future(awaitable)
    ends: set[asyncio.Future[Any]] = {end for end in (gone, closing) if end is not None}
    try:
        await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
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
