"""What was metered: the report, its rows, and how they are exported."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, get_args

from .display import usage_html
from .results import Usage

UsageGroup = Literal["project", "session", "model", "kind", "day"]
USAGE_GROUPS: tuple[UsageGroup, ...] = get_args(UsageGroup)
"""What a report's rows can be grouped by. Days are those of UTC, as ``2026-12-01``."""


BudgetPeriod = Literal["total", "month"]
BUDGET_PERIODS: tuple[BudgetPeriod, ...] = get_args(BudgetPeriod)
"""What a budget is for: everything ever, or each calendar month of UTC."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a project may spend. Money is exact.

    Attributes:
        amount: For the whole period.
        spent: Charged in this period.
        reserved: The most that unfinished work can still cost.
        resets_at: Seconds since 1970: the next period begins. None for ``total``.
    """

    amount: Decimal
    currency: str
    period: BudgetPeriod
    spent: Decimal
    reserved: Decimal
    resets_at: float | None = None

    @property
    def left(self) -> Decimal:
        """What new work may cost; 0 where the budget was lowered below what is spent."""
        return max(Decimal(0), self.amount - self.spent - self.reserved)

    def __str__(self) -> str:
        every = "" if self.period == "total" else f" a {self.period}"
        return (
            f"budget {self.amount:.6f} {self.currency}{every}: {self.spent:.6f} spent, {self.reserved:.6f} reserved, "
            f"{self.left:.6f} left"
        )

    def to_wire(self) -> dict[str, Any]:
        """As JSON has it: exact money as text."""
        money = {"budget": self.amount, "spent": self.spent, "reserved": self.reserved, "left": self.left}
        return {
            **{name: f"{value:f}" for name, value in money.items()},
            "currency": self.currency,
            "period": self.period,
            "resets_at": self.resets_at,
        }


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group of a `UsageReport`.

    Attributes:
        group: Its value of each name in ``by``.
        usage: Tokens by kind, and their cost as a float.
        cost: The same cost, exact. The rows' add up to `UsageReport.costs`, whatever they are grouped by.
        currency: Of the cost. Where a price table changed its currency, a group has a row for each.
        engine_seconds: That engines worked for this group; None for rows by kind, which share them.
    """

    group: Mapping[str, str]
    usage: Usage
    cost: Decimal
    currency: str
    engine_seconds: float | None = None

    @property
    def tokens(self) -> int:
        """Of all kinds together."""
        return sum(self.usage.tokens.values())

    @property
    def cost_per_million(self) -> float | None:
        """Of a million of these tokens as they are mixed here; None where there are none."""
        return float(self.cost * 1_000_000 / self.tokens) if self.tokens else None


@dataclass(frozen=True, slots=True, repr=False)
class UsageReport:
    """Metered tokens and time, of one session or of a project.

    Attributes:
        total: All tokens and their cost in ``currency``.
        by_session: The same by session id.
        prices: Today's, per million tokens, by base model and kind.
        wall_seconds: Since the first session here began, within the window that was asked for.
        busy_seconds: Engines worked on these sessions; the rest is idle and costs nothing. Sessions
            that an engine works on at the same time share its seconds.
        by: What ``rows`` are grouped by.
        rows: One for each group, in the order of their values; empty where no grouping was asked for.
        costs: The total cost, exact, by currency.
        budget: The project's, as of now; None where it has none, and in a report of all projects.
    """

    total: Usage
    by_session: dict[str, Usage]
    prices: dict[str, dict[str, float]]
    currency: str = "USD"
    wall_seconds: float = 0.0
    busy_seconds: float = 0.0
    by: tuple[str, ...] = ()
    rows: list[UsageRow] = field(default_factory=list)
    costs: dict[str, Decimal] = field(default_factory=dict)
    budget: Budget | None = None

    @property
    def idle_seconds(self) -> float:
        return max(0.0, self.wall_seconds - self.busy_seconds)

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Column names, and the rows under them, with plain values; money as exact decimals."""
        kinds = [] if "kind" in self.by else list(Usage().tokens)
        columns = [*self.by, *kinds, "tokens", "cost", "currency", "cost_per_million", "engine_seconds"]
        return columns, [
            [
                *(row.group[name] for name in self.by),
                *(row.usage.tokens[kind] for kind in kinds),
                row.tokens,
                f"{row.cost:f}",
                row.currency,
                row.cost_per_million,
                row.engine_seconds,
            ]
            for row in self.rows
        ]

    def to_csv(self) -> str:
        """The rows as CSV with a header line; nothing but it where no grouping was asked for."""
        text = io.StringIO()
        columns, rows = self.table()
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        return text.getvalue()

    def to_wire(self) -> dict[str, Any]:
        """As JSON has it: exact money as text."""
        return {
            "total": _usage(self.total),
            "by_session": {session: _usage(usage) for session, usage in self.by_session.items()},
            "prices": self.prices,
            "currency": self.currency,
            "wall_seconds": self.wall_seconds,
            "busy_seconds": self.busy_seconds,
            "by": list(self.by),
            "rows": [
                {
                    "group": dict(row.group),
                    "usage": _usage(row.usage),
                    "cost": f"{row.cost:f}",
                    "currency": row.currency,
                    "engine_seconds": row.engine_seconds,
                }
                for row in self.rows
            ],
            "costs": {currency: f"{cost:f}" for currency, cost in self.costs.items()},
            "budget": None if self.budget is None else self.budget.to_wire(),
        }

    def __repr__(self) -> str:
        tokens = ", ".join(f"{count:,} {kind}" for kind, count in self.total.tokens.items() if count) or "no tokens"
        return (
            f"UsageReport({tokens}; {self.total.cost:.6f} {self.currency}; {len(self.by_session)} sessions; "
            f"busy {self.busy_seconds:.1f} s of {self.wall_seconds:.1f} s)"
        )

    def _repr_html_(self) -> str:
        return usage_html(self)


def _usage(usage: Usage) -> dict[str, Any]:
    return {**usage.tokens, "cost": usage.cost}
