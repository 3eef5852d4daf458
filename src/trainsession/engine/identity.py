"""The identity of a base model: a hash of its weights and configuration. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

_CACHE = ".trainsession-identity.json"
_NOT_IDENTITY = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
"""Configuration that names no other model: where it came from, and how it is stored or run."""


def weights_identity(directory: str | Path) -> str:
    """Hex sha256 over the safetensors files and ``config.json`` of a model's directory.

    Hashing gigabytes takes seconds, so the result is kept beside the weights, under their sizes
    and modification times; in a directory that is not writable it is computed each time.
    """
    directory = Path(directory)
    known = known_identity(directory)
    if known is not None:
        return known
    digest = hashlib.sha256()
    settings = json.loads((directory / "config.json").read_text())
    digest.update(json.dumps({k: v for k, v in settings.items() if k not in _NOT_IDENTITY}, sort_keys=True).encode())
    for file in _weight_files(directory):
        with file.open("rb") as stream:
            digest.update(f"\0{file.name}\0".encode())
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    identity = digest.hexdigest()
    with contextlib.suppress(OSError):  # a shared or read-only model directory
        (directory / _CACHE).write_text(json.dumps({"files": _stamps(directory), "identity": identity}))
    return identity


def known_identity(directory: str | Path) -> str | None:
    """The identity if it was computed before and the files have not changed since."""
    directory = Path(directory)
    try:
        known = json.loads((directory / _CACHE).read_text())
        return known["identity"] if known["files"] == _stamps(directory) else None
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged
        return None


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _stamps(directory: Path) -> list[list[str | int]]:
    files = (*_weight_files(directory), directory / "config.json")
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
