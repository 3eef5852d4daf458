"""Reference solutions of public data sets pass, and programs that miss their answers do not.

A sample runs everywhere that the data is; all of it with the slow tests.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from cookbook.lib.code_problems import CodeProblem, humaneval, mbpp, problem_of_humaneval, problems_of, program_of
from cookbook.lib.sandbox import Outcome, OutputTests, Sandbox, UnitTests
from cookbook.lib.sandbox.tests import parsed

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"
SETS = {
    "mbpp": (mbpp, DATA / "mbpp" / "mbpp.jsonl", 974),
    "humaneval": (humaneval, DATA / "humaneval" / "HumanEval.jsonl.gz", 164),
    "codejam": (problems_of, DATA / "codejam" / "problems.jsonl.gz", 134),
}

SOLUTIONS = {  # written for these tests
    "kickstart/2020/round_a/allocation": """
for case in range(1, int(input()) + 1):
    n, money = map(int, input().split())
    bought = 0
    for price in sorted(map(int, input().split())):
        if price <= money:
            money -= price
            bought += 1
    print(f"Case #{case}: {bought}")
""",
    "codejam/2020/qualification_round/nesting_depth": """
for case in range(1, int(input()) + 1):
    out, depth = "", 0
    for digit in map(int, input().strip()):
        out += "(" * (digit - depth) + ")" * (depth - digit) + str(digit)
        depth = digit
    print(f"Case #{case}: {out}{')' * depth}")
""",
    "kickstart/2020/round_d/beauty_of_tree": """
import sys
words = iter(sys.stdin.read().split())
for case in range(1, int(next(words)) + 1):
    n, a, b = (int(next(words)) for _ in range(3))
    parent = [0, 0] + [int(next(words)) for _ in range(n - 1)]
    children = [[] for _ in range(n + 1)]
    for node in range(2, n + 1):
        children[parent[node]].append(node)
    reached = {step: [1] * (n + 1) for step in (a, b)}
    path, stack = [], [(1, 0)]
    order = []
    while stack:
        node, depth = stack.pop()
        path[depth:] = [node]
        order.append((node, {step: path[depth - step] if depth >= step else 0 for step in (a, b)}))
        stack += [(child, depth + 1) for child in children[node]]
    for node, above in reversed(order):
        for step in {a, b}:
            reached[step][above[step]] += reached[step][node]
    beauty = sum(x / n + y / n - x * y / n / n for x, y in zip(reached[a][1:], reached[b][1:]))
    print(f"Case #{case}: {beauty:.9f}")
""",
}


def problems(name: str) -> list[CodeProblem]:
    load, path, count = SETS[name]
    if not path.exists():
        pytest.skip(f"the files of {name} are not at ../shared/data/{name}")
    found = load(path)
    assert len(found) == count
    return found


def graded(sandbox: Sandbox, pairs: Sequence[tuple[str, CodeProblem]]) -> dict[str, tuple[Outcome, str]]:
    """What did not pass, by the problem's name."""
    futures = [(problem.name, sandbox.submit(code, problem.tests)) for code, problem in pairs]
    verdicts = [(name, future.result()) for name, future in futures]
    return {name: (verdict.outcome, verdict.reason) for name, verdict in verdicts if not verdict.passed}


def mutants(problem: CodeProblem) -> list[str]:
    """The reference with functions that return nothing, or their answer in a list."""
    assert isinstance(problem.tests, UnitTests)
    assert problem.reference is not None
    functions = [
        name
        for name in problem.tests.names
        if any(
            getattr(n, "name", "") == name and not isinstance(n, ast.ClassDef) for n in parsed(problem.reference).body
        )
    ]
    nothing = "".join(f"\ndef {name}(*args, **kwargs): return None" for name in functions)
    wrapped = "".join(
        f"\nright_{name} = {name}\ndef {name}(*args, **kwargs): return [right_{name}(*args, **kwargs)]"
        for name in functions
    )
    return [problem.reference + nothing, problem.reference + wrapped]


