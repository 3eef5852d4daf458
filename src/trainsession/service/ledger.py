"""What an operation cost, in the transaction that ends it: ledger rows, and the budget that reserved it."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from ..store.prepared import Prepared
from ..store.schema import ledger, operations
from .budgets import Fund, quote_of
from .endings import Ending

_CHARGE = Prepared(sa.insert(ledger), [column.name for column in ledger.c if column.name != "id"])


def settle(
    connection: sa.Connection, ending: Ending, project: str, quote: str | None, *, has_budget: bool, now: float
) -> None:
    """Write the ledger's rows of an operation that has ended, whichever way, and give back its reservation.

    Args:
        quote: As it was logged.
        has_budget: Whether the project has one.
    """
    fund = Fund.of(connection, project, now) if has_budget else None
    if fund is not None:
        # A row counts in the period that the budget is in, also by a clock that is behind.
        now = max(now, fund.since)
    charged: Counter[str] = Counter()
    if ending.charges:
        row = {"project": project, "session_id": ending.payer, "operation_id": ending.operation_id}
        row |= {"base_model": ending.base_model, "currency": ending.currency, "created_at": now}
        kinds = [{"kind": charge.kind, "tokens": charge.tokens, "price": charge.price} for charge in ending.charges]
        _CHARGE.run(connection, *(row | kind for kind in kinds))
        charged[ending.currency] += sum(charge.tokens * charge.price for charge in ending.charges)
    if ending.refund is not None:
        charged.update(_take_back(connection, ending.refund, ending.operation_id, now))
    if fund is not None and (quote is not None or charged):
        fund.release(connection, [quote_of(quote)], charged[fund.currency])


def costs_nothing(connection: sa.Connection, operation_id: str) -> bool:
    """Whether an operation has no charge that could be taken back (any more)."""
    quoted = sa.select(operations.c.id).where(operations.c.id == operation_id, operations.c.quote.is_not(None))
    return connection.execute(quoted).first() is None


def _take_back(connection: sa.Connection, refund: str, operation_id: str, now: float) -> Counter[str]:
    """The ledger is append-only, so what was charged is taken back by a negative row at its own price; once."""
    once = sa.update(operations).where(operations.c.id == refund, operations.c.quote.is_not(None)).values(quote=None)
    if connection.execute(once.returning(operations.c.id)).first() is None:
        return Counter()
    paid = connection.execute(sa.select(ledger).where(ledger.c.operation_id == refund)).mappings().all()
    rows = [
        {key: value for key, value in row.items() if key != "id"}
        | {"operation_id": operation_id, "tokens": -row["tokens"], "created_at": now}
        for row in paid
    ]
    if rows:
        connection.execute(sa.insert(ledger), rows)
    taken: Counter[str] = Counter()
    for row in rows:
        taken[row["currency"]] += row["tokens"] * row["price"]
    return taken
