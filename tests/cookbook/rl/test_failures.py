"""What environments, prompts and callers do wrong fails the episode it belongs to, and costs no more than it must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import trainsession as ts
from cookbook.lib.config import UsageError
from cookbook.lib.rl.env import Group, Step
from cookbook.lib.rl.rollouts import rollout, stream

PARAMS = ts.SamplingParams(max_tokens=3, seed=7, ignore_eos=True)


@pytest.fixture
def sampler(trainer: ts.TrainingClient) -> ts.SamplingClient:
    return trainer.base_sampling_client()


class Says:
    """A prompt, and what a function makes of an answer."""

    def __init__(self, prompt: Any, step: Callable[[], Any] = Step) -> None:
        self.prompt, self.answer = prompt, step

    def initial_prompt(self) -> Any:
        return self.prompt

    def step(self, action: ts.SampledSequence) -> Any:
        return self.answer()


class Cancels(Says):
    async def step(self, action: ts.SampledSequence) -> Step:
        raise asyncio.CancelledError

    async def initial_prompt(self) -> list[int]:
        return [5, 6]


class Exits(Cancels):
    async def step(self, action: ts.SampledSequence) -> Step:
        raise SystemExit(3)


def raising(error: BaseException) -> Callable[[], Any]:
    def step() -> Any:
        raise error

    return step


def test_each_fails_its_own_episode_and_says_why(sampler: ts.SamplingClient) -> None:
    wrong: dict[str, Any] = {
        "turn 1: step: StopIteration": Says([5, 6], raising(StopIteration())),
        "turn 1: step: SystemExit: 2": Says([5, 6], raising(SystemExit(2))),
        "turn 1: step: CancelledError": Cancels([5, 6]),
        "turn 1: step: SystemExit: 3": Exits([5, 6]),
        "turn 1: step: None; must return a Step": Says([5, 6], lambda: None),
        "turn 1: step: observation: 'more'; must be token ids": Says([5, 6], lambda: Step(0.0, "more")),  # type: ignore[arg-type]
        "turn 1: step: reward: None; must be a number": Says([5, 6], lambda: Step(None)),  # type: ignore[arg-type]
        "initial_prompt: 'text'; must be token ids": Says("text"),
        "initial_prompt: None; must be token ids": Says(None),
    }
    groups = [Group(lambda env=env: env, 1) for env in [*wrong.values(), Says([5, 6])]]
    groups.append(Group(lambda: Says([5, 6]), 1, score=lambda _: None))  # type: ignore[arg-type,return-value]
    *failed, right, scored = rollout(sampler, groups, params=PARAMS)
    assert [group.failed[0].error for group in failed] == list(wrong)
    assert len(right.trajectories) == 1
    assert scored.failed[0].error == "score: None; must be a number for each trajectory"


def test_a_prompt_that_is_too_long_fails_its_episode_only(sampler: ts.SamplingClient) -> None:
    def growing(by: int) -> Says:
        return Says([5, 6], lambda: Step(1.0, [7] * by))

    lengths, prompts = iter([1, 100_000]), iter([[5] * 100_000, [5, 6]])
    groups = [Group(lambda: growing(next(lengths)), 2), Group(lambda: Says(next(prompts)), 2)]
    for group in rollout(sampler, groups, params=PARAMS, max_turns=2):
        assert len(group.trajectories) == 1
        (one,) = group.failed
        assert "the prompt of all tokens so far: " in one.error


@pytest.mark.parametrize("how", ["left", "an error"])
def test_samples_that_nobody_waits_for_are_cancelled(sampler: ts.SamplingClient, how: str) -> None:
    begun: list[Any] = []
    sample = sampler.sample

    def counted(*args: Any, **kwargs: Any) -> Any:
        begun.append(sample(*args, **kwargs))
        return begun[-1]

    sampler.sample = counted  # type: ignore[method-assign]
    params = ts.SamplingParams(max_tokens=200, seed=7, ignore_eos=True)
    groups = [Group(lambda: Says([5, 6]), 8) for _ in range(12)]
    if how == "left":
        arriving = stream(sampler, [Group(lambda: Says(None), 1), *groups], params=params)
        next(arriving)  # which never sampled
        while len(begun) < len(groups):
            time.sleep(0.001)
        arriving.close()
    else:
        with pytest.raises(ts.InvalidRequest, match="vocabulary"):
            rollout(sampler, [*groups, Group(lambda: Says([100_000]), 1)], params=params)
    stopped = 0
    for future in begun:
        error = future.exception(30)
        if error is None:
            stopped += any(one.stop_reason == "cancelled" for one in future.result().sequences)
        else:
            stopped += isinstance(error, ts.Cancelled)
    assert stopped > 0


def test_numbers_below_one_are_refused(sampler: ts.SamplingClient) -> None:
    started = time.monotonic()
    for name in ("concurrency", "max_turns"):
        with pytest.raises(UsageError, match=f"{name} is 0; must be at least 1"):
            rollout(sampler, [Group(lambda: Says([5, 6]), 1)], params=PARAMS, **{name: 0})
    assert time.monotonic() - started < 5
