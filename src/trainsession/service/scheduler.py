"""Which ready operations an engine runs next. Pure bookkeeping on integers.

Every project, and every session within it, has a virtual time: the tokens that it was served. The
one with the least goes first, so that a long job cannot starve a short one; whoever was idle comes
back at the present minimum and has no claim on the past. Passes over data of different sessions
are merged up to a token bound. Operations without a pass (a step, a save) cost next to nothing and
unblock their session, so they go before passes, but only a few in a row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MAX_MERGED_TOKENS = 32_768
"""Tokens of a pass that several sessions share; one operation alone may have more."""
MAX_SHORT_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Ready:
    """An operation that could run now: the next one of its session."""

    project: str
    session: str
    tokens: int
    """Of its pass; 0 for an operation without one."""
    mergeable: bool = False
    """It may share a pass with others."""


class VirtualTime:
    """How much each key was served, with newcomers at the present minimum of those that wait."""

    def __init__(self) -> None:
        self._served: dict[Hashable, int] = {}
        self._floor = 0

    def enter(self, keys: Iterable[Hashable]) -> None:
        """These keys wait now, and no others."""
        waiting = {key: max(self._served.get(key, 0), self._floor) for key in keys}
        self._floor = max(self._floor, min(waiting.values(), default=self._floor))
        # Who left while ahead of the others keeps that debt for a quick return; the rest is forgotten.
        ahead = {key: served for key, served in self._served.items() if served > self._floor}
        self._served = ahead | waiting

    def of(self, key: Hashable) -> int:
        return self._served[key]

    def serve(self, key: Hashable, cost: int) -> None:
        self._served[key] += cost


class FairQueue:
    """Ranks ready operations: first by what their project was served, then by what their session was."""

    def __init__(self) -> None:
        self._projects = VirtualTime()
        self._sessions = VirtualTime()

    def enter(self, ready: Sequence[Ready]) -> None:
        self._projects.enter(item.project for item in ready)
        self._sessions.enter(item.session for item in ready)

    def first(self, ready: Sequence[Ready]) -> Ready:
        return min(
            ready, key=lambda item: (self._projects.of(item.project), self._sessions.of(item.session), item.session)
        )

    def serve(self, item: Ready) -> None:
        cost = max(1, item.tokens)
        self._projects.serve(item.project, cost)
        self._sessions.serve(item.session, cost)


class Scheduler:
    """Chooses among the sessions of one base model.

    Args:
        max_merged_tokens: Bound of a shared pass.
    """

    def __init__(self, max_merged_tokens: int = MAX_MERGED_TOKENS) -> None:
        self._max_merged_tokens = max_merged_tokens
        # Two queues: what a project is served in steps must not count against its passes.
        self._short = FairQueue()
        self._passes = FairQueue()
        self._short_in_a_row = 0

    def pick(self, ready: Sequence[Ready]) -> list[Ready]:
        """The operations to run together now: one, or several mergeable ones; [] if none is ready."""
        short = [item for item in ready if not item.tokens]
        passes = [item for item in ready if item.tokens]
        if short and (not passes or self._short_in_a_row < MAX_SHORT_IN_A_ROW):
            self._short_in_a_row += 1
            self._short.enter(short)
            item = self._short.first(short)
            self._short.serve(item)
            return [item]
        self._short_in_a_row = 0
        return self._pick_passes(passes)

    def _pick_passes(self, passes: list[Ready]) -> list[Ready]:
        picked: list[Ready] = []
        room = self._max_merged_tokens
        self._passes.enter(passes)
        while passes and (not picked or picked[0].mergeable):
            item = self._passes.first(passes)
            if picked and not (item.mergeable and item.tokens <= room):
                # Nobody of its project overtakes it, or it might never be first.
                passes = [other for other in passes if other.project != item.project]
                continue
            self._passes.serve(item)
            picked.append(item)
            passes.remove(item)
            room -= item.tokens
        return picked
