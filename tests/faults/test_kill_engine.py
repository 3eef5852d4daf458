"""A few trials of `tests.faults.kill_engine`; the command runs as many as are wanted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.kill_engine import trials


@pytest.mark.timeout(600)
def test_an_engine_killed_in_the_middle_of_a_loop_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    said: list[str] = []
    kills = asyncio.run(trials(tmp_path / "home", str(tiny_model), list(range(20)), said.append))
    assert kills >= 20, said
