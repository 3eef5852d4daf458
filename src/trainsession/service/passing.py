"""Operations that end without the engine: the queue steps over them, and ends what a refused one takes with it.

Under ``on_failure="skip"`` a failure ends what waits behind it at the moment that it fails. Of one that was refused
when it was submitted that is the moment that the queue reaches its number, so that what stands before it runs, and
the order in which submits arrived makes no difference. The decision is one transaction with the session's
advance past the number. So a restart, a replay or another server decides anew only what nobody was told yet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import sqlalchemy as sa

from ..errors import Cancelled, OperationSkipped, StorageError
from ..store.schema import sessions
from ..store.store import Store
from .endings import Ending
from .gaps import Gaps, unmark
from .log import end
from .outcomes import Outcomes
from .requests import OperationResult
from .runner import as_ours
from .session import REPLAYED_KINDS, Operation, Session

logger = logging.getLogger(__name__)
_MAX_FAULTS = 3
"""Of our own, in a row, in the queue of one session."""


class Passing:
    """Of the sessions of one lane."""

    def __init__(self, store: Store, outcomes: Outcomes) -> None:
        self._store = store
        self._outcomes = outcomes
        self._gaps = Gaps(store, outcomes)
        self._faults: Counter[str] = Counter()
        """In a row, by session."""

    async def look_after(self, sessions_: Iterable[Session]) -> bool:
        """Give up numbers that never came, and step over what ended. False: it cannot be written yet."""
        written = True
        for session in sessions_:
            if not session.pending:
                continue  # most of them, of thousands
            try:
                await self._gaps.give_up(session)
                await self.pass_ended(session)
                self._faults.pop(session.id, None)
            except StorageError as error:
                logger.warning("session %s waits for the disk: %s", session.id, error.message)
                written = False
            except Exception as error:  # of one session; the others of its lane go on
                written = False
                await self._met_fault(session, error)
        return written

    async def _met_fault(self, session: Session, error: Exception) -> None:
        """Try again; after some in a row nothing of it runs any more, and what waits is told so."""
        logger.exception("the queue of session %s met a fault", session.id)
        self._faults[session.id] += 1
        if self._faults[session.id] < _MAX_FAULTS:
            return
        session.fatal = fatal = session.fatal or as_ours(error, session.id)
        waiting = [o for o in session.pending.values() if o.error is None and not o.replay]
        endings = [Ending(operation_id=operation.id, state="failed", error=fatal) for operation in waiting]
        for operation in waiting:
            operation.error = fatal
        try:
            await self._store.write(lambda connection: [end(connection, ending) for ending in endings])
        except Exception:  # with the next attempt
            logger.exception("what waits in session %s cannot be ended yet", session.id)
            unmark(waiting)
            return
        for operation in waiting:
            self._outcomes.publish(OperationResult(operation.id, "failed", error=fatal))

    async def pass_ended(self, session: Session) -> None:
        """Step over operations that were refused, cancelled or skipped, or whose replay does nothing."""
        passed = 0
        while (operation := session.head) is not None:
            if operation.error is not None:
                if _ends_others(session, operation):
                    await self._skip_behind(session, operation)
                session.lacks(operation)
            elif not (operation.replay and operation.kind not in REPLAYED_KINDS):
                break
            session.passed(operation)
            passed += not operation.replay
        if passed:
            advance = _advance(session, session.next_run)
            self._store.write_lazily(lambda connection: connection.execute(advance))

    async def _skip_behind(self, session: Session, refused: Operation) -> None:
        # Marked before it is written, so that none of them is cancelled meanwhile.
        skipped = session.skip_behind(refused)
        advance = _advance(session, refused.seq + 1)

        def write(connection: sa.Connection) -> None:
            for operation in skipped:
                end(connection, Ending(operation_id=operation.id, state="failed", error=operation.error))
            connection.execute(advance)

        try:
            await self._store.write(write)
        except BaseException:
            unmark(skipped)
            raise
        for operation in skipped:
            self._outcomes.publish(OperationResult(operation.id, "failed", error=operation.error))


def _advance(session: Session, following: int) -> sa.Update:
    """Where the session is now. What ran before may be written after this, and then moves it no more."""
    behind = sa.update(sessions).where(sessions.c.id == session.id, sessions.c.next_seq < following)
    return behind.values(next_seq=following, step=session.step, progress=session.progress)


def _ends_others(session: Session, operation: Operation) -> bool:
    """Whether it is a failure that nothing was skipped for yet. What failed while it ran did that as it ended."""
    is_failure = not isinstance(operation.error, Cancelled | OperationSkipped)
    return is_failure and session.on_failure == "skip" and operation.seq >= session.decided_until
