"""The way to an endpoint for calls that are made once or more for every operation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .auth import authenticated


class PlainRoute(APIRoute):
    """Hands an endpoint the request, its project, the service and the path's parameters, and no more.

    FastAPI works out anew for each request what an endpoint's arguments need, which takes as long as
    the service does for the operation. The document and the errors are FastAPI's still.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            project = await authenticated(request)  # before anything of the body is read
            service = request.app.state.service
            response: Response = await endpoint(
                request=request, project=project, service=service, **request.path_params
            )
            return response

        return handle
