"""No program gets a reward for anything but right answers."""

from __future__ import annotations

import time

import pytest

from cookbook.lib.sandbox import InputOutput, Limits, Outcome, OutputTests, Sandbox, UnitTests
from tests.cookbook.sandbox.forgeries import ENDLESS, FORGERIES

CALLS = UnitTests(["assert solve(3) == 9173", "assert solve(5) == 4021"], ["solve"])
LENIENT = UnitTests(
    [
        "results = [solve(n) for n in (3, 5)]\nassert all(r == e for r, e in zip(results, (9173, 4021), strict=True))",
        "assert not set(map(solve, (3, 5))) - {9173, 4021}",
        "for r in map(solve, (3, 5)):\n    assert isinstance(r, int) and abs(r - 6000) < 4000 and r % 2",
    ],
    ["solve"],
)
OUTPUTS = OutputTests([InputOutput("3\n", "9173\n"), InputOutput("5\n", "4021\n")])
AS_SCRIPT = "\nprint(solve(int(input())))\n"


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_a_wrong_answer(name: str, sandbox: Sandbox):
    programs = {"functions": (FORGERIES[name], CALLS), "script": (FORGERIES[name] + AS_SCRIPT, OUTPUTS)}
    running = {kind: sandbox.submit(*pair) for kind, pair in programs.items()}
    for kind, future in running.items():
        verdict = future.result()
        assert not verdict.passed, kind
        assert verdict.reward == 0
        assert verdict.reason.isprintable()
        assert verdict.tests_passed < verdict.tests == 2
    public = "27" in name or "28" in name  # knows one value
    assert public or running["functions"].result().tests_passed == 0


@pytest.mark.parametrize("name", [name for name in FORGERIES if name[:2] in ("1 ", "2 ", "5 ", "6 ", "7 ", "8 ")])
def test_a_forgery_convinces_no_careless_test_either(name: str, sandbox: Sandbox):
    """Tests that iterate over calls or only look at types: an early end or a lying object would pass them."""
    assert sandbox.grade(FORGERIES[name], LENIENT).tests_passed == 0


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(name: str, impatient: Sandbox):
    started = time.monotonic()
    verdict = impatient.grade(ENDLESS[name], CALLS)
    assert verdict.outcome in (Outcome.TIMEOUT, Outcome.ERROR if "output" in name else Outcome.TIMEOUT)
    assert verdict.tests_passed == 0
    assert verdict.seconds < 10
    assert time.monotonic() - started < 60  # with its start, on a busy machine


def test_cpu_time_is_counted(isolating: None):
    """A busy program is ended by its own limit where the wall clock would let it go on."""
    with Sandbox(limits=Limits(cpu_seconds=1, wall_seconds=60)) as sandbox:
        verdict = sandbox.grade(ENDLESS["19 busy"], CALLS)
    assert (verdict.outcome, verdict.reason) == (Outcome.TIMEOUT, "out of CPU time (1 s)")


def test_an_endless_script_is_ended(impatient: Sandbox):
    assert impatient.grade(ENDLESS["19 deaf"] + AS_SCRIPT, OUTPUTS).outcome is Outcome.TIMEOUT
    flood = impatient.grade("while True: print('x' * 1000)", OUTPUTS)
    assert flood.outcome in (Outcome.OUTPUT, Outcome.TIMEOUT)


def test_a_crash_is_the_programs_own(sandbox: Sandbox):
    """Never an error of the sandbox, which a policy could learn to cause where it gets no reward anyway."""
    for name in ("26 null pointer", "26 abort", "1 hard exit at import"):
        assert sandbox.grade(FORGERIES[name], CALLS).outcome is Outcome.CRASHED


def test_text_of_a_program_reaches_no_terminal(sandbox: Sandbox):
    lie = "\\x1b[2J\\x1b]0;owned\\x07\\r\\nTraceback: all tests passed\\u202e"
    verdict = sandbox.grade(f"def solve(n): raise ValueError('{lie}' * 50)", CALLS)
    assert (verdict.outcome, verdict.tests_passed) == (Outcome.ERROR, 0)
    assert verdict.reason.isprintable()
    assert len(verdict.reason) <= 300
    assert "\\x1b[2J" in verdict.reason


def test_an_honest_program_passes(sandbox: Sandbox):
    right = "def solve(n): return {3: 9173, 5: 4021}[n]"
    assert sandbox.grade(right, CALLS).reward == 1
    assert sandbox.grade(right + AS_SCRIPT, OUTPUTS).reward == 1
    assert sandbox.grade(right, LENIENT).tests_passed == 3
