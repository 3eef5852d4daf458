"""``openai`` clients of a service, configured; the package is loaded when the first one is made."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from .connection import Connection

SESSION_HEADER = "X-TrainSession-Session"
_PATH = "/openai/v1"
_NO_KEY = "none"
"""The client insists on a key; a service that needs none ignores it."""


def blocking(connection: Connection, payer: str | None) -> OpenAI:
    """A client for scripts. ``payer`` is the session that its tokens are metered for; None: that of the weights.

    Raises:
        InvalidRequest: the package ``openai`` is not installed.
    """
    _require()
    import httpx
    from openai import OpenAI

    http = httpx.Client(transport=connection.transport.blocking_connection(), follow_redirects=True)
    return OpenAI(**_settings(connection, payer), http_client=http)  # type: ignore[arg-type]


def asynchronous(connection: Connection, payer: str | None) -> AsyncOpenAI:
    """The same for coroutines; it belongs to the event loop that first uses it."""
    _require()
    import httpx
    from openai import AsyncOpenAI

    http = httpx.AsyncClient(transport=connection.transport.another_connection(), follow_redirects=True)
    return AsyncOpenAI(**_settings(connection, payer), http_client=http)  # type: ignore[arg-type]


def _settings(connection: Connection, payer: str | None) -> dict[str, Any]:
    transport = connection.transport
    return {
        "base_url": transport.base_url + _PATH,
        "api_key": transport.api_key or _NO_KEY,
        "default_headers": {**transport.extra_headers, **({SESSION_HEADER: payer} if payer else {})},
    }


def _require() -> None:
    if importlib.util.find_spec("openai") is None:
        raise InvalidRequest("an openai client needs the package openai: pip install 'trainsession[openai]'")
