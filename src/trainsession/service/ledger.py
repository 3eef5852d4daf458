"""What an operation cost, in the transaction that ends it: ledger rows, and the budget that reserved it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import sqlalchemy as sa

from ..store.database import Prepared
from ..store.schema import ledger
from .budgets import Fund, quote_of
from .prices import Charge

_CHARGE = Prepared(sa.insert(ledger), [column.name for column in ledger.c if column.name != "id"])


def settle(
    connection: sa.Connection,
    *,
    project: str,
    payer: str,
    operation_id: str,
    base_model: str,
    currency: str,
    charges: Sequence[Charge],
    refund: str | None,
    quote: str | None,
    has_budget: bool,
    now: float,
) -> None:
    """Write the ledger's rows of an operation that has ended, whichever way, and give back its reservation.

    Args:
        payer: Session id of the rows.
        refund: An operation whose rows are taken back, by rows of this one.
        quote: As it was logged.
        has_budget: Whether the project has one.
    """
    fund = Fund.of(connection, project, now) if has_budget else None
    if fund is not None:
        # A row counts in the period that the budget is in, also by a clock that is behind.
        now = max(now, fund.since)
    charged: Counter[str] = Counter()
    if charges:
        row = {"project": project, "session_id": payer, "operation_id": operation_id, "base_model": base_model}
        row |= {"currency": currency, "created_at": now}
        kinds = [{"kind": charge.kind, "tokens": charge.tokens, "price": charge.price} for charge in charges]
        _CHARGE.run(connection, *(row | kind for kind in kinds))
        charged[currency] += sum(charge.tokens * charge.price for charge in charges)
    if refund is not None:
        charged.update(_take_back(connection, refund, operation_id, now))
    if fund is not None and (quote is not None or charged):
        fund.release(connection, [quote_of(quote)], charged[fund.currency])


def _take_back(connection: sa.Connection, refund: str, operation_id: str, now: float) -> Counter[str]:
    """The ledger is append-only, so what was charged is taken back by a negative row at its own price."""
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
