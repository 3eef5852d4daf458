"""Retries: what a submit finds in the log that has its number or its key already."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..errors import SequenceConflict, TrainSessionError, from_wire
from ..store.prepared import Prepared
from ..store.schema import budgets, operations, sessions
from .budgets import HAS_BUDGET
from .requests import OperationRequest
from .session import MISSING


@dataclass(frozen=True, slots=True)
class Logged:
    """What `FIND` says of an operation that has the number or the key already."""

    id: str
    seq: int
    body_sha256: str
    idempotency_key: str | None
    kind: str
    created_at: float
    finished_at: float | None
    error: str | None

    def refusal(self) -> TrainSessionError | None:
        """Why it was refused; None for one that was accepted, however it ended."""
        # Written as ended by the very statement that logged it, so both times are one.
        if self.kind == MISSING or self.finished_at != self.created_at:
            return None
        error = json.loads(self.error or "null")
        return None if error is None else from_wire(error)


def check_same(old: Logged, request: OperationRequest, sha256: str) -> None:
    """Raise `SequenceConflict` unless it is the same call again."""
    by_key = bool(request.idempotency_key) and old.idempotency_key == request.idempotency_key
    what = f"idempotency key {request.idempotency_key!r}" if by_key else f"sequence number {old.seq}"
    details = {"seq": old.seq, "operation_id": old.id}
    if old.kind == MISSING:
        raise SequenceConflict(f"{what} came too late: it was given up (gap_timeout of the session)", details=details)
    if old.body_sha256 != sha256:
        raise SequenceConflict(f"{what} was used by a {old.kind} with other parameters", details=details)
    if request.seq is not None and old.seq != request.seq:
        raise SequenceConflict(f"{what} was used with sequence number {old.seq}, not {request.seq}", details=details)


def same_samples(rows: Sequence[Mapping[str, Any]], old: Mapping[str, Any]) -> list[str]:
    """The ids of the first time. Raises `SequenceConflict` unless they are the same samples again."""
    ids: list[str] = []
    for row in rows:
        match = old.get(row["idempotency_key"])
        if match is None or match.body_sha256 != row["body_sha256"]:
            raise SequenceConflict("this idempotency key was used for other samples")
        ids.append(match.id)
    return ids


# Both halves of the OR are unique keys: SQLite looks each up. With the session's id alone beside the
# idempotency key it read the whole session for every operation.
FIND = Prepared(
    sa.select(
        sessions.c.state,
        sessions.c.epoch,
        sessions.c.next_seq,
        HAS_BUDGET.where(budgets.c.project == sessions.c.project).scalar_subquery(),
        operations.c.id,
        operations.c.seq,
        operations.c.body_sha256,
        operations.c.idempotency_key,
        operations.c.kind,
        operations.c.created_at,
        operations.c.finished_at,
        sa.type_coerce(operations.c.error, sa.String),
    )
    .outerjoin(
        operations,
        sa.or_(
            sa.and_(operations.c.session_id == sessions.c.id, operations.c.seq == sa.bindparam("seq")),
            sa.and_(
                operations.c.project == sessions.c.project,
                operations.c.scope == sessions.c.id,
                operations.c.idempotency_key == sa.bindparam("key"),
            ),
        ),
    )
    .where(sessions.c.id == sa.bindparam("session"))
)
"""State, epoch and advance of the session, whether its project has a budget, and the fields of `Logged`."""
