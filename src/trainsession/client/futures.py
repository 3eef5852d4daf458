"""What every operation returns at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ..errors import ConnectionFailed, ResultTimeout, TrainSessionError
from .io_loop import IoLoop
from .progress import Waiting

T = TypeVar("T")


class Handle(Protocol):
    """One submitted operation, as a future needs it. Its methods run on the I/O loop."""

    @property
    def operation_id(self) -> str | None: ...

    async def cancel(self) -> bool: ...

    async def position(self) -> int | None: ...


class OperationFuture(Generic[T]):
    """The outcome of an operation that goes on in the service.

    Wait for it with `result`, ``await`` it in any asyncio loop, or pass several to `as_completed`.
    Nothing happens to an operation whose future is thrown away or times out: it goes on.

    Ctrl-C in `result` cancels every operation of the same client that has not started, stops its
    running samples, and keeps the session; then `KeyboardInterrupt` is raised. A cancelled *task*
    that awaits a future only stops waiting.
    """

    def __init__(self, name: str, handles: list[Handle], io: IoLoop, interrupt: Callable[[], None]) -> None:
        self._name = name
        self._handles = handles
        self._io = io
        self._interrupt = interrupt
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._waiting = Waiting(name)
        self._pid = os.getpid()

    def _start(self, work: Coroutine[Any, Any, T]) -> OperationFuture[T]:
        self._outcome = self._io.start(work)
        return self

    @property
    def name(self) -> str:
        """Which call this is the future of."""
        return self._name

    @property
    def operation_id(self) -> str | None:
        """The service's id of the operation (of the first, where there are several); None before it was accepted."""
        return self._handles[0].operation_id if self._handles else None

    @property
    def operation_ids(self) -> list[str]:
        """Ids of all operations behind this future that the service has accepted."""
        return [handle.operation_id for handle in self._handles if handle.operation_id is not None]

    @property
    def queue_position(self) -> int | None:
        """How many operations stand before this one, asked of the service now; None once it ended."""
        if self._outcome.done() or not self._handles:
            return None
        return self._io.run(self._handles[0].position())

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            ResultTimeout: not ready in time; the operation goes on.
            TrainSessionError: what made the operation fail, of its own class.
        """
        self._wait(timeout)
        return self._ended()

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` for coroutines."""
        try:
            async with asyncio.timeout(timeout):
                await self._arrived()
        except TimeoutError:
            raise ResultTimeout(f"{self._name}: no result within {timeout:g} s; the operation goes on") from None
        return self._ended()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, then return what it would raise, or None."""
        self._wait(timeout)
        return self._outcome.exception()

    def cancel(self) -> bool:
        """Cancel the operation if it has not started; a running sample stops within a decode step.

        Returns:
            Whether the service cancelled it. A cancelled operation changes nothing and costs
            nothing, and its `result` raises `Cancelled`; a sample stopped midway returns the tokens
            it has, with ``stop_reason="cancelled"``.
        """
        if self._outcome.done():
            return False
        return self._io.run(self._cancel())

    def _wait(self, timeout: float | None) -> None:
        if not self._outcome.done():
            self._io.refuse_to_block()
            if self._pid != os.getpid():
                raise ConnectionFailed(
                    f"{self._name} was called before a fork, so its result arrives in the parent process only"
                )
        try:
            self._waiting.until_done(self._outcome, timeout)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        if not self._outcome.done():
            raise ResultTimeout(f"{self._name}: no result within {timeout:g} s; the operation goes on")

    def _ended(self) -> T:
        error = self._outcome.exception()
        if isinstance(error, TrainSessionError):
            # Where it was found on the I/O loop says nothing to a caller, and would pile up.
            raise error.with_traceback(None)
        return self._outcome.result()

    async def _cancel(self) -> bool:
        return any([await handle.cancel() for handle in reversed(self._handles)])

    async def _arrived(self) -> None:
        """Return when the outcome is there, on whatever loop this runs."""
        if self._outcome.done():
            return
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def wake(_: object) -> None:
            # A loop that was closed meanwhile has nobody left to wake.
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: arrived.done() or arrived.set_result(None))

        self._outcome.add_done_callback(wake)
        await arrived

    def _add_done_callback(self, function: Callable[[OperationFuture[T]], object]) -> None:
        self._outcome.add_done_callback(lambda _: function(self))

    def __repr__(self) -> str:
        if not self._outcome.done():
            state = "pending"
        else:
            error = self._outcome.exception()
            state = "done" if error is None else f"failed: {type(error).__name__}"
        return f"<OperationFuture {self._name}, {state}>"


def as_completed(futures: Iterable[OperationFuture[T]], timeout: float | None = None) -> Iterator[OperationFuture[T]]:
    """Yield futures as they end, in whatever order they do.

    Args:
        timeout: Seconds for all of them together.

    Raises:
        ResultTimeout: some had not ended in time; their operations go on.
    """
    pending = list(dict.fromkeys(futures))
    ended: queue.SimpleQueue[OperationFuture[T]] = queue.SimpleQueue()
    for future in pending:
        future._add_done_callback(ended.put)
    deadline = None if timeout is None else time.monotonic() + timeout
    for count in range(len(pending)):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            yield ended.get(timeout=left)
        except queue.Empty:
            raise ResultTimeout(f"{len(pending) - count} of {len(pending)} futures had not ended in time") from None
        except KeyboardInterrupt:
            for interrupt in dict.fromkeys(future._interrupt for future in pending):
                interrupt()
            raise
