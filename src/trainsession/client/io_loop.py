"""The one background event loop of this process: all network I/O of the SDK runs on it.

User code never runs here, so a blocking ``.result()`` is legal in a script, in a notebook (whose
own loop is another one) and in any thread, but not in a coroutine of this loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..errors import TrainSessionError

T = TypeVar("T")


class IoLoop:
    """An asyncio loop on a daemon thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainsession-io", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine here; the future is its outcome, for any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine here and wait for it; Ctrl-C cancels it."""
        try:
            self.refuse_to_block()
        except RuntimeError:
            coroutine.close()
            raise
        future = self.start(coroutine)
        try:
            return future.result()
        except TrainSessionError as error:
            raise error.with_traceback(None)  # noqa: B904 - the same error, without the loop's frames
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run a plain function here soon; calls of one thread keep their order."""
        self._loop.call_soon_threadsafe(function, *args)

    def refuse_to_block(self) -> None:
        """Raise `RuntimeError` on this loop's own thread, where waiting would be a deadlock."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("trainsession: a blocking call on the I/O loop would never return; await it instead")


_lock = threading.Lock()
_current: IoLoop | None = None


def io_loop() -> IoLoop:
    """This process' I/O loop, started on first use."""
    global _current
    with _lock:
        if _current is None:
            _current = IoLoop()
        return _current


def _after_fork() -> None:
    """Threads don't survive a fork: the child starts a loop of its own when it needs one."""
    global _current, _lock
    _lock = threading.Lock()
    _current = None


os.register_at_fork(after_in_child=_after_fork)
