"""`trainsession usage`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..types import USAGE_GROUPS, UsageReport
from .output import ApiKey, AsJson, BaseUrl, connected, print_json, print_table, stderr

metering = typer.Typer()


@metering.command()
def usage(
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    by: Annotated[str, typer.Option(help=f"Group by some of {', '.join(USAGE_GROUPS)}.")] = "session",
    since: Annotated[str | None, typer.Option(help="From this time on, e.g. 2026-12-01 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Up to, and without, this time.")] = None,
    all_projects: Annotated[bool, typer.Option("--all-projects", help="Of the whole service (operator).")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show metered tokens, what they cost and how long engines worked for them.

    Examples:

        trainsession usage

        trainsession usage --by day,kind --since 2026-12-01 --csv
    """
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json are two formats; give one", param_hint="--csv")
    with connected(base_url, api_key) as client:
        report = client.usage(session, by=by, since=since, until=until, all_projects=all_projects)
    if as_json:
        print_json(report.to_wire())
    elif as_csv:
        print(report.to_csv(), end="")
    else:
        _print(report)


def _print(report: UsageReport) -> None:
    columns, cells = report.table()
    rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in cells]
    if len(report.costs) <= 1:
        total = dict.fromkeys(columns, "") | report.total.tokens | {"cost": report.total.cost}
        total |= {"tokens": sum(report.total.tokens.values()), "currency": report.currency}
        total |= {columns[0]: "total", "engine_seconds": None if "kind" in report.by else report.busy_seconds}
        rows.append(total)
    for row in rows:
        row["cost"] = f"{float(row['cost']):.6f}"
        row["cost_per_million"] = f"{row['cost_per_million']:.4f}" if row["cost_per_million"] else None
        row["engine_seconds"] = None if row["engine_seconds"] is None else f"{row['engine_seconds']:.1f}"
    print_table(rows, columns)
    share = f" ({report.busy_seconds / report.wall_seconds:.0%})" if report.wall_seconds else ""
    if report.budget is not None:
        stderr().print(str(report.budget), highlight=False)
    stderr().print(f"engine busy {report.busy_seconds:.1f} s of {report.wall_seconds:.1f} s{share}", highlight=False)
