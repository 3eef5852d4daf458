"""The end of a session that nobody used for days: it is saved, then closed."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from ..types import SessionInfo
from .outcomes import Outcomes
from .requests import OperationRequest
from .session import Session
from .submission import Submission

logger = logging.getLogger(__name__)


class Retiring:
    def __init__(
        self, submission: Submission, outcomes: Outcomes, close: Callable[[str, str], Awaitable[SessionInfo]]
    ) -> None:
        self._submission = submission
        self._outcomes = outcomes
        self._close = close

    async def retire(self, session: Session) -> None:
        """Save a session as a ``state`` checkpoint, then close it, unless somebody uses it meanwhile."""
        if session.kind == "trainer" and session.next_seq > 1:
            if session.fatal is not None:  # closing it would delete its snapshots, all that is left of it
                logger.warning("session %s stays open, it cannot be saved: %s", session.id, session.fatal.message)
                return
            epoch = session.epoch
            seq = await self._save(session)
            if session.pending or session.epoch != epoch or session.next_run != seq + 1:
                return
        await self._close(session.project, session.id)

    async def _save(self, session: Session) -> int:
        """The number of the save, which has succeeded."""
        name = time.strftime("idle-%Y%m%d", time.gmtime())
        save = OperationRequest(kind="save_state", params={"name": name, "overwrite": True})
        operation_id, seq = await self._submission.submit(session.project, session.id, save)
        result = await self._outcomes.wait(session.project, operation_id)
        if result.error is not None:
            raise result.error
        return seq
