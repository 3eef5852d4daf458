"""What a program is graded by."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Python statements that call the program's functions and raise where an answer is wrong.

    They run in a process of their own; calls reach the program's process as plain data (None, numbers,
    strings, bytes, lists, tuples, sets, dicts), so a change that a function makes to its argument is not
    seen. Objects of the program's classes can be made, passed back and read, and compare with nothing.
    """

    tests: Sequence[str]
    """At least one. Each starts afresh from `setup` and passes if it runs to its end."""
    names: Sequence[str]
    """The names that come from the program. Every other name is the tests' own or Python's."""
    setup: str = ""
    """Imports and helpers of the tests."""

    def __post_init__(self) -> None:
        if isinstance(self.tests, str) or not self.tests:
            raise ValueError("a program without tests would pass: give at least one, as a list of strings")
        if isinstance(self.names, str) or not self.names:
            raise ValueError("names: say, as a list, which names the tests take from the program")
        for number, code in enumerate([self.setup, *self.tests]):
            try:
                parsed(code)
            except SyntaxError as error:
                raise ValueError(f"{f'test {number - 1}' if number else 'setup'} is not Python: {error}") from None


@dataclass(frozen=True, slots=True)
class InputOutput:
    """An input, and the output that is expected."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class OutputTests:
    """The program is run once on each input, in a fresh process, and what it prints is compared."""

    cases: Sequence[InputOutput]
    """At least one."""
    tolerance: float | None = None
    """Error, absolute or relative, that is allowed in expected numbers that are no integers."""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("a program without tests would pass: give at least one case")


Tests = UnitTests | OutputTests


def parsed(code: str) -> ast.Module:
    """The syntax of somebody else's code, without a warning about its escape sequences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)
