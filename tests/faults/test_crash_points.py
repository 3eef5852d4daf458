"""Some of `tests.faults.crash_points`, evenly spread; the command runs all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults import points
from tests.faults.crash_points import FIRST_KILLS, driving, enumerated, in_turns, spread

KILLS, AGAIN = 16, 2
SECONDS = 60.0
"""On a machine so slow that they take longer, fewer run; in two passes, so that each is spread."""


def test_every_point_is_in_the_code() -> None:
    for file in {point.file for point in points.POINTS}:
        points.instrumented(file)
    assert len({point.name for point in points.POINTS}) == len(points.POINTS)


@pytest.mark.timeout(400)
def test_a_loop_killed_at_any_point_comes_out_the_same(tmp_path: Path, tiny_model: Path) -> None:
    with driving(tmp_path, str(tiny_model)) as driver:
        hits = driver.count()
        never = {point.name for point in points.POINTS} - set(hits)
        # These are of a recovery, or of weights that the engine does not hold any more.
        assert never <= {"frozen.brought_back", "recovery.rewound", "recovery.replayed"}, never
        started = time.monotonic()
        deaths = 0
        for kill in in_turns(spread(enumerated(hits), KILLS)):
            deaths += driver.trial(kill).deaths
            if time.monotonic() - started > SECONDS * 0.8:
                break
        assert deaths >= 5
        # A stream whose result is durable, and whose last frames were never sent.
        assert sum(driver.trial(("samples.written", k)).deaths for k in range(1, hits["samples.written"] + 1)) >= 2
        for first in FIRST_KILLS:
            again = [kill for kill in enumerated(driver.count(first)) if kill[0].startswith("recovery")]
            assert again
            for kill in spread(again, AGAIN):
                if time.monotonic() - started < SECONDS:
                    driver.trial(first, kill)
