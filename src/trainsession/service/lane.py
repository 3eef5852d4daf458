"""One engine's queue: picks ready operations, runs them, and makes their results durable behind it.

The engine does not wait for the disk: what it did is committed while it goes on. After a crash in between
the operation is in the log as not ended, and runs again on the restored state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.api import EngineHandle, EngineHost, EngineInfo
from ..errors import EngineError, EngineLost, StorageError, StorageUnavailable, TrainSessionError
from ..store.store import Store
from . import tracing
from .bodies import Body, parse_packed
from .checkpoints import Checkpoints
from .completion import Completion
from .endings import Advance
from .frozen import FrozenPool
from .log import OperationLog
from .metering import Meter
from .outcomes import Outcomes
from .passing import Passing
from .recovery import Recovery
from .runner import Outcome, Runner, after, as_ours, is_pass, ready_of
from .scheduler import Scheduler
from .session import Operation, Session
from .settings import Settings

logger = logging.getLogger(__name__)
_PARSE_IN_THREAD = 1 << 20
MAX_LOSSES = 3
"""Times that an engine's process may end under an operation before it fails."""
MAX_FAULTS = 3
"""Times that the service itself may meet a fault under an operation before that fails."""


class Lane:
    """The sessions of one base model and the engine that they share."""

    def __init__(
        self,
        base_model: str,
        host: EngineHost,
        store: Store,
        log: OperationLog,
        outcomes: Outcomes,
        meter: Meter,
        checkpoints: Checkpoints,
        settings: Settings,
        on_loss: Callable[[str], None],
    ) -> None:
        self.base_model = base_model
        self.pool = FrozenPool(store, checkpoints, settings.live_snapshots, settings.kept_snapshots)
        self._host = host
        self._store = store
        self._log = log
        self._completion = Completion(store, log, outcomes, meter, settings)
        self._meter = meter
        self._checkpoints = checkpoints
        self._settings = settings
        self._on_loss = on_loss
        self._recovery = Recovery(store, checkpoints)
        self._passing = Passing(store, outcomes)
        self._scheduler = Scheduler()
        self._sessions: dict[str, Session] = {}
        self._handle: EngineHandle | None = None
        self._opening = asyncio.Lock()
        self.turn = asyncio.Lock()
        """Held while the engine runs an operation, or a session is moved in or out."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._preloading: asyncio.Future[Any] | None = None
        self._closing = False

    # --- what others ask of it ---------------------------------------------------------------

    @property
    def loaded(self) -> EngineHandle | None:
        """The engine, once it is loaded and while it lives."""
        return self._handle if self._handle is not None and self._handle.alive else None

    @property
    def info(self) -> EngineInfo | None:
        """Of the engine, once it is loaded."""
        return None if self._handle is None else self._handle.info

    async def engine(self) -> EngineHandle:
        """The engine; loads it on first use.

        Raises:
            TrainSessionError: it cannot be loaded. The next call tries again.
        """
        async with self._opening:
            self._notice_loss()
            if self._handle is None:
                self._handle = await self._host.open(self.base_model)
            return self._handle

    def preload(self) -> None:
        """Load the engine in the background; its first use tries again, and raises, what fails now."""
        if self._handle is None and self._preloading is None and not self._closing:
            self._preloading = asyncio.gather(self.engine(), return_exceptions=True)

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self.wake()

    def wake(self) -> None:
        """Something became ready."""
        self._wake.set()
        if self._task is None and not self._closing:
            self._task = asyncio.create_task(self._run(), name=f"lane {self.base_model}")

    async def evict(self, session: Session) -> None:
        """Move an idle session to blobs; its next operation brings it back."""
        async with self.turn:
            if not session.resident or not session.idle:
                return
            await self._save(session)
            if session.idle and not self._unsaved(session) and session.resident and self._handle is not None:
                session.resident = False
                session.kept.clear()
                await self._drop(self._handle, session)

    async def remove(self, session: Session) -> None:
        """Drop a closed session; its frozen weights stay."""
        async with self.turn:
            self._sessions.pop(session.id, None)
            if session.resident and self._handle is not None:
                session.resident = False
                await self._drop(self._handle, session)

    async def tidy(self, session: Session) -> None:
        """Drop graphs of forwards whose backward did not come, and take a snapshot that is due."""
        async with self.turn:
            handle = self._handle
            if session.resident and handle is not None and handle.alive:
                await self._runner(handle).drop_old_graphs(session, self._settings.keep_graph_seconds)
                await self._maybe_snapshot(handle, session)

    async def close(self) -> None:
        """Let the present operation end, then save every session and the frozen weights."""
        self._closing = self._completion.closing = True
        self._wake.set()
        if self._preloading is not None:
            await self._preloading
        if self._task is not None:
            await self._task
        if self._handle is not None:
            for session in list(self._sessions.values()):
                if session.resident:
                    await self._save(session)
            try:
                await self.pool.save(self._handle)
            except (StorageError, EngineLost) as error:
                logger.warning("frozen weights were not saved: %s", error.message)
        for session in list(self._sessions.values()):
            await self._recovery.settled(session)

    # --- the loop ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            await self._rewind_lost()
            if self._closing:
                return
            if not await self._passing.look_after(list(self._sessions.values())):
                asyncio.get_running_loop().call_later(self._settings.retry_seconds, self._wake.set)
            picked = self._scheduler.pick([ready for s in self._sessions.values() if (ready := ready_of(s))])
            if not picked:
                await self._woken()
                continue
            chosen = [s for item in picked if (s := self._sessions.get(item.session)) is not None]
            async with self.turn:
                heads = [(s, head) for s in chosen if (head := s.head) is not None and head.error is None]
                try:
                    await self._execute(heads)
                    continue
                except Exception:  # a fault of ours; with the lane every session of the model would stand still
                    logger.exception("the queue of %s met a fault and goes on", self.base_model)
                    await self._contain(heads)
            await asyncio.sleep(self._settings.retry_seconds)

    async def _woken(self) -> None:
        """Wait until something became ready, or a missing number is to be given up."""
        deadlines = [until for session in self._sessions.values() if (until := session.gap_until) is not None]
        seconds = max(min(deadlines) - time.time(), self._settings.retry_seconds) if deadlines else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _notice_loss(self) -> None:
        """If the engine is gone: so is what it held, and the sessions must start from their snapshots."""
        if self._handle is None or self._handle.alive:
            return
        logger.warning("the engine of %s is lost; its sessions are restored", self.base_model)
        self._on_loss(self.base_model)
        self._handle = None
        self.pool.lost()
        for session in self._sessions.values():
            session.lose()
        self.wake()

    async def _rewind_lost(self) -> None:
        self._notice_loss()
        while not self._closing and (lost := [session for session in self._sessions.values() if session.lost]):
            async with self.turn:
                for session in lost:
                    try:
                        await self._recovery.rewind(session)
                    except StorageError as error:
                        logger.warning("session %s cannot be restored yet: %s", session.id, error.message)
                        await asyncio.sleep(self._settings.retry_seconds)
                    except Exception as error:  # of one session; the others of the lane go on
                        session.give_up(as_ours(error, session.id))

    async def _execute(self, heads: Sequence[tuple[Session, Operation]]) -> None:
        """Run the heads of sessions: one operation, or several passes as one."""
        started = time.monotonic()
        try:
            handle = await self.engine()
        except Exception as error:
            for session, operation in heads:
                self._settle(session, operation, Outcome(error=as_ours(error, operation.id)), 0.0)
            return
        work: list[tuple[Session, Operation, Body]] = []
        waiting = False
        for session, operation in heads:
            if session.lost or operation.error is not None:
                continue  # with the engine before this one; or cancelled while the engine was loaded
            operation.started = True
            try:
                work.append((session, operation, await self._prepare(handle, session, operation)))
            except StorageUnavailable as error:
                waiting = self._wait(operation, error)
            except Exception as error:
                self._end(session, operation, Outcome(error=as_ours(error, operation.id)), 0.0)
        if not work:
            if waiting:
                await asyncio.sleep(self._settings.retry_seconds)
            return
        metered = [session for session, operation, _ in work if not operation.replay]
        for session in metered:
            self._meter.enter(handle, session.project, session.id, self.base_model)
        try:
            outcomes = await self._outcomes_of(self._runner(handle), work)
        finally:
            for session in metered:
                self._meter.leave(handle, session.project, session.id, self.base_model)
        seconds = time.monotonic() - started
        tracing.engine([operation.id for _, operation, _ in work], self.base_model, seconds)
        for (session, operation, _), outcome in zip(work, outcomes, strict=True):
            if isinstance(outcome.error, StorageUnavailable) and self._wait(operation, outcome.error):
                await asyncio.sleep(self._settings.retry_seconds)
            else:
                self._end(session, operation, outcome, seconds)
        for session, operation, _ in work:
            await self._maybe_snapshot(handle, session)
            if operation.kind == "snapshot":
                await self._shrink(handle)

    async def _contain(self, heads: Sequence[tuple[Session, Operation]]) -> None:
        """After a fault of ours: try what was under way again, alone, and in the end fail it.

        Nobody knows how much of it the engine did, so its session starts from its snapshot.
        """
        for session, operation in heads:
            if session.head is not operation:
                continue
            operation.started = False
            operation.faults += 1
            if operation.faults >= MAX_FAULTS:
                fault = RuntimeError(f"the service met {operation.faults} faults under it")
                self._settle(session, operation, Outcome(error=as_ours(fault, operation.id)), 0.0)
            if session.resident and self._handle is not None:
                session.lose()
                await self._drop(self._handle, session)

    def _wait(self, operation: Operation, error: StorageUnavailable) -> bool:
        """It was accepted, so it waits for what it needs and is not refused."""
        logger.warning("operation %s cannot be run yet: %s", operation.id, error.message)
        operation.started = False
        return True

    def _end(self, session: Session, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Settle an operation, or leave it to run again because the engine ended under it."""
        if isinstance(outcome.error, EngineLost):
            operation.started = False
            operation.losses += 1
            if operation.losses < MAX_LOSSES:
                return
            times = f"{operation.losses} times while it ran this {operation.kind}"
            message = f"the engine's process ended {times}; it is not tried again"
            outcome.error = EngineLost(message, details={"seq": operation.seq})
        self._settle(session, operation, outcome, seconds)

    async def _prepare(self, handle: EngineHandle, session: Session, operation: Operation) -> Body:
        if session.fatal is not None:
            raise session.fatal
        try:
            await self._recovery.bring_in(handle, session)
        except (StorageError, EngineLost):
            raise
        except TrainSessionError as error:
            session.fatal = error
            raise
        if operation.body is None:
            packed = await self._log.body(operation.id)
            parse = self._store.in_thread(parse_packed, packed) if len(packed) > _PARSE_IN_THREAD else None
            operation.body = parse_packed(packed) if parse is None else await parse
        return operation.body

    async def _outcomes_of(self, runner: Runner, work: Sequence[tuple[Session, Operation, Body]]) -> Sequence[Outcome]:
        try:
            if is_pass(work[0][1]):
                return await runner.train(work)
            return [await runner.run(*work[0])]
        except Exception as error:
            return [Outcome(error=as_ours(error, operation.id)) for _, operation, _ in work]

    def _runner(self, handle: EngineHandle) -> Runner:
        return Runner(handle, self._checkpoints, self._log, self.pool, self._store.scratch)

    # --- what follows an operation -----------------------------------------------------------

    def _settle(self, session: Session, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Move the session past an operation and write its end in the background."""
        step, progress = after(session, operation, outcome)
        session.passed(operation)
        session.operations_since_snapshot += 1
        session.seconds_since_snapshot += seconds
        session.used_at = time.time()
        if operation.replay:
            if outcome.error is not None and session.fatal is None:
                logger.error("replay of %s failed: %s", operation.id, outcome.error.message)
                session.fatal = EngineError(
                    f"the session could not be restored: operation {operation.seq} ({operation.kind}) succeeded "
                    f"before and failed when it was replayed: {outcome.error.message}"
                )
            return
        skipped: list[Operation] = []
        if outcome.error is not None:
            session.lacks(operation)
            skipped = session.skip_behind(operation)
        session.step, session.progress = step, progress
        advance = Advance(step=session.step, progress=session.progress)
        completion = self._completion.complete(session, operation, outcome, skipped, advance)
        task = asyncio.create_task(completion, name=f"complete {operation.id}")
        session.completions[operation.seq] = task

        def done(_task: asyncio.Task[None]) -> None:
            session.completions.pop(operation.seq, None)
            self._wake.set()

        task.add_done_callback(done)

    # --- snapshots ---------------------------------------------------------------------------

    async def _maybe_snapshot(self, handle: EngineHandle, session: Session) -> None:
        if session.resident and (
            session.snapshot_due
            or session.operations_since_snapshot >= self._settings.snapshot_every_operations
            or session.seconds_since_snapshot >= self._settings.snapshot_every_seconds
        ):
            await self._snapshot(handle, session)

    async def _snapshot(self, handle: EngineHandle, session: Session) -> None:
        try:
            await self._recovery.snapshot(handle, self.pool, session)
        except (StorageError, EngineLost) as error:
            logger.warning("no snapshot of session %s: %s", session.id, error.message)
        except Exception:  # a replay is longer without it, and the queue must go on
            logger.exception("no snapshot of session %s", session.id)

    async def _save(self, session: Session) -> None:
        await self._recovery.settled(session)
        if self._unsaved(session) and self._handle is not None:
            await self._snapshot(self._handle, session)
            await self._recovery.settled(session)

    def _unsaved(self, session: Session) -> bool:
        return session.operations_since_snapshot > 0 or session.snapshot_due

    async def _shrink(self, handle: EngineHandle) -> None:
        try:
            await self.pool.shrink(handle)
        except (StorageError, EngineLost) as error:
            logger.warning("frozen weights stay in memory: %s", error.message)

    async def _drop(self, handle: EngineHandle, session: Session) -> None:
        with contextlib.suppress(EngineLost):  # then it is gone anyway
            await handle.call("drop_adapter", session.id)
