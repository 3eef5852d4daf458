"""What holds for every request before a route sees it: protocol, host, media type, size and pace of the body.

Pure ASGI, so that bodies and streams pass through without a copy.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import (
    IncompatibleVersion,
    InvalidRequest,
    PayloadTooLarge,
    PermissionDenied,
    UnsupportedMediaType,
)
from ..limits import LIMITS, MIN_BODY_BYTES, Limits
from ..wire import MEDIA_TYPE, PROTOCOL_VERSION, VERSION_HEADER, decompress
from . import access_log
from .deadlines import timely
from .responses import OFF_LOOP_ABOVE, error_response, media_type

REQUEST_ID_HEADER = "X-Request-Id"
FORWARDED_HEADER = "X-TrainSession-Forwarded"
"""Of a request that another server on the database has sent on, under the name that it gave it."""
_REQUEST_ID = re.compile(r"req_[0-9a-f]{16}")
SUPPORTED_VERSIONS = frozenset({PROTOCOL_VERSION})
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
JSON = "application/json"


class Guard:
    """Checks headers, counts the body as it streams, and names every request.

    Args:
        hosts: Names that the ``Host`` and ``Origin`` headers may carry, or None for any. A server
            on loopback without keys needs it: a web page can point a name of its own at 127.0.0.1.
        answer: Tells a client of an error, in the shape of the door that it knocked at.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] | None = None,
        limits: Limits = LIMITS,
        answer: Callable[[Exception, Scope], Response] | None = None,
    ) -> None:
        self.app = app
        self.answer = answer or _native_answer
        self.hosts = None if hosts is None else frozenset(hosts)
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = f"req_{secrets.token_hex(8)}"
        if FORWARDED_HEADER in headers and _REQUEST_ID.fullmatch(headers.get(REQUEST_ID_HEADER, "")):
            request_id = headers[REQUEST_ID_HEADER]
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered[VERSION_HEADER] = str(PROTOCOL_VERSION)
                answered[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            self._check_origin(scope, headers)
            _check_version(headers)
            await self.app(scope, self._limited(scope, headers, receive), send_named)
        except Exception as error:
            if status:
                raise  # the answer has begun: all that is left is to break the connection
            await self.answer(error, scope)(scope, receive, send_named)
        finally:
            access_log.write(scope, status or access_log.HUNG_UP, began)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        _, port = scope.get("server") or ("", None)
        if self.hosts is None or port is None:  # a Unix socket: no web page gets there
            return
        host = urlsplit(f"//{headers.get('host', '')}").hostname
        if host not in self.hosts:
            raise PermissionDenied(f"Host {headers.get('host', '')!r} is not served here")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).hostname not in self.hosts:
            raise PermissionDenied(f"requests of web pages of {origin!r} are not served here")

    def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """``receive`` that refuses an unknown media type, too large or too slow a body, and decompresses it.

        The bound stands in the request's state as ``body``, for whoever learns of a lower one, unless the
        body fits every project's: most bodies do, and whose they are need not be looked up for that.

        Raises (here or while the body is read):
            UnsupportedMediaType, PayloadTooLarge, InvalidRequest, RequestTimeout.
        """
        length = headers.get("content-length", "0")
        if "transfer-encoding" not in headers and length == "0":
            return receive
        kind = media_type(headers)
        if kind not in (JSON, MEDIA_TYPE):
            raise UnsupportedMediaType(f"Content-Type {kind or '(none)'!r}; this service reads {JSON} and {MEDIA_TYPE}")
        if not length.isdigit():
            raise InvalidRequest(f"Content-Length {length!r} is not a number")
        limit = "max_json_bytes" if kind == JSON else "max_body_bytes"
        encoding = headers.get("content-encoding", "identity").strip().lower()
        plain = encoding == "identity" and "transfer-encoding" not in headers
        bound = BodyBound(limit, getattr(self.limits, limit), int(length))
        if not plain or int(length) > MIN_BODY_BYTES:
            scope["state"]["body"] = bound
        receive = _counted(timely(receive), bound)
        if encoding == "identity":
            return receive
        if encoding != "zstd" or kind != MEDIA_TYPE:
            raise UnsupportedMediaType(f"Content-Encoding {encoding!r}; msgpack bodies may be zstd, others plain")
        return _decompressed(receive, bound)


def _native_answer(error: Exception, scope: Scope) -> Response:
    return error_response(error, scope["state"]["request_id"])


class BodyBound:
    """How large a request's body may be, while it is being received.

    Args:
        limit: Name of the limit.
        value: Bytes after decompression.
        declared: Bytes that the request announced; 0 for none.

    Raises:
        PayloadTooLarge: it announced more.
    """

    def __init__(self, limit: str, value: int, declared: int) -> None:
        self.limit, self.value, self._declared = limit, value, declared
        self.check(declared)

    def lower(self, value: int) -> None:
        """A project's own ``max_body_bytes``, of which it is known only now whose body this is."""
        if value < self.value:
            self.limit, self.value = "max_body_bytes", value
            self.check(self._declared)

    def check(self, size: int) -> None:
        if size > self.value:
            raise PayloadTooLarge(
                f"the body is larger than {self.limit} = {self.value} bytes",
                details={"limit": self.limit, "bound": self.value},
            )


def _counted(receive: Receive, bound: BodyBound) -> Receive:
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        bound.check(received)
        return message

    return counted


def _decompressed(receive: Receive, bound: BodyBound) -> Receive:
    done = False

    async def decompressed() -> Message:
        nonlocal done
        if done:
            return await receive()  # the next thing to come is the disconnect
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        done = True
        data = b"".join(parts)
        plain = (
            decompress(data, bound.value)
            if len(data) < OFF_LOOP_ABOVE // 64  # zstd can grow far: decide by a small input
            else await asyncio.to_thread(decompress, data, bound.value)
        )
        return {"type": "http.request", "body": plain, "more_body": False}

    return decompressed


def _check_version(headers: Headers) -> None:
    """A client that says nothing (curl, other doors' clients) is taken as it is."""
    version = headers.get(VERSION_HEADER)
    if version is not None and version not in {str(v) for v in SUPPORTED_VERSIONS}:
        raise IncompatibleVersion(
            f"this service speaks protocol {', '.join(map(str, sorted(SUPPORTED_VERSIONS)))}, "
            f"the request {version!r}; upgrade the older side"
        )
