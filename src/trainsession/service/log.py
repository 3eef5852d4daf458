"""The operation log: what was accepted, how it ended, and what it cost. SQL and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from .. import wire
from ..errors import (
    BudgetExceeded,
    NotFound,
    SessionClosed,
    SessionFenced,
    TrainSessionError,
    from_wire,
)
from ..store.clock import latest_now
from ..store.prepared import Prepared
from ..store.schema import budgets, json_type, operations, sessions
from ..store.store import Store, Stored
from .bodies import Body, parse_packed
from .budgets import HAS_BUDGET, hold, hold_one
from .endings import Ending
from .ids import new_id
from .ledger import settle
from .prices import Quote
from .requests import OperationRequest, OperationResult
from .retries import FIND, Logged, check_same, same_samples
from .session import Session

SAMPLE = "sample"
"""Kind and idempotency scope of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """``new`` is False for a retry of something that the log already holds; ``error`` is why it was refused, now
    or the first time."""

    operation_id: str
    seq: int
    new: bool
    error: TrainSessionError | None = None


@dataclass(frozen=True, slots=True)
class AcceptedSamples:
    """Of a retry the ids of its first time, ``earlier``, in its order; else those that were ``refused``."""

    earlier: list[str] | None
    refused: set[str]


class OperationLog:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def accept(
        self,
        session: Session,
        request: OperationRequest,
        body: Stored,
        tokens: int,
        quote: Quote | None = None,
        error: TrainSessionError | None = None,
    ) -> Accepted:
        """Log a training operation; with ``error``, or where the budget does not hold its ``quote``, as one that
        was refused and failed at once.

        Raises:
            SessionFenced, SessionClosed: as of the moment of the transaction.
            SequenceConflict: the number or key stands for something else already.
        """

        def write(connection: sa.Connection) -> Accepted:
            found = FIND.rows(
                connection, {"session": session.id, "seq": request.seq, "key": request.idempotency_key or None}
            )
            state, epoch, next_seq, has_budget, *_ = found[0]
            _check_open(state, epoch, request.epoch)
            same = [Logged(*row[4:]) for row in found if row[4] is not None]
            for old in same:
                check_same(old, request, body.sha256)
            if same:
                return Accepted(operation_id=same[0].id, seq=same[0].seq, new=False, error=same[0].refusal())
            seq = request.seq
            if seq is None:
                last = connection.execute(_LAST, {"session": session.id}).scalar() or 0
                seq = max(last + 1, next_seq)
            now = time.time()
            refused = error
            if error is None and quote is not None and has_budget:
                refused = hold_one(connection, session.project, quote, now)
            operation_id = new_id("op")
            if refused is not None:
                refused.details["operation_id"] = operation_id  # anew where the transaction is
            values: dict[str, Any] = {
                "id": operation_id,
                "project": session.project,
                "session_id": session.id,
                "seq": seq,
                "kind": request.kind,
                "scope": session.id,
                "idempotency_key": request.idempotency_key or None,
                "weights": None,
                "state": "queued" if refused is None else "failed",
                "tokens": tokens,
                "quote": None if quote is None or refused is not None else quote.to_row(),
                "created_at": now,
                "finished_at": None if refused is None else now,
                "error": None if refused is None else refused.to_wire(),
                **body.columns("body"),
            }
            _INSERT.run(connection, values)
            return Accepted(operation_id=operation_id, seq=seq, new=True, error=refused)

        return await self._store.write(write)

    async def accept_samples(
        self, rows: Sequence[Mapping[str, Any]], quotes: Sequence[Quote], whole: bool
    ) -> AcceptedSamples:
        """Log samples, all of them in one commit; those that the budget does not hold as failed.

        Args:
            whole: Log none where one does not fit.

        Raises:
            SequenceConflict: the first one's idempotency key was used for other samples.
            BudgetExceeded: none fits, or not all of a ``whole``; nothing was logged.
        """

        def write(connection: sa.Connection) -> AcceptedSamples | BudgetExceeded:
            keys = [row["idempotency_key"] for row in rows if row["idempotency_key"]]
            if keys:
                old = connection.execute(
                    sa.select(operations.c.id, operations.c.idempotency_key, operations.c.body_sha256)
                    .where(operations.c.project == rows[0]["project"], operations.c.scope == SAMPLE)
                    .where(operations.c.idempotency_key.in_(keys))
                ).all()
                if old:
                    return AcceptedSamples(same_samples(rows, {row.idempotency_key: row for row in old}), set())
            held = hold(connection, rows, quotes, whole)
            if isinstance(held, BudgetExceeded):
                return held
            logged, refused = held
            connection.execute(sa.insert(operations), logged)
            return AcceptedSamples(None, refused)

        accepted = await self._store.write(write)
        if isinstance(accepted, BudgetExceeded):
            raise accepted
        return accepted

    async def knows(self, session: Session, request: OperationRequest) -> bool:
        """Whether the number or the key stands for an operation already."""
        call = {"session": session.id, "seq": request.seq, "key": request.idempotency_key or None}
        found = await self._store.read(lambda connection: FIND.rows(connection, call))
        return any(row[4] is not None for row in found)

    async def finish(self, *endings: Ending) -> None:
        """Commit how operations ended, with their ledger rows and their session's advance."""

        def write(connection: sa.Connection) -> None:
            for ending in endings:
                end(connection, ending)

        await self._store.write(write)

    async def body(self, operation_id: str) -> bytes:
        """The packed body.

        Raises:
            StorageError: it was deleted or is damaged.
        """
        columns = (operations.c.body, operations.c.body_sha256, operations.c.body_blob)
        row = await self._store.read(
            lambda connection: connection.execute(sa.select(*columns).where(operations.c.id == operation_id)).one()
        )
        return await self._store.load(Stored.of_row(row, "body"))

    async def forward(self, session_id: str, seq: int) -> tuple[str, Body] | None:
        """Id and body of the forward_keep of that number; None if there is none that succeeded."""
        query = sa.select(operations.c.id).where(
            operations.c.session_id == session_id,
            operations.c.seq == seq,
            operations.c.kind == "forward_keep",
            operations.c.state == "done",
        )
        operation_id = await self._store.read(lambda connection: connection.execute(query).scalar())
        return None if operation_id is None else (operation_id, parse_packed(await self.body(operation_id)))

    async def results(self, project: str, ids: Sequence[str]) -> dict[str, OperationResult | None]:
        """What the log knows of operations: None where one has not ended, no entry where unknown."""
        columns = (
            operations.c.id,
            operations.c.state,
            operations.c.error,
            operations.c.result,
            operations.c.result_sha256,
            operations.c.result_blob,
        )
        query = sa.select(*columns).where(operations.c.project == project, operations.c.id.in_(list(ids)))
        rows = await self._store.read(lambda connection: connection.execute(query).all())
        return {row.id: await self._result(row) for row in rows}

    async def is_open_sample(self, project: str, operation_id: str) -> bool:
        """Whether it is a sample that has not ended."""
        query = sa.select(operations.c.id).where(operations.c.project == project, operations.c.id == operation_id)
        query = query.where(operations.c.kind == SAMPLE, operations.c.state == "queued")
        return await self._store.read(lambda connection: connection.execute(query).first()) is not None

    async def _result(self, row: Any) -> OperationResult | None:
        if row.state == "queued":
            return None
        if row.state != "done":
            return OperationResult(row.id, row.state, error=from_wire(row.error or {}))
        if row.result is None and row.result_blob is None:
            gone = NotFound(f"the result of {row.id} was kept for its time and then deleted")
            return OperationResult(row.id, "failed", error=gone)
        return OperationResult(row.id, "done", wire.unpack(await self._store.load(Stored.of_row(row, "result"))))

    async def mark_cancelled(self, operation_id: str) -> None:
        """A running sample is to stop; durable when this returns. Of one that has ended nothing changes."""
        call = {"operation": operation_id, "now": time.time()}
        await self._store.write(lambda connection: _MARK_CANCELLED.run(connection, call))

    def acknowledge(self, project: str, ids: Sequence[str]) -> None:
        """The client has these; a result that is acknowledged is deleted an hour later."""
        if ids:
            now = latest_now()
            calls = [{"operation": operation_id, "of": project, "now": now} for operation_id in ids]
            self._store.write_lazily(lambda connection: _ACKNOWLEDGE.run(connection, *calls))


