"""A process that imports everything once and forks services and engines: half a second each, not eight.

Nothing of the product is changed by it. A fork runs what `trainsession serve` and `trainsession.runtime.worker`
run, with their own processes, sockets, signals and deaths; only the import of torch is shared.

    with Nursery(directory, model) as nursery:
        child = nursery.serve(["--dev", "--port", "8765", "--home", str(home)], {"TRAINSESSION_CRASH": ...})
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10) == -9
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults import points

ADDRESS = "TRAINSESSION_NURSERY"
"""Environment variable with the path of a nursery's socket."""
ENGINE = "engine"
"""File in a trial's directory with the process id of its newest engine."""
EVERY_OPERATIONS = 3
INLINE_BYTES = 2048
TOKEN_BUDGET = 48
"""Bodies and results above it are blobs here, so that small batches have some; and a pass has several microbatches."""


class Child:
    """A forked process; ``wait`` gives its exit status, negative for a signal."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._fd = status
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """None: it still runs after so many seconds."""
        if self._status is None and select.select([self._fd], [], [], timeout)[0]:
            self._status = int(os.read(self._fd, 16) or b"-9")
            os.close(self._fd)
        return self._status


class Nursery:
    """
    Args:
        directory: For its socket and its log.
        model: Directory of the model that the engines will load.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._address = str(directory / "nursery")
        self._log = (directory / "nursery.log").open("ab")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "tests.faults.nursery", self._address, model]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", Path(self._log.name).read_text()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # its order to end, as for whoever is left of its children
        self._process.wait(60)
        self._log.close()

    def serve(self, arguments: list[str], environment: dict[str, str], log: Path) -> Child:
        """`trainsession serve` with these arguments."""
        return _ask(self._address, {"serve": arguments, "environment": environment, "log": str(log)})


def _ask(address: str, request: dict[str, Any], fds: list[int] | None = None) -> Child:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode()], fds or [])
        answer, (status,), _, _ = socket.recv_fds(connection, 1024, 1)
        return Child(int(answer), status)


# --- in the nursery --------------------------------------------------------------------------


def _main(address: str, model: str) -> None:
    points.instrument()
    from trainsession.engine.engine import LocalEngine

    LocalEngine.load(model, name="warm", device="cpu", dtype="float32")  # transformers imports much when it is used
    import trainsession.cli
    import trainsession.runtime.process  # imported by the service when it needs it
    import trainsession.runtime.worker
    import trainsession.transport.foreground  # noqa: F401 - for the forks

    os.environ[ADDRESS] = address
    running: dict[int, int] = {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake.fileno())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, woken, sys.stdin], [], [])
            if sys.stdin in ready:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            if woken in ready:
                woken.recv(4096)
                _reap(running)
            if listener in ready:
                connection, _ = listener.accept()
                with connection:
                    _fork(connection, running)


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = running.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(told)


def _fork(connection: socket.socket, running: dict[int, int]) -> None:
    try:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    except ConnectionError:
        data, fds = b"", []
    if not data:
        return  # who asked was killed as it asked
    status, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(json.loads(data), fds)
    running[pid] = told
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(OSError):  # killed meanwhile: an engine without its service ends
        socket.send_fds(connection, [str(pid).encode()], [status])
    os.close(status)


def _live(request: dict[str, Any], fds: list[int]) -> None:
    """The child; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        log = os.open(request["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        keep = sorted({2, *fds})
        for low, high in zip(keep, [*keep[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        os.environ.update(request["environment"])
        if "engine" in request and points.DIRECTORY in os.environ:
            Path(os.environ[points.DIRECTORY], ENGINE).write_text(str(os.getpid()))
        points.start()
        code = _engine(fds[0]) if "engine" in request else _service(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _engine(fd: int) -> int:
    from trainsession.engine import trainer
    from trainsession.runtime import worker

    trainer.CPU_BUDGET_BYTES = TOKEN_BUDGET * 4
    worker.main(fd)
    return 0


def _service(request: dict[str, Any]) -> int:
    from trainsession.cli import app
    from trainsession.service import service
    from trainsession.service.settings import Settings
    from trainsession.store import store

    service.Settings = functools.partial(Settings, snapshot_every_operations=EVERY_OPERATIONS)  # type: ignore[misc]
    store.INLINE_BYTES = INLINE_BYTES
    asyncio.create_subprocess_exec = functools.partial(_start_engine, request)
    app(["serve", *request["serve"]], standalone_mode=False)
    return 0


async def _start_engine(request: dict[str, Any], *command: str, pass_fds: list[int], **_: Any) -> _EngineChild:
    """In place of a new interpreter for `trainsession.runtime.worker`."""
    assert "trainsession.runtime.worker" in command
    asked = {"engine": True, "environment": request["environment"], "log": request["log"]}
    return _EngineChild(_ask(os.environ[ADDRESS], asked, pass_fds))


class _EngineChild:
    """What `trainsession.runtime.process` needs of an asyncio process."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.wait(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        return await asyncio.to_thread(self._child.wait)


if __name__ == "__main__":
    _main(*sys.argv[1:])
