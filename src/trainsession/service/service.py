"""The service behind every door: one object, async, no HTTP and no torch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from ..engine import checkpoint as formats
from ..engine.api import EngineHandle, EngineHost
from ..errors import ServiceUnavailable
from ..limits import Limits
from ..store.store import Store
from ..types import BaseModel, Checkpoint, SaveWeightsResponse, SessionInfo, UsageReport
from . import metrics_log
from .base_samplers import BaseSamplers
from .bodies import check_name
from .budgets import Budgets
from .cancelling import Cancelling
from .checkpoints import Checkpoints
from .janitor import Janitor
from .keys import Keys, SamplesOf
from .lanes import Lanes
from .leases import Lease, TakenOver
from .log import SAMPLE, OperationLog
from .metering import Meter
from .outcomes import Outcomes, unknown_operation
from .prices import PriceTable
from .projects import Projects
from .quotas import Quotas
from .readiness import Readiness
from .requests import Attached, CreateSession, OperationRequest, OperationResult, Results, SampleRequest
from .retiring import Retiring
from .sample_submission import SampleSubmission
from .samples import Samples
from .sessions import Sessions, unknown_session
from .settings import Settings
from .submission import Submission
from .telemetry import Telemetry
from .usage import UsageQuery
from .weights import WeightsResolver


class Service:
    """Sessions, operations, samples, checkpoints and usage of every project of one home.

    All methods belong to the event loop that `open` ran on. Each looks only at rows of the given
    project: an id of another project raises `NotFound`, exactly as an unknown one does.
    """

    def __init__(self, store: Store, host: EngineHost, prices: PriceTable, settings: Settings, lease: Lease) -> None:
        self.store = store
        self.lease = lease
        self._host = host
        self._log = OperationLog(store)
        self.telemetry = Telemetry(store, lease)
        self._readiness = Readiness(store, lease)
        self._outcomes = Outcomes(self._log, lease, self.telemetry.ended)
        self._meter = Meter(store, prices)
        self._checkpoints = Checkpoints(store)
        self.keys = Keys(store.database)
        self.projects = Projects(store.database)
        quotas = Quotas()
        parts = (host, store, self._log, self._outcomes, self._meter, self._checkpoints, settings)
        self._lanes = Lanes(*parts, self.telemetry.engine_restarted)
        lane_of = self._lanes.of
        self._sessions = Sessions(store, host, lease, self._checkpoints, self._outcomes, self.projects, lane_of)
        self._base_samplers = BaseSamplers(self._sessions, host)
        resolver = WeightsResolver(store, host, lease, self._checkpoints, self._sessions, self._outcomes, lane_of)
        sample_submission = SampleSubmission(store, lease, self._log, resolver, self.projects, quotas, prices)
        self._samples = Samples(
            store, lease, self._log, self._outcomes, self._meter, resolver, sample_submission, quotas, settings
        )
        self._submission = Submission(
            store, self._log, self._outcomes, self._sessions, self.projects, quotas, prices, lane_of
        )
        self._cancelling = Cancelling(self._log, lease, self._outcomes, self._sessions, self._samples, self._submission)
        retiring = Retiring(self._submission, self._outcomes, self.close_session)
        self._janitor = Janitor(store, self._checkpoints, self._sessions, lane_of, retiring.retire, settings)
        self._janitor_task: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(
        cls,
        home: Path,
        host: EngineHost,
        *,
        database: str | None = None,
        blobs: str | None = None,
        advertise: str | None = None,
        prices: Path | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Open (or create) the home's database and take up what an earlier process of the home left.

        The caller has the home to itself (`trainsession.transport.home.HomeLock`).

        Args:
            home: Directory of the database and blobs; made if missing (0700).
            host: Where engines come from; the service closes it.
            database: URL of a PostgreSQL database; default: a file in the home.
            blobs: ``s3://bucket/prefix``; default: a directory of the home.
            advertise: URL at which other servers on the same database reach this one; needed where there are any.
            prices: A price table in TOML; default: ``prices.toml`` in the home, or the packaged example prices.
            settings: Times and bounds; default: `Settings()`.

        Raises:
            StorageError: the home is not writable, or the database or the blobs out of reach.
            IncompatibleVersion: the database was written by a newer version, or it is on a server and was
                written by an older one.
            InvalidRequest: ``database``, ``blobs`` or ``advertise`` is no such address.
            ServiceUnavailable: another server is on this database, and one of the two advertises no address.
        """
        table = PriceTable.load(prices) if prices is not None else PriceTable.of_home(home)
        store = await asyncio.to_thread(Store, home, database, blobs)
        settings = settings or Settings()
        try:
            service = cls(store, host, table, settings, Lease(store, settings, advertise))
        except BaseException:
            await store.close()
            raise
        try:
            await store.claim_blobs(Janitor.used)
            await service.lease.take(home)
            service.lease.keep(service._take_up)
            await Budgets(store.database).recount()
            await service._sessions.load_unfinished()
            await service._samples.load_unfinished()
        except BaseException:
            await service.close()
            raise
        service._janitor_task = asyncio.create_task(service._janitor.run(), name="janitor")
        return service

    async def close(self) -> None:
        """Stop taking work, snapshot live sessions, close engines and the database."""
        if self._closing:
            return
        self._closing = self.lease.closing = True
        if self._janitor_task is not None:
            self._janitor_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._janitor_task
        await self._samples.close()
        await self._lanes.close()
        self._meter.flush(at_once=True)
        await self.lease.release()
        await self._host.close()
        await self.store.close()

    async def limits(self, project: str) -> Limits:
        """What applies to a project now."""
        return await self.projects.limits(project)

    # --- models ------------------------------------------------------------------------------

    def list_base_models(self) -> list[BaseModel]:
        """Those that load without a model hub first."""
        return list(self._host.list_base_models())

    async def tokenizer_bundle(self, base_model: str) -> tuple[str, dict[str, bytes]]:
        """(content hash, file name -> bytes)."""
        name = await asyncio.to_thread(self._host.resolve, base_model)
        files = await self._host.tokenizer_files(name)
        digest = hashlib.sha256()
        for file_name in sorted(files):
            digest.update(f"{file_name}\0{len(files[file_name])}\0".encode() + files[file_name])
        return digest.hexdigest(), files

    # --- sessions ----------------------------------------------------------------------------

    async def create_session(self, project: str, request: CreateSession) -> tuple[SessionInfo, int]:
        """(session, epoch).

        Raises:
            UnknownModel: names the models that exist.
            NotFound, CheckpointMismatch: of ``from_checkpoint``.
            LimitExceeded: too many live sessions, or an absurd name, tag or metadata.
            SequenceConflict: the idempotency key made another session.
        """
        self._check_open()
        return await self._sessions.create(project, request)

    async def list_sessions(self, project: str) -> list[SessionInfo]:
        """Newest first, closed ones included."""
        return await self._sessions.list(project)

    async def get_session(self, project: str, session_id: str, only: SamplesOf | None = None) -> SessionInfo:
        """To who only samples it, without what its owner wrote down in it."""
        if only is not None and only.hides(session_id):
            raise unknown_session(session_id)
        await self._sessions.check_here(project, session_id)
        if only is None:
            return await self._sessions.info(project, session_id)
        return replace(await self._sessions.info(project, session_id), name="", tags=(), metadata={}, progress=None)

    async def attach(self, project: str, session_id: str) -> Attached:
        """Take a session over: older clients are fenced, numbers after a gap are free again."""
        self._check_open()
        return await self._sessions.attach(project, session_id)

    async def close_session(self, project: str, session_id: str) -> SessionInfo:
        """Cancel what has not started, let the rest end, and drop the adapter. Checkpoints stay."""
        self._check_open()
        session = await self._sessions.live(project, session_id)
        await self._cancelling.wind_down(session, self._lanes.of(session.base_model))
        return await self._sessions.close(project, session_id)

    async def log_metrics(
        self, project: str, session_id: str, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Append a row to the session's metrics log."""
        await self._sessions.info(project, session_id)
        await metrics_log.append(self.store, project, session_id, metrics, step)

    async def read_log(self, project: str, session_id: str) -> list[dict[str, Any]]:
        """Rows ``{"step", "time", "metrics"}``, oldest first."""
        await self._sessions.info(project, session_id)
        return await metrics_log.read(self.store, session_id)

    async def base_sampler(self, project: str, base_model: str) -> SessionInfo:
        """The session that pays for a base model's samples where the caller names none; see `BaseSamplers.of`."""
        self._check_open()
        return await self._base_samplers.of(project, base_model)

    # --- operations --------------------------------------------------------------------------

    async def submit(self, project: str, session_id: str, request: OperationRequest) -> tuple[str, int]:
        """(operation id, sequence number); durable when it returns.

        Raises:
            InvalidRequest, BudgetExceeded: refused and logged as failed; its number is consumed.
            SequenceConflict, SessionFenced, SessionClosed, NotFound, RateLimited, StorageError:
                nothing was logged and the number is free.
        """
        self._check_open()
        with self.telemetry.submit_seconds.labels(request.kind).time():
            return await self._submission.submit(project, session_id, request)

    async def cancel(self, project: str, operation_id: str, only: SamplesOf | None = None) -> bool:
        """Whether the operation will not run, or a running sample will stop within a step.

        Args:
            only: What the caller may touch; anything else does not exist for it.

        Raises:
            NotFound: no such operation in this project.
        """
        await self._check_known(project, operation_id, only)
        return await self._cancelling.cancel(project, operation_id)

    async def submit_samples(
        self,
        project: str,
        weights: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        *,
        idempotency_key: str = "",
        only: SamplesOf | None = None,
        whole: bool = False,
    ) -> list[str]:
        """Operation ids, in order; all of them are accepted, in one commit, or none is.

        Those that the project's budget does not hold are accepted as failed, the others go on.

        Args:
            weights: One of ``{"base_model"}``, ``{"path"}``, ``{"operation_id"}`` (`docs/wire.md`).
            idempotency_key: A retry with the same key returns the first ids and does nothing.
            only: With a session: weights of that session, which also pays.
            whole: Refuse all where one does not fit the budget.

        Raises:
            PermissionDenied: other weights, or another payer, than ``only`` allows.
            InvalidRequest, NotFound: what the engine could not run.
            LimitExceeded, RateLimited: name the project's limit.
            BudgetExceeded: none fits, or not all of a ``whole``; nothing was logged.
        """
        self._check_open()
        with self.telemetry.submit_seconds.labels(SAMPLE).time():
            return await self._samples.submit(project, weights, requests, idempotency_key, only, whole)

    async def stream(
        self, project: str, operation_id: str, only: SamplesOf | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Frames of a sample from its first token on, as they are drawn; see `docs/wire.md`."""
        await self._check_known(project, operation_id, only)
        async for frame in self._samples.stream(project, operation_id):
            yield frame

    async def results(
        self,
        project: str,
        wait: Sequence[str],
        ack: Sequence[str] = (),
        timeout: float = 0.0,
        only: SamplesOf | None = None,
    ) -> Results:
        """What of ``wait`` has ended; waits up to ``timeout`` seconds for the first of them."""
        if only is None:
            return await self._outcomes.poll(project, wait, ack, timeout)
        known = await self._samples.among(project, [*wait, *ack], only)
        hidden = [unknown_operation(operation_id) for operation_id in wait if operation_id not in known]
        mine = [operation_id for operation_id in wait if operation_id in known]
        acked = [operation_id for operation_id in ack if operation_id in known]
        results = await self._outcomes.poll(project, mine, acked, 0.0 if hidden else timeout)
        failed = [OperationResult(error.details["id"], "failed", error=error) for error in hidden]
        return Results([*failed, *results.results], results.positions)

    async def _check_known(self, project: str, operation_id: str, only: SamplesOf | None) -> None:
        if only is not None and not await self._samples.among(project, [operation_id], only):
            raise unknown_operation(operation_id)

    # --- checkpoints -------------------------------------------------------------------------

    async def list_checkpoints(
        self, project: str, session_id: str | None = None, only: SamplesOf | None = None
    ) -> list[Checkpoint]:
        """Newest first."""
        if only is not None and only.hides(session_id):
            return []
        return await self._checkpoints.list(project, session_id)

    async def delete_checkpoint(self, project: str, path: str) -> None:
        await self._checkpoints.delete(project, path)

    async def checkpoint_files(self, project: str, path: str) -> list[dict[str, Any]]:
        """``{"name", "size", "sha256"}`` each."""
        return await self._checkpoints.files(project, path)

    async def read_checkpoint_file(self, project: str, path: str, name: str) -> BinaryIO:
        """That content as a file, its checksum verified; the caller closes it."""
        return await self._checkpoints.file(project, path, name)

    async def import_adapter(
        self, project: str, base_model: str, name: str, files: Mapping[str, bytes]
    ) -> SaveWeightsResponse:
        """Make a ``weights`` checkpoint of a PEFT adapter's two files.

        Raises:
            CheckpointMismatch: not a plain LoRA adapter; names the field or tensor.
        """
        self._check_open()
        check_name(name)
        base_model = await asyncio.to_thread(self._host.resolve, base_model)
        state = await self.store.in_thread(formats.adapter_from_peft, files)
        return await self._sessions.record_import(project, base_model, name, state)

    async def usage(self, project: str | None, session_id: str | None = None, **fields: Any) -> UsageReport:
        """Tokens, cost and time up to now; see `UsageQuery` for ``fields``."""
        return await self._meter.usage(UsageQuery(project=project, session_id=session_id, **fields))

    # --- for the operator --------------------------------------------------------------------

    def engines(self) -> dict[str, EngineHandle]:
        """Those that are loaded, by base model."""
        return self._lanes.engines()

    async def check_ready(self) -> dict[str, bool]:
        """What of the stores can be written; see `Readiness`."""
        return await self._readiness.check()

    async def metrics(self) -> bytes:
        """Of the whole service, as Prometheus reads them."""
        return await self.telemetry.render(self.engines(), self._sessions.queued(), self._samples.queued())

    # --- inside ------------------------------------------------------------------------------

    async def _take_up(self, taken: TakenOver) -> None:
        """Run what another server had."""
        await self._sessions.load_unfinished()
        await self._samples.load_unfinished(taken.samples)

    def _check_open(self) -> None:
        if self._closing:
            raise ServiceUnavailable("the service is closing")
