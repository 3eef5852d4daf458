"""A TCP proxy that breaks what passes through it, in one of the ways that networks and servers do."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Literal

Fault = Literal["none", "refuse", "stall", "error", "conflict", "reset", "cut answer", "cut request", "lose answer"]
_RESET = struct.pack("ii", 1, 0)
_SAID = {
    "error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "conflict": b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


class Proxy:
    """Listens on a port of its own from construction until `close`.

    Attributes:
        fault: What happens to connections from now on; those that are open are closed when it is set.
        times: Connections that the fault still hits; None: all.
        cut_at: Bytes that pass, of each connection, before ``cut ...`` closes it.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self.fault: Fault = "none"
        self.times: int | None = None
        self.cut_at = 0
        self.hits = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, fault: Fault, *, times: int | None = None, cut_at: int = 0) -> None:
        self.times, self.cut_at, self.hits = times, cut_at, 0
        self.fault = fault
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.set("none")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _fault_of_this(self) -> Fault:
        with self._lock:
            if self.fault == "none" or self.times == 0:
                return "none"
            if self.times is not None:
                self.times -= 1
            self.hits += 1
            return self.fault

    def _serve(self, client: socket.socket) -> None:
        fault = self._fault_of_this()
        with client:
            if fault in ("refuse", "reset"):
                if fault == "reset":
                    client.recv(1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
            if fault in _SAID:
                _read_request(client)
                client.sendall(_SAID[fault])
                return
            with self._lock:
                self._open.add(client)
            try:
                if fault == "stall":
                    while client.recv(1 << 16):  # until it is closed from either side
                        pass
                    return
                self._pass(client, fault)
            except OSError:
                pass
            finally:
                with self._lock:
                    self._open.discard(client)

    def _pass(self, client: socket.socket, fault: Fault) -> None:
        with socket.create_connection(self._target) as server:
            with self._lock:
                self._open.add(server)
            up = threading.Thread(
                target=_copy, args=(client, server, self.cut_at if fault == "cut request" else None), daemon=True
            )
            up.start()
            try:
                if fault == "lose answer":
                    server.recv(1)  # it answered, so it has done it
                    time.sleep(0.05)
                else:
                    _copy(server, client, self.cut_at if fault == "cut answer" else None)
            finally:
                for end in (client, server):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                up.join()
                with self._lock:
                    self._open.discard(server)


def _copy(source: socket.socket, target: socket.socket, bound: int | None) -> None:
    passed = 0
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if bound is not None and passed + len(data) > bound:
                target.sendall(data[: bound - passed])
                break
            target.sendall(data)
            passed += len(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _read_request(client: socket.socket) -> None:
    """Head and body, so that the answer is read instead of a broken pipe."""
    with client.makefile("rb") as stream:
        length = 0
        while (line := stream.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
            if line == b"expect: 100-continue":
                return
        stream.read(length)
