"""`trainsession serve`."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

import typer

from ..transport.home import default_home
from .output import BlobsUrl, DatabaseUrl, Home, errors_as_exit, stderr

serving = typer.Typer()

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORT = 8765


@serving.command()
def serve(
    dev: Annotated[bool, typer.Option("--dev", help="Without keys, on this machine only.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = DEFAULT_PORT,
    home: Home = None,
    database: DatabaseUrl = None,
    blobs: BlobsUrl = None,
    log_format: Annotated[
        Literal["json", "text"] | None,
        typer.Option(help="Of the log on stderr; default: text on a terminal, else json."),
    ] = None,
) -> None:
    """Serve the models of this machine until Ctrl-C. Clients need an API key (`trainsession keys`).

    Examples:

        trainsession serve --host 0.0.0.0 --home /data/trainsession

        trainsession serve --dev

        trainsession serve --database postgresql://trainsession@db-host/trainsession --blobs s3://bucket/prefix
    """
    if dev and host not in LOOPBACK:
        raise typer.BadParameter(
            f"{host} can be reached from other machines, and --dev asks for no key; "
            f"use one of {', '.join(LOOPBACK)} (and an SSH tunnel from elsewhere)",
            param_hint="--host",
        )
    from ..transport import foreground, logs

    chosen = log_format or ("text" if sys.stderr.isatty() else "json")
    console, log = stderr(), logging.getLogger("trainsession.serve")

    def say(text: str) -> None:
        if chosen == "json":
            log.info("%s", text.strip())
        else:
            console.print(text, markup=False)

    with errors_as_exit(), logs.to_stderr(chosen):
        where = (home or default_home()).absolute()
        foreground.serve(host, port, where, say, with_keys=not dev, database=database, blobs=blobs)
