"""Cancelling: what has not started does not run, and a running sample stops within a step."""

from __future__ import annotations

from .leases import Lease
from .log import OperationLog
from .outcomes import Outcomes, unknown_operation
from .samples import Samples
from .session import Session
from .sessions import Sessions
from .submission import Submission


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

    async def cancel_waiting(self, session: Session) -> None:
        """All of a session's that have not started."""
        for operation in list(session.pending.values()):
            if not operation.replay and operation.error is None:
                await self._submission.cancel(session, operation.id)
