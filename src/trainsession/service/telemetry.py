"""Metrics for Prometheus: counted here as things happen, or read from engines and ledger when scraped.

They are of the service as a whole and name no project: those are in usage reports.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.api import EngineHandle
from ..errors import TrainSessionError
from ..store.schema import ledger, sessions
from ..store.store import Store
from .leases import Lease
from .prices import cost_of

STATS_SECONDS = 1.0
"""An engine answers between two passes; what takes longer is left out of that scrape."""
RECENT_ROWS = 10_000
"""So many of the ledger's last rows are summed anew by each scrape: a row may be committed after a later one."""
_SUBMIT_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2.5, 10)
_OPERATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_STATES: dict[str, tuple[str, str]] = {
    "running": ("samples_running", "Sequences that the engine draws together: the batch of a decode step."),
    "waiting": ("samples_waiting", "Sequences that wait for a place in the batch."),
    "num_blocks": ("kv_blocks", "Blocks of the KV cache."),
    "free_blocks": ("kv_blocks_free", "Blocks that no running sequence holds; those with a known prefix included."),
    "cached_blocks": ("kv_blocks_cached", "Blocks that hold a prefix which can be used again."),
    "adapters": ("adapters", "Adapters in training that the engine holds."),
    "snapshots": ("snapshots", "Frozen weights that the engine holds."),
}
_COUNTS: dict[str, tuple[str, str]] = {
    "passes": ("passes", "Forward passes of the sampler."),
    "sampled_tokens": ("sampled_tokens", "Tokens drawn, recomputed ones included."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed."),
    "prefill_cached_tokens": ("prefill_cached_tokens", "Prompt tokens found in the KV cache."),
    "preemptions": ("preemptions", "Sequences that gave their blocks up for others."),
}


class Telemetry(Collector):
    """The metrics of one service, in a registry of its own."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._registry = CollectorRegistry()
        self._summing = asyncio.Lock()
        self._settled = 0
        self._ledger: Counts[tuple[Any, ...]] = Counts()
        """Sums of the rows up to ``_settled``, by what `_SUMS` groups by."""
        self._read: list[Metric] = []
        self.submit_seconds = Histogram(
            "trainsession_submit_seconds",
            "Until an operation, or a call's samples, was durable.",
            ["kind"],
            buckets=_SUBMIT_BUCKETS,
            registry=self._registry,
        )
        self._operation_seconds = Histogram(
            "trainsession_operation_seconds",
            "From acceptance to a durable end, waiting included.",
            ["kind", "state"],
            buckets=_OPERATION_BUCKETS,
            registry=self._registry,
        )
        self._restarts = Counter(
            "trainsession_engine_restarts",
            "Engines that died once loaded, and were started again.",
            ["model"],
            registry=self._registry,
        )
        self.forwarded = Counter(
            "trainsession_requests_forwarded",
            "Requests that another server on the database answered, as it runs what they are about.",
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def ended(self, kind: str, state: str, seconds: float) -> None:
        """An operation has ended, durably, so long after it was accepted."""
        self._operation_seconds.labels(kind, state).observe(seconds)

    def engine_restarted(self, base_model: str) -> None:
        """For whoever starts an engine that died."""
        self._restarts.labels(base_model).inc()

    def collect(self) -> Iterator[Metric]:
        yield from self._read

    def describe(self) -> Iterable[Metric]:
        return ()

    async def render(
        self, engines: Mapping[str, EngineHandle], operations: Mapping[tuple[str, str], int], samples: Mapping[str, int]
    ) -> bytes:
        """The text that Prometheus reads.

        Args:
            engines: Those that are loaded, by base model.
            operations: Training operations that have not ended, by base model and kind.
            samples: Sample requests that have not ended, by base model.
        """
        stats, sums, owned = await asyncio.gather(self._stats(engines), self._sums(), self._owned())
        self._read = [
            *_queues(operations, samples),
            *_of_engines(engines, stats),
            *_of_ledger(sums),
            *_of_servers(owned, self._lease),
            _family(CounterMetricFamily, "database_commits", "Transactions, one fsync each.", (), {(): self._commits}),
        ]
        return generate_latest(self._registry)

    @property
    def _commits(self) -> int:
        return self._store.database.stats.commits

    async def _stats(self, engines: Mapping[str, EngineHandle]) -> dict[str, Mapping[str, float]]:
        async def one(handle: EngineHandle) -> Mapping[str, float] | None:
            try:
                return await asyncio.wait_for(handle.call("stats"), STATS_SECONDS)
            except (TimeoutError, TrainSessionError):
                return None

        found = await asyncio.gather(*(one(handle) for handle in engines.values()))
        return {model: stats for model, stats in zip(engines, found, strict=True) if stats is not None}

    async def _owned(self) -> int:
        mine = sa.and_(sessions.c.owner == self._lease.server, sessions.c.state != "closed")
        count = sa.select(sa.func.count()).where(mine)
        return await self._store.read(lambda connection: connection.execute(count).scalar_one())

    async def _sums(self) -> Counts[tuple[Any, ...]]:
        def read(connection: sa.Connection) -> tuple[int, list[Any], list[Any]]:
            last = connection.execute(sa.select(sa.func.max(ledger.c.id))).scalar() or 0
            settled = max(self._settled, last - RECENT_ROWS)
            of_ids = (sa.bindparam("after"), sa.bindparam("upto"))
            query = _SUMS.where(ledger.c.id > of_ids[0], ledger.c.id <= of_ids[1])
            older = connection.execute(query, {"after": self._settled, "upto": settled}).all()
            return settled, list(older), list(connection.execute(query, {"after": settled, "upto": last}))

        async with self._summing:
            settled, older, recent = await self._store.read(read)
            self._settled = settled
            self._ledger += _counted(older)
            return self._ledger + _counted(recent)


def _of_servers(owned: int, lease: Lease) -> Iterator[Metric]:
    says = "Open sessions that this server runs."
    yield _family(GaugeMetricFamily, "sessions_owned", says, (), {(): float(owned)})
    says = "Other servers on the database whose lease had expired, or that said goodbye, and that this one replaced."
    yield _family(CounterMetricFamily, "servers_replaced", says, (), {(): float(lease.replaced)})
    says = "Whether another server has replaced this one, which then ends."
    yield _family(GaugeMetricFamily, "lease_lost", says, (), {(): float(lease.lost.is_set())})


_POSITIVE = sa.case((ledger.c.tokens > 0, 1), else_=0)
_SUMS = sa.select(
    ledger.c.base_model, ledger.c.kind, ledger.c.currency, ledger.c.price, _POSITIVE, sa.func.sum(ledger.c.tokens)
).group_by(ledger.c.base_model, ledger.c.kind, ledger.c.currency, ledger.c.price, _POSITIVE)


def _counted(rows: list[Any]) -> Counts[tuple[Any, ...]]:
    """Magnitudes, with their sign in the key: a `Counter` keeps only what is positive."""
    return Counts({tuple(row[:5]): abs(int(row[5])) for row in rows})


def _of_ledger(sums: Counts[tuple[Any, ...]]) -> Iterator[Metric]:
    tokens: Counts[tuple[str, ...]] = Counts()
    returned: Counts[tuple[str, ...]] = Counts()
    cost: dict[tuple[str, ...], int] = {}
    for (model, kind, currency, price, positive), count in sums.items():
        (tokens if positive else returned)[model, kind] += count
        cost[model, kind, currency] = cost.get((model, kind, currency), 0) + (count if positive else -count) * price
    labels = ("model", "kind")
    yield _family(CounterMetricFamily, "ledger_tokens", "Tokens charged since the first day.", labels, tokens)
    yield _family(
        CounterMetricFamily, "ledger_tokens_returned", "Tokens charged and taken back by later rows.", labels, returned
    )
    spent = {key: cost_of(pico) for key, pico in cost.items()}
    yield _family(GaugeMetricFamily, "ledger_cost", "What the ledger adds up to.", (*labels, "currency"), spent)


def _queues(operations: Mapping[tuple[str, str], int], samples: Mapping[str, int]) -> Iterator[Metric]:
    labels = ("model", "kind")
    says = "Training operations that wait or run."
    yield _family(GaugeMetricFamily, "operations_unfinished", says, labels, operations)
    waiting = {(model,): count for model, count in samples.items()}
    yield _family(GaugeMetricFamily, "samples_unfinished", "Sample requests that wait or run.", ("model",), waiting)


def _of_engines(engines: Mapping[str, EngineHandle], stats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    busy = {(model,): handle.busy_seconds for model, handle in engines.items()}
    yield _family(CounterMetricFamily, "engine_busy_seconds", "Time that the engine computed.", ("model",), busy)
    answers = {(model,): float(model in stats) for model in engines}
    says = f"Whether the loaded engine answered this scrape within {STATS_SECONDS:g} s."
    yield _family(GaugeMetricFamily, "engine_answers", says, ("model",), answers)
    for kind, names in ((GaugeMetricFamily, _STATES), (CounterMetricFamily, _COUNTS)):
        for key, (name, help_text) in names.items():
            values = {(model,): known[key] for model, known in stats.items() if key in known}
            if values:
                yield _family(kind, f"engine_{name}", help_text, ("model",), values)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    values: Mapping[Any, float],
) -> Metric:
    family = kind(f"trainsession_{name}", help_text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
