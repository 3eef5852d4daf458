"""Sessions: made, found, taken over, closed; and loaded with their unfinished operations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from ..engine import checkpoint as formats
from ..engine.api import AdapterState, EngineHost
from ..errors import Cancelled, InvalidRequest, NotFound, SessionClosed
from ..store.clock import earliest_now, latest_now
from ..store.schema import internal_snapshots, operations, sessions
from ..store.store import Store
from ..types import LoraConfig, SaveWeightsResponse, SessionInfo
from . import budgets
from .checkpoints import Checkpoints, Origin
from .ids import new_id, new_seed
from .lane import Lane
from .leases import Lease
from .outcomes import Outcomes
from .projects import Projects
from .recovery import Recovery
from .requests import Attached, CreateSession, OperationResult
from .runner import check_loadable
from .session import Session
from .session_rows import check, hash_of, insert, session_of

logger = logging.getLogger(__name__)
_NOTED_SECONDS = 60.0
"""Between two writes of that a session is in use."""
_MAX_NOTED = 4_096


class Sessions:
    """All sessions of the home; those in use are `live` ones with a queue in memory.

    Args:
        lane_of: The lane of a base model.
    """

    def __init__(
        self,
        store: Store,
        host: EngineHost,
        lease: Lease,
        checkpoints: Checkpoints,
        outcomes: Outcomes,
        projects: Projects,
        lane_of: Callable[[str], Lane],
    ) -> None:
        self._store = store
        self._host = host
        self._lease = lease
        self._projects = projects
        self._checkpoints = checkpoints
        self._outcomes = outcomes
        self._lane_of = lane_of
        self._recovery = Recovery(store, checkpoints)
        self._live: dict[str, Session] = {}
        self._loading = asyncio.Lock()
        self._noted: OrderedDict[str, float] = OrderedDict()
        """When the use of a session was written down last, by its id."""

    @property
    def in_memory(self) -> list[Session]:
        return list(self._live.values())

    async def create(self, project: str, request: CreateSession) -> tuple[SessionInfo, int]:
        """A new session, or the one that the same idempotency key made before.

        Raises:
            UnknownModel, NotFound, CheckpointMismatch, LimitExceeded, InvalidRequest.
        """
        check(request)
        checkpoint = None
        base_model = request.base_model
        if request.from_checkpoint is not None:
            checkpoint = await self._checkpoints.find(project, request.from_checkpoint)
            base_model = base_model or checkpoint.base_model
        if not base_model:
            raise InvalidRequest("base_model: missing", details={"key": "base_model"})
        base_model = await asyncio.to_thread(self._host.resolve, base_model)
        lora = None
        if request.kind == "trainer":
            lora = request.lora or (
                LoraConfig() if checkpoint is None or not checkpoint.lora else LoraConfig.from_wire(checkpoint.lora)
            )
            if lora.seed is None:
                lora = LoraConfig.from_wire(lora.to_wire() | {"seed": new_seed()})
        if checkpoint is not None:
            path = str(request.from_checkpoint)
            known = self._lane_of(base_model).info
            same = known.identity if known is not None else checkpoint.base_identity
            check_loadable(checkpoint, path, request.with_optimizer, same, base_model)
            if known is None and checkpoint.base_model != base_model:
                check_loadable(checkpoint, path, False, "another base model", base_model)
        now = time.time()
        values: dict[str, Any] = {
            "id": new_id("s"),
            "project": project,
            "kind": request.kind,
            "base_model": base_model,
            "base_identity": None if checkpoint is None else checkpoint.base_identity or None,
            "lora": None if lora is None else lora.to_wire(),
            "state": "running",
            "on_failure": request.on_failure,
            "gap_timeout": request.gap_timeout,
            "name": request.name,
            "tags": list(request.tags),
            "metadata": dict(request.metadata),
            "idempotency_key": request.idempotency_key or None,
            "request_hash": hash_of(request),
            "from_checkpoint": request.from_checkpoint,
            "with_optimizer": request.with_optimizer,
            "epoch": 1,
            "next_seq": 1,
            "step": 0,
            "progress": None,
            "created_at": now,
            "used_at": now,
            "busy_seconds": 0.0,
            "owner": self._lease.server,
        }
        limits = await self._projects.limits(project)
        session_id, epoch, new = await self._store.write(lambda connection: insert(connection, values, limits))
        if new:
            session = session_of(values)
            self._live[session.id] = session
            self._lane_of(base_model).add(session)
            self._lane_of(base_model).preload()
        return await self.info(project, session_id), epoch

    async def record_import(self, project: str, base_model: str, name: str, state: AdapterState) -> SaveWeightsResponse:
        """A closed session that only owns the ``weights`` checkpoint which is made of an adapter from elsewhere."""
        session_id, now = new_id("s"), time.time()
        origin = Origin(
            project=project,
            session_id=session_id,
            base_model=base_model,
            base_identity=state.base_identity,
            lora=state.config,
        )
        # Written anew: only what was understood is kept.
        files = formats.adapter_to_peft(state, base_model)
        published = await self._checkpoints.publish(origin, "weights", files, name=name)
        values = {
            "id": session_id,
            "project": project,
            "kind": "sampler",
            "base_model": base_model,
            "lora": state.config.to_wire(),
            "state": "closed",
            "on_failure": "continue",
            "name": f"import of {name}",
            "tags": [],
            "metadata": {},
            "request_hash": "",
            "with_optimizer": False,
            "epoch": 1,
            "next_seq": 1,
            "step": 0,
            "created_at": now,
            "used_at": now,
            "closed_at": now,
            "busy_seconds": 0.0,
        }

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.insert(sessions).values(**values))
            published.insert(connection)

        await self._store.write(write)
        return SaveWeightsResponse(published.path, published.size_bytes)

    async def info(self, project: str, session_id: str) -> SessionInfo:
        live = self._live.get(session_id)
        if live is not None and live.project == project:
            return live.info()
        return session_of(await self._row(project, session_id)).info()

    async def check_here(self, project: str, session_id: str) -> None:
        """Raise `OwnedElsewhere` for an open session that another server has: only that one knows all of it."""
        if session_id not in self._live:
            row = await self._row(project, session_id)
            if row["state"] != "closed":
                await self._lease.check(row["owner"])

    async def list(self, project: str) -> list[SessionInfo]:
        """Newest first."""
        query = sa.select(sessions).where(sessions.c.project == project)
        query = query.order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
        rows = await self._store.read(lambda connection: connection.execute(query).mappings().all())
        return [self._live[row["id"]].info() if row["id"] in self._live else session_of(row).info() for row in rows]

    async def live(self, project: str, session_id: str) -> Session:
        """The session with its queue; loads it, and starts its replay, on first use.

        Raises:
            NotFound, SessionClosed. OwnedElsewhere: another server has it.
        """
        session = self._live.get(session_id)
        if session is None:
            async with self._loading:
                session = self._live.get(session_id) or await self._load(project, session_id)
        if session.project != project:
            raise unknown_session(session_id)
        self.touch([session_id])
        return session

    def touch(self, session_ids: Iterable[str]) -> None:
        """These are in use, whoever has them: the time that they may be idle begins anew."""
        now, date = time.monotonic(), latest_now()
        for session_id in session_ids:
            live, noted = self._live.get(session_id), self._noted.get(session_id)
            if live is not None:
                live.used_at = now
            if noted is None or now - noted >= _NOTED_SECONDS:
                self._noted[session_id] = now
                self._noted.move_to_end(session_id)
                used = sa.update(sessions).where(sessions.c.id == session_id, sessions.c.used_at < date)
                self._store.write_lazily(lambda connection, used=used: connection.execute(used.values(used_at=date)))
        while len(self._noted) > _MAX_NOTED:
            self._noted.popitem(last=False)

    async def unused(self, seconds: float) -> AsyncIterator[Session]:
        """Sessions of this server, with their queues, that nobody has used for so long and that have nothing to do.

        Each is looked at when it is its turn: the caller may take long over those before it.
        """
        mine = sa.select(sessions.c.project, sessions.c.id).where(sessions.c.state != "closed")
        mine = mine.where(sessions.c.owner == self._lease.server)

        async def old(query: sa.Select[Any, Any]) -> Sequence[Any]:
            query = query.where(sessions.c.used_at < earliest_now() - seconds)
            return await self._store.read(lambda connection: connection.execute(query).all())

        for row in await old(mine):
            if not await old(mine.where(sessions.c.id == row.id)):
                continue
            session = self._live.get(row.id)
            if session is None:
                try:
                    async with self._loading:
                        session = self._live.get(row.id) or await self._load(row.project, row.id)
                except Exception:  # of one session; the others have their turn
                    logger.exception("session %s, which is idle, cannot be loaded", row.id)
                    continue
            elif session.used_at > time.monotonic() - seconds:
                continue  # its date is older: written by a clock that was set back, or not yet
            if not session.num_new and not session.completions:
                yield session

    async def load_unfinished(self) -> None:
        """Take up every session of this server that has queued operations."""
        query = sa.select(operations.c.project, operations.c.session_id).distinct()
        query = query.where(operations.c.state == "queued", operations.c.seq.is_not(None))
        query = query.join(sessions, sessions.c.id == operations.c.session_id).where(sessions.c.state != "closed")
        query = query.where(sessions.c.owner == self._lease.server)
        for row in await self._store.read(lambda connection: connection.execute(query).all()):
            await self.live(row.project, row.session_id)

    async def attach(self, project: str, session_id: str) -> Attached:
        """Take a session over: fences older clients and withdraws what they sent beyond a gap."""
        session = await self.live(project, session_id)
        epoch = session.epoch = session.epoch + 1
        of_session = operations.c.session_id == session_id
        unfetched = sa.select(operations.c.id).where(of_session, operations.c.acked_at.is_(None))
        unfetched = unfetched.order_by(operations.c.created_at, operations.c.id)

        def write(connection: sa.Connection) -> tuple[int, list[Any], list[str]]:
            bump = sa.update(sessions).where(sessions.c.id == session_id).values(epoch=epoch)
            next_seq = connection.execute(bump.returning(sessions.c.next_seq)).scalar_one()
            numbers = sa.select(operations.c.seq).where(of_session, operations.c.seq >= next_seq)
            for seq in connection.execute(numbers.order_by(operations.c.seq)).scalars():
                if seq != next_seq:
                    break
                next_seq += 1
            # They never ran and cannot: a number before them was never sent. The new client uses it anew.
            stranded = sa.delete(operations).where(of_session, operations.c.seq > next_seq)
            columns = (operations.c.id, operations.c.seq, operations.c.state, operations.c.quote)
            withdrawn = connection.execute(stranded.returning(*columns)).all()
            # What had ended before (cancelled, skipped) gave its reservation back then.
            budgets.release(connection, [(project, row.quote) for row in withdrawn if row.state == "queued"])
            return next_seq, list(withdrawn), list(connection.execute(unfetched).scalars())

        next_seq, withdrawn, ids = await self._store.write(write)
        for row in withdrawn:
            session.pending.pop(row.seq, None)
        self._outcomes.forget(row.id for row in withdrawn)
        return Attached(session.info(), epoch, next_seq, ids, session.progress)

    async def close(self, project: str, session_id: str) -> SessionInfo:
        """End a session; checkpoints and frozen weights stay."""
        session = await self.live(project, session_id)
        session.state = "closed"
        query = sa.update(sessions).where(sessions.c.id == session_id).values(state="closed", closed_at=time.time())
        snapshots = internal_snapshots.c.session_id == session_id
        bodies = sa.and_(operations.c.session_id == session_id, operations.c.state != "queued")

        cancelled = Cancelled("the session was closed before this ran")
        queued = sa.and_(operations.c.session_id == session_id, operations.c.seq.is_not(None))
        queued = sa.and_(queued, operations.c.state == "queued")

        def write(connection: sa.Connection) -> tuple[list[str], list[str]]:
            connection.execute(query)
            end = {"state": "cancelled", "error": cancelled.to_wire(), "finished_at": time.time()}
            cancel = sa.update(operations).where(queued).values(**end).returning(operations.c.id, operations.c.quote)
            rows = connection.execute(cancel).all()
            budgets.release(connection, [(project, row.quote) for row in rows])
            blobs = list(connection.execute(sa.select(internal_snapshots.c.blob).where(snapshots)).scalars())
            with_blob = sa.select(operations.c.body_blob).where(bodies, operations.c.body_blob.is_not(None))
            blobs += list(connection.execute(with_blob).scalars())
            connection.execute(sa.delete(internal_snapshots).where(snapshots))
            connection.execute(sa.update(operations).where(bodies).values(body=None, body_blob=None))
            return blobs, [row.id for row in rows]

        blobs, ended = await self._store.write(write)
        for operation_id in ended:  # accepted while the session was wound down
            self._outcomes.publish(OperationResult(operation_id, "cancelled", error=cancelled))
        await self._store.drop_blobs(blobs)
        await self._lane_of(session.base_model).remove(session)
        del self._live[session_id]
        return session.info()

    def queued(self) -> Counter[tuple[str, str]]:
        """Operations of all projects that wait or run, by base model and kind."""
        return Counter(
            (session.base_model, operation.kind)
            for session in self._live.values()
            for operation in session.pending.values()
            if operation.error is None and not operation.replay
        )

    def unfinished(self, project: str) -> int:
        """Operations of the project that wait or run; not those that run again after a restart."""
        return sum(session.num_new for session in self._live.values() if session.project == project)

    async def _load(self, project: str, session_id: str) -> Session:
        row = await self._row(project, session_id)
        if row["state"] == "closed":
            raise SessionClosed(f"session {session_id} is closed", details={"session_id": session_id})
        await self._lease.check(row["owner"])
        session = session_of(row)
        for operation in await self._recovery.queue(session):
            self.expect(session, operation.id, operation.seq)
        self._live[session_id] = session
        self._lane_of(session.base_model).add(session)
        return session

    def expect(self, session: Session, operation_id: str, seq: int) -> None:
        kind = session.pending[seq].kind
        self._outcomes.expect(session.project, operation_id, kind, lambda: seq - session.next_run)

    async def _row(self, project: str, session_id: str) -> Any:
        query = sa.select(sessions).where(sessions.c.id == session_id, sessions.c.project == project)
        row = await self._store.read(lambda connection: connection.execute(query).mappings().one_or_none())
        if row is None:
            raise unknown_session(session_id)
        return row


def unknown_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id} in this project", details={"session_id": session_id})
