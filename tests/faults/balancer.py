"""A TCP load balancer as they are in front of servers: round-robin over those whose ``/readyz`` answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import httpx

_CHECK_SECONDS = 0.3
_ANSWER_SECONDS = 1.5


class Balancer:
    """Connections to a server that no longer answers are closed, so that their clients come again."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._healthy: dict[int, bool] = dict.fromkeys(ports, False)
        self._open: dict[int, list[socket.socket]] = {port: [] for port in ports}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopping = threading.Event()
        for port in ports:
            threading.Thread(target=self._check, args=(port,), daemon=True).start()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, seconds: float = 120.0) -> None:
        """Until all are healthy."""
        deadline = time.monotonic() + seconds
        while not all(self._healthy.values()):
            assert time.monotonic() < deadline, f"not ready: {self._healthy}"
            time.sleep(0.05)

    def close(self) -> None:
        self._stopping.set()
        self._listener.close()
        for port in self._open:
            self._drop(port)

    def _check(self, port: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_ANSWER_SECONDS, trust_env=False) as client:
            while not self._stopping.wait(_CHECK_SECONDS):
                try:
                    self._healthy[port] = client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    self._healthy[port] = False
                if not self._healthy[port]:
                    self._drop(port)

    def _drop(self, port: int) -> None:
        dropped, self._open[port] = self._open[port], []
        for connection in dropped:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            for port in itertools.islice(self._ports, len(self._healthy)):
                if not self._healthy[port]:
                    continue
                with contextlib.suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", port), 2)
                    server.settimeout(None)
                    self._open[port] += [client, server]
                    threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                    threading.Thread(target=_pump, args=(server, client), daemon=True).start()
                    break
            else:
                client.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def balanced(ports: Sequence[int]) -> Iterator[Balancer]:
    balancer = Balancer(ports)
    try:
        yield balancer
    finally:
        balancer.close()
