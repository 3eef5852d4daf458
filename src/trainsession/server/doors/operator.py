"""For whoever runs the service: probes, which need no key, and metrics, which need an operator's."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from .. import schemas
from ..auth import CallerOf, authenticated, needs
from ..routes import KeyedRoute
from .native import ERRORS, ServiceOf

public = APIRouter(tags=["operator"])
"""Needs no key, and tells nobody more than whether the service works."""
router = APIRouter(tags=["operator"], dependencies=[Depends(authenticated)], responses=ERRORS, route_class=KeyedRoute)


@public.get("/healthz", response_model=schemas.Alive)
async def healthz() -> Response:
    """The process lives and answers."""
    return JSONResponse({"status": "ok"})


@public.get("/readyz", response_model=schemas.Ready, responses={503: {"model": schemas.Ready}})
async def readyz(request: Request, service: ServiceOf) -> Response:
    """Whether it can take work: what it stores with can be written, and it is not about to stop."""
    closing: asyncio.Future[None] | None = request.app.state.closing
    checks = {**await service.check_ready(), "serving": closing is None or not closing.done()}
    ready = all(checks.values())
    body = {"ready": ready, "checks": checks, "engines_loaded": len(service.engines())}
    return JSONResponse(body, status_code=200 if ready else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
@needs("operate")
async def metrics(caller: CallerOf, service: ServiceOf) -> Response:
    """For Prometheus."""
    return Response(await service.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})
