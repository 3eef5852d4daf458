"""Requests that were not admitted yet, and which project's is admitted next.

Every project has a virtual time: the tokens that were computed for it. The one with the least goes
first; within a project the order of arrival counts. A request that is admitted pays for its prompt and
for as many tokens as samples lately had, which its own are then paid from; what it draws beyond that is
charged as it is drawn, and what it does not draw is given back. How many it *may* draw does not matter:
whoever leaves ``max_tokens`` to the context is served like the others.
"""

from __future__ import annotations

from collections import deque

from .sequence import Request, Sequence

_LATELY = 32
"""Samples whose lengths say what the next one is expected to have."""


class WaitingLine:
    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, Request]] = {}
        """By project, then by arrival, oldest first."""
        self._served: dict[str, int] = {}
        self._floor = 0
        """Where a project stands that nothing is known of: with those that wait, not before them."""
        self._lengths: deque[int] = deque(maxlen=_LATELY)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def samples(self) -> int:
        """Those of all requests in line."""
        return sum(len(request.pending) for mine in self._waiting.values() for request in mine.values())

    def add(self, request: Request) -> None:
        if request.project not in self._waiting:
            self._enter(request.project)
        self._waiting.setdefault(request.project, {})[request.arrival] = request

    def remove(self, request: Request) -> bool:
        """Whether it stood in line; no matter where."""
        mine = self._waiting.get(request.project, {})
        if mine.pop(request.arrival, None) is None:
            return False
        if not mine:
            del self._waiting[request.project]
        return True

    def first(self) -> Request | None:
        heads = (next(iter(mine.values())) for mine in self._waiting.values())
        return min(heads, key=lambda head: (self._served_of(head.project), head.arrival), default=None)

    def admitted(self, request: Request) -> None:
        """It pays at once, or all places of a pass would go to one project."""
        request.prompt_prepaid = len(request.prompt) - request.prompt_computed
        usual = sum(self._lengths) // max(1, len(self._lengths))
        for sequence in request.pending:
            sequence.prepaid = min(usual, request.max_tokens)
        prepaid = sum(sequence.prepaid for sequence in request.pending)
        self._charge(request.project, request.prompt_prepaid + prepaid)

    def drew(self, sequence: Sequence) -> None:
        """A token of its own."""
        if sequence.prepaid:
            sequence.prepaid -= 1
        else:
            self._charge(sequence.request.project, 1)

    def ended(self, sequence: Sequence) -> None:
        self._lengths.append(len(sequence.output))
        self._charge(sequence.request.project, -sequence.prepaid)
        sequence.prepaid = 0

    def refund(self, request: Request, *sequences: Sequence) -> None:
        """It ends before its time."""
        left = request.prompt_prepaid + sum(sequence.prepaid for sequence in sequences)
        self._charge(request.project, -left)

    def _charge(self, project: str, tokens: int) -> None:
        if tokens:
            self._served[project] = self._served_of(project) + tokens

    def _enter(self, project: str) -> None:
        """A project that had nothing in line comes to it: it has no claim on the past."""
        ends = [self._served_of(other) for other in self._waiting]
        # Where nobody waits, nobody was held up: nothing is held against anyone.
        self._floor = max(self._floor, min(ends) if ends else max(self._served.values(), default=0))
        # Who drew more than the others while they waited keeps that debt.
        self._served = {other: served for other, served in self._served.items() if served > self._floor}

    def _served_of(self, project: str) -> int:
        return max(self._served.get(project, 0), self._floor)
