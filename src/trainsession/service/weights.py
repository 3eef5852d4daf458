"""What samples are drawn from: the base model, a checkpoint, or a session's snapshot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..engine.api import EngineHandle, EngineHost
from ..errors import CheckpointMismatch, InvalidRequest, NotFound, PermissionDenied, SessionClosed, StorageUnavailable
from ..store.schema import frozen_weights, operations, sessions
from ..store.store import Store
from .checkpoints import Checkpoints, live_session, named_snapshot
from .frozen import Weights
from .lane import Lane
from .leases import Lease
from .outcomes import Outcomes
from .runner import check_loadable
from .sessions import Sessions

logger = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    """Resolved once, at acceptance: later changes of a name don't change what a sample sees.

    Attributes:
        session_id: The session of a snapshot; it pays unless the request names another.
        operation_id: The `snapshot` operation to wait for.
    """

    lane: Lane
    weights: Weights
    session_id: str | None = None
    operation_id: str | None = None

    def to_row(self) -> dict[str, Any]:
        return {
            "base_model": self.lane.base_model,
            "key": self.weights.key,
            "checkpoint": self.weights.checkpoint,
            "session_id": self.session_id,
            "operation_id": self.operation_id,
        }


class WeightsResolver:
    def __init__(
        self,
        store: Store,
        host: EngineHost,
        lease: Lease,
        checkpoints: Checkpoints,
        sessions_: Sessions,
        outcomes: Outcomes,
        lane_of: Callable[[str], Lane],
    ) -> None:
        self._store = store
        self._host = host
        self._lease = lease
        self._checkpoints = checkpoints
        self._sessions = sessions_
        self._outcomes = outcomes
        self._lane_of = lane_of
        self._contexts: dict[str, int] = {}

    async def resolve(self, project: str, weights: Mapping[str, Any]) -> WeightsSource:
        """Raises `InvalidRequest`, `UnknownModel`, `NotFound` or `CheckpointMismatch`; `OwnedElsewhere` for a
        snapshot of a session that another server has."""
        kind, value = _one_of(weights)
        if kind == "base_model":
            name = await asyncio.to_thread(self._host.resolve, value)
            return WeightsSource(lane=self._lane_of(name), weights=Weights(None, project))
        if kind == "operation_id":
            return await self._snapshot(project, value)
        session_id = live_session(value)
        if session_id is not None:
            return await self._snapshot(project, await self._newest_snapshot(project, session_id))
        snapshot = named_snapshot(value)
        if snapshot is not None:
            session_id, operation_id = snapshot
            source = await self._snapshot(project, operation_id)
            if source.session_id != session_id:
                raise NotFound(f"session {session_id} has no snapshot {operation_id}", details={"path": value})
            return source
        row = await self._checkpoints.find(project, value)
        if row.kind != "weights":
            raise CheckpointMismatch(
                f"{value} is a state checkpoint; sample from one that save_weights made", details={"path": value}
            )
        lane = self._lane_of(row.base_model)
        identity = None if lane.info is None or not row.base_identity else lane.info.identity
        check_loadable(row, value, False, identity, row.base_model)
        return WeightsSource(lane=lane, weights=Weights(row.id, project, checkpoint=True), session_id=row.session_id)

    async def resolve_within(self, project: str, weights: Mapping[str, Any], session_id: str) -> WeightsSource:
        """`resolve` for a caller that may sample one session only: its snapshots and checkpoints.

        Of a session without a trainer that is its base model.

        Raises:
            PermissionDenied: anything else, whether it exists or not.
        """
        denied = PermissionDenied(
            f"this key can only sample session {session_id}; weights: {dict(weights)} is nothing of it",
            details={"session_id": session_id},
        )
        _one_of(weights)
        try:
            source = await self.resolve(project, weights)
        except (NotFound, CheckpointMismatch, InvalidRequest):  # each of them says what there is
            raise denied from None
        if source.session_id is None:
            session = await self._sessions.info(project, session_id)
            if session.kind == "sampler" and session.base_model == source.lane.base_model:
                return source
        if source.session_id != session_id:
            raise denied
        return source

    def from_row(self, project: str, row: Mapping[str, Any]) -> WeightsSource:
        """The source that `WeightsSource.to_row` described."""
        session_id, operation_id = row["session_id"], row["operation_id"]
        owner = session_id if operation_id else ""
        return WeightsSource(
            lane=self._lane_of(row["base_model"]),
            weights=Weights(row["key"], project, owner or "", row["checkpoint"]),
            session_id=session_id,
            operation_id=operation_id,
        )

    async def prepare(self, source: WeightsSource, pins: int) -> tuple[EngineHandle, list[Callable[[], None]]]:
        """The engine with these weights in it, pinned ``pins`` times; what releases each pin. Waits while what they
        are read from is away: who asks was accepted.

        Raises:
            TrainSessionError: that of the snapshot operation, or `SnapshotLost`.
        """
        while True:
            try:
                return await self._prepare(source, pins)
            except StorageUnavailable as error:
                logger.warning("weights cannot be read yet: %s", error.message)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _prepare(self, source: WeightsSource, pins: int) -> tuple[EngineHandle, list[Callable[[], None]]]:
        weights, project = source.weights, source.weights.project
        if source.operation_id is not None:
            result = await self._outcomes.wait(project, source.operation_id)
            if result.error is not None and not isinstance(result.error, NotFound):
                raise result.error
        handle = await source.lane.engine()
        if source.operation_id is not None and not source.lane.pool.holds(source.operation_id):
            await self._replay(source)
        return handle, [await source.lane.pool.acquire(handle, weights) for _ in range(pins)]

    async def context_length(self, source: WeightsSource) -> int | None:
        """That of the model, from its engine or from its files; None where it has yet to be downloaded."""
        if source.lane.info is not None:
            return source.lane.info.context_length
        model = source.lane.base_model
        if model not in self._contexts:
            found = await asyncio.to_thread(self._host.context_length, model)
            if found is None:
                return None
            self._contexts[model] = found
        return self._contexts[model]

    async def check_payers(self, project: str, session_ids: set[str]) -> None:
        """Raise `NotFound` for a session that is not the project's; the others are in use."""
        for session_id in session_ids:
            await self._sessions.info(project, session_id)
        self._sessions.touch(session_ids)

    async def _replay(self, source: WeightsSource) -> None:
        """After a restart, let the session's log freeze these weights again if they are not on disk."""
        query = sa.select(frozen_weights.c.id).where(frozen_weights.c.id == source.operation_id)
        saved = await self._store.read(lambda connection: connection.execute(query).scalar())
        if saved is None and source.session_id is not None:
            try:
                session = await self._sessions.live(source.weights.project, source.session_id)
            except SessionClosed:
                return
            await session.replayed.wait()

    async def _snapshot(self, project: str, operation_id: str) -> WeightsSource:
        columns = (
            operations.c.kind,
            operations.c.session_id,
            sessions.c.base_model,
            sessions.c.owner,
            sessions.c.state,
        )
        query = (
            sa.select(*columns)
            .join(sessions, sessions.c.id == operations.c.session_id)
            .where(operations.c.id == operation_id, operations.c.project == project)
        )
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound(f"no operation {operation_id} in this project", details={"operation_id": operation_id})
        if row.kind != "snapshot":
            raise InvalidRequest(
                f"weights: operation {operation_id} is a {row.kind}, not a snapshot", details={"key": "weights"}
            )
        if row.state != "closed":
            await self._lease.check(row.owner)
        return WeightsSource(
            lane=self._lane_of(row.base_model),
            weights=Weights(operation_id, project, row.session_id),
            session_id=row.session_id,
            operation_id=operation_id,
        )

    async def _newest_snapshot(self, project: str, session_id: str) -> str:
        query = (
            sa.select(operations.c.id)
            .where(operations.c.session_id == session_id, operations.c.project == project)
            .where(operations.c.kind == "snapshot", operations.c.state.in_(("queued", "done")))
            .order_by(operations.c.seq.desc())
            .limit(1)
        )
        operation_id = await self._store.read(lambda connection: connection.execute(query).scalar())
        if operation_id is None:
            raise NotFound(f"session {session_id} has no snapshot in this project")
        return operation_id


def _one_of(weights: Mapping[str, Any]) -> tuple[str, str]:
    """What kind of weights is asked for, and which. Raises `InvalidRequest`."""
    if len(weights) != 1 or not set(weights) <= {"base_model", "path", "operation_id"}:
        raise InvalidRequest(
            f"weights: expected one of base_model, path, operation_id, got {sorted(weights)}",
            details={"key": "weights"},
        )
    (kind, value), *_ = weights.items()
    if not isinstance(value, str):
        raise InvalidRequest(f"weights: {kind} must be a string, got {value!r}", details={"key": "weights"})
    return kind, value
