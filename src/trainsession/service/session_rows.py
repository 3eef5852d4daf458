"""How a session is asked for, written down and read back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa

from ..errors import InvalidRequest, LimitExceeded, SequenceConflict
from ..limits import LIMITS, Limits
from ..store.schema import sessions
from ..types import LoraConfig, check_gap_timeout
from .requests import CreateSession
from .session import Session


def insert(connection: sa.Connection, values: dict[str, Any], limits: Limits) -> tuple[str, int, bool]:
    """(id, epoch, whether it is new): that of an earlier request with the same key, or a new row.

    Raises:
        SequenceConflict: the key made another session. LimitExceeded: too many live ones.
    """
    mine = sessions.c.project == values["project"]
    if values["idempotency_key"] is not None:
        same = sa.select(sessions.c.id, sessions.c.epoch, sessions.c.request_hash).where(
            mine, sessions.c.idempotency_key == values["idempotency_key"]
        )
        old = connection.execute(same).one_or_none()
        if old is not None:
            if old.request_hash != values["request_hash"]:
                raise SequenceConflict("this idempotency key made a session with other parameters")
            return old.id, old.epoch, False
    running = sa.select(sa.func.count()).where(mine, sessions.c.state == "running")
    count = connection.execute(running).scalar_one()
    bound = limits.max_live_sessions
    if count >= bound:
        raise LimitExceeded(
            f"the project has {count} live sessions, the limit max_live_sessions = {bound}; close some",
            details={"limit": "max_live_sessions", "bound": bound, "value": count},
        )
    connection.execute(sa.insert(sessions).values(**values))
    return values["id"], values["epoch"], True


def session_of(row: Any) -> Session:
    """The session of a row, without its queue."""
    return Session(
        id=row["id"],
        project=row["project"],
        kind=row["kind"],
        base_model=row["base_model"],
        base_identity=row["base_identity"],
        dtype=row.get("dtype"),
        lora=None if row["lora"] is None else LoraConfig.from_wire(row["lora"]),
        on_failure=row["on_failure"],
        gap_timeout=row["gap_timeout"],
        state=row["state"],
        epoch=row["epoch"],
        created_at=row["created_at"],
        name=row["name"],
        tags=tuple(row["tags"]),
        metadata=row["metadata"],
        from_checkpoint=row["from_checkpoint"],
        with_optimizer=row["with_optimizer"],
        step=row["step"],
        progress=row["progress"],
        next_run=row["next_seq"],
        decided_until=row["next_seq"],
        used_at=row["used_at"],
    )


def check(request: CreateSession) -> None:
    """Raise `InvalidRequest` or `LimitExceeded` for what no session can have."""
    check_gap_timeout(request.gap_timeout)
    LIMITS.check("max_name_length", len(request.name), "name")
    LIMITS.check("max_tags", len(request.tags), "tags")
    for tag in request.tags:
        LIMITS.check("max_name_length", len(tag), "tag")
    try:
        size = len(json.dumps(dict(request.metadata)))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"metadata: not JSON: {error}", details={"key": "metadata"}) from None
    LIMITS.check("max_metadata_bytes", size, "metadata")
    if request.with_optimizer and request.from_checkpoint is None:
        raise InvalidRequest("with_optimizer needs from_checkpoint", details={"key": "with_optimizer"})
    if request.kind == "sampler" and (request.lora is not None or request.from_checkpoint is not None):
        raise InvalidRequest("a sampler session trains nothing: it takes no lora and no from_checkpoint")


def hash_of(request: CreateSession) -> str:
    """Equal for equal requests: what a retry is known by."""
    lora = None if request.lora is None else request.lora.to_wire()
    fields = [
        request.base_model,
        request.kind,
        lora,
        request.name,
        list(request.tags),
        dict(request.metadata),
        request.on_failure,
        request.gap_timeout,
        request.from_checkpoint,
        request.with_optimizer,
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
