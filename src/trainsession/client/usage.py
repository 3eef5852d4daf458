"""Usage reports: what is asked of the service, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from ..errors import InvalidRequest
from ..types import USAGE_GROUPS, Budget, Usage, UsageReport, UsageRow
from .answers import read

When = float | datetime | str
"""Seconds since 1970, a datetime, or ISO 8601 (``2026-12-01``); without a time zone it is UTC."""


def usage_params(
    session_id: str | None = None,
    by: Sequence[str] | str = (),
    since: When | None = None,
    until: When | None = None,
    all_projects: bool = False,
) -> dict[str, Any]:
    """The query of `GET /v1/usage`; raises `InvalidRequest` for what it could not mean."""
    names = by.split(",") if isinstance(by, str) and by else list(by)
    if unknown := [name for name in names if name not in USAGE_GROUPS]:
        raise InvalidRequest(
            f"by: expected some of {', '.join(USAGE_GROUPS)}, got {unknown[0]!r}", details={"key": "by"}
        )
    return {
        "session_id": session_id,
        "by": ",".join(names) or None,
        "since": _seconds("since", since),
        "until": _seconds("until", until),
        "all_projects": "true" if all_projects else None,
    }


def read_usage(body: Mapping[str, Any]) -> UsageReport:
    return read(
        UsageReport,
        {
            **body,
            "total": read(Usage, body["total"]),
            "by_session": {session: read(Usage, usage) for session, usage in body["by_session"].items()},
            "by": tuple(body.get("by", ())),
            "rows": [_row(row) for row in body.get("rows", ())],
            "costs": {currency: Decimal(cost) for currency, cost in body.get("costs", {}).items()},
            "budget": None if body.get("budget") is None else _budget(body["budget"]),
        },
    )


def _row(body: Mapping[str, Any]) -> UsageRow:
    return read(UsageRow, {**body, "usage": read(Usage, body["usage"]), "cost": Decimal(body["cost"])})


def _budget(body: Mapping[str, Any]) -> Budget:
    money = {name: Decimal(body[name]) for name in ("spent", "reserved")}
    return read(Budget, {**body, "amount": Decimal(body["budget"]), **money})


def _seconds(key: str, when: When | None) -> float | None:
    if when is None or isinstance(when, int | float):
        return when
    try:
        at = datetime.fromisoformat(when) if isinstance(when, str) else when
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"{key}: expected a date like 2026-12-01, got {when!r}", details={"key": key}) from error
