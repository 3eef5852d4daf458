"""Half a minute of `tests.faults.random_walk`; the command walks as long as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.oracle import WEIGHTS, Oracle, plan_of
from tests.faults.random_walk import Walk, report

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds engines through /proc")


def test_plans_hold_every_call_and_every_end() -> None:
    plans = [plan_of("red", seed) for seed in range(100)]
    assert {call.kind for plan in plans for call in plan.calls} == set(WEIGHTS)
    ends = {end for plan in plans for end in Oracle.of(plan).outcomes}
    assert ends == {"done", "InvalidDatum", "NoGradients", "IncompleteGradients", "CheckpointExists"}
    assert plan_of("red", 7) == plan_of("red", 7) != plan_of("red", 8)


@pytest.mark.timeout(400)
def test_a_walk_of_half_a_minute(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "undisturbed"))
    walk = Walk(tmp_path / "home", str(tiny_model), seed=3, say=print)
    walk.run(25)
    assert walk.counts["sessions"] >= 1, report(walk)
    assert sum(walk.counts[fault] for fault in ("engine", "service", "both", "terminate", "database")) >= 2, report(
        walk
    )
