"""Who is asking, and whether they may: decided for the very route that was chosen, never by its path.

A path test in a middleware can be passed by a path that the router reads differently
(CVE-2026-48710). Every route is a `KeyedRoute` (`create_app` refuses others), which asks before
anything of the body is read, and every router has `authenticated` as its dependency.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from fastapi import Depends, Request

from ..errors import AuthenticationFailed, PermissionDenied
from ..service.keys import Caller, Keys, Scope
from ..service.projects import DEFAULT_PROJECT
from .guard import BodyBound

Authenticate: TypeAlias = Callable[[Request], Awaitable[Caller]]
"""Whom a request comes from; raises `AuthenticationFailed`."""
Need: TypeAlias = Literal["info", "read", "usage", "sample", "full", "operate"]
"""What a route asks of a key; a route that says nothing (`needs`) is for ``full`` ones."""

PROJECT_HEADER = "x-trainsession-project"
_MAY: dict[Scope, frozenset[Need]] = {
    "full": frozenset({"info", "read", "usage", "sample", "full"}),
    "read": frozenset({"info", "read", "usage"}),
    "sample": frozenset({"info", "sample"}),
    "operator": frozenset({"usage", "operate"}),
}
_NEEDS: dict[Any, Need] = {}
_F = TypeVar("_F", bound=Callable[..., Any])


def needs(need: Need) -> Callable[[_F], _F]:
    """Open an endpoint to keys that may less than everything.

    ``info`` is for every key of a project, ``read`` for those that look at it, ``sample`` for those that
    draw samples, ``operate`` for the operator alone and ``usage`` for the operator and who may read. An
    endpoint that a ``sample`` key reaches takes a `CallerOf`, not a `Project`, and hands the service what
    the caller is restricted to (`Caller.only`).
    """

    def remember(endpoint: _F) -> _F:
        _NEEDS[endpoint] = need
        return endpoint

    return remember


async def allow_all(request: Request) -> Caller:
    """For a service that only this machine's user reaches, who is its operator: a private socket, or loopback."""
    return Caller(DEFAULT_PROJECT, operator=True)


def by_key(keys: Keys) -> Authenticate:
    """For a service that others reach: ``Authorization: Bearer <API key>``, looked up for each request."""

    async def authenticate(request: Request) -> Caller:
        given = request.headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("this service asks for an API key: send `Authorization: Bearer <key>`, once")
        caller = await keys.verify(key.strip())
        project = request.headers.get(PROJECT_HEADER)
        if project is not None and project != caller.project:
            raise PermissionDenied("this API key is of another project than the one that was asked for")
        return caller

    return authenticate


async def authenticated(request: Request) -> Caller:
    """The caller, who may use the route that was chosen; found once for each request.

    Raises:
        AuthenticationFailed: no key, or not a valid one.
        PermissionDenied: the key's scope does not cover this route.
        PayloadTooLarge: the body is declared larger than the project's may be.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    caller = await ask_again(request)
    need = _NEEDS.get(request.scope.get("endpoint"), "full")
    if need not in _MAY[caller.scope] and not (need == "operate" and caller.operator):
        scopes = [scope for scope, may in _MAY.items() if need in may]
        raise PermissionDenied(
            f"this API key has scope {caller.scope}, and this call needs {' or '.join(scopes)}",
            details={"scope": caller.scope, "needs": scopes},
        )
    body: BodyBound | None = getattr(request.state, "body", None)
    if body is not None:
        body.lower((await request.app.state.service.limits(caller.project)).max_body_bytes)
    request.state.caller = caller
    return caller


async def ask_again(request: Request) -> Caller:
    """The caller as of now: a key may be revoked while its request waits or streams.

    Raises:
        AuthenticationFailed: it was.
    """
    authenticate: Authenticate = request.app.state.authenticate
    return await authenticate(request)


async def _whole_project(request: Request) -> str:
    caller = await authenticated(request)
    if caller.only is not None:
        raise PermissionDenied("this API key can only draw samples", details={"scope": caller.scope})
    return caller.project


CallerOf = Annotated[Caller, Depends(authenticated)]
"""For an endpoint that hands on what its caller is restricted to."""
Project = Annotated[str, Depends(_whole_project)]
"""The caller's project, for an endpoint that looks at all of it: keys restricted to samples are refused."""
