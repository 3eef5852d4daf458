"""The engines of this machine: one per base model, each on its own thread or in its own process."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..engine.api import Engine
from ..errors import EngineError, EngineLost
from ..types import BaseModel
from .catalog import Catalog
from .thread import EngineThread

if TYPE_CHECKING:
    from .process import EngineProcess

Running: TypeAlias = "EngineThread | EngineProcess"


LOAD_ATTEMPTS = 3
"""Times that a process which ends while it loads is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine loads, and where.

    Attributes:
        name: Canonical name of the base model.
        model_cache: Directory of converted and local models; None: see `runtime.bundle.model_cache`.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        exact: Exact mode; None: on the CPU, where the model allows it.
    """

    name: str
    model_cache: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    exact: bool | None = None


def load_engine(options: EngineOptions) -> Engine:
    """Call it on the engine's thread: importing torch and transformers takes seconds."""
    from ..engine.engine import LocalEngine

    path = Catalog(None if options.model_cache is None else Path(options.model_cache)).locate(options.name)
    return LocalEngine.load(path, name=options.name, device=options.device, dtype=options.dtype, exact=options.exact)


class LocalHost:
    """Implements `trainsession.engine.api.EngineHost`.

    Args:
        processes: Each engine in a process of its own: what kills one leaves the service alive.
        model_cache, device, dtype, exact: See `EngineOptions`.
    """

    def __init__(
        self,
        *,
        processes: bool = False,
        model_cache: Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        exact: bool | None = None,
    ) -> None:
        self._catalog = Catalog(model_cache)
        self._processes = processes
        self._model_cache = None if model_cache is None else str(model_cache)
        self._device = device
        self._dtype = dtype
        self._exact = exact
        self._lock = threading.Lock()
        self._engines: dict[str, Running] = {}

    def list_base_models(self) -> list[BaseModel]:
        return self._catalog.list_base_models()

    def resolve(self, base_model: str) -> str:
        return self._catalog.resolve(base_model)

    def context_length(self, base_model: str) -> int | None:
        """That of a canonical name; reads its configuration, and no weights."""
        return self._catalog.context_length(base_model)

    async def open(self, base_model: str) -> Running:
        """The running engine of that model; the first caller loads it, the others wait with it.

        Raises:
            UnknownModel, EngineError: it cannot be loaded; the next call tries again.
        """
        name = await asyncio.to_thread(self.resolve, base_model)
        lost: EngineLost | None = None
        for _ in range(LOAD_ATTEMPTS):
            with self._lock:
                engine = self._engines.get(name)
                if engine is None or not engine.alive:
                    engine = self._engines[name] = self._start(name)
            try:
                # Shielded: one caller that gives up must not take the engine from the others.
                await asyncio.shield(asyncio.wrap_future(engine.ready))
            except EngineLost as error:
                lost = error
            except Exception:
                with self._lock:
                    if self._engines.get(name) is engine:
                        del self._engines[name]
                raise
            else:
                return engine
        assert lost is not None
        raise EngineError(f"{name} could not be loaded, {LOAD_ATTEMPTS} times: {lost.message}")

    def _start(self, name: str) -> Running:
        options = EngineOptions(
            name=name, model_cache=self._model_cache, device=self._device, dtype=self._dtype, exact=self._exact
        )
        if self._processes:
            from .process import EngineProcess

            return EngineProcess(options)
        return EngineThread(lambda: load_engine(options), name)

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        """The tokenizer bundle; needs no engine."""
        return await asyncio.to_thread(self._tokenizer_files, base_model)

    async def close(self) -> None:
        """End every engine."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            await engine.close()

    def _tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        return self._catalog.tokenizer_files(self._catalog.resolve(base_model))
