"""Budgets: what a project may spend, held against every operation before it is accepted.

The ledger is not summed for that: a row of each project with a budget holds the sums, and changes in the
same transactions as the ledger and the operations. Writers take turns, so whoever reads the row in a
write transaction can decide by it, in whatever process.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Self

import sqlalchemy as sa

from ..errors import BudgetExceeded, InvalidRequest
from ..store.database import Database
from ..store.prepared import Prepared
from ..store.schema import budgets, ledger, operations, projects
from ..types import BUDGET_PERIODS, Budget, BudgetPeriod
from .prices import Quote, exact, whole
from .projects import unknown_project

_MAX_AMOUNT = Decimal(10) ** 15


@dataclass(slots=True)
class Fund:
    """A budget within a transaction; money as whole ``tokens * price``."""

    project: str
    period: BudgetPeriod
    currency: str
    amount: int
    since: int
    spent: int
    reserved: int

    @classmethod
    def of(cls, connection: sa.Connection, project: str, now: float) -> Self | None:
        """As of this moment, in a write transaction; None where the project has no budget."""
        fund, is_new = cls._read(connection, _FIND.rows(connection, {"of": project}), project, now)
        if fund is not None and is_new:
            fund.keep(connection)
        return fund

    @classmethod
    def seen(cls, connection: sa.Connection, project: str, now: float) -> Self | None:
        """The same, changing nothing."""
        # Not on the driver itself: there a read would begin no transaction, and see more than one state.
        return cls._read(connection, list(connection.execute(_READ, {"of": project})), project, now)[0]

    @classmethod
    def _read(
        cls, connection: sa.Connection, rows: Sequence[Any], project: str, now: float
    ) -> tuple[Self | None, bool]:
        """The budget, and whether its sum was made anew because a period began."""
        if not rows:
            return None, False
        period, currency, amount, since, spent, reserved = rows[0]
        fund = cls(project, period, currency, int(amount), since, int(spent), int(reserved))
        begins = _begin_of(period, now)
        # Never back: the clocks of two servers may differ when a period ends.
        if since is not None and since >= begins:
            return fund, False
        fund.since, fund.spent = begins, _sum_ledger(connection, project, currency, begins)
        return fund, True

    def reserve(self, quote: Quote) -> BudgetExceeded | None:
        """Set aside what an operation can cost; why not, where it does not fit. What is free always fits.

        Whoever reserves calls `keep`.
        """
        if not quote.most:
            return None
        if quote.currency != self.currency:
            return BudgetExceeded(
                f"the project's budget is in {self.currency} and prices are in {quote.currency}; an operator sets it "
                f"anew with `trainsession projects set-budget {self.project} AMOUNT`",
                details={"currency": self.currency, "prices": quote.currency},
            )
        if self.spent + self.reserved + quote.most > self.amount:
            return self._refusal(quote)
        self.reserved += quote.most
        return None

    def release(self, connection: sa.Connection, quotes: Iterable[Quote | None], charged: int = 0) -> None:
        """These operations have ended, and cost ``charged``."""
        self.reserved -= sum(quote.most for quote in quotes if quote is not None and quote.currency == self.currency)
        self.spent += charged
        self.keep(connection)

    def shown(self) -> Budget:
        return Budget(
            amount=exact(self.amount),
            currency=self.currency,
            period=self.period,
            spent=exact(self.spent),
            reserved=exact(self.reserved),
            resets_at=_next_month(self.since) if self.period == "month" else None,
        )

    def keep(self, connection: sa.Connection) -> None:
        """Write the sums."""
        sums = {"now_since": self.since, "now_spent": self.spent, "now_reserved": self.reserved}
        _WRITE.run(connection, {"of": self.project, **sums})

    def _refusal(self, quote: Quote) -> BudgetExceeded:
        shown, cost = self.shown(), exact(quote.most)
        when = "" if shown.resets_at is None else f", or it begins anew at {_utc(shown.resets_at)}"
        return BudgetExceeded(
            f"this could cost up to {_money(cost)} {self.currency}, and of the project's budget of "
            f"{_money(shown.amount)} {self.currency} ({self.period}) {_money(shown.spent)} are spent and "
            f"{_money(shown.reserved)} reserved by work under way: {_money(shown.left)} are left. An operator "
            f"raises it with `trainsession projects set-budget {self.project} AMOUNT`{when}",
            details={**shown.to_wire(), "cost": f"{cost:f}"},
        )


class Budgets:
    """The budgets of one database, which may be in use by a running service."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def set(self, project: str, amount: Decimal, currency: str, period: BudgetPeriod) -> Budget:
        """Give a project a budget, or another one. In force at once: what runs ends and is charged.

        Raises:
            NotFound: no such project. InvalidRequest: not an amount that can be counted.
        """
        if period not in BUDGET_PERIODS:
            raise InvalidRequest(
                f"period: expected one of {', '.join(BUDGET_PERIODS)}, got {period!r}", details={"key": "period"}
            )
        if not amount.is_finite() or not 0 <= amount < _MAX_AMOUNT or amount != exact(whole(amount)):
            raise InvalidRequest(
                f"amount: expected a number >= 0 with at most 12 digits behind the point, got {amount}",
                details={"key": "amount"},
            )
        values = {"period": period, "currency": currency, "amount": whole(amount), "since": None, "spent": 0}

        def write(connection: sa.Connection) -> Budget:
            if connection.execute(sa.select(projects.c.id).where(projects.c.id == project)).one_or_none() is None:
                raise unknown_project(project)
            connection.execute(sa.delete(budgets).where(budgets.c.project == project))
            connection.execute(sa.insert(budgets).values(project=project, reserved=0, **values))
            _recount(connection, project)
            fund = Fund.seen(connection, project, time.time())
            assert fund is not None
            return fund.shown()

        return await self._database.write(write)

    async def clear(self, project: str) -> bool:
        """Take a project's budget away; False where it had none."""
        query = sa.delete(budgets).where(budgets.c.project == project).returning(budgets.c.project)
        return await self._database.write(lambda connection: connection.execute(query).first() is not None)

    async def all(self) -> dict[str, Budget]:
        """Those that there are, by project."""

        def read(connection: sa.Connection) -> dict[str, Budget]:
            names = list(connection.execute(sa.select(budgets.c.project)).scalars())
            found = {name: Fund.seen(connection, name, time.time()) for name in names}
            return {name: fund.shown() for name, fund in found.items() if fund is not None}

        return await self._database.read(read)

    async def recount(self) -> None:
        """Sum anew what unfinished operations reserve."""

        def write(connection: sa.Connection) -> None:
            for project in list(connection.execute(sa.select(budgets.c.project)).scalars()):
                _recount(connection, project)

        await self._database.write(write)


def hold_one(connection: sa.Connection, project: str, quote: Quote, now: float) -> BudgetExceeded | None:
    """Reserve what an operation can cost; why not, where it does not fit."""
    fund = Fund.of(connection, project, now)
    refusal = None if fund is None else fund.reserve(quote)
    if fund is not None and refusal is None:
        fund.keep(connection)
    return refusal


def hold(
    connection: sa.Connection, rows: Sequence[Mapping[str, Any]], quotes: Sequence[Quote], whole: bool
) -> tuple[list[dict[str, Any]], set[str]] | BudgetExceeded:
    """Reserve what samples of one project can cost, in their order.

    Returns:
        The rows to log, and the ids of those refused; or why all are, where none fits or not all of a ``whole``.
    """
    now = time.time()
    fund = Fund.of(connection, rows[0]["project"], now)
    logged = [{**row, "finished_at": None, "error": None} for row in rows]
    refused: set[str] = set()
    for index, (row, quote) in enumerate(zip(logged, quotes, strict=True)):
        refusal = None if fund is None else fund.reserve(quote)
        if refusal is None:
            continue
        refusal = BudgetExceeded(f"request {index}: {refusal.message}", details={"request": index, **refusal.details})
        if whole or len(rows) == 1 or (index == len(rows) - 1 and len(refused) == index):
            return refusal
        refused.add(row["id"])
        row.update(state="failed", quote=None, finished_at=now, error=refusal.to_wire())
    if fund is not None:
        fund.keep(connection)
    return logged, refused


def release(connection: sa.Connection, ended: Iterable[tuple[str, Any]]) -> None:
    """Give back what operations reserved that end without being charged: (project, their quote as it is logged)."""
    by_project: dict[str, list[Quote]] = {}
    for project, row in ended:
        if row is not None:
            by_project.setdefault(project, []).append(Quote.of_row(row))
    for project, quotes in by_project.items():
        fund = Fund.of(connection, project, time.time())
        if fund is not None:
            fund.release(connection, quotes)


def quote_of(text: str | None) -> Quote | None:
    """A quote as the driver reads it."""
    return None if text is None else Quote.of_row(json.loads(text))


def _recount(connection: sa.Connection, project: str) -> None:
    of = sa.select(budgets.c.currency).where(budgets.c.project == project)
    unfinished = sa.select(operations.c.quote).where(operations.c.state == "queued", operations.c.project == project)
    unfinished = unfinished.where(operations.c.quote.is_not(None))
    reserved: Counter[str] = Counter()
    for row in connection.execute(unfinished).scalars():
        quote = Quote.of_row(row)
        reserved[quote.currency] += quote.most
    mine = sa.update(budgets).where(budgets.c.project == project)
    connection.execute(mine.values(reserved=reserved[connection.execute(of).scalar_one()]))


def _sum_ledger(connection: sa.Connection, project: str, currency: str, since: int) -> int:
    query = (
        sa.select(ledger.c.price, sa.func.sum(ledger.c.tokens).label("tokens"))
        .where(ledger.c.project == project, ledger.c.created_at >= since, ledger.c.currency == currency)
        .group_by(ledger.c.price)
    )
    return sum(int(row.price) * int(row.tokens) for row in connection.execute(query))


def _begin_of(period: BudgetPeriod, now: float) -> int:
    if period == "total":
        return 0
    month = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(month.timestamp())


def _next_month(since: int) -> float:
    return float(_begin_of("month", since + 32 * 86_400))


def _utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d} (UTC)"


def _money(amount: Decimal) -> str:
    """Exact, without zeros at the end."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_COLUMNS = ("period", "currency", "amount", "since", "spent", "reserved")
_READ = sa.select(*(budgets.c[name] for name in _COLUMNS)).where(budgets.c.project == sa.bindparam("of"))
_FIND = Prepared(_READ)
_WRITE = Prepared(
    sa.update(budgets)
    .where(budgets.c.project == sa.bindparam("of"))
    .values(since=sa.bindparam("now_since"), spent=sa.bindparam("now_spent"), reserved=sa.bindparam("now_reserved"))
)
HAS_BUDGET = sa.select(sa.literal_column("1")).select_from(budgets)
"""To be narrowed to a project."""
