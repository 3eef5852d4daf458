"""The SDK's one way to a service: httpx, with retries that are safe to make.

Every call that changes something carries an idempotency key or a sequence number, so a request
whose answer was lost is simply sent again. `Transport` lives on the client's I/O loop; the
embedded service uses the same class over a Unix socket (`trainsession.transport.embedded`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from .._version import __version__
from ..errors import (
    ConnectionFailed,
    IncompatibleVersion,
    InvalidRequest,
    ServiceUnavailable,
    TrainSessionError,
    from_wire,
)
from ..wire import COMPRESS_ABOVE, MEDIA_TYPE, PROTOCOL_VERSION, VERSION_HEADER, compress, pack, unpack
from .frames import OnceEach
from .patience import GatewayError, Patience

ATTEMPT_HEADER = "X-TrainSession-Attempt"
DEFAULT_TIMEOUT = 60.0
"""Seconds to wait for an answer (a long poll asks for more than it polls)."""
OFF_LOOP_ABOVE = 1 << 20
"""Bodies above this many bytes are compressed and decoded on a worker thread."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30)
WHOLE_ANSWER = "trainsession.whole"
"""Extension of httpx requests whose answer is read as a whole, not streamed."""
_FRAME = struct.Struct("<I")
_SIGN_SECONDS = 5.0
"""A service that is there says so within these."""
_GATEWAY_STATUS = frozenset({502, 503, 504})


class Connections(Protocol):
    """Makes httpx transports to one service; each belongs to the client that it is made for."""

    def asynchronous(self) -> httpx.AsyncBaseTransport: ...

    def blocking(self) -> httpx.BaseTransport: ...


class _Local:
    def __init__(self, uds: str | None, verify: bool) -> None:
        self._uds, self._verify = uds, verify

    def asynchronous(self) -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(uds=self._uds, verify=self._verify, limits=LIMITS)

    def blocking(self) -> httpx.BaseTransport:
        return httpx.HTTPTransport(uds=self._uds, verify=self._verify, limits=LIMITS)


