"""No program reaches anything but its scratch directory."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path

import pytest

from cookbook.lib.sandbox import Limits, Outcome, Sandbox, UnitTests
from cookbook.lib.sandbox.calls import grade_calls
from cookbook.lib.sandbox.process import Setting
from cookbook.lib.sandbox.seccomp import DENIED, DENIED_EVERYWHERE
from tests.cookbook.sandbox import escapes

NOTHING = UnitTests(["found = escaped()\nassert not found, found  # NEEDLE"], ["escaped"])


def test_no_process_is_seen(sandbox: Sandbox):
    verdict = sandbox.grade(escapes.PEEK, NOTHING)
    assert verdict.passed, verdict


def test_no_network(sandbox: Sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("")  # Linux picks a free abstract name
        abstract.listen()
        code = escapes.NETWORK.replace("PORT", str(server.getsockname()[1]))
        code = code.replace("ABSTRACT", repr(abstract.getsockname()))
        verdict = sandbox.grade(code, NOTHING)
        assert verdict.passed, verdict
        # The same program without isolation does get there: the test can fail.
        loose = grade_calls(code.encode(), NOTHING, Setting(Limits(), 0, isolate=False))
        assert loose.outcome is Outcome.FAILED
        assert "'tcp'" in loose.reason
        assert "'abstract'" in loose.reason


def test_no_file_but_its_own(sandbox: Sandbox, tmp_path: Path):
    canary = tmp_path / "canary"
    canary.write_text("still here")
    verdict = sandbox.grade(escapes.FILES.replace("CANARY", str(canary)), NOTHING)
    assert verdict.passed, verdict
    assert canary.read_text() == "still here"


def test_no_other_process_is_started_or_hit(sandbox: Sandbox):
    verdict = sandbox.grade(escapes.PROCESSES, NOTHING)
    assert verdict.passed, verdict


def test_no_terminal_and_no_link_is_followed(sandbox: Sandbox, tmp_path: Path):
    canary = tmp_path / "canary"
    canary.write_text("still here")
    verdict = sandbox.grade(escapes.TERMINAL.replace("CANARY", str(canary)), NOTHING)
    assert verdict.passed, verdict
    assert canary.read_text() == "still here"


def test_no_more_memory_than_allowed(sandbox: Sandbox):
    verdict = sandbox.grade(escapes.MEMORY, NOTHING)
    assert verdict.passed, verdict


def test_threads_are_counted(sandbox: Sandbox):
    verdict = sandbox.grade(escapes.THREADS, UnitTests(["assert 30 <= escaped() <= 33"], ["escaped"]))
    assert verdict.passed, verdict


def test_tiny_files_end_with_the_time(impatient: Sandbox):
    """Their number has no limit of its own; each is a kilobyte of the kernel's memory until the end."""
    verdict = impatient.grade(escapes.TINY_FILES, UnitTests(["assert escaped() < 0"], ["escaped"]))
    assert verdict.outcome is Outcome.TIMEOUT
    assert verdict.seconds < 10


def test_no_call_for_kernels_to_regret(sandbox: Sandbox):
    numbers = {**DENIED[platform.machine()], **DENIED_EVERYWHERE}
    calls = "\n".join(f"syscall({name!r}, 0, 0, 0, 0, 0)" for name in numbers)
    code = escapes.SYSCALL % numbers + calls + "\nattempt('user namespace', lambda: libc.unshare(0x10000000) + 1)"
    verdict = sandbox.grade(code, NOTHING)
    assert verdict.passed, verdict
    refused = UnitTests([f"assert refused({number}) == {1}" for number in numbers.values()], ["refused"])
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "def refused(number): return libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno()"
    verdict = sandbox.grade(code, refused)  # errno 1: by the filter, not for want of a right argument
    assert verdict.passed, verdict


def test_clone_makes_threads_only(sandbox: Sandbox):
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "def tried(*args): return libc.syscall(*args), ctypes.get_errno()"
    tests = [
        f"assert tried({clone}, 17, 0, 0, 0, 0) == (-1, 1)",  # SIGCHLD: a fork
        f"assert tried({clone}, 0x10000000 | 17, 0, 0, 0, 0) == (-1, 1)",  # with a user namespace
        "assert tried(435, 0, 0) == (-1, 38)",  # clone3
    ]
    verdict = sandbox.grade(code, UnitTests(tests, ["tried"]))
    assert verdict.passed, verdict


def test_nothing_of_the_user_is_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    code = "import os, sys\ndef env(): return dict(os.environ)\ndef fds():\n    found = []\n"
    code += "    for fd in range(200):\n        try: found.append((fd, os.fstat(fd).st_mode >> 12))\n"
    code += "        except OSError: pass\n    return found\ndef argv(): return sys.argv\n"
    tests = [
        "assert not [k for k in env() if 'SECRET' in k or 'PYTEST' in k or 'TRAINSESSION' in k]",
        "assert set(env().values()) <= {'/usr/bin:/bin', '/scratch', 'C.UTF-8', '0', '1'}, env()",
        "assert all(kind != 4 for _, kind in fds()), fds()",  # no directory
        "assert len(fds()) == 5, fds()",  # streams and two pipes
        "assert argv() == ['program.py']",
    ]
    verdict = sandbox.grade(code, UnitTests(tests, ["env", "fds", "argv"]))
    os.close(held)
    assert verdict.passed, verdict


def test_no_capability_is_left(sandbox: Sandbox):
    code = "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef capabilities():\n"
    code += "    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
    code += "    libc.capget(head, data)\n    return list(data)\n"
    code += "def no_new_privileges(): return libc.prctl(39, 0, 0, 0, 0)\ndef groups(): return os.getgroups()\n"
    tests = ["assert capabilities() == [0] * 6", "assert no_new_privileges() == 1", "assert 0 not in groups()"]
    verdict = sandbox.grade(code, UnitTests(tests, ["capabilities", "no_new_privileges", "groups"]))
    assert verdict.passed, verdict


def test_attempts_share_nothing(sandbox: Sandbox):
    for _ in range(2):
        verdict = sandbox.grade(escapes.STAY, NOTHING)
        assert verdict.passed, verdict


def test_nothing_outlives_its_grading(isolating: None):
    seed = 0x5EED0000 + os.getpid()  # on every command line of this test
    setting = Setting(Limits(wall_seconds=0.5, cpu_seconds=100), seed, isolate=True)
    started = time.monotonic()
    code = b"import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nwhile True: pass"
    assert grade_calls(code, NOTHING, setting).outcome is Outcome.TIMEOUT
    assert time.monotonic() - started < 50  # not by its own limit
    deadline = time.monotonic() + 10
    while left := processes_with(str(seed)):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in words:
            found.append(" ".join(words))
    return found
