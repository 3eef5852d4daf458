"""Programming problems with the tests that the sandbox grades by: of your own rows, and of public data sets."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import UsageError
from .formats import field_of, shown, text_of
from .rows import Row, read_rows
from .sandbox import InputOutput, OutputTests, UnitTests
from .sandbox.tests import parsed

FENCE = re.compile(r"(?P<indent>[^\S\n]*)(?P<ticks>`{3,})[^\S\n]*(?P<language>[^\s`{]*)[^`\n]*")
PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """One problem."""

    name: str
    prompt: str
    tests: UnitTests | OutputTests
    reference: str | None = None
    """A program that passes, where the data set has one."""


def program_of(text: str) -> str:
    """The program in a model's answer: its last fenced block of Python, or of no language, or else the whole text.

    A block that is never closed ends with the text. Blocks in a list are indented, their programs with them.
    """
    program, block, opened = text, [], None
    for line in text.splitlines(keepends=True):
        fence = FENCE.fullmatch(line.rstrip())
        if opened is None:
            opened = fence
        elif fence is None or fence["language"] or len(fence["ticks"]) < len(opened["ticks"]):
            block.append(line.removeprefix(opened["indent"]))
        else:
            program, block, opened = _program(opened, block, program), [], None
    return program if opened is None else _program(opened, block, program)


def _program(opened: re.Match[str], block: list[str], otherwise: str) -> str:
    return "".join(block) if opened["language"].lower() in PYTHON else otherwise


def mbpp(path: str | Path) -> list[CodeProblem]:
    """Mostly Basic Python Problems (Austin et al. 2021), `mbpp.jsonl` of google-research: 974 problems."""
    return [problem_of_mbpp(row.values) for row in read_rows(path)]


def problem_of_mbpp(row: Mapping[str, Any]) -> CodeProblem:
    """The prompt shows the problem and its tests, as the paper's does."""
    tests = [*row["test_list"], *row["challenge_test_list"]]
    used = names_used("\n".join([row["test_setup_code"], *tests]))
    names = sorted(used & top_level_names(row["code"]))
    setup = "\n".join([*imports(row["code"], used), row["test_setup_code"]])  # tests rely on the reference's
    shown = "\n".join(row["test_list"])
    prompt = f"{row['text']}\nYour code should satisfy these tests:\n{shown}\n"
    return CodeProblem(f"mbpp/{row['task_id']}", prompt, UnitTests(tests, names, setup), row["code"])


def humaneval(path: str | Path) -> list[CodeProblem]:
    """HumanEval (Chen et al. 2021), `HumanEval.jsonl.gz` of openai/human-eval: 164 problems."""
    return [problem_of_humaneval(row.values) for row in read_rows(path)]


def problem_of_humaneval(row: Mapping[str, str]) -> CodeProblem:
    """A program is the prompt and its completion.

    Helpers that the prompt defines belong to the tests, too: they use their own copy, which a program
    cannot redefine.
    """
    name = row["entry_point"]
    helpers = parsed(row["prompt"])
    helpers.body = [node for node in helpers.body if getattr(node, "name", None) != name]
    setup = f"{ast.unparse(helpers)}\n{row['test']}"
    tests = UnitTests([f"check({name})"], [name], setup)
    return CodeProblem(row["task_id"], row["prompt"], tests, row["prompt"] + row["canonical_solution"])


def problems_of(path: str | Path) -> list[CodeProblem]:
    """Those of a file of rows as `tested` takes them; Code Jam's archive is one (134 problems here)."""
    return [tested(row) for row in read_rows(path)]


def tested(row: Row) -> CodeProblem:
    """Of ``prompt`` (or ``statement``, ``text``), and ``tests`` or MBPP's ``test_list``.

    Tests are all ``{"input", "output"}`` objects, with an optional ``float_tolerance`` beside them (Code Jam's rows are
    such), or all Python statements that raise where an answer is wrong; ``test_setup_code`` runs before these. What the
    statements use, and neither Python nor the set-up defines, is the program's, unless ``names`` (or ``entry_point``)
    says what is: it must where the program defines a function of a builtin's name.
    """
    prompt = text_of(row, "prompt", "statement", "text")
    name = "tests" if "tests" in row.values else "test_list"
    tests = field_of(row, name)
    if not isinstance(tests, list) or not tests:
        raise row.error(f"'{name}' is {shown(tests)}; must be a list of at least one test")
    cases = [InputOutput(t["input"], t["output"]) for t in tests if _is_case(t)]
    statements = [test for test in tests if isinstance(test, str)]
    for index, test in enumerate(tests):
        if not (_is_case(test) or isinstance(test, str)):
            raise row.error(
                f"'{name}[{index}]' is {shown(test)}; must be a Python statement or "
                "an object with the texts 'input' and 'output'"
            )
    if cases and statements:
        raise row.error(f"'{name}' mixes statements with inputs and outputs; must be all of one kind")
    title = str(row.values.get("id") or row.where)
    if cases:
        return CodeProblem(title, prompt, OutputTests(cases, row.values.get("float_tolerance")))
    setup = row.values.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise row.error(f"'test_setup_code' is {shown(setup)}; must be a text")
    try:
        code = "\n".join(statements)
        given = top_level_names(setup) | names_bound(setup) | names_bound(code)
        names = _names_said(row) or sorted(names_used(code) - given - set(dir(builtins)))
        _require_calls(row, name, statements, setup, names)
        return CodeProblem(title, prompt, UnitTests(statements, names, setup))
    except UsageError:
        raise
    except (SyntaxError, ValueError) as error:
        raise row.error(f"'{name}': {error}") from None


def _names_said(row: Row) -> list[str]:
    """In the row's ``names``, or ``entry_point``."""
    if "names" not in row.values:
        return [text_of(row, "entry_point")] if row.values.get("entry_point") is not None else []
    names = row.values["names"]
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(one, str) and one.isidentifier() for one in names)
    ):
        raise row.error(f"'names' is {shown(names)}; must be a list of the names that the program defines")
    return names


def _require_calls(row: Row, field: str, statements: list[str], setup: str, names: list[str]) -> None:
    """A test that uses nothing of the program's would pass for any program."""
    for index, statement in enumerate(statements):
        used = names_used(statement)
        if not used & (set(names) | top_level_names(setup)):
            known = ", ".join(names) or "none found"
            raise row.error(
                f"'{field}[{index}]' uses no name of the program's ({known}): {shown(statement)}; "
                "say with 'names' or 'entry_point' what the program defines, as where it is called like a builtin"
            )


def _is_case(test: Any) -> bool:
    return isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)


def names_used(code: str) -> set[str]:
    return {node.id for node in ast.walk(parsed(code)) if isinstance(node, ast.Name)}


def names_bound(code: str) -> set[str]:
    """What a program's top-level imports and assignments define."""
    imported = [
        alias for node in parsed(code).body if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
    ]
    stored = [node for node in ast.walk(parsed(code)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {(alias.asname or alias.name).split(".")[0] for alias in imported} | {node.id for node in stored}


def imports(code: str, names: set[str]) -> list[str]:
    """The top-level `import` lines of a program that bind one of the names."""
    lines = [node for node in parsed(code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [ast.unparse(line) for line in lines if names & {alias.asname or alias.name for alias in line.names}]


def top_level_names(code: str) -> set[str]:
    """Functions and classes that a program defines."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return {node.name for node in parsed(code).body if isinstance(node, kinds)}