_INSERT = Prepared(
    sa.insert(operations),
    [
        column.name
        for column in operations.c
        if column.name not in ("acked_at", "cancelled_at", "owner") and not column.name.startswith("result")
    ],
)
_ACKNOWLEDGE = Prepared(
    sa.update(operations)
    .where(operations.c.id == sa.bindparam("operation"), operations.c.project == sa.bindparam("of"))
    .where(operations.c.finished_at.is_not(None), operations.c.acked_at.is_(None))
    .values(acked_at=sa.bindparam("now"))
)
_MARK_CANCELLED = Prepared(
    sa.update(operations)
    .where(operations.c.id == sa.bindparam("operation"), operations.c.state == sa.literal_column("'queued'"))
    .values(cancelled_at=sa.bindparam("now"))
)
_LAST = sa.select(sa.func.max(operations.c.seq)).where(operations.c.session_id == sa.bindparam("session"))
_FINISH = Prepared(
    sa.update(operations)
    .where(operations.c.id == sa.bindparam("operation"), operations.c.state == sa.literal_column("'queued'"))
    .values(
        state=sa.bindparam("new_state"),
        finished_at=sa.bindparam("now"),
        error=sa.bindparam("new_error", type_=json_type(none_as_null=True)),
        result=sa.bindparam("new_result"),
        result_sha256=sa.bindparam("new_sha256"),
        result_blob=sa.bindparam("new_blob"),
    )
    .returning(
        operations.c.session_id,
        operations.c.seq,
        operations.c.project,
        sa.type_coerce(operations.c.quote, sa.String),
        HAS_BUDGET.where(budgets.c.project == operations.c.project).scalar_subquery(),
    )
)

