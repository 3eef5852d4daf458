"""Progress bars for what takes longer than a moment; none where nobody would see them.

A bar appears after `PATIENCE` seconds, on stderr, where that is a terminal or a notebook.
``TRAINSESSION_PROGRESS=0`` turns them off.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

PATIENCE = 2.0
"""Seconds before a bar appears."""
_REFRESH = 0.5


def is_enabled() -> bool:
    """Whether somebody watches: a terminal or a notebook, and not turned off."""
    if os.environ.get("TRAINSESSION_PROGRESS", "") == "0":
        return False
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())


class Progress:
    """A bar that appears only when its work turns out to be long.

    Args:
        description: What is being done.
        total: Of what `add` counts; None: elapsed time only.
        unit: ``"B"`` is scaled to KiB, MiB, ...
    """

    def __init__(self, description: str, total: int | None = None, unit: str = "it") -> None:
        self._description, self._total, self._unit = description, total, unit
        self._count = 0
        self._bar: Any = None
        self._appears_at = time.monotonic() + PATIENCE if is_enabled() else float("inf")

    def add(self, count: int) -> None:
        self._count += count
        self.refresh()

    def refresh(self) -> None:
        if self._bar is None and time.monotonic() >= self._appears_at:
            tqdm = _bar_class()
            bytes_or_not: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if self._unit == "B" else {}
            self._bar = tqdm(
                desc=self._description, total=self._total, unit=self._unit, leave=False, file=sys.stderr, **bytes_or_not
            )
        if self._bar is not None:
            self._bar.n = self._count
            self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar_class() -> Any:
    """A widget in a notebook that has widgets, else text."""
    if "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm.std import tqdm
    return tqdm


class Waiting:
    """How far an operation is, for whoever waits for it.

    Args:
        description: What the bar says.

    Attributes:
        total: Parts of the operation; a bar counts them when there is more than one.
        count: Parts that ended.
        is_loading: Whether the service still loads the model: worth a bar by itself. Other single
            operations show none, because a loop of slow steps would flicker with them.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self.total = 1
        self.count = 0
        self.is_loading: Callable[[], bool] = lambda: False

    def until_done(self, outcome: concurrent.futures.Future[Any], timeout: float | None) -> None:
        """Block until the outcome is there or the time is over, showing progress."""
        if outcome.done() or not (self.total > 1 or self.is_loading()) or not is_enabled():
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                outcome.exception(timeout)
            return
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        counted = self.total > 1
        text = self.description if counted else f"{self.description}: waiting for the model"
        with Progress(text, self.total if counted else None, "sample" if counted else "s") as bar:
            started = time.monotonic()
            shown = 0
            while not outcome.done() and (left := deadline - time.monotonic()) > 0:
                concurrent.futures.wait([outcome], min(_REFRESH, left))
                now = self.count if counted else int(time.monotonic() - started)
                bar.add(now - shown)
                shown = now
