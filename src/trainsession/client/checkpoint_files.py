"""Checkpoints to and from local directories."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest, StorageError
from .progress import Progress

if TYPE_CHECKING:
    from ..transport.http import Transport

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


async def download(transport: Transport, path: str, directory: str | Path) -> Path:
    """Every file of a checkpoint into a directory, each compared with its checksum.

    Returns:
        The directory. A file appears in it only when it is complete.

    Raises:
        NotFound: no such checkpoint.
        StorageError: the directory can't be written, or what arrived is not what the service holds.
    """
    target = Path(directory).expanduser()
    files: list[dict[str, Any]] = (await transport.request("GET", "/v1/checkpoints/files", params={"path": path}))[
        "files"
    ]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with Progress(f"downloading {path}", sum(file["size"] for file in files), "B") as bar:
            for file in files:
                place = target / _safe(file["name"])
                place.parent.mkdir(parents=True, exist_ok=True)
                query = {"path": path, "name": file["name"]}
                sha256 = await transport.download("/v1/checkpoints/file", query, place, bar.add)
                if sha256 != file["sha256"]:
                    place.unlink()
                    raise StorageError(
                        f"{path}: {file['name']} arrived with sha256 {sha256}, the service holds {file['sha256']}"
                    )
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    return target


def read_adapter(path: str | Path) -> dict[str, bytes]:
    """The two files of a PEFT adapter's directory.

    Raises:
        InvalidRequest: one of them is missing; pickled weights (``.bin``, ``.pt``) are not taken.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory; expected one with {' and '.join(ADAPTER_FILES)}")
    for name in ADAPTER_FILES:
        if not (directory / name).is_file():
            pickled = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
            hint = f"; {pickled[0]} is pickled, which is not taken: save it as safetensors" if pickled else ""
            raise InvalidRequest(f"{directory} has no {name}{hint}", details={"key": name})
    return {name: (directory / name).read_bytes() for name in ADAPTER_FILES}


def base_model_of(adapter_config: bytes) -> str:
    """What a PEFT adapter says it was trained on. Raises `InvalidRequest` where it doesn't say."""
    try:
        name = json.loads(adapter_config).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        raise InvalidRequest("adapter_config.json is not a JSON object") from None
    if not isinstance(name, str) or not name:
        raise InvalidRequest("adapter_config.json has no base_model_name_or_path; pass base_model=")
    return name


def _safe(name: str) -> str:
    """A file name as the service gave it, unless it would leave the directory."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\\" in name or "\0" in name:
        raise StorageError(f"the service named a file {name!r}, which is no plain file name")
    return name
