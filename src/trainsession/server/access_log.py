"""One line for each request: which route, whose, how it went and how long. Nothing of what was in it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from ..service import tracing

log = logging.getLogger("trainsession.access")

SHOWN_OPERATIONS = 16
"""A line names so many operations at most, and counts the others."""
HUNG_UP = 499
"""The status of a request whose client was gone before the answer began."""
_OPERATION_ID = re.compile(r"op_[0-9a-z]{1,40}")


def note(request: Request, operation_ids: Sequence[str]) -> None:
    """Have the request's line name these operations."""
    request.state.operations = operation_ids


def write(scope: Scope, status: int, started: float) -> None:
    """Write the line, and the span, of a request that began at ``started`` (`time.perf_counter`) and has ended."""
    if not log.isEnabledFor(logging.INFO) and not tracing.is_on():
        return
    seconds = time.perf_counter() - started
    state: dict[str, Any] = scope.get("state", {})
    caller = state.get("caller")
    # Ids of a path are what the client wrote, which may be anything.
    operations = [name for name in state.get("operations", ()) if _OPERATION_ID.fullmatch(name)]
    fields = {
        "request_id": state.get("request_id"),
        "method": scope["method"],
        # Never the path itself: with no route behind it, it may hold anything, a key too.
        "route": state.get("route"),
        "status": status,
        "ms": round(seconds * 1000, 2),
        "project": None if caller is None else caller.project,
        "operations": operations[:SHOWN_OPERATIONS],
        "more_operations": max(0, len(operations) - SHOWN_OPERATIONS),
    }
    tracing.request(fields, seconds, Headers(scope=scope).get("traceparent"))
    shown = {key: value for key, value in fields.items() if value not in (None, [], 0)}
    log.info("%s %s %s", fields["method"], fields["route"] or "(no route)", status, extra={"fields": shown})
