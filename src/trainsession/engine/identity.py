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
    files = sorted(directory.glob("*.safetensors"))
    config = directory / "config.json"
    stats = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in (*files, config)]
    cache = directory / _CACHE
    try:
        known = json.loads(cache.read_text())
        if known["files"] == stats:
            return known["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: computed anew
    digest = hashlib.sha256()
    settings = json.loads(config.read_text())
    digest.update(json.dumps({k: v for k, v in settings.items() if k not in _NOT_IDENTITY}, sort_keys=True).encode())
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"\0{file.name}\0".encode())
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    identity = digest.hexdigest()
    with contextlib.suppress(OSError):  # a shared or read-only model directory
        cache.write_text(json.dumps({"files": stats, "identity": identity}))
    return identity
