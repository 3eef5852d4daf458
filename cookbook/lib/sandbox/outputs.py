"""Grading by what a program prints: a fresh process for each input, compared here."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

from .calls import death, memory_fd, timed_out
from .compare import same_output
from .process import Memory, Process, Setting
from .tests import InputOutput, OutputTests
from .verdict import Outcome, Verdict, printable


def grade_outputs(source: bytes, tests: OutputTests, setting: Setting) -> Verdict:
    """Runs the program on each input; after a timeout, on no more. Raises SandboxFailed."""
    passed, seconds = 0, 0.0
    wrong: tuple[Outcome, str] | None = None
    for number, case in enumerate(tests.cases, 1):
        started = time.monotonic()
        kind, reason = run_case(source, case, tests.tolerance, setting)
        seconds += time.monotonic() - started
        if kind is Outcome.PASSED:
            passed += 1
        else:
            wrong = wrong or (kind, f"input {number}: {reason}")
        if kind is Outcome.TIMEOUT:
            break
    kind, reason = wrong or (Outcome.PASSED, "")
    return Verdict(kind, passed, len(tests.cases), printable(reason), seconds)


def run_case(source: bytes, case: InputOutput, tolerance: float | None, setting: Setting) -> tuple[Outcome, str]:
    limits = setting.limits
    with ExitStack() as stack:
        given = Memory(case.input.encode())
        stack.callback(given.close)
        process = stack.enter_context(Process("program.py", setting, [memory_fd(stack, source)], given))
        process.wait_until_up()
        started = time.monotonic()
        status = process.wait(started + limits.wall_seconds)
        if status is None:
            return timed_out(limits)
        if process.stdout.size >= limits.file_bytes:
            return Outcome.OUTPUT, f"printed {limits.file_bytes} bytes or more"
        if status > 128 and status <= 128 + max(signal.Signals):
            return death(status, time.monotonic() - started, limits)
        if status:
            said = process.stderr.last_line() or f"exit status {status}"
            return (Outcome.MEMORY if said.startswith("MemoryError") else Outcome.ERROR), said
        if not same_output(case.output, process.stdout.read(limits.file_bytes), tolerance):
            return Outcome.FAILED, "another output was expected"
        return Outcome.PASSED, ""
