"""The ordered operations of one session: numbered when called, sent in that order, pipelined.

A number, once given, must reach the service, or everything behind it would wait for ever. So an
operation that the service did not take (DESIGN section 5: some refusals don't consume the number)
or that was cancelled before it was sent has its number consumed by a ``skip``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..errors import (
    Cancelled,
    ConnectionFailed,
    NotFound,
    RateLimited,
    SequenceConflict,
    SessionClosed,
    SessionFenced,
    TrainSessionError,
)
from .connection import Connection
from .futures import OperationFuture
from .progress import Progress

T = TypeVar("T")

_IN_FLIGHT = 4
"""Submits on their way at a time: enough to hide a round trip, few enough to bound memory."""
_NUMBER_CONSUMED = frozenset({400, 402, 404, 409, 422})
"""Statuses of refusals that the service logs under the number, or whose session is gone."""
_PARTS_OF_A_STEP = frozenset({"forward_backward", "forward_keep", "backward"})
"""A step without one of these would use part of the batch: their ``skip`` says so."""
_INTERRUPT_SECONDS = 5.0
_FINISHED_BEFORE_CLOSING = frozenset({"save_state", "save_weights", "export", "forward_backward_custom", "log"})

_log = logging.getLogger(__name__)


class PendingOperation:
    """One numbered operation (a `Handle`); all but its construction belongs to the I/O loop."""

    def __init__(self, kind: str, params: dict[str, Any], **body: Any) -> None:
        self.kind = kind
        self.body = {"kind": kind, "params": params, "idempotency_key": uuid.uuid4().hex, **body}
        self.seq = 0
        self.operation_id: str | None = None
        self.is_queued = False
        self.is_cancelled = False
        self.accepted: asyncio.Future[str] | None = None
        self._submitter: Submitter | None = None

    def numbered(self, submitter: Submitter, seq: int) -> None:
        self._submitter, self.seq = submitter, seq
        self.body |= {"seq": seq, "epoch": submitter.epoch}

    def skip(self) -> None:
        """Consume the number without doing anything."""
        self.body = self.skipped()

    def skipped(self) -> dict[str, Any]:
        """The body of a ``skip`` in this one's place."""
        params = {"incomplete": True} if self.kind in _PARTS_OF_A_STEP else {}
        body = {"kind": "skip", "params": params, "idempotency_key": uuid.uuid4().hex, "seq": self.seq}
        return body if self._submitter is None else body | {"epoch": self._submitter.epoch}

    async def cancel(self) -> bool:
        if self._submitter is None or self.is_cancelled:
            return self.is_cancelled
        return await self._submitter.cancel(self)

    async def position(self) -> int | None:
        if self.operation_id is None or self._submitter is None:
            return None
        return await self._submitter.connection.poller.position(self.operation_id)


