"""What each project has in use, held against its own limits. In memory: counted anew after a restart."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import RateLimited
from ..limits import Limits

_MINUTE = 60.0


@dataclass(slots=True)
class _Bucket:
    """How far a project is above its tokens per minute: tokens not yet paid off by time."""

    used: float = 0.0
    at: float = 0.0


class TokenRate:
    """A rate of tokens that is learned of after the fact.

    Nobody knows beforehand how many tokens a sample will have, and a batch larger than a minute's
    share must run at some time. So work is accepted as long as less than a minute's share is in use,
    counts when it is known, and what comes next waits until time has paid for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: defaultdict[str, _Bucket] = defaultdict(_Bucket)

    def check(self, project: str, per_minute: int) -> None:
        """Raise `RateLimited`, with the seconds to wait, for a project that used its share."""
        used = self._used(project, per_minute)
        if used >= per_minute:
            wait = max(1, math.ceil((used - per_minute) * _MINUTE / per_minute))
            raise RateLimited(
                f"the project used more than its {per_minute} tokens a minute (limit max_tokens_per_minute); "
                f"come back in {wait} s",
                details={"limit": "max_tokens_per_minute", "bound": per_minute, "retry_after": wait},
            )

    def spend(self, project: str, tokens: int) -> None:
        self._buckets[project].used += tokens

    def _used(self, project: str, per_minute: int) -> float:
        bucket, now = self._buckets[project], self._clock()
        bucket.used = max(0.0, bucket.used - (now - bucket.at) * per_minute / _MINUTE)
        bucket.at = now
        return bucket.used


class Quotas:
    """Counts of what is in use, by project."""

    def __init__(self) -> None:
        self.tokens = TokenRate()
        self._entering: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()

    def check_queued(self, project: str, waiting: int, limits: Limits) -> None:
        """Raise `RateLimited` where a project has no place left for one more operation.

        Args:
            waiting: Accepted operations of the project that have not ended.
        """
        bound = limits.max_queued_operations
        if waiting + self._entering[project] >= bound:
            raise RateLimited(
                f"the project has {bound} operations waiting (limit max_queued_operations); fetch some results first",
                details={"limit": "max_queued_operations", "bound": bound},
            )

    @contextmanager
    def entering(self, project: str) -> Iterator[None]:
        """While one operation is being accepted: others that arrive meanwhile see its place taken."""
        self._entering[project] += 1
        try:
            yield
        finally:
            self._entering[project] -= 1

    def take_samples(self, project: str, count: int, limits: Limits) -> None:
        """Take places; whoever took them gives each back by `count_samples`.

        Raises:
            LimitExceeded: more than there are. RateLimited: more than are free.
        """
        bound = limits.max_concurrent_samples
        limits.check("max_concurrent_samples", count, "requests")
        if self._samples[project] + count > bound:
            raise RateLimited(
                f"{self._samples[project]} sample requests of the project are under way and {count} more would be "
                f"above the limit max_concurrent_samples = {bound}; fetch some results first",
                details={"limit": "max_concurrent_samples", "bound": bound, "value": self._samples[project] + count},
            )
        self._samples[project] += count

    def count_samples(self, project: str, change: int) -> None:
        """Places taken without asking (after a restart), or given back."""
        self._samples[project] += change
