"""Projects: who owns what, and how much of the service each may use at once."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from ..errors import Conflict, InvalidRequest, NotFound
from ..limits import LIMITS, MIN_BODY_BYTES, PROJECT_LIMITS, Limits
from ..store.database import Database
from ..store.prepared import Prepared
from ..store.schema import projects
from .bodies import check_name

DEFAULT_PROJECT = "default"
"""That of a service without keys; always there."""
MAX_LIMIT = 2**53
"""What a JSON reader of any kind still takes for the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectInfo:
    """A project as an operator sees it.

    Attributes:
        created_at: Seconds since 1970; None for ``default``.
        limits: Those in force, by name.
        own_limits: Those among them that were set for this project.
    """

    project: str
    created_at: float | None
    limits: Mapping[str, int]
    own_limits: Mapping[str, int]

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


class Projects:
    """The projects of one database, which may be in use by a running service."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str) -> ProjectInfo:
        """A new project.

        Raises:
            Conflict: it exists. InvalidRequest: not a name (1 to 128 of ``A-Z a-z 0-9 . _ -``).
        """
        check_name(name)
        known = sa.select(projects.c.created_at).where(projects.c.id == name)

        def write(connection: sa.Connection) -> None:
            if connection.execute(known).one_or_none() is not None:
                raise Conflict(f"project {name} exists", details={"project": name})
            connection.execute(sa.insert(projects).values(id=name, busy_seconds=0.0, created_at=time.time()))

        await self._database.write(write)
        return await self.get(name)

    async def list(self) -> list[ProjectInfo]:
        """By name."""
        query = sa.select(projects.c.id, projects.c.created_at, projects.c.limits).order_by(projects.c.id)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [_project(row) for row in rows]

    async def get(self, name: str) -> ProjectInfo:
        """Raises `NotFound` where there is none of that name."""
        query = sa.select(projects.c.id, projects.c.created_at, projects.c.limits).where(projects.c.id == name)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise unknown_project(name)
        return _project(row)

    async def set_limits(self, name: str, changes: Mapping[str, int | None]) -> ProjectInfo:
        """Change some limits of a project; None goes back to the service's own. In force at once.

        Raises:
            NotFound: no such project. InvalidRequest: no such limit, or not a value that it can have.
        """
        for limit, value in changes.items():
            _check(limit, value)

        def write(connection: sa.Connection) -> None:
            mine = projects.c.id == name
            row = connection.execute(sa.select(projects.c.limits).where(mine)).one_or_none()
            if row is None:
                raise unknown_project(name)
            own = {**(row.limits or {}), **changes}
            kept = {limit: value for limit, value in own.items() if value is not None}
            connection.execute(sa.update(projects).where(mine).values(limits=kept or None))

        await self._database.write(write)
        return await self.get(name)

    async def limits(self, name: str) -> Limits:
        """What applies to a project now, whoever set it; quick enough for every request."""
        rows = await self._database.look_up(_FIND, {"project": name})
        return _effective(rows[0][0]) if rows else LIMITS


_FIND = Prepared(
    sa.select(sa.type_coerce(projects.c.limits, sa.String)).where(projects.c.id == sa.bindparam("project"))
)


def unknown_project(name: str) -> NotFound:
    return NotFound(f"no project {name}; `trainsession projects create {name}` makes it", details={"project": name})


@functools.lru_cache(maxsize=1024)
def _effective(own: str | None) -> Limits:
    """Of what other versions wrote only that which is a limit here; a reader must not fail on the rest."""
    values: Mapping[str, Any] = json.loads(own) if own is not None else {}
    known = {
        limit: max(MIN_BODY_BYTES, min(value, LIMITS.max_body_bytes))
        if limit == "max_body_bytes"
        else min(value, MAX_LIMIT)
        for limit, value in values.items()
        if limit in PROJECT_LIMITS and isinstance(value, int) and value >= 1
    }
    return replace(LIMITS, **known)


def _project(row: Any) -> ProjectInfo:
    own = row.limits or {}
    effective = _effective(json.dumps(own))
    return ProjectInfo(
        project=row.id,
        created_at=row.created_at,
        limits={limit: getattr(effective, limit) for limit in PROJECT_LIMITS},
        own_limits=own,
    )


def _check(limit: str, value: int | None) -> None:
    if limit not in PROJECT_LIMITS:
        raise InvalidRequest(
            f"no limit {limit!r} can be set for a project; these can: {', '.join(PROJECT_LIMITS)}",
            details={"key": limit},
        )
    if value is not None and not 1 <= value <= MAX_LIMIT:
        raise InvalidRequest(f"{limit}: expected at least 1 and at most {MAX_LIMIT}", details={"key": limit})
    if value is not None and limit == "max_body_bytes" and value < MIN_BODY_BYTES:
        raise InvalidRequest(
            f"max_body_bytes: expected at least {MIN_BODY_BYTES}, got {value}",
            details={"key": limit, "bound": MIN_BODY_BYTES, "value": value},
        )
    if value is not None and limit == "max_body_bytes" and value > LIMITS.max_body_bytes:
        # A body is measured against the service's own bound before it is known whose it is.
        raise InvalidRequest(
            f"max_body_bytes: a project's can only be lower than the service's {LIMITS.max_body_bytes}, got {value}",
            details={"key": limit, "bound": LIMITS.max_body_bytes, "value": value},
        )
