"""A home whose prices can be counted on one's fingers, and what its budget must be equal to at any moment."""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path

import sqlalchemy as sa

from tests.service.driver import PROJECT
from trainsession.service.budgets import Budgets, Fund
from trainsession.service.service import Service
from trainsession.store.schema import ledger, operations
from trainsession.types import Budget, BudgetPeriod

PRICES = """
currency = "EUR"
[default]
prefill = 1
prefill_cached = 0.25
sample = 3
train = 2
"""
TOKEN = Decimal("0.000001")
"""What a token of prefill costs."""


def priced(home: Path, table: str = PRICES) -> Path:
    home.mkdir(exist_ok=True)
    (home / "prices.toml").write_text(table)
    return home


async def allow(service: Service, tokens: int, period: BudgetPeriod = "total", project: str = PROJECT) -> Budget:
    """A budget of so many tokens of prefill."""
    return await Budgets(service.store.database).set(project, tokens * TOKEN, "EUR", period)


async def left(service: Service, project: str = PROJECT) -> tuple[int, int]:
    """(spent, reserved) in tokens of prefill, after both were compared with the ledger and the log."""

    def read(connection: sa.Connection) -> tuple[int, int]:
        fund = Fund.seen(connection, project, time.time())
        assert fund is not None
        charged = sa.select(ledger.c.tokens, ledger.c.price)
        charged = charged.where(ledger.c.project == project, ledger.c.created_at >= fund.since)
        spent = sum(tokens * price for tokens, price in connection.execute(charged))
        assert fund.spent == spent
        queued = sa.select(operations.c.quote).where(operations.c.project == project, operations.c.state == "queued")
        assert fund.reserved == sum(quote["most"] for quote in connection.execute(queued).scalars() if quote)
        assert min(spent, fund.reserved) >= 0
        return fund.spent // 10**6, fund.reserved // 10**6

    return await service.store.read(read)
