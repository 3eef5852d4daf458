"""Rules that hold for every file of the repository."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainsession

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "yaml.load"}
RUNS_FOREIGN_CODE = ROOT / "cookbook" / "lib" / "sandbox" / "inside"  # and nothing else does
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_source_runs_no_foreign_code() -> None:
    """No pickle, eval, shell strings, or torch.load in what is shipped, but for what runs inside the sandbox."""
    wrong = []
    for path in tracked("src/*.py", "cookbook/*.py"):
        if path.is_relative_to(RUNS_FOREIGN_CODE):
            assert set(imported(path)) <= {"values", *sys.stdlib_module_names}  # a script for the sandbox
            continue
        wrong += [f"{shown(path)} imports the sandbox's inside" for name in imported(path) if "inside" in name]
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{shown(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                wrong += [f"{where} {a.name}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                wrong.append(f"{where} {node.module}")
            elif isinstance(node, ast.Call):
                if ast.unparse(node.func) in FORBIDDEN_CALLS:
                    wrong.append(f"{where} {ast.unparse(node.func)}")
                wrong += [f"{where} {k.arg}" for k in node.keywords if k.arg == "shell" or _enables_foreign_code(k)]
    assert wrong == []


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


def _enables_foreign_code(keyword: ast.keyword) -> bool:
    is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    return keyword.arg in ("trust_remote_code", "allow_pickle") and is_true


def test_no_file_names_a_machine_or_a_registry() -> None:
    machine = re.compile(r"/(work|root|home/\w+|opt/(pypi|wheels)\S*)/|(?<![\w.])/tmp/\w")
    registry = re.compile(
        r"https?://[^\s/\"'>]*(pypi|simple|artifact|mirror|registry|nexus|jfrog)[^\s/\"'>]*", re.IGNORECASE
    )
    wrong = []
    for path in tracked():
        if path.suffix in (".png", ".ico") or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if machine.search(line) or registry.search(line):
                wrong.append(f"{shown(path)}:{number} {line.strip()[:80]}")
    assert wrong == []


def test_files_stay_short() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_public_name_is_documented() -> None:
    pages = "\n".join(path.read_text() for path in tracked("docs/*.md"))
    missing = [name for name in trainsession.__all__ if not re.search(rf"\b{re.escape(name)}\b", pages)]
    assert missing == []


def test_public_names_are_sorted_complete_and_described() -> None:
    names = trainsession.__all__
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(trainsession, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert value.__doc__, f"{name} has no docstring"
    errors = {
        name
        for name, value in vars(trainsession.errors).items()
        if isinstance(value, type) and issubclass(value, trainsession.TrainSessionError)
    }
    assert errors <= set(names)


def test_changelog_and_version_agree() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    if len(sections) > 1:  # the newest release is the version that the code names
        assert sections[1] == trainsession.__version__


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in tracked("docs/*.md")]
    assert [page for page in pages if page not in navigation] == []


def test_every_dependency_is_explained_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]
    names = {re.split(r"[\[<>=~!; ]", requirement)[0] for requirement in requirements} - {"trainsession"}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    pins = (ROOT / "requirements" / "constraints.txt").read_text().replace("_", "-").lower()
    installed_here = [e for part in ("server", "local", "cookbook") for e in extras[part]] + project["dependencies"]
    for requirement in installed_here:
        name = re.split(r"[\[<>=~!; ]", requirement)[0].lower()
        assert name == "trainsession" or f"\n{name}==" in pins, f"{name} has no pin"


def test_recipes_of_the_makefile_are_listed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "quickstart", "test", "test-all", "lint", "bench", "docs", "help"):
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
