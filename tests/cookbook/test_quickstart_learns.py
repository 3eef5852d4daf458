"""The quickstart's promise, on the real model: minutes each, so `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook import arithmetic_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.usefixtures("home")
def test_held_out_accuracy_rises_by_35_points(seed: int, smollm2_path: Path, tmp_path: Path):
    config = arithmetic_rl.Config(model=str(smollm2_path), seed=seed, out=str(tmp_path / "run"))
    before, after = arithmetic_rl.main(config)
    assert after.greedy.value - before.greedy.value >= 0.35


@pytest.mark.usefixtures("home")
def test_random_rewards_teach_nothing(smollm2_path: Path, tmp_path: Path):
    config = arithmetic_rl.Config(
        model=str(smollm2_path), seed=1, steps=22, random_rewards=True, out=str(tmp_path / "run")
    )
    before, after = arithmetic_rl.main(config)
    # Not above the upper end of the 95% interval that the base model's accuracy has.
    assert after.greedy.value <= before.greedy.interval[1]
