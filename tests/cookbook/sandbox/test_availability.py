"""Where programs cannot be isolated nothing runs, unless one says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.lib.sandbox import Outcome, Sandbox, SandboxFailed, SandboxUnavailable, UnitTests, calls, isolation
from cookbook.lib.sandbox import process as process_module
from cookbook.lib.sandbox.isolation import unavailable
from tests.cookbook.sandbox import escapes

ROOT = Path(__file__).parents[3]
TESTS = UnitTests(["assert f(3) == 9", "assert f(4) == 16"], ["f"])
RIGHT = "def f(n): return n * n"


@pytest.fixture
def asked_again() -> Iterator[None]:
    """What was found out about this machine does not count here, nor this test's later."""
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


@pytest.fixture
def without_bubblewrap(asked_again: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for command in ("prlimit", "setpriv"):
        (tmp_path / command).symlink_to(shutil.which(command) or "")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_bubblewrap_nothing_runs(without_bubblewrap: None):
    with pytest.raises(SandboxUnavailable, match=r"missing: bwrap \(package bubblewrap\).*allow_unsandboxed=True"):
        Sandbox()


def test_without_isolation_only_where_allowed(without_bubblewrap: None):
    with Sandbox(allow_unsandboxed=True) as sandbox:
        assert not sandbox.isolated
        assert sandbox.grade(RIGHT, TESTS).passed
        assert sandbox.grade("def f(n): return 9", TESTS).outcome is Outcome.FAILED
        assert sandbox.grade("def f(n): return bytearray(1 << 40)", TESTS).outcome is Outcome.MEMORY


def test_what_bubblewrap_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A container that forbids namespaces, in the words of bubblewrap."""
    for command in ("prlimit", "setpriv"):
        (tmp_path / command).symlink_to(shutil.which(command) or "")
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = unavailable.__wrapped__()
    assert reason is not None
    assert "bwrap: No permissions to create new namespace. Containers often forbid namespaces" in reason


def test_other_systems_are_told(asked_again: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux, this is darwin"):
        Sandbox(allow_unsandboxed=True)


def test_isolation_is_the_default_where_it_works(sandbox: Sandbox):
    assert sandbox.isolated
    with Sandbox(allow_unsandboxed=True) as allowed:
        assert allowed.isolated


def test_a_sandbox_that_does_not_start_gives_no_verdict(isolating: None, monkeypatch: pytest.MonkeyPatch):
    """An error of its own kind: neither 0 nor 1 would be true."""
    monkeypatch.setattr(process_module, "sandboxed", lambda *_: ["prlimit", "--no-such-option"])
    with Sandbox() as sandbox, pytest.raises(SandboxFailed, match=r"did not start: .*no-such-option"):
        sandbox.grade(RIGHT, TESTS)
    monkeypatch.setattr(process_module, "sandboxed", lambda *_: ["no-such-command"])
    with Sandbox() as sandbox, pytest.raises(SandboxFailed, match="No such file"):
        sandbox.submit(RIGHT, TESTS).result()


def test_no_descriptor_leaks(isolating: None):
    """Counted in a process of its own: in this one other tests' threads open and close theirs."""
    code = (
        "import os\n"
        "from cookbook.lib.sandbox import Sandbox, SandboxFailed, UnitTests, process\n"
        "tests, sandbox, counts = UnitTests(['assert f(3) == 9'], ['f']), Sandbox(), []\n"
        "for _ in range(3):\n"
        "    assert sandbox.grade('def f(n): return n * n', tests).passed\n"
        "    counts.append(len(os.listdir('/proc/self/fd')))\n"
        "process.sandboxed = lambda *_: ['no-such-command']\n"
        "try: sandbox.grade('', tests)\n"
        "except SandboxFailed: counts.append(len(os.listdir('/proc/self/fd')))\n"
        "print(counts)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) == 4
    assert len(set(counts)) == 1, counts


def test_as_a_user_without_privileges(isolating: None):
    """Root's tests, which these are in a container, take another way into the sandbox than everybody else's."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root, to become somebody else, and a python3 that everybody can read")
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout != b"True\n":
        pytest.skip(f"{python} is older than 3.11")
    code = (
        "import json, sys\n"
        "from cookbook.lib.sandbox import Sandbox, UnitTests, isolation\n"
        "if reason := isolation.unavailable(): sys.exit(print(json.dumps({'unavailable': reason})))\n"
        "sandbox = Sandbox()\n"
        "found = [sandbox.grade(code, UnitTests([test], ['f', 'escaped'])) for code, test in json.load(sys.stdin)]\n"
        "print(json.dumps([[str(verdict.outcome), verdict.reason] for verdict in found]))\n"
    )
    nothing = "found = escaped()\nassert not found, found"
    work = [
        (RIGHT, "assert f(3) == 9"),
        ("def f(n): return 0", "assert f(3) == 9"),
        (escapes.THREADS, "assert 30 <= escaped() <= 33"),
        *((program, nothing) for program in (escapes.FILES, escapes.PROCESSES, escapes.PEEK, escapes.MEMORY)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(folder, "cookbook", "lib")
        shutil.copytree(ROOT / "cookbook" / "lib" / "sandbox", copy / "sandbox")
        done = subprocess.run(
            [python, "-c", code],
            input=json.dumps(work),
            capture_output=True,
            text=True,
            check=False,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": folder},
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "unavailable" in answer:
        pytest.skip(answer["unavailable"])
    assert answer == [["passed", ""], ["failed", "AssertionError"], *[["passed", ""]] * 5]


def test_the_command_has_the_limits(isolating: None):
    command = isolation.sandboxed("program.py", calls.Limits(cpu_seconds=7, memory_bytes=1 << 28), 9)
    assert "--cpu=7:8" in command
    assert f"--as={1 << 28}" in command
    assert "--unshare-user" in command or "setpriv" in command
