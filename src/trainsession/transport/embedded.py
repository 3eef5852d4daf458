"""The service inside the user's own process, shared by every process of one home.

The first process that needs a home's service locks the home and serves it on a private socket from
a thread; others join that socket. When the serving process ends, the next one that finds nobody
there takes over, in the middle of its own request. So a notebook, its forked workers and a command
line see one service, and one engine holds the model.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from ..errors import ConnectionFailed
from .home import HomeLock, default_home, prepare, published
from .http import LIMITS, WHOLE_ANSWER, Transport

if TYPE_CHECKING:
    from ..engine.api import EngineHost
    from ..server.in_process import InProcess
    from .serving import ServiceThread

OpenHost = Callable[[], "EngineHost"]

JOIN_SECONDS = 60.0
"""How long to wait for a process that holds the home's lock but does not answer yet."""
_LOOK_AGAIN_SECONDS = 0.05
SERVER_MODULES = ("fastapi", "uvicorn", "sqlalchemy", "alembic")
_ENGINE_MODULES = ("torch", "transformers", "safetensors")


class EmbeddedService:
    """One home's service as this process sees it: run here, or joined. Any thread may use it."""

    def __init__(self, home: Path, open_host: OpenHost | None) -> None:
        self.home = home
        self._open_host = open_host
        self._mutex = threading.Lock()
        self._users = 0
        self._run: Path | None = None
        self._lock: HomeLock | None = None
        self._thread: ServiceThread | None = None

    def __repr__(self) -> str:
        return f"EmbeddedService({self.home}, {'served here' if self.serves else 'joined'})"

    @property
    def serves(self) -> bool:
        """Whether the service runs in this process."""
        return self._thread is not None

    @property
    def in_process(self) -> InProcess | None:
        """The way past the socket, where the service runs in this process."""
        thread = self._thread
        return None if thread is None else thread.in_process

    def transport(self) -> Transport:
        """A new transport to the service; belongs to the event loop that first uses it."""
        return Transport("http://trainsession", connections=self)

    def asynchronous(self) -> httpx.AsyncBaseTransport:
        """A new way here for an async httpx client (`trainsession.transport.http.Connections`)."""
        return _HomeConnection(self)

    def blocking(self) -> httpx.BaseTransport:
        """The same for a blocking one."""
        return _BlockingHomeConnection(self)

    def ensure(self) -> str:
        """The socket of a service that answers: this process', another's, or one started now. Blocks.

        Raises:
            StorageError: the home cannot be written.
            ConnectionFailed: this handle is closed, the packages to serve are not installed, or the
                serving process does not answer.
        """
        with self._mutex:
            if self._users == 0:
                raise ConnectionFailed("this embedded service was closed")
            if self._thread is not None:
                if self._thread.is_alive():
                    return self._thread.socket
                self._stop()  # it failed; the reason is in the log
            if self._run is None:
                self._run = prepare(self.home)
            return self._join_or_serve(self._run)

    def close(self) -> None:
        """End one use of it; with the last one a service that runs here shuts down cleanly."""
        with self._mutex:
            self._users = max(0, self._users - 1)
            if self._users == 0:
                self._stop()

    def _join_or_serve(self, run: Path) -> str:
        deadline = time.monotonic() + JOIN_SECONDS
        lock = HomeLock(run)
        while True:
            if lock.acquire():
                self._lock = lock
                self._serve(run)
                assert self._thread is not None
                return self._thread.socket
            location = published(run)
            if location is not None and location.answers():
                return location.socket
            if time.monotonic() > deadline:
                who = f"process {location.pid}" if location else "another process"
                raise ConnectionFailed(f"{who} holds {self.home} but has not answered for {JOIN_SECONDS:.0f} s")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _serve(self, run: Path) -> None:
        try:
            require(SERVER_MODULES)
            open_host = self._open_host or local_host
            from .serving import ServiceThread

            self._thread = ServiceThread(self.home, run, open_host)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def stop_at_exit(self) -> None:
        with self._mutex:
            self._users = 0
            self._stop()

    def after_fork(self) -> None:
        """In the child: the thread, its sockets and the lock are the parent's."""
        self._mutex = threading.Lock()
        if self._lock is not None:
            self._lock.forget()
            self._lock = None
        if self._thread is not None:
            self._thread.disown()
            # Never freed here, not even at exit: closing the parent's database and event loop from
            # the child would reach into what the parent still uses.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._thread))
            self._thread = None


