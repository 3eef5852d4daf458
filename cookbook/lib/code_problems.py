"""Programming problems of public data sets, with the tests that the sandbox grades by."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sandbox import InputOutput, OutputTests, UnitTests
from .sandbox.tests import parsed

FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """One problem."""

    name: str
    prompt: str
    tests: UnitTests | OutputTests
    reference: str | None = None
    """A program that passes, where the data set has one."""


def program_of(text: str) -> str:
    """The program in a model's answer: its last fenced block, or the whole text where there is none."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def mbpp(path: str | Path) -> list[CodeProblem]:
    """Mostly Basic Python Problems (Austin et al. 2021), `mbpp.jsonl` of google-research: 974 problems."""
    return [problem_of_mbpp(json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines()]


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
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [problem_of_humaneval(json.loads(line)) for line in lines]


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


def codejam(path: str | Path) -> list[CodeProblem]:
    """Problems of coding-competitions-archive with inputs and outputs; JSON Lines, gzipped.

    Rows have `id`, `statement`, `tests` of `input` and `output`, and `float_tolerance`.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        CodeProblem(
            row["id"],
            row["statement"],
            OutputTests([InputOutput(t["input"], t["output"]) for t in row["tests"]], row["float_tolerance"]),
        )
        for row in rows
    ]


def names_used(code: str) -> set[str]:
    return {node.id for node in ast.walk(parsed(code)) if isinstance(node, ast.Name)}


def imports(code: str, names: set[str]) -> list[str]:
    """The top-level `import` lines of a program that bind one of the names."""
    lines = [node for node in parsed(code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [ast.unparse(line) for line in lines if names & {alias.asname or alias.name for alias in line.names}]


def top_level_names(code: str) -> set[str]:
    """Functions and classes that a program defines."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return {node.name for node in parsed(code).body if isinstance(node, kinds)}
