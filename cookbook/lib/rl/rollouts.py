"""Groups of episodes, many at once.

    groups = rollout(sampler, [Group(lambda: Sum(...), size=8), ...], params=ts.SamplingParams(max_tokens=5))

An environment that raises, or takes too long, fails its own episode; the batch goes on with the others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import operator
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

import trainsession as ts

from ..config import UsageError
from .advantages import are_equal
from .env import Env, Group, Step

T = TypeVar("T")
STOPPED: ContextVar[concurrent.futures.Future[None] | None] = ContextVar("STOPPED", default=None)
"""In a thread that others may stop: when it is done, `stream` ends there as if its loop were left."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that the environment said, what the policy answered, and what came of it."""

    observation: Sequence[int]
    action: ts.SampledSequence
    step: Step


@dataclass(slots=True)
class Trajectory:
    """One episode.

    Attributes:
        turns: In order; none where the environment failed before the first answer.
        error: Why it ended early; "" where it ended by itself or by ``max_turns``.
        extra_reward: From the group's ``score``.
    """

    turns: list[Turn] = field(default_factory=list)
    error: str = ""
    extra_reward: float = 0.0

    @property
    def reward(self) -> float:
        return sum(turn.step.reward for turn in self.turns) + self.extra_reward

    @property
    def tokens(self) -> list[int]:
        """All of them, in order."""
        return [token for turn in self.turns for token in (*turn.observation, *turn.action.tokens)]

    @property
    def is_action(self) -> npt.NDArray[np.bool_]:
        """(tokens,): true where the policy chose the token."""
        parts = [[False] * len(turn.observation) + [True] * len(turn.action.tokens) for turn in self.turns]
        return np.array(list(itertools.chain.from_iterable(parts)), dtype=np.bool_)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """(tokens,): those of the actions as they were sampled, 0 elsewhere."""
        parts = [[0.0] * len(turn.observation) + list(turn.action.logprobs) for turn in self.turns]
        return np.array(list(itertools.chain.from_iterable(parts)), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """What came of a `Group`: the episodes that ended, and those that failed."""

    name: str
    trajectories: list[Trajectory]
    failed: list[Trajectory] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def is_informative(self) -> bool:
        """Whether its rewards differ: equal ones have no advantage over each other."""
        return not are_equal(self.rewards)


def summary(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """What to log of a batch: means over its trajectories, the metrics of their last steps among them.

    Where every episode failed there is no ``reward``, nor another mean. ``informative`` is the share of groups
    whose rewards differ; ``failed`` counts episodes.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    found: dict[str, list[float]] = {"reward": [one.reward for one in trajectories]}
    found["turns"] = [float(len(one.turns)) for one in trajectories]
    found["tokens"] = [float(one.is_action.sum()) for one in trajectories]
    for trajectory in trajectories:
        for name, value in trajectory.turns[-1].step.metrics.items():
            found.setdefault(name, []).append(float(value))
    return {
        **{name: sum(values) / len(values) for name, values in found.items() if values},
        "informative": sum(group.is_informative for group in groups) / max(1, len(groups)),
        "failed": float(sum(len(group.failed) for group in groups)),
    }


def rollout(
    sampler: ts.SamplingClient, groups: Sequence[Group], batch: int = 0, **options: Any
) -> list[TrajectoryGroup]:
    """Run all episodes, and return the groups in their order; ``batch`` and options as of `stream`."""
    found = dict(stream(sampler, groups, batch, **options))
    return [found[index] for index in range(len(groups))]


def stream(
    sampler: ts.SamplingClient,
    groups: Sequence[Group],
    batch: int = 0,
    *,
    params: ts.SamplingParams,
    max_turns: int = 1,
    concurrency: int = 64,
    step_timeout: float = 60.0,
) -> Generator[tuple[int, TrajectoryGroup], None, None]:
    """Each group, with its place in ``groups``, as soon as its last episode has ended.

    Leaving the loop early, Ctrl-C and errors cancel what still runs, samples in the service among it.

    Args:
        sampler: Whose weights act.
        groups: What to run.
        batch: Its number in the run: batches of one seed draw differently.
        params: Of every action. With a ``seed``, each turn of each episode draws with one of its own that
            follows from it and ``batch``, so a rollout repeats itself.
        max_turns: Actions of an episode, at most.
        concurrency: Calls of environments that run at the same time.
        step_timeout: Seconds that one of them may take. A thread cannot be stopped; it is left behind.

    Raises:
        UsageError: ``concurrency`` or ``max_turns`` is below 1.
        TrainSessionError: of the service. Nothing that an environment raises is.
    """
    for name, value in (("concurrency", concurrency), ("max_turns", max_turns)):
        if value < 1:
            raise UsageError(f"{name} is {value}; must be at least 1")
    results: queue.SimpleQueue[tuple[int, TrajectoryGroup] | BaseException | None] = queue.SimpleQueue()
    running: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

    player = _Player(sampler, params, batch, max_turns, step_timeout, asyncio.Semaphore(concurrency))

    async def play_all() -> None:
        async def play(index: int, group: Group) -> None:
            results.put(await player.play_group(index, group))

        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        assert this is not None
        running.set_result(lambda: loop.call_soon_threadsafe(this.cancel))
        async with asyncio.TaskGroup() as tasks:
            for index, group in enumerate(groups):
                tasks.create_task(play(index, group))

    def run() -> None:
        try:
            asyncio.run(play_all())
            results.put(None)
        except BaseExceptionGroup as errors:
            results.put(errors.exceptions[0])
        except BaseException as error:
            results.put(error)
        finally:
            player.cancel_samples()

    if (stopped := STOPPED.get()) is not None:
        stopped.add_done_callback(lambda _: results.put(concurrent.futures.CancelledError("the rollout was stopped")))
    thread = threading.Thread(target=run, name="rollouts", daemon=True)
    thread.start()
    try:
        while (item := results.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        with contextlib.suppress(RuntimeError):  # they have ended
            running.result()()
        thread.join()


class _EnvironmentError(Exception):
    """What an environment did, said for its trajectory."""


_Answer = ts.SampledSequence | ts.PromptTooLong


def _token_ids(what: str, given: Any) -> list[int]:
    try:
        if not isinstance(given, (str, bytes)):
            return [operator.index(token) for token in given]
    except TypeError:
        pass
    raise _EnvironmentError(f"{what}: {given!r:.60}; must be token ids")


def _checked(step: Any) -> Step:
    """What an environment's step returned, of plain numbers."""
    if not isinstance(step, Step):
        raise _EnvironmentError(f"step: {step!r:.60}; must return a Step")
    try:
        reward = float(step.reward)
    except (TypeError, ValueError):
        raise _EnvironmentError(f"step: reward: {step.reward!r:.60}; must be a number") from None
    observation = None if step.observation is None else _token_ids("step: observation", step.observation)
    return replace(step, reward=reward, observation=observation)


@dataclass(frozen=True, slots=True)
class _Player:
    sampler: ts.SamplingClient
    params: ts.SamplingParams
    batch: int
    max_turns: int
    step_timeout: float
    places: asyncio.Semaphore
    sampling: set[ts.OperationFuture[ts.SampleResponse]] = field(default_factory=set)

    def cancel_samples(self) -> None:
        """What nobody waits for any more would be sampled, and billed, to its end."""
        if self.sampling:
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda future: future.cancel(), self.sampling))

    async def _sample(self, prompt: list[int], count: int, place: tuple[int, int, int]) -> list[ts.SampledSequence]:
        future = self.sampler.sample(prompt, num_samples=count, sampling_params=self._seeded(*place))
        self.sampling.add(future)
        response = await future
        self.sampling.discard(future)
        return response.sequences

    async def play_group(self, index: int, group: Group) -> tuple[int, TrajectoryGroup]:
        begun = await asyncio.gather(*(self._begin(group) for _ in range(group.size)))
        firsts = await self._first_actions(index, [prompt for _, prompt, error in begun if not error])
        played: list[Trajectory] = []
        playing: list[Coroutine[Any, Any, Trajectory]] = []
        for place, (env, prompt, error) in enumerate(begun):
            if env is None:
                played.append(Trajectory(error=error))
            else:
                playing.append(self._play(env, prompt, firsts.pop(0), (index, place)))
        played += await asyncio.gather(*playing)
        ended = [trajectory for trajectory in played if not trajectory.error]
        if group.score is not None and ended:
            await self._score(group.score, ended)
        return index, TrajectoryGroup(
            group.name, [one for one in played if not one.error], [one for one in played if one.error]
        )

    async def _begin(self, group: Group) -> tuple[Env | None, list[int], str]:
        try:
            env = await self._call("make", group.make)
            prompt = _token_ids("initial_prompt", await self._call("initial_prompt", env.initial_prompt))
        except _EnvironmentError as error:
            return None, [], str(error)
        if not prompt:
            return None, [], "initial_prompt: no tokens; a prompt has at least one"
        return env, prompt, ""

    async def _first_actions(self, index: int, prompts: list[list[int]]) -> list[_Answer]:
        """Equal prompts are one request of several samples, so the service computes them once."""
        if prompts and all(prompt == prompts[0] for prompt in prompts):
            return await self._answers(prompts[0], len(prompts), (index, 0, 0))
        each = [self._answers(prompt, 1, (index, place, 0)) for place, prompt in enumerate(prompts)]
        return [answer for answers in await asyncio.gather(*each) for answer in answers]

    async def _answers(self, prompt: list[int], count: int, place: tuple[int, int, int]) -> list[_Answer]:
        try:
            return [*await self._sample(prompt, count, place)]
        except ts.PromptTooLong as error:  # an episode's own fault; the others go on
            return [error] * count

    async def _play(self, env: Env, prompt: list[int], action: _Answer, place: tuple[int, int]) -> Trajectory:
        trajectory = Trajectory()
        observation: Sequence[int] = prompt
        for turn in itertools.count(1):
            try:
                if isinstance(action, ts.PromptTooLong):
                    raise _EnvironmentError(f"the prompt of all tokens so far: {action}")
                step = _checked(await self._call("step", env.step, action))
            except _EnvironmentError as error:
                trajectory.error = f"turn {turn}: {error}"
                return trajectory
            trajectory.turns.append(Turn(observation, action, step))
            if step.observation is None or turn == self.max_turns:
                return trajectory
            observation = step.observation
            (action,) = await self._answers([*trajectory.tokens, *observation], 1, (*place, turn))
        raise AssertionError("unreachable")

    async def _score(
        self, score: Callable[[Sequence[Trajectory]], Sequence[float]], ended: Sequence[Trajectory]
    ) -> None:
        try:
            given = await self._call("score", score, ended)
            try:
                scores = [float(one) for one in given]
            except (TypeError, ValueError):
                raise _EnvironmentError(f"score: {given!r:.60}; must be a number for each trajectory") from None
            if len(scores) != len(ended):
                raise _EnvironmentError(f"score: {len(scores)} rewards for {len(ended)} trajectories")
        except _EnvironmentError as error:
            for trajectory in ended:
                trajectory.error = str(error)
            return
        for trajectory, extra in zip(ended, scores, strict=True):
            trajectory.extra_reward = extra

    async def _call(self, what: str, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """What a user's function returns, within its time.

        Raises:
            _EnvironmentError: it raised, or took too long.
        """
        limit = asyncio.timeout(None)
        try:
            async with self.places, limit:
                limit.reschedule(asyncio.get_running_loop().time() + self.step_timeout)
                if inspect.iscoroutinefunction(function):
                    return cast("T", await function(*args))
                answer, error = await _in_thread(function, *args)
                if error is not None:
                    raise _EnvironmentError(_said(what, error)) from error
                return cast("T", await answer if inspect.isawaitable(answer) else answer)
        except (_EnvironmentError, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit, too, which would end the whole batch
            if limit.expired():
                raise _EnvironmentError(f"{what}: took longer than {self.step_timeout:g} s") from None
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise _EnvironmentError(_said(what, error)) from error

    def _seeded(self, index: int, place: int, turn: int) -> ts.SamplingParams:
        if self.params.seed is None:
            return self.params
        drawn = np.random.SeedSequence([self.params.seed, self.batch, index, place, turn]).generate_state(1)
        return replace(self.params, seed=int(drawn[0]))


def _said(what: str, error: BaseException) -> str:
    return f"{what}: {type(error).__name__}: {error}" if str(error) else f"{what}: {type(error).__name__}"


async def _in_thread(function: Callable[..., T], *args: Any) -> tuple[T | None, BaseException | None]:
    """What it returned, or raised: some errors cannot be raised out of a coroutine, as `StopIteration`.

    In a daemon thread: one that never returns must not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[T | None, BaseException | None]) -> None:
        if not done.done():  # else nobody waits any more
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome = function(*args), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended without it
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done
