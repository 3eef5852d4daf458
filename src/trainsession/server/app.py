"""The HTTP application: routers, the guard in front of them, and one exception handler behind."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import Scope

from .._version import __version__
from ..errors import TrainSessionError
from ..service.leases import OwnedElsewhere
from ..service.service import Service
from .auth import Authenticate
from .doors import native, openai, operator
from .forwarding import Forwarder
from .guard import Guard
from .responses import error_response
from .routes import KeyedRoute
from .schemas import DESCRIBED

PUBLIC = frozenset({"/v1/health", "/healthz", "/readyz", "/openapi.json"})
"""Routes that need no key: that a service is here and works, and how it is spoken to."""


def create_app(
    service: Service,
    *,
    authenticate: Authenticate,
    hosts: Collection[str] | None = None,
    closing: asyncio.Future[None] | None = None,
) -> FastAPI:
    """The service over HTTP.

    Args:
        service: Open, and used on the event loop that serves this app.
        authenticate: Whom a request comes from, or `AuthenticationFailed`.
        hosts: Names that the ``Host`` header may carry (`guard.LOOPBACK_HOSTS`), or None for any.
        closing: Done when the server begins to stop: long polls and streams then end.
    """
    app = FastAPI(
        title="trainsession",
        version=__version__,
        description="Post-training sessions: train, sample, save and load.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.authenticate = authenticate
    app.state.closing = closing
    app.state.forwarder = Forwarder()
    app.state.tokenizers = openai.Tokenizers(service)
    app.include_router(native.hot)
    app.include_router(native.router)
    app.include_router(native.public)
    app.include_router(operator.router)
    app.include_router(operator.public)
    app.include_router(openai.hot)
    app.include_router(openai.router)
    _check_keyed(app)
    for kind in (TrainSessionError, RequestValidationError, ValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(OwnedElsewhere, _forward)
    app.add_middleware(Guard, hosts=hosts, answer=_answer)
    _describe_msgpack(app)
    return app


def _check_keyed(app: FastAPI) -> None:
    """Raise `TypeError` for a route that would answer without a key, other than those that are to."""
    for route in all_routes(app.router):
        if not isinstance(route, KeyedRoute) and getattr(route, "path", None) not in PUBLIC:
            raise TypeError(f"{route} would answer without a key: its router's route_class must be a KeyedRoute")


def all_routes(router: Any) -> Iterator[BaseRoute]:
    """Every route, however deep FastAPI keeps the routers that were included."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from all_routes(inner)


async def _answer_error(request: Request, error: Exception) -> Response:
    return _answer(error, request.scope)


async def _forward(request: Request, error: Exception) -> Response:
    assert isinstance(error, OwnedElsewhere)
    try:
        answer: Response = await request.app.state.forwarder.answer(request, error)
    except TrainSessionError as problem:
        return _answer(problem, request.scope)
    return answer


def _answer(error: Exception, scope: Scope) -> Response:
    """An error in the shape that the door's clients read; the path decides nothing else."""
    shape = openai.error_response if scope["path"].startswith(openai.PREFIX) else error_response
    return shape(error, scope["state"]["request_id"])


def _describe_msgpack(app: FastAPI) -> None:
    """Add the schemas of msgpack bodies and errors to OpenAPI, where FastAPI sees only what it parses itself."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        _, definitions = models_json_schema(
            [(model, "validation") for model in (*DESCRIBED, openai.ChatRequest, openai.CompletionRequest)],
            ref_template="#/components/schemas/{model}",
        )
        document["components"]["schemas"].update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
