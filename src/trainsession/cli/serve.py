"""`trainsession serve`."""

from __future__ import annotations

import logging
import sys

import typer

from .config import Advertise, ConfigFile, Dev, Host, LogFormat, Port
from .configuration import load
from .output import BlobsUrl, DatabaseUrl, Home, errors_as_exit, stderr

serving = typer.Typer()

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@serving.command()
def serve(
    dev: Dev = None,
    host: Host = None,
    port: Port = None,
    home: Home = None,
    database: DatabaseUrl = None,
    blobs: BlobsUrl = None,
    advertise: Advertise = None,
    log_format: LogFormat = None,
    config: ConfigFile = None,
) -> None:
    """Serve the models of this machine until Ctrl-C. Clients need an API key (`trainsession keys`).

    Examples:

        trainsession serve --host 0.0.0.0 --home /data/trainsession

        trainsession serve --dev

        trainsession serve --database postgresql://trainsession@db-host/trainsession --blobs s3://bucket/prefix

        trainsession serve --host 0.0.0.0 --database postgresql://... --advertise http://10.0.0.7:8765
    """
    given = {"dev": dev, "host": host, "port": port, "home": home, "database": database, "blobs": blobs}
    with errors_as_exit():
        chosen = load({**given, "advertise": advertise, "log_format": log_format}, config).values
    if chosen.dev and chosen.host not in LOOPBACK:
        raise typer.BadParameter(
            f"{chosen.host} can be reached from other machines, and --dev asks for no key; "
            f"use one of {', '.join(LOOPBACK)} (and an SSH tunnel from elsewhere)",
            param_hint="--host",
        )
    if chosen.advertise and not chosen.database:
        raise typer.BadParameter(
            "several servers share a PostgreSQL database; this one has a file of its home", param_hint="--advertise"
        )
    from ..transport import foreground, logs
    from ..transport.embedded import engine_processes

    form = chosen.log_format or ("text" if sys.stderr.isatty() else "json")
    console, log = stderr(), logging.getLogger("trainsession.serve")

    def say(text: str) -> None:
        if form == "json":
            log.info("%s", text.strip())
        else:
            console.print(text, markup=False)

    with errors_as_exit(), logs.to_stderr(form):
        foreground.serve(
            chosen.host,
            chosen.port,
            chosen.home.absolute(),
            say,
            with_keys=not chosen.dev,
            database=chosen.database,
            blobs=chosen.blobs,
            advertise=chosen.advertise,
            settings=chosen.service,
            open_host=lambda: engine_processes(chosen.model_cache),
        )
