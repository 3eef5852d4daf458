"""Sampling while training: batches that are rolled out ahead, at most so many steps off policy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

import trainsession as ts

from .env import Group
from .rollouts import STOPPED, TrajectoryGroup

RollOut = Callable[[ts.SamplingClient, Sequence[Group], int], list[TrajectoryGroup]]
"""As `rollout`, with its options bound: whose weights act, the groups, and the batch's number."""

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on.

    Attributes:
        step: The steps that were made before this one.
        sampled_at: The same when its weights were frozen.
        groups: What was rolled out.
    """

    step: int
    sampled_at: int
    groups: list[TrajectoryGroup]

    @property
    def staleness(self) -> int:
        return self.step - self.sampled_at


def batches(
    trainer: ts.TrainingClient, problems: Iterable[Sequence[Group]], roll_out: RollOut, *, max_staleness: int = 0
) -> Generator[Batch, None, None]:
    """A batch for each element of ``problems``; the body of the loop makes one step with it.

        for batch in batches(trainer, problems, partial(rollout, params=params), max_staleness=1):
            trainer.forward_backward(...)
            trainer.optim_step(...)

    While the body runs, the next ``max_staleness`` batches are being rolled out, with weights that were
    frozen so many steps before theirs. 0 is on policy: nothing overlaps. 1 hides the time that slow rewards take
    behind training, or training behind them; correct for it with a loss that has importance ratios. Leaving the
    loop early stops what is rolled out ahead.

    Args:
        trainer: Whose weights act; frozen once a step.
        problems: Groups of each step, taken as they are needed.
        roll_out: What makes trajectories of them; given each batch's number, so that each draws with seeds of its own.
        max_staleness: Steps between the weights that acted and those that are trained, at most.
    """
    source, numbers = iter(problems), count()
    waiting: deque[_Ahead] = deque()
    try:
        step = 0
        while True:
            wanted = max_staleness + 1 - len(waiting)
            fresh = list(islice(source, wanted))
            if fresh:
                sampler = trainer.save_weights_and_get_sampling_client()
                for groups in fresh:
                    waiting.append(_Ahead(step, partial(roll_out, sampler, groups, next(numbers))))
            if not waiting:
                return
            found = waiting[0].groups.result()
            yield Batch(step, waiting.popleft().sampled_at, found)
            step += 1
    finally:
        for ahead in waiting:
            ahead.stop.set_result(None)
        # Time to cancel samples in the service; a `roll_out` that does not end keeps nobody waiting.
        wait([ahead.groups for ahead in waiting], timeout=STOP_SECONDS)


class _Ahead:
    """One rollout, in a daemon thread: left behind, it must not keep the program from ending."""

    def __init__(self, sampled_at: int, roll_out: Callable[[], list[TrajectoryGroup]]) -> None:
        self.sampled_at = sampled_at
        self.groups: Future[list[TrajectoryGroup]] = Future()
        self.stop: Future[None] = Future()
        threading.Thread(target=self._run, args=(roll_out,), name="rollout ahead", daemon=True).start()

    def _run(self, roll_out: Callable[[], list[TrajectoryGroup]]) -> None:
        STOPPED.set(self.stop)
        try:
            self.groups.set_result(roll_out())
        except BaseException as error:
            self.groups.set_exception(error)


def minibatches(arriving: Iterable[tuple[int, TrajectoryGroup]], size: int) -> Iterator[list[TrajectoryGroup]]:
    """So many groups at a time, as they arrive from `rollouts.stream`; the last may be fewer.

    Gradients of minibatches add up until the step, so a batch's first groups are trained on while its last
    are still being sampled. Scale losses by what is known beforehand, not by the minibatch's own size.
    """
    source = iter(arriving)
    while batch := [group for _, group in islice(source, size)]:
        yield batch


def informative(
    roll_out: Callable[[Sequence[Group], int], list[TrajectoryGroup]],
    problems: Iterator[Group],
    *,
    wanted: int,
    limit: int,
) -> list[TrajectoryGroup]:
    """Groups whose rewards differ: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, 3.2).

    Rolls out as many as are missing until there are enough, or ``limit`` groups were tried. ``roll_out`` is given
    the number of the attempt as well, to draw each with seeds of its own.
    """
    found: list[TrajectoryGroup] = []
    tried, attempts = 0, count()
    while len(found) < wanted and tried < limit:
        some = list(islice(problems, min(wanted - len(found), limit - tried)))
        if not some:
            break
        tried += len(some)
        found += [group for group in roll_out(some, next(attempts)) if group.is_informative]
    return found
