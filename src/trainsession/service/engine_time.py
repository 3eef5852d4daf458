"""Engine time: how long an engine worked, and for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from ..engine.api import EngineHandle
from ..store.schema import engine_time

HOUR = 3600
Owner = tuple[str, str, str]
"""Project, session id, base model."""


@dataclass(slots=True)
class _Inside:
    calls: int
    since: float
    """The engine's ``each`` up to which this owner's time was credited."""


@dataclass(slots=True)
class _Engine:
    busy: float
    """The engine's busy seconds when it was last looked at."""
    each: float = 0.0
    """What somebody would have got who had a call in flight all the time."""
    inside: dict[Owner, _Inside] = field(default_factory=dict)

    def look(self, busy: float) -> None:
        if self.inside:
            self.each += max(0.0, busy - self.busy) / len(self.inside)
        self.busy = busy


class EngineTime:
    """Shares an engine's busy seconds equally among the sessions that have calls in flight.

    So no second counts twice: the shares add up to what the engine worked. Entering and leaving take
    the same time whatever the number of calls under way.
    """

    def __init__(self) -> None:
        self._engines: dict[EngineHandle, _Engine] = {}
        self._unwritten: dict[tuple[Owner, int], float] = {}

    def enter(self, handle: EngineHandle, owner: Owner) -> None:
        """A call for this owner goes to the engine; every `enter` needs its `leave`."""
        engine = self._engines.get(handle)
        if engine is None:
            engine = self._engines[handle] = _Engine(handle.busy_seconds)
        engine.look(handle.busy_seconds)
        engine.inside.setdefault(owner, _Inside(0, engine.each)).calls += 1

    def leave(self, handle: EngineHandle, owner: Owner) -> None:
        engine = self._engines[handle]
        engine.look(handle.busy_seconds)
        inside = engine.inside[owner]
        inside.calls -= 1
        if not inside.calls:
            self._credit(owner, engine.each - inside.since)
            del engine.inside[owner]
            if not engine.inside:
                del self._engines[handle]

    def take(self) -> Callable[[sa.Connection], None] | None:
        """A write of everything up to now that was not yet written; None where there is nothing."""
        for handle, engine in self._engines.items():
            engine.look(handle.busy_seconds)
            for owner, inside in engine.inside.items():
                self._credit(owner, engine.each - inside.since)
                inside.since = engine.each
        unwritten, self._unwritten = self._unwritten, {}
        if not unwritten:
            return None

        def write(connection: sa.Connection) -> None:
            for ((project, session_id, base_model), hour), seconds in unwritten.items():
                row = {"project": project, "session_id": session_id, "base_model": base_model, "hour": hour}
                mine = sa.and_(*(engine_time.c[name] == value for name, value in row.items()))
                add = sa.update(engine_time).where(mine).values(seconds=engine_time.c.seconds + seconds)
                if connection.execute(add).rowcount == 0:
                    connection.execute(sa.insert(engine_time).values(**row, seconds=seconds))

        return write

    def _credit(self, owner: Owner, seconds: float) -> None:
        if seconds > 0:
            key = (owner, int(time.time()) // HOUR)
            self._unwritten[key] = self._unwritten.get(key, 0.0) + seconds
