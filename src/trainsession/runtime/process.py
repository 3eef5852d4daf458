"""An engine in a process of its own: what kills it leaves the service alive, which starts another.

The other end is `worker`. Nothing here knows what a session is: the service restores what an
engine held from its log (`service.lane`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from ..engine.api import EngineInfo, SampleEvent, SampleItem
from ..errors import EngineLost, ServiceUnavailable
from .codec import decode, encode
from .frames import read_frame, write_frame
from .host import EngineOptions

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""Without a sign of life for so long, the process is killed. A long computation gives signs."""
STUCK_SECONDS = 1800.0
"""An engine that has work and gets no layer, pass, step or call done for so long is killed: its thread hangs."""
CLOSE_SECONDS = 30.0
"""For the running call to end; then the process is killed."""

OnEvent = Callable[[SampleEvent], None]


class _Stuck(Exception):
    """The engine's thread hangs, though its process gives signs of life."""


class EngineProcess:
    """Implements `trainsession.engine.api.EngineHandle`. Use it on the event loop that made it.

    Args:
        options: What to load.
        hang_seconds: See `HANG_SECONDS`.
        stuck_seconds: See `STUCK_SECONDS`.

    Attributes:
        ready: The engine's info once it is loaded, or why it cannot be; `EngineLost` where the process ended first.
        pid: Of the process; 0 before it runs.
    """

    def __init__(
        self, options: EngineOptions, hang_seconds: float = HANG_SECONDS, stuck_seconds: float = STUCK_SECONDS
    ) -> None:
        self.ready: Future[EngineInfo] = Future()
        self.pid = 0
        self._name = options.name
        self._hang_seconds = hang_seconds
        self._stuck_seconds = stuck_seconds
        self._progress: int | None = None
        self._progressed_at = 0.0
        self._busy_seconds = 0.0
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[str, OnEvent] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self._lost: EngineLost | None = None
        self._task = asyncio.create_task(self._run(options), name=f"engine process {options.name}")

    @property
    def info(self) -> EngineInfo:
        return self.ready.result(timeout=0)

    @property
    def busy_seconds(self) -> float:
        """As of the newest message from it, at most a second ago."""
        return self._busy_seconds

    @property
    def alive(self) -> bool:
        return self._lost is None

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run one `Engine` method between two decode steps.

        Raises:
            EngineLost: the process ended first; whether it did the work is unknown, and what it held is gone.
            ServiceUnavailable: the engine was closed.
        """
        self._check_open()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, method, list(args), kwargs)
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    def sample(self, item: SampleItem, on_event: OnEvent) -> None:
        """Submit; every error, that of a lost process too, arrives as an event."""
        try:
            self._check_open()
        except (EngineLost, ServiceUnavailable) as error:
            end = SampleEvent(request_id=item.request_id, error=error, done=True)
            asyncio.get_running_loop().call_soon(on_event, end)
            return
        self._listeners[item.request_id] = on_event
        self._send("sample", item)

    def cancel(self, request_id: str) -> None:
        """Unknown requests, and those of an engine that ended, are fine."""
        if self._lost is None and not self._closing:
            self._send("cancel", request_id)

    async def close(self) -> None:
        """Let the running call end, then end the process."""
        if not self._closing and self._lost is None and self.ready.done():
            self._send("close")
        self._closing = True
        if not self.ready.done():
            self._kill()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        if not done:
            self._kill()
            await asyncio.wait([self._task])

    # --- the process -----------------------------------------------------------------------
    async def _run(self, options: EngineOptions) -> None:
        reason = "it ended"
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "trainsession.runtime.worker", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # A terminal's Ctrl-C is for the service, which lets the running operation end.
                    start_new_session=True,
                )
            self.pid = self._process.pid
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            write_frame(self._writer, encode(asdict(options)))
            while True:
                async with asyncio.timeout(self._hang_seconds):
                    data = await read_frame(reader)
                self._handle(decode(data))
        except _Stuck:
            reason = f"it had work and got nothing done for {self._stuck_seconds:g} s, and was killed"
        except TimeoutError:
            reason = f"it gave no sign of life for {self._hang_seconds:g} s and was killed"
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            reason = f"{type(error).__name__} in the service's end of it"
            logger.exception("the connection to engine %s failed", self._name)
        finally:
            # A process that is only stopped must not go on later.
            self._kill()
            status = await self._process.wait() if self._process is not None else None
            if self._writer is not None:
                self._writer.close()
            self._end(f"{reason} (exit status {status})")

    def _handle(self, message: list[Any]) -> None:
        kind, self._busy_seconds, *values = message
        if kind == "done":
            self._settle(values[0], values[1], None)
        elif kind == "failed":
            self._settle(values[0], None, values[1])
        elif kind == "event":
            event: SampleEvent = values[0]
            listener = self._listeners.get(event.request_id)
            if event.done:
                self._listeners.pop(event.request_id, None)
            if listener is not None:
                listener(event)
        elif kind == "beat":
            self._beat(values[0])
        elif kind == "ready":
            self.ready.set_result(values[0])
        elif kind == "unloadable":
            self.ready.set_exception(values[0])

    def _beat(self, progress: int | None) -> None:
        now = time.monotonic()
        if progress is None or progress != self._progress:
            self._progress, self._progressed_at = progress, now
        elif now - self._progressed_at > self._stuck_seconds:
            raise _Stuck

    def _settle(self, number: int, value: Any, error: Exception | None) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _end(self, reason: str) -> None:
        """Fail everything that waits, at once: from here on nothing comes from this process."""
        self._lost = EngineLost(f"the process of engine {self._name} is gone: {reason}")
        if not self.ready.done():
            self.ready.set_exception(self._lost)
        elif not self._closing and self.ready.exception() is None:
            logger.error("the process of engine %s is gone: %s", self._name, reason)
        error = ServiceUnavailable("the engine is closed") if self._closing else self._lost
        for number in list(self._calls):
            self._settle(number, None, error)
        listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            listener(SampleEvent(request_id=request_id, error=error, done=True))

    def _check_open(self) -> None:
        if self._closing:
            raise ServiceUnavailable("the engine is closed")
        if self._lost is not None:
            raise self._lost

    def _send(self, *message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            write_frame(self._writer, encode(list(message)))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
