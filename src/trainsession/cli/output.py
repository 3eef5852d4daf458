"""What all commands share: options, the service behind them, tables, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import TrainSessionError

if TYPE_CHECKING:
    from ..client import ServiceClient

BaseUrl = Annotated[
    str | None,
    typer.Option(help="A service elsewhere; default: the embedded one.", envvar="TRAINSESSION_BASE_URL"),
]
ApiKey = Annotated[str | None, typer.Option(help="Key for it.", envvar="TRAINSESSION_API_KEY")]
Home = Annotated[Path | None, typer.Option(help="Where sessions and checkpoints live.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="PostgreSQL database, as postgresql://user@host/name; default: TRAINSESSION_DATABASE_URL, else a file "
        "in the home.",
    ),
]
BlobsUrl = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        help="Checkpoints and large bodies, as s3://bucket/prefix; default: TRAINSESSION_BLOBS, else a directory "
        "in the home.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def connected(base_url: str | None, api_key: str | None) -> Iterator[ServiceClient]:
    from ..client import ServiceClient

    with errors_as_exit(), ServiceClient(base_url, api_key) as client:
        yield client


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """A typed error is one line on stderr and status 1; anything else is a bug and shows itself."""
    try:
        yield
    except TrainSessionError as error:
        named = f" (request {error.request_id})" if error.request_id else ""
        stderr().print(f"error: {error.message}{named}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error


def stderr() -> Console:
    """For notices and errors; their lines stay whole, also in a log."""
    return Console(stderr=True, soft_wrap=True)


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    else:
        print_table(rows, columns)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=list))


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(_cell(column, row[column])) for column in columns))
    # Not a terminal: whole lines, so that `grep` and `cut` see all of them.
    Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 10_000).print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_at"):
        try:
            return datetime.fromtimestamp(value).isoformat(" ", "seconds")
        except (ValueError, OverflowError, OSError):  # no such year
            return str(value)
    if column == "size_bytes":
        return f"{value / 2**20:.1f} MiB"
    return str(value)