class Submitter:
    """Numbers and sends the operations of one session.

    Args:
        epoch: Of the attachment; the service refuses what carries an older one.
        next_seq: The next free sequence number.
    """

    def __init__(self, connection: Connection, session_id: str, epoch: int, next_seq: int) -> None:
        self.connection = connection
        self.session_id = session_id
        self.epoch = epoch
        self._next_seq = next_seq
        self._lock = threading.Lock()
        self._closed_because = ""
        self.has_results = False
        """Whether an operation of this session has ended: until then the model may be loading."""
        self._start_in_this_process()
        connection.register(self)

    def _start_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._queue: deque[PendingOperation] = deque()
        self._slots = asyncio.Semaphore(_IN_FLIGHT)
        self._pump: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._unended: dict[int, PendingOperation] = {}
        self._gaps: deque[PendingOperation] = deque()
        """Operations that the service did not take, whose numbers are still open."""
        self._running: set[OperationFuture[Any]] = set()

    @property
    def next_seq(self) -> int:
        """The number that the next call will take."""
        return self._next_seq

    def launch(
        self, name: str, operations: Sequence[PendingOperation], work: Callable[[], Coroutine[Any, Any, T]]
    ) -> OperationFuture[T]:
        """Give the operations their numbers and start the coroutine that submits them with `outcome`.

        Raises:
            SessionClosed: this client was closed.
        """
        io = self.connection.io
        future: OperationFuture[T] = OperationFuture(name, list(operations), io, self.interrupt)
        future._waiting.is_loading = lambda: not self.has_results
        with self._lock:
            if self._closed_because:
                raise SessionClosed(self._closed_because)
            if self._pid != os.getpid():
                self._start_in_this_process()
            for operation in operations:
                operation.numbered(self, self._next_seq)
                self._unended[self._next_seq] = operation
                self._next_seq += 1
            # Under the lock, so that the loop sees them in the order of their numbers.
            self._running.add(future)
            future._start(work())
        future._add_done_callback(lambda ended: self._ended(ended, operations))
        return future

    def _ended(self, future: OperationFuture[Any], operations: Sequence[PendingOperation]) -> None:
        with self._lock:
            self._running.discard(future)
            for operation in operations:
                self._unended.pop(operation.seq, None)

    async def outcome(self, operation: PendingOperation) -> Any:
        """Send an operation and wait for its result value."""
        operation.accepted = asyncio.get_running_loop().create_future()
        operation.is_queued = True
        self._queue.append(operation)
        if self._pump is None:
            self._pump = asyncio.create_task(self._send_queued())
        operation_id = await operation.accepted
        with self._lock:
            oldest = next(iter(self._unended.values()), operation)
        value = await self.connection.poller.wait(operation_id, behind=oldest.operation_id)
        if operation.is_cancelled:
            raise Cancelled(f"{operation.kind} (number {operation.seq}) was cancelled before it was sent")
        self.has_results = True
        return value

    async def cancel(self, operation: PendingOperation) -> bool:
        if operation.is_queued or operation.accepted is None:
            operation.skip()
            operation.is_cancelled = True
            return True
        try:
            operation_id = await asyncio.shield(operation.accepted)
            answer = await self.connection.transport.request("POST", f"/v1/operations/{operation_id}/cancel")
        except TrainSessionError:
            return False  # It was refused or has ended: the future says why.
        if answer["cancelled"]:
            self.connection.poller.wake()
        return bool(answer["cancelled"])

    def interrupt(self) -> None:
        """Ctrl-C: cancel what has not started, newest first; waits a few seconds at most."""
        self.connection.io.run(self._cancel_all())

    async def _cancel_all(self) -> None:
        # Newest first: else the service would start one while the one before it is cancelled.
        with self._lock:
            pending = list(reversed(self._unended.values()))
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def cancel(operation: PendingOperation) -> None:
            async with slots:
                await operation.cancel()

        try:
            async with asyncio.timeout(_INTERRUPT_SECONDS):
                await asyncio.gather(*(cancel(operation) for operation in pending))
        except TimeoutError:
            _log.warning("the service did not confirm within %g s that everything was cancelled", _INTERRUPT_SECONDS)

    def running(self) -> list[OperationFuture[Any]]:
        """Futures that have not ended."""
        with self._lock:
            return list(self._running)

    def finish(self) -> None:
        """Wait until every call has reached the service and what can't go on alone has ended.

        Checkpoints are waited for, so that the end of a script does not lose them; so are custom
        losses, whose function runs here.
        """
        left = [future for future in self.running() if future.name in _FINISHED_BEFORE_CLOSING]
        with Progress("finishing", len(left), "operation") as bar:
            for future in left:
                concurrent.futures.wait([future._outcome])
                bar.add(1)
        self.connection.io.run(self._drained())

    async def _drained(self) -> None:
        while self._pump is not None or self._sending:
            await asyncio.wait([task for task in (self._pump, *self._sending) if task is not None])

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_because)

    def close(self, why: str) -> None:
        """Take no more operations: calls raise `SessionClosed` with this message."""
        with self._lock:
            self._closed_because = why

    async def _send_queued(self) -> None:
        try:
            while self._queue:
                await self._slots.acquire()
                if self._queue:
                    await self._fill_gaps()
                if not self._queue:  # the connection failed meanwhile, and all of it with that
                    self._slots.release()
                    break
                operation = self._queue.popleft()
                operation.is_queued = False
                task = asyncio.create_task(self._send(operation))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
        finally:
            self._pump = None

    async def _send(self, operation: PendingOperation) -> None:
        accepted = operation.accepted
        assert accepted is not None
        try:
            operation.operation_id = await self._post(operation.body)
            accepted.set_result(operation.operation_id)
        except Exception as error:  # whatever it was, whoever waits must hear of it
            accepted.set_exception(error)
            await self._refused(operation, error)
        finally:
            operation.body = {}  # The arrays need not live as long as the future does.
            self._slots.release()

    async def _refused(self, operation: PendingOperation, error: Exception) -> None:
        if isinstance(error, TrainSessionError) and error.status in _NUMBER_CONSUMED:
            return
        self._gaps.append(operation)
        if not isinstance(error, ConnectionFailed):
            await self._fill_gaps()
            return
        # Nobody answered for minutes. What is queued behind would only find that out again.
        while self._queue:
            behind = self._queue.popleft()
            behind.is_queued = False
            self._gaps.append(behind)
            if behind.accepted is not None:
                behind.accepted.set_exception(error)

    async def _fill_gaps(self) -> None:
        while self._gaps:
            operation = self._gaps.popleft()
            try:
                await self._post(operation.skipped())
            except SequenceConflict:
                pass  # The service had taken the operation, and only its answer was lost.
            except (SessionClosed, SessionFenced, NotFound):
                self._gaps.clear()
            except TrainSessionError as error:
                _log.warning("number %d of session %s is still open: %s", operation.seq, self.session_id, error)
                self._gaps.appendleft(operation)
                return

    async def _post(self, body: dict[str, Any]) -> str:
        path = f"/v1/sessions/{self.session_id}/operations"
        while True:
            try:
                answer = await self.connection.transport.request("POST", path, body=body)
                return answer["operation_id"]
            except RateLimited as error:
                # The queue of the service is full: later is as good, and an error would lose the batch.
                _log.warning("session %s waits: %s", self.session_id, error)
                await asyncio.sleep(1.0)
