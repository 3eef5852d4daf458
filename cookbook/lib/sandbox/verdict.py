"""What a grading says, and how it can fail to say anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a program did."""

    PASSED = "passed"
    """Every test."""
    FAILED = "failed"
    """It ran, and an answer was wrong."""
    ERROR = "error"
    """It raised, did not compile, or lacks a name that the tests call."""
    TIMEOUT = "timeout"
    """Out of CPU or wall time."""
    MEMORY = "memory"
    """Out of memory."""
    OUTPUT = "output"
    """Its output is too large, or no plain data."""
    CRASHED = "crashed"
    """Its process ended while it should have answered."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one program."""

    outcome: Outcome
    tests_passed: int
    tests: int
    reason: str = ""
    """Of the first test that did not pass. Part of it is the program's own text (printable, at most
    300 characters): show it to a person, don't hand it to a model that judges."""
    seconds: float = 0.0
    """Wall time, without the start of the processes."""

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED

    @property
    def reward(self) -> float:
        """1 where every test passed, else 0."""
        return float(self.passed)


class SandboxError(Exception):
    """No verdict: nothing is known of the program, so it deserves no reward, neither 0 nor 1."""


class SandboxUnavailable(SandboxError):
    """Programs cannot be isolated on this machine; says what is missing."""


class SandboxFailed(SandboxError):
    """A sandbox did not start. Try again: the machine may be out of memory or processes."""


def printable(text: str, limit: int = 300) -> str:
    """The text without anything that a terminal or a log would act on."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown[:limit]
