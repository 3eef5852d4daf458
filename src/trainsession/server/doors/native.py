"""The native door: `docs/wire.md`, route by route. It translates and decides nothing."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel as PydanticModel

from ..._version import __version__
from ...errors import InvalidRequest, PermissionDenied, ServiceUnavailable, UnsupportedMediaType
from ...service.requests import OperationRequest, SampleRequest
from ...service.service import Service
from ...types import SessionInfo
from ...wire import MEDIA_TYPE, pack
from .. import schemas
from ..access_log import note
from ..auth import CallerOf, Project, ask_again, authenticated, needs
from ..responses import MsgpackResponse, error_body, file_response, media_type, unpack_body
from ..routes import KeyedRoute, PlainRoute
from ..waiting import ASK_AGAIN_SECONDS, unless_closing, while_connected

JSON = "application/json"
CSV = "text/csv"
FRAMES_MEDIA_TYPE = "application/vnd.trainsession.v1+msgpack-frames"
"""uint32 little-endian length, then that many bytes of msgpack; again and again."""
_FRAME_LENGTH = struct.Struct("<I")
_ERROR_SCHEMA = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
# Errors are JSON on every route; FastAPI would give a "model" the media type of the route.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": {JSON: _ERROR_SCHEMA}, "description": "A trainsession error."} for status in ("4XX", "5XX", 422)
}


def _reads(body: type[PydanticModel], *media_types: str) -> dict[str, Any]:
    """OpenAPI of a request body that the endpoint reads itself: its media types and its logical structure."""
    schema = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(media_types, schema)}}


def _answers(body: type[PydanticModel], others: dict[int | str, Any] | None = None) -> dict[str, Any]:
    """A route's msgpack answer in OpenAPI, where FastAPI would call it a string."""
    schema = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    success = {"description": "Successful Response", "content": {MEDIA_TYPE: schema}}
    return {"response_class": Response, "responses": {200: success, **(others or {})}}


async def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def _msgpack_body(request: Request) -> dict[str, Any]:
    """The request's msgpack map, read only after the key was checked."""
    if media_type(request.headers) != MEDIA_TYPE:
        raise UnsupportedMediaType(f"this call takes {MEDIA_TYPE}")
    body = await unpack_body(await request.body())
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a map, got {type(body).__name__}")
    return body


ServiceOf = Annotated[Service, Depends(_service)]

public = APIRouter(prefix="/v1", tags=["service"])
"""Needs no key: says that a service is here, and which."""
router = APIRouter(prefix="/v1", dependencies=[Depends(authenticated)], responses=ERRORS, route_class=KeyedRoute)
hot = APIRouter(
    prefix="/v1", tags=["operations"], dependencies=[Depends(authenticated)], responses=ERRORS, route_class=PlainRoute
)
"""The calls of every operation and sample; goes before the others, as routes are tried in order."""


# --- operations, samples, results ------------------------------------------------------------


