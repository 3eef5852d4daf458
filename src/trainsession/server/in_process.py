"""Calls to the application from other threads of its own process, past the socket.

Half of what a small call costs is HTTP itself: two parsers, four system calls. The embedded
service's owner needs none of it. The application, the guard and every error are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

RawHeaders = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class WholeAnswer:
    status: int = 0
    headers: RawHeaders = ()
    parts: list[bytes] = field(default_factory=list)


class InProcess:
    """Takes calls until `drain`. Belongs to the event loop on which it is made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._mutex = threading.Lock()
        self._is_open = True
        self._running = 0
        self._idle = asyncio.Event()

    async def call(self, method: str, target: bytes, headers: RawHeaders, body: bytes) -> WholeAnswer:
        """One call, from any event loop. Cancelling it is hanging up: the call itself goes on.

        Args:
            target: Path and query as they stand in a request line.
            headers: With lower-case names.

        Raises:
            ConnectionRefusedError: the service stops, or has stopped.
            CancelledError: also when the service stopped before it answered.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[WholeAnswer] = loop.create_future()
        hung_up = asyncio.Event()

        def begin() -> None:
            task = self._loop.create_task(self._run(_scope(method, target, headers), body, hung_up))
            task.add_done_callback(tell)

        def tell(task: asyncio.Task[WholeAnswer]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended
                loop.call_soon_threadsafe(end, task)

        def end(task: asyncio.Task[WholeAnswer]) -> None:
            if answered.done():
                return
            if task.cancelled():
                answered.cancel()
            elif (error := task.exception()) is not None:
                answered.set_exception(error)
            else:
                answered.set_result(task.result())

        with self._mutex:
            if not self._is_open:
                raise ConnectionRefusedError("the service of this process has stopped")
            self._running += 1
            self._loop.call_soon_threadsafe(begin)
        try:
            return await answered
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # ours has ended
                self._loop.call_soon_threadsafe(hung_up.set)
            raise

    async def drain(self, timeout: float) -> None:
        """Take no more calls and wait until those under way have ended."""
        with self._mutex:
            self._is_open = False
            if not self._running:
                return
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return  # the loop cancels what is left

    async def _run(self, scope: Scope, body: bytes, hung_up: asyncio.Event) -> WholeAnswer:
        answer = WholeAnswer()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], message["headers"]
            else:
                answer.parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        finally:
            with self._mutex:
                self._running -= 1
                if not self._running and not self._is_open:
                    self._idle.set()
        return answer


def _scope(method: str, target: bytes, headers: RawHeaders) -> Scope:
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(headers),
        "client": None,
        "server": ("in-process", None),
    }
