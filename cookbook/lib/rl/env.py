"""What a policy acts in.

    class Sum:
        def __init__(self, tokenizer, a, b):
            ...
        def initial_prompt(self):
            return self.tokenizer.encode(f"{a} + {b} =")
        def step(self, action):
            return Step(reward=float(action.text.strip() == str(a + b)))

Both methods may be ``async``. A method that is not runs in a thread of its own, so it may block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trainsession as ts

if TYPE_CHECKING:
    from .rollouts import Trajectory


@dataclass(frozen=True, slots=True)
class Step:
    """What came of an action.

    Attributes:
        reward: Of this action; a trajectory's reward is the sum.
        observation: Token ids that follow the action in the next prompt; None ends the episode.
        metrics: For `rollouts.summary`, which takes those of an episode's last step.
    """

    reward: float = 0.0
    observation: Sequence[int] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode. The next prompt is all tokens so far and the observation, so an episode is one sequence."""

    def initial_prompt(self) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Token ids, at least one."""
        ...

    def step(self, action: ts.SampledSequence) -> Step | Awaitable[Step]: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes of one problem, whose rewards are compared with each other.

    Attributes:
        make: A new episode.
        size: Episodes.
        name: Shown in errors and in saved trajectories.
        score: More rewards, of episodes that have ended, given all of them: for judges that compare.
    """

    make: Callable[[], Env]
    size: int
    name: str = ""
    score: Callable[[Sequence[Trajectory]], Sequence[float]] | None = None
