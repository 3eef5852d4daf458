"""`trainsession serve --dev` beside others on one database, with a lease of a few seconds.

python -m tests.faults.short_lease HOME PORT DATABASE
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from trainsession.cli.output import errors_as_exit
from trainsession.service.settings import Settings
from trainsession.transport import foreground, logs

LEASE_SECONDS = 4.0
SETTINGS = Settings(lease_seconds=LEASE_SECONDS, renew_seconds=1.0)


def main(home: str, port: int, database: str) -> None:
    with errors_as_exit(), logs.to_stderr("text"):
        foreground.serve(
            "127.0.0.1",
            port,
            Path(home),
            lambda text: print(text, file=sys.stderr, flush=True),
            with_keys=False,
            database=database,
            advertise=f"http://127.0.0.1:{port}",
            settings=SETTINGS,
        )


if __name__ == "__main__":
    typer.run(main)
