"""How much a program may use."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one process; a program under unit tests is one, and each run on an input is one."""

    cpu_seconds: int = 10
    wall_seconds: float = 20.0
    """From the moment that the program's interpreter is up, all unit tests together."""
    memory_bytes: int = 512 * MIB
    """Of address space. A program is one process, so this is all that it has beside its scratch directory."""
    file_bytes: int = 4 * MIB
    """Of any one file, of its output, and of a value that it returns."""
    scratch_bytes: int = 32 * MIB
    """Of the scratch directory, which lies in memory."""
    threads: int = 32
    open_files: int = 64

    def command(self, *, count_threads: bool) -> list[str]:
        """util-linux's `prlimit`, to be put before a command."""
        limits = {
            # One second behind the signal that can be caught comes the one that cannot.
            "cpu": f"{self.cpu_seconds}:{self.cpu_seconds + 1}",
            "as": self.memory_bytes,
            "fsize": self.file_bytes,
            "nofile": self.open_files,
            "core": 0,
            "memlock": 0,
        }
        if count_threads:
            limits["nproc"] = self.threads + 2  # the sandbox's own init process, and the main thread
        return ["prlimit", *(f"--{name}={value}" for name, value in limits.items()), "--"]
