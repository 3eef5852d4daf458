"""How a training operation gets into the log: checked, made durable, queued."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ..errors import Cancelled, InvalidRequest, RateLimited, StorageError
from ..limits import Limits
from ..store.store import Store
from .bodies import TRAINING_KINDS, Body, pack_request, parse_body
from .endings import Ending
from .lane import Lane
from .log import OperationLog, check_epoch
from .outcomes import Outcomes
from .prices import PriceTable, Quote
from .projects import Projects
from .quotas import Quotas
from .requests import OperationRequest, OperationResult
from .session import Operation, Session
from .sessions import Sessions

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5
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
        prices: PriceTable,
        lane_of: Callable[[str], Lane],
    ) -> None:
        self._store = store
        self._log = log
        self._outcomes = outcomes
        self._sessions = sessions
        self._projects = projects
        self._quotas = quotas
        self._prices = prices
        self._lane_of = lane_of

    async def submit(self, project: str, session_id: str, request: OperationRequest) -> tuple[str, int]:
        """See `Service.submit`."""
        session = await self._sessions.live(project, session_id)
        check_epoch(session.epoch, request.epoch)
        limits = await self._projects.limits(project)
        try:
            self._check_limits(session, request, limits)
        except RateLimited:
            if not await self._log.knows(session, request):  # a retry is answered like its first time
                raise
        with self._quotas.entering(project):
            return await self._accept(session, request)

    def _check_limits(self, session: Session, request: OperationRequest, limits: Limits) -> None:
        if request.kind in TRAINING_KINDS:
            self._quotas.tokens.check(session.project, limits.max_tokens_per_minute)
        bound = limits.max_queued_operations
        if request.seq is not None and request.seq >= session.first_new + bound:
            raise RateLimited(
                f"sequence number {request.seq} is more than {bound} (limit max_queued_operations) ahead of "
                f"{session.first_new}",
                details={"limit": "max_queued_operations", "bound": bound},
            )
        try:
            self._quotas.check_queued(session.project, self._sessions.unfinished(session.project), limits)
        except RateLimited:
            # What others wait for takes no place of theirs: if it had to wait for one, none would ever be free.
            if request.kind != "skip" and not _closes_gap(session, request.seq):
                raise

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
        quote = None if body is None else self._quote(session, request.kind, body)
        accepted = await self._log.accept(session, request, stored, tokens, quote, error)
        refused = accepted.error
        if not accepted.new:
            if stored.blob is not None:
                await self._store.drop_blobs([stored.blob])
            if refused is not None:
                raise refused
            return accepted.operation_id, accepted.seq
        session.pending[accepted.seq] = Operation(
            id=accepted.operation_id,
            seq=accepted.seq,
            kind=request.kind,
            tokens=tokens,
            body=body,
            checked=lane.info is not None,
            error=refused,
            quote=quote,
            accepted_at=time.time(),
        )
        if refused is None:
            self._quotas.tokens.spend(session.project, tokens)
            self._sessions.expect(session, accepted.operation_id, accepted.seq)
        lane.wake()
        if refused is not None:
            raise refused
        return accepted.operation_id, accepted.seq

    async def cancel(self, session: Session, operation_id: str) -> bool:
        """Whether the operation of this session will not run."""
        for operation in session.pending.values():
            if operation.id == operation_id and not operation.started and not operation.replay:
                if operation.error is None:
                    operation.error = Cancelled("cancelled before it started")
                    await self._write_cancelled(session, operation)
                    self._outcomes.publish(OperationResult(operation_id, "cancelled", error=operation.error))
                    self._lane_of(session.base_model).wake()
                return isinstance(operation.error, Cancelled)
        return False

    async def _write_cancelled(self, session: Session, operation: Operation) -> None:
        ending = Ending(operation_id=operation.id, state="cancelled", error=operation.error)
        while True:
            try:
                return await self._log.finish(ending)
            except StorageError as error:
                if session.pending.get(operation.seq) is operation:  # then nothing has happened, and it runs
                    operation.error = None
                    self._lane_of(session.base_model).wake()
                    raise
                # The queue has passed it meanwhile: it can only end as cancelled.
                logger.warning("that %s was cancelled cannot be written yet: %s", operation.id, error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    def _quote(self, session: Session, kind: str, body: Body) -> Quote | None:
        """At most all positions of the batch; of a `backward`, those that its gradients are for."""
        if kind == "backward":
            at_most = {"train": sum(gradient.shape[0] if gradient.ndim else 0 for gradient in body.gradients)}
        elif kind in TRAINING_KINDS:
            at_most = {"train" if kind == "forward_backward" else "prefill": body.tokens}
        else:
            return None
        return self._prices.quote(session.base_model, at_most)


def _closes_gap(session: Session, seq: int | None) -> bool:
    """Whether accepted operations of the session wait for this number before all others."""
    return seq is not None and seq <= session.next_seq and max(session.pending, default=0) > seq