class Transport:
    """Async calls to one service.

    Args:
        base_url: ``https://host[:port]``; the ``/v1`` is part of each call's path.
        api_key: Sent as a bearer token, or None; without white space around it.
        uds: Path of a Unix socket to connect to instead of the URL's host.
        headers: Sent with every request.
        connections: Another way to reach the service (the embedded one brings its own).
        compressed: Send large bodies zstd-compressed; worth it on slow links only.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        uds: str | None = None,
        headers: Mapping[str, str] | None = None,
        connections: Connections | None = None,
        compressed: bool = False,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConnectionFailed(f"base_url must be http://host[:port] or https://host[:port], got {base_url!r}")
        api_key = (api_key or "").strip()  # of a file or a command, with its line's end
        if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            # Not sent: the complaint about such a header would repeat it.
            raise InvalidRequest("api_key: it has characters that no key has", details={"key": "api_key"})
        self.base_url = base_url.rstrip("/")
        self._compressed = compressed
        self._patience = Patience(None if connections is not None else f"{self.base_url} {uds or ''}")
        if connections is None and (uds is not None or url.hostname in ("127.0.0.1", "localhost", "::1")):
            # Given explicitly, so that a proxy of the environment is not asked for this machine.
            connections = _Local(uds, verify=url.scheme == "https")
        connection = None if connections is None else connections.asynchronous()
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            transport=connection,
            headers={
                VERSION_HEADER: str(PROTOCOL_VERSION),
                "Accept-Encoding": "identity",
                "User-Agent": f"trainsession/{__version__}",
                **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
                **(headers or {}),
            },
            # Loading the certificate store takes longer than everything else here.
            verify=url.scheme == "https",
            limits=LIMITS,
        )
        self.api_key = api_key
        self.extra_headers = dict(headers or {})
        self._connections = connections
        self._connection = connection
        self._headers = dict(self._client.headers)

    def __repr__(self) -> str:
        return f"Transport({self.base_url})"

    def blocking_connection(self) -> httpx.BaseTransport | None:
        """The way to the service for an `httpx.Client` of another's; None: httpx's own."""
        return None if self._connections is None else self._connections.blocking()

    def another_connection(self) -> httpx.AsyncBaseTransport | None:
        """The same for an `httpx.AsyncClient`, of any event loop."""
        return None if self._connections is None else self._connections.asynchronous()

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        repeat_limited: bool = True,
        held: bool = False,
    ) -> Any:
        """One call: its decoded answer, from JSON or msgpack (arrays are read-only views).

        Args:
            json: A JSON body; or
            body: plain values, numpy arrays and `TensorData`, sent as msgpack.
            params: Query parameters; None values are left out.
            timeout: Seconds to wait for the answer of one attempt, default 60.
            repeat_limited: Repeat what is refused as `RateLimited`; else the caller does.
            held: The service may hold the answer back (a long poll).

        Raises:
            TrainSessionError: what the service answered, as the class that owns its code.
            ConnectionFailed: nobody answered for `PATIENCE` seconds (`FIRST_PATIENCE` where nobody ever did).
        """
        headers: dict[str, str] = {}
        content: bytes | None = None
        if body is not None:
            content = pack(body)
            headers["Content-Type"] = MEDIA_TYPE
            if self._compressed and len(content) > COMPRESS_ABOVE:
                content = await asyncio.to_thread(compress, content)
                headers["Content-Encoding"] = "zstd"

        async def once(attempt: int) -> Any:
            # Built here and not by the client, which would parse the URL three times.
            request = httpx.Request(
                method,
                _url(self.base_url + path),
                json=json,
                content=content,
                params=_present(params),
                headers={**self._headers, **headers, ATTEMPT_HEADER: str(attempt)},
                extensions={"timeout": _timeout(timeout).as_dict(), WHOLE_ANSWER: True},
            )
            response = await self._send(request)
            self._check(response.status_code, response.headers, response.content)
            return await _decode(response.headers, response.content)

        return await self._with_retries(once, repeat_limited, held)

    async def stream(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """The frames of a stream as they arrive, each token once; ends with the frame that has ``done``.

        After a broken connection it is read anew, and what was handed on is left out.

        Raises:
            TrainSessionError: the stream's ``error`` frame.
            EngineLost: read anew it is another one (outside exact mode samples may be).
        """
        once = OnceEach()
        since = time.monotonic()
        while True:
            once.begin()
            try:
                async for frame in self._frames(path):
                    if "error" in frame:
                        raise from_wire(frame["error"])
                    if frame.get("done"):
                        yield frame
                        return
                    if (rest := once.new(frame)) is not None:
                        since = time.monotonic()
                        yield rest
                problem: Exception = httpx.RemoteProtocolError("the stream ended before its last frame")
            except (httpx.TransportError, ServiceUnavailable) as error:
                problem = error
                if isinstance(error, httpx.TransportError) and await self._is_there():
                    since = time.monotonic()
            if time.monotonic() > since + self._patience.seconds or not self._patience.is_reached:
                raise _unreachable(self.base_url, problem) from problem
            await asyncio.sleep(0.2)

    async def download(
        self,
        path: str,
        params: Mapping[str, Any] | None,
        destination: str | os.PathLike[str],
        on_bytes: Callable[[int], None] | None = None,
    ) -> str:
        """Stream a file to ``destination`` (which appears only when complete); returns its sha256.

        Args:
            on_bytes: Called with the number of bytes of each chunk; negative when an attempt that
                broke off starts anew.
        """
        target = Path(destination)
        partial = target.with_name(f"{target.name}.part")

        async def once(attempt: int) -> str:
            digest, received = hashlib.sha256(), 0
            headers = {ATTEMPT_HEADER: str(attempt)}
            try:
                async with self._client.stream(
                    "GET", path, params=_present(params), headers=headers, timeout=_timeout(None)
                ) as response:
                    await self._check_stream(response)
                    with partial.open("wb") as file:
                        async for chunk in response.aiter_raw(1 << 20):
                            digest.update(chunk)
                            file.write(chunk)
                            received += len(chunk)
                            if on_bytes is not None:
                                on_bytes(len(chunk))
                os.replace(partial, target)
            except httpx.TransportError:
                if on_bytes is not None and received:
                    on_bytes(-received)
                raise
            finally:
                partial.unlink(missing_ok=True)
            return digest.hexdigest()

        result: str = await self._with_retries(once)
        return result

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """The whole answer."""
        if self._connection is None:
            return await self._client.send(request)
        # A service on this machine has no cookies, logins, redirects or proxies, and looking for them
        # takes longer than the way there.
        response = await self._connection.handle_async_request(request)
        try:
            await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response

    async def _frames(self, path: str) -> AsyncIterator[dict[str, Any]]:
        buffer = bytearray()
        async with self._client.stream("GET", path, timeout=_timeout(None)) as response:
            await self._check_stream(response)
            async for chunk in response.aiter_raw():
                buffer += chunk
                while len(buffer) >= _FRAME.size:
                    (size,) = _FRAME.unpack_from(buffer)
                    if len(buffer) < _FRAME.size + size:
                        break
                    frame = unpack(bytes(buffer[_FRAME.size : _FRAME.size + size]))
                    del buffer[: _FRAME.size + size]
                    yield frame

    async def _check_stream(self, response: httpx.Response) -> None:
        if not response.is_success:
            await response.aread()
            self._check(response.status_code, response.headers, response.content)
        self._check(response.status_code, response.headers, b"")

    def _check(self, status: int, headers: httpx.Headers, content: bytes) -> None:
        """Raise what an answer that is no success stands for."""
        version = headers.get(VERSION_HEADER)
        if version is None:
            if status in _GATEWAY_STATUS:
                raise GatewayError(f"{self.base_url} answered {status}")
            raise ConnectionFailed(
                f"{self.base_url} answered {status}, but is no trainsession service (no {VERSION_HEADER} header)"
            )
        self._patience.answered()
        if not 200 <= status < 300:
            raise _error_of(status, headers, content)
        if version != str(PROTOCOL_VERSION):
            raise IncompatibleVersion(
                f"the service speaks protocol {version}, this client {PROTOCOL_VERSION}; upgrade the older one"
            )

    async def _is_there(self) -> bool:
        """Whether the service gives a sign of life."""
        extensions = {"timeout": httpx.Timeout(_SIGN_SECONDS).as_dict()}
        url = _url(f"{self.base_url}/v1/health")
        request = httpx.Request("GET", url, headers=self._headers, extensions=extensions)
        try:
            response = await self._send(request)
        except httpx.TransportError:
            return False
        return VERSION_HEADER in response.headers and response.is_success

    async def _with_retries(self, once: Callable[[int], Any], repeat_limited: bool = True, held: bool = False) -> Any:
        try:
            return await self._patience.persist(once, repeat_limited, self._is_there if held else None)
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error) from error


def _error_of(status: int, headers: httpx.Headers, content: bytes) -> TrainSessionError:
    try:
        body = httpx.Response(status, content=content).json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or "code" not in body:
        body = {"message": f"status {status}: {content[:200].decode(errors='replace')}"}
    error = from_wire(body, status)
    retry_after = headers.get("Retry-After", "")
    if retry_after.isdigit():
        error.details = {**error.details, "retry_after": int(retry_after)}
    return error


async def _decode(headers: httpx.Headers, content: bytes) -> Any:
    kind = headers.get("Content-Type", "").partition(";")[0].strip()
    if kind == MEDIA_TYPE:
        return unpack(content) if len(content) < OFF_LOOP_ABOVE else await asyncio.to_thread(unpack, content)
    if kind == "application/json":
        return httpx.Response(200, content=content).json()
    return content


def _present(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if params is None else {key: value for key, value in params.items() if value is not None}


@functools.lru_cache(maxsize=256)
def _url(text: str) -> httpx.URL:
    """Parsed once: the calls of a training loop go to two addresses."""
    return httpx.URL(text)


def _timeout(seconds: float | None) -> httpx.Timeout:
    return httpx.Timeout(seconds or DEFAULT_TIMEOUT, connect=10.0, pool=None)


def _unreachable(base_url: str, error: Exception) -> ConnectionFailed:
    return ConnectionFailed(f"no service answers at {base_url}: {error or type(error).__name__}")
