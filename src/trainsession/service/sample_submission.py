"""How samples get into the log: checked, held against limits and budget, accepted in groups."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..errors import LimitExceeded, RateLimited, TrainSessionError
from ..limits import LIMITS
from ..store.schema import operations
from ..store.store import Store, Stored
from .ids import new_id
from .keys import SamplesOf
from .leases import Lease
from .log import SAMPLE, OperationLog
from .prefixes import Prefixes, chain
from .prices import PriceTable, Quote
from .projects import Projects
from .quotas import Quotas
from .requests import SampleRequest
from .sample_run import SampleRun, fit, pack_sample, paid_by, with_seed
from .weights import WeightsResolver, WeightsSource

_MANY_TOKENS = 65_536
"""Of prompts, from which on their digests are made in a thread beside the event loop."""


class SampleSubmission:
    def __init__(
        self,
        store: Store,
        lease: Lease,
        log: OperationLog,
        resolver: WeightsResolver,
        projects: Projects,
        quotas: Quotas,
        prices: PriceTable,
    ) -> None:
        self._store = store
        self._lease = lease
        self._log = log
        self._resolver = resolver
        self._projects = projects
        self._quotas = quotas
        self._prices = prices
        self._prefixes = Prefixes()

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
        payers = [request.session_id or source.session_id for request in seeded]
        await self._resolver.check_payers(project, {payer for payer in payers if payer})
        stored = [await self._store.keep("body", body) for body in bodies]
        digests = await self._digests(project, source, seeded)
        is_open = any(request.params.max_tokens is None for request in seeded)
        context = await self._resolver.context_length(source) if is_open else None
        # From here to the commit in one go: what a prompt finds known is a matter of the order of the calls.
        runs: list[SampleRun] = []
        for request, payer, of in zip(seeded, payers, digests, strict=True):
            cached, new = self._prefixes.take(project, of, int(request.prompt.size))
            if request.prompt_logprobs or request.topk_prompt_logprobs:
                cached = 0  # every position is wanted, so every position is computed
            quote = self._quote(source, request, context, cached)
            runs.append(SampleRun(new_id("op"), project, payer or "", request, source.lane, quote, new))
        accepted: set[str] = set()
        try:
            accepted, ids = await self._log_samples(source, runs, stored, key, whole)
        finally:
            for run in runs:
                if run.id not in accepted:
                    self.withdraw(run)
        return [run for run in runs if run.id in accepted], ids

    def withdraw(self, run: SampleRun) -> None:
        """It ends without being charged, so others must not have its prompt cheaper."""
        self._prefixes.withdraw(run.project, run.new_blocks)

    async def _digests(
        self, project: str, source: WeightsSource, requests: Sequence[SampleRequest]
    ) -> list[list[bytes]]:
        weights = f"{source.lane.base_model}\0{source.weights.key or ''}"

        def make() -> list[list[bytes]]:
            return [chain(project, weights, request.prompt) for request in requests]

        many = sum(request.prompt.size for request in requests) > _MANY_TOKENS
        return await self._store.in_thread(make) if many else make()

    async def _log_samples(
        self, source: WeightsSource, runs: Sequence[SampleRun], stored: Sequence[Stored], key: str, whole: bool
    ) -> tuple[set[str], list[str]]:
        """(those that are to be started, all ids); nothing is to be started for a retry."""
        now = time.time()
        rows = [
            {
                "id": run.id,
                "project": run.project,
                "session_id": run.payer or None,
                "seq": None,
                "kind": SAMPLE,
                "scope": SAMPLE,
                "idempotency_key": f"{key}/{index}" if key else None,
                "weights": {**source.to_row(), "seed": run.request.params.seed},
                "state": "queued",
                "tokens": int(run.request.prompt.size),
                "quote": run.quote.to_row(),
                "created_at": now,
                "owner": self._lease.server,
                **body.columns("body"),
            }
            for index, (run, body) in enumerate(zip(runs, stored, strict=True))
        ]
        ids = [run.id for run in runs]
        if not rows:
            return set(), ids
        logged = await self._log.accept_samples(rows, [run.quote for run in runs], whole)
        if logged.earlier is not None:
            return set(), logged.earlier
        return set(ids) - logged.refused, ids

    def _quote(self, source: WeightsSource, request: SampleRequest, context: int | None, cached: int) -> Quote:
        """What it can cost at most: of each of its samples ``max_tokens``, or what the context has room for."""
        size = int(request.prompt.size)
        most = request.params.max_tokens
        if most is None:
            # All that a request can ask for, where the model has yet to be downloaded.
            most = LIMITS.max_sampled_tokens // max(request.num_samples, 1)
            if context is not None:
                most = min(most, max(context - size, 1))
        at_most = {"prefill": size - cached, "prefill_cached": cached, "sample": request.num_samples * most}
        bound = most if request.params.max_tokens is None else None
        return self._prices.quote(source.lane.base_model, at_most, cached=cached, max_tokens=bound)
