"""One home, many processes: who serves it, and where.

`run/lock` is held by the process that serves; `run/service.json` says where its socket is. The
lock is an flock: it belongs to the open file, so that it ends with the process however that ends,
and other code that opens and closes the file (a backup) does not release it, as it would a POSIX
lock. A forked child inherits the open file and must drop it (`HomeLock.forget`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..wire import PROTOCOL_VERSION

_MAX_SOCKET_PATH = 100
"""Bytes; the kernel's sockaddr_un holds 108 with its end on Linux, 104 on macOS."""


def default_home() -> Path:
    """``$TRAINSESSION_HOME``, or ``~/.trainsession``."""
    configured = os.environ.get("TRAINSESSION_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".trainsession"


def prepare(home: Path) -> Path:
    """Create the home (0700) and its private ``run`` directory, which is returned.

    Raises:
        StorageError: it cannot be created or written.
    """
    run = home / "run"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.mkdir(mode=0o700, exist_ok=True)
        run.chmod(0o700)
    except OSError as error:
        raise StorageError(
            f"the home {home} cannot be written ({error.strerror}); set TRAINSESSION_HOME to a directory that can"
        ) from error
    return run


class HomeLock:
    """Held by the one process that serves a home."""

    def __init__(self, run: Path) -> None:
        self._path = run / "lock"
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock, if nobody has it."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            raise StorageError(f"{self._path} cannot be locked ({error.strerror}); is it on a local disk?") from error
        self._fd = fd
        return True

    def release(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Close the file. After a fork that leaves the lock with the parent: LOCK_UN would not."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a home's service answers."""

    socket: str
    pid: int

    def answers(self) -> bool:
        """Whether somebody listens there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect(self.socket)
            except OSError:
                return False
            return True


def publish(run: Path, location: Location) -> None:
    """Say where this process serves the home; it holds the lock."""
    body = {"socket": location.socket, "pid": location.pid, "protocol": PROTOCOL_VERSION}
    aside = run / f"service.json.{location.pid}"
    aside.write_text(json.dumps(body))
    os.replace(aside, run / "service.json")


def published(run: Path) -> Location | None:
    """Where the home is served, or was when its last service ended without a goodbye."""
    try:
        body = json.loads((run / "service.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return Location(socket=str(body["socket"]), pid=int(body["pid"]))


def withdraw(run: Path, location: Location) -> None:
    """The opposite of `publish`; removes the socket, too."""
    (run / "service.json").unlink(missing_ok=True)
    path = Path(location.socket)
    path.unlink(missing_ok=True)
    if path.parent != run:
        path.parent.rmdir()


def new_socket_path(run: Path) -> str:
    """A path for the socket: in ``run``, or where that is too long in a private temporary directory."""
    path = run / "service.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        path.unlink(missing_ok=True)  # of a process that was killed: the caller holds the lock
        return str(path)
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_SOCKET_PATH - 40:
            return os.path.join(tempfile.mkdtemp(prefix="trainsession-", dir=parent), "service.sock")
    raise StorageError(f"no path for a socket: {run} and the temporary directory are both too long")
