"""The ways to an endpoint: all ask for the key first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .auth import authenticated

_GIVEN = frozenset({"request", "caller", "service"})


class KeyedRoute(APIRoute):
    """Asks for the key before anything of the body is read; FastAPI's dependencies come after that."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request.state.route = self.path
            await authenticated(request)
            return await answer(request)

        return handle


class PlainRoute(KeyedRoute):
    """For calls that are made once or more for every operation: hands an endpoint the request, its
    caller, the service and the path's parameters, and no more.

    FastAPI works out anew for each request what an endpoint's arguments need, which takes as long as
    the service does for the operation. The document and the errors are FastAPI's still.

    Raises:
        TypeError: the endpoint or its router asks for something that would not be done.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        takes = set(inspect.signature(self.endpoint).parameters)
        if unknown := takes - _GIVEN - set(self.param_convertors):
            raise TypeError(f"{self.path}: a PlainRoute has no {', '.join(sorted(unknown))} for its endpoint")
        if ignored := [d.dependency for d in self.dependencies if d.dependency is not authenticated]:
            raise TypeError(f"{self.path}: a PlainRoute would ignore the dependency {ignored[0]}")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            request.state.route = self.path
            caller = await authenticated(request)
            service = request.app.state.service
            response: Response = await endpoint(request=request, caller=caller, service=service, **request.path_params)
            return response

        return handle
