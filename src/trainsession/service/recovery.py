"""Snapshot and replay: how a session's adapter survives the engine that held it.

An internal snapshot is everything the engine knows of a session after operation ``seq``: adapter,
moments, step, pending gradients. To come back, the newest is restored and the operations behind it
run again, with their results thrown away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import sqlalchemy as sa

from .. import wire
from ..engine import checkpoint as formats
from ..engine.api import AdapterState, EngineHandle
from ..errors import CheckpointMismatch, StorageError, from_wire
from ..store.schema import internal_snapshots, operations, sessions
from ..store.store import Store
from .checkpoints import Checkpoints
from .frozen import FrozenPool
from .prices import Quote
from .session import Operation, Session

logger = logging.getLogger(__name__)
_KEPT_FORWARDS = 64
"""Bodies of kept forwards stay this many numbers longer: their backward may still need them."""


class Recovery:
    def __init__(self, store: Store, checkpoints: Checkpoints) -> None:
        self._store = store
        self._checkpoints = checkpoints

    async def bring_in(self, handle: EngineHandle, session: Session) -> None:
        """Make the engine hold the session as of operation ``next_run - 1``, from its newest snapshot.

        Raises:
            CheckpointMismatch: the base model is not the one that the session was trained on.
            InvalidRequest: the adapter does not fit the model.
        """
        if session.resident:
            return
        identity = handle.info.identity
        if session.base_identity not in (None, identity):
            raise CheckpointMismatch(
                f"session {session.id} was trained on base weights {session.base_identity}; "
                f"{session.base_model} is {identity} now",
                details={"expected": session.base_identity, "found": identity},
            )
        dtype = handle.info.dtype
        if session.dtype not in (None, dtype):
            raise CheckpointMismatch(
                f"session {session.id} was trained in {session.dtype}, and {session.base_model} is loaded in {dtype}: "
                f"its steps would come out otherwise. Load it in {session.dtype}, or start a new session from a "
                "state checkpoint",
                details={"expected": session.dtype, "found": dtype},
            )
        state, optimizer = await self._newest(session)
        await handle.call("add_adapter", session.id, session.lora)
        try:
            if state is not None:
                await handle.call("restore", session.id, state, optimizer=optimizer)
        except BaseException:
            await handle.call("drop_adapter", session.id)
            raise
        session.resident = True
        if session.base_identity is None or session.dtype is None:
            session.base_identity, session.dtype = identity, dtype
            query = sa.update(sessions).where(sessions.c.id == session.id)
            set_identity = query.values(base_identity=identity, dtype=dtype)
            self._store.write_lazily(lambda connection: connection.execute(set_identity))

    async def _newest(self, session: Session) -> tuple[AdapterState | None, bool]:
        """The state to start from and whether its optimizer counts; None: a fresh adapter."""
        query = (
            sa.select(internal_snapshots)
            .where(internal_snapshots.c.session_id == session.id)
            .order_by(internal_snapshots.c.seq.desc())
            .limit(1)
        )
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is not None:
            data = await self._store.in_thread(self._store.blobs.get, row.blob, row.sha256)
            state = formats.state_from_files(wire.unpack(data))
            return state, state.has_optimizer
        if session.from_checkpoint is None:
            return None, False
        # The checkpoint may be deleted later: hold a snapshot of our own as soon as possible.
        session.snapshot_due = True
        found = await self._checkpoints.find(session.project, session.from_checkpoint)
        return await self._checkpoints.load(found), session.with_optimizer

    async def snapshot(self, handle: EngineHandle, pool: FrozenPool, session: Session) -> None:
        """Capture the session now; what the future writes in the background is awaited by `settled`.

        Call it between two operations of the session.
        """
        if session.snapshot_task is not None and not session.snapshot_task.done():
            return
        seq, window = session.next_run - 1, "incomplete" if session.incomplete else "complete"
        state = await handle.call("capture", session.id, optimizer=True, gradients=True)
        # Replay will start behind the operations that froze these, so it cannot make them again.
        await pool.save(handle, session.id)
        session.operations_since_snapshot = 0
        session.seconds_since_snapshot = 0.0
        session.snapshot_due = False
        before = [task for number, task in session.completions.items() if number <= seq]
        session.snapshot_task = asyncio.create_task(self._write(session, seq, window, state, before))

    async def queue(self, session: Session, ended_before: int | None = None) -> list[Operation]:
        """Let the session's queue start behind its newest snapshot.

        Args:
            ended_before: Take up operations from the log only below this number; default: all.

        Returns:
            Those of them that have not ended.
        """
        newest = (
            sa.select(internal_snapshots.c.seq, internal_snapshots.c.window)
            .where(internal_snapshots.c.session_id == session.id)
            .order_by(internal_snapshots.c.seq.desc())
            .limit(1)
        )
        columns = (operations.c.id, operations.c.seq, operations.c.kind, operations.c.state, operations.c.tokens)
        query = sa.select(*columns, operations.c.error, operations.c.quote, operations.c.created_at)
        query = query.where(operations.c.session_id == session.id).order_by(operations.c.created_at, operations.c.seq)
        if ended_before is not None:
            query = query.where(operations.c.seq < ended_before)

        def read(connection: sa.Connection) -> tuple[Any, list[Any]]:
            snapshot = connection.execute(newest).one_or_none()
            covered = 0 if snapshot is None else snapshot.seq
            return snapshot, list(connection.execute(query.where(operations.c.seq > covered)))

        snapshot, rows = await self._store.read(read)
        session.next_run = 1 if snapshot is None else snapshot.seq + 1
        lacks = snapshot is not None and snapshot.window == "incomplete"
        session.incomplete = "an operation of this window failed, was cancelled or never came" if lacks else ""
        queued: list[Operation] = []
        for row in rows:
            operation = session.pending[row.seq] = Operation(
                id=row.id,
                seq=row.seq,
                kind=row.kind,
                tokens=row.tokens,
                replay=row.state == "done",
                error=from_wire(row.error or {}) if row.state in ("failed", "cancelled") else None,
                quote=None if row.quote is None else Quote.of_row(row.quote),
            )
            operation.accepted_before(row.created_at)
            if row.state == "queued":
                queued.append(operation)
        replays = [seq for seq, operation in session.pending.items() if operation.replay]
        session.replayed_until = max(replays, default=0) + 1
        session.count_replays(len(replays))
        return queued

    async def rewind(self, session: Session) -> None:
        """After its engine is gone: run again what the newest snapshot does not hold."""
        await self.settled(session)
        await self.queue(session, ended_before=session.next_run)
        session.operations_since_snapshot = 0
        session.seconds_since_snapshot = 0.0
        session.lost = False

    async def settled(self, session: Session) -> None:
        """Wait until everything that ran, and its snapshot, is on disk."""
        if session.completions:
            await asyncio.wait(list(session.completions.values()))
        if session.snapshot_task is not None:
            await asyncio.wait([session.snapshot_task])

    async def _write(
        self, session: Session, seq: int, window: str, state: AdapterState, before: list[asyncio.Task[None]]
    ) -> None:
        try:
            data = await self._store.in_thread(lambda: wire.pack(formats.state_to_files(state, session.base_model)))
            blob = await self._store.in_thread(self._store.blobs.put, "session", data)
            if before:  # an operation that a snapshot covers must have its result first
                await asyncio.wait(before)
            row = {
                "session_id": session.id,
                "seq": seq,
                "window": window,
                "blob": blob.name,
                "sha256": blob.sha256,
                "created_at": time.time(),
            }
            superfluous = await self._store.write(lambda connection: _replace(connection, row))
            if superfluous is None:
                session.snapshot_due = True
                superfluous = [blob.name]
            await self._store.drop_blobs(superfluous)
        except StorageError as error:
            # Nothing is lost: the older snapshot and the bodies behind it are still there.
            logger.warning("no snapshot of session %s: %s", session.id, error.message)
            session.snapshot_due = True


def _replace(connection: sa.Connection, row: dict[str, Any]) -> list[str] | None:
    """Add a snapshot and drop what it makes superfluous; returns the blobs of that.

    None: an operation that it covers has no end in the log, e.g. because the service closes while its result
    cannot be written. It has to run again, and behind this snapshot nothing would.
    """
    session_id, seq = row["session_id"], row["seq"]
    unended = sa.select(operations.c.id).where(operations.c.session_id == session_id, operations.c.seq <= seq)
    if connection.execute(unended.where(operations.c.state == "queued").limit(1)).first() is not None:
        return None
    older = sa.and_(internal_snapshots.c.session_id == session_id, internal_snapshots.c.seq <= seq)
    superfluous = list(connection.execute(sa.select(internal_snapshots.c.blob).where(older)).scalars())
    connection.execute(sa.delete(internal_snapshots).where(older))
    connection.execute(sa.insert(internal_snapshots).values(**row))
    covered = sa.and_(
        operations.c.session_id == session_id,
        operations.c.seq <= sa.case((operations.c.kind == "forward_keep", seq - _KEPT_FORWARDS), else_=seq),
        operations.c.state != "queued",
        sa.or_(operations.c.body.is_not(None), operations.c.body_blob.is_not(None)),
    )
    bodies = sa.select(operations.c.body_blob).where(covered, operations.c.body_blob.is_not(None))
    superfluous += list(connection.execute(bodies).scalars())
    connection.execute(sa.update(operations).where(covered).values(body=None, body_blob=None))
    return superfluous
