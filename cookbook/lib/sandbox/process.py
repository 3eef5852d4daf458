"""One interpreter in a sandbox, from its start to its certain end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .isolation import ENVIRONMENT, FilterPipe, sandboxed, unsandboxed
from .limits import Limits
from .verdict import SandboxFailed, printable

START_SECONDS = 60.0  # of an interpreter, on a machine that is busy with other things


@dataclass(frozen=True, slots=True)
class Setting:
    """How processes are run."""

    limits: Limits
    seed: int
    isolate: bool


class Memory:
    """Bytes in memory under a file descriptor: what a process gets to read, or what it wrote.

    A file, so that nobody has to keep a pipe flowing; the limit on file sizes bounds it.
    """

    def __init__(self, content: bytes = b"") -> None:
        self.fd = os.memfd_create("sandbox")
        with open(os.dup(self.fd), "wb") as file:
            file.write(content)
        os.lseek(self.fd, 0, os.SEEK_SET)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, limit: int) -> str:
        return os.pread(self.fd, limit, 0).decode(errors="replace")

    def last_line(self) -> str:
        tail = os.pread(self.fd, 4096, max(0, self.size - 4096)).decode(errors="replace")
        return (tail.strip().splitlines() or [""])[-1]

    def close(self) -> None:
        os.close(self.fd)


class Process:
    """Runs a script of `inside/`. A context manager: at its end the process and all that it started are gone.

    Args:
        script: Name of the file.
        setting: Its limits, its seed, and whether it is isolated.
        fds: What it inherits beside its standard streams, and is told the numbers of.
        stdin: Its input; None for an empty one.

    Raises:
        SandboxFailed: it cannot be started.
    """

    def __init__(self, script: str, setting: Setting, fds: Sequence[int], stdin: Memory | None = None) -> None:
        self._stack = ExitStack()
        try:
            self._start(script, setting, fds, stdin)
        except OSError as error:
            self._stack.close()
            raise SandboxFailed(f"a sandbox did not start: {error}") from error

    def _start(self, script: str, setting: Setting, fds: Sequence[int], stdin: Memory | None) -> None:
        self.stdout, self.stderr = Memory(), Memory()
        self._stack.callback(self.stdout.close)
        self._stack.callback(self.stderr.close)
        self._up, up = os.pipe()
        self._stack.callback(os.close, self._up)
        with ExitStack() as inherited_only:
            inherited_only.callback(os.close, up)
            inherited = [up, *fds]
            if setting.isolate:
                filter_fd = inherited_only.enter_context(FilterPipe())
                inherited.append(filter_fd)
                command, directory, environment = sandboxed(script, setting.limits, filter_fd), None, ENVIRONMENT
            else:
                directory = self._stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="unsandboxed-", ignore_cleanup_errors=True)
                )
                command = unsandboxed(script, setting.limits)
                environment = {**ENVIRONMENT, "HOME": directory, "TMPDIR": directory}
            self._process = subprocess.Popen(
                [*command, *map(str, (setting.seed, setting.limits.file_bytes, up, *fds))],
                stdin=stdin.fd if stdin else subprocess.DEVNULL,
                stdout=self.stdout.fd,
                stderr=self.stderr.fd,
                pass_fds=inherited,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
            self._stack.callback(self._reap)
            self._pidfd = os.pidfd_open(self._process.pid)
            self._stack.callback(os.close, self._pidfd)

    def wait_until_up(self) -> None:
        """Until the script is about to run the program.

        Raises:
            SandboxFailed: it never got there, so that nothing is known of the program.
        """
        deadline = time.monotonic() + START_SECONDS
        if not (readable(self._up, deadline) and os.read(self._up, 2) == b"up"):
            said = printable(self.stderr.read(1000).strip())
            raise SandboxFailed(f"a sandbox did not start: {said or 'it ended without a word'}")

    def wait(self, deadline: float) -> int | None:
        """Its exit status, 128 + the signal where one ended it; None if it still runs at the deadline."""
        if not readable(self._pidfd, deadline):
            return None
        code = self._reap()
        return code if code >= 0 else 128 - code

    def _reap(self) -> int:
        if self._process.returncode is None:  # until it is waited for, its number is nobody else's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # bubblewrap's end is that of its process namespace
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def readable(fd: int, deadline: float) -> bool:
    """Whether there is something to read, or the end, before the deadline (of `time.monotonic`)."""
    waiter = select.poll()  # takes descriptors above 1023
    waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(max(0.0, deadline - time.monotonic()) * 1000))
