"""Commands on what a service holds: models, sessions, checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .output import (
    ApiKey,
    AsJson,
    BaseUrl,
    connected,
    print_rows,
    stderr,
)

objects = typer.Typer()


@objects.command()
def models(base_url: BaseUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the base models, those that load without a model hub first.

    Example:

        trainsession models --json
    """
    with connected(base_url, api_key) as client:
        rows = [asdict(model) for model in client.list_base_models()]
    print_rows(rows, ("name", "available", "context_length", "note"), as_json)


@objects.command()
def sessions(base_url: BaseUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the sessions.

    Example:

        trainsession sessions
    """
    with connected(base_url, api_key) as client:
        rows = [asdict(session) for session in client.list_sessions()]
    print_rows(rows, ("session_id", "name", "kind", "base_model", "state", "step", "created_at"), as_json)


@objects.command()
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
    with connected(base_url, api_key) as client:
        rows = [asdict(checkpoint) for checkpoint in client.list_checkpoints(session)]
    print_rows(rows, ("path", "kind", "base_model", "size_bytes", "created_at", "expires_at"), as_json)


@objects.command()
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
    with connected(base_url, api_key) as client:
        written = client.download_checkpoint(path, directory)
    print(written)


@objects.command()
def delete(
    path: Annotated[str, typer.Argument(help="ts://<session>/{state|weights}/<name>")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a checkpoint.

    Example:

        trainsession delete ts://ses_.../state/step-100
    """
    with connected(base_url, api_key) as client:
        client.delete_checkpoint(path)
    stderr().print(f"deleted {path}", markup=False)
