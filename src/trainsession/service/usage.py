"""The usage report: what the ledger and the engine time hold, summed by whatever one asks for.

Tokens are summed by price and multiplied in Python, whose integers have no end: SQL's would turn
into floats within a large sum. So each cost is exact, and the parts of any grouping are the whole.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from ..errors import InvalidRequest, LimitExceeded, NotFound
from ..store.schema import engine_time, ledger, sessions
from ..types import USAGE_GROUPS, Usage, UsageReport, UsageRow
from .budgets import Fund
from .engine_time import HOUR
from .prices import KINDS, PriceTable, cost_of, exact

DAY = 86_400
MAX_GROUPS = 100_000
"""A report that would be made of more sums than this is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """What a usage report is of.

    Attributes:
        project: Whose; None for all projects, which only an operator may ask.
        session_id: Of this session only.
        by: Names of `USAGE_GROUPS`; each at most once.
        since: Seconds since 1970: what was metered at or after it. Engine time is kept by the hour
            and counts where its hour begins.
        until: Seconds since 1970: what was metered before it.

    Raises:
        InvalidRequest: a name that nothing is grouped by, or a window that ends before it begins.
    """

    project: str | None
    session_id: str | None = None
    by: Sequence[str] = field(default=())
    since: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        for name in self.by:
            if name not in USAGE_GROUPS or list(self.by).count(name) > 1:
                raise InvalidRequest(
                    f"by: expected some of {', '.join(USAGE_GROUPS)}, each once, got {', '.join(self.by)}",
                    details={"key": "by"},
                )
        for key, at in (("since", self.since), ("until", self.until)):
            if at is not None and not (math.isfinite(at) and 0 <= at < 2**40):
                raise InvalidRequest(f"{key}: expected seconds since 1970, got {at}", details={"key": key})
        if self.since is not None and self.until is not None and self.until < self.since:
            raise InvalidRequest("until: it is before since", details={"key": "until"})


