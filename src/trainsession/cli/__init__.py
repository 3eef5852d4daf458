"""The command line: data on stdout (a table, or --json), progress and notices on stderr."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401 - both are of one extra, and one of them may come with something else
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"the trainsession command needs {error.name}: pip install 'trainsession[server]'")

from .._version import __version__
from .config import configuring
from .doctor import diagnosis
from .objects import objects
from .serve import serving
from .tenancy import db, keys, projects
from .usage import metering

app = typer.Typer(
    help="Train, sample and keep language models on a GPU that you never manage.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(serving)
app.add_typer(configuring)
app.add_typer(objects)
app.add_typer(metering)
app.add_typer(diagnosis)
app.add_typer(projects, name="projects")
app.add_typer(keys, name="keys")
app.add_typer(db, name="db")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
