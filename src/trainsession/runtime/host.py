"""The engines of this machine: one per base model, each on its own thread, opened on first use."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from ..engine.api import Engine
from ..types import BaseModel
from .catalog import Catalog
from .thread import EngineThread


class LocalHost:
    """Implements `trainsession.engine.api.EngineHost`.

    Args:
        model_cache: Directory of converted and local models; default: see `runtime.bundle.model_cache`.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        exact: Exact mode; default: on the CPU, where the model allows it.
    """

    def __init__(
        self,
        *,
        model_cache: Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        exact: bool | None = None,
    ) -> None:
        self._catalog = Catalog(model_cache)
        self._device = device
        self._dtype = dtype
        self._exact = exact
        self._lock = threading.Lock()
        self._engines: dict[str, EngineThread] = {}

    def list_base_models(self) -> list[BaseModel]:
        return self._catalog.list_base_models()

    def resolve(self, base_model: str) -> str:
        return self._catalog.resolve(base_model)

    async def open(self, base_model: str) -> EngineThread:
        """The running engine of that model; the first caller loads it, the others wait with it.

        Raises:
            UnknownModel, EngineError: it cannot be loaded; the next call tries again.
        """
        name = await asyncio.to_thread(self.resolve, base_model)
        with self._lock:
            engine = self._engines.get(name)
            if engine is None:
                engine = self._engines[name] = EngineThread(lambda: self._load(name), name)
        try:
            # Shielded: one caller that gives up must not take the engine from the others.
            await asyncio.shield(asyncio.wrap_future(engine.ready))
        except Exception:
            with self._lock:
                if self._engines.get(name) is engine:
                    del self._engines[name]
            raise
        return engine

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        """The tokenizer bundle; needs no engine."""
        return await asyncio.to_thread(self._tokenizer_files, base_model)

    async def close(self) -> None:
        """End every engine's thread."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            await engine.close()

    def _tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        return self._catalog.tokenizer_files(self._catalog.resolve(base_model))

    def _load(self, name: str) -> Engine:
        # Here, on the engine's thread: importing torch and transformers takes seconds.
        from ..engine.engine import LocalEngine

        path = self._catalog.locate(name)
        return LocalEngine.load(path, name=name, device=self._device, dtype=self._dtype, exact=self._exact)
