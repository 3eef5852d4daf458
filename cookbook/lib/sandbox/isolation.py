"""The command that starts an interpreter out of reach of everything else.

bubblewrap gives it namespaces of its own: no network, no other processes (there is no `/proc` either),
a read-only file system with `/usr`, this interpreter's library and a scratch directory of limited size
in memory. `prlimit` bounds what it uses, a seccomp filter what it may ask of the kernel.

A user other than root gets a user namespace (and the filter refuses any more of them). Root needs none, and
steps down to an unused user with util-linux's `setpriv`, without a capability left.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import seccomp
from .limits import Limits
from .verdict import SandboxUnavailable, printable

INSIDE = Path(__file__).parent / "inside"
SCRATCH = "/scratch"
PROBE_SECONDS = 30
UNUSED_USERS = range(61184, 65520)  # systemd's dynamic users: nobody's on a machine with or without systemd

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set of strings is the same in every run
    "MALLOC_ARENA_MAX": "1",  # or each thread of a program takes 64 MB of its address space
}


def interpreter() -> Path:
    """The one that a virtual environment was made of, which needs no other folder than its own."""
    return Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))


def python_command(script: str, directory: str) -> list[str]:
    """Without `site`: programs have the standard library, whatever is installed here, and start twice as fast."""
    return [str(interpreter()), "-S", "-s", "-B", f"{directory}/{script}"]


def sandboxed(script: str, limits: Limits, filter_fd: int) -> list[str]:
    """The command of one of the scripts in `inside/`; its arguments may follow.

    Args:
        script: Name of the file.
        limits: Of its process.
        filter_fd: Where bubblewrap reads the seccomp filter; the child inherits it.
    """
    root = os.geteuid() == 0
    privileges = ["--cap-drop", "ALL"]
    step_down: list[str] = []
    if root:
        privileges += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = str(random.SystemRandom().choice(UNUSED_USERS))
        step_down = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--"]
    else:
        privileges += ["--unshare-user"]
    return [
        shutil.which("bwrap") or "bwrap",
        *privileges,
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session"),
        *system_files(),
        *("--ro-bind", str(INSIDE), "/inside", "--perms", "0755", "--dir", "/dev"),
        *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"),
        *("--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH),
        *("--symlink", SCRATCH, "/tmp"),
        *("--remount-ro", "/", "--chdir", SCRATCH),
        *("--seccomp", str(filter_fd), "--"),
        *step_down,
        *limits.command(count_threads=True),
        *python_command(script, "/inside"),
    ]


def unsandboxed(script: str, limits: Limits) -> list[str]:
    """The same without isolation. Threads are not counted: here they would be all that the user has."""
    return [*limits.command(count_threads=False), *python_command(script, str(INSIDE))]


@cache
def system_files() -> tuple[str, ...]:
    """bubblewrap's arguments for the files that an interpreter needs, all read-only."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    # Folders are made by name: those that bubblewrap makes on its way only root can enter.
    arguments += ["--perms", "0755", "--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not interpreter().is_relative_to("/usr"):
        # Not the whole prefix, which may be somebody's home.
        prefix = Path(sys.base_prefix)
        folders = {prefix / name for name in ("lib", sys.platlibdir) if (prefix / name).is_dir()}
        for parent in sorted({*prefix.parents, prefix, prefix / "bin"} - {Path("/")}):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        for path in sorted({*folders, interpreter()}):
            arguments += ["--ro-bind", str(path.resolve()), str(path)]
    return tuple(arguments)


@cache
def unavailable() -> str | None:
    """Why programs cannot be isolated on this machine, found out by trying; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux, this is {sys.platform}"
    if not seccomp.supported():
        return f"the sandbox has no table of system calls for {os.uname().machine} (x86_64, aarch64)"
    needed = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
    missing = [f"{command} (package {package})" for command, package in needed.items() if not shutil.which(command)]
    if missing:
        return f"missing: {', '.join(missing)}"
    try:
        done = _probe()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"an empty program did not run: {error}"
    if done.returncode or done.stdout != b"up\n":
        said = printable(done.stderr.decode(errors="replace").strip(), 400) or f"exit status {done.returncode}"
        return (
            f"bubblewrap does not work here: {said}. Containers often forbid namespaces (Docker needs "
            "--security-opt seccomp=unconfined and --cap-add SYS_ADMIN, or user namespaces allowed), and so may "
            "the kernel (sysctl kernel.apparmor_restrict_unprivileged_userns, kernel.unprivileged_userns_clone)"
        )
    return None


def _probe() -> subprocess.CompletedProcess[bytes]:
    with FilterPipe() as filter_fd:
        command = sandboxed("probe.py", Limits(), filter_fd)
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=ENVIRONMENT,
            pass_fds=(filter_fd,),
            timeout=PROBE_SECONDS,
        )


class FilterPipe:
    """The seccomp filter on a pipe, for one start of bubblewrap."""

    def __enter__(self) -> int:
        self._read, write = os.pipe()
        with open(write, "wb") as pipe:
            pipe.write(seccomp.program())
        return self._read

    def __exit__(self, *_: object) -> None:
        os.close(self._read)


def require(allow_unsandboxed: bool) -> bool:
    """Whether to isolate.

    Raises:
        SandboxUnavailable: it cannot be done, and running without was not allowed (or needs Linux, too).
    """
    reason = unavailable()
    if reason is None:
        return True
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"{reason}, and so do its limits; grade on a Linux machine or in a virtual one")
    if not allow_unsandboxed:
        raise SandboxUnavailable(
            f"{reason}. Code that a model wrote is not run unsandboxed unless you say so: "
            "Sandbox(allow_unsandboxed=True), on a machine with nothing to lose"
        )
    return False
