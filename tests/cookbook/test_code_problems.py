from __future__ import annotations

from typing import Any

import pytest

from cookbook.lib import code_problems
from cookbook.lib.code_problems import CodeProblem
from cookbook.lib.config import UsageError
from cookbook.lib.rows import Row
from cookbook.lib.sandbox import InputOutput, OutputTests, UnitTests


def row(**values: Any) -> Row:
    return Row(values, "train.jsonl:17")


def test_rows_with_inputs_and_outputs() -> None:
    tests = [{"input": "1 2\n", "output": "3\n", "kind": "sample"}]
    outputs = OutputTests([InputOutput("1 2\n", "3\n")])
    assert code_problems.tested(row(statement="Add.", tests=tests)) == CodeProblem("train.jsonl:17", "Add.", outputs)
    named = code_problems.tested(row(id="add", prompt="Add.", tests=tests, float_tolerance=1e-6))
    assert named == CodeProblem("add", "Add.", OutputTests([InputOutput("1 2\n", "3\n")], 1e-6))


def test_rows_with_statements_find_out_which_names_are_the_programs() -> None:
    setup = "import math\nfrom os import path as p\nLIMIT = 3\ndef near(a, b):\n    return abs(a - b) < LIMIT"
    tests = [
        "assert near(add(1, 2), math.tau)",
        "for x in range(3):\n    assert add(x, 0) == x",
        "assert p.join(Name().text) == Name.default",
    ]
    problem = code_problems.tested(row(text="Add.", test_list=tests, test_setup_code=setup))
    assert problem == CodeProblem("train.jsonl:17", "Add.", UnitTests(tests, ["Name", "add"], setup))


@pytest.mark.parametrize("said", [{"names": ["sum"]}, {"entry_point": "sum"}])
def test_rows_may_say_which_names_are_the_programs(said: dict[str, Any]) -> None:
    """Here one that Python has, too: taken for Python's own, any program would pass."""
    tests = ["assert sum([1, 2]) == 3"]
    assert code_problems.tested(row(prompt="Add.", tests=tests, **said)).tests == UnitTests(tests, ["sum"], "")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```\nIt prints\n```text\n1\n```\n", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```python3 title='b'\nx = 2\n```", "x = 2\n"),
        ("```json\n{}\n```\n```\nx = 3\n```", "x = 3\n"),
        ("1. So:\n   ```py\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("````Python\n'\n```\n'\n````", "'\n```\n'\n"),
        ("```python\nx = 4", "x = 4"),
        ("```bash\nls\n```", "```bash\nls\n```"),
    ],
)
def test_the_program_is_the_last_block_of_python(text: str, program: str) -> None:
    assert code_problems.program_of(text) == program


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": "x"}, "'test_list' is missing; the row has text"),
        ({"prompt": "x", "tests": []}, "'tests' is []; must be a list of at least one test"),
        (
            {"prompt": "x", "tests": [{"input": "1"}]},
            "'tests[0]' is {'input': '1'}; must be a Python statement or an object with the texts 'input' and 'output'",
        ),
        (
            {"prompt": "x", "tests": ["f()", {"input": "1", "output": "2"}]},
            "'tests' mixes statements with inputs and outputs; must be all of one kind",
        ),
        ({"prompt": "x", "tests": ["assert f("]}, "'tests': '(' was never closed"),
        (
            {"prompt": "x", "tests": ["assert g(1) == 1", "assert sum([1]) == 1"]},
            "'tests[1]' uses no name of the program's (g): 'assert sum([1]) == 1'; say with 'names' or 'entry_point'",
        ),
        ({"prompt": "x", "tests": ["assert 1 == 1"]}, "'tests[0]' uses no name of the program's (none found): "),
        ({"prompt": "x", "tests": ["g()"], "names": "g"}, "'names' is 'g'; must be a list of the names that the"),
        ({"prompt": "x", "tests": ["f()"], "test_setup_code": 3}, "'test_setup_code' is 3; must be a text"),
    ],
)
def test_what_is_wrong_and_where(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        code_problems.tested(row(**values))
    assert str(caught.value).startswith(f"train.jsonl:17: {message}")
