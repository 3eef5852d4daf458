"""Serving a home: the service, its private socket, and what else should listen."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine.api import EngineHost
from ..errors import ServiceUnavailable, StorageError
from ..server.auth import allow_all, by_key
from ..server.guard import LOOPBACK_HOSTS
from ..server.in_process import InProcess
from ..server.running import Server, bind_unix
from ..service.service import Service
from ..service.settings import Settings
from .home import Location, new_socket_path, publish, withdraw

log = logging.getLogger("trainsession.embedded")

OnReady = Callable[[str, Server], None]


async def serve_home(
    home: Path,
    run: Path,
    open_host: Callable[[], EngineHost],
    on_ready: OnReady,
    listeners: Sequence[socket.socket] = (),
    *,
    with_keys: bool = False,
    database: str | None = None,
    blobs: str | None = None,
    advertise: str | None = None,
    settings: Settings | None = None,
) -> None:
    """Serve a home until the server is stopped. The caller holds the home's lock.

    The private socket asks for no key: who can reach it can read the home.

    Args:
        run: The home's ``run`` directory (`home.prepare`).
        open_host: Makes the engine host, on this event loop.
        on_ready: Called with the path of the private socket and the server once both listen; stopping
            that server stops all.
        listeners: Further listening sockets; closed at the end. Without keys on loopback only.
        with_keys: The further sockets ask for API keys.
        database, blobs, advertise, settings: See `Service.open`.

    Raises:
        StorageError: the home or its socket cannot be written.
        IncompatibleVersion: a newer version wrote the home's database.
        ServiceUnavailable: another server on the database keeps this one from starting, or has replaced it.
    """
    service = await Service.open(
        home, open_host(), database=database, blobs=blobs, advertise=advertise, settings=settings
    )
    try:
        private, location = _listen(run)
        try:
            server = Server(service, authenticate=allow_all, hosts=LOOPBACK_HOSTS)
            if with_keys:
                # Two applications, so that no request can be taken for one of the other kind.
                keyed = Server(service, authenticate=by_key(service.keys), hosts=None)
                keyed.companions.append(server)
                on_ready(location.socket, keyed)
                await _serve_together(service, (keyed, listeners), (server, [private]))
            else:
                on_ready(location.socket, server)
                await _serve_together(service, (server, [private, *listeners]))
            if service.lease.lost.is_set():
                raise ServiceUnavailable(
                    "this server did not renew its lease in time and was replaced by another one on its database, "
                    "which has its sessions now; start it again to take part anew"
                )
        finally:
            private.close()
            withdraw(run, location)
    finally:
        await service.close()


async def _serve_together(service: Service, *servers: tuple[Server, Sequence[socket.socket]]) -> None:
    """Until the first of them stops, and with it all; or until another server has replaced this one."""
    tasks = [asyncio.create_task(server.serve(sockets=list(sockets))) for server, sockets in servers]
    replaced = asyncio.create_task(service.lease.lost.wait())
    try:
        await asyncio.wait([*tasks, replaced], return_when=asyncio.FIRST_COMPLETED)
    finally:
        replaced.cancel()
        for server, _ in servers:
            server.stop()
        await asyncio.gather(*tasks)


def _listen(run: Path) -> tuple[socket.socket, Location]:
    try:
        location = Location(socket=new_socket_path(run), pid=os.getpid())
        private = bind_unix(location.socket)
        publish(run, location)
    except OSError as error:
        raise StorageError(f"no socket can be made in {run}: {error.strerror}") from error
    return private, location


class ServiceThread:
    """Serves a home from construction until `stop`, on a daemon thread. See `serve_home`."""

    def __init__(self, home: Path, run: Path, open_host: Callable[[], EngineHost]) -> None:
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        ready: concurrent.futures.Future[str] = concurrent.futures.Future()

        def on_ready(path: str, server: Server) -> None:
            self._loop, self._server = asyncio.get_running_loop(), server
            ready.set_result(path)

        def main() -> None:
            try:
                asyncio.run(serve_home(home, run, open_host, on_ready))
            except BaseException as error:
                if ready.done():
                    log.exception("the embedded service of %s failed", home)
                else:
                    ready.set_exception(error)

        # A daemon: the interpreter must not wait for it at exit, where `stop` is called instead.
        self._thread = threading.Thread(target=main, name="trainsession-service", daemon=True)
        self._thread.start()
        self.socket = ready.result()

    @property
    def in_process(self) -> InProcess:
        """The way to the service for this process' own threads."""
        assert self._server is not None
        return self._server.in_process

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let running requests end, close the service (live sessions are snapshot), and wait for it."""
        if self._loop is not None and self._server is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()

    def disown(self) -> None:
        """In a forked child: let go of the parent's sockets, so that they end when the parent does.

        Each descriptor is pointed at /dev/null instead of closed: objects that still hold its
        number would otherwise close what comes to live under it later.
        """
        sockets = [] if self._server is None else self._server.descriptors()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in sockets:
            os.dup2(null, fd, inheritable=False)
        os.close(null)
