"""How a training operation gets into the log: checked, made durable, queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidRequest, RateLimited
from ..store.store import Store
from .bodies import TRAINING_KINDS, Body, pack_request, parse_body
from .lane import Lane
from .log import OperationLog, check_epoch
from .outcomes import Outcomes
from .projects import Projects
from .quotas import Quotas
from .requests import OperationRequest
from .session import Operation, Session
from .sessions import Sessions

_LARGE_BATCH = 64
"""Datums from which on packing and checking go to a thread beside the event loop."""


class Submission:
    def __init__(
        self,
        store: Store,
        log: OperationLog,
        outcomes: Outcomes,
        sessions: Sessions,
        projects: Projects,
        quotas: Quotas,
        lane_of: Callable[[str], Lane],
    ) -> None:
        self._store = store
        self._log = log
        self._outcomes = outcomes
        self._sessions = sessions
        self._projects = projects
        self._quotas = quotas
        self._lane_of = lane_of

    async def submit(self, project: str, session_id: str, request: OperationRequest) -> tuple[str, int]:
        """See `Service.submit`."""
        session = await self._sessions.live(project, session_id)
        check_epoch(session.epoch, request.epoch)
        limits = await self._projects.limits(project)
        if request.kind in TRAINING_KINDS:
            self._quotas.tokens.check(project, limits.max_tokens_per_minute)
        if request.seq is not None and request.seq >= session.next_run + limits.max_queued_operations:
            raise RateLimited(
                f"sequence number {request.seq} is more than {limits.max_queued_operations} (limit "
                f"max_queued_operations) ahead of {session.next_run}",
                details={"limit": "max_queued_operations", "bound": limits.max_queued_operations},
            )
        with self._quotas.entering(project, self._sessions.unfinished(project), limits):
            return await self._accept(session, request)

    async def _accept(self, session: Session, request: OperationRequest) -> tuple[str, int]:
        lane = self._lane_of(session.base_model)

        def prepare() -> tuple[bytes, Body | None, InvalidRequest | None]:
            packed = pack_request(request)
            try:
                if session.kind != "trainer":
                    raise InvalidRequest("this session is a sampler: it has no adapter to train")
                fields = (request.params, request.data, request.gradients, request.progress)
                return packed, parse_body(request.kind, *fields, lane.info), None
            except InvalidRequest as error:
                return packed, None, error

        large = isinstance(request.data, Sequence) and len(request.data) >= _LARGE_BATCH
        packed, body, error = await self._store.in_thread(prepare) if large else prepare()
        tokens = 0 if body is None or request.kind not in TRAINING_KINDS else body.tokens
        stored = await self._store.keep("body", packed)
        accepted = await self._log.accept(session, request, stored, tokens, error)
        if not accepted.new:
            if stored.blob is not None:
                await self._store.drop_blobs([stored.blob])
            return accepted.operation_id, accepted.seq
        session.pending[accepted.seq] = Operation(
            id=accepted.operation_id,
            seq=accepted.seq,
            kind=request.kind,
            tokens=tokens,
            body=body,
            checked=lane.info is not None,
            error=error,
        )
        self._quotas.tokens.spend(session.project, tokens)
        if error is None:
            self._sessions.expect(session, accepted.operation_id, accepted.seq)
        lane.wake()
        if error is not None:
            error.details.setdefault("operation_id", accepted.operation_id)
            raise error
        return accepted.operation_id, accepted.seq