_ADVANCE = Prepared(
    sa.update(sessions)
    .where(sessions.c.id == sa.bindparam("session"), sessions.c.next_seq <= sa.bindparam("seq"))
    .values(
        next_seq=sa.bindparam("following"),
        used_at=sa.bindparam("now"),
        step=sa.bindparam("new_step"),
        progress=sa.bindparam("new_progress", type_=json_type()),
    )
)


def end(connection: sa.Connection, ending: Ending) -> None:
    """Write how an operation ended, unless it had ended before."""
    now = time.time()
    stored = ending.result
    found = _FINISH.rows(
        connection,
        {
            "operation": ending.operation_id,
            "new_state": ending.state,
            "now": now,
            "new_error": None if ending.error is None else ending.error.to_wire(),
            "new_result": None if stored is None else stored.inline,
            "new_sha256": None if stored is None else stored.sha256,
            "new_blob": None if stored is None else stored.blob,
        },
    )
    if not found:  # one end each, so nothing is metered twice
        return
    session_id, seq, project, quote, has_budget = found[0]
    if ending.charges or ending.refund is not None or (quote is not None and has_budget):
        settle(connection, ending, project, quote, has_budget=bool(has_budget), now=now)
    if ending.advance is not None:
        # Of two operations whose results are written in the other order, the later one's state stays.
        _ADVANCE.run(
            connection,
            {
                "session": session_id,
                "seq": seq,
                "following": seq + 1,
                "now": now,
                "new_step": ending.advance.step,
                "new_progress": ending.advance.progress,
            },
        )
    if ending.also is not None:
        ending.also(connection)


def _check_open(state: str, present: int, epoch: int | None) -> None:
    if state == "closed":
        raise SessionClosed("the session is closed; create a new one, from a checkpoint where you have one")
    check_epoch(present, epoch)


def check_epoch(present: int, epoch: int | None) -> None:
    """Raise `SessionFenced` for a client that another one took the session over from."""
    if epoch is not None and epoch != present:
        raise SessionFenced(
            f"another client attached to this session (epoch {present}, yours is {epoch}); attach to take it over",
            details={"epoch": present, "yours": epoch},
        )