@hot.post(
    "/sessions/{session_id}/operations",
    response_model=schemas.OperationAccepted,
    openapi_extra=_reads(schemas.OperationBody, MEDIA_TYPE),
)
async def submit(session_id: str, request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    """Submit one operation; answered once it is durable."""
    operation = OperationRequest.from_wire(await _msgpack_body(request))
    operation_id, seq = await service.submit(caller.project, session_id, operation)
    note(request, [operation_id])
    return JSONResponse({"operation_id": operation_id, "seq": seq})


@router.post("/operations/{operation_id}/cancel", tags=["operations"], response_model=schemas.Cancelled)
@needs("sample")
async def cancel(operation_id: str, request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    note(request, [operation_id])
    return JSONResponse({"cancelled": await service.cancel(caller.project, operation_id, caller.only)})


@hot.post(
    "/samples",
    response_model=schemas.SamplesAccepted,
    openapi_extra=_reads(schemas.SamplesBody, MEDIA_TYPE),
)
@needs("sample")
async def submit_samples(request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    """Submit sampling requests, all or none; answered once they are durable."""
    body = await _msgpack_body(request)
    unknown = sorted(str(key) for key in body if key not in ("weights", "requests", "idempotency_key"))
    weights, requests, key = body.get("weights"), body.get("requests"), body.get("idempotency_key", "")
    if unknown or not isinstance(weights, dict) or not isinstance(requests, list) or not isinstance(key, str):
        what = f", got {unknown[0]!r}" if unknown else ""
        raise InvalidRequest(f"the body is {{weights: map, requests: list, idempotency_key?: string}}{what}")
    items = [SampleRequest.from_wire(item) for item in requests]
    ids = await service.submit_samples(caller.project, weights, items, idempotency_key=key, only=caller.only)
    note(request, ids)
    return JSONResponse({"operation_ids": ids})


@hot.post("/results", openapi_extra=_reads(schemas.PollBody, JSON), **_answers(schemas.ResultsBody))
@needs("sample")
async def poll_results(request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    """A long poll: answered when one of ``wait`` has ended, or after ``timeout`` seconds."""
    body = schemas.PollBody.model_validate_json(await request.body())
    poll = service.results(caller.project, body.wait, body.ack, body.timeout, caller.only)
    results = await while_connected(request, poll) if body.timeout else await poll
    if body.timeout:
        await ask_again(request)
    note(request, [result.operation_id for result in results.results])
    return MsgpackResponse(
        {"results": [result.to_wire() for result in results.results], "positions": results.positions}
    )


@router.get(
    "/samples/{operation_id}/stream",
    tags=["operations"],
    response_class=StreamingResponse,
    responses={200: {"content": {FRAMES_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
@needs("sample")
async def stream(
    operation_id: str,
    request: Request,
    caller: CallerOf,
    service: ServiceOf,
) -> Response:
    """The tokens of a sample as they come, one msgpack frame an event."""
    note(request, [operation_id])
    events = service.stream(caller.project, operation_id, caller.only)
    # The first event decides whether this is an answer or an error with its own status.
    first = await while_connected(request, anext(events, None), lambda: ask_again(request))
    await ask_again(request)
    return StreamingResponse(_frames(request, first, events), media_type=FRAMES_MEDIA_TYPE)


async def _frames(
    request: Request, event: dict[str, Any] | None, events: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    asked = time.monotonic()
    try:
        while event is not None:
            # It goes on for so long at most after its key was revoked.
            if time.monotonic() > asked + ASK_AGAIN_SECONDS:
                await ask_again(request)
                asked = time.monotonic()
            yield _frame(event)
            event = await unless_closing(request, anext(events, None), lambda: ask_again(request))
    except ServiceUnavailable:
        return  # no last frame: the client reads it anew, here or at this service's successor
    except Exception as error:
        yield _frame({"error": error_body(error, request.state.request_id)[1]})


def _frame(event: dict[str, Any]) -> bytes:
    data = pack(event)
    return _FRAME_LENGTH.pack(len(data)) + data


# --- the service ----------------------------------------------------------------------------


@public.get("/health", response_model=schemas.Health)
async def health() -> Response:
    return JSONResponse({"status": "ok", "version": __version__})


@router.get("/limits", tags=["service"], response_model=dict[str, float])
@needs("info")
async def limits(caller: CallerOf, service: ServiceOf) -> Response:
    """Those of the caller's project."""
    return JSONResponse((await service.limits(caller.project)).to_wire())


# --- base models ----------------------------------------------------------------------------


@router.get("/models", tags=["models"], response_model=schemas.Models)
@needs("info")
async def list_models(service: ServiceOf) -> Response:
    return JSONResponse({"models": [asdict(model) for model in service.list_base_models()]})


@router.get(
    "/models/{name:path}/tokenizer",
    tags=["models"],
    **_answers(schemas.TokenizerBundle, {304: {"description": "The client has this bundle."}}),
)
@needs("info")
async def tokenizer(name: str, request: Request, service: ServiceOf) -> Response:
    """The tokenizer's files and chat template; ``ETag`` is their content hash."""
    digest, files = await service.tokenizer_bundle(name)
    etag = f'"{digest}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    return MsgpackResponse({"hash": digest, "files": files}, headers={"ETag": etag})


# --- sessions -------------------------------------------------------------------------------


@router.post("/sessions", tags=["sessions"], response_model=schemas.SessionOpened)
async def create_session(body: schemas.CreateSessionBody, project: Project, service: ServiceOf) -> Any:
    session, epoch = await service.create_session(project, body.to_service())
    return {"session": session, "epoch": epoch}


@router.get("/sessions", tags=["sessions"], response_model=schemas.Sessions)
@needs("read")
async def list_sessions(project: Project, service: ServiceOf) -> Any:
    return {"sessions": await service.list_sessions(project)}


@router.get("/sessions/{session_id}", tags=["sessions"], response_model=SessionInfo)
@needs("info")
async def get_session(session_id: str, caller: CallerOf, service: ServiceOf) -> Any:
    return await service.get_session(caller.project, session_id, caller.only)


@router.post("/sessions/{session_id}/attach", tags=["sessions"], response_model=schemas.SessionAttached)
async def attach(session_id: str, project: Project, service: ServiceOf) -> Any:
    """Take a session over: clients of older epochs can no longer submit."""
    attached = await service.attach(project, session_id)
    return {
        "session": attached.session,
        "epoch": attached.epoch,
        "next_seq": attached.next_seq,
        "unfetched": attached.unfetched,
        "progress": attached.progress,
    }


@router.post("/sessions/{session_id}/close", tags=["sessions"], response_model=SessionInfo)
async def close_session(session_id: str, project: Project, service: ServiceOf) -> Any:
    return await service.close_session(project, session_id)


@router.post(
    "/sessions/{session_id}/log",
    tags=["sessions"],
    response_model=dict[str, Any],
    openapi_extra=_reads(schemas.MetricsBody, MEDIA_TYPE, JSON),
)
async def log_metrics(session_id: str, request: Request, project: Project, service: ServiceOf) -> Response:
    """Append to the session's metrics log; as msgpack a NaN stays a NaN."""
    if media_type(request.headers) == MEDIA_TYPE:
        body = schemas.MetricsBody.model_validate(await _msgpack_body(request))
    else:
        body = schemas.MetricsBody.model_validate_json(await request.body())
    await service.log_metrics(project, session_id, body.metrics, body.step)
    return JSONResponse({})


@router.get("/sessions/{session_id}/log", tags=["sessions"], **_answers(schemas.Log))
@needs("read")
async def read_log(session_id: str, project: Project, service: ServiceOf) -> Response:
    return MsgpackResponse({"rows": await service.read_log(project, session_id)})


# --- checkpoints, adapters, usage -----------------------------------------------------------


@router.get("/checkpoints", tags=["checkpoints"], response_model=schemas.Checkpoints)
@needs("info")
async def list_checkpoints(
    query: Annotated[schemas.SessionQuery, Query()], caller: CallerOf, service: ServiceOf
) -> Any:
    return {"checkpoints": await service.list_checkpoints(caller.project, query.session_id, caller.only)}


@router.delete("/checkpoints", tags=["checkpoints"], response_model=dict[str, Any])
async def delete_checkpoint(
    query: Annotated[schemas.PathQuery, Query()], project: Project, service: ServiceOf
) -> Response:
    await service.delete_checkpoint(project, query.path)
    return JSONResponse({})


@router.get("/checkpoints/files", tags=["checkpoints"], response_model=schemas.CheckpointFiles)
@needs("read")
async def checkpoint_files(
    query: Annotated[schemas.PathQuery, Query()], project: Project, service: ServiceOf
) -> Response:
    return JSONResponse({"files": await service.checkpoint_files(project, query.path)})


@router.get(
    "/checkpoints/file",
    tags=["checkpoints"],
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
@needs("read")
async def checkpoint_file(
    query: Annotated[schemas.FileQuery, Query()], project: Project, service: ServiceOf
) -> Response:
    return file_response(await service.read_checkpoint_file(project, query.path, query.name))


@router.post(
    "/adapters",
    tags=["checkpoints"],
    response_model=schemas.SavedBody,
    openapi_extra=_reads(schemas.AdapterBody, MEDIA_TYPE),
)
async def import_adapter(request: Request, project: Project, service: ServiceOf) -> Response:
    """A PEFT adapter becomes a ``weights`` checkpoint."""
    body = await _msgpack_body(request)
    unknown = sorted(str(key) for key in body if key not in ("base_model", "name", "files"))
    base_model, name, files = body.get("base_model"), body.get("name"), body.get("files")
    if unknown or not isinstance(base_model, str) or not isinstance(name, str) or not _is_file_map(files):
        what = f", got {unknown[0]!r}" if unknown else ""
        raise InvalidRequest(f"the body is {{base_model: string, name: string, files: {{name: bytes}}}}{what}")
    return JSONResponse(asdict(await service.import_adapter(project, base_model, name, cast(dict[str, bytes], files))))


def _is_file_map(files: Any) -> bool:
    return isinstance(files, dict) and all(isinstance(k, str) and isinstance(v, bytes) for k, v in files.items())


@router.get(
    "/usage",
    tags=["usage"],
    response_model=schemas.UsageReportBody,
    responses={200: {"content": {CSV: {"schema": {"type": "string"}}}}},
)
@needs("usage")
async def usage(query: Annotated[schemas.UsageParams, Query()], caller: CallerOf, service: ServiceOf) -> Response:
    """What was metered, as JSON, or its rows as CSV."""
    if query.all_projects and not caller.operator:
        raise PermissionDenied("all_projects: only an operator sees other projects", details={"scope": caller.scope})
    project = None if query.all_projects else caller.project
    report = await service.usage(project, query.session_id, **query.grouping())
    return Response(report.to_csv(), media_type=CSV) if query.format == "csv" else JSONResponse(report.to_wire())