class _HomeConnection(httpx.AsyncBaseTransport):
    """httpx to whoever serves the home just now: over its socket, or without one if that is us."""

    def __init__(self, service: EmbeddedService) -> None:
        self._service = service
        self._inner: httpx.AsyncHTTPTransport | None = None
        self._connecting = asyncio.Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        served_here = self._service.in_process
        if served_here is not None and request.extensions.get(WHOLE_ANSWER):
            try:
                return await _call(served_here, request)
            except ConnectionRefusedError:
                pass  # it stops this very moment: as with any other server that is gone
        inner = self._inner or await self._connect(None)
        try:
            return await inner.handle_async_request(request)
        except httpx.ConnectError:
            # The server is gone, and nothing of this request was sent.
            inner = await self._connect(inner)
            return await inner.handle_async_request(request)

    async def _connect(self, broken: httpx.AsyncHTTPTransport | None) -> httpx.AsyncHTTPTransport:
        async with self._connecting:
            if self._inner is broken or self._inner is None:
                socket = await asyncio.to_thread(self._service.ensure)
                if broken is not None:
                    await broken.aclose()
                self._inner = httpx.AsyncHTTPTransport(uds=socket, verify=False, limits=LIMITS)
            return self._inner

    async def aclose(self) -> None:
        if self._inner is not None:
            await self._inner.aclose()


class _BlockingHomeConnection(httpx.BaseTransport):
    """The same for blocking clients, always over the socket."""

    def __init__(self, service: EmbeddedService) -> None:
        self._service = service
        self._inner: httpx.HTTPTransport | None = None
        self._connecting = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        inner = self._inner or self._connect(None)
        try:
            return inner.handle_request(request)
        except httpx.ConnectError:
            return self._connect(inner).handle_request(request)

    def _connect(self, broken: httpx.HTTPTransport | None) -> httpx.HTTPTransport:
        with self._connecting:
            if self._inner is broken or self._inner is None:
                # Not closed: another thread may read a stream of it. It ends with its last answer.
                self._inner = httpx.HTTPTransport(uds=self._service.ensure(), verify=False, limits=LIMITS)
            return self._inner

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


async def _call(service: InProcess, request: httpx.Request) -> httpx.Response:
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    seconds = request.extensions["timeout"]["read"]
    try:
        async with asyncio.timeout(seconds):
            answer = await service.call(request.method, request.url.raw_path, headers, await request.aread())
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no answer within {seconds} s", request=request) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise httpx.RemoteProtocolError("the service stopped before it answered", request=request) from None
    return httpx.Response(answer.status, headers=answer.headers, content=b"".join(answer.parts))


_services: dict[Path, EmbeddedService] = {}
_registry = threading.Lock()


def open_embedded(home: Path | None = None, *, open_host: OpenHost | None = None) -> EmbeddedService:
    """The service of a home, one object a process; call its ``close()`` as often as this.

    Nothing is started or written before its first request.

    Args:
        home: Default: ``$TRAINSESSION_HOME``, or ``~/.trainsession``.
        open_host: Makes the engine host if this process comes to serve; default: local models.
    """
    path = (default_home() if home is None else Path(home)).absolute()
    with _registry:
        service = _services.get(path)
        if service is None:
            service = _services[path] = EmbeddedService(path, open_host)
        service._users += 1
        return service


def local_host() -> EngineHost:
    """Engines for the models of this machine, on threads of this process."""
    return _host(processes=False)


def engine_processes(model_cache: Path | None = None) -> EngineHost:
    """The same, each in a process of its own."""
    return _host(processes=True, model_cache=model_cache)


def _host(*, processes: bool, model_cache: Path | None = None) -> EngineHost:
    require(_ENGINE_MODULES)
    from ..runtime.host import LocalHost

    return LocalHost(processes=processes, model_cache=model_cache)


def require(modules: tuple[str, ...]) -> None:
    """Raise `ConnectionFailed` with the line to type when one of the modules is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConnectionFailed(
            f"the embedded service needs {', '.join(missing)}: pip install 'trainsession[local]'; "
            "or give base_url= (or TRAINSESSION_BASE_URL) to use a service elsewhere"
        )


def _close_all() -> None:
    for service in list(_services.values()):
        service.stop_at_exit()


def _after_fork() -> None:
    global _registry
    _registry = threading.Lock()
    for service in _services.values():
        service.after_fork()


os.register_at_fork(after_in_child=_after_fork)
# Closing a service needs worker threads, and concurrent.futures refuses new work once the
# interpreter begins to join threads, which is before atexit. Its own hook runs at that very moment;
# ours, registered later, runs just before it.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
