"""Runs code that a model wrote, and grades it where it cannot touch the grade.

    with Sandbox() as sandbox:
        tests = UnitTests(["assert add(2, 3) == 5", "assert add(-1, 1) == 0"], names=["add"])
        verdict = sandbox.grade("def add(a, b): return a + b", tests)
        verdict.reward, verdict.outcome, verdict.tests_passed        # 1.0, passed, 2

A program runs in bubblewrap's namespaces with limits on CPU, wall time, memory, files and threads
(`isolation.py`, `limits.py`, `seccomp.py`). Unit tests run in a second sandbox and call the program over a
pipe with plain data (`calls.py`); what a program prints is compared in this process (`outputs.py`). Neither
the expected values nor the verdict is ever where the program is. docs/sandbox.md.
"""

from .limits import Limits
from .sandbox import Sandbox
from .tests import InputOutput, OutputTests, UnitTests
from .verdict import Outcome, SandboxError, SandboxFailed, SandboxUnavailable, Verdict

__all__ = [
    "InputOutput",
    "Limits",
    "Outcome",
    "OutputTests",
    "Sandbox",
    "SandboxError",
    "SandboxFailed",
    "SandboxUnavailable",
    "UnitTests",
    "Verdict",
]
