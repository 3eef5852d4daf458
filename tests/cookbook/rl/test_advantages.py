from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.lib.rl.advantages import (
    ADVANTAGES,
    MovingBaseline,
    are_equal,
    dr_grpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from cookbook.lib.rl.rollouts import Trajectory, TrajectoryGroup

GROUPS = [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.2, 0.9, 0.4, 0.4], [-3.0, 5.0]]
rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, -2.5]), min_size=2, max_size=6), min_size=1, max_size=5
)


def test_each_by_pythons_statistics():
    everything = [reward for group in GROUPS for reward in group]
    centred = [reward - statistics.fmean(group) for group in GROUPS for reward in group]
    expected = {
        "dr_grpo": [[r - statistics.fmean(group) for r in group] for group in GROUPS],
        "grpo": [[(r - statistics.fmean(group)) / statistics.pstdev(group) for r in group] for group in GROUPS],
        "rloo": [[r - statistics.fmean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)] for group in GROUPS],
        "reinforce_pp": [
            [(r - statistics.fmean(everything)) / statistics.pstdev(everything) for r in group] for group in GROUPS
        ],
        "reinforce_pp_baseline": [
            [(r - statistics.fmean(group)) / statistics.pstdev(centred) for r in group] for group in GROUPS
        ],
    }
    assert expected.keys() == ADVANTAGES.keys()
    for name, compare in ADVANTAGES.items():
        for found, wanted in zip(compare(GROUPS), expected[name], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=name)


@given(rewards)
def test_equal_rewards_have_exactly_no_advantage_over_each_other(groups: list[list[float]]):
    for compare in (dr_grpo, grpo, rloo, reinforce_pp_baseline):
        for group, values in zip(groups, compare(groups), strict=True):
            assert values.shape == (len(group),)
            assert np.isfinite(values).all()
            if len(set(group)) == 1:
                assert (values == 0).all()
    if len({reward for group in groups for reward in group}) == 1:
        assert all((values == 0).all() for values in reinforce_pp(groups))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_has_no_advantages(name: str):
    assert ADVANTAGES[name]([]) == []
    assert [values.tolist() for values in ADVANTAGES[name]([[], [1.0, 1.0]])] == [[], [0.0, 0.0]]


def test_one_alone_has_no_advantage():
    """The others of its group failed."""
    assert [values.tolist() for values in rloo([[1.0, 0.0], [1.0]])] == [[1.0, -1.0], [0.0]]


def test_what_rounding_leaves_is_no_difference():
    group = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]
    assert len(set(group)) > 1
    assert are_equal(group)
    for compare in ADVANTAGES.values():
        assert compare([group])[0].tolist() == [0.0, 0.0, 0.0]
    assert not are_equal([1e-12, 2e-12])
    assert not are_equal([1.0, 1.0 + 1e-6])
    assert are_equal([])
    played = [Trajectory(extra_reward=reward) for reward in group]
    assert not TrajectoryGroup("", played).is_informative
    assert TrajectoryGroup("", [*played, Trajectory()]).is_informative


def test_a_moving_baseline_remembers():
    compare = MovingBaseline(decay=0.5)
    np.testing.assert_allclose(np.concatenate(compare([[1.0, 0.0], [2.0]])), [0.0, -1.0, 1.0])
    assert compare.mean == 1.0
    np.testing.assert_allclose(compare([[3.0, 5.0]])[0], [2.0, 4.0])
    assert compare.mean == 0.5 * 1.0 + 0.5 * 4.0
    assert [values.tolist() for values in compare([[]])] == [[]]
    assert compare.mean == 2.5
