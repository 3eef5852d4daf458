"""`trainsession config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .configuration import ServeConfig, load
from .output import BlobsUrl, DatabaseUrl, Home, errors_as_exit

configuring = typer.Typer()

Dev = Annotated[bool | None, typer.Option("--dev", help="Without keys, on this machine only.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one; default: 8765.", min=0, max=65535)]
Advertise = Annotated[
    str | None,
    typer.Option(help="URL at which other servers on the same database reach this one."),
]
LogFormat = Annotated[
    Literal["json", "text"] | None,
    typer.Option(help="Of the log on stderr; default: text on a terminal, else json."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file; default: config.toml in the home.", envvar="TRAINSESSION_CONFIG"),
]


@configuring.command("config")
def show_config(
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
    """Print what `trainsession serve` would run with, as TOML, and where each value comes from.

    Example:

        trainsession config --home /data/trainsession
    """
    given = {"dev": dev, "host": host, "port": port, "home": home, "database": database, "blobs": blobs}
    with errors_as_exit():
        for line in load({**given, "advertise": advertise, "log_format": log_format}, config).lines():
            print(line)


def configured(**options: Any) -> ServeConfig:
    """For the other commands: home, database and blobs of the service that they belong to."""
    return load(options).values