class _Day(GenericFunction[int]):
    """Whole days since 1970 of a column of seconds."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "whole_days"


@compiles(_Day)
def _floored(element: _Day, compiler: Any, **options: Any) -> str:
    return f"CAST(floor({compiler.process(element.clauses, **options)} / {DAY}) AS BIGINT)"


@compiles(_Day, "sqlite")
def _truncated(element: _Day, compiler: Any, **options: Any) -> str:
    # SQLite need not be built with floor(); its cast drops what is behind the point, others round.
    return f"CAST({compiler.process(element.clauses, **options)} / {DAY} AS INTEGER)"


@dataclass(slots=True)
class _Sum:
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    pico: int = 0

    def add(self, row: Any) -> None:
        self.tokens[row.kind] += int(row.tokens)
        self.pico += int(row.tokens) * int(row.price)

    @property
    def usage(self) -> Usage:
        return Usage(**self.tokens, cost=cost_of(self.pico))


def read_report(connection: sa.Connection, query: UsageQuery, prices: PriceTable) -> UsageReport:
    """The report of a query, as of one moment.

    Raises:
        NotFound: no such session in this project.
        LimitExceeded: more than `MAX_GROUPS` sums.
    """
    known = list(connection.execute(_sessions(query)))
    if query.session_id is not None and not known:
        raise NotFound(f"no session {query.session_id} in this project")
    charged = _bounded(connection, _ledger(query))
    worked = _bounded(connection, _engine_time(query))
    fund = None if query.project is None else Fund.seen(connection, query.project, time.time())
    by_session: dict[str, dict[str, _Sum]] = {row.id: {} for row in known if _was_there(row, query)}
    totals: dict[str, _Sum] = {}
    for row in charged:
        by_session.setdefault(row.session, {}).setdefault(row.currency, _Sum()).add(row)
        totals.setdefault(row.currency, _Sum()).add(row)
    return UsageReport(
        total=_in(prices.currency, totals),
        by_session={session: _in(prices.currency, sums) for session, sums in by_session.items()},
        prices=prices.shown({row.model for row in charged}),
        currency=prices.currency,
        wall_seconds=_wall_seconds(known, query),
        busy_seconds=sum(row.seconds for row in worked),
        by=tuple(query.by),
        rows=_rows(query.by, charged, worked, prices.currency) if query.by else [],
        costs={currency: exact(total.pico) for currency, total in sorted(totals.items())},
        budget=None if fund is None else fund.shown(),
    )


def _ledger(query: UsageQuery) -> sa.Select[*tuple[Any, ...]]:
    columns: list[Any] = [
        ledger.c.session_id.label("session"),
        ledger.c.base_model.label("model"),
        ledger.c.kind,
        ledger.c.currency,
        ledger.c.price,
    ]
    if "project" in query.by:
        columns.append(ledger.c.project)
    if "day" in query.by:
        columns.append(_Day(ledger.c.created_at).label("day"))
    mine = _mine(query, ledger.c.project, ledger.c.session_id, ledger.c.created_at, 1)
    return sa.select(*columns, sa.func.sum(ledger.c.tokens).label("tokens")).where(*mine).group_by(*columns)


def _engine_time(query: UsageQuery) -> sa.Select[*tuple[Any, ...]]:
    columns: list[Any] = [engine_time.c.session_id.label("session"), engine_time.c.base_model.label("model")]
    if "project" in query.by:
        columns.append(engine_time.c.project)
    if "day" in query.by:
        columns.append(_Day(engine_time.c.hour * HOUR).label("day"))
    mine = _mine(query, engine_time.c.project, engine_time.c.session_id, engine_time.c.hour, HOUR)
    return sa.select(*columns, sa.func.sum(engine_time.c.seconds).label("seconds")).where(*mine).group_by(*columns)


def _mine(query: UsageQuery, project: Any, session_id: Any, at: Any, unit: int) -> Iterable[Any]:
    yield sa.true()
    if query.project is not None:
        yield project == query.project
    if query.session_id is not None:
        yield session_id == query.session_id
    # Rounded up, an hour is within exactly one of two windows that follow each other.
    if query.since is not None:
        yield at >= (query.since if unit == 1 else math.ceil(query.since / unit))
    if query.until is not None:
        yield at < (query.until if unit == 1 else math.ceil(query.until / unit))


def _sessions(query: UsageQuery) -> sa.Select[*tuple[Any, ...]]:
    rows = sa.select(sessions.c.id, sessions.c.created_at, sessions.c.closed_at)
    if query.project is not None:
        rows = rows.where(sessions.c.project == query.project)
    return rows if query.session_id is None else rows.where(sessions.c.id == query.session_id)


def _bounded(connection: sa.Connection, query: sa.Select[*tuple[Any, ...]]) -> list[Any]:
    rows = list(connection.execute(query.limit(MAX_GROUPS + 1)))
    if len(rows) > MAX_GROUPS:
        raise LimitExceeded(
            f"this report is made of more than {MAX_GROUPS} sums; ask for a shorter time or one session",
            details={"limit": "max_usage_groups", "bound": MAX_GROUPS, "value": len(rows)},
        )
    return rows


def _rows(by: Sequence[str], charged: Sequence[Any], worked: Sequence[Any], currency: str) -> list[UsageRow]:
    sums: defaultdict[tuple[str, ...], dict[str, _Sum]] = defaultdict(dict)
    for row in charged:
        sums[_group(by, row)].setdefault(row.currency, _Sum()).add(row)
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    if "kind" not in by:
        for row in worked:
            seconds[_group(by, row)] += row.seconds
    rows: list[UsageRow] = []
    for group in sorted({*sums, *seconds}):
        in_currency = sums.get(group) or {currency: _Sum()}
        # Time has no currency: it stands in one row of the group, so that it adds up, too.
        timed = currency if currency in in_currency else min(in_currency)
        for name, total in sorted(in_currency.items()):
            time_of = None if "kind" in by else seconds.get(group, 0.0) if name == timed else 0.0
            rows.append(UsageRow(dict(zip(by, group, strict=True)), total.usage, exact(total.pico), name, time_of))
    return rows


def _group(by: Sequence[str], row: Any) -> tuple[str, ...]:
    return tuple(_date(row.day) if name == "day" else str(getattr(row, name)) for name in by)


def _date(day: int) -> str:
    return datetime.fromtimestamp(int(day) * DAY, UTC).date().isoformat()


def _in(currency: str, sums: Mapping[str, _Sum]) -> Usage:
    """Tokens of all currencies, and the cost in one of them."""
    tokens = {kind: sum(total.tokens[kind] for total in sums.values()) for kind in KINDS}
    return Usage(**tokens, cost=cost_of(sums[currency].pico) if currency in sums else 0.0)


def _was_there(session: Any, query: UsageQuery) -> bool:
    ended = math.inf if session.closed_at is None else session.closed_at
    return session.created_at < (math.inf if query.until is None else query.until) and ended >= (query.since or 0.0)


def _wall_seconds(known: Sequence[Any], query: UsageQuery) -> float:
    there = [row for row in known if _was_there(row, query)]
    if not there:
        return 0.0
    now = time.time()
    ended = max(now if row.closed_at is None else row.closed_at for row in there)
    ended = ended if query.until is None else min(ended, query.until)
    return max(0.0, ended - max(min(row.created_at for row in there), query.since or 0.0))
