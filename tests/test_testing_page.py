"""Pages of `docs/` map the contract, known bugs, faults and attacks to tests: those must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()
MORE = "".join((ROOT / "docs" / name).read_text() for name in ("faults.md", "sandbox.md"))
NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE + MORE)
REPORTS = {f"I-{n}" for n in range(1, 61) if n not in (22, 30, 34, 45, 48, 59)}
REPORTS |= {f"T-{n}" for n in (17, 18, 19, 21, 22, 23, 24, 26)}


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 100
    missing = []
    for file in sorted({file for file, _ in NAMED}):
        source = (ROOT / "tests" / file).read_text()
        defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        missing += [f"{file}::{name}" for other, name in NAMED if other == file and name not in defined]
    assert missing == []


def test_every_report_has_a_row_with_a_test_or_a_reason() -> None:
    rows = dict(re.findall(r"^\| ([IT]-\d+) \|(.*)\|$", PAGE, re.MULTILINE))
    assert set(rows) == REPORTS
    for row, text in rows.items():
        assert "::test_" in text or "later:" in text, row
