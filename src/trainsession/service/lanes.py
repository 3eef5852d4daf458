"""The lanes of a service: one for each base model, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.api import EngineHandle, EngineHost
from ..store.store import Store
from .checkpoints import Checkpoints
from .lane import Lane
from .log import OperationLog
from .metering import Meter
from .outcomes import Outcomes
from .settings import Settings


class Lanes:
    """See `Lane` for the arguments."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        log: OperationLog,
        outcomes: Outcomes,
        meter: Meter,
        checkpoints: Checkpoints,
        settings: Settings,
        on_loss: Callable[[str], None],
    ) -> None:
        self._parts = (host, store, log, outcomes, meter, checkpoints, settings, on_loss)
        self._lanes: dict[str, Lane] = {}

    def of(self, base_model: str) -> Lane:
        """That of a base model."""
        lane = self._lanes.get(base_model)
        if lane is None:
            lane = self._lanes[base_model] = Lane(base_model, *self._parts)
        return lane

    def engines(self) -> dict[str, EngineHandle]:
        """Those that are loaded, by base model."""
        return {model: lane.loaded for model, lane in self._lanes.items() if lane.loaded is not None}

    async def close(self) -> None:
        """Let what runs end, and save every session."""
        for lane in list(self._lanes.values()):
            await lane.close()