def check_unit_tests(sandbox: Sandbox, sample: Sequence[CodeProblem]) -> None:
    assert graded(sandbox, [(problem.reference or "", problem) for problem in sample]) == {}
    for kind in range(2):
        failed = graded(sandbox, [(mutants(problem)[kind], problem) for problem in sample])
        assert {problem.name for problem in sample} - failed.keys() == set()


def tables(problem: CodeProblem) -> list[str]:
    """A program that knows the outputs, and one that gets the last word of the last of them wrong."""
    assert isinstance(problem.tests, OutputTests)
    known = {case.input: case.output for case in problem.tests.cases}
    last = problem.tests.cases[-1]
    changed = {**known, last.input: " ".join([*last.output.split()[:-1], "1e99"])}
    return [f"import sys\nprint({table!r}[sys.stdin.read()])" for table in (known, changed)]


def check_outputs(sandbox: Sandbox, sample: Sequence[CodeProblem]) -> None:
    assert graded(sandbox, [(tables(problem)[0], problem) for problem in sample]) == {}
    failed = graded(sandbox, [(tables(problem)[1], problem) for problem in sample])
    assert {name: outcome for name, (outcome, _) in failed.items()} == {p.name: Outcome.FAILED for p in sample}


@pytest.mark.parametrize(("name", "step"), [("mbpp", 325), ("humaneval", 82)])
def test_a_sample_of_references_passes_and_mutants_fail(name: str, step: int, sandbox: Sandbox):
    check_unit_tests(sandbox, problems(name)[1::step])


def test_a_sample_of_inputs_and_outputs(sandbox: Sandbox):
    check_outputs(sandbox, problems("codejam")[::60])


def test_solutions_of_code_jam_problems(sandbox: Sandbox):
    sample = [problem for problem in problems("codejam") if problem.name in SOLUTIONS]
    assert len(sample) == len(SOLUTIONS)
    assert graded(sandbox, [(SOLUTIONS[problem.name], problem) for problem in sample]) == {}
    wrong = [(SOLUTIONS[problem.name].replace("{case}: ", "{case}: 1"), problem) for problem in sample]
    assert [outcome for outcome, _ in graded(sandbox, wrong).values()] == [Outcome.FAILED] * len(sample)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_every_reference_passes_and_every_mutant_fails(name: str, sandbox: Sandbox):
    """1,138 programs three times over: minutes."""
    check_unit_tests(sandbox, problems(name))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_input_and_output(sandbox: Sandbox):
    check_outputs(sandbox, problems("codejam"))


def test_helpers_of_a_prompt_are_the_tests_own(sandbox: Sandbox):
    """As HumanEval/32: the test checks a root with `poly`, which the prompt defines and a program can redefine."""
    problem = problem_of_humaneval(
        {
            "task_id": "x",
            "prompt": 'def poly(c, x):\n    return c[0] + c[1] * x\n\ndef root(c):\n    """x with poly(c, x) == 0"""\n',
            "entry_point": "root",
            "canonical_solution": "    return -c[0] / c[1]\n",
            "test": "def check(candidate):\n    assert abs(poly([2, 4], candidate([2, 4]))) < 1e-6\n",
        }
    )
    assert sandbox.grade(problem.reference or "", problem.tests).passed
    cheat = problem.prompt + "    return 7\n\ndef poly(c, x): return 0\ndef check(candidate): pass\n"
    assert sandbox.grade(cheat, problem.tests).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Sure:\n```python\ndef f(): pass\n```\nDone.", "def f(): pass\n"),
        ("```\nfirst\n```\nbetter:\n```py\nsecond\n```", "second\n"),
        ("```python\ncut off", "cut off"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
    ],
)
def test_the_program_in_an_answer(text: str, program: str):
    assert program_of(text) == program
