"""One service, as this process reaches it: its transport, results and tokenizers."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import AuthenticationFailed, ConnectionFailed
from .io_loop import IoLoop, io_loop
from .poller import ResultPoller

if TYPE_CHECKING:
    from ..tokenization import Tokenizer
    from ..transport.http import Transport
    from .submitter import Submitter

_SAMPLE_SUBMITS = 16
_FIRST_USE_SECONDS = 1_800.0
"""A model may have to be downloaded or converted before its tokenizer can be handed out."""
_GOODBYE_SECONDS = 3.0
"""For telling the service which results it may forget: it forgets them later without being told."""
_CLOSED = "this ServiceClient was closed; what it submitted goes on, and attach() of a new one fetches the results"


@dataclass(frozen=True, slots=True)
class _Live:
    """What belongs to one process: a forked child makes its own."""

    pid: int
    transport: Transport
    poller: ResultPoller
    sample_slots: asyncio.Semaphore


class Connection:
    """Shared by every client object of one `ServiceClient`.

    Args:
        open_transport: Makes the transport, on first use and again after a fork.
        on_close: Called once, when it is closed.

    A connection that nobody closed is closed when the interpreter ends, so that the end of a script
    loses nothing.
    """

    def __init__(self, open_transport: Callable[[], Transport], on_close: Callable[[], None]) -> None:
        self._open_transport = open_transport
        self._on_close = on_close
        self._submitters: weakref.WeakSet[Submitter] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._live: _Live | None = None
        self._inherited: _Live | None = None
        self._is_closed = False
        self._tokenizers: dict[str, Tokenizer] = {}
        _close_at_exit(self)

    @property
    def io(self) -> IoLoop:
        return io_loop()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def transport(self) -> Transport:
        return self._opened().transport

    @property
    def poller(self) -> ResultPoller:
        return self._opened().poller

    @property
    def sample_slots(self) -> asyncio.Semaphore:
        """Bounds the submits of samples under way, and with them the sockets."""
        return self._opened().sample_slots

    def _opened(self) -> _Live:
        live = self._live
        if live is not None and live.pid == os.getpid() and not self._is_closed:
            return live
        with self._lock:
            if self._is_closed:
                raise ConnectionFailed(_CLOSED)
            if self._live is None or self._live.pid != os.getpid():
                # A forked child lets go of its parent's sockets by ending; as garbage they would be a warning.
                self._inherited = self._live
                transport = self._open_transport()
                self._live = _Live(
                    os.getpid(), transport, ResultPoller(transport.request), asyncio.Semaphore(_SAMPLE_SUBMITS)
                )
            return self._live

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One request, waited for; ``options`` as `Transport.request` takes them."""
        return self.io.run(self.transport.request(method, path, **options))

    def tokenizer(self, base_model: str) -> Tokenizer:
        """The base model's tokenizer, from the service's bundle; fetched once."""
        known = self._tokenizers.get(base_model)
        if known is None:
            from ..tokenization import Tokenizer

            path = f"/v1/models/{quote(base_model, safe='')}/tokenizer"
            bundle = self.call("GET", path, timeout=_FIRST_USE_SECONDS)
            known = self._tokenizers[base_model] = Tokenizer.from_files(bundle["files"])
        return known

    def register(self, submitter: Submitter) -> None:
        """Have `close` and `interrupt` know of a session's queue."""
        self._submitters.add(submitter)

    def interrupt(self) -> None:
        """Cancel whatever has not started, in all sessions."""
        for submitter in list(self._submitters):
            submitter.interrupt()

    def close(self) -> None:
        """Wait until every call has reached the service and checkpoints are saved; then let go of it.

        Results that nobody has waited for stay in the service.
        """
        with self._lock:
            if self._is_closed:
                return
        if self._live is None or self._live.pid == os.getpid():
            for submitter in list(self._submitters):
                submitter.finish()
        with self._lock:
            live, self._is_closed = self._live, True
        try:
            if live is not None and live.pid == os.getpid():
                self.io.run(_close(live))
        finally:
            self._on_close()


async def _close(live: _Live) -> None:
    try:
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await live.poller.close(_CLOSED)
    except (TimeoutError, ConnectionFailed, AuthenticationFailed):
        pass  # The service is gone, or takes this key no longer: results cannot be acknowledged, and expire.
    finally:
        await live.transport.close()


def _close_at_exit(connection: Connection) -> None:
    """Registered anew for each connection, so that it runs before the embedded service's own ending,
    and as late as worker threads still take work: plain `atexit` comes after that."""
    owner, reference = os.getpid(), weakref.ref(connection)

    def close() -> None:
        left = reference()
        if left is not None and os.getpid() == owner:
            left.close()

    getattr(threading, "_register_atexit", atexit.register)(close)
