"""A request about what another server on the database runs is sent on to it, and its answer comes back.

Nothing here knows which requests those are: the service raises `OwnedElsewhere` where it would need what only
the other one holds in memory, whatever the door. Every answer is as from one server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from ..errors import ServiceUnavailable
from ..service.leases import OwnedElsewhere
from ..service.service import Service
from .guard import FORWARDED_HEADER, REQUEST_ID_HEADER
from .waiting import Meanwhile, unless_closing, while_connected

_CONNECT_SECONDS = 5.0
# How long an answer may take is the client's affair; that the other server is there is looked after meanwhile.
_TIMEOUT = httpx.Timeout(None, connect=_CONNECT_SECONDS)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)
_WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE"})
_OF_THE_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
)
# The body is sent on as the guard made it, without compression; pages of the web were checked here.
_NOT_SENT_ON = _OF_THE_CONNECTION | {"host", "origin", "content-length", "content-encoding"}
_NOT_SENT_BACK = _OF_THE_CONNECTION | {"date", "server"}


class Forwarder:
    """The way to the other servers; belongs to the event loop of the application."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, error: OwnedElsewhere) -> Response:
        """What the owner answers.

        Raises:
            ServiceUnavailable: it cannot be reached, has been replaced, or sent the request here itself.
        """
        service = cast(Service, request.app.state.service)
        if error.address is None or FORWARDED_HEADER in request.headers:
            raise error  # of two servers that each take the other for the owner one will know better soon
        service.telemetry.forwarded.inc()

        async def still_there() -> None:
            if not service.lease.knows(error.owner):
                raise ServiceUnavailable("the server that this was sent on to has been replaced; try again")

        sent = await _outgoing(request, error.address)
        try:
            response = await while_connected(request, self._http.send(sent, stream=True), still_there)
            if "content-length" in response.headers:
                content = await while_connected(request, response.aread(), still_there)
                return Response(content, response.status_code, _headers(response))
        except httpx.TransportError as broken:
            raise error from broken
        return StreamingResponse(_chunks(request, response, still_there), response.status_code, _headers(response))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=_LIMITS, trust_env=False)
        return self._client


async def _outgoing(request: Request, address: str) -> httpx.Request:
    scope = request.scope
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in _NOT_SENT_ON]
    headers.append((FORWARDED_HEADER.encode(), b"1"))
    headers.append((REQUEST_ID_HEADER.encode(), request.state.request_id.encode()))
    return httpx.Request(
        request.method,
        httpx.URL(address).copy_with(raw_path=target),
        headers=headers,
        # Of a stream that is waited for, what came in has been read already.
        content=None if request.method in _WITHOUT_BODY else await request.body(),
        extensions={"timeout": _TIMEOUT.as_dict()},
    )


def _headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in _NOT_SENT_BACK}


async def _chunks(request: Request, response: httpx.Response, still_there: Meanwhile) -> AsyncIterator[bytes]:
    """What it raises breaks the connection, so that no client takes half an answer for the whole."""
    chunks = response.aiter_raw()
    try:
        while (chunk := await unless_closing(request, anext(chunks, None), still_there)) is not None:
            yield chunk
    finally:
        await response.aclose()
