"""Some of `tests.faults.random_kills`; the command runs as many as are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.crash_points import driving
from tests.faults.random_kills import trials


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [0, 100])
def test_a_loop_killed_at_any_instant_comes_out_the_same(tmp_path: Path, tiny_model: Path, first: int) -> None:
    with driving(tmp_path, str(tiny_model)) as driver:
        assert trials(driver, first, count=20)
