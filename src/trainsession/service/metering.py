"""Tokens, money and time: charges of an operation, busy seconds, the usage report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..engine.api import EngineHandle
from ..errors import NotFound
from ..store.schema import ledger, projects, sessions
from ..store.store import Store
from ..types import Usage, UsageReport
from .log import Charge
from .prices import KINDS, PriceTable, cost_of

_FLUSH_SECONDS = 5.0


def usage_to_wire(usage: Usage) -> dict[str, float]:
    return {**usage.tokens, "cost": usage.cost}


@dataclass(slots=True)
class _Busy:
    """An engine's work for one project or session: counted while at least one call of it is in flight."""

    in_flight: int = 0
    busy_at_start: float = 0.0


class Meter:
    """Charges operations and measures how long engines worked for whom."""

    def __init__(self, store: Store, prices: PriceTable) -> None:
        self._store = store
        self.prices = prices
        self._busy: dict[tuple[str, str, EngineHandle], _Busy] = {}
        self._unwritten: dict[tuple[str, str], float] = {}
        self._flushed_at = 0.0

    def charges(self, base_model: str, tokens: Mapping[str, int]) -> list[Charge]:
        """Ledger rows of an operation, at today's price."""
        return [
            Charge(kind=kind, tokens=count, price=self.prices.price(base_model, kind))
            for kind, count in tokens.items()
            if count
        ]

    def enter(self, handle: EngineHandle, project: str, session_id: str) -> None:
        """A call for this session goes to the engine; every `enter` needs its `leave`."""
        for key in (("project", project, handle), ("session", session_id, handle)):
            busy = self._busy.setdefault(key, _Busy(busy_at_start=handle.busy_seconds))
            busy.in_flight += 1

    def leave(self, handle: EngineHandle, project: str, session_id: str) -> None:
        for key in (("project", project, handle), ("session", session_id, handle)):
            busy = self._busy[key]
            busy.in_flight -= 1
            if busy.in_flight == 0:
                del self._busy[key]
                self._add(key[0], key[1], handle.busy_seconds - busy.busy_at_start)

    def _add(self, what: str, owner: str, seconds: float) -> None:
        self._unwritten[what, owner] = self._unwritten.get((what, owner), 0.0) + seconds

    def flush(self, at_once: bool = False) -> None:
        """Now and then, hand the seconds measured so far to the next transaction; a crash loses the last."""
        now = time.monotonic()
        if self._unwritten and (at_once or now >= self._flushed_at + _FLUSH_SECONDS):
            self._flushed_at = now
            self._store.write_lazily(self._take())

    def _take(self) -> Callable[[sa.Connection], None]:
        unwritten, self._unwritten = self._unwritten, {}

        def write(connection: sa.Connection) -> None:
            for (what, owner), seconds in unwritten.items():
                table = sessions if what == "session" else projects
                query = sa.update(table).where(table.c.id == owner).values(busy_seconds=table.c.busy_seconds + seconds)
                if connection.execute(query).rowcount == 0 and what == "project":
                    connection.execute(sa.insert(projects).values(id=owner, busy_seconds=seconds))

        return write

    async def usage(self, project: str, session_id: str | None = None) -> UsageReport:
        """Everything metered up to now, of one session or of all.

        Raises:
            NotFound: no such session in this project.
        """
        await self._store.write(self._take())
        mine = ledger.c.project == project
        session_rows = sa.select(sessions.c.id, sessions.c.created_at, sessions.c.closed_at, sessions.c.busy_seconds)
        session_rows = session_rows.where(sessions.c.project == project)
        if session_id is not None:
            mine = sa.and_(mine, ledger.c.session_id == session_id)
            session_rows = session_rows.where(sessions.c.id == session_id)
        sums = (
            sa.select(
                ledger.c.session_id,
                ledger.c.base_model,
                ledger.c.kind,
                sa.func.sum(ledger.c.tokens).label("tokens"),
                sa.func.sum(ledger.c.tokens * ledger.c.price).label("micro"),
            )
            .where(mine)
            .group_by(ledger.c.session_id, ledger.c.base_model, ledger.c.kind)
        )
        project_busy = sa.select(projects.c.busy_seconds).where(projects.c.id == project)

        def read(connection: sa.Connection) -> tuple[list[Any], list[Any], float]:
            return (
                list(connection.execute(sums)),
                list(connection.execute(session_rows)),
                connection.execute(project_busy).scalar() or 0.0,
            )

        rows, known, busy = await self._store.read(read)
        if session_id is not None:
            if not known:
                raise NotFound(f"no session {session_id} in this project")
            busy = known[0].busy_seconds
        return self._report(
            rows, known, busy + self._running("session" if session_id else "project", session_id or project)
        )

    def _running(self, what: str, owner: str) -> float:
        """Seconds of calls that are in flight now."""
        return sum(
            handle.busy_seconds - busy.busy_at_start
            for (kind, name, handle), busy in self._busy.items()
            if (kind, name) == (what, owner)
        )

    def _report(self, rows: list[Any], known: list[Any], busy: float) -> UsageReport:
        tokens: dict[str, dict[str, int]] = {row.id: {} for row in known}
        micro: dict[str, int] = {row.id: 0 for row in known}
        for row in rows:
            counts = tokens.setdefault(row.session_id, {})
            counts[row.kind] = counts.get(row.kind, 0) + int(row.tokens)
            micro[row.session_id] = micro.get(row.session_id, 0) + int(row.micro)
        by_session = {name: Usage(**counts, cost=cost_of(micro[name])) for name, counts in tokens.items()}
        total_tokens = {kind: sum(counts.get(kind, 0) for counts in tokens.values()) for kind in KINDS}
        now = time.time()
        wall = 0.0
        if known:
            ended = max(row.closed_at if row.closed_at is not None else now for row in known)
            wall = ended - min(row.created_at for row in known)
        return UsageReport(
            total=Usage(**total_tokens, cost=cost_of(sum(micro.values()))),
            by_session=by_session,
            prices=self.prices.shown({row.base_model for row in rows}),
            currency=self.prices.currency,
            wall_seconds=wall,
            busy_seconds=busy,
        )
