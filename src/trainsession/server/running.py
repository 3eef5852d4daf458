"""The application on listening sockets, until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Generator

import uvicorn

from ..service.service import Service
from .app import create_app
from .auth import Authenticate
from .deadlines import SlowConnections
from .in_process import InProcess

KEEP_ALIVE_SECONDS = 75
"""A connection on which nothing is asked is closed after so long. Longer than a client keeps one, so that the client
is the one to drop it."""
GRACE_SECONDS = 10
"""A stopping server lets running requests end for so long; long polls and streams end at once."""
BACKLOG = 2048
HEADER_BYTES = 64 * 2**10


class Server(uvicorn.Server):
    """uvicorn with sockets of ours and without signal handlers of its own.

    Must be made on the event loop that will run it, which is the service's.

    Args:
        service: Open; whoever opened it closes it, after `serve` has returned.
        authenticate: The project of a request.
        hosts: See `trainsession.server.app.create_app`.
    """

    def __init__(self, service: Service, *, authenticate: Authenticate, hosts: Collection[str] | None = None) -> None:
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        app = create_app(service, authenticate=authenticate, hosts=hosts, closing=self._closing)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        super().__init__(config)
        self.servers: list[asyncio.Server] = []
        self.in_process = InProcess(app)
        self._forwarder = app.state.forwarder
        self._slow = SlowConnections()
        self.companions: list[Server] = []
        """They stop when this one is told to, and at the same time."""

    def descriptors(self) -> list[int]:
        """File descriptors of all open sockets: the listening ones and the connections."""
        transports = [getattr(connection, "transport", None) for connection in self.server_state.connections]
        sockets = [transport.get_extra_info("socket") for transport in transports if transport is not None]
        listening = [listener for server in self.servers for listener in server.sockets]
        return [sock.fileno() for sock in (*sockets, *listening) if sock is not None and sock.fileno() >= 0]

    def stop(self) -> None:
        """Begin to stop; `serve` returns when running requests have ended."""
        for server in (self, *self.companions):
            server.should_exit = True

    def force(self) -> None:
        """Wait for no request any longer."""
        for server in (self, *self.companions):
            server.should_exit = server.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # a tick is a tenth of a second
            self._slow.end(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._closing.done():
            self._closing.set_result(None)
        await asyncio.gather(super().shutdown(sockets), self.in_process.drain(GRACE_SECONDS))
        await self._forwarder.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn would raise the signal again after it has stopped, while the service still closes.
        yield


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one, with no moment at which another could.

    Raises:
        OSError: the address is in use or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: asyncio turns Nagle's algorithm off only for sockets that say TCP, and
    # what this one accepts says what it says. Otherwise every answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket that only this user reaches; its directory must be private, too."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
