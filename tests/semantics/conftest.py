"""The whole path, as a user has it: the SDK against an embedded service with tiny real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainsession as ts

from .loop import new_trainer, step


@pytest.fixture(scope="session")
def models(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model cache with ``tiny-llama`` (tied embeddings) and ``tiny-qwen3`` (untied)."""
    cache = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3"):
        (cache / f"tiny-{name}").symlink_to(tiny_path(name))
    return cache


@pytest.fixture(scope="module")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.ServiceClient]:
    """``ServiceClient()`` on a home of this module, with a float32 CPU engine (exact mode)."""
    from trainsession.runtime.host import LocalHost
    from trainsession.transport.embedded import open_embedded

    home = tmp_path_factory.mktemp("home") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSESSION_HOME", str(home))
        patch.setenv("TRAINSESSION_MODEL_CACHE", str(models))
        patch.delenv("TRAINSESSION_BASE_URL", raising=False)
        embedded = open_embedded(home, open_host=lambda: LocalHost(device="cpu", dtype="float32"))
        with ts.ServiceClient() as client:
            yield client
        embedded.close()


@pytest.fixture(scope="module")
def two_steps(service: ts.ServiceClient) -> list[dict[str, float]]:
    """The numbers of two undisturbed steps, to the bit."""
    with new_trainer(service) as trainer:
        return [step(trainer), step(trainer)]
