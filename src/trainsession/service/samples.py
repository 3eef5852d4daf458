"""Samples: accepted in groups, drawn by the engine, streamed while they run, metered at their end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from .. import wire
from ..engine.api import EngineHandle, SampleEvent
from ..errors import (
    Cancelled,
    EngineLost,
    StorageError,
    TrainSessionError,
)
from ..store.schema import operations
from ..store.store import Store
from .endings import Ending
from .keys import SamplesOf
from .lane import MAX_LOSSES
from .leases import Lease
from .log import SAMPLE, OperationLog
from .metering import Meter, usage_to_wire
from .outcomes import Outcomes
from .prices import Quote
from .quotas import Quotas
from .requests import OperationResult, SampleRequest
from .runner import as_ours
from .sample_run import SampleRun, diverged, fit, item_of, position_of, unpack_sample, with_seed
from .sample_submission import SampleSubmission
from .settings import Settings
from .streams import replayed
from .weights import WeightsResolver, WeightsSource

logger = logging.getLogger(__name__)
_REMEMBERED = 256
"""Finished samples whose stream can be replayed from memory."""
_ENDS_AT_ONCE = 16
"""Results that are made and written together. A thousand samples that end in one step would else hold up
everybody who asks the service for something at that moment."""
_CANCEL_SECONDS = 5.0
"""A closing service waits so long for cancelled samples; they end within a decode step."""


class Samples:
    def __init__(
        self,
        store: Store,
        lease: Lease,
        log: OperationLog,
        outcomes: Outcomes,
        meter: Meter,
        resolver: WeightsResolver,
        submission: SampleSubmission,
        quotas: Quotas,
        settings: Settings,
    ) -> None:
        self._store = store
        self._lease = lease
        self._log = log
        self._outcomes = outcomes
        self._meter = meter
        self._resolver = resolver
        self._submission = submission
        self._quotas = quotas
        self._settings = settings
        self._runs: dict[str, SampleRun] = {}
        self._finished: OrderedDict[str, SampleRun] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Semaphore(_ENDS_AT_ONCE)
        self._closing = False

    async def submit(
        self,
        project: str,
        weights: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        key: str,
        only: SamplesOf | None = None,
        whole: bool = False,
    ) -> list[str]:
        """See `Service.submit_samples`."""
        source, runs, ids = await self._submission.submit(project, weights, requests, key, only, whole)
        self._start(source, runs)
        return ids

    async def among(self, project: str, ids: Sequence[str], only: SamplesOf) -> set[str]:
        """Those of the ids that are samples of the project, and of the session that ``only`` names."""
        query = sa.select(operations.c.id).where(operations.c.project == project, operations.c.kind == SAMPLE)
        query = query.where(operations.c.id.in_(list(ids)))
        if only.session_id is not None:
            query = query.where(operations.c.session_id == only.session_id)
        return set(await self._store.read(lambda connection: connection.execute(query).scalars().all()))

    async def load_unfinished(self, only: Sequence[str] | None = None) -> None:
        """Run again what another process accepted and did not finish, and this server has now.

        Args:
            only: Of these operations; default: of all.
        """
        names = ("id", "project", "session_id", "weights", "quote", "cancelled_at")
        query = sa.select(*(operations.c[name] for name in names))
        query = query.where(operations.c.kind == SAMPLE, operations.c.state == "queued")
        query = query.where(operations.c.owner == self._lease.server)
        if only is not None:
            query = query.where(operations.c.id.in_(only))
        for row in await self._store.read(lambda connection: connection.execute(query).all()):
            if row.cancelled_at is not None:
                error = Cancelled("cancelled; what it had drawn was lost when the service ended, and costs nothing")
                await self._log.finish(Ending(operation_id=row.id, state="cancelled", error=error))
                continue
            source = self._resolver.from_row(row.project, row.weights)
            request = with_seed(unpack_sample(await self._log.body(row.id)), row.weights["seed"])
            if row.id in self._runs:  # of an attempt that failed later on
                continue
            self._quotas.count_samples(row.project, 1)
            model = source.lane.base_model
            # One that an older version accepted has no quote.
            quote = self._meter.prices.quote(model, {}) if row.quote is None else Quote.of_row(row.quote)
            self._start(source, [SampleRun(row.id, row.project, row.session_id or "", request, source.lane, quote)])

    def queued(self) -> Counter[str]:
        """Requests of all projects that wait or run, by base model."""
        return Counter(run.lane.base_model for run in self._runs.values())

    def _start(self, source: WeightsSource, runs: Sequence[SampleRun]) -> None:
        for run in runs:
            self._runs[run.id] = run
            self._outcomes.expect(run.project, run.id, SAMPLE, position_of(run))
        if runs:
            self._spawn(self._feed(source, runs))

    async def _feed(self, source: WeightsSource, runs: Sequence[SampleRun]) -> None:
        """Wait for the weights, then hand the requests to the engine."""
        try:
            handle, releases = await self._resolver.prepare(source, len(runs))
        except Exception as error:
            for run in runs:
                if not self._closing and not run.cancelled:
                    self._ended_with(run, source, as_ours(error, run.id))
            return
        for run, unpin in zip(runs, releases, strict=True):
            release = self._releaser(run, handle, unpin)
            if run.cancelled or self._closing:
                release()
                continue
            try:
                request = fit(handle.info, run.request, run.quote.max_tokens)
            except TrainSessionError as error:
                release()
                self._spawn(self._fail(run, error))
                continue
            run.handle = handle
            self._meter.enter(handle, run.project, run.payer, run.lane.base_model)
            handle.sample(item_of(run, request, source.weights.key), self._listener(run, source, release))

    def _releaser(self, run: SampleRun, handle: EngineHandle, release: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            if run.handle is not None:
                run.handle = None
                self._meter.leave(handle, run.project, run.payer, run.lane.base_model)
            release()

        return once

    def _listener(
        self, run: SampleRun, source: WeightsSource, release: Callable[[], None]
    ) -> Callable[[SampleEvent], None]:
        def on_event(event: SampleEvent) -> None:
            if not event.done:
                if run.redraws_otherwise(event):
                    run.diverged = True
                    if run.handle is not None:
                        run.handle.cancel(run.id)
                elif not run.diverged:
                    run.draw(event)
                return
            release()
            if self._closing:
                return
            if run.diverged:
                self._spawn(self._fail(run, diverged(run)))
            elif event.error is not None:
                self._ended_with(run, source, event.error)
            else:
                self._spawn(self._finish(run, event))

        return on_event

    def _ended_with(self, run: SampleRun, source: WeightsSource, error: TrainSessionError) -> None:
        """Fail, or draw again where nothing but the engine's process was at fault."""
        if not isinstance(error, EngineLost):
            self._spawn(self._fail(run, error))
        elif run.cancelled:
            self._spawn(self._finish(run, SampleEvent(request_id=run.id, done=True)))
        elif run.losses + 1 >= MAX_LOSSES:
            self._spawn(self._fail(run, error))
        else:
            run.draw_again()
            self._spawn(self._feed(source, [run]))

    # --- ends --------------------------------------------------------------------------------

    async def _finish(self, run: SampleRun, end: SampleEvent) -> None:
        async with self._ends:
            await self._write_result(run, end)

    async def _write_result(self, run: SampleRun, end: SampleEvent) -> None:
        cached = run.quote.cached
        tokens = {"prefill": int(run.request.prompt.size) - cached, "prefill_cached": cached}
        tokens["sample"] = sum(map(len, run.tokens))
        self._quotas.tokens.spend(run.project, tokens["sample"])
        usage = run.quote.usage(tokens)
        value = wire.samples_to_wire(run.response(end, usage))
        ending = Ending(
            operation_id=run.id,
            state="done",
            charges=run.quote.charges(tokens),
            payer=run.payer,
            base_model=run.lane.base_model,
            currency=run.quote.currency,
        )
        if await self._durably(run, ending, wire.pack(value)):
            self._end(run, OperationResult(run.id, "done", value), {"done": True, "usage": usage_to_wire(usage)})
            self._meter.flush()

    async def _fail(self, run: SampleRun, error: TrainSessionError) -> None:
        self._submission.withdraw(run)
        state = "cancelled" if isinstance(error, Cancelled) else "failed"
        if await self._durably(run, Ending(operation_id=run.id, state=state, error=error), None):
            self._end(run, OperationResult(run.id, state, error=error), {"error": error.to_wire()})

    async def _durably(self, run: SampleRun, ending: Ending, packed: bytes | None) -> bool:
        """Write an end, however long the disk refuses it; False when the service closed first."""
        while not self._closing:
            try:
                if packed is not None:
                    ending = replace(ending, result=await self._store.keep("result", packed))
                await self._log.finish(ending)
                return True
            except StorageError as error:
                logger.warning("the result of %s cannot be written yet: %s", run.id, error.message)
                await asyncio.sleep(self._settings.retry_seconds)
        return False

    def _end(self, run: SampleRun, result: OperationResult, frame: dict[str, Any]) -> None:
        if self._runs.pop(run.id, None) is not None:
            self._quotas.count_samples(run.project, -1)
        self._finished[run.id] = run
        while len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)
        run.ended = True
        run.frame(frame)
        self._outcomes.publish(result)

    # --- cancelling, streaming, closing ------------------------------------------------------

    async def cancel(self, project: str, operation_id: str) -> bool | None:
        """None where there is no such unfinished sample."""
        run = self._runs.get(operation_id)
        if run is None or run.project != project:
            return None
        if not run.cancelled:
            run.cancelled = True
            if run.handle is None:
                await self._fail(run, Cancelled("cancelled before it started"))
            else:
                run.handle.cancel(run.id)  # what it has drawn so far is its result
        if not run.ended:
            # Until that is durable, too: after a crash nobody would know of the cancel, and draw it whole.
            await self._log.mark_cancelled(run.id)
        return True

    async def stream(self, project: str, operation_id: str) -> AsyncIterator[dict[str, Any]]:
        """Events from the start on, then those to come.

        Raises:
            NotFound: no such sample, or one whose result was kept for its time and then deleted.
            OwnedElsewhere: another server draws it, or drew it and may remember the frames.
            ServiceUnavailable: this server has just taken it over and has yet to begin.
        """
        run = self._runs.get(operation_id) or self._finished.get(operation_id)
        if run is None or run.project != project:
            await self._lease.check_operations(project, [operation_id])
            for frame in await replayed(self._log, project, operation_id):
                yield frame
            return
        position = 0
        run.watched = True
        while True:
            while position < len(run.frames):
                yield run.frames[position]
                position += 1
            if run.ended:
                return
            run.changed.clear()
            await run.changed.wait()

    async def close(self) -> None:
        """Stop drawing; unfinished samples stay in the log and are drawn again by the next process."""
        await self._let_cancelled_end()
        self._closing = True
        for run in self._runs.values():
            if run.handle is not None:
                run.handle.cancel(run.id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _let_cancelled_end(self) -> None:
        """What was cancelled has the tokens that it has: the next process must not draw it to its length."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                for run in [run for run in self._runs.values() if run.cancelled]:
                    while not run.ended:
                        run.changed.clear()
                        await run.changed.wait()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
