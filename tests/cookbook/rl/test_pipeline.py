from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

import trainsession as ts
from cookbook.lib.data import completion_datum
from cookbook.lib.rl.env import Group, Step
from cookbook.lib.rl.pipeline import batches, informative, minibatches
from cookbook.lib.rl.rollouts import Trajectory, TrajectoryGroup, Turn, rollout, stream

PARAMS = ts.SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


class Once:
    def initial_prompt(self) -> list[int]:
        return [7, 8, 9]

    def step(self, action: ts.SampledSequence) -> Step:
        return Step(float(action.tokens[0] % 2))


def logprobs_of(batch_groups: Sequence[TrajectoryGroup]) -> list[float]:
    return [float(value) for group in batch_groups for one in group.trajectories for value in one.logprobs]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_batches_are_of_the_weights_that_they_say(trainer: ts.TrainingClient, max_staleness: int):
    """Each batch's logprobs are those of the weights after ``sampled_at`` steps, computed by themselves."""
    frozen: list[ts.SamplingClient] = [trainer.save_weights_and_get_sampling_client()]
    data = [completion_datum([7, 8], [9, 10, 11])]
    problems = [[Group(Once, size=2)] for _ in range(5)]
    seen: list[tuple[int, int]] = []
    for batch in batches(trainer, problems, partial(rollout, params=PARAMS), max_staleness=max_staleness):
        seen.append((batch.step, batch.staleness))
        for group in batch.groups:
            for one in group.trajectories:
                again = frozen[batch.sampled_at].compute_logprobs(one.tokens).result()
                np.testing.assert_allclose(one.logprobs[3:], np.array(again[3:], dtype=np.float64), atol=1e-5)
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(ts.AdamParams(learning_rate=0.05))
        frozen.append(trainer.save_weights_and_get_sampling_client())
    assert seen == [(step, min(step, max_staleness)) for step in range(5)]


def test_the_next_batch_is_rolled_out_while_the_body_runs(trainer: ts.TrainingClient):
    running = [threading.Event() for _ in range(3)]
    count = itertools.count()

    def roll_out(_sampler: ts.SamplingClient, _groups: Sequence[Group], _batch: int) -> list[TrajectoryGroup]:
        running[next(count)].set()
        return []

    for batch in batches(trainer, [[], [], []], roll_out, max_staleness=1):
        if batch.step < 2:
            assert running[batch.step + 1].wait(20), "the next one began without waiting for this step"
        else:
            assert all(event.is_set() for event in running)


def test_each_batch_draws_with_seeds_of_its_own(trainer: ts.TrainingClient):
    """The weights stay as they are, so equal seeds would give equal episodes."""
    steps = batches(trainer, [[Group(Once, size=2)]] * 3, partial(rollout, params=PARAMS), max_staleness=1)
    drawn = [[one.tokens for group in batch.groups for one in group.trajectories] for batch in steps]
    assert len({str(tokens) for tokens in drawn}) == 3
    again = rollout(trainer.base_sampling_client(), [Group(Once, size=2)], 2, params=PARAMS)
    assert [one.tokens for one in again[0].trajectories] == drawn[2]


def test_leaving_the_loop_stops_what_is_rolled_out_ahead(trainer: ts.TrainingClient):
    class Waits(Once):
        async def step(self, action: ts.SampledSequence) -> Step:  # type: ignore[override]
            begun.set()
            await asyncio.sleep(30)
            return Step()

    begun = threading.Event()
    problems = [[Group(Once, 1)], [Group(Waits, 1)]]
    steps = batches(trainer, problems, partial(rollout, params=PARAMS), max_staleness=1)
    next(steps)
    assert begun.wait(20)
    ahead = [thread for thread in threading.enumerate() if thread.name in ("rollout ahead", "rollouts")]
    assert len(ahead) >= 2
    assert all(thread.daemon for thread in ahead), "none keeps the program from ending"
    steps.close()
    for thread in ahead:
        thread.join(5)
    assert not any(thread.is_alive() for thread in ahead)


def test_what_a_rollout_raises_is_raised_where_its_batch_is_due(trainer: ts.TrainingClient):
    def roll_out(_sampler: ts.SamplingClient, groups: Sequence[Group], _batch: int) -> list[TrajectoryGroup]:
        if not groups:
            raise RuntimeError("nothing to do")
        return []

    steps = batches(trainer, [[Group(Once, 1)], []], roll_out, max_staleness=1)
    assert next(steps).step == 0
    with pytest.raises(RuntimeError, match="nothing to do"):
        next(steps)


def test_minibatches_add_up_to_the_batch(trainer: ts.TrainingClient):
    groups = [Group(Once, size=2) for _ in range(5)]
    parts = list(minibatches(stream(trainer.base_sampling_client(), groups, params=PARAMS), 2))
    assert [len(part) for part in parts] == [2, 2, 1]
    together = rollout(trainer.base_sampling_client(), groups, params=PARAMS)
    assert sorted(logprobs_of(list(itertools.chain(*parts)))) == sorted(logprobs_of(together))


def rewarded(*rewards: float) -> TrajectoryGroup:
    action = ts.SampledSequence([1], [-1.0], "stop")
    return TrajectoryGroup("", [Trajectory([Turn([2], action, Step(reward))]) for reward in rewards])


def test_dynamic_sampling_draws_until_enough_groups_differ():
    tried: list[int] = []

    def roll_out(groups: Sequence[Group], attempt: int) -> list[TrajectoryGroup]:
        assert attempt == len(tried), "each attempt has seeds of its own"
        tried.append(len(groups))
        return [rewarded(0, 1) if int(group.name) % 3 == 0 else rewarded(1, 1) for group in groups]

    problems = (Group(Once, 2, name=str(number)) for number in itertools.count())
    assert len(informative(roll_out, problems, wanted=4, limit=100)) == 4
    assert sum(tried) <= 12
    tried.clear()
    assert len(informative(roll_out, (Group(Once, 2, name="1") for _ in itertools.count()), wanted=4, limit=9)) == 0
    assert sum(tried) == 9
    tried.clear()
    assert len(informative(roll_out, iter([Group(Once, 2, name="3")]), wanted=4, limit=9)) == 1
