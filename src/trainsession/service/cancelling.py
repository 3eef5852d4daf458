"""Cancelling: what has not started does not run, and a running sample stops within a step."""

from __future__ import annotations

import asyncio
import logging

from ..errors import EngineLost, StorageError
from .lane import Lane
from .leases import Lease
from .log import OperationLog
from .outcomes import Outcomes, unknown_operation
from .samples import Samples
from .session import Session
from .sessions import Sessions
from .submission import Submission

logger = logging.getLogger(__name__)


class Cancelling:
    def __init__(
        self,
        log: OperationLog,
        lease: Lease,
        outcomes: Outcomes,
        sessions: Sessions,
        samples: Samples,
        submission: Submission,
    ) -> None:
        self._log = log
        self._lease = lease
        self._outcomes = outcomes
        self._sessions = sessions
        self._samples = samples
        self._submission = submission

    async def cancel(self, project: str, operation_id: str) -> bool:
        """See `Service.cancel`."""
        sample = await self._samples.cancel(project, operation_id)
        if sample is not None:
            return sample
        for session in self._sessions.in_memory:
            if session.project == project and await self._submission.cancel(session, operation_id):
                return True
        found = await self._log.results(project, [operation_id])
        if operation_id not in found:
            raise unknown_operation(operation_id)
        if found[operation_id] is None:
            await self._lease.check_operations(project, [operation_id])
        return False

    async def wind_down(self, session: Session, lane: Lane) -> None:
        """Cancel all of a session's that has not started, let the rest end and be written, and save its frozen
        weights, which any server can sample once it is closed."""
        while True:
            await self._cancel_waiting(session)
            async with lane.turn:  # behind what runs now; what is still there was not run, e.g. for want of the engine
                waiting = [o for o in session.pending.values() if not o.replay and o.error is None]
                for operation in waiting:
                    operation.started = False
            if session.completions:
                await asyncio.wait(list(session.completions.values()))
            elif not waiting:
                break
        async with lane.turn:
            if (handle := lane.loaded) is not None:
                try:
                    await lane.pool.save(handle, session.id)
                except (StorageError, EngineLost) as error:  # no reason to keep it open
                    logger.warning("frozen weights of session %s were not saved: %s", session.id, error.message)

    async def _cancel_waiting(self, session: Session) -> None:
        for operation in list(session.pending.values()):
            if not operation.replay and operation.error is None:
                await self._submission.cancel(session, operation.id)
