"""The metrics that a training loop logs for its session."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ..errors import InvalidRequest
from ..store.schema import metrics as table
from ..store.store import Store


async def append(store: Store, project: str, session_id: str, metrics: Mapping[str, Any], step: int | None) -> None:
    """Add a row. Raises `InvalidRequest` for what is not JSON."""
    try:
        json.dumps(dict(metrics))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"metrics: not JSON: {error}", details={"key": "metrics"}) from None
    row = {"project": project, "session_id": session_id, "step": step, "time": time.time(), "metrics": dict(metrics)}
    await store.write(lambda connection: connection.execute(sa.insert(table).values(**row)))


async def read(store: Store, session_id: str) -> list[dict[str, Any]]:
    """Rows ``{"step", "time", "metrics"}``, oldest first."""
    query = sa.select(table.c.step, table.c.time, table.c.metrics)
    query = query.where(table.c.session_id == session_id).order_by(table.c.id)
    rows = await store.read(lambda connection: connection.execute(query).mappings().all())
    return [dict(row) for row in rows]
