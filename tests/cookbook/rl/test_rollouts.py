"""Rollouts against a real service with a tiny real model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

import trainsession as ts
from cookbook.lib.rl.datums import group_datums, trajectory_datum
from cookbook.lib.rl.env import Group, Step
from cookbook.lib.rl.kl import reference_logprobs
from cookbook.lib.rl.rollouts import rollout, stream, summary

PARAMS = ts.SamplingParams(max_tokens=3, seed=7, ignore_eos=True)


class Talk:
    """Says its number again after every answer, ``turns`` times."""

    def __init__(self, number: int, turns: int = 1) -> None:
        self.number, self.left = number, turns

    def initial_prompt(self) -> list[int]:
        return [self.number, 5]

    def step(self, action: ts.SampledSequence) -> Step:
        self.left -= 1
        reward = float(sum(action.tokens) % 2)
        return Step(reward, [self.number] if self.left else None, {"left": float(self.left)})


def tokens_of(groups: list[Any]) -> list[list[list[int]]]:
    return [[trajectory.tokens for trajectory in group.trajectories] for group in groups]


def test_episodes_are_what_sampling_each_turn_gives(trainer: ts.TrainingClient):
    sampler = trainer.base_sampling_client()
    groups = [Group(lambda number=number: Talk(number, turns=3), size=2, name=f"talk {number}") for number in (8, 9)]
    found = rollout(sampler, groups, params=PARAMS, max_turns=5)
    assert [group.name for group in found] == ["talk 8", "talk 9"]
    for number, group in zip((8, 9), found, strict=True):
        assert len(group.trajectories) == 2
        assert not group.failed
        for trajectory in group.trajectories:
            assert [list(turn.observation) for turn in trajectory.turns] == [[number, 5], [number], [number]]
            assert trajectory.is_action.tolist() == [False, False, *[True] * 3, False, *[True] * 3, False, *[True] * 3]
            assert trajectory.reward == sum(float(sum(turn.action.tokens) % 2) for turn in trajectory.turns)
            # The logprobs are those of these tokens behind those tokens.
            again = sampler.compute_logprobs(trajectory.tokens).result()
            expected = [logprob or 0.0 for logprob in again] * trajectory.is_action
            np.testing.assert_allclose(trajectory.logprobs, expected, atol=2e-5)
    assert len({str(tokens) for group in tokens_of(found) for tokens in group}) == 4, "each draws with its own seed"
    assert tokens_of(rollout(sampler, groups, params=PARAMS, max_turns=5)) == tokens_of(found)
    short = rollout(sampler, groups, params=PARAMS, max_turns=2)
    assert {len(trajectory.turns) for group in short for trajectory in group.trajectories} == {2}


def test_a_trajectory_trains_with_the_ratio_of_its_own_policy(trainer: ts.TrainingClient):
    """On policy every ratio is 1, also at another temperature, and the loss is minus the summed advantages."""
    for temperature in (1.0, 0.5):
        params = ts.SamplingParams(max_tokens=3, seed=1, temperature=temperature, ignore_eos=True)
        groups = rollout(
            trainer.base_sampling_client(), [Group(lambda: Talk(8, turns=2), size=4)], params=params, max_turns=2
        )
        advantages = [np.array([1.0, -0.5, 0.0, 0.25])]
        datums = group_datums(groups, advantages, temperature=temperature)
        assert len(datums) == 3, "no datum without an advantage"
        metrics = trainer.forward(datums, "importance_sampling").result().metrics
        assert metrics["ratio:max"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["loss:sum"] == pytest.approx(-6 * 0.75, abs=1e-3)


def test_advantages_by_token_are_added(trainer: ts.TrainingClient):
    (group,) = rollout(trainer.base_sampling_client(), [Group(lambda: Talk(8), size=1)], params=PARAMS)
    (datum,) = group_datums([group], [np.array([0.5])], token_advantages=[[np.array([9.0, 9.0, 0.25, 0.0, -0.5])]])
    assert datum.loss_fn_inputs["advantages"].tolist() == [0.0, 0.75, 0.5, 0.0]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert trajectory_datum(group.trajectories[0], 1.0).loss_fn_inputs.keys() == datum.loss_fn_inputs.keys()
    (reference,) = reference_logprobs(trainer.base_sampling_client(), group.trajectories)
    np.testing.assert_allclose(reference[2:], group.trajectories[0].logprobs[2:], atol=2e-5)
    assert reference_logprobs(trainer.base_sampling_client(), []) == []


class Broken(Talk):
    def __init__(self, how: str) -> None:
        super().__init__(8)
        self.how = how
        if how == "make":
            raise OSError("no such task")

    def initial_prompt(self) -> list[int]:
        return [] if self.how == "empty" else super().initial_prompt()

    def step(self, action: ts.SampledSequence) -> Step:
        if self.how == "raises":
            raise ZeroDivisionError("division by zero")
        if self.how == "hangs":
            time.sleep(30)
        return super().step(action)


class Asynchronous(Talk):
    async def initial_prompt(self) -> list[int]:  # type: ignore[override]
        return super().initial_prompt()

    async def step(self, action: ts.SampledSequence) -> Step:  # type: ignore[override]
        await asyncio.sleep(30 if self.number == 9 else 0.01)
        return super().step(action)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Broken("make"), "make: OSError: no such task"),
        (lambda: Broken("empty"), "initial_prompt: no tokens; a prompt has at least one"),
        (lambda: Broken("raises"), "turn 1: step: ZeroDivisionError: division by zero"),
        (lambda: Broken("hangs"), "turn 1: step: took longer than 0.3 s"),
        (lambda: Asynchronous(9), "turn 1: step: took longer than 0.3 s"),
    ],
)
def test_an_environment_that_fails_fails_alone(trainer: ts.TrainingClient, make: Any, error: str):
    groups = [Group(make, size=2), Group(lambda: Asynchronous(8), size=2)]
    started = time.monotonic()
    broken, whole = rollout(trainer.base_sampling_client(), groups, params=PARAMS, step_timeout=0.3)
    assert time.monotonic() - started < 20
    assert [trajectory.error for trajectory in broken.failed] == [error] * 2
    assert broken.trajectories == []
    assert broken.rewards == []
    logged = summary([broken, whole])
    assert (logged["failed"], logged["turns"], logged["tokens"], logged["left"]) == (2, 1, 3, 0)
    assert logged["reward"] == sum(whole.rewards) / 2
    assert logged["informative"] == whole.is_informative / 2
    assert summary([broken]) == {"informative": 0, "failed": 2}
    assert len(whole.trajectories) == 2
    assert not whole.failed


def test_a_groups_score_is_added(trainer: ts.TrainingClient):
    groups = [
        Group(lambda: Talk(8), size=3, score=lambda played: [10.0 * i for i in range(len(played))]),
        Group(lambda: Talk(8), size=2, score=lambda _: [1.0]),
    ]
    scored, wrong = rollout(trainer.base_sampling_client(), groups, params=PARAMS)
    assert [round(reward, -1) for reward in scored.rewards] == [0.0, 10.0, 20.0]
    assert scored.is_informative
    assert [trajectory.error for trajectory in wrong.failed] == ["score: 1 rewards for 2 trajectories"] * 2


def test_groups_arrive_as_they_end(trainer: ts.TrainingClient):
    class Slow(Talk):
        def step(self, action: ts.SampledSequence) -> Step:
            time.sleep(1.0)
            return super().step(action)

    groups = [Group(lambda: Slow(8), size=1), Group(lambda: Talk(8), size=1)]
    assert [index for index, _ in stream(trainer.base_sampling_client(), groups, params=PARAMS)] == [1, 0]


def test_leaving_early_and_errors_of_the_service_end_what_runs(trainer: ts.TrainingClient):
    sampler = trainer.base_sampling_client()
    arriving = stream(sampler, [Group(lambda: Talk(8), size=1), Group(lambda: Asynchronous(9), size=1)], params=PARAMS)
    started = time.monotonic()
    assert next(arriving)[0] == 0
    arriving.close()
    assert time.monotonic() - started < 10
    with pytest.raises(ts.InvalidRequest, match="vocabulary"):
        rollout(sampler, [Group(lambda: Talk(100_000), size=1)], params=PARAMS)
