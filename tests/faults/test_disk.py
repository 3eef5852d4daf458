"""A disk that loses what was not synced, and one that refuses to sync: real processes, over a library before libc."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import bad_disk, power_loss
from tests.faults.disk import Kind, can_compile

pytestmark = pytest.mark.skipif(not can_compile(), reason="compiles a library for Linux, with cc")


def test_after_a_power_loss_what_was_acknowledged_is_there_and_nothing_is_half_there(tmp_path: Path) -> None:
    home, trace = power_loss.trace_of(tmp_path, rounds=3)
    assert power_loss.try_states(tmp_path, home, trace, states=6, seed=0) >= 3


@pytest.mark.parametrize(("what", "every"), [("sync", 30), ("write", 200)])
def test_a_disk_that_refuses_changes_nothing_but_the_time(tmp_path: Path, what: Kind, every: int) -> None:
    assert "as on a good disk" in bad_disk.trials(tmp_path, every, what)
