"""What stands between a database's clients and its server, and breaks connections when it is told to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tests.postgres import PostgresServer

_SOCKET = ".s.PGSQL.5432"


def through(server: PostgresServer, url: str) -> str:
    """The URL of the same database behind the server's `PostgresProxy`."""
    return url.replace(str(server.directory), f"{server.directory}/proxy")


class PostgresProxy:
    """A Unix socket before the server's that can cut a connection around its next COMMIT."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = str(server.directory)
        self._own = f"{self._server}/proxy"
        Path(self._own).mkdir(exist_ok=True)
        Path(self._own, _SOCKET).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._own}/{_SOCKET}")
        self._listener.listen()
        self.cut: Literal["", "before", "after"] = ""
        """The next COMMIT does not reach the server; or it does, and the answer does not come back."""
        self.refuse = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuse:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{self._server}/{_SOCKET}")
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if b"COMMIT\0" in data and self.cut:
                    how, self.cut = self.cut, ""
                    client.shutdown(socket.SHUT_RDWR)
                    if how == "after":
                        server.sendall(data)
                    break
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
