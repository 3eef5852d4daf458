"""Programs that read their input and print: compared word for word, in a fresh process for each input."""

from __future__ import annotations

import pytest

from cookbook.lib.sandbox import InputOutput, Limits, Outcome, OutputTests, Sandbox
from cookbook.lib.sandbox.compare import same_output

DOUBLE = OutputTests([InputOutput("3\n", "6\n"), InputOutput("5\n", "10\n")])


@pytest.mark.parametrize(
    ("code", "outcome", "passed"),
    [
        ("print(2 * int(input()))", Outcome.PASSED, 2),
        ("import sys\nfor line in sys.stdin: print(' ', 2 * int(line), end='')", Outcome.PASSED, 2),
        ("if __name__ == '__main__':\n    print(int(input()) * 2)\n    exit()", Outcome.PASSED, 2),
        ("print(6)", Outcome.FAILED, 1),
        ("print(2 * int(input()), 'debug')", Outcome.FAILED, 0),
        ("", Outcome.FAILED, 0),
        ("print(2 * int(input()))\nraise SystemExit(3)", Outcome.ERROR, 0),
        ("print(2 * int(input()))\n1 / 0", Outcome.ERROR, 0),
        ("print(2 * int(input()), flush=True)\nimport os\nos.abort()", Outcome.CRASHED, 0),
        ("x = bytearray(1 << 40)", Outcome.MEMORY, 0),
        ("def f(", Outcome.ERROR, 0),
        ("import os\nwhile os.write(1, b'x' * 65536): pass", Outcome.OUTPUT, 0),
    ],
)
def test_outcomes(code: str, outcome: Outcome, passed: int, sandbox: Sandbox):
    verdict = sandbox.grade(code, DOUBLE)
    assert (verdict.outcome, verdict.tests_passed, verdict.tests) == (outcome, passed, 2), verdict.reason


def test_the_reason_names_the_input_and_the_error(sandbox: Sandbox):
    code = "n = int(input())\nif n > 4: raise ValueError('too many')\nprint(2 * n)"
    assert sandbox.grade(code, DOUBLE).reason == "input 2: ValueError: too many"


def test_each_input_meets_a_fresh_process(sandbox: Sandbox):
    code = "import os\nprint(6 if not os.path.exists('seen') else 0)\nopen('seen', 'w').close()"
    tests = OutputTests([InputOutput("", "6")] * 2)
    assert sandbox.grade(code, tests).passed


def test_after_a_timeout_no_more_inputs(isolating: None):
    tests = OutputTests([InputOutput("1", "1"), *[InputOutput("2", "2")] * 99])
    with Sandbox(limits=Limits(wall_seconds=0.5)) as sandbox:
        verdict = sandbox.grade("n = input()\nwhile n != '1': pass\nprint(n)", tests)
    assert (verdict.outcome, verdict.tests_passed, verdict.tests) == (Outcome.TIMEOUT, 1, 100)
    assert verdict.reason == "input 2: not done after 0.5 s"
    assert verdict.seconds < 40  # and not 99 times half a second


def test_large_input_and_output(sandbox: Sandbox):
    text = "x" * 1_500_000 + "\n"
    assert sandbox.grade("print(input())", OutputTests([InputOutput(text, text)])).passed


@pytest.mark.parametrize(
    ("expected", "actual", "tolerance", "same"),
    [
        ("Case #1: 3\n", "Case  #1:\t3", None, True),
        ("a b", "a", None, False),
        ("a", "A", None, False),
        ("", "", None, True),
        ("1.0", "1.00", None, False),
        ("1.0", "1.00", 1e-6, True),
        ("1.0", "1.000002", 1e-6, False),
        ("1.0", "1", 1e-6, True),
        ("1000000.0", "1000000.9", 1e-6, True),
        ("0.0", "0.0000009", 1e-6, True),
        ("0.5", "nan", 1e-6, False),
        ("0.5", "inf", 1e6, False),
        ("0.5", "5e-1", 1e-6, True),
        ("10.5", "1_0.5", 1e-6, False),
        ("7", "7.0000001", 1e-6, False),
        ("nan", "nan", 1e-6, True),
    ],
)
def test_comparison(expected: str, actual: str, tolerance: float | None, same: bool):
    assert same_output(expected, actual, tolerance) is same


def test_no_cases_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        OutputTests([])
