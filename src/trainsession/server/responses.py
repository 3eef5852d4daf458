"""Answers: msgpack bodies, and the one place where an exception becomes a status and a body."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import (
    AuthenticationFailed,
    Cancelled,
    EngineError,
    InvalidRequest,
    NotFound,
    RateLimited,
    RequestTimeout,
    ServiceUnavailable,
    TrainSessionError,
)
from ..wire import MEDIA_TYPE, pack, unpack

log = logging.getLogger("trainsession.server")

OFF_LOOP_ABOVE = 1 << 18
"""Bodies above this many bytes are decoded on a worker thread, so that other calls go on."""
RETRY_AFTER_SECONDS = 1
_CHUNK = 1 << 20


class MsgpackResponse(Response):
    """An answer that carries tensors."""

    media_type = MEDIA_TYPE

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else pack(content)


def file_response(file: BinaryIO) -> Response:
    """A file's bytes; it is closed with the answer."""
    size = os.fstat(file.fileno()).st_size

    def chunks() -> Iterator[bytes]:
        with file:
            while chunk := file.read(_CHUNK):
                yield chunk

    return StreamingResponse(chunks(), media_type="application/octet-stream", headers={"content-length": str(size)})


async def unpack_body(data: bytes) -> Any:
    """A msgpack request body.

    Raises:
        InvalidRequest: not msgpack, or a tensor that does not fit its own header.
    """
    return unpack(data) if len(data) < OFF_LOOP_ABOVE else await asyncio.to_thread(unpack, data)


def media_type(headers: Mapping[str, str]) -> str:
    """The request's content type, without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def error_response(error: Exception, request_id: str) -> Response:
    """What a client is told about an exception; never a traceback."""
    status, body = error_body(error, request_id)
    return JSONResponse(body, status_code=status, headers=error_headers(error))


def error_headers(error: Exception) -> dict[str, str]:
    """Those that belong to an error's answer, whatever the body's shape."""
    error = _unwrapped(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, AuthenticationFailed):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (RateLimited, ServiceUnavailable)):
        headers["Retry-After"] = str(error.details.get("retry_after", RETRY_AFTER_SECONDS))
    if isinstance(error, RequestTimeout):
        headers["Connection"] = "close"  # the rest of the body would be taken for a request
    return headers


def error_body(error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of an exception."""
    status, known = known_error(error, request_id)
    return status, {**known.to_wire(), "request_id": request_id}


def known_error(error: Exception, request_id: str) -> tuple[int, TrainSessionError]:
    """Status and error that a client may see.

    Anything that is no `TrainSessionError` is a fault of ours: logged with the request id, which is
    all that the client sees of it.
    """
    status, known = _translate(error)
    if known is None:
        log.error("request %s failed", request_id, exc_info=error)
        known = EngineError("the service failed on this request; its log holds the reason under the request id")
    return status, known


def _unwrapped(error: Exception) -> Exception:
    """FastAPI wraps what the reading of a body raises; the limit of a body is such a case."""
    cause = error.__cause__ if isinstance(error, HTTPException) else None
    return cause if isinstance(cause, TrainSessionError) else error


def _translate(error: Exception) -> tuple[int, TrainSessionError | None]:
    error = _unwrapped(error)
    if isinstance(error, TrainSessionError):
        return error.status, error
    if isinstance(error, ClientDisconnect):  # while its body was read: an answer for nobody
        cancelled = Cancelled("the client hung up")
        return cancelled.status, cancelled
    if isinstance(error, (RequestValidationError, ValidationError)):
        return 422, _invalid(error.errors())
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return 404, NotFound("there is no such path; the API's paths are at /openapi.json")
        return error.status_code, InvalidRequest(str(error.detail))
    return 500, None


def _invalid(problems: Any) -> InvalidRequest:
    """The first problem that pydantic found, with its place; the input itself is not echoed."""
    first: Mapping[str, Any] = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return InvalidRequest(f"{where}: {first['msg']}{more}", details={"key": where})
