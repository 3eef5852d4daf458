"""How samples get into the log: checked, held against limits and budget, accepted in groups."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..engine.api import EngineInfo
from ..errors import LimitExceeded, RateLimited, TrainSessionError
from ..limits import LIMITS
from ..store.schema import operations
from ..store.store import Store
from .ids import new_id
from .keys import SamplesOf
from .log import SAMPLE, OperationLog
from .prices import PriceTable, Quote
from .projects import Projects
from .quotas import Quotas
from .requests import SampleRequest
from .sample_run import SampleRun, fit, pack_sample, paid_by, with_seed
from .weights import WeightsResolver, WeightsSource


class SampleSubmission:
    def __init__(
        self,
        store: Store,
        log: OperationLog,
        resolver: WeightsResolver,
        projects: Projects,
        quotas: Quotas,
        prices: PriceTable,
    ) -> None:
        self._store = store
        self._log = log
        self._resolver = resolver
        self._projects = projects
        self._quotas = quotas
        self._prices = prices

    async def submit(
        self,
        project: str,
        weights: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        key: str,
        only: SamplesOf | None,
        whole: bool,
    ) -> tuple[WeightsSource, list[SampleRun], list[str]]:
        """(weights, what is to be started, ids); nothing is to be started for a retry. See `Service.submit_samples`."""
        LIMITS.check("max_prompts", len(requests), "requests")
        taken = await self._take_places(project, len(requests), key)
        runs: list[SampleRun] = []
        try:
            if only is not None and only.session_id is not None:
                source = await self._resolver.resolve_within(project, weights, only.session_id)
                requests = paid_by(requests, only.session_id)
            else:
                source = await self._resolver.resolve(project, weights)
            runs, ids = await self._accept(project, source, weights, requests, key, whole)
        finally:
            self._quotas.count_samples(project, len(runs) - taken)
        self._quotas.tokens.spend(project, sum(int(run.request.prompt.size) for run in runs))
        return source, runs, ids

    async def _take_places(self, project: str, count: int, key: str) -> int:
        """How many were taken: none for a retry that would be refused, which is answered like its first time."""
        limits = await self._projects.limits(project)
        try:
            self._quotas.tokens.check(project, limits.max_tokens_per_minute)
            self._quotas.take_samples(project, count, limits)
        except (RateLimited, LimitExceeded):
            mine = (operations.c.project == project, operations.c.scope == SAMPLE)
            query = sa.select(operations.c.id).where(*mine, operations.c.idempotency_key == f"{key}/0")
            if not key or await self._store.read(lambda connection: connection.execute(query).first()) is None:
                raise
            return 0
        return count

    async def _accept(
        self,
        project: str,
        source: WeightsSource,
        weights: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        key: str,
        whole: bool,
    ) -> tuple[list[SampleRun], list[str]]:
        info = source.lane.info
        for index, request in enumerate(requests):
            try:
                request.check()
                if info is not None:
                    fit(info, request)
            except TrainSessionError as error:
                details = {"request": index, **error.details}
                raise type(error)(f"request {index}: {error.message}", details=details) from None
        # The caller's own seed is part of what a retry must repeat; one that we draw is not.
        bodies = [pack_sample(request, weights) for request in requests]
        seeded = [with_seed(request) for request in requests]
        quotes = [self._quote(source, request, info) for request in seeded]
        rows: list[dict[str, Any]] = []
        for index, (request, body) in enumerate(zip(seeded, bodies, strict=True)):
            stored = await self._store.keep("body", body)
            rows.append(
                {
                    "id": new_id("op"),
                    "project": project,
                    "session_id": request.session_id or source.session_id,
                    "seq": None,
                    "kind": SAMPLE,
                    "scope": SAMPLE,
                    "idempotency_key": f"{key}/{index}" if key else None,
                    "weights": {**source.to_row(), "seed": request.params.seed},
                    "state": "queued",
                    "tokens": int(request.prompt.size),
                    "quote": quotes[index].to_row(),
                    "created_at": time.time(),
                    **stored.columns("body"),
                }
            )
        await self._resolver.check_payers(project, {row["session_id"] for row in rows if row["session_id"]})
        refused: set[str] = set()
        if rows:
            logged = await self._log.accept_samples(rows, quotes, whole)
            if logged.earlier is not None:
                return [], logged.earlier
            refused = logged.refused
        runs = [
            SampleRun(row["id"], project, row["session_id"] or "", request, source.lane, quote)
            for row, request, quote in zip(rows, seeded, quotes, strict=True)
            if row["id"] not in refused
        ]
        return runs, [row["id"] for row in rows]

    def _quote(self, source: WeightsSource, request: SampleRequest, info: EngineInfo | None) -> Quote:
        most = request.params.max_tokens
        if most is None:
            # Without an engine nobody knows the context yet: all that a request can ask for.
            most = LIMITS.max_sampled_tokens // max(request.num_samples, 1)
            if info is not None:
                most = min(most, max(info.context_length - int(request.prompt.size), 1))
        at_most = {"prefill": int(request.prompt.size), "sample": request.num_samples * most}
        bound = most if request.params.max_tokens is None else None
        return self._prices.quote(source.lane.base_model, at_most, bound)
