"""The command line: data on stdout (a table, or --json), progress and notices on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"the trainsession command needs {error.name}: pip install 'trainsession[server]'")

from ._version import __version__
from .errors import TrainSessionError
from .transport.home import default_home

if TYPE_CHECKING:
    from .client import ServiceClient

app = typer.Typer(
    help="Train, sample and keep language models on a GPU that you never manage.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

BaseUrl = Annotated[
    str | None,
    typer.Option(help="A service elsewhere; default: the embedded one.", envvar="TRAINSESSION_BASE_URL"),
]
ApiKey = Annotated[str | None, typer.Option(help="Key for it.", envvar="TRAINSESSION_API_KEY")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORT = 8765


@app.command()
def serve(
    dev: Annotated[bool, typer.Option("--dev", help="Without keys, on this machine only.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = DEFAULT_PORT,
    home: Annotated[Path | None, typer.Option(help="Where sessions and checkpoints live.")] = None,
) -> None:
    """Serve the models of this machine until Ctrl-C.

    Examples:

        trainsession serve --dev

        trainsession serve --dev --port 9000 --home /data/trainsession
    """
    if not dev:
        raise typer.BadParameter("only --dev is there so far: loopback, without keys", param_hint="--dev")
    if host not in LOOPBACK:
        raise typer.BadParameter(
            f"{host} can be reached from other machines, and --dev asks for no key; "
            f"use one of {', '.join(LOOPBACK)} (and an SSH tunnel from elsewhere)",
            param_hint="--host",
        )
    from .transport.dev import serve_dev

    with _errors_as_exit():
        serve_dev(host, port, (home or default_home()).absolute(), _stderr())


@app.command()
def models(base_url: BaseUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the base models, those that load without a model hub first.

    Example:

        trainsession models --json
    """
    with _client(base_url, api_key) as client:
        rows = [asdict(model) for model in client.list_base_models()]
    _print(rows, ("name", "available", "context_length", "note"), as_json)


@app.command()
def sessions(base_url: BaseUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the sessions.

    Example:

        trainsession sessions
    """
    with _client(base_url, api_key) as client:
        rows = [asdict(session) for session in client.list_sessions()]
    _print(rows, ("session_id", "name", "kind", "base_model", "state", "step", "created_at"), as_json)


@app.command()
def checkpoints(
    session: Annotated[str | None, typer.Option(help="Only those of this session.")] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints.

    Example:

        trainsession checkpoints --session ses_...
    """
    with _client(base_url, api_key) as client:
        rows = [asdict(checkpoint) for checkpoint in client.list_checkpoints(session)]
    _print(rows, ("path", "kind", "base_model", "size_bytes", "created_at", "expires_at"), as_json)


@app.command()
def usage(
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show metered tokens and what they cost, by session and in total.

    Example:

        trainsession usage
    """
    with _client(base_url, api_key) as client:
        report = client.usage(session)
    if as_json:
        _print_json(asdict(report))
        return
    rows = [{"session": name, **asdict(tokens)} for name, tokens in report.by_session.items()]
    rows.append({"session": "total", **asdict(report.total)})
    for row in rows:
        row["cost"] = f"{row['cost']:.6f} {report.currency}"
    _print_table(rows, ("session", "prefill", "prefill_cached", "sample", "train", "cost"))
    _stderr().print(f"engine busy {report.busy_seconds:.1f} s of {report.wall_seconds:.1f} s")


@app.command()
def download(
    path: Annotated[str, typer.Argument(help="ts://<session>/{state|weights}/<name>")],
    directory: Annotated[Path, typer.Argument(help="Where its files go; made if missing.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Download a checkpoint; `weights` are in PEFT's format.

    Example:

        trainsession download ts://ses_.../weights/final ./adapter
    """
    with _client(base_url, api_key) as client:
        written = client.download_checkpoint(path, directory)
    print(written)


@app.command()
def delete(
    path: Annotated[str, typer.Argument(help="ts://<session>/{state|weights}/<name>")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a checkpoint.

    Example:

        trainsession delete ts://ses_.../state/step-100
    """
    with _client(base_url, api_key) as client:
        client.delete_checkpoint(path)
    _stderr().print(f"deleted {path}", markup=False)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@contextmanager
def _client(base_url: str | None, api_key: str | None) -> Iterator[ServiceClient]:
    from .client import ServiceClient

    with _errors_as_exit(), ServiceClient(base_url, api_key) as client:
        yield client


@contextmanager
def _errors_as_exit() -> Iterator[None]:
    """A typed error is one line on stderr and status 1; anything else is a bug and shows itself."""
    try:
        yield
    except TrainSessionError as error:
        named = f" (request {error.request_id})" if error.request_id else ""
        _stderr().print(f"error: {error.message}{named}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error


def _stderr() -> Console:
    """For notices and errors; their lines stay whole, also in a log."""
    return Console(stderr=True, soft_wrap=True)


def _print(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
    else:
        _print_table(rows, columns)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=list))


def _print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    # Not a terminal: whole lines, so that `grep` and `cut` see all of them.
    Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 10_000).print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_at"):
        return datetime.fromtimestamp(value).isoformat(" ", "seconds")
    if column == "size_bytes":
        return f"{value / 2**20:.1f} MiB"
    return str(value)


if __name__ == "__main__":
    app()
