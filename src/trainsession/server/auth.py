"""Who is asking: a dependency of every router, never a test on a path.

A path test in a middleware can be passed by a path that the router reads differently
(CVE-2026-48710); a dependency runs for the very route that was chosen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeAlias

from fastapi import Depends, Request

Authenticate: TypeAlias = Callable[[Request], Awaitable[str]]
"""The project that a request belongs to; raises `AuthenticationFailed`."""

DEFAULT_PROJECT = "default"


async def allow_all(request: Request) -> str:
    """For a service that only this machine's user reaches: a private socket, or loopback."""
    return DEFAULT_PROJECT


async def authenticated(request: Request) -> str:
    authenticate: Authenticate = request.app.state.authenticate
    return await authenticate(request)


Project = Annotated[str, Depends(authenticated)]
