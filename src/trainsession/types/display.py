"""Small HTML tables for notebooks. Everything that came from outside is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import SampleResponse, SessionInfo
    from .usage import UsageReport

_MAX_ROWS = 20
_MAX_TEXT = 400


def session_html(session: SessionInfo) -> str:
    until = "" if session.waiting_until is None else f" until {_time(session.waiting_until)}"
    rows = [
        ("session", session.session_id),
        ("name", session.name),
        ("base model", session.base_model),
        ("adapter", ", ".join(f"{key} {value}" for key, value in (session.lora or {}).items() if value is not None)),
        ("state", f"{session.state}{f', waits for {session.waiting_for}' if session.waiting_for else ''}{until}"),
        ("steps", str(session.step)),
        ("tags", ", ".join(session.tags)),
        ("created", _time(session.created_at)),
    ]
    return table(("", ""), [row for row in rows if row[1]])


def usage_html(report: UsageReport) -> str:
    kinds = list(report.total.tokens)
    usages = (
        [*report.by_session.items(), ("total", report.total)]
        if len(report.by_session) != 1
        else [*report.by_session.items()]
    )
    rows = [
        (name, *(f"{usage.tokens[kind]:,}" for kind in kinds), f"{usage.cost:.6f} {report.currency}")
        for name, usage in usages
    ]
    times = (
        f"wall {report.wall_seconds:.1f} s, engine busy {report.busy_seconds:.1f} s, "
        f"idle {report.idle_seconds:.1f} s (costs nothing)"
    )
    lines = [times] if report.budget is None else [times, str(report.budget)]
    return table(("session", *kinds, "cost"), rows) + "".join(f"<div>{html.escape(line)}</div>" for line in lines)


def samples_html(response: SampleResponse) -> str:
    rows = [
        (str(index), shortened(sequence.text, _MAX_TEXT), str(len(sequence.tokens)), sequence.stop_reason)
        for index, sequence in enumerate(response.sequences)
    ]
    return table(("", "text", "tokens", "stop"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of at most 20 rows; says how many it left out."""
    rows = list(rows)
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = [f"<tr>{cells}</tr>"] if any(head) else []
    for row in rows[:_MAX_ROWS]:
        cells = "".join(f'<td style="text-align:left;white-space:pre-wrap">{html.escape(cell)}</td>' for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    more = f"<div>... and {len(rows) - _MAX_ROWS} more</div>" if len(rows) > _MAX_ROWS else ""
    return f"<table>{''.join(lines)}</table>{more}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
