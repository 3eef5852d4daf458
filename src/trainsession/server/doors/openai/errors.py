"""Errors in OpenAI's shape, so that its client raises the classes that its users catch."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response

from ...responses import error_headers, known_error

_AS_OPENAI: dict[str, tuple[int, str, str]] = {
    "unknown_model": (404, "invalid_request_error", "model_not_found"),
    "prompt_too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication_failed": (401, "invalid_request_error", "invalid_api_key"),
    "rate_limited": (429, "rate_limit_error", "rate_limit_exceeded"),
    "budget_exceeded": (429, "insufficient_quota", "insufficient_quota"),
}
"""Our code to the status, type and code that OpenAI's API gives for the same. Other codes stay ours."""
_PARAMETERS = {"base_model": "model", "path": "model", "session_id": "model"}
"""Keys of our errors that the caller knows under another name."""


def error_response(error: Exception, request_id: str) -> Response:
    """What a client is told about an exception; never a traceback."""
    status, body, retryable = openai_error(error, request_id)
    # Else the client sends any 409, 429 or 5xx twice more, a budget that is used up among them.
    headers = {**error_headers(error), "x-should-retry": "true" if retryable else "false"}
    return JSONResponse(body, status_code=status, headers=headers)


def openai_error(error: Exception, request_id: str) -> tuple[int, dict[str, Any], bool]:
    """Status, ``{"error": {"message", "type", "param", "code"}}``, and whether to try again."""
    status, known = known_error(error, request_id)
    # OpenAI answers 400 to what is well-formed and wrong, too.
    status = 400 if status == 422 else status
    kind = "invalid_request_error" if status < 500 else "server_error"
    status, kind, code = _AS_OPENAI.get(known.code, (status, kind, known.code))
    named = known.details.get("key") or next((key for key in _PARAMETERS if key in known.details), None)
    param = _PARAMETERS.get(named, named) if isinstance(named, str) else None
    body = {"message": known.message, "type": kind, "param": param, "code": code}
    return status, {"error": body}, known.is_retryable()
