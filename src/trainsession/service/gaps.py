"""Sequence numbers that never come: how long others wait for one, and what then becomes of them.

A number that is missing for the session's ``gap_timeout`` counts as an operation that failed: it is logged as
such and can no longer be used, its accumulation window is incomplete, and ``on_failure`` says what becomes
of the operations behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ..errors import OperationSkipped, TrainSessionError
from ..store.schema import operations
from ..store.store import Store
from .endings import Ending
from .ids import new_id
from .log import end
from .outcomes import Outcomes
from .requests import OperationResult
from .session import MISSING, Operation, Session

logger = logging.getLogger(__name__)


class Gaps:
    """Of the sessions of one lane."""

    def __init__(self, store: Store, outcomes: Outcomes) -> None:
        self._store = store
        self._outcomes = outcomes

    async def give_up(self, session: Session) -> None:
        """Give up the numbers that have been missing for too long.

        Raises:
            StorageError: it could not be written, and they are waited for on.
        """
        until = session.gap_until
        if until is not None and until <= time.time():
            await self._give_up(session)

    async def _give_up(self, session: Session) -> None:
        first = min(session.pending)
        missing = [
            Operation(new_id("op"), seq, MISSING, error=_never_came(session, seq))
            for seq in range(session.next_run, first)
        ]
        # Marked before it is written, so that none of them is cancelled meanwhile.
        skipped = session.skip_behind(missing[0])
        try:
            is_given_up = await self._store.write(lambda connection: _write(connection, session, missing, skipped))
        except BaseException:
            unmark(skipped)
            raise
        if not is_given_up:  # it comes at this very moment, or those that waited were withdrawn
            unmark(skipped)
            return
        logger.warning("session %s gave up sequence number %d to %d", session.id, missing[0].seq, missing[-1].seq)
        for operation in missing:
            session.pending[operation.seq] = operation
        for operation in skipped:
            self._outcomes.publish(OperationResult(operation.id, "failed", error=operation.error))


def _never_came(session: Session, seq: int) -> TrainSessionError:
    return OperationSkipped(
        f"sequence number {seq} did not come within {session.gap_timeout:g} s (the session's gap_timeout) while "
        "others waited behind it; it counts as failed",
        details={"missing_seq": seq},
    )


def _write(
    connection: sa.Connection, session: Session, missing: Sequence[Operation], skipped: Sequence[Operation]
) -> bool:
    first, last = missing[0].seq, missing[-1].seq
    mine = sa.select(operations.c.seq).where(operations.c.session_id == session.id)
    came = connection.execute(mine.where(operations.c.seq.between(first, last)).limit(1)).first()
    behind = connection.execute(mine.where(operations.c.seq > last).limit(1)).first()
    if came is not None or behind is None:
        return False
    now = time.time()
    connection.execute(sa.insert(operations), [_row(session, operation, now) for operation in missing])
    for operation in skipped:
        end(connection, Ending(operation_id=operation.id, state="failed", error=operation.error))
    return True


def _row(session: Session, operation: Operation, now: float) -> dict[str, Any]:
    assert operation.error is not None
    return {
        "id": operation.id,
        "project": session.project,
        "session_id": session.id,
        "seq": operation.seq,
        "kind": MISSING,
        "scope": session.id,
        "state": "failed",
        "tokens": 0,
        "body_sha256": "",
        "created_at": now,
        "finished_at": now,
        "acked_at": now,  # nobody submitted it, so nobody asks for it
        "error": operation.error.to_wire(),
    }


def unmark(skipped: Sequence[Operation]) -> None:
    """They end later, or not with what was to end them."""
    for operation in skipped:
        operation.error = None
