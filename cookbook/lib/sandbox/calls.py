"""Grading by unit tests: two sandboxes, the program's and the tests', and two pipes between them."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack

from .limits import Limits
from .process import Memory, Process, Setting, readable
from .tests import UnitTests
from .verdict import Outcome, Verdict, printable

MOST_OF_A_REPORT = 16 << 20


def grade_calls(source: bytes, tests: UnitTests, setting: Setting) -> Verdict:
    """Runs the tests against the program. Raises SandboxFailed."""
    suite = {"tests": list(tests.tests), "names": list(tests.names), "setup": tests.setup}
    limits, count = setting.limits, len(tests.tests)
    with ExitStack() as stack:
        source_fd, suite_fd = (memory_fd(stack, content) for content in (source, json.dumps(suite).encode()))
        report, report_end = os.pipe()
        stack.callback(os.close, report)
        with ExitStack() as theirs:  # once both have started, only they hold these
            theirs.callback(os.close, report_end)
            calls, calls_end = pipe(theirs)
            replies, replies_end = pipe(theirs)
            program = stack.enter_context(Process("program.py", setting, [source_fd, calls, replies_end]))
            judge = stack.enter_context(Process("judge.py", setting, [suite_fd, replies, calls_end, report_end]))
        for process in (program, judge):
            process.wait_until_up()
        started = time.monotonic()
        lines, in_time = read_lines(report, started + limits.wall_seconds)
        seconds = time.monotonic() - started
        results = [(Outcome(kind), str(reason)) for kind, reason in map(json.loads, lines)]
        passed = sum(kind is Outcome.PASSED for kind, _ in results)
        wrong = next((result for result in results if result[0] is not Outcome.PASSED), None)
        if wrong is None and passed < count:
            wrong = timed_out(limits) if not in_time else (Outcome.CRASHED, "the tests ended early")
        if wrong and wrong[0] is Outcome.CRASHED and (status := program.wait(time.monotonic() + 1)) is not None:
            wrong = death(status, seconds, limits)
    kind, reason = wrong or (Outcome.PASSED, "")
    return Verdict(kind, passed, count, printable(reason), seconds)


def timed_out(limits: Limits) -> tuple[Outcome, str]:
    return Outcome.TIMEOUT, f"not done after {limits.wall_seconds:g} s"


def death(status: int, seconds: float, limits: Limits) -> tuple[Outcome, str]:
    """What an exit status says of a program that should have gone on."""
    by_force = status == 128 + signal.SIGKILL and seconds >= limits.cpu_seconds  # who ignores the first signal
    if by_force or status == 128 + signal.SIGXCPU:
        return Outcome.TIMEOUT, f"out of CPU time ({limits.cpu_seconds} s)"
    if status > 128:
        return Outcome.CRASHED, f"ended by {name_of_signal(status - 128)}"
    return Outcome.CRASHED, f"ended with exit status {status}"


def name_of_signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def read_lines(fd: int, deadline: float) -> tuple[list[bytes], bool]:
    """The whole lines until the end, and whether that came before the deadline."""
    data = bytearray()
    while readable(fd, deadline):
        piece = os.read(fd, 1 << 16)
        data += piece
        if not piece or len(data) > MOST_OF_A_REPORT:
            return data.split(b"\n")[:-1], True  # type: ignore[return-value]
    return data.split(b"\n")[:-1], False  # type: ignore[return-value]


def memory_fd(stack: ExitStack, content: bytes) -> int:
    memory = Memory(content)
    stack.callback(memory.close)
    return memory.fd


def pipe(stack: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends
